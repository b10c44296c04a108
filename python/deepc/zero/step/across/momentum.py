"""1-bit Adam, 1-bit LAMB and 0/1 Adam in an engine. At stage 0 every rank has all masters and states, and steps all of
them: from their freeze on the accumulators have each rank's own gradients, and the ranks exchange momentum. At stages 1
and 2 a node has them once, cut over its ranks, and its gradients are averaged in its memory throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ....optim.onebit.dropin import OneBitOptimizer
from ....optim.onebit.exchange import exchange_over
from ....optim.onebit.method import Item, Method
from ....optim.onebit.places import taken
from ....optim.onebit.zeroone import ZeroOneAdamMethod
from ....plan.layout import Segment
from ...state import ModelState
from ...tiers.windows import Window
from .base import AcrossUpdate, StepCounts

SERVER, WORKER = "server_error", "worker_error"


class OwnState:
    """A part of what this rank alone has: `values` [n] are elements [begin, begin + n) of state `name` of parameter
    `param`."""

    def __init__(self, name: str, param: int, begin: int, values: torch.Tensor) -> None:
        self.name, self.param, self.begin, self.values = name, param, begin, values


class MomentumUpdate(AcrossUpdate):
    """The update of a 1-bit optimizer (optim/onebit)."""

    def __init__(
        self,
        state: ModelState,
        groups: Sequence[dict[str, Any]],
        group_of: Sequence[int],
        base: OneBitOptimizer,
    ) -> None:
        self._state, self._groups, self._group_of = state, groups, group_of
        exchange = base.exchange or exchange_over(base.group, base.hierarchical, state.state_device)
        numels, here = state.plan.layout.numels, {s.param for s in state.plan.segments}
        self._number = number = {param: k for k, param in enumerate(p for p, n in enumerate(numels) if n)}
        # every rank has an item of every parameter: of those that lie on others of its node an empty one
        none = [Segment(param, 0, 0, 0, 0) for param in number if param not in here]
        self._segments = sorted([*state.plan.segments, *none], key=lambda s: (s.param, s.param_begin))
        items = [
            Item(
                state.piece(s),
                groups[group_of[s.param]],
                tuple(state.trained[s.param].shape),
                state.names[s.param],
                s.param_begin,
                number[s.param],
            )
            for s in self._segments
        ]
        make = lambda n: state.zeros(n, torch.float32, "exp_avg")
        self.method: Method = base.kind(items, exchange, make, base.options, len(number))
        base.method = self.method
        self._segment_of = {id(item): s for s, item in zip(self._segments, self.method.items)}

    # ---- states ------------------------------------------------------------------------------------------------------
    def names_of(self, param: int) -> tuple[str, ...]:
        return self.method.names

    def owned_states(self) -> Iterator[tuple[str, Segment, Window]]:
        for s, item in zip(self._segments, self.method.items):
            for name, values in item.states.items() if s.length else ():
                yield name, s, Window(values)

    def whole_states(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        yield from ()

    def leave_out(self, indices: frozenset[int]) -> None:
        for s, item in zip(self._segments, self.method.items):
            item.out = s.param in indices

    def rewritten(self, params: Iterable[int]) -> None:
        """All ranks were given equal values of these, in no step. They had others in 0/1 Adam alone."""
        if isinstance(self.method, ZeroOneAdamMethod):
            for param in self._number.keys() & set(params):
                self.method.rewritten(self._number[param])

    # ---- a step ------------------------------------------------------------------------------------------------------
    def update(self, grad_scale: float, counts: StepCounts) -> None:
        """Collective."""
        st = self._state
        for s, item in zip(self._segments, self.method.items):
            item.param, item.group = st.piece(s), self._groups[self._group_of[s.param]]
            item.grad = st.acc[s.shard_begin : s.shard_begin + s.length]
        self.method.step(grad_scale)
        self._publish([not item.out for item in self.method.items])

    def _publish(self, which: Sequence[bool]) -> None:
        """The parameters that the model computes with follow the masters, of the items where `which` says so."""
        st = self._state
        for s, item, new in zip(self._segments, self.method.items, which) if st.master is not None else ():
            if new:
                st.flat[s.flat_begin : s.flat_begin + s.length].copy_(item.param)

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def numbers(self) -> dict[str, Any]:
        """JSON: what `take_own` needs before it, and counts."""
        method = self.method
        return {
            **method.numbers(),
            "world": method.exchange.copies,
            "workers": method.exchange.workers,
            "own": sorted({name for name, _, _ in method.own()}),
            "errors": bool(method.errors()),
            **({"cuts": self._cuts()} if method.rotated else {}),
        }

    def _cuts(self) -> dict[str, list[int]]:
        """Of parameters that lie in several pieces: name -> where all but the first begin. Alike on all ranks."""
        plan, out = self._state.plan, dict[str, list[int]]()
        for r in range(plan.layout.world) if not plan.own_all else ():
            for s in plan.layout.segments(r):
                if s.param_begin:
                    out.setdefault(self._state.names[s.param], []).append(s.param_begin)
        return {name: sorted(begins) for name, begins in out.items()}

    def own_states(self) -> Iterator[OwnState]:
        """What this rank's copy alone has, under a name of its own ("anchor.rank0"), and its share of its worker's
        errors ("worker_error.worker0") and of the server's."""
        method, exchange, of = self.method, self.method.exchange, self._segment_of
        for name, item, values in method.own():
            s = of[id(item)]
            yield OwnState(f"{name}.rank{exchange.copy}", s.param, s.param_begin, values)
        if errors := method.errors():
            owned = exchange.owned(method.places.total)
            for kind, name in (("worker", f"{WORKER}.worker{exchange.worker}"), ("server", SERVER)):
                for i, begin, at, n in method.places.shares(owned[kind]):
                    s = of[id(method.sent[i])]
                    yield OwnState(name, s.param, s.param_begin + begin, errors[kind][at : at + n])

    def take_own(self, saved: Mapping[str, Any], read: Callable[[str, int, torch.Tensor, int], None]) -> None:
        """After load_numbers. read(name, parameter, out, begin): fills `out` from the checkpoint's state of that name.
        As many copies as then: each takes its own, as many workers: each its errors. Another number: each takes the
        mean of what all had, so that the mean over them, which is what an exchange makes, is what it was.
        Collective."""
        method, exchange, of = self.method, self.method.exchange, self._segment_of

        def mean(name: str, then: int, now: int, mine: int, item: Item, out: torch.Tensor) -> None:
            s = of[id(item)]
            if then == now:
                read(f"{name}{mine}", s.param, out, s.param_begin)
                return
            total, part = torch.zeros_like(out), torch.empty_like(out)
            for r in range(then):
                read(f"{name}{r}", s.param, part, s.param_begin)
                total.add_(part, alpha=1.0 / then)
            out.copy_(total)

        for name, item, values in list(method.own()):
            mean(f"{name}.rank", int(saved["world"]), exchange.copies, exchange.copy, item, values)
        if not saved["errors"] or exchange.world == 1 or method.averages and not method.errors_in_warm_up:
            exchange.clear_errors()
            return
        places, then, now = method.places, int(saved["workers"]), exchange.workers
        worker = torch.zeros(places.total, dtype=torch.float32, device="cpu")  # on the host, where they are read
        server = torch.zeros_like(worker)
        recut = self._recut(saved)
        for i, item in enumerate(method.sent):
            s = of[id(item)]
            if item.param.numel() and self._state.names[s.param] not in recut:
                mean(f"{WORKER}.worker", then, now, exchange.worker, item, places.of(worker, i))
                read(SERVER, s.param, places.of(server, i), s.param_begin)
        for whole in (worker, server):
            places.fill(whole)
        if then != now:
            worker.add_(server)
            server.zero_()
        owned = exchange.owned(places.total)
        exchange.set_errors(places.total, taken(worker, owned["worker"]), taken(server, owned["server"]))

    def _recut(self, saved: Mapping[str, Any]) -> set[str]:
        """Parameters of which rotated errors are of other pieces than now, whose blocks are others: they can't be taken
        apart and put together, and begin with zeros."""
        if not self.method.rotated:
            return set()
        then, now = saved["cuts"], self._cuts()
        found = {name for name in {*then, *now} if then.get(name) != now.get(name)}
        if found:
            self.method.tell(
                f"the checkpoint's ranks had {len(found)} of {self.method.wholes} parameters in other pieces than these"
                f" ({min(found)}, ...): what they owe of those is dropped, as rotated blocks are of a piece"
            )
        return found

    def load_numbers(self, saved: Mapping[str, Any]) -> None:
        if saved["errors"]:
            self.method.check_frame(saved)
        self.method.load_numbers(saved)

    def after_load(self) -> None:
        """The parameters that the model computes with follow what `take_own` has read."""
        self._publish([True] * len(self.method.items))
