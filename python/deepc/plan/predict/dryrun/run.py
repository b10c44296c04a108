"""Steps of a model on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ....core import memory
from ....core.foreign import patches
from ....core.foreign.buffers import buffer_dtypes
from ....core.ops import casts
from ....errors import ArgumentError
from ....nn import loss as linear_loss
from ....nn import rows
from ....nn.aten import cross_entropy, matmul, upcast
from ..shapes import WithoutValues, Work
from .gradients import Accumulators, Reducer
from .heap import ShadowHeap, anonymous_bytes
from .tracker import make_tracker

if TYPE_CHECKING:
    from ...layout import Layout


def loss_of(output: Any, batch: Any, loss_fn: Callable[..., Any] | None) -> torch.Tensor:
    """The scalar to call backward on: loss_fn(output, batch), or the output itself, its `.loss`, ["loss"] or first
    element."""
    if loss_fn is not None:
        output = loss_fn(output, batch)
    elif not isinstance(output, torch.Tensor):
        if getattr(output, "loss", None) is not None:
            output = output.loss
        elif isinstance(output, Mapping) and "loss" in output:
            output = output["loss"]
        elif isinstance(output, (tuple, list)) and output:
            output = output[0]
    if not isinstance(output, torch.Tensor) or output.numel() != 1:
        what = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ArgumentError(
            f"the model's output ({what}) is no scalar loss and has none as .loss; give a function of (output, batch) "
            "that makes it: loss_fn=, or --loss MODULE:FUNCTION of the command"
        )
    return output


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """model(**batch) for a mapping, model(*batch) for a tuple or list, else model(batch)."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def first_rows(batch: Any, rows: int) -> Any:
    """The first `rows` samples of every tensor of a batch (dimension 0)."""
    return with_tensors(batch, lambda t: t[:rows] if t.dim() else t)


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with each of its tensors changed, also inside of mappings that torch's trees take for leaves, such as a
    tokenizer's BatchEncoding. Those that are no dict or UserDict become one."""
    from ....core.foreign.private import tree_map_only

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        new = {k: with_tensors(v, change) for k, v in leaf.items()}
        if not isinstance(leaf, (dict, UserDict)):
            return new
        like = copy.copy(leaf)  # with a table of its own
        like.update(new)
        return like

    return tree_map_only((torch.Tensor, Mapping), changed, batch)


