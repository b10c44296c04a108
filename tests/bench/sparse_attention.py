"""Block-sparse attention on a CPU beside torch's: time at densities from 5 % up, peak memory, and the longest sequence
in a memory limit.

    python tests/bench/sparse_attention.py --quick                        (under 40 s on 2 cores)
    python tests/bench/sparse_attention.py --tokens 1024 4096 16384 65536 --rounds 5 [--flex]
    python tests/bench/sparse_attention.py --memory --tokens 4096 8192 16384
    python tests/bench/sparse_attention.py --longest 2048                 (a limit in MiB)
    python tests/bench/sparse_attention.py --tokens 256 2048 --queries 1  (dense; as text is made token by token)

12 heads of 64. Contenders take turns in one process: scaled_dot_product_attention ("SDPA"; causal; with the 10 %
layout as a bool mask), FlexAttention compiled for the same layout (--flex; forward, it has no backward on CPUs), deepc
dense and deepc at each density: each block of queries sees a random choice of blocks of keys. Figures: forward, and
forward and backward. A density's ratio is that density times dense deepc over its own time: 1 is the ideal, 0.83 is 1.2
times it. Memory: what one forward and backward adds to the process's peak, in a process of its own. --longest: the
longest sequence that SDPA with a mask trains in a process of its own in a memory cgroup of that limit (needs root), and
whether deepc at 10 % density trains one of ten times its length."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from common import cpu_model, emit, paired, require_deepc, skip
from limited import Cgroup

BENCH, DIM = "sparse_attention", 64
DENSITIES = (0.05, 0.1, 0.25, 0.5, 1.0)
MASK_MOST = 8192  # tokens: above, dense with a mask takes minutes and GBs


def inputs(tokens: int, dtype: str, heads: int = 12, queries: int | None = None):
    """(q, k, v, dout)"""
    import torch

    torch.manual_seed(0)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    queries = queries or tokens
    q, k, v, dout = (torch.randn(1, heads, n, DIM).to(kind) for n in (queries, tokens, tokens, queries))
    return [x.requires_grad_() for x in (q, k, v)], dout


def layout_of(tokens: int, block: int, density: float):
    """[1, blocks, blocks]; every block of queries sees as many blocks of keys."""
    import torch

    n = -(-tokens // block)
    torch.manual_seed(1)
    seen = torch.rand(n, n).topk(max(1, round(density * n)), dim=1).indices
    return torch.zeros(n, n, dtype=torch.uint8).scatter_(1, seen, 1).unsqueeze(0)


def mask_of(layout, block: int):
    return layout[0].bool().repeat_interleave(block, 0).repeat_interleave(block, 1)


def flex(layout, block: int, tokens: int):
    """FlexAttention of the layout, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen = layout[0].bool()
    mask = create_block_mask(
        lambda b, h, i, j: seen[i // block, j // block], None, None, tokens, tokens, device="cpu", BLOCK_SIZE=128
    )
    compiled = torch.compile(flex_attention)

    def run(q, k, v):
        with torch.no_grad():
            return compiled(q.detach(), k.detach(), v.detach(), block_mask=mask)  # it refuses what wants a gradient

    return run


def contenders(tokens: int, block: int, args) -> dict:
    """Name -> (function of q, k, v; density; has a backward)"""
    import torch.nn.functional as F
    from deepc.core import ops

    if args.queries:
        return {"SDPA": (F.scaled_dot_product_attention, 1.0, False), "deepc, dense": (ops.attention, 1.0, False)}
    ten = layout_of(tokens, block, 0.1)
    out = {
        "SDPA": (F.scaled_dot_product_attention, 1.0, True),
        "SDPA, causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 1.0, True),
        "deepc, dense": (ops.attention, 1.0, True),
        "deepc, dense, causal": (lambda q, k, v: ops.attention(q, k, v, is_causal=True), 1.0, True),
    }
    if tokens <= args.mask_most:
        mask = mask_of(ten, block)
        out["SDPA, mask"] = (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), 1.0, True)
    if args.flex:
        out["FlexAttention, 10 %"] = (flex(ten, block, tokens), ten.float().mean().item(), False)
    for d in args.densities:
        layout = layout_of(tokens, block, d)
        real = layout.float().mean().item()
        out[f"deepc, {d:.0%}"] = (
            lambda q, k, v, layout=layout: ops.block_sparse_attention(q, k, v, layout, block),
            real,
            True,
        )
    return {n: c for n, c in out.items() if not args.only or n in args.only}


def measure(tokens: int, dtype: str, block: int, args) -> None:
    (q, k, v), dout = inputs(tokens, dtype, args.heads, args.queries)
    clock = time.process_time if args.cpu_time else time.perf_counter
    them = contenders(tokens, block, args)
    forward: dict[str, list[float]] = {n: [] for n in them}
    both: dict[str, list[float]] = {n: [] for n, (_, _, back) in them.items() if back}
    for r in range(-1, args.rounds):
        for name, (run, _, back) in them.items():
            begin = clock()
            out = run(q, k, v)
            middle = clock()
            if back:
                out.backward(dout)
            end = clock()
            q.grad = k.grad = v.grad = None
            if r >= 0:
                forward[name].append(1e3 * (middle - begin))
                if back:
                    both[name].append(1e3 * (end - begin))
    for what, times in (("forward", forward), ("forward and backward", both)):
        of = f"{args.queries} of {tokens} tokens" if args.queries else f"{tokens} tokens, blocks of {block}"
        tell(f"{what}, {dtype}, {of}", them, times, args)


