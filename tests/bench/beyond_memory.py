"""Training of a model whose states are a multiple of the memory: parameters, gradients and optimizer states on NVMe,
in a memory cgroup, beside the same training in memory without a limit (the losses must be equal, bit for bit) and
beside plain DistributedDataParallel with the same limit.

    sudo python tests/bench/beyond_memory.py --folder /nvme [--ratio 10] [--ranks 1] [--precision fp32] [--json out]

States: 16 bytes a parameter in fp32 (parameter, gradient, two moments), 18 in bf16 (parameter, master, gradient, two
moments). The limit is states / ratio for all ranks together. Needs root: a cgroup (v1 or v2) is made and removed. A row
says what became of it, the median of the seconds per step behind the first, the peak that the kernel counted (with
cached pages of files) and the highest sum of private and shared memory that was seen."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from limited import run_limited


# ---- the work of one process -----------------------------------------------------------------------------------------
def make_model(a):
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(a.width), nn.LayerNorm(a.width)
            self.qkv, self.proj = nn.Linear(a.width, 3 * a.width), nn.Linear(a.width, a.width)
            self.up, self.down = nn.Linear(a.width, 4 * a.width), nn.Linear(4 * a.width, a.width)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, c // 64, 64).permute(2, 0, 3, 1, 4)
            x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
            return x + self.down(F.gelu(self.up(self.ln2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.pos = nn.Embedding(a.vocab, a.width), nn.Embedding(a.context, a.width)
            self.blocks = nn.ModuleList(Block() for _ in range(a.layers))
            self.ln = nn.LayerNorm(a.width)
            self.head = nn.Linear(a.width, a.vocab, bias=False)
            self.head.weight = self.tok.weight

        def forward(self, x, y):
            h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return F.cross_entropy(self.head(self.ln(h)).float().flatten(0, 1), y.flatten())

    torch.manual_seed(0)
    return GPT()


def batch(a, step: int, rank: int):
    import torch

    g = torch.Generator().manual_seed(1000 * rank + step)
    data = torch.randint(a.vocab, (a.batch, a.context + 1), generator=g)
    return data[:, :-1], data[:, 1:]


def config(a, folder: str) -> dict:
    zero: dict = {
        "stage": 3,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 14 * a.width * a.width,
        "reduce_bucket_size": 1 << 20,
    }
    if folder:
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder}
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": a.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "bf16": {"enabled": a.precision == "bf16"},
    }


def deepc_steps(a, folder: str) -> dict:
    import deepc
    import torch.distributed as dist

    cfg = config(a, folder)
    deepc.init_distributed()
    rank = dist.get_rank()
    start = time.monotonic()
    with deepc.zero.Init(config_dict_or_path=cfg):
        model = make_model(a)
    engine = deepc.initialize(model=model, config=cfg)[0]
    out: dict = {"set-up s": time.monotonic() - start, "losses": [], "seconds": []}
    for step in range(a.steps):
        x, y = batch(a, step, rank)
        begin = time.monotonic()
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        out["seconds"].append(time.monotonic() - begin)
        out["losses"].append(loss.item())
        say(f"step {step}: loss {out['losses'][-1]:.6f}, {out['seconds'][-1]:.2f} s")
    engine.destroy()
    return out


def ddp_steps(a, folder: str) -> dict:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(make_model(a))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    out: dict = {"losses": [], "seconds": []}
    for step in range(a.steps):
        x, y = batch(a, step, dist.get_rank())
        begin = time.monotonic()
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out["seconds"].append(time.monotonic() - begin)
        out["losses"].append(loss.item())
    return out


def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"    {text}", file=sys.stderr, flush=True)


def child(a) -> None:
    import torch

    torch.set_num_threads(a.threads)
    out = (ddp_steps if a.work == "ddp" else deepc_steps)(a, a.folder if a.work == "nvme" else "")
    if os.environ["RANK"] == "0":
        Path(a.result).write_text(json.dumps(out))


# ---- a run -----------------------------------------------------------------------------------------------------------
def run(a, work: str, limit: int) -> dict:
    """All ranks of one training; {"ended": "fine", "killed" or the codes, "peak": bytes, ...}."""
    private = [0]

    def watch(pids: list[int]) -> None:
        private[0] = max(private[0], sum(map(_anonymous, pids)))

    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        begin = time.monotonic()
        ended, peak = run_limited(limit, ["--work", work, "--result", str(result)], a.ranks, a.port, watch)
        row = {"work": work, "limit": limit, "ended": ended, "peak": peak, "private": private[0]}
        row["wall s"] = round(time.monotonic() - begin, 1)
        if result.exists():
            row |= json.loads(result.read_text())
            row["s per step"] = round(statistics.median(row["seconds"][1:] or row["seconds"]), 2)
    return row


def _anonymous(pid: int) -> int:
    """Private and shared anonymous bytes of a process (RssAnon + RssShmem)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="on the disk to be measured")
    parser.add_argument("--ratio", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    for name, default in (
        ("layers", 48),
        ("width", 768),
        ("vocab", 8192),
        ("context", 64),
        ("batch", 1),
        ("steps", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="nvme,memory,ddp")
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--json", default="")
    parser.add_argument("--work", default="")
    parser.add_argument("--result", default="")
    a = parser.parse_args()
    if a.work:
        return child(a)
    params = a.layers * (12 * a.width**2 + 13 * a.width) + (a.vocab + a.context + 2) * a.width
    states = params * (16 if a.precision == "fp32" else 18)
    limit = int(states / a.ratio) // 4096 * 4096
    print(
        f"{params / 1e6:.1f} M parameters, states {states / 2**20:,.0f} MiB, limit {limit / 2**20:,.0f} MiB", flush=True
    )
    rows = []
    for work in a.only.split(","):
        row = run(a, work, 0 if work == "memory" else limit)
        rows.append(row)
        shown = {k: v for k, v in row.items() if k not in ("losses", "seconds")}
        print(
            json.dumps(
                shown | {"peak": f"{row['peak'] / 2**20:,.0f} MiB", "private": f"{row['private'] / 2**20:,.0f} MiB"}
            )
        )
        print("  losses", row.get("losses"), flush=True)
    by = {row["work"]: row for row in rows}
    if "nvme" in by and "memory" in by:
        print(
            "losses of nvme and memory are",
            "equal" if by["nvme"].get("losses") == by["memory"].get("losses") else "DIFFERENT",
        )
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
