"""The hooks that carry gradients from stock autograd into the reducer.

A pass is one backward over one micro-batch. The engine opens and closes it; a bare `loss.backward()` opens one at the first gradient, and
the next backward or the step closes it. `.grad` of a trained parameter goes as soon as its gradient is in its bucket."""

from __future__ import annotations

import torch

from .errors import ArgumentError
from .state import ModelState


class GradientHooks:
    """Owns the post-accumulate hooks of one engine's trained parameters."""

    def __init__(self, state: ModelState, reducer) -> None:
        self._state, self._reducer = state, reducer
        self._params = state.trained
        self.synchronising = True  # False inside no_sync(): gradients stay in .grad
        self.left_behind = False  # some .grad were left by no_sync
        self.open = False  # a pass is under way
        self._added: set[int] = set()
        self.accumulated = False  # something was reduced since the last step
        self.norm_ready = False
        self.boundary = True  # the pass now open is the last of its step: make the norm
        self._handles = [p.register_post_accumulate_grad_hook(self._make_hook(i)) for i, p in enumerate(self._params)]

    def _make_hook(self, index: int):
        def hook(p: torch.Tensor) -> None:
            if self.synchronising:
                self._take(index, p)
            else:
                self.left_behind = True
        return hook

    def _take(self, index: int, p: torch.Tensor) -> None:
        if index in self._added:  # a further backward without the engine: a new pass
            self.end_pass()
        if not self.open:
            self.begin_pass()
        grad = p.grad
        if grad.is_sparse:
            raise ArgumentError(f"the gradient of '{self._state.names[index]}' is sparse; use nn.Embedding(sparse=False)")
        if not grad.is_contiguous():
            grad = p.grad = grad.contiguous()
        self._added.add(index)
        self._reducer.add(index, grad)
        for i in self._reducer.released():
            self._params[i].grad = None

    def begin_pass(self) -> None:
        """Opens a pass; the first since the last step overwrites the accumulators."""
        self.open = True
        self._added.clear()
        self.norm_ready = False
        self._reducer.begin(not self.accumulated, self.boundary)

    def end_pass(self) -> None:
        """Reduces what is left (collective). Parameters without a gradient count as zero, whichever rank lacks it."""
        if not self.open:
            self.begin_pass()
        if self.left_behind:
            for i, p in enumerate(self._params):
                if p.grad is not None and i not in self._added:
                    self._take(i, p)
            self.left_behind = False
        self.open = False
        self._reducer.finish()
        for i in self._reducer.released():
            self._params[i].grad = None
        self._added.clear()
        self.accumulated = True
        self.norm_ready = self.boundary

    def reset(self) -> None:
        """After a step: the next pass starts afresh."""
        self.accumulated = self.norm_ready = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
