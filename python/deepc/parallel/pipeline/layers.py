"""A model as a list of layers, of which each rank of a pipeline builds its own: DeepSpeed's PipelineModule."""

from __future__ import annotations

import bisect
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ...comm import start
from ...errors import ArgumentError, ConfigError, UnsupportedError, numeric
from ...plan.mesh import Mesh
from ...plan.schedule import Order, Schedule
from ..tensor.rules import tp_model_init
from . import balance, timed
from .part import Call, Tie


class LayerSpec:
    """A layer that is built where it is needed: `LayerSpec(nn.Linear, 64, 64)`."""

    def __init__(self, typename: Callable[..., torch.nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise ArgumentError(f"LayerSpec takes a class of modules and its arguments, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> torch.nn.Module:
        """log: DeepSpeed's; without effect."""
        return self.typename(*self.module_args, **self.module_kwargs)

    @property
    def name(self) -> str:
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def __repr__(self) -> str:
        given = [repr(a) for a in self.module_args] + [f"{k}={v!r}" for k, v in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


class TiedLayerSpec(LayerSpec):
    """A layer whose parameters are those of all layers with the same `key`, as one module used at several places.
    forward_fn: called with (module, inputs) at this place, instead of module(inputs). tied_weight_attr: DeepSpeed's
    list of what is tied; here all parameters of the module are."""

    def __init__(
        self,
        key: str,
        typename: Callable[..., torch.nn.Module],
        *module_args: Any,
        forward_fn: Callable[[torch.nn.Module, Any], Any] | None = None,
        tied_weight_attr: Any = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


Layer = Any  # a LayerSpec, a module, or a function


class PipelineModule(torch.nn.Module):
    """This rank's stages of a model that is a list of layers, each called with what the one before returned.

    layers: LayerSpecs, modules, functions. num_stages: ranks of the pipeline (or topology, with `get_dim("pipe")`); the
    others are data-parallel. loss_fn(outputs, labels): the loss of the last layer's output; None: that is the loss. A
    micro-batch is (inputs, labels). seed_layers: layer i is built after torch.manual_seed(base_seed + i) (or
    seed_fn(base_seed + i)), so that all ways to cut begin with the same weights. partition_method: "uniform",
    "parameters" (about equally many in each stage), "type:REGEX" (equally many layers whose class matches) or "time"
    (about equally long forward and backward, measured with sample_batch=(inputs, labels), a micro-batch; collective).
    activation_checkpoint_interval: so many layers are computed again in backward; checkpointable_layers: only chunks
    that have a layer of these class names. schedule: how micro-batches go through the stages, one of
    plan/schedule.py's kinds, or a Schedule (Schedule.parse of a file of torch.distributed.pipelining's, say). chunks:
    stages per rank, default what the schedule needs.

    Layer i is the submodule "i", or tied_modules.KEY: the names in a checkpoint, whatever the number of stages."""

    calls_in_turn = True  # its submodules, as torch.nn.Sequential: ZeRO-3 gathers a layer at a time

    @numeric
    def __init__(
        self,
        layers: Sequence[Layer],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = True,
        *,
        schedule: str | Schedule = "1f1b",
        chunks: int | None = None,
        sample_batch: Any = None,
    ) -> None:
        super().__init__()
        self._specs = list(layers)
        if not self._specs:
            raise ArgumentError("PipelineModule needs layers, got an empty list")
        self.loss_fn = loss_fn
        self._seed = (seed_fn or torch.manual_seed, base_seed) if seed_layers else None
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self.activation_checkpoint_func = activation_checkpoint_func or _recompute
        self._recomputed = None if checkpointable_layers is None else frozenset(checkpointable_layers)
        self.mesh = _mesh(num_stages, topology)
        if (tensor := _tensor_ranks(topology)) > 1:
            tp_model_init(self, tensor)
        self.order = Order.of(schedule, self.mesh.pp, chunks)
        here = self.mesh.coordinates(dist.get_rank()).pp
        stages = self.order.stages
        self.cuts = self._cut(partition_method, sample_batch)
        self.num_stages, self.stage_id = self.mesh.pp, here
        self._rank_of = [self.order.rank_of(s) for s in range(stages)]
        self.stages = [s for s in range(stages) if self._rank_of[s] == here]
        self._refuse_shared()
        names = [_name_of(spec) for spec in self._specs]
        self._repeats = [n is not None and names.count(n) > 1 for n in names]
        self.tied_modules = torch.nn.ModuleDict()
        self._calls: dict[int, Callable[[Any], Any]] = {}
        for stage in self.stages:
            for i in range(self.cuts[stage], self.cuts[stage + 1]):
                self._calls[i] = self._build(i, self._specs[i])
        for i, layer in enumerate(self._specs):
            if isinstance(layer, torch.nn.Module) and i not in self._calls:
                self._specs[i] = None  # another rank's: its memory goes
        if isinstance(loss_fn, torch.nn.Module) and stages - 1 not in self.stages:
            del self.loss_fn  # its parameters and buffers are the last stage's, as a layer's
            self.__dict__["loss_fn"] = loss_fn  # a dry run calls it
        self._running = self.stages

    # ---- cutting -----------------------------------------------------------------------------------------------------
    def _cut(self, method: str, sample: Any) -> list[int]:
        if method.lower() != "time":
            return balance.cut(balance.costs_of(method, *_weigh(self._specs, method)), self.order.stages)
        seconds = timed.costs([self._candidate(i) for i in range(len(self._specs))], sample, self.loss_fn, self._now_s)
        return balance.cut(seconds, self.order.stages, balance.ALIKE)

    def _candidate(self, index: int) -> timed.Candidate:
        """A layer to be timed: made for it anew, or what was given."""
        layer = self._specs[index]

        def make() -> tuple[torch.nn.Module | None, Callable[[Any], Any]]:
            if not isinstance(layer, LayerSpec):
                return layer if isinstance(layer, torch.nn.Module) else None, _callable(index, layer)
            module, forward = self._built(index, layer), getattr(layer, "forward_fn", None)
            return module, module if forward is None else lambda x: forward(module, x)

        def again(module: torch.nn.Module | None) -> bool:
            names = self._recomputed
            return bool(self.activation_checkpoint_interval) and (names is None or type(module).__name__ in names)

        kind = repr(layer) if isinstance(layer, LayerSpec) and not isinstance(layer, TiedLayerSpec) else None
        return timed.Candidate(_named(layer), make, kind, again)

    def _now_s(self) -> float:
        return time.perf_counter()

    def _refuse_shared(self) -> None:
        """ArgumentError for layers that were given as modules, share a parameter and are on different ranks: each rank
        would train its own."""
        first: dict[int, int] = {}
        for i, layer in enumerate(self._specs):
            for p in layer.parameters() if isinstance(layer, torch.nn.Module) else ():
                j = first.setdefault(id(p), i)
                one, other = (self._rank_of[bisect.bisect(self.cuts, k) - 1] for k in (j, i))
                if one != other:
                    raise ArgumentError(
                        f"layers {j} and {i} of PipelineModule share a parameter, and are on the ranks {one} and"
                        f" {other} of a pipeline, of which each would train a copy; give both as TiedLayerSpec with one"
                        " key"
                    )

    # ---- building ----------------------------------------------------------------------------------------------------
    def _build(self, index: int, layer: Layer) -> Callable[[Any], Any]:
        if self._seed is not None:
            seed, base = self._seed
            seed(base + index)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = self._built(index, layer)
            module, forward = self.tied_modules[layer.key], layer.forward_fn
            # no lambda: of a copy of the model it would call this model's module
            return module if forward is None else functools.partial(forward, module)
        if isinstance(layer, (LayerSpec, torch.nn.Module)):
            module = self._built(index, layer) if isinstance(layer, LayerSpec) else layer
            self.add_module(str(index), module)
            return module
        return _callable(index, layer)

    @staticmethod
    def _built(index: int, spec: LayerSpec) -> torch.nn.Module:
        module = spec.build()
        if not isinstance(module, torch.nn.Module):
            raise ArgumentError(f"layer {index}, {spec}, made {type(module).__name__}, which is no torch.nn.Module")
        return module

    def set_checkpoint_interval(self, interval: int) -> None:
        """activation_checkpoint_interval from here on."""
        if not isinstance(interval, int) or interval < 0:
            raise ArgumentError(
                f"activation_checkpoint_interval = {interval!r}: it is a number of layers, or 0 for no recomputation"
            )
        self.activation_checkpoint_interval = interval

    # ---- as a module -------------------------------------------------------------------------------------------------
    def forward(self, inputs: Any) -> Any:
        """This rank's layers: of the stage that is running, or all of them."""
        for stage in self._running:
            inputs = self._forward(inputs, self.cuts[stage], self.cuts[stage + 1])
        return inputs

    def _forward(self, inputs: Any, begin: int, end: int) -> Any:
        step = self.activation_checkpoint_interval or end - begin
        for at in range(begin, end, step):
            some = range(at, min(at + step, end))

            def run(*given: Any, some: range = some) -> Any:
                x = given if len(given) > 1 else given[0]
                for i in some:
                    x = self._calls[i](x)
                return x

            given = inputs if isinstance(inputs, tuple) else (inputs,)
            inputs = (self.activation_checkpoint_func if self._is_recomputed(some) else _at_once)(run, *given)
        return inputs

    def _is_recomputed(self, some: range) -> bool:
        if not self.activation_checkpoint_interval or not torch.is_grad_enabled():
            return False
        names = self._recomputed
        return names is None or any(type(self._calls[i]).__name__ in names for i in some)

    @contextlib.contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        self._running = [stage]
        try:
            yield
        finally:
            self._running = self.stages

    @contextlib.contextmanager
    def all_layers(self, prepare: Callable[[torch.nn.Module], None]) -> Iterator[None]:
        """Inside, the layers of other ranks are here too: for a dry run, in which tensors have no memory. prepare: what
        a layer wants that was just made.
        UnsupportedError where one of them was given as a module, which only its rank has."""
        mine, tied = dict(self._calls), {key: self.tied_modules[key] for key in self.tied_modules}
        try:
            for i, spec in enumerate(self._specs):
                if i in mine:
                    continue
                if spec is None:
                    raise UnsupportedError(
                        f"layer {i} of this PipelineModule is another rank's, and was given as a module: a dry run"
                        " can't make it; give it as a LayerSpec"
                    )
                self._calls[i] = self._elsewhere(i, spec, tied, prepare)
            yield
        finally:
            self._calls = mine

    def _elsewhere(
        self,
        index: int,
        layer: Layer,
        tied: dict[str, torch.nn.Module],
        prepare: Callable[[torch.nn.Module], None],
    ) -> Callable[[Any], Any]:
        if not isinstance(layer, LayerSpec):
            return layer  # type: ignore[no-any-return]  # a function
        if not isinstance(layer, TiedLayerSpec):
            prepare(made := self._built(index, layer))
            return made
        if layer.key not in tied:
            prepare(made := self._built(index, layer))
            tied[layer.key] = made
        module, forward = tied[layer.key], layer.forward_fn
        return module if forward is None else functools.partial(forward, module)

    # ---- as a part of a pipeline (part.py) ---------------------------------------------------------------------------
    wants_batch = False

    @property
    def ties(self) -> list[Tie]:
        found = []
        for key, ranks in self._tied().items():
            if len(ranks) > 1:
                module = self.tied_modules[key] if key in self.tied_modules else None
                # every rank lists the parameters of a tie, so that all count the same ones
                of = module if module is not None else self._on_meta(key)
                for name, p in of.named_parameters():
                    mine = p if module is not None else None
                    found.append(Tie(f"tied_modules.{key}.{name}", ranks[0], tuple(ranks[1:]), mine))
        return found

    def _tied(self) -> dict[str, list[int]]:
        """Key -> the ranks that have such a layer, the owner first: that of the first stage, whose gradients come last
        of all in a backward."""
        found: dict[str, list[int]] = {}
        for stage, (begin, end) in enumerate(zip(self.cuts, self.cuts[1:])):
            for spec in self._specs[begin:end]:
                if isinstance(spec, TiedLayerSpec) and self._rank_of[stage] not in found.setdefault(spec.key, []):
                    found[spec.key].append(self._rank_of[stage])
        return found

    def _on_meta(self, key: str) -> torch.nn.Module:
        spec = next(s for s in self._specs if isinstance(s, TiedLayerSpec) and s.key == key)
        with torch.device("meta"):
            return spec.build()

    @property
    def elsewhere(self) -> frozenset[int]:
        return frozenset(id(t.parameter) for t in self.ties if t.parameter is not None and t.owner != self.stage_id)

    @property
    def names(self) -> dict[str, str]:
        return {}

    def let_go(self) -> frozenset[int]:
        return frozenset()  # what other ranks hold was never made here

    def blocks(self) -> list[torch.nn.Module]:
        if not any(self._repeats):
            raise ConfigError(
                "activation_checkpointing.budget: no two layers of this PipelineModule are of one class, so there are"
                " no blocks that could be recomputed; use activation_checkpoint_interval, and remove the key"
            )
        if self.activation_checkpoint_interval:
            raise ConfigError(
                "activation_checkpointing.budget chooses what is recomputed, but activation_checkpoint_interval ="
                f" {self.activation_checkpoint_interval} recomputes already; remove one"
            )
        layers = (m for i, m in self._calls.items() if self._repeats[i])
        return [
            m
            for m in dict.fromkeys(layers)
            if isinstance(m, torch.nn.Module) and next(m.parameters(), None) is not None
        ]

    def describe(self) -> str:
        return " | ".join(
            f"layers {begin} to {end - 1}" if end - begin > 1 else f"layer {begin}"
            for begin, end in zip(self.cuts, self.cuts[1:])
        )

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch[0],), {}

    def has_buffer(self, name: str) -> bool:
        tied = name.split(".")
        return tied[0] != "tied_modules" or self._tied()[tied[1]][0] == self.stage_id

    def run(self, call: Call, stage: int, received: Any, batch: Any, wants_loss: bool = True) -> Any:
        with self._only(stage):
            out = call((batch[0] if stage == 0 else received,), {})
        if stage < len(self.cuts) - 2 or self.loss_fn is None or not wants_loss:
            return out
        return self.loss_fn(out, batch[1])


def _mesh(num_stages: int | None, topology: Any) -> Mesh:
    start.init_distributed()
    world = dist.get_world_size()
    if topology is not None:
        axes = {axis: topology.get_dim(axis) for axis in topology.get_axis_names()}
        if list(axes) not in (["pipe", "data", "model"], ["pipe", "data"], ["pipe"]):
            raise ConfigError(
                f"topology has the axes {', '.join(axes)}; deepc lays a pipeline out as ('pipe', 'data', 'model'), of"
                " which the last may be left out"
            )
        num_stages = num_stages or axes["pipe"]
        if (asked := num_stages * axes.get("data", 1) * axes.get("model", 1)) != world:
            raise ConfigError(f"topology {axes} is for {asked} ranks, and there are {world}")
    return mesh_of(num_stages, "PipelineModule(num_stages={})", world)


def _tensor_ranks(topology: Any) -> int:
    """Tensor-parallel ranks of a topology; initialize cuts the layers over them, as tensor_parallel.autotp_size."""
    return topology.get_dim("model") if topology is not None and "model" in topology.get_axis_names() else 1


def mesh_of(num_stages: Any, asked: str, world: int) -> Mesh:
    """Of `world` ranks in pipelines of so many. asked: who asks, with a place for the number."""
    asked = asked.format(num_stages)
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
        raise ArgumentError(f"{asked}: it is the number of ranks of a pipeline, 1 or more")
    if world % num_stages:
        raise ConfigError(
            f"{asked}: {world} rank{'s' * (world > 1)} don't make whole pipelines of {num_stages}; start a multiple of"
            f" {num_stages}, or use another number of stages"
        )
    return Mesh(pp=num_stages, dp=world // num_stages)


def _weigh(specs: Sequence[Layer], method: str) -> tuple[list[int], list[str]]:
    """(parameters, class name) of each layer. Only one of tied layers counts. Nothing is built but on the meta device,
    and that only if the method asks for parameters."""
    counts, names, keys = [], [], set()
    for spec in specs:
        names.append(_named(spec))
        module = spec
        if isinstance(spec, LayerSpec):
            known = isinstance(spec, TiedLayerSpec) and spec.key in keys
            if isinstance(spec, TiedLayerSpec):
                keys.add(spec.key)
            module = None
            if method.lower() == "parameters" and not known:
                with torch.device("meta"):
                    module = spec.build()
        trained = module.parameters() if isinstance(module, torch.nn.Module) else ()
        counts.append(sum(p.numel() for p in trained if p.requires_grad))
    return counts, names


def _named(spec: Layer) -> str:
    return spec.name if isinstance(spec, LayerSpec) else getattr(spec, "__name__", type(spec).__name__)


def _callable(index: int, layer: Layer) -> Callable[[Any], Any]:
    if not callable(layer):
        raise ArgumentError(f"layer {index} is {layer!r}; a layer is a LayerSpec, a module or a function")
    return layer  # type: ignore[no-any-return]


def _name_of(spec: Layer) -> str | None:
    """The class of an untied layer that is a module."""
    if isinstance(spec, TiedLayerSpec) or not isinstance(spec, (LayerSpec, torch.nn.Module)):
        return None
    return spec.name if isinstance(spec, LayerSpec) else type(spec).__name__


def _at_once(run: Callable[..., Any], *inputs: Any) -> Any:
    return run(*inputs)


def _recompute(run: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(run, *inputs, use_reentrant=False)
