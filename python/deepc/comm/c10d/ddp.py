"""DistributedDataParallel with compressed gradients:

    state = register(ddp_model, Int8Blocks())          # or OneBit(), Int4Blocks(), TopK(0.01); before the first
    backward
    state = register(ddp_model, OneBit(), hierarchical=True)     # 1 bit between nodes, exact averages inside them
    state = HookState(OneBit()); ddp_model.register_comm_hook(state, compress_hook)      # the same

Each bucket is averaged by compress.all_reduce, with an ErrorFeedback of its own. DDP builds its buckets anew after the
first step, in the order in which gradients came; the errors then move with their parameters: what a rank owes as the
reducer of a slice is added to what it owes of its own gradients, which leaves the sum over ranks, and so what training
will still receive, as it was."""

# No postponed annotations: DDP compares the annotation of a hook's bucket with the class itself.
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Optional, cast  # noqa: F401

import torch
import torch.distributed as dist

from ...errors import ArgumentError, UnsupportedError
from ..internode.compressed import OneBitAllReduce
from .compressed import Codec, ErrorFeedback, OneBit, Traffic, all_reduce  # noqa: F401


class _Bucket(NamedTuple):
    parameters: list[torch.Tensor]
    feedback: ErrorFeedback | OneBitAllReduce