def tell(figure: str, them: dict, times: dict[str, list[float]], args) -> None:
    more = {
        "threads": args.threads,
        "heads": args.heads,
        "clock": "CPU" if args.cpu_time else "wall",
        "heap": args.heap,
        "processor": cpu_model(),
    }
    dense = times.get("deepc, dense")
    for name, values in times.items():
        real = them[name][1]
        ratio, peer = None, None
        if dense and (name.endswith("%")):
            ratio, peer = paired([real * t for t in dense], values), f"{real:.3f} of deepc, dense"
        emit(BENCH, figure, name, "ms", values, ratio=ratio, peer=peer, density=real, **more)
    for mine, peer in (
        ("deepc, dense", "SDPA"),
        ("deepc, dense, causal", "SDPA, causal"),
        ("deepc, 10%", "SDPA, causal"),
        ("deepc, 10%", "SDPA, mask"),
        ("deepc, 10%", "FlexAttention, 10 %"),
    ):
        if mine in times and peer in times:
            emit(BENCH, figure, mine, "ms", times[mine], ratio=paired(times[peer], times[mine]), peer=peer, **more)


# ---- memory ----------------------------------------------------------------------------------------------------------
def status(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) * 1024


def train_once(what: str, tokens: int, dtype: str, block: int, heads: int) -> None:
    import torch.nn.functional as F
    from deepc.core import ops

    (q, k, v), dout = inputs(tokens, dtype, heads)
    layout = layout_of(tokens, block, 0.1)
    if what == "deepc":
        out = ops.block_sparse_attention(q, k, v, layout, block)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(layout, block))
    out.backward(dout)


def alone(what: str, tokens: int, dtype: str, args, limit: int = 0) -> int | None:
    """In a process of its own: bytes that one training step adds to the peak; None: more than the limit (MiB)."""
    command = [sys.executable, __file__, "--one", what, "--tokens", str(tokens), "--dtypes", dtype]
    command += ["--threads", str(args.threads), "--blocks", str(args.blocks[0]), "--heads", str(args.heads)]
    group = Cgroup(limit << 20) if limit else None
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=group.join if group else None)
    if group:
        group.close()
    if done.returncode == 0:
        return int(done.stdout.split()[-1])
    if limit and ("memory" in done.stderr or "alloc" in done.stderr or done.returncode < 0):
        return None
    sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")


def one(what: str, tokens: int, dtype: str, args) -> None:
    train_once(what, 128, dtype, args.blocks[0], args.heads)  # libraries and threads are there
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # VmHWM starts again from the resident size
    before = status("VmRSS")
    train_once(what, tokens, dtype, args.blocks[0], args.heads)
    print(status("VmHWM") - before)


def memory(args) -> None:
    for dtype in args.dtypes:
        for tokens in args.tokens:
            figure = f"peak memory of a training step, {dtype}, {tokens} tokens, 10 %"
            mine = alone("deepc", tokens, dtype, args)
            theirs = alone("SDPA, mask", tokens, dtype, args) if tokens <= args.mask_most else None
            emit(BENCH, figure, "deepc", "MiB", [mine / 2**20], bytes_per_token=round(mine / tokens))
            if theirs is not None:
                emit(BENCH, figure, "SDPA, mask", "MiB", [theirs / 2**20], bytes_per_token=round(theirs / tokens))


def longest(args) -> None:
    for dtype in args.dtypes:
        fits, tokens = 0, 1024
        while alone("SDPA, mask", tokens, dtype, args, args.longest) is not None:
            fits, tokens = tokens, tokens + 1024
        emit(BENCH, f"longest training step in {args.longest} MiB, {dtype}", "SDPA, mask", "tokens", [fits])
        mine = 10 * fits
        while mine and alone("deepc", mine, dtype, args, args.longest) is None:
            mine -= fits
        emit(
            BENCH,
            f"longest training step in {args.longest} MiB, {dtype}, of 10 times that",
            "deepc",
            "tokens",
            [mine],
            ratio=mine / fits if fits else None,
            peer="SDPA, mask",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[64])
    parser.add_argument("--densities", nargs="+", type=float, default=list(DENSITIES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--queries", type=int, help="so many; default: as many as tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flex", action="store_true", help="FlexAttention too: compiles for a minute")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="dense ones take minutes at 64 k")
    parser.add_argument("--mask-most", type=int, default=MASK_MOST, metavar="TOKENS")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--cpu-time", action="store_true", help="with --threads 1: for machines that other work shares")
    parser.add_argument("--heap", action="store_true", help="all tensors from deepc's heap, as in a training under it")
    parser.add_argument("--quick", action="store_true", help="what `make bench` runs")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--longest", type=int, metavar="MIB")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.densities = [2048], [0.1, 0.5]
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    require_deepc()
    import torch

    torch.set_num_threads(args.threads)
    if args.one:
        one(args.one, args.tokens[0], args.dtypes[0], args)
        return
    if args.longest:
        longest(args)
        return
    if args.memory:
        memory(args)
        return
    if args.heap:
        from deepc.core.ops import use_heap

        use_heap(True)
    if not args.flex:
        skip(BENCH, "FlexAttention", "--flex was not given")
    for tokens in args.tokens:
        for dtype in args.dtypes:
            for block in args.blocks:
                measure(tokens, dtype, block, args)


if __name__ == "__main__":
    main()