def checkpoint_blocks(model: torch.nn.Module) -> str:
    """Recomputes the model's repeated blocks in backward (in place): by its own method if it has one, else every
    element of its largest ModuleList or Sequential. Returns what was done, "" if there is nothing to recompute."""
    own = getattr(model, "gradient_checkpointing_enable", None)
    if callable(own):
        with contextlib.suppress(ValueError):  # transformers: this architecture can't
            own(gradient_checkpointing_kwargs={"use_reentrant": False})
            return "model.gradient_checkpointing_enable()"
    from torch.utils.checkpoint import checkpoint

    lists = [
        (n, m)
        for n, m in model.named_modules()
        if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) > 1
    ]
    if not lists:
        return ""
    name, blocks = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    for block in blocks:

        def recomputed(*args: Any, _forward: Any = block.forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        block.forward = recomputed
    return f"torch.utils.checkpoint around each of {name}"


class Staged(Protocol):
    """A rank's stages of a pipeline. away: ids of parameters of other ranks, which are on the meta device here. copies:
    of parameters that another rank trains."""

    @property
    def away(self) -> frozenset[int]: ...
    @property
    def copies(self) -> Sequence[torch.nn.Parameter]: ...
    @property
    def sums(self) -> bool:
        """Whether a batch's gradients are added up on their rank before they are reduced."""

    def blocks(self) -> list[torch.nn.Module]:
        """What a budget of recomputation may compute again here."""

    def begin(
        self,
        indices: Mapping[int, int],
        trained: Sequence[Any],
        copies: Sequence[Any],
        sums: torch.dtype,
        again: WithoutValues,
    ) -> None:
        """Once. indices: of the trained parameters, by their ids. trained, copies: the fake ones in the place of these
        and of `copies`. sums: what gradients are added up in. again: which blocks are recomputed."""

    def train(self, model: torch.nn.Module, batch: Any, gradients: Reducer, live: Callable[[], int]) -> int:
        """All micro-batches of a batch. Returns the most that live() said after a forward."""


class FakeModel:
    """Puts fake tensors in the place of a model's parameters and buffers, in this process for good, and frees the real
    ones. dtype: of parameters, None for their own; buffers: that buffers are cast to, see `buffer_dtypes`."""

    def __init__(
        self,
        model: torch.nn.Module,
        mode: Any,
        tracker: Any,
        dtype: torch.dtype | None,
        trained: Sequence[torch.nn.Parameter],
        keeps_frozen: bool,
        copies: Sequence[torch.nn.Parameter] = (),
        away: frozenset[int] = frozenset(),
        buffers: str | None = None,
    ) -> None:
        self._away = away
        self._buffers = {} if dtype is None else buffer_dtypes(model, dtype, buffers)
        self._mode, self._tracker, self._dtype, self._keeps_frozen = mode, tracker, dtype, keeps_frozen
        self._trained = {id(p) for p in (*trained, *copies)}
        self._swapped: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module in model.modules():
            tables: tuple[tuple[dict[str, Any], bool], ...] = ((module._parameters, True), (module._buffers, False))
            for table, trains in tables:
                for name, value in table.items():
                    if value is not None:
                        self._places.append((table, name, value))
                        table[name] = self._fake(value, trains)
        self.trained = [self._swapped[id(p)] for p in trained]
        self.copies = [self._swapped[id(p)] for p in copies]
        for p in self._originals:
            if id(p) in self._trained and not _is_fake(p):
                with contextlib.suppress(RuntimeError):  # memory that torch does not own
                    p.untyped_storage().resize_(0)
        self.never_real = [
            p for p in self._originals if id(p) in self._trained and _is_fake(p)
        ]  # of a model that was made without memory

    def undo(self) -> None:
        """The model has its own tensors again. Only where none was `trained`."""
        for table, name, value in self._places:
            table[name] = value

    def _fake(self, value: torch.Tensor, parameter: bool) -> torch.Tensor:
        if id(value) not in self._swapped:
            if parameter:
                dtype = self._dtype if self._dtype is not None and casts(value) else value.dtype
            else:
                dtype = self._buffers.get(id(value), value.dtype)
            device = value.device if value.device.type != "meta" or id(value) in self._away else torch.device("cpu")
            with self._mode, torch.no_grad():
                new = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=device)
            counted = (
                id(value) in self._trained
                or id(value) in self._away
                or dtype == value.dtype
                or (parameter and not self._keeps_frozen)
            )
            self._tracker.known(new) if counted else self._tracker.add(new)
            self._swapped[id(value)] = torch.nn.Parameter(new, value.requires_grad) if parameter else new
            for hook in (value._backward_hooks or {}).values():  # a sum over ranks, which has memory
                self._swapped[id(value)].register_hook(hook)
            self._originals.append(value)  # its id stays taken
        return self._swapped[id(value)]


def _is_fake(t: torch.Tensor) -> bool:
    from ....core.foreign.private import FakeTensor

    return isinstance(t, FakeTensor)


