"""Linear + cross-entropy, forward and backward: deepc by chunks against plain torch (F.linear, F.cross_entropy), time
and memory.

    python tests/bench/linear_ce.py --threads 1 --rounds 5 [--cases 2048x384-bf16 4096x768-fp32]

Contenders take turns in one process. torch: logits in the model's dtype, cross_entropy on them as they are. "upcast":
on logits.float(), as transformers' models do it (16-bit only). Memory: what one call adds to the process's peak (VmHWM
above the resident size before the call), gradients included, in a process of its own per contender."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from common import emit, report, require_deepc, rounds

VOCAB = 50257
CASES = ["2048x384-fp32", "4096x384-fp32", "2048x768-fp32", "2048x384-bf16", "4096x384-bf16", "4096x768-bf16"]
TINY = ["256x64-fp32", "256x64-bf16"]


def case_of(name: str):
    shape, _, dtype = name.partition("-")
    tokens, width = shape.split("x")
    return int(tokens), int(width), dtype


def subject(name: str, vocab: int):
    """(hidden, weight, labels), the first two leaves that want gradients."""
    import torch

    tokens, width, dtype = case_of(name)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).to(kind).requires_grad_()
    weight = (torch.randn(vocab, width) * 0.02).to(kind).requires_grad_()
    return hidden, weight, torch.randint(vocab, (tokens,))


def losses(name: str) -> dict:
    """Contender -> loss of (hidden, weight, labels)."""
    import deepc
    import torch.nn.functional as F

    out = {
        "deepc": lambda h, w, y: deepc.linear_cross_entropy(h, w, y),
        "torch": lambda h, w, y: F.cross_entropy(F.linear(h, w), y),
    }
    if case_of(name)[2] != "fp32":
        out["torch, upcast"] = lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y)
    return out


def step(loss, hidden, weight, labels) -> float:
    hidden.grad = weight.grad = None
    value = loss(hidden, weight, labels)
    value.backward()
    return value.item()


def status(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) * 1024


def memory_of(name: str, contender: str, vocab: int) -> int:
    """In this process: bytes that one step adds to the peak. The step before it is a small one, so that libraries are
    loaded."""
    loss = losses(name)[contender]
    step(loss, *subject("32x64-" + case_of(name)[2], 1000))
    args = subject(name, vocab)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # VmHWM starts again from the resident size
    before = status("VmRSS")
    step(loss, *args)
    return status("VmHWM") - before


def measured_memory(name: str, contender: str, args) -> float:
    out = subprocess.run(
        [
            sys.executable,
            __file__,
            "--memory-of",
            contender,
            "--cases",
            name,
            "--vocab",
            str(args.vocab),
            "--threads",
            str(args.threads),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return int(out.split()[-1]) / 2**20


def measure(name: str, args) -> None:
    loss, data = losses(name), subject(name, args.vocab)
    contenders = {n: lambda fn=fn: step(fn, *data) for n, fn in loss.items()}
    peers = [n for n in contenders if n != "deepc"]
    times = rounds(contenders, args.rounds)
    report(
        "linear_ce",
        f"forward and backward {name}",
        "ms",
        times,
        {"deepc": [peers]},
        threads=args.threads,
        vocab=args.vocab,
    )
    used = {n: measured_memory(name, n, args) for n in contenders}
    for n, value in used.items():
        emit("linear_ce", f"peak memory {name}", n, "MiB", [value], threads=args.threads, vocab=args.vocab)
    for n in peers:
        emit(
            "linear_ce",
            f"peak memory {name}",
            "deepc",
            "MiB",
            [used["deepc"]],
            ratio=used[n] / used["deepc"],
            peer=n,
            threads=args.threads,
            vocab=args.vocab,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=None, metavar="TOKENSxWIDTH-DTYPE")
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="seconds: proves that it runs")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.vocab, args.rounds = 1000, 2
    cases = args.cases or (TINY if args.tiny else CASES)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    require_deepc()
    import torch

    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(memory_of(cases[0], args.memory_of, args.vocab))
        return
    for name in cases:
        measure(name, args)


if __name__ == "__main__":
    main()
