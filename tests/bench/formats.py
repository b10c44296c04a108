"""Validation loss of a small GPT with optimizer states in each format, relative to fp32 states.

    python tests/bench/formats.py [--steps 600] [--seed 0] [--kinds SGD Adagrad] [--forms int8]

Byte tokens of this repository's documentation; one run a format, the same batches and start for all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import deepc
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
from tiny import make_model

CONTEXT, FORMS = 64, ("bf16", "int8", "int4")
CASES = {
    "AdamW": (3e-3, {"weight_decay": 0.01}),
    "Lion": (5e-4, {"weight_decay": 0.1}),
    "SGD": (0.3, {"momentum": 0.9}),
    "Adagrad": (2e-2, {}),
    "Lamb": (1e-2, {"weight_decay": 0.01}),
    "Muon": (2e-2, {"weight_decay": 0.01, "adam_lr": 3e-3}),
}


def tokens() -> torch.Tensor:
    text = b"".join(p.read_bytes() for p in sorted((ROOT / "docs").glob("*.md")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % 128


def batch(data: torch.Tensor, seed: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.randint(len(data) - CONTEXT - 1, (samples,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[i : i + CONTEXT] for i in at]), torch.stack([data[i + 1 : i + CONTEXT + 1] for i in at])


def train(kind: str, form: str | None, steps: int, data: torch.Tensor, seed: int = 0) -> float:
    """The validation loss."""
    lr, options = CASES[kind]
    model = make_model(seed, width=96, layers=2, vocab=128, context=CONTEXT)
    opt, cut = getattr(deepc.optim, kind)(model.parameters(), lr=lr, state_dtype=form, **options), len(data) * 9 // 10
    rates = [group["lr"] for group in opt.param_groups]
    for step in range(steps):
        for group, rate in zip(opt.param_groups, rates):
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
        model(*batch(data[:cut], step, 16)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        return sum(model(*batch(data[cut:], 10**6 + k, 64)).item() for k in range(8)) / 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the model's first weights")
    parser.add_argument("--kinds", nargs="+", choices=CASES, default=list(CASES), help="of optimizers")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    args, data = parser.parse_args(), tokens()
    steps, seed = args.steps, args.seed
    for kind in args.kinds:
        whole = train(kind, None, steps, data, seed)
        for form in args.forms:
            if kind == "Muon" and form == "int4":  # an error that says why
                continue
            print(f"{kind} {form}: {train(kind, form, steps, data, seed) / whole:.4f} of {whole:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
