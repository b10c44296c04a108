"""Model states by arithmetic: what initialize allocates for a plan, and the sum with what a dry run has found."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....core import cpu, memory
from ....core.lib import call
from ...plan import CONTROL_SLOT_BYTES, SLOTS
from .figures import MemoryEstimate, Row

if TYPE_CHECKING:
    from ...plan import Plan

HUGE_PAGE = 2 << 20
PAGE = 4096
# What a training step is the first to touch (measured, torch 2.13): pages of libraries, of which a fault maps more
# where the page cache holds the file in large folios, and buffers that torch, oneDNN and MKL keep.
LIBRARY_BYTES = 16 << 20
CODE_BYTES = LIBRARY_BYTES + (17 << 20)
CODE_BYTES_LOOKED = LIBRARY_BYTES + (4 << 20)  # of forward and backward alone, in fp32: before a model is cut
CODE_BYTES_16BIT = LIBRARY_BYTES + (24 << 20)  # with oneDNN's generated 16-bit kernels
# oneDNN generates a kernel for each product of each number of rows that an expert gets in 16 bit, and keeps so many
# (measured, torch 2.13, AVX-512-BF16: 0.63 MiB each). The number is a new one in this part of an expert's calls: 0.5 on
# a Xeon with AMX, 0.66 to 0.76 on an EPYC (Zen 4).
NEW_NUMBERS, NEW_NUMBERS_AMX = 0.7, 0.525
KERNEL_BYTES = 645 << 10
MOST_KERNELS = int(os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024"))


def _block(nbytes: int, color: str) -> int:
    """What a state array takes of the machine's memory; `color` is its name in memory.COLORS."""
    taken = ctypes.c_size_t()
    call("dc_mem_alloc_bytes", nbytes, memory.COLORS[color], ctypes.byref(taken))
    return taken.value if nbytes else 0


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


def _comm_bytes(ranks: int, slot_bytes: int, slots: int) -> int:
    """Shared memory of one communicator."""
    found = ctypes.c_int64()
    call("dc_comm_bytes", ranks, slots, _round(slot_bytes, PAGE), ctypes.byref(found))
    return found.value


def control_bytes(ranks: int) -> int:
    """Shared memory of so many ranks of a node that form a group, before they have gradients to reduce."""
    return _comm_bytes(ranks, CONTROL_SLOT_BYTES, 2)


