"""What the small examples share: options, the configuration, who this rank is. Each example is one file beside this one
and runs as

python examples/gan.py                                         one process
deepc run --num_ranks 2 --cpu examples/gan.py --stage 3        two ranks (or torchrun)"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepc
import torch
import torch.distributed as dist


def options(
    description: str, *, steps: int, batch: int, argv: Sequence[str] | None = None, **more: Any
) -> argparse.Namespace:
    """The options of every example; `more`: further ones, name=default."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage")
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    p.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    p.add_argument("--batch", type=int, default=batch, help="samples of a step, over all ranks")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--deepspeed_config", help="a DeepSpeed JSON whose keys replace those of this script")
    for name, default in more.items():
        kind = (
            {"action": "store_true"}
            if default is False
            else {"default": default, "type": type(default) if default is not None else str}
        )
        p.add_argument(f"--{name.replace('_', '-')}", **kind)
    args = p.parse_args(argv)
    deepc.init_distributed()
    if args.batch % dist.get_world_size():
        p.error(f"--batch {args.batch} does not divide into {dist.get_world_size()} ranks")
    torch.manual_seed(args.seed)
    return args


def config(args: argparse.Namespace, optimizer: str = "AdamW", **params: Any) -> dict[str, Any]:
    """A DeepSpeed configuration, as it could stand in ds_config.json."""
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch // dist.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": optimizer, "params": params},
    }
    if args.precision == "bf16":
        out["bf16"] = {"enabled": True}
    return out | (json.loads(Path(args.deepspeed_config).read_text()) if args.deepspeed_config else {})


def mine(*whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """This rank's part of a batch that every rank has drawn alike."""
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in whole)


def draw(seed: int, step: int) -> torch.Generator:
    """Random numbers that depend on the step alone: every number of ranks sees the same batches."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def mean_over_ranks(value: float) -> float:
    out = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(out)
    return out.item() / dist.get_world_size()


def say(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
