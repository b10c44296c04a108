"""Several GPUs without hardware: collectives on tensors of plugin.py's device, in the place of NCCL. Each group has a
thread that makes Gloo's on copies, in the order of the calls; what a call gives is NaN until it is waited for. A tensor
of the CPU is an error, as for NCCL. Each rank has a device of its own; `install` after plugin's, before groups."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import plugin
import torch
import torch.distributed as dist

_IN_PLACE = ("allreduce", "broadcast")  # their first argument is read


class _Late(dist.Work):
    """A collective under way. results: (a tensor of the device, the copy that gets its values)."""

    def __init__(self, job: concurrent.futures.Future, results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._job, self._results = job, results

    def wait(self, timeout: Any = None) -> bool:
        self._job.result()
        results, self._results = self._results, []
        for result, values in results:
            result.copy_(values)
        return True

    def is_completed(self) -> bool:
        return self._job.done() and self.wait()


def install() -> None:
    from deepc.comm.c10d.group import DeepcProcessGroup

    beneath = DeepcProcessGroup._inner
    threads: dict[int, concurrent.futures.ThreadPoolExecutor] = {}

    def inner(self: DeepcProcessGroup, device: torch.device, *names: str) -> Any:
        if device.type != plugin.NAME:
            return beneath(self, device, *names)
        method = beneath(self, torch.device("cpu"), *names)
        thread = threads.setdefault(id(self), concurrent.futures.ThreadPoolExecutor(1))

        def call(*args: Any) -> dist.Work:
            results: list[tuple[torch.Tensor, torch.Tensor]] = []

            def copied(value: Any, empty: bool) -> Any:
                if isinstance(value, (list, tuple)):
                    return [copied(v, empty) for v in value]
                if not isinstance(value, torch.Tensor):
                    return value
                assert value.device.type == plugin.NAME, f"{names[0]} of a tensor on {value.device}"
                results.append((value.detach(), value.detach().cpu()))
                if empty and value.is_floating_point():
                    results[-1][0].fill_(float("nan"))
                return results[-1][1]

            reads = [copied(a, False) for a in args[1:]]
            job = thread.submit(lambda first: method(first, *reads).wait(), copied(args[0], names[0] not in _IN_PLACE))
            work = _Late(job, results)
            if not getattr(args[-1], "asyncOp", True):
                work.wait()
            return work

        return call

    DeepcProcessGroup._inner = inner  # type: ignore[method-assign]