def state_rows(
    plan: Plan, moments: int, host_states: bool, leased: bool = False, state_bytes: int = 1024
) -> tuple[list[Row], int]:
    """(rows of what initialize allocates for `plan`, bytes of them that are there before the moments). moments: of our
    own optimizer's arrays; 0 for a torch optimizer, whose states the dry run finds. leased: the accumulators' memory is
    the heap's (state.leases_gradients), whose peak has it.
    """
    b, gpu, rows = plan.bytes, plan.device != "cpu", []
    item = plan.dtype.itemsize

    def put(name: str, nbytes: int, *, host: bool) -> None:
        if nbytes:
            rows.append(Row(name, host=nbytes if host else 0, device=0 if host else nbytes))

    in_host = not gpu or plan.parameters_in_host
    if plan.parameters_on:
        pass  # on disk; what is gathered at a time is the run's matter
    elif plan.stage == 3 and plan.transport in ("node", "nodes"):
        rows.append(Row("parameters", shared=_round((plan.layout.total + plan.frozen_elems) * item, HUGE_PAGE)))
    else:
        put(
            "parameters",
            _block((plan.layout.shard_elems if plan.sharded else plan.layout.total) * item, "params"),
            host=in_host,
        )
    states_in_host = not gpu or host_states
    on_host = plan.host_elems if plan.host_elems is not None else plan.owned_elems * states_in_host

    def put_states(name: str, nbytes: int, color: str) -> None:
        """Of the share's elements."""
        here = nbytes * on_host // max(1, plan.owned_elems)
        put(name, _block(here, color), host=True)
        put(name, _block(nbytes - here, color), host=False)

    if leased:
        one = plan.owned_elems * plan.accumulator.itemsize
        put("gradients (fp32) of the tree of micro-batches", b["grads_private"] - one, host=True)
    else:
        put_states(f"gradients ({plan.accumulator.short})", b["grads_private"], "acc")
    put("norm", plan.owned_elems // 4096 * 8, host=states_in_host)
    if plan.disk is not None:
        moments = moments if b["states_private"] else 0
        put("cells of states on disk", _block(plan.disk.buffer_bytes, "master"), host=True)
    elif plan.has_master:
        put_states("fp32 masters", b["master_private"], "master")
    if host_states and gpu and not plan.parameters_away:
        elems = plan.layout.total if plan.host_elems is None else plan.host_elems
        put("parameters on their way to the device", _block(elems * item, "lowp"), host=True)
    early = sum(r.host for r in rows)
    for _, color in zip(range(moments), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")):
        put_states("optimizer states", plan.owned_elems * state_bytes // 256, color)
    put("on the way between nodes", b["exchange_private"], host=not gpu)
    if plan.transport in ("node", "nodes"):
        n = plan.ranks_per_node
        wire = max(plan.wire.itemsize, item)
        rows.append(
            Row(
                "gradient buckets and control",
                shared=control_bytes(n) + _comm_bytes(n, plan.layout.bucket_elems * wire, SLOTS),
            )
        )
    return _merge(rows), early


def _generates(plan: Plan) -> bool:
    return plan.device == "cpu" and cpu.compute_path(plan.computes_in.short).native


def _merge(rows: Sequence[Row]) -> list[Row]:
    out: dict[str, Row] = {}
    for r in rows:
        o = out.get(r.name, Row(r.name))
        out[r.name] = Row(r.name, o.host + r.host, o.shared + r.shared, o.device + r.device)
    return list(out.values())


def _kernels(plan: Plan, run: dict[str, Any] | None) -> int:
    """How many oneDNN makes for numbers of rows of experts in 16 bits."""
    if run is None or not run["products"] or plan.computes_in.itemsize >= 4 or not _generates(plan):
        return 0
    new = NEW_NUMBERS_AMX if "amx_bf16" in cpu.cpu_flags() else NEW_NUMBERS
    return min(MOST_KERNELS, int(new * run["products"] * 3))  # a forward's product has two in backward


def _on(device: bool, name: str, nbytes: int) -> Row:
    return Row(name, host=0 if device else nbytes, device=nbytes if device else 0)


def _notes(plan: Plan, run: dict[str, Any] | None, torch_states: bool, kernels: int) -> list[str]:
    """What a prediction rests on, in words."""
    gpu, notes = plan.device != "cpu", []
    if gpu and plan.parameters_away:
        notes.append(
            "parameters are on the device while they are used: at most stage3_max_live_parameters of them, and a third"
            " of its memory"
        )
    if run is None:
        notes.append("activations are not included: pass a sample batch")
        if torch_states:
            notes.append("states of a torch optimizer are not included: pass a sample batch")
        return notes
    if gpu:
        notes.append("activations are those that the CPU's kernels save")
    notes.append(f"the peak of live tensors is in {run['at']}")
    if run["recomputed"]:
        notes.append(f"recomputed, by arithmetic in the place of times: {run['recomputed']}")
    if run["rows"]:
        now, most = run["rows"]
        bound = f"; uneven gates may send up to {most}" if most > now else ", and no more than that can be"
        notes.append(
            f"mixtures of experts: gates are taken to choose evenly and to fill the places that there are,"
            f" {now} rows for a layer's experts on this rank{bound}"
        )
    if kernels:
        notes.append(
            f"oneDNN keeps a kernel of {KERNEL_BYTES >> 10} KiB for each product of each number of rows that an"
            f" expert gets in 16 bit: about {kernels} in these steps, up to {MOST_KERNELS} in longer runs"
            f" ({MOST_KERNELS * KERNEL_BYTES / 2**20:.0f} MiB; ONEDNN_PRIMITIVE_CACHE_CAPACITY)"
        )
    if not run["malloc"]:
        notes.append("the C library's malloc is replaced here: what its heap keeps is not predicted")
    if run["guesses"]:
        notes.append(
            f"the model reads values of tensors ({', '.join(run['guesses'])}); full masks and ones were assumed"
        )
    return notes


def assembled(
    plan: Plan,
    moments: int,
    torch_states: bool,
    host_states: bool,
    run: dict[str, Any] | None,
    loaded: int,
    steps: int,
    state_bytes: int = 1024,
    gone: int = 0,
    looked: int = 0,
    shapes: int = 0,
) -> MemoryEstimate:
    """looked: the peak of what initialize runs before it makes the plan, and before it imports `loaded`. shapes: what
    the first backward of a pipeline imports."""
    leased = run is not None and run["leased"]
    kernels = _kernels(plan, run)
    rows, early = state_rows(plan, moments, host_states, leased, state_bytes)
    gpu = plan.device != "cpu"
    trained = sum(p.numel for p in plan.params if p.index is not None)
    largest = max((p.numel for p in plan.params if p.index is not None), default=0)
    shared = sum(r.shared for r in rows)
    host = sum(r.host for r in rows)
    freed = (run["freed"] if run is not None else -trained * 4) + gone
    code = 0 if gpu else CODE_BYTES if plan.computes_in.itemsize == 4 else CODE_BYTES_16BIT
    copy_ = largest * 4 if plan.has_master and plan.world > 1 else 0  # one at a time goes to all ranks in fp32
    looked -= code - CODE_BYTES_LOOKED if looked else 0
    init = max(looked, early + copy_ + min(0, gone) + loaded if not gpu else loaded)
    rows.append(_on(gpu and not plan.parameters_away, "the model's own parameters, freed", freed))  # or never there
    live = heap = saved = 0
    if run is not None:
        live, saved = run["live"], run["saved"]
        heap = max(run["resident"], live) if not gpu else live
        more = "more at the peak" + (", with optimizer states" if torch_states else "")
        rows += [_on(gpu, "activations, saved for backward", saved), _on(gpu, more, live - saved)]
        if heap > live:
            gradients = f"gradients ({plan.accumulator.short}) in the heap's free memory, holes"
            rows.append(Row(gradients if leased else "holes that the heap keeps", host=heap - live))
        if kernels:
            rows.append(Row("kernels for numbers of rows", host=kernels * KERNEL_BYTES))
    if loaded or shapes or code:
        rows.append(Row("Python modules and kernels, loaded once", host=loaded + shapes + code))
    rank = max(init, host + (0 if gpu else freed + heap) + loaded + shapes + kernels * KERNEL_BYTES) + code
    device = sum(r.device for r in rows if r.device) if gpu else 0
    return MemoryEstimate(
        stage=plan.stage,
        world=plan.world,
        ranks_per_node=plan.ranks_per_node,
        nodes=plan.nodes,
        dtype=plan.dtype.name,
        parameters=trained,
        device=plan.device,
        rows=tuple(_merge(rows)),
        rank_peak=rank,
        init_peak=init,
        shared=shared,
        node_peak=rank * plan.ranks_per_node + shared,
        device_peak=device,
        activations=saved,
        live_peak=live,
        heap_peak=heap,
        largest_gradient=largest * plan.dtype.itemsize,
        between_steps=plan.node_states,
        backward_bound=plan.backward_bound,
        known=run is not None,
        steps=steps,
        notes=tuple(_notes(plan, run, torch_states, kernels)),
    )
