"""Layers that are cut over the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053, section 3).

Each is made either as a layer of its own, ColumnParallelLinear(in, out, group=...), whose weights begin as the cut of
those that one process would draw, or of a module that is there (`cut_module`), which gets another class made of its
own: parameters, hooks and names stay what they are. A column-parallel layer has some of the outputs, a row-parallel one
some of the inputs: it ends the region that the former begins, and its bias is everybody's."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ArgumentError, UnsupportedError
from ...nn.fuse import _Fused, _fused_class, _Head
from ..axes import without_values
from .cut import Cut, Heads
from .loss import linear_cross_entropy
from .random import Inside
from .regions import enter, enter_from_sequence, gather, leave, leave_to_sequence, part, sum_gradients

if TYPE_CHECKING:
    from .group import TensorGroup


class Region:
    """What the layers between an entrance and an exit share: `x`, which goes in once however many column-parallel
    layers read it (one sum of gradients then), and the random numbers inside, which begin behind the last of these
    layers. members: how many those are. heads: how they are shared, in an attention whose heads the ranks do not
    divide."""

    heads: Heads | None = None

    def __init__(self, group: TensorGroup, owner: nn.Module | None = None, sequence: bool = False) -> None:
        self.group, self.members, self.sequence = group, 0, sequence
        self._random = Inside(owner, group) if owner is not None else None
        self._seen: Tensor | None = None
        self._entered: Tensor | None = None
        self._run = 0  # a bit for each member that has run since the entrance

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        made = Region.__new__(Region)
        memo[id(self)] = made
        vars(made).update(vars(self), _seen=None, _entered=None, _run=0)
        if self._random is not None:
            made._random = Inside(memo.get(id(self._random._owner), self._random._owner), self.group)
        return made

    def begin(self, x: Tensor, member: int = 0) -> Tensor:
        """For a column-parallel layer. They may read different inputs, as in an attention to another sequence."""
        if self._run >> member & 1:  # a recomputation ended before the last of them
            self._forget()
        if self._entered is None or x is not self._seen:
            self._seen = x
            self._entered = enter_from_sequence(x, self.group) if self.sequence else enter(x, self.group)
        self._run |= 1 << member
        out = self._entered
        if self._run + 1 >= 1 << self.members:
            self._forget()
            if self._random is not None:
                self._random.enter()
        return out

    def _forget(self) -> None:
        self._seen = self._entered = None
        self._run = 0

    def end(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self._forget()
        if self.sequence:
            out = leave_to_sequence(x, self.group)
            return out if bias is None else out + bias
        return leave(x, self.group, bias)

    def leave_random(self) -> None:
        if self._random is not None:
            self._random.leave()

    def break_off(self) -> None:
        """A forward raised, maybe between the entrance and the exit: the next one begins outside, on all ranks."""
        self._forget()
        if self._random is not None:
            self._random.break_off()

    # ---- hooks of a dropout that does not draw as what stands around it ----
    def whole_begins(self, *_: Any) -> None:
        """Its input is whole, in the midst of the region."""
        if self._random is not None:
            self._random.step_out()

    def whole_ends(self, *_: Any) -> None:
        if self._random is not None:
            self._random.step_in()

    def part_begins(self, *_: Any) -> None:
        """Its input is a part, behind the region's end."""
        if self._random is not None:
            self._random.enter()

    def part_ends(self, *_: Any) -> None:
        self.leave_random()


class _Parallel(_Fused):
    """cuts: see cut.py. region: shared with the other layers of it; member: which of those that read its input this is.
    gathers: the outputs come together at the end."""

    cuts: dict[str, Cut]
    region: Region
    member = 0
    gathers = False
    weight: Tensor
    bias: Tensor | None

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def _deepc_widths(self) -> tuple[int, ...]:
        cut = self.cuts["weight"]
        return tuple(cut.width(r) for r in range(cut.ranks))


class Column(_Parallel):
    """What a module that is cut by outputs is an instance of, beside its own class."""

    def forward(self, input: Tensor) -> Tensor:
        out = self._product(self.region.begin(input, self.member), self.bias)
        if self.gathers:
            self.region.leave_random()
            return gather(out, self.region.group, -1, self._deepc_widths())
        return out


