"""The hooks that carry gradients from stock autograd into the reducer.

A pass is one backward, and collective: all ranks make the same passes, whatever gradients each has. engine.backward
opens and closes its pass. A bare `loss.backward()` opens one at its first gradient, and autograd closes it when the
outermost backward ends: outputs of the engine are hooked to find that backward, because under reentrant checkpointing
gradients come from backwards inside it.

A gradient leaves `.grad` as soon as its parameter has it. Another one for the same parameter in the same pass (it is
used by several blocks under reentrant checkpointing) goes with the next pass, or with one more before the step: ranks
may differ in that, so the engine asks all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...core import ops
from ...core.foreign import private
from ...errors import ArgumentError, DeepcError, DiskError, UnsupportedError
from ..state import ModelState

if TYPE_CHECKING:
    from ...comm.groups import Group
    from .reducers.base import Reducer


class Told(Protocol):
    """Who is told of passes (the engine's events)."""

    def begin(self, name: str) -> None: ...
    def end(self, name: str) -> None: ...
    def notice_backward(self) -> None:
        """Autograd has come to a hook."""


class GradientHooks:
    """Owns the post-accumulate hooks of one engine's trained parameters, and their gradients from autograd to the
    reducer.

    bare: called when a backward of others than this engine brings the first gradient of a pass, with the hooks of the
    engine whose backward it is (or None): returns (is it the last of its step, factor on its gradients), or raises.
    one_gradient: a parameter may not get a second one in a pass ("deterministic": "layout")."""

    _running: GradientHooks | None = None  # whose engine.backward is under way in this process

    def __init__(
        self,
        state: ModelState,
        reducer: Reducer,
        bare: Callable[[GradientHooks | None], tuple[bool, float]],
        events: Told,
        one_gradient: bool = False,
    ) -> None:
        self._state, self._reducer, self._bare, self._events = state, reducer, bare, events
        self._params = state.trained
        self.synchronising = True  # False inside no_sync(): gradients stay in .grad
        self._kept = False  # some .grad were left by no_sync
        self._kept_ours = False  # of this engine's backward, so that they are divided by the accumulation steps
        self._late: dict[
            int, torch.Tensor
        ] = {}  # gradients that no pass has taken: of a parameter that already had one
        self.sums_in: torch.dtype | None = None  # instead of .grad: what is not synchronised is summed so, among _late
        self.staged = False  # a pipeline's batch is under way: its backwards are nobody's own, and scaled
        self._held: dict[int, torch.Tensor] = {}  # lent to the reducer
        self.open = False  # a pass is under way
        self._queued = False  # autograd will close the pass
        self._failed = False
        self.blocked = ""  # why nothing may be trained now (EMA.applied)
        self._factor = self.scale = 1.0
        self._asked = -1  # the backward that was asked last for the factor of gradients that stay
        self._left_factor = 1.0
        self._refused: DeepcError | None = None  # why that one may leave none
        self._added: set[int] = set()
        self.used: set[int] = set()  # parameters that got a gradient here since the last step
        self.accumulated = False  # something was reduced since the last step
        self.norm_ready = False
        self._one_gradient = one_gradient
        self.passed: Callable[[DiskError | None], None] = _no_failure  # see _end_alone; the engine tells all ranks
        self.boundary = True  # the pass now open is the last of its step: make the norm
        self._handles = [p.register_post_accumulate_grad_hook(self._make_hook(i)) for i, p in enumerate(self._params)]

    @property
    def left_behind(self) -> bool:
        """True if this rank has gradients that no pass has taken."""
        return self._kept or bool(self._late)

    @property
    def broken(self) -> bool:
        """True if a backward of this rank since the last step did not come to its end."""
        return self._failed or self.open or self._queued

    # ---- a backward --------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def running(self, scale: float) -> Iterator[None]:
        """A backward of this engine's loss, which was multiplied by `scale`: others that it reaches see whose it is. If
        it raises, everything but `discard` refuses."""
        self._refuse_blocked()
        self.scale = scale
        before, GradientHooks._running = GradientHooks._running, self
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            GradientHooks._running = before

    def run(self, backward: Callable[[], None], boundary: bool, scale: float) -> None:
        """One pass around `backward()` of a loss that was multiplied by `scale`. Collective. If it raises, the pass
        stays open and everything but `discard` refuses."""
        self.check()
        self.begin_pass(boundary)
        with self.running(scale):
            backward()
        self.end_pass()

    @private.uncompiled
    def watch(self, outputs: Any) -> None:
        """Finds the outermost backward through these outputs of the model, should nobody say when it ends."""
        if private.graph_task_id() == -1 and self._queued and not self.open and not self.left_behind:
            self._queued = False  # of a backward that raised before it had a gradient
        if private.functorch_is_active():
            return
        for t in tensors_in(outputs):
            if t.grad_fn is not None:
                t.register_hook(self._on_output)

    def _on_output(self, _: torch.Tensor) -> None:
        self._events.notice_backward()
        if GradientHooks._running is self:
            return
        if self.synchronising:
            if self._kept_ours:  # autograd would add to it what has a factor still to come
                self._put_aside()
            self._close_at_end()
        elif not self.staged:
            self._ask()
            self._close_at_end()  # should it raise, what it has left is half of it

    def _ask(self) -> None:
        """The factor of what a backward leaves that this engine does not run: of a loss.backward() of the script, or of
        another engine's. Once a backward; what stays already is put aside, for autograd adds to it."""
        if private.graph_task_id() != self._asked:
            self._ask_factor()
            if self._left_factor != 1.0:
                self._put_aside()

    def _ask_factor(self) -> None:
        """Who may leave no gradients is told at the first one: torch.autograd.grad leaves none."""
        self._asked, self._left_factor, self._refused = private.graph_task_id(), 1.0, None
        try:
            self._refuse_blocked()
            if not self._one_gradient:
                _, self._left_factor = self._bare(GradientHooks._running)
        except DeepcError as exc:
            self._refused = exc

    def _may_stay(self, p: torch.Tensor) -> None:
        """Before the first gradient of such a backward stays; no output may have told of it (it is of a module that was
        called without its engine)."""
        if not self._queued:
            self._ask_factor()
            if self._left_factor != 1.0 and self._kept:
                self._refused = UnsupportedError(
                    "engine.no_sync(): a backward of a module that was called without its engine adds to gradients of"
                    " another scale that a backward before it has left; call engine(...) in its place"
                )
            self._close_at_end()
        if self._refused is not None:
            p.grad = None  # else the next backward would add to it
            self._queued = False  # none of its gradients has stayed: what others have left is whole
            raise self._refused

    def _put_aside(self) -> None:
        """What no_sync has left in `.grad` waits for the next pass."""
        self._kept = self._kept_ours = False
        for i, p in enumerate(self._params):
            if p.grad is not None:
                grad, p.grad = _dense(p.grad), None
                self._late[i] = ops.add_up(self._late.get(i), grad)

    def _close_at_end(self) -> None:
        if not self._queued:
            self._queued = True
            private.at_end_of_backward(self._at_end)

    def _at_end(self) -> None:
        self._queued = False
        if self.open:
            self._end_alone()

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(p: torch.Tensor) -> None:
            if p.grad is None:  # a torch.autograd.Function returned None for it
                return
            if self.synchronising:
                self._take(index, p)
                return
            ours = self.staged or GradientHooks._running is self
            if not ours:
                self._may_stay(p)
            factor = 1.0 if ours else self._left_factor
            if self.sums_in is None and factor == 1.0:
                self._kept, self._kept_ours = True, self._kept_ours or ours
            else:
                grad, p.grad = _dense(p.grad), None
                self.bring(index, grad if factor == 1.0 else grad * factor)

        return hook

    def _take(self, index: int, p: torch.Tensor) -> None:
        if not self.open:
            try:
                boundary, factor = self._bare(GradientHooks._running)
                self.begin_pass(boundary, factor)
            except BaseException:
                p.grad = None  # else the next backward would add to it
                raise
            self._close_at_end()
        grad, p.grad = p.grad, None  # autograd must not add to what the reducer reads
        grad = _dense(grad)  # type: ignore[arg-type]  # autograd has just accumulated it: it is not None
        if self._factor != 1.0:
            grad = grad * self._factor
        if (late := self._late.pop(index, None)) is not None:
            grad = ops.add_up(late, grad)
        if index in self._added:
            if self._one_gradient:
                raise UnsupportedError(
                    f"'{self._state.names[index]}' got two gradients in one backward (a module that is used again under"
                    ' reentrant checkpointing), and deepc.deterministic = "layout" adds one per micro-batch; use'
                    " checkpoint(..., use_reentrant=False), or put the backward into engine.no_sync()"
                )
            self._late[index] = grad
        else:
            self._add(index, grad)

    def _add(self, index: int, grad: torch.Tensor) -> None:
        if grad.dtype not in ops.FLOATS:
            raise ArgumentError(
                f"the gradient of parameter '{self._state.names[index]}' is {grad.dtype}: an engine trains float32,"
                f" bfloat16 and float16, and this one made it {self._state.dtype}. Was the model cast or moved"
                " (model.double(), model.to(...)) since deepc.initialize? Remove that, or cast it before"
            )
        self._added.add(index)
        self.used.add(index)
        self._held[index] = grad = grad.contiguous()
        self._reducer.add(index, grad)
        self._drop_released()

    def _drop_released(self) -> None:
        for i in self._reducer.released():
            self._held.pop(i, None)

    # ---- a pass ------------------------------------------------------------------------------------------------------
    def begin_pass(self, boundary: bool, factor: float = 1.0) -> None:
        """Opens a pass; the first since the last step overwrites the accumulators."""
        self._events.notice_backward()
        self._refuse_blocked()
        self.open, self.boundary, self._factor = True, boundary, factor
        self._added.clear()
        self.norm_ready = False
        self._reducer.begin(not self.accumulated, boundary)

    def end_pass(self) -> None:
        """Takes what earlier passes left, and reduces the rest (collective). Parameters without a gradient count as
        zero, whichever rank lacks it."""
        self._events.begin("reduce")
        try:
            self._reduce_rest()
        finally:
            self._events.end("reduce")

    def _reduce_rest(self) -> None:
        if self._kept:
            self._put_aside()
        for i in [i for i in self._late if i not in self._added]:
            self._add(i, self._late.pop(i))
        self.open = False
        try:
            self._reducer.finish()
        except BaseException:  # what was accumulated lacks this pass
            self._failed = True
            raise
        self._held.clear()
        self._drop_released()
        self._added.clear()
        self.accumulated = True
        self.norm_ready = self.boundary

    def _end_alone(self) -> None:
        """The end of a pass that nobody runs (`run`). `passed` gets what a disk has broken off on this rank, and raises
        it on all. Collective."""
        failure: DiskError | None = None
        try:
            self.end_pass()
        except DiskError as exc:
            failure = exc
        self.passed(failure)

    def empty_pass(self, boundary: bool) -> None:
        """The pass of a micro-batch that has made none: without a loss on this rank, or with no_sync around all of its
        backwards. Collective."""
        self.begin_pass(boundary)
        self._end_alone()

    def flush(self) -> None:
        """One more pass, for the gradients that some rank has left (collective)."""
        self.begin_pass(True)
        if self._state.plan.gradients_on:
            self._end_alone()
        else:
            self.end_pass()

    def bring(self, index: int, grad: torch.Tensor) -> None:
        """A gradient of trained parameter `index` for the next pass: one that is not synchronised, or was made
        elsewhere (by another stage of a pipeline). Summed in sums_in, where that is set."""
        self._late[index] = ops.add_up(self._late.get(index), grad, self.sums_in)

    def bring_product(self, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """The same of a @ b, [m, k] x [k, n] of a parameter [m, n]: made where the sum lies, if that has their
        dtype."""
        late = self._late.get(index)
        if late is not None and late.dtype == self.sums_in == a.dtype:
            late.addmm_(a, b)
        else:
            self.bring(index, a @ b)

    def change_left(self, change: Callable[[int, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        """Those gradients of every trained parameter (zeros in dtype where there is none) become what change(index,
        gradient) returns, in the order of parameters."""
        for i, p in enumerate(self._params):
            waiting = self._late.get(i)
            self._late[i] = change(
                i, torch.zeros(p.shape, dtype=dtype, device=p.device) if waiting is None else waiting
            )

    def take_left_behind(self, group: Group) -> bool:
        """Reduces gradients that some rank has kept (after no_sync; a module used again under reentrant checkpointing).
        Collective; True if there were any."""
        mine = torch.tensor([float(self.left_behind)], dtype=torch.float64, device="cpu")
        if not any(group.gather_all(mine).view(-1).tolist()):
            return False
        self.flush()
        return True

    def give_up(self) -> None:
        """The gradients since the last step are incomplete: the pass that is open ends (collective, with the ranks that
        come to its end), and everything but `discard` refuses."""
        self._failed = True
        if self.open:
            self.end_pass()

    def check(self) -> None:
        """Raises if a backward since the last step did not come to its end."""
        self._refuse_blocked()
        if self.broken:
            self._failed = True
            raise DeepcError(
                "a backward since the last step raised an error part way, so the gradients are incomplete. Call"
                " engine.restart_step() on every rank (it drops what was accumulated since the last step, as"
                " engine.zero_grad() does) and go on with a new forward, which is the step's first micro-batch"
            )

    def check_grads(self) -> None:
        """Raises if some `.grad` is of no backward: a step does not take it, and the next backward would add to it."""
        if self._kept:
            return
        with private.without_torch_function():  # of released parameters
            mine = next((n for n, p in zip(self._state.names, self._params) if p.grad is not None), None)
        if mine is not None:
            raise ArgumentError(
                f"engine.step(): '{mine}' has a .grad that no backward has left: the engine keeps gradients elsewhere,"
                " so that this one would not be stepped with, and the next backward would add to it. Set it by"
                " deepc.view(p).grad (docs/access.md), and p.grad = None"
            )

    def _refuse_blocked(self) -> None:
        """Raises while nothing may be trained: gradients that no_sync leaves would be the next step's as well."""
        if self.blocked:
            raise DeepcError(self.blocked)

    def discard(self) -> None:
        """Drops all gradients since the last step (collective if a pass is open)."""
        if self.open:
            with contextlib.suppress(DiskError):  # of gradients that go anyway
                self.end_pass()
        self._failed = self._queued = self._kept = self._kept_ours = False
        self._late.clear()
        for p in self._params:
            p.grad = None
        self.reset()

    def reset(self) -> None:
        """After a step: the next pass starts afresh."""
        self.accumulated = self.norm_ready = False
        self.used.clear()

    def take_reducer(self, reducer: Reducer) -> None:
        """Between two steps: gradients go there from now on."""
        self._reducer = reducer

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _no_failure(failure: DiskError | None) -> None:
    """`passed` of hooks without an engine."""
    if failure is not None:
        raise failure


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """A gradient without history and, where it is sparse (nn.Embedding(sparse=True)), dense: buckets are, and so is the
    update."""
    grad = grad.detach() if grad.requires_grad else grad
    return grad if grad.layout == torch.strided else grad.to_dense()


def tensors_in(value: Any, levels: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples, mappings and dataclasses, nested so deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif levels:
        if isinstance(value, Mapping):
            parts: Any = value.values()
        elif isinstance(value, (list, tuple)):
            parts = value
        elif is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, f.name, None) for f in fields(value)]
        else:
            return
        for part in parts:
            yield from tensors_in(part, levels - 1)
