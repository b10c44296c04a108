"""What a plan sends between nodes, and how it is written: the codecs are chosen here, once.

ZeRO++ (Wang et al., arXiv:2306.10209) is a matter of the two codecs: qgZ sends parts of gradients as 4-bit blocks
(quantised once, added in fp32; a rank's own part is not quantised), qwZ sends updated parameters as 8-bit blocks.
Blocks are 64 elements, the alignment of a parameter in the flat space: no block mixes a norm's weights with a
matrix's."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch

from ...core.ops import torch_dtype
from ...optim.codecs import Codec, Int4Blocks, Int8Blocks, Plain
from ...plan.plan import QUANTIZED, Plan

if TYPE_CHECKING:
    from ..groups import MultiNodeGroup

_ALIGN, _PART, _AHEAD = 64, 1 << 18, 4  # elements; a node's part of a message at the most; messages under way
_BLOCKS = {"int4": Int4Blocks, "int8": Int8Blocks}


def gradient_codec(plan: Plan) -> Codec:
    """Of parts of gradients, each a sum over a node's ranks."""
    if plan.gradients_as:
        return _BLOCKS[plan.gradients_as](block=QUANTIZED)
    return Plain(torch_dtype(plan.crossing_dtype), plan.ranks_per_node)


def parameter_codec(plan: Plan) -> Codec | None:
    """Of updated parameters; None: they cross as they lie."""
    return _BLOCKS[plan.parameters_as](block=QUANTIZED) if plan.parameters_as else None


def requantized(plan: Plan, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the nodes make of this rank's masters: [owned], in the dtype of the parameters."""
    codec = parameter_codec(plan)
    if codec is None:
        return master.to(dtype)
    out = torch.empty(master.numel(), dtype=dtype, device="cpu")
    for own in plan.slices:
        piece = slice(own.shard_begin, own.shard_begin + own.length)
        payload = torch.empty(codec.nbytes(own.length), dtype=torch.uint8, device="cpu")
        codec.encode(payload, master[piece])
        codec.decode(out[piece], payload)
    return out


class Crossing:
    """How parts of gradients cross: node n's part of a slice goes there, and all nodes' parts of this one are added in
    fp32, in node order, whatever was sent."""

    def __init__(self, codec: Codec, nodes: int, here: int) -> None:
        """here: this node."""
        self.codec, self._nodes, self._here = codec, nodes, here
        self._none = torch.empty(0, dtype=torch.float64, device="cpu")
        # a slice is cast and added up in one call each
        self._whole = codec.dtype if isinstance(codec, Plain) and codec.shares == 1 else None
        self.straight = self._whole == torch.float32  # not even cast: slices go as they lie

    def encode(self, payload: torch.Tensor, parts: torch.Tensor) -> None:
        """parts [nodes * m] fp32 into payload, uint8 [nodes * nbytes(m)]; not this node's own if it costs."""
        if self._whole is not None:
            self.codec.encode(payload, parts)
            return
        size, m = payload.numel() // self._nodes, parts.numel() // self._nodes
        for n in range(self._nodes):
            if n != self._here:
                self.codec.encode(payload[n * size : (n + 1) * size], parts[n * m : (n + 1) * m])

    def decode(self, received: torch.Tensor) -> list[torch.Tensor]:
        """Views: node by node the fp32 parts of a straight crossing."""
        return list(received.view(torch.float32).view(self._nodes, -1))

    def add(self, target: torch.Tensor, received: torch.Tensor, own: torch.Tensor, assign: bool) -> None:
        """target [m] (+)= the sum of what all nodes sent. own [m]: this node's part, exactly."""
        if self._whole is not None:
            parts = list(received.view(self._whole).view(self._nodes, -1))
            torch.ops.deepc.accumulate_tensors(target, parts, assign, self._none)
            return
        if assign:
            target.zero_()
        size = received.numel() // self._nodes
        for n in range(self._nodes):
            if n == self._here:
                torch.ops.deepc.accumulate_tensors(target, [own], False, self._none)
            else:
                self.codec.decode_add(target, received[n * size : (n + 1) * size], 1.0)


def sum_over_nodes(group: MultiNodeGroup, x: torch.Tensor, codec: Codec) -> None:
    """x [n] fp32, this rank's and its counterparts' on the other nodes, becomes the sum of theirs: each node adds up a
    part of it, of what `codec` wrote, in fp32 and in node order, and sends that to the others as it is. Equal bits on
    all nodes. Collective over the counterparts."""
    nodes, here, n = group.nodes, group.node, x.numel()
    crossing = Crossing(codec, nodes, here)
    size = min(nodes * _PART, -(-n // (nodes * _ALIGN)) * nodes * _ALIGN)
    arriving: collections.deque[Any] = collections.deque()
    returning: collections.deque[Any] = collections.deque()

    def send(begin: int) -> None:
        values = x[begin : begin + size]
        if values.numel() < size:
            values = torch.cat([values, values.new_zeros(size - values.numel())])
        payload = values.view(torch.uint8)
        if not crossing.straight:
            payload = torch.zeros(nodes * codec.nbytes(size // nodes), dtype=torch.uint8, device="cpu")
            crossing.encode(payload, values)
        out = torch.empty_like(payload)
        arriving.append((begin, values, out, group.exchange(out, payload, "gradients")))

    def add() -> None:
        begin, values, received, sent = arriving.popleft()
        sent.wait()
        m = size // nodes
        mine = torch.empty(m, dtype=torch.float32, device="cpu")
        whole = torch.empty(size, dtype=torch.float32, device="cpu")
        crossing.add(mine, received, values[here * m : (here + 1) * m], True)
        returning.append((begin, whole, group.collect(whole, mine, "gradients")))

    def take() -> None:
        begin, whole, sent = returning.popleft()
        sent.wait()
        part = x[begin : begin + size]
        part.copy_(whole[: part.numel()])

    for begin in range(0, n, size or 1):
        send(begin)
        if len(arriving) == _AHEAD:
            add()
        if len(returning) == _AHEAD:
            take()
    while arriving:
        add()
    while returning:
        take()
