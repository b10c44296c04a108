"""Collectives of a group whose ranks lie on several nodes: by memory inside a node, by an existing engine (Gloo)
between nodes.

What crosses the wire is what one rank per node would send: every node reduces or collects in a shared segment, and
local rank i of each node (a leader, i < the smallest number of ranks on a node) carries slice i of it. All collectives
are data for one executor, a Plan of lanes. A lane is a row of elements that some nodes have (sources), one node
combines or takes over (home), and others get from there (dests):

                    lanes                          sources     home            dests
    all_reduce      one per node, N/n elements     all nodes   that node       all others
    reduce          same                           all nodes   that node       the root's node
    reduce_scatter  one per node, its ranks' part  all nodes   that node       -
    all_gather      one per node, its ranks' data  that node   that node       all others
    broadcast       one per node but the root's    root's      that node       all others but the root's
    gather          one per node, its ranks' data  that node   root's          -
    scatter         one per node, its ranks' part  root's      that node       -
    all_to_all(v)   one per pair of nodes          first       second          -

so phase 1 goes from sources to home, phase 2 from home to dests. Bytes that a node sends (n nodes, N bytes, frames of
320 bytes apart): all_reduce 2 (n-1)/n N, reduce_scatter (n-1)/n N, reduce and gather at most N, broadcast at most N,
all_gather (n-1) times its ranks' data.

The executor cuts lanes into rounds (executor.py).

Floating sums: inside the node and across nodes in fp32 (fp64 for float64), each in rank or node order, with one
rounding to the payload's dtype per node and one at the end; the same bits on all ranks, because one node combines an
element and the others copy it (small calls: all combine the same frames in the same order). 16-bit averages are scaled
before they cross, so that they can't overflow. With DEEPC_WIRE_FP32=1 partial sums of 16-bit dtypes cross as fp32: one
rounding in all, for 1.5 times the bytes of an all_reduce and twice those of a reduce_scatter.

Failures run through the group's link (link.py)."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...core import env
from ...core.telemetry.caller import caller_line
from ...errors import ArgumentError, CommError, MismatchError
from .. import shared
from ..place import Places, Topology, discover
from .call import Call, Reduction
from .executor import Executor
from .lanes import (
    Plan,
    longest_pair,
    plan_all_gather,
    plan_all_reduce,
    plan_all_to_all,
    plan_broadcast,
    plan_gather,
    plan_reduce,
    plan_reduce_scatter,
    plan_scatter,
)
from .link import Link

if TYPE_CHECKING:
    import torch.distributed as dist

_NODE_STAGING = (64 << 10, 2)  # slot bytes, slots of the node's communicator: barriers are its work here


class Hierarchy(Executor):
    """A group over several nodes, used as shared.Comm: collectives block, give equal bits on every rank, and raise
    MismatchError, RankDiedError, CommTimeoutError or AbortedError on all ranks; after such an error it is broken. Calls
    from several threads are serialised. Tensors are contiguous CPU tensors, or ArgumentError is raised before anything
    is shared.

    topology: which ranks share a node. node: the shared.Comm of this node's ranks (local rank order = rank order), free
    for others' use between calls. sent_bytes, received_bytes: what this rank moved between nodes, without TCP's
    headers; zero on ranks that are not leaders."""

    def __init__(self, comm: shared.Comm, link: Link, topology: Topology, rank: int) -> None:
        """By open_hierarchy."""
        super().__init__(comm, link, topology, rank)
        self._wire_fp32 = env.switch("DEEPC_WIRE_FP32")

    # ---- collectives -------------------------------------------------------------------------------------------------
    # ---- collectives -------------------------------------------------------------------------------------------------
    def barrier(self, tag: int = 0, note: str = "") -> None:
        """Returns when every rank has called it with the same tag. note: for messages."""
        self._run(Call("barrier", f"barrier{note}", 0, 0, 0, 0, tag), lambda small: Plan([], [], [], 0, 0), 0, 0, 1)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, tag: int = 0) -> None:
        """out (default: tensor itself) = the reduction of `tensor` over the ranks. Equal shapes."""
        out = tensor if out is None else out
        red = self._reduction(tensor, op)
        self._sizes(out, tensor, 1, 1)
        count = tensor.numel()
        self._run(
            self._call("all_reduce", tensor, count, op, tag=tag),
            lambda small: plan_all_reduce(self.topology, count, small),
            tensor.data_ptr(),
            out.data_ptr(),
            red.unit,
            red,
        )

    def reduce(
        self, tensor: torch.Tensor, root: int, op: str = "sum", out: torch.Tensor | None = None, tag: int = 0
    ) -> None:
        """On group rank `root`: out (default: tensor itself) = the reduction of `tensor` over the ranks; elsewhere
        nothing is written."""
        out = tensor if out is None else out
        red = self._reduction(tensor, op)
        self._sizes(out, tensor, 1, 1)
        self._rooted(root)
        count = tensor.numel()
        self._run(
            self._call("reduce", tensor, count, op, root, tag),
            lambda small: plan_reduce(self.topology, self.rank, root, count, small),
            tensor.data_ptr(),
            out.data_ptr(),
            red.unit,
            red,
        )

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str = "sum", tag: int = 0) -> None:
        """out[n] = slice `rank` of the reduction of tensor[size * n]. `out` may be that slice of `tensor`, no other
        part of it."""
        red = self._reduction(tensor, op)
        self._sizes(out, tensor, 1, self.size)
        count = out.numel()
        self._run(
            self._call("reduce_scatter", tensor, count, op, tag=tag),
            lambda small: plan_reduce_scatter(self.topology, self.rank, count, small),
            tensor.data_ptr(),
            out.data_ptr(),
            red.unit,
            red,
        )

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """out[size * n] = tensor[n] of every rank in rank order. `tensor` may be this rank's part of `out`."""
        shared.require(tensor, "tensor")
        self._sizes(out, tensor, self.size, 1)
        count = tensor.numel()
        self._run(
            self._call("all_gather", tensor, count),
            lambda small: plan_all_gather(self.topology, self.rank, count, small),
            tensor.data_ptr(),
            out.data_ptr(),
            tensor.element_size(),
        )

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """tensor of group rank `root` to all."""
        shared.require(tensor, "tensor")
        self._rooted(root)
        count = tensor.numel()
        self._run(
            self._call("broadcast", tensor, count, root=root),
            lambda small: plan_broadcast(self.topology, self.rank, root, count, small),
            tensor.data_ptr(),
            tensor.data_ptr(),
            tensor.element_size(),
        )

    def gather(self, out: torch.Tensor | None, tensor: torch.Tensor, root: int) -> None:
        """On group rank `root`: out[size * n] = tensor[n] of every rank in rank order; elsewhere `out` is None."""
        shared.require(tensor, "tensor")
        self._rooted(root)
        if self.rank == root:
            self._sizes(shared.require(out, "out"), tensor, self.size, 1)
        count = tensor.numel()
        self._run(
            self._call("gather", tensor, count, root=root),
            lambda small: plan_gather(self.topology, self.rank, root, count, small),
            tensor.data_ptr(),
            0 if out is None else out.data_ptr(),
            tensor.element_size(),
        )

    def scatter(self, out: torch.Tensor, tensor: torch.Tensor | None, root: int) -> None:
        """out[n] = part `rank` of the tensor[size * n] of group rank `root`; elsewhere `tensor` is None."""
        shared.require(out, "out")
        self._rooted(root)
        if self.rank == root:
            self._sizes(out, shared.require(tensor, "tensor"), 1, self.size)
        count = out.numel()
        self._run(
            self._call("scatter", out, count, root=root),
            lambda small: plan_scatter(self.topology, self.rank, root, count, small),
            0 if tensor is None else tensor.data_ptr(),
            out.data_ptr(),
            out.element_size(),
        )

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Block j of out[size * n] = block `rank` of rank j's tensor[size * n]. The tensors don't overlap."""
        shared.require(tensor, "tensor")
        self._sizes(out, tensor, 1, 1)
        if tensor.numel() % self.size:
            raise ArgumentError(f"{tensor.numel()} elements can't be cut into {self.size} equal blocks")
        count = tensor.numel() // self.size
        longest = self.topology.most**2 * count
        self._run(
            self._call("all_to_all", tensor, count),
            lambda small: plan_all_to_all(self.topology, self.rank, lambda i, j: count, longest),
            tensor.data_ptr(),
            out.data_ptr(),
            tensor.element_size(),
        )

    def all_to_allv(
        self, out: torch.Tensor, out_counts: Sequence[int], tensor: torch.Tensor, in_counts: Sequence[int]
    ) -> None:
        """As all_to_all with blocks of any sizes: in_counts[j] elements of `tensor` go to rank j, out_counts[j] of
        `out` come from rank j, in rank order. The ranks exchange their counts first: MismatchError on all ranks where
        those of two ranks disagree.
        """
        shared.require_counts(out, out_counts, tensor, in_counts, self.size)
        with self._lock:
            mine = torch.tensor([*in_counts, *out_counts], dtype=torch.int64, device="cpu")
            everyone = torch.empty(self.size * 2 * self.size, dtype=torch.int64, device="cpu")
            self._run(
                self._call("all_to_allv", tensor, mine.numel()),
                lambda small: plan_all_gather(self.topology, self.rank, mine.numel(), small),
                mine.data_ptr(),
                everyone.data_ptr(),
                8,
            )
            table = everyone.view(self.size, 2, self.size).tolist()
            for i in range(self.size):
                for j in range(self.size):
                    if table[i][0][j] != table[j][1][i]:
                        raise self.link.fail(
                            MismatchError(
                                f"group {self.label}: all_to_allv at"
                                f" {caller_line().decode(errors='replace')}: {self.link.who[i]} sends"
                                f" {table[i][0][j]} elements to {self.link.who[j]}, which expects {table[j][1][i]}"
                            ),
                            told=True,
                        )
            sent = [row[0] for row in table]
            longest = longest_pair(self.topology, lambda i, j: sent[i][j])
            self._run(
                self._call("all_to_allv", tensor, longest),
                lambda small: plan_all_to_all(self.topology, self.rank, lambda i, j: sent[i][j], longest),
                tensor.data_ptr(),
                out.data_ptr(),
                tensor.element_size(),
            )

    # ---- state -------------------------------------------------------------------------------------------------------
    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Of the calls that follow. Not under the lock, which a call in the group's thread holds until it ends."""
        self.link.timeout = timeout
        self.node.set_timeout(timeout)

    def abort(self, reason: str) -> None:
        """Breaks the group on every rank; may be called from any thread."""
        self.link.abort(reason)

    def fail(self, error: CommError) -> None:
        """As abort with an error of another group, which all ranks get as it is."""
        self.link.fail(error)

    def error(self) -> str:
        """ "" or what broke the group."""
        return self.link.error()

    def close(self) -> None:
        """Leaves the group. Peers that still wait for this rank get RankDiedError. Not collective; a second close does
        nothing."""
        with self._lock:
            self._segment, self._bytes = None, torch.empty(0, dtype=torch.uint8, device="cpu")
            self.link.close()
            self.node.close()

    # ---- arguments ---------------------------------------------------------------------------------------------------
    def _reduction(self, tensor: torch.Tensor, op: str) -> Reduction:
        shared.require(tensor, "tensor")
        return Reduction(tensor.dtype, op, self.size, self._wire_fp32)

    def _sizes(self, out: torch.Tensor, tensor: torch.Tensor, out_per: int, in_per: int) -> None:
        shared.require_sizes(shared.require(out, "out"), tensor, out_per, in_per, self.size)

    def _rooted(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ArgumentError(f"root {root} is not a rank of group {self.label} of {self.size} ranks")

    def _call(self, name: str, tensor: torch.Tensor, count: int, op: str = "", root: int = -1, tag: int = 0) -> Call:
        dtype = str(tensor.dtype)
        text = (
            f"{name}{' ' + op if op else ''} of"
            f" {dtype.removeprefix('torch.')}[{count}]{f' root {root}' if root >= 0 else ''}"
        )
        return Call(name, text, shared.REDUCE_OPS.get(op, -1), root, count, zlib.crc32(dtype.encode()), tag)


def open_hierarchy(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    label: str,
    timeout: datetime.timedelta,
    global_ranks: Sequence[int] | None = None,
    staging: tuple[int, int] = _NODE_STAGING,
    places: Places | None = None,
) -> Hierarchy:
    """Opens a group of `size` ranks on any number of nodes. Collective.

    store: a torch.distributed store that is this group's own (use a PrefixStore); it must live as long as the group,
    because reasons of failures travel through it. timeout: of joining and of every wait. global_ranks: names of the
    ranks in messages. staging: slot bytes and slots of the node's own communicator, Hierarchy.node. places: where the
    ranks lie, from a caller that has asked already. Between nodes it uses the interface that Gloo does:
    GLOO_SOCKET_IFNAME."""
    import torch.distributed as dist

    places = discover(store, rank, size) if places is None else places
    topology = places.topology
    names = list(global_ranks or range(size))
    host, local = topology.node_of[rank], topology.local_of[rank]
    mine = topology.nodes[host]
    comm = shared.open_comm(
        dist.PrefixStore(f"node{host}/", store),
        local,
        len(mine),
        label=label,
        timeout=timeout,
        slot_bytes=staging[0],
        slots=staging[1],
        global_ranks=[names[r] for r in mine],
        places=places.of(mine),
    )
    try:
        link = Link(places, rank, names, lambda: (comm,), label=label, timeout=timeout, store=store)
    except BaseException:
        comm.close()
        raise
    return Hierarchy(comm, link, topology, rank)
