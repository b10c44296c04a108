"""Validation loss of 1-bit Adam, 0/1 Adam and 1-bit LAMB beside AdamW and LAMB, which average gradients uncompressed.

    python tests/bench/onebit_training.py [--steps 600] [--seeds 3] [--ranks 2] [--svg FILE]

Three jobs: a small GPT on bytes of Python's own documentation (pydoc_data: the same text in every run of one Python), a
convolutional classifier of made images (shifted patterns under noise), a tagger of sequences (the hidden states of a
made Markov model). Ranks are processes, one thread each; the same batches, first weights and schedule for all. Prints
the ratio of the final validation losses, the mean over seeds and each, and what a rank sent."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
from ranks import run_ranks
from tiny import TinyGPT

EVERY = 25  # steps between two points of a curve
BETAS = (0.9, 0.99)
LOCAL = {"var_freeze_step": 0.2, "var_update_scaler": 16, "local_step_scaler": 0.25, "local_step_clipper": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("adam", {}),
    "OneBitAdam": ("adam", {"freeze_step": 0.2}),
    "OneBitAdam bounded": ("adam", {"freeze_step": 0.2, "max_update": 1.0}),
    "OneBitAdam rotated": ("adam", {"freeze_step": 0.2, "max_update": 1.0, "rotated": True}),
    "OneBitAdam auto": ("adam", {"freeze_step": "auto", "max_update": 1.0}),
    "ZeroOneAdam": ("adam", LOCAL),
    "ZeroOneAdam bounded": ("adam", {**LOCAL, "max_update": 1.0}),
    "ZeroOneAdam meeting": ("adam", {**LOCAL, "max_update": 1.0, "local_step_clipper": 1}),
    "ZeroOneAdam later": ("adam", {**LOCAL, "max_update": 1.0, "var_freeze_step": 0.5}),
    "ZeroOneAdam plain": ("adam", {**LOCAL, "max_update": 1.0, "var_update_scaler": 1000}),
    "ZeroOneAdam preconditioned": ("adam", {**LOCAL, "max_update": 1.0, "preconditioned": True}),
    "OneBitAdam preconditioned": ("adam", {"freeze_step": 0.2, "max_update": 1.0, "preconditioned": True}),
    "OneBitAdam preconditioned rotated": (
        "adam",
        {"freeze_step": 0.2, "max_update": 1.0, "preconditioned": True, "rotated": True},
    ),
    "OneBitLamb auto": ("lamb", {"freeze_step": "auto", "max_update": 1.0}),
    "Lamb": ("lamb", {}),
    "OneBitLamb": ("lamb", {"freeze_step": 0.2}),
    "OneBitLamb later": ("lamb", {"freeze_step": 0.5, "max_update": 1.0}),
    "OneBitLamb live": ("lamb", {"freeze_step": 0.2, "max_update": 1.0, "ratios": "live"}),
    "OneBitLamb rotated": ("lamb", {"freeze_step": 0.2, "max_update": 1.0, "ratios": "live", "rotated": True}),
    "OneBitLamb rotated later": ("lamb", {"freeze_step": 0.5, "max_update": 1.0, "ratios": "live", "rotated": True}),
    "OneBitLamb frozen rotated": ("lamb", {"freeze_step": 0.2, "max_update": 1.0, "rotated": True}),
    "OneBitLamb live later": ("lamb", {"freeze_step": 0.5, "max_update": 1.0, "ratios": "live"}),
    "OneBitLamb bounded": ("lamb", {"freeze_step": 0.2, "max_update": 1.0}),
}
LR = {"gpt": {"adam": 3e-3, "lamb": 2e-2}, "images": {"adam": 2e-3, "lamb": 2e-2}, "tags": {"adam": 3e-3, "lamb": 2e-2}}
Loss = Callable[[nn.Module, int, int, bool], torch.Tensor]  # (model, number of the batch, samples, validation?)


# ---- the jobs --------------------------------------------------------------------------------------------------------
def gpt() -> tuple[nn.Module, Loss]:
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data, context = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % 128, 48
    cut = len(data) * 9 // 10

    def loss(model: nn.Module, number: int, samples: int, validation: bool) -> torch.Tensor:
        part, g = data[cut:] if validation else data[:cut], torch.Generator().manual_seed(number)
        at = torch.randint(len(part) - context - 1, (samples,), generator=g)
        rows = torch.stack([part[i : i + context + 1] for i in at])
        return model(rows[:, :-1], rows[:, 1:])

    return TinyGPT(width=64, layers=2, vocab=128, context=context), loss


def images() -> tuple[nn.Module, Loss]:
    g = torch.Generator().manual_seed(1)
    patterns = F.interpolate(torch.randn(10, 1, 4, 4, generator=g), size=(16, 16), mode="bicubic")[:, 0]

    def loss(model: nn.Module, number: int, samples: int, validation: bool) -> torch.Tensor:
        g = torch.Generator().manual_seed(number)
        labels = torch.randint(10, (samples,), generator=g)
        moves = torch.randint(-3, 4, (samples, 2), generator=g).tolist()
        x = torch.stack([patterns[c].roll(tuple(m), (0, 1)) for c, m in zip(labels.tolist(), moves)])
        x = x + 1.6 * torch.randn(x.shape, generator=g)
        return F.cross_entropy(model(x[:, None]), labels)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    return model, loss


def tags() -> tuple[nn.Module, Loss]:
    g = torch.Generator().manual_seed(2)
    states, words, length = 8, 64, 24
    move = torch.softmax(2.0 * torch.randn(states, states, generator=g), 1)
    say = torch.softmax(1.5 * torch.randn(states, words, generator=g), 1)

    def loss(model: nn.Module, number: int, samples: int, validation: bool) -> torch.Tensor:
        g = torch.Generator().manual_seed(number)
        hidden = [torch.randint(states, (samples,), generator=g)]
        for _ in range(length - 1):
            hidden.append(torch.multinomial(move[hidden[-1]], 1, generator=g)[:, 0])
        y = torch.stack(hidden, 1)
        x = torch.multinomial(say[y.flatten()], 1, generator=g).view(samples, length)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, 48)
            self.mix = nn.ModuleList(nn.Conv1d(48, 48, 5, padding=2) for _ in range(3))
            self.out = nn.Linear(48, states)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.words(x).transpose(1, 2)
            for layer in self.mix:
                h = h + F.gelu(layer(h))
            return self.out(h.transpose(1, 2))

    return Tagger(), loss


JOBS = {"gpt": (gpt, 8), "images": (images, 16), "tags": (tags, 8)}  # samples of a rank


# ---- training --------------------------------------------------------------------------------------------------------
def train(job: str, kind: str, steps: int, seed: int) -> dict[str, Any]:
    import deepc

    rank, world = dist.get_rank(), dist.get_world_size()
    make, samples = JOBS[job]
    torch.manual_seed(seed)
    model, loss_of = make()
    family, options = KINDS[kind]
    options = {
        k: max(1, int(v * steps)) if isinstance(v, float) and k != "max_update" else v for k, v in options.items()
    }
    if options:  # 1-bit: two ranks of this machine stand for two nodes
        options["hierarchical"] = False
    lr, cls = LR[job][family], getattr(deepc.optim, kind.split()[0])
    opt = cls(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.01, **options)
    curve = []
    for step in range(steps):
        opt.param_groups[0]["lr"] = lr * min(1, (step + 1) / (0.1 * steps)) * (1 - 0.95 * step / steps)
        loss_of(model, (seed * 10**6 + step) * world + rank, samples, False).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if kind in ("AdamW", "Lamb"):
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            for p, g in zip(model.parameters(), (flat / world).split([p.numel() for p in model.parameters()])):
                p.grad.copy_(g.view(p.shape))
        opt.step()
        opt.zero_grad()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            last = 16 if step + 1 == steps else 2
            with torch.no_grad():
                mine = sum(loss_of(model, -1 - k * world - rank, 64, True).item() for k in range(last)) / last
            mean = torch.tensor([mine], dtype=torch.float64)
            dist.all_reduce(mean)
            curve.append((step + 1, mean.item() / world))
    n = sum(p.numel() for p in model.parameters())
    dense = 8 * (world - 1) * n / world * steps
    sent = getattr(opt, "sent_bytes", dense)
    frozen = getattr(getattr(opt, "method", None), "frozen_at", 0)
    return {"curve": curve, "sent": sent / dense, "frozen": frozen, "elements": n}


def work(rank: int, world: int, job: str, kind: str, steps: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(job, kind, steps, seed)


def draw(found: dict[str, dict[str, list[dict[str, Any]]]], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(found), figsize=(12, 3.6))
    for ax, (job, kinds) in zip(axes, found.items()):
        for kind, runs in kinds.items():
            at = [step for step, _ in runs[0]["curve"]]
            mean = [sum(r["curve"][k][1] for r in runs) / len(runs) for k in range(len(at))]
            ax.plot(at, mean, label=kind, linestyle="--" if kind in ("AdamW", "Lamb") else "-", linewidth=1.2)
        ax.set_title(job)
        ax.set_xlabel("step")
    axes[0].set_ylabel("validation loss")
    axes[0].legend(fontsize=7)
    fig.tight_layout()
    fig.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", help="write the curves into this file")
    parser.add_argument("--svg", help="draw the curves into this file (needs matplotlib)")
    parser.add_argument("--drawn", nargs="*", help="files of --json: draw those, train nothing")
    args = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for job in args.jobs.split(",") if not args.drawn else ():
        found[job] = {}
        for kind in args.kinds.split(","):
            those = found[job][kind] = [
                run_ranks(work, args.ranks, args=(job, kind, args.steps, seed))[0] for seed in range(args.seeds)
            ]
            base = found[job].get("AdamW" if KINDS[kind][0] == "adam" else "Lamb", those)
            last = [r["curve"][-1][1] for r in those]
            ratios = [mine / b["curve"][-1][1] for mine, b in zip(last, base)]
            print(
                f"{job:7} {kind:18} loss {sum(last) / len(last):.4f}, ratio {sum(ratios) / len(ratios):.4f}"
                f" ({', '.join(f'{x:.4f}' for x in ratios)}), sent {those[0]['sent']:.3f} of uncompressed"
                + (f", frozen after {', '.join(str(r['frozen']) for r in those)}" if those[0]["frozen"] else ""),
                flush=True,
            )
            if args.json:
                Path(args.json).write_text(json.dumps(found))
    for file in args.drawn or ():
        found.update(json.loads(Path(file).read_text()))
    if args.svg:
        draw(found, args.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
