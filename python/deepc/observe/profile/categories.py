"""Memory by category, of this process, now:

parameters             private parameters: replicas (stages 0 to 2), what is gathered (streamed), modules without an
engine on a GPU
gradients              fp32 accumulators, and gradients between autograd and their bucket
optimizer_states       fp32 masters and moments of this rank
shared                 memory that ranks of the node share, as far as this rank has touched it: stage-3 parameters,
buckets, communicators
activations_and_other  everything else that is in use: activations, temporaries, the interpreter and its libraries
kept_free              freed, and kept by the core's heap for the next step (deepc.memory.keep_heap; at most what of it
is resident)

On a CPU the whole is the process's resident memory; on a GPU what torch has allocated on the device, `shared` and
`kept_free` being 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...core import memory
from ...core.ops import casts
from ...zero.tiers.split import parts_of
from ...zero.tiers.windows import Parked

NAMES = ("parameters", "gradients", "optimizer_states", "shared", "activations_and_other", "kept_free")
_PAGES_AT = ("RssAnon", "RssFile", "RssShmem")


def resident() -> tuple[int, int]:
    """(private, shared) resident bytes of this process: RssAnon + RssFile, RssShmem."""
    found = dict.fromkeys(_PAGES_AT, 0)
    try:
        with open("/proc/self/status") as f:
            for line in f:
                name, _, value = line.partition(":")
                if name in found:
                    found[name] = int(value.split()[0]) * 1024
    except OSError:
        pass
    return found["RssAnon"] + found["RssFile"], found["RssShmem"]


def _nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _on(device: torch.device, tensors: Iterable[torch.Tensor | None]) -> Iterable[torch.Tensor]:
    there = (t for t in tensors if t is not None and not isinstance(t, Parked))
    return (t for t in there if t.device.type == device.type)


def parameters(engine: Any) -> int:
    """Private bytes of parameters."""
    state = engine.state
    streamed = getattr(state, "streamed", None)
    if streamed is not None:
        shard = _nbytes([state.flat]) if state.plan.sharded else 0
        return int(streamed.live_elems) * int(state.plan.dtype.itemsize) + shard
    flat = [state.flat, state.frozen_flat] if state.segment is None else []
    frozen = [p for _, p in state.frozen if state.frozen_flat is None or not casts(p)]
    return _nbytes(_on(engine.device, [*flat, *frozen]))


def gradients(engine: Any) -> int:
    """Bytes of accumulators, and of gradients on their way or left in `.grad` (no_sync)."""
    hooks = engine.hooks
    on_the_way = list(hooks._held.values()) + list(hooks._late.values())
    left = [p.grad for p in engine.state.trained] if hooks._kept else []
    lease = engine.state.lease
    sums = parts_of(engine.state.acc) if lease is None and not engine.plan.gradients_on else []
    return _nbytes(_on(engine.device, [*sums, *on_the_way, *left])) + (lease.nbytes() if lease is not None else 0)


def optimizer_states(engine: Any) -> int:
    """Bytes of masters and moments; of what lies on disk, the cells that are in memory."""
    state, tier = engine.state, engine.state.tier
    masters = parts_of(state.master) if tier is None and state.master is not None else []
    owned = engine.optimizer.owned_states() if engine.parked is None else ()
    windows = [w.view for _, _, w in owned if w.in_memory]
    rest: int = engine.optimizer.coded_bytes() + (tier.stream.memory_bytes if tier is not None else 0)
    return _nbytes(_on(engine.device, [*masters, *windows])) + rest


def sample(engines: Iterable[Any], states: int) -> dict[str, int]:
    """Bytes by category. states: optimizer_states of the engines, which do not change between steps."""
    engines = list(engines)
    out = dict.fromkeys(NAMES, 0)
    out["parameters"] = sum(map(parameters, engines))
    out["gradients"] = sum(map(gradients, engines))
    out["optimizer_states"] = states
    device = next((e.device for e in engines), torch.device("cpu"))
    if device.type == "cuda":
        whole = torch.cuda.memory_allocated(device)
    else:
        free = memory.heap()["free_resident"]
        whole, out["shared"] = resident()
        out["kept_free"] = min(free, max(0, whole - out["parameters"] - out["gradients"] - out["optimizer_states"]))
    known = out["parameters"] + out["gradients"] + out["optimizer_states"] + out["kept_free"]
    out["activations_and_other"] = max(0, whole - known)
    return out
