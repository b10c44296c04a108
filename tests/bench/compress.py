"""Compression on one thread: ns per element of deepc's kernels beside the same arithmetic composed of PyTorch's
operators, and beside a plain copy.

    python tests/bench/compress.py [--elements 16777216] [--threads 1] [--rounds 7]

Each contender does the whole step in one call: x + error to payload with error feedback, or payload back to fp32. The
composed 1-bit compression is add, abs, mean per block, sign, subtract, and packing of the signs into bytes; the
composed top-k is torch.topk per block and scatter."""

from __future__ import annotations

import argparse

from common import emit, paired, require_deepc, rounds

COPY = "copy of fp32 (torch)"


def composed_onebit(x, error, block):
    """1-bit with error feedback of PyTorch operators; returns (scales, bits)."""
    import torch

    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)

    def run():
        v = x + error
        scales = v.view(-1, block).abs().mean(1, keepdim=True)
        negative = v < 0
        torch.sub(v, torch.where(negative.view(-1, block), -scales, scales).view(-1), out=error)
        return scales, (negative.view(-1, 8) * weights).sum(1, dtype=torch.uint8)

    return run


def composed_unpack(scales, bits, out, block):
    import torch

    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)

    def run():
        negative = (bits.unsqueeze(1) & weights).ne(0)
        out.copy_(torch.where(negative.view(-1, block), -scales, scales).view(-1))

    return run


def composed_int8(x, error, block):
    import torch

    def run():
        v = x + error
        scales = v.view(-1, block).abs().amax(1, keepdim=True) / 127
        codes = (v.view(-1, block) / scales).round_().clamp_(-127, 127)
        torch.sub(v, (codes * scales).view(-1), out=error)
        return scales, codes.to(torch.int8)

    return run


def composed_topk(x, error, block, k):
    import torch

    def run():
        v = torch.add(x, error, out=error).view(-1, block)
        index = v.abs().topk(k, dim=1).indices
        values = v.gather(1, index)
        v.scatter_(1, index, 0.0)
        return values, index.to(torch.int16)

    return run


def contenders(n: int) -> tuple[dict, dict]:
    """(name -> call, name -> peers)."""
    import torch
    from deepc.compress import Int4Blocks, Int8Blocks, OneBit, TopK

    x, out, error = torch.randn(n), torch.empty(n), torch.zeros(n)
    calls, peers = {COPY: lambda: out.copy_(x)}, {}
    for codec in (OneBit(), Int8Blocks(), Int4Blocks(), TopK(0.01)):
        payload = torch.empty(codec.nbytes(n), dtype=torch.uint8)
        codec.encode(payload, x, error)
        name = type(codec).__name__
        calls[f"{name}: encode with error feedback"] = lambda c=codec, p=payload: c.encode(p, x, error)
        calls[f"{name}: encode"] = lambda c=codec, p=payload: c.encode(p, x)
        calls[f"{name}: decode"] = lambda c=codec, p=payload: c.decode(out, p)
        calls[f"{name}: decode and add"] = lambda c=codec, p=payload: c.decode_add(out, p)
    calls["rotation in place"] = lambda: torch.ops.deepc.rotate_blocks(out)
    calls["product in place (torch)"] = lambda: out.mul_(1.0)  # the rotation's memory traffic, 8 bytes an element
    peers["rotation in place"] = "product in place (torch)"
    pack = composed_onebit(x, torch.zeros(n), 2048)
    for name, peer, call in (
        ("OneBit: encode with error feedback", "composed 1-bit", pack),
        ("OneBit: decode", "composed 1-bit decode", composed_unpack(*pack(), out, 2048)),
        ("Int8Blocks: encode with error feedback", "composed int8", composed_int8(x, torch.zeros(n), 2048)),
        ("TopK: encode with error feedback", "composed top-k", composed_topk(x, torch.zeros(n), 4096, 41)),
    ):
        calls[peer + " (torch)"], peers[name] = call, peer + " (torch)"
    return calls, peers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=16 << 20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    require_deepc()
    import torch

    torch.set_num_threads(args.threads)
    n = args.elements // 4096 * 4096
    calls, peers = contenders(n)
    times = {name: [1e6 * t / n for t in ms] for name, ms in rounds(calls, args.rounds).items()}
    shared = {"elements": n, "threads": args.threads}
    for name, values in times.items():
        emit("compress", "kernel", name, "ns/element", values, **shared)
        if name != COPY:
            emit(
                "compress", "kernel", name, "ns/element", values, ratio=paired(times[COPY], values), peer=COPY, **shared
            )
        if name in peers:
            emit(
                "compress",
                "kernel",
                name,
                "ns/element",
                values,
                ratio=paired(times[peers[name]], values),
                peer=peers[name],
                **shared,
            )


if __name__ == "__main__":
    main()
