"""The defaults that change what a training learns. Most defaults only cost time or memory; these are DeepSpeed's, and
who comes from DDP, FSDP or a torch optimizer expects others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .keys import OPTIMIZER_PARAMS, TABLE
from .rules import Loader, default_optimizer


class Default(NamedTuple):
    """A key that was not given, the value that it has then, and what that does."""

    key: str
    value: Any
    says: str


def telling(loaded: Loader) -> tuple[Default, ...]:
    """Those of a configuration that has been read."""
    out = []
    if "gradient_clipping" not in (*loaded.values, *loaded.auto):
        limit = TABLE["gradient_clipping"].default
        out.append(Default("gradient_clipping", limit, "gradients are clipped at this global norm (0: no clipping)"))
    asked, optimizer = loaded.values.get("optimizer.type"), loaded.optimizer
    if asked is None:
        params = default_optimizer().params
        says = (
            f"used where deepc.initialize gets no optimizer: lr {params['lr']}, weight_decay {params['weight_decay']}"
        )
        out.append(Default("optimizer.type", "AdamW", says))
    elif optimizer is not None and optimizer.backend == "deepc" and asked.lower() in ("adam", "adamw"):
        out += _of_adam(asked, loaded.values.get("optimizer.params") or {})
    return tuple(out)


def _of_adam(asked: str, given: Mapping[str, Any]) -> list[Default]:
    decay, mode = "optimizer.params.weight_decay", "optimizer.params.adam_w_mode"
    if asked.lower() == "adamw" and "weight_decay" not in given:
        return [Default(decay, OPTIMIZER_PARAMS["weight_decay"].default, "torch.optim.AdamW has 0.01")]
    if asked.lower() == "adam" and given.get("weight_decay") and "adam_w_mode" not in given:
        return [Default(mode, True, "the decay is decoupled, as AdamW's (false: L2, as torch.optim.Adam's)")]
    return []