class Replicated(_Parallel):
    """A projection to heads of keys or values of which there are fewer than ranks: every rank has the whole weight, and
    computes the heads that its queries read (the weight's gradient is the sum of the ranks')."""

    _deepc_rows: Tensor  # which outputs

    def forward(self, input: Tensor) -> Tensor:
        rows = self._deepc_rows
        bias = None if self.bias is None else self.bias.index_select(0, rows)
        return F.linear(self.region.begin(input, self.member), self.weight.index_select(0, rows), bias)


class Row(_Parallel):
    """The same as Column, by inputs."""

    splits = False  # the input is whole, and this rank takes its part

    def forward(self, input: Tensor) -> Tensor:
        region = self.region
        region.leave_random()
        if self.splits:
            input = part(input, region.group, -1, self._deepc_widths())
        return region.end(self._product(input, None), self.bias)


def _conv1d(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """transformers' Conv1D: a Linear whose weight is [in, out]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.mm(rows, layer.weight) if bias is None else torch.addmm(bias, rows, layer.weight)
    return out.view(*x.shape[:-1], layer.weight.shape[1])


class _ColumnConv1D(Column):
    _product = _conv1d


class _RowConv1D(Row):
    _product = _conv1d


class _Vocabulary(_Parallel):
    """An embedding of which each rank has some rows. A class of its own that works on what nn.Embedding's forward gives
    (transformers' scaled ones: Gemma, Bart) goes on doing that, with whole rows."""

    padding_idx: int | None

    @classmethod
    def _deepc_body(cls, original: type[nn.Module]) -> dict[str, Any]:
        own: Any = original.forward
        if own is nn.Embedding.forward:
            return {}
        cell = types.CellType()  # where its super() looks for the class: the made one, behind which ours comes
        closure = tuple(
            cell if n == "__class__" else c for n, c in zip(own.__code__.co_freevars, own.__closure__ or ())
        )
        forward = types.FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, closure)
        forward.__kwdefaults__ = own.__kwdefaults__
        return {"forward": forward, "__classcell__": cell}

    def forward(self, input: Tensor) -> Tensor:
        cut, group = self.cuts["weight"], self.region.group
        ((begin, end),) = cut.parts[cut.rank]
        outside = (input < begin) | (input >= end)
        if not without_values(input) and bool(((input < 0) | (input >= cut.shape[0])).any()):
            raise IndexError(f"an index of {type(self).__name__} is not from 0 to {cut.shape[0] - 1}")
        padding = self.padding_idx
        inner = padding - begin if padding is not None and begin <= padding < end else None
        rows = F.embedding((input - begin).masked_fill(outside, 0), self.weight, inner)
        return leave(rows.masked_fill(outside.unsqueeze(-1), 0.0), group)


class ParallelHead(_Head, _Parallel):
    """The output Linear of a language model, of which each rank has some rows: whole logits, or, called with labels,
    the loss without them (nn/fuse.py asks so)."""

    def forward(self, input: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        if labels is None and self._deepc_hold:
            return input
        x = self.region.begin(input)
        if labels is not None:
            return linear_cross_entropy(
                x, self.weight, labels, self.cuts["weight"], self.region.group, self.bias, **options
            )
        return gather(F.linear(x, self.weight, self.bias), self.region.group, -1, self._deepc_widths())


def break_off(model: nn.Module) -> None:
    """A forward of the model raised (see Region.break_off)."""
    for module in model.modules():
        if isinstance(module, _Parallel):
            module.region.break_off()


# ---- modules that are there ------------------------------------------------------------------------------------------
def is_conv1d(module: nn.Module) -> bool:
    return any(map(_is_conv1d, type(module).__mro__))


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def cut_module(
    module: nn.Module,
    kind: str,
    region: Region,
    blocks: Sequence[int] = (),
    gathers: bool = False,
    done: dict[int, Cut] | None = None,
    shares: Sequence[int] = (),
) -> None:
    """Makes `module` this rank's shard of itself, in place. kind: "column", "row", "vocabulary" (an embedding) or
    "head" (the output Linear of a language model). blocks: sizes of parts of the outputs (of a row-parallel layer: of
    the inputs) that are cut for themselves. done: id(parameter) -> cut, of those that are cut already, because another
    module has them too. shares: what the ranks get, in proportion (none: equal parts). ArgumentError for a module that
    can't be."""
    done = {} if done is None else done
    group, transposed = region.group, is_conv1d(module)
    _refuse_replaced(module, kind)
    if kind == "vocabulary":
        if not isinstance(module, nn.Embedding):
            raise ArgumentError(f"{type(module).__name__} is no torch.nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise UnsupportedError("an embedding with max_norm, scale_grad_by_freq or sparse gradients can't be cut")
    elif not (isinstance(module, nn.Linear) or transposed):
        raise ArgumentError(f"{type(module).__name__} is neither torch.nn.Linear nor transformers' Conv1D")
    if kind == "head" and transposed:
        raise ArgumentError("a head is a torch.nn.Linear")
    own = cast(Any, module)
    outputs = 1 if transposed else 0
    dim = 1 - outputs if kind == "row" else outputs
    cuts = {"weight": _cut(own.weight, dim, group, blocks, done, shares)}
    if kind != "row" and getattr(own, "bias", None) is not None:
        cuts["bias"] = _cut(own.bias, 0, group, blocks, done, shares)
    here = cuts["weight"].width(group.rank)
    if kind in ("column", "row"):
        _rename_size(own, here, outputs=kind == "column", transposed=transposed)
        if kind == "column":
            own.member = region.members
            region.members += 1
    elif kind == "head":
        own.out_features = here
        region.members = 1
    else:
        own.num_embeddings = here
    own.cuts, own.region, own.gathers = cuts, region, gathers
    mixin: type[_Parallel] = {
        ("column", False): Column,
        ("column", True): _ColumnConv1D,
        ("row", False): Row,
        ("row", True): _RowConv1D,
        ("vocabulary", False): _Vocabulary,
        ("head", False): ParallelHead,
    }[kind, transposed]
    own.__class__ = _fused_class(type(module), mixin)


def draw_as_layer(adapted: Any, kind: str, region: Region) -> None:
    """The dropouts of a layer's adapters, which run behind the layer: that of a column-parallel one (of `region`) has
    whole inputs, which are dropped alike on all ranks; that of a row-parallel one has parts."""
    drops = [m for m in getattr(adapted, "lora_dropout", {}).values() if isinstance(m, nn.Dropout)]
    if kind == "row":
        region = Region(region.group, adapted)
        begins, ends = region.part_begins, region.part_ends
    else:
        begins, ends = region.whole_begins, region.whole_ends
    for drop in drops:
        drop.register_forward_pre_hook(begins)
        drop.register_forward_hook(ends, always_call=True)


def _works_on_rows(own: type[nn.Module]) -> bool:
    """Whether a class of embeddings has a forward that calls nn.Embedding's by super(), and reads no rows itself."""
    classes = [k for k in own.__mro__ if "forward" in vars(k)]
    code = getattr(own.forward, "__code__", None)
    return (
        classes[1:2] == [nn.Embedding]
        and code is not None
        and "__class__" in code.co_freevars
        and "forward" in code.co_names
        and not {"embedding", "linear"} & {*code.co_names}
    )


def _refuse_replaced(module: nn.Module, kind: str) -> None:
    """UnsupportedError for a module of whose computation the class of its shard would leave something out."""
    if "forward" in vars(module):
        raise UnsupportedError(f"its forward ({type(module).__name__}) was replaced by somebody else")
    own: Any = module._deepc_made_of[0] if isinstance(module, _Fused) else type(module)
    known = next((k for k in own.__mro__ if k in (nn.Linear, nn.Embedding) or _is_conv1d(k)), own)
    if own.forward is not known.forward and not (kind == "vocabulary" and _works_on_rows(own)):
        raise UnsupportedError(
            f"{own.__name__} has a forward of its own beside {known.__name__}'s, of which a shard would know nothing;"
            " leave it whole (partition_type skip), or put what it adds into a module of its own"
        )
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None and module._parameters.get(name) is None:
            raise UnsupportedError(
                f"its {name} is made of other parameters (a parametrization, weight_norm, spectral_norm, pruning);"
                " leave it whole (partition_type skip), or make an ordinary parameter of it first"
            )


def replicate_module(module: nn.Module, region: Region, heads: Sequence[int], size: int) -> None:
    """Makes `module`, a Linear to heads of `size` outputs, compute those of `heads` (one may be there several times) in
    place; its weights stay whole on every rank. ArgumentError for a module that can't."""
    _refuse_replaced(module, "column")
    if not isinstance(module, nn.Linear):
        raise ArgumentError(f"{type(module).__name__} is no torch.nn.Linear")
    own = cast(Any, module)
    own._deepc_rows = torch.cat([torch.arange(h * size, (h + 1) * size, device="cpu") for h in heads])
    own.cuts, own.region, own.member = {}, region, region.members
    region.members += 1
    own.__class__ = _fused_class(type(module), Replicated)
    for p in (own.weight, own.bias):
        if p is not None:
            sum_gradients(p, region.group)


def _rename_size(own: Any, here: int, outputs: bool, transposed: bool) -> None:
    name = ("nf" if outputs else "nx") if transposed else ("out_features" if outputs else "in_features")
    setattr(own, name, here)


def _cut(
    p: nn.Parameter, dim: int, group: TensorGroup, blocks: Sequence[int], done: dict[int, Cut], shares: Sequence[int]
) -> Cut:
    if (known := done.get(id(p))) is not None:
        if known.dim != dim:
            raise ArgumentError(f"two modules share a parameter, and cut it along dimensions {known.dim} and {dim}")
        return known
    if blocks and sum(blocks) != p.shape[dim]:
        raise ArgumentError(f"parts of {' + '.join(map(str, blocks))} don't make the {p.shape[dim]} that there are")
    if shares and len(shares) != group.size:
        raise ArgumentError(f"shares = {tuple(shares)}: {len(shares)} for {group.size} tensor-parallel ranks")
    if shares:
        cut = Cut.shared(p.shape, dim, shares, group.rank, blocks)
    else:
        cut = Cut.even(p.shape, dim, group.size, group.rank, blocks)
    if not all(cut.width(r) for r in range(cut.ranks)):
        raise ArgumentError(f"{p.shape[dim]} can't be cut over {group.size} ranks, so that each has some")
    with torch.no_grad():
        p.data = cut.take(p.data)
    done[id(p)] = cut
    return cut


# ---- layers of their own ---------------------------------------------------------------------------------------------
def ColumnParallelLinear(
    in_features: int,
    out_features: int,
    bias: bool = True,
    *,
    group: TensorGroup,
    region: Region | None = None,
    gather_output: bool = False,
    sequence: bool = False,
    blocks: Sequence[int] = (),
    shares: Sequence[int] = (),
) -> nn.Linear:
    """y = x A^T + b of which each rank has some outputs: [..., in] equal on all ranks -> [..., its part of out]
    (gather_output: the whole). Draws its weights as nn.Linear does, whole, and keeps its part: ranks with one state of
    the generator have one layer. region: one for all layers that read the same x. sequence: x is this rank's part of
    the positions (dimension 1). blocks: sizes of parts of the outputs that are each cut (a fused q, k, v). shares: what
    the ranks get, in proportion, such as their heads (none: equal parts)."""
    layer = nn.Linear(in_features, out_features, bias)
    cut_module(layer, "column", region or Region(group, sequence=sequence), blocks, gather_output, shares=shares)
    return layer


def RowParallelLinear(
    in_features: int,
    out_features: int,
    bias: bool = True,
    *,
    group: TensorGroup,
    region: Region | None = None,
    split_input: bool = False,
    sequence: bool = False,
    blocks: Sequence[int] = (),
    shares: Sequence[int] = (),
) -> nn.Linear:
    """The same of which each rank has some inputs: [..., its part of in] (split_input: the whole, equal on all ranks)
    -> [..., out], equal on all ranks (sequence: this rank's part of the positions; the gradient of `bias` is then in
    parts too: see regions.sum_gradients). blocks: sizes of parts of the inputs, and shares: those of the layer
    before."""
    layer = nn.Linear(in_features, out_features, bias)
    cut_module(layer, "row", region or Region(group, sequence=sequence), blocks, shares=shares)
    cast(Any, layer).splits = split_input
    return layer


def VocabParallelEmbedding(
    num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *, group: TensorGroup
) -> nn.Embedding:
    """An nn.Embedding of which each rank has some rows: indices [...], equal on all ranks -> [..., embedding_dim]."""
    layer = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
    cut_module(layer, "vocabulary", Region(group))
    return layer
