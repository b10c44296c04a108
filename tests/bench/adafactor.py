"""Time of Adafactor's step: deepc's, torch's, and deepc's AdamW, in turn on tensors of a GPT of 30 M parameters.

python tests/bench/adafactor.py [--rounds 11] [--threads 1] [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time

import deepc
import torch

WIDTH, BLOCKS, VOCAB = 384, 6, 50257


def parameters(device: str) -> list[torch.nn.Parameter]:
    """With gradients."""
    torch.manual_seed(0)
    shapes = [(VOCAB, WIDTH), (WIDTH,)]
    block = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (4 * WIDTH,)]
    found = [torch.nn.Parameter(0.02 * torch.randn(s, device=device)) for s in shapes + BLOCKS * block]
    for p in found:
        p.grad = 1e-3 * torch.randn_like(p)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds = {
        "deepc Adafactor": deepc.optim.Adafactor,
        "torch Adafactor": torch.optim.Adafactor,
        "deepc AdamW": deepc.optim.AdamW,
    }
    optimizers = {name: kind(parameters(args.device)) for name, kind in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds + 2):  # two to warm up
        for name, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            if args.device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begin)
    mine = times["deepc Adafactor"][2:]
    for name, found in times.items():
        ratio = statistics.median(t / m for t, m in zip(found[2:], mine))
        print(f"{name}: median {1e3 * statistics.median(found[2:]):.1f} ms, {ratio:.2f} of deepc's Adafactor")


if __name__ == "__main__":
    main()
