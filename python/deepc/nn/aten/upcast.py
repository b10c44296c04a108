"""The losses of transformers' language models in 16 bits without logits in fp32.

transformers casts 16-bit logits to fp32 before it computes their cross-entropy: an array of twice their size, and its
gradient. `install()` puts the cast off: inside of such a loss `logits.float()` is the logits themselves, until
something other than shapes and cross_entropy is asked for; cross_entropy goes by rows, which casts chunk by chunk
(cross_entropy.widened); whatever else gets the cast logits. Loss and gradient have the bits of transformers' own. Its
functions run as they are, so that this holds for versions to come; one that computed with the cast logits in several
places would have their gradients added up in 16 bits. Process-wide; installed once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...core.foreign import patches, private
from . import cross_entropy

LOSSES = ("ForCausalLMLoss", "ForMaskedLMLoss")  # of transformers.loss.loss_utils: those that cast

_same_numbers = {Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.contiguous}
_only_read = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.shape.__get__, Tensor.device.__get__}  # type: ignore[attr-defined]


def install() -> None:
    """From now on, where transformers is imported and cross_entropy goes by rows."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    model = getattr(modeling, "PreTrainedModel", None)
    plain = getattr(model, "loss_function", None)
    if not cross_entropy.is_installed() or not isinstance(plain, property) or hasattr(plain.fget, "_deepc_plain"):
        return
    known = _losses()

    @functools.wraps(plain.fget)  # type: ignore[arg-type]
    def loss_function(self: Any) -> Any:
        found = plain.fget(self)  # type: ignore[misc]
        return found if hasattr(self, "_loss_function") else known.get(found, found)  # that is one of the user's

    loss_function._deepc_plain = plain  # type: ignore[attr-defined]
    model.loss_function = property(loss_function, plain.fset, plain.fdel, plain.__doc__)  # type: ignore[union-attr]
    patches.applied("transformers-loss")


def uninstall() -> None:
    """transformers as it was."""
    model: Any = sys.modules["transformers.modeling_utils"].PreTrainedModel
    model.loss_function = model.loss_function.fget._deepc_plain
    patches.undone("transformers-loss")


def _losses() -> dict[Any, Callable[..., Any]]:
    module = sys.modules["transformers.loss.loss_utils"]
    return {f: _put_off(f) for f in (getattr(module, name, None) for name in LOSSES) if f is not None}


def _put_off(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, in which a cast of large 16-bit logits waits."""

    @functools.wraps(loss)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return loss(*args, **kwargs)
        with _LaterCast():
            return loss(*args, **kwargs)

    return run


class _LaterCast(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._waiting: dict[int, Tensor] = {}  # logits, and views of them, that are taken for fp32, by id

    def __exit__(self, *exc: Any) -> None:
        self._waiting.clear()  # else a reference cycle could keep the logits
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and not kwargs and _is_worth_it(args[0]):
            return self._wait(args[0])  # no view of it: what counts references to it finds as many as of any logits
        if not self._waiting:
            return func(*args, **kwargs)
        if func in _only_read:
            return func(*args, **kwargs)
        if func in _same_numbers and self._waits(args[0]):
            return self._wait(func(*args, **kwargs))
        if func is F.cross_entropy and (loss := self._loss(*args, **kwargs)) is not None:
            return loss
        args, kwargs = private.tree_map_only(Tensor, lambda t: t.float() if self._waits(t) else t, (args, kwargs))
        return func(*args, **kwargs)

    def _wait(self, t: Tensor) -> Tensor:
        self._waiting[id(t)] = t
        return t

    def _waits(self, t: Any) -> bool:
        return self._waiting.get(id(t)) is t

    def _loss(
        self,
        input: Tensor,
        target: Tensor,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = cross_entropy.IGNORED,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """torch.nn.functional.cross_entropy's arguments; None where it is not this module's."""
        others = weight is not None or size_average is not None or reduce is not None or label_smoothing != 0
        if others or not self._waits(input) or self._waits(target):
            return None
        with torch.autocast("cpu", enabled=False):  # which would cast all of them
            return cross_entropy.widened(input, target, reduction, ignore_index)


def _is_worth_it(t: Tensor) -> bool:
    narrow = t.dtype in (torch.bfloat16, torch.float16)
    return narrow and cross_entropy.is_large(t, torch.float32) and not cross_entropy.is_foreign(t)
