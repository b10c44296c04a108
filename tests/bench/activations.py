"""Training whose checkpointed activations are more than the memory: the inputs of the blocks on disk, in a memory
cgroup, beside the same training in memory without a limit (the losses must be equal, bit for bit) and with the limit.

    sudo python tests/bench/activations.py --folder /nvme [--limit-mib 500] [--json out]

Blocks of an elementwise product, a tanh and a sum, each under torch.utils.checkpoint: few weights, little arithmetic,
so that the inputs of the blocks are most of the memory, and the disk most of the time. Needs root: a cgroup (v1 or v2)
is made and removed. A row has what became of it, the median of the seconds per step behind the first, and the peak that
the kernel counted (with cached pages of files)."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from limited import run_limited


def make_model(a):
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(a.width))

        def forward(self, x):
            return x + torch.tanh(x * self.scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(a.width))
            self.blocks = nn.ModuleList(Block() for _ in range(a.layers))

        def forward(self, x):
            x = x * self.first
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x.float().square().mean()

    torch.manual_seed(0)
    return Model()


def child(a) -> None:
    import deepc
    import torch

    torch.set_num_threads(a.threads)
    cfg = {
        "train_micro_batch_size_per_gpu": a.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": a.precision == "bf16"},
    }
    if a.work == "disk":
        cfg["activation_checkpointing"] = {"cpu_checkpointing": True}
        cfg["deepc"] = {"activations": {"nvme_path": a.folder}}
    engine = deepc.initialize(model=make_model(a), config=cfg)[0]
    out: dict = {"losses": [], "seconds": []}
    for step in range(a.steps):
        x = torch.randn(a.batch, a.width, generator=torch.Generator().manual_seed(step)).to(engine.dtype)
        begin = time.monotonic()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        out["seconds"].append(time.monotonic() - begin)
        out["losses"].append(loss.item())
    out["disk"] = engine.activations.stats()
    engine.destroy()
    Path(a.result).write_text(json.dumps(out))


def run(a, work: str, limit: int) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        ended, peak = run_limited(limit, ["--work", work, "--result", str(result)])
        row = {"work": work, "limit": limit, "ended": ended, "peak": peak, "inputs": inputs(a)}
        if result.exists():
            row |= json.loads(result.read_text())
            row["s per step"] = round(statistics.median(row["seconds"][1:] or row["seconds"]), 2)
    return row


def inputs(a) -> int:
    """Bytes of the blocks' inputs."""
    return a.layers * a.batch * a.width * (4 if a.precision == "fp32" else 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="on the disk to be measured")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    for name, default in (
        ("threads", 2),
        ("layers", 64),
        ("width", 1024),
        ("batch", 4096),
        ("steps", 4),
        ("limit-mib", 500),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="disk,memory,limited")
    for name in ("json", "work", "result"):
        parser.add_argument(f"--{name}", default="")
    a = parser.parse_args()
    if a.work:
        return child(a)
    print(f"inputs of the blocks {inputs(a) / 2**20:,.0f} MiB, limit {a.limit_mib} MiB", flush=True)
    rows = []
    for work in a.only.split(","):
        rows.append(run(a, work, 0 if work == "memory" else a.limit_mib << 20))
        print(json.dumps(rows[-1] | {"peak": f"{rows[-1]['peak'] / 2**20:,.0f} MiB"}), flush=True)
    losses = {json.dumps(row["losses"]) for row in rows if "losses" in row}
    print("losses are", "equal" if len(losses) == 1 else "DIFFERENT")
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