def run(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    dtype: torch.dtype,
    trained: list[torch.nn.Parameter],
    layout: Layout,
    slots: int,
    own_all: bool,
    leases: bool,
    acc_color: int,
    acc_size: int,
    accumulation: int,
    steps: int,
    update: Callable[..., Callable[[], Any]] | None,
    keeps_frozen: bool,
    handed: bool = False,
    cast_inputs: bool = False,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    budget: int | None = None,
    staged: Staged | None = None,
    sums_in: torch.dtype = torch.float32,
    buffers: str | None = None,
    computes_in: torch.dtype | None = None,
) -> dict[str, Any]:
    """`steps` steps of `accumulation` micro-batches each, as the engine does them. Only in a child: the model is
    spoilt.

    trained: the model's trained parameters in flat order. slots: of the reducer's window, 0 for one rank. own_all,
    acc_color, acc_size (bytes of an element): of the accumulators, which borrow their memory if `leases` and the heap
    is there. handed: initialize hands each trained parameter to all ranks by a copy in fp32. update(fake parameters,
    known) makes a function that does a torch optimizer's step on shards, or None.
    staged: how a batch goes through the rank's stages of a pipeline, whose gradients may be added up in `sums_in`.
    buffers: that buffers are cast to (data_types.buffer_dtype). autocast: what the model's forward runs in (a rank's
    stages of a pipeline know theirs). computes_in: of the matrix products, with autocast another one than `dtype`.
    Returns bytes: "freed" by the model's move into the flat space (negative: less resident memory), "live" and
    "resident" peaks (with "leased" accumulators in the latter) above what is left then, "saved" at the end of the first
    forward, "largest_gradient"; what of the forward is "recomputed", in words; and of the
    layer of experts that may get the most rows here: how many it got, and the most ("rows"), and how
    many "products" of matrices experts made in all forwards.
    """
    from ....core.foreign.private import FakeTensorMode

    cross_entropy.install()  # as initialize does
    upcast.install()
    matmul.choose_own(torch.device("cpu"))
    matmul.choose(computes_in or dtype, torch.device("cpu"))
    linear_loss.dry = True
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    heap = ShadowHeap()
    tracker = make_tracker()(heap)
    before = anonymous_bytes()
    copies, away = (staged.copies, staged.away) if staged is not None else ((), frozenset[int]())
    fake = FakeModel(model, mode, tracker, dtype, trained, keeps_frozen, copies, away, buffers)
    memory.trim_heap()  # as initialize does
    freed = anonymous_bytes() - before
    heap.look()
    heap.rebase(tracker.live)  # what went back to the kernel is in `freed`
    freed += heap.come_and_go([p.numel() * p.dtype.itemsize for p in fake.never_real])
    heap.use_core()
    heap.rebase(tracker.live)
    if handed and heap.in_core:  # steps find the room of these
        heap.in_turn([4 * p.numel() for p in fake.trained])
    sums = Accumulators(heap, layout, own_all, acc_color, acc_size) if leases and heap.in_core else None
    reducer = Reducer(fake.trained, layout, slots, sums, sums_in if staged is not None and staged.sums else None)
    for i, p in enumerate(fake.trained):
        p.register_post_accumulate_grad_hook(reducer.hook(i))
    step = update(fake.trained, mode, tracker) if update is not None else None
    work = Work()
    again = WithoutValues(model, budget, work, staged.blocks() if staged is not None and budget is not None else None)
    saved = 0
    measured = contextlib.nullcontext() if budget is None else work
    with _taken_for_real(batch), mode, tracker, rows.seen() as tracker.of_experts, measured:
        tracker.sums.learn()
        batch = empty_like(batch, dtype if cast_inputs else None)
        if staged is not None:
            indices = {id(p): i for i, p in enumerate(trained)}
            staged.begin(indices, fake.trained, fake.copies, sums_in, again)
        tracker.peak = tracker.live
        for _ in range(steps):
            if staged is not None:
                saved = max(saved, staged.train(model, batch, reducer, lambda: tracker.live))
            else:
                saved = _micro_batches(model, batch, loss_fn, accumulation, reducer, again, autocast, tracker, saved)
            if step is not None:
                step()
            if sums is not None:
                sums.end()
            heap.settle()
    largest = max((p.numel() for p in fake.trained), default=0) * dtype.itemsize
    return {
        "freed": freed,
        "live": tracker.peak,
        "resident": heap.peak,
        "saved": saved,
        "largest_gradient": largest,
        "at": tracker.peak_op,
        "malloc": heap.usable,
        "leased": sums is not None,
        "guesses": sorted(set(tracker.guesses)),
        "recomputed": again.in_words(),
        "rows": list(max(tracker.of_experts.rows, key=lambda r: r.most, default=())[:2]),
        "products": tracker.products,
    }


def empty_like(batch: Any, floats: torch.dtype | None = None) -> Any:
    """Tensors of the same shapes, made now. floats: what floating-point ones become."""
    return with_tensors(
        batch,
        lambda t: torch.empty_strided(
            t.shape,
            t.stride(),
            device=t.device if t.device.type != "meta" else "cpu",
            dtype=floats if floats is not None and t.is_floating_point() else t.dtype,
        ),
    )


@contextlib.contextmanager
def _taken_for_real(batch: Any) -> Iterator[None]:
    """Inside, transformers' models take fake tensors for real ones, if the values of `batch` ask for no mask."""
    transformers: Any = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(transformers, "is_fake_tensor") or not _is_unmasked(batch):
        yield
        return
    real = transformers.is_fake_tensor
    transformers.is_fake_tensor = lambda _: False
    try:
        with patches.applied_inside("transformers-fake"):
            yield
    finally:
        transformers.is_fake_tensor = real


def _is_unmasked(batch: Any) -> bool:
    """Whether no sequence of a model's inputs by name has padding, or is several packed ones."""
    if not isinstance(batch, Mapping) or batch.get("position_ids") is not None:
        return False
    mask = batch.get("attention_mask")
    return mask is None or (isinstance(mask, torch.Tensor) and not mask.is_meta and bool(mask.all()))


def _micro_batches(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    accumulation: int,
    reducer: Reducer,
    again: WithoutValues,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    tracker: Any,
    saved: int,
) -> int:
    """A step's. Returns `saved`: bytes at the end of a first forward."""

    def forward() -> Any:
        with autocast():
            return call_model(model, batch)

    for _ in range(accumulation):
        reducer.begin()
        with again.around(batch):
            loss = loss_of(forward(), batch, loss_fn)
        if not saved or again.budget is not None:  # the first forward recomputes all
            saved = max(saved, tracker.live)
        (loss / accumulation if accumulation > 1 else loss).backward()
        reducer.finish()
        del loss
    return saved
