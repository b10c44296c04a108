"""What a test or a rank's job leaves changed in its process, which goes on to others: patched functions and constants
of deepc and torch, variables, deepc's logger, signal handlers, torch's settings. Looked at in the full class
(DEEPC_TEST_FULL=1)."""

from __future__ import annotations

import logging
import os
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

LOOKED_FOR = bool(os.environ.get("DEEPC_TEST_FULL"))
_OF_TORCH = (
    "torch",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.utils.checkpoint",
)
_VARIABLES = (
    "DEEPC_",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "OMP_",
)  # libraries set others when they are imported
_SETTINGS = ("get_default_dtype", "get_num_threads", "is_grad_enabled", "are_deterministic_algorithms_enabled")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, property, staticmethod, classmethod, type)
_BY_ITSELF = (
    ".step",  # of an optimizer's class: torch wraps it when the first object is made
    "torch.manual_seed",  # by torch's compiler
    "deepc.compat.hf._is_installed",  # lasts; a rank that has the name `deepspeed` is not used again (ranks.py)
)


def state() -> dict[str, Any]:
    """By name. Values are compared, functions are the same objects or not."""
    found: dict[str, Any] = {f"${k}": v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    found["the working folder"] = os.getcwd()
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
        found[f"the handler of {sig.name}"] = signal.getsignal(sig)
    if "deepc" in sys.modules:
        log = logging.getLogger("deepc")
        found["the level of deepc's logger"], found["the handlers of deepc's logger"] = log.level, list(log.handlers)
    if torch := sys.modules.get("torch"):
        found.update((f"torch.{name}()", getattr(torch, name)()) for name in _SETTINGS)
    for name, module in list(sys.modules.items()):
        if type(module) is types.ModuleType and (name in _OF_TORCH or name.split(".")[0] == "deepc"):
            found.update(_of_module(name, module))
    return found


def _of_module(name: str, module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for k, v in list(vars(module).items()):
        if isinstance(v, _FUNCTIONS) or (k.isupper() and isinstance(v, (int, float, str))):
            yield f"{name}.{k}", v
        if isinstance(v, type) and v.__module__ == name:
            yield from ((f"{name}.{k}.{a}", w) for a, w in list(vars(v).items()) if isinstance(w, _FUNCTIONS))


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What was there and is another thing now; variables that came or went."""
    other = [k for k in before if k in after and before[k] is not after[k] and before[k] != after[k]]
    variables = [k for k in {*before} ^ {*after} if k.startswith("$")]
    return sorted(k for k in [*other, *variables] if not k.endswith(_BY_ITSELF))