class HookState:
    """State of compress_hook for one DDP model. Collective over `group` where overlap is True.

    codec: of the payloads. group: DDP's process group (None: the default). error_feedback: False drops what payloads
    don't carry (8 and 4 bits only: the others would not converge). overlap: buckets are compressed and sent by a thread
    with a process group of its own, in the order in which DDP hands them over, while autograd computes; pays where a
    core is free for it. Without it the hook returns when the bucket is done. hierarchical: OneBit with error feedback
    only: buckets are averaged by a OneBitAllReduce, exactly inside a node and with 1 bit an element between nodes; its
    buckets may be on a GPU, without overlap."""

    def __init__(
        self,
        codec: Codec,
        group: dist.ProcessGroup | None = None,
        *,
        error_feedback: bool = True,
        overlap: bool = False,
        hierarchical: bool = False,
    ) -> None:
        if hierarchical and not (isinstance(codec, OneBit) and error_feedback):
            raise ArgumentError(
                f"hierarchical=True with {codec}, error_feedback={error_feedback}: the hierarchical hook is for OneBit"
                " with error feedback"
            )
        self.hierarchical = hierarchical
        self.codec, self.group, self.error_feedback = codec, group, error_feedback
        self.sent_bytes = 0  # by this rank, in all
        self._buckets: dict[int, _Bucket] = {}
        self._owed: dict[
            torch.Tensor, torch.Tensor
        ] = {}  # by parameter (tensors hash by identity): errors that no bucket holds
        self._due: dict[OneBitAllReduce, torch.Tensor] = {}  # to be added to the next input
        self._thread: ThreadPoolExecutor | None = None
        if overlap:
            # Collectives of one group must come in one order on all ranks: the thread can't share the one that the main
            # thread uses.
            self.group = dist.new_group(
                dist.get_process_group_ranks(group), backend=dist.get_backend(group) if group else None
            )
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="deepc-ddp")

    def close(self) -> None:
        """Ends the thread, if there is one, after what it has begun."""
        if self._thread:
            self._thread.shutdown()

    # ---- errors of a bucket ------------------------------------------------------------------------------------------
    def _feedback(self, bucket: dist.GradBucket) -> ErrorFeedback | OneBitAllReduce | None:
        if not self.error_feedback:
            return None
        parameters = bucket.parameters()
        known = self._buckets.get(bucket.index())
        if (
            known is None
            or len(known.parameters) != len(parameters)
            or any(a is not b for a, b in zip(known.parameters, parameters))
        ):
            if known is not None:  # rebuilt: every bucket of the old layout has been reduced
                self._collect()
            known = self._buckets[bucket.index()] = _Bucket(parameters, self._make_feedback(parameters))
        return known.feedback

    def _collect(self) -> None:
        """Takes the errors out of all buckets, by parameter."""
        self._settle()
        self._owed.update(self._errors())
        self._buckets.clear()
        self._due.clear()

    def _settle(self) -> None:
        """What the thread has begun writes errors until it ends."""
        if self._thread:
            self._thread.submit(lambda: None).result()

    def _errors(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for b in self._buckets.values():
            of = b.feedback
            whole = of.owed() if isinstance(of, OneBitAllReduce) else of.folded(average=True)
            if isinstance(of, OneBitAllReduce) and of in self._due:
                whole = cast(torch.Tensor, whole) + self._due[of]
            if whole is not None:
                yield from zip(b.parameters, whole.split([p.numel() for p in b.parameters]))

    def _make_feedback(self, parameters: list[torch.Tensor]) -> ErrorFeedback | OneBitAllReduce:
        owed, worker = [self._owed.pop(p, None) for p in parameters], None
        n = sum(p.numel() for p in parameters)
        device = parameters[0].device
        if any(e is not None for e in owed):
            parts = [
                torch.zeros(p.numel(), dtype=torch.float32, device="cpu") if e is None else e.view(-1)
                for p, e in zip(parameters, owed)
            ]
            worker = torch.cat([part.to(device) for part in parts])
        if self.hierarchical:
            wire = OneBitAllReduce(n, self.group, block=cast(OneBit, self.codec).block, device=device)
            if worker is not None:
                self._due[wire] = worker
            return wire
        feedback = ErrorFeedback()
        if worker is not None:
            world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            feedback.load_state_dict({"elements": n, "world": world, "rank": rank, "worker": worker})
        return feedback

    # ---- one bucket --------------------------------------------------------------------------------------------------
    def _reduce(self, flat: torch.Tensor, feedback: ErrorFeedback | OneBitAllReduce | None) -> torch.Tensor:
        with torch.no_grad():
            if isinstance(feedback, OneBitAllReduce):
                if (due := self._due.pop(feedback, None)) is not None:
                    flat.add_(due)
                self.sent_bytes += feedback.all_reduce_(flat)
                return flat
            self.sent_bytes += all_reduce(flat, self.group, self.codec, feedback, op="avg")
        return flat

    def _answer(
        self,
        future: torch.futures.Future[torch.Tensor],
        flat: torch.Tensor,
        feedback: ErrorFeedback | OneBitAllReduce | None,
    ) -> None:
        try:
            future.set_result(self._reduce(flat, feedback))
        except BaseException as exc:
            future.set_exception(exc)  # type: ignore[arg-type]  # torch's stub has the result's type there

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """{"world", "rank", "errors": {parameter's name in `module`: fp32 tensor}}: this rank's; every rank saves its
        own. Between two steps. Names are without DDP's "module."."""
        owed = {**self._owed, **dict(self._errors())}
        errors = {_plain(n): owed[p].view(p.shape).clone() for n, p in module.named_parameters() if p in owed}
        return {"world": dist.get_world_size(self.group), "rank": dist.get_rank(self.group), "errors": errors}

    def load_state_dict(self, state: dict[str, Any], module: torch.nn.Module) -> None:
        """The reverse, before the next backward. ArgumentError for another rank or number of ranks, or a name or size
        that `module` lacks."""
        place = {"world": dist.get_world_size(self.group), "rank": dist.get_rank(self.group)}
        for name, here in place.items():
            if int(state[name]) != here:
                raise ArgumentError(
                    f"error feedback of {name} {state[name]} loaded where {name} is {here}: load each rank's own, or"
                    " start without it"
                )
        parameters = {_plain(n): p for n, p in module.named_parameters()}
        for name, error in state["errors"].items():
            if name not in parameters or parameters[name].numel() != error.numel():
                raise ArgumentError(
                    f"error feedback of '{name}' with {error.numel()} elements: the module has no such parameter"
                )
        self._buckets.clear()
        self._due.clear()
        self._owed = {parameters[n]: e.detach().to(torch.float32).flatten().clone() for n, e in state["errors"].items()}


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def compress_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the bucket's gradients averaged over the ranks in compressed form. bucket:
    dist.GradBucket of fp32, bf16 or fp16 gradients on the CPU, or with `hierarchical` on a GPU. Returns a Future of its
    buffer, averaged in place; what waits for it on a GPU follows in its stream."""
    flat = bucket.buffer()
    if state._thread and not flat.is_cpu:
        raise UnsupportedError(f"overlap=True of a compressed bucket on {flat.device} does not exist; leave it out")
    feedback = state._feedback(bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[] if flat.is_cpu else [flat.device])
    if state._thread:
        state._thread.submit(state._answer, future, flat, feedback)
    else:
        future.set_result(state._reduce(flat, feedback))
    return future


def register(
    model: torch.nn.parallel.DistributedDataParallel,
    codec: Codec,
    *,
    error_feedback: bool = True,
    overlap: bool = False,
    hierarchical: bool = False,
) -> HookState:
    """Registers compress_hook with a DDP model, over its process group. Once per model, before its first backward.
    Returns the state."""
    state = HookState(
        codec, model.process_group, error_feedback=error_feedback, overlap=overlap, hierarchical=hierarchical
    )
    model.register_comm_hook(state, compress_hook)
    return state
