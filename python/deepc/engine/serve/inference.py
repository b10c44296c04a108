"""Trained weights at work without training: evaluation, generation, frozen teachers.

    served = deepc.inference(model, checkpoint="checkpoints", dtype="bf16")     # plain: this process has the weights
    teacher = deepc.inference(model, checkpoint="teacher", stage=3)             # once per node, in memory that its
    ranks share
    larger = deepc.inference(model, checkpoint="large", zero=section)           # on disk, read layer by layer
    small = deepc.inference(model, checkpoint="exported", dtype="int8")         # weight-only int8 (int8.py)
    with_what_trains = deepc.inference(engine)                                  # an engine's weights as they are at
    each call

No gradients, optimizer states or masters: a weight costs what its dtype takes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ...comm import start as comm
from ...config.tree import Config
from ...core.foreign.buffers import CAST_BUFFERS, buffer_dtypes, mixing_is_told
from ...core.ops import casts
from ...errors import ArgumentError, CheckpointError, UnsupportedError
from ...nn import int8
from ...nn.aten import attention, matmul
from ...parallel.pipeline.part import evaluating
from ...plan.layout import keep_bytes
from ...zero.init import Home, Init
from ...zero.parameters.gathered import fill
from ...zero.parameters.param import Released
from ...zero.shards import Late, without_memory
from ..base import EngineBase, Served
from .export import Weights, dtype_of, open_weights

if TYPE_CHECKING:
    from ..engine import Engine

logger = logging.getLogger("deepc")
_ON_DISK = (torch.float32, torch.bfloat16, torch.float16)


def inference(
    model: torch.nn.Module,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    average: str | None = None,
    dtype: str | torch.dtype | None = None,
    stage: int = 0,
    zero: Mapping[str, Any] | None = None,
    keep: Sequence[str] = (),
    strict: bool = True,
    device: torch.device | str | None = None,
) -> InferenceEngine:
    """Makes an InferenceEngine of `model`.

    model: a module, which is taken over: frozen, in evaluation mode, cast, with int8 its linear layers replaced; it may
    be on the meta device if a checkpoint is given, so that its weights are read to where they stay. Or a training
    Engine: its weights are used where they are, nothing else may be given then. checkpoint: a folder of
    engine.save_checkpoint (`tag`, else the latest; average: the label of an EMA in it), a folder with
    model.safetensors, or such a file. dtype: "fp32", "bf16", "fp16", "int8" or the torch dtype; default: the model's
    own (int8 if the checkpoint is). keep: names that int8 leaves alone. stage: 0, every rank has the weights; 3, they
    lie once per node in shared memory (CPU; collective; read-only from then on; with a checkpoint, a node's first rank
    reads it). zero: a zero_optimization section; with its offload_param.device "nvme" they lie once per node on disk
    (nvme_path), at stage 3, and are read ahead of their use: the model may be larger than the memory, and is never
    whole in it (one CPU node, or one GPU; collective to make, each rank runs and generates by itself); with "cpu" those
    of a GPU lie in the host's memory, in the same way. strict: names that
    are missing in the checkpoint, or that the model lacks, are an error.

    Raises ArgumentError, CheckpointError, UnsupportedError."""

    if isinstance(model, InferenceEngine):
        raise ArgumentError("inference: this is an InferenceEngine already")
    if isinstance(model, EngineBase):
        of_a_checkpoint = checkpoint is not None or tag is not None or average is not None
        if of_a_checkpoint or dtype is not None or stage or zero or keep or device is not None:
            raise ArgumentError(
                "inference(engine) runs the engine's own weights where they are: checkpoint, tag, average, dtype,"
                " stage, zero, keep and device can't be given with it; for another dtype, or an average,"
                " deepc.export(engine or EMA, folder, dtype=...) and load that"
            )
        if model.part is not None:
            raise UnsupportedError(
                "inference(engine) of a pipeline: each rank has the layers of its stages alone. Call engine.eval_batch"
                " (return_logits=True gives what the last layer returns), or deepc.export(engine, folder) and"
                " deepc.inference(model, checkpoint=folder)"
            )
        return InferenceEngine(model.module, model.dtype, trainer=model)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"inference needs a torch.nn.Module or a deepc Engine, got {type(model).__name__}")
    if checkpoint is None and (tag is not None or average is not None):
        raise ArgumentError(
            f"inference(tag={tag!r}, average={average!r}): they name a part of a checkpoint; give its folder,"
            " checkpoint=, as well"
        )
    if stage not in (0, 3):
        raise ArgumentError(
            f"inference(stage={stage!r}): 0 (every rank has the weights) or 3 (once per node); without optimizer states"
            " and gradients 1 and 2 are 0"
        )
    where = torch.device(device) if device is not None else comm.default_device()
    streamed = False  # from disk, or from the host's memory to a GPU
    if zero is not None:
        config = _config(zero, None, where)
        streamed = config.zero.parameters_leave(where.type)
        stage = 3 if config.zero.stage == 3 else stage
    _check_stage(stage, where)
    weights = open_weights(checkpoint, tag, average) if checkpoint is not None else None
    with weights if weights is not None else contextlib.nullcontext():
        return _Builder(
            model, weights, dtype, stage, keep, strict, where, dict(zero or {}) if streamed else None
        ).build()


def _config(zero: Mapping[str, Any], dtype: torch.dtype | None, device: torch.device) -> Config:
    """The configuration of an engine for evaluation, with the section `zero`, in `dtype`. ConfigError."""
    source: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    if dtype in (torch.bfloat16, torch.float16):
        source["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    return Config.load(source, world_size=int(os.environ.get("WORLD_SIZE", "1")), device_type=device.type)


def _check_stage(stage: int, device: torch.device) -> None:
    if stage == 3 and device.type != "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            "inference(stage=3) on several GPUs does not exist; use stage=0, where each has the weights, or put the "
            "model, frozen, into the "
            "one that you train (docs/several-models.md): then its weights are streamed with it"
        )


class _Builder:
    """Turns a module into an InferenceEngine: layers, dtype, place, values, in the order that keeps least in memory."""

    def __init__(
        self,
        model: torch.nn.Module,
        weights: Weights | None,
        dtype: str | torch.dtype | None,
        stage: int,
        keep: Sequence[str],
        strict: bool,
        device: torch.device,
        zero: dict[str, Any] | None,
    ) -> None:
        self.model, self.stage, self.keep, self.strict, self.device = model, stage, keep, strict, device
        self.weights, self.zero = weights, zero
        asked = dtype_of(dtype) if dtype is not None else None
        self.stored_int8 = weights.int8 if weights is not None else set()
        if weights is not None and self.stored_int8 and asked not in (None, torch.int8):
            raise ArgumentError(
                f"{weights.path} holds int8 weights and dtype={dtype!r} was asked for; leave dtype out, or export the "
                "checkpoint in that dtype"
            )
        self.int8 = asked == torch.int8 or bool(self.stored_int8)
        own = next((p.dtype for p in model.parameters() if casts(p)), torch.float32)
        self.dtype = own if asked is None or asked == torch.int8 else asked
        # A model that keeps its own dtype keeps that of each tensor: some are fp32 on purpose (a router's weights).
        self._as_it_is = asked is None and not self.int8
        differ = any(casts(p) and p.dtype != self.dtype for p in model.parameters())
        if self._as_it_is and differ and zero is not None:
            raise UnsupportedError(
                "the model's parameters have several dtypes, which weights that are streamed have not: pass dtype="
                f"'{str(self.dtype).removeprefix('torch.')}', which casts all of them"
            )

    def build(self) -> InferenceEngine:
        model = self.model.requires_grad_(False).eval()
        if self.weights is None:
            empty = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
            self._refuse_meta(empty, "there is no checkpoint to take its values from")
        if self.zero is not None:
            return self._stream(self.zero)
        if self.stored_int8:
            int8.convert(model, self.dtype, self._chosen_by_file(), values=False)
        self._leave_meta()
        late = self.int8 and not self.stored_int8  # quantised here: needs the values first
        if late and self.weights is not None:
            self._load()
        if late:
            int8.convert(model, self.dtype, int8.quantizable(model, self.keep))
        self._cast()
        home = self._share() if self.stage == 3 else None
        if self.weights is not None and not late:
            self._load_on_leaders(home) if home is not None else self._load()
        self._load_extra()
        matmul.choose_own(self.device)
        for of in {self.dtype, *(p.dtype for p in model.parameters())}:
            matmul.choose(of, self.device)
            attention.choose(of, self.device)
        return InferenceEngine(model, self.dtype, home=home)

    def _stream(self, zero: dict[str, Any]) -> InferenceEngine:
        """The weights on disk, or a GPU's in host memory: what ZeRO-3 does with parameters there, without training."""
        from ..assembly import initialize
        from ..engine import Engine

        if self.dtype not in _ON_DISK:
            raise UnsupportedError(
                f"weights in {self.dtype} on disk do not exist: ask for dtype fp32, bf16, fp16 or int8"
            )
        late = Late()
        if self.stored_int8:
            int8.convert(self.model, self.dtype, self._chosen_by_file(), values=False)
        self._leave_meta()
        found = self._found() if self.weights is not None else []
        read: dict[int, Callable[[], torch.Tensor]] = {
            id(t): functools.partial(cast(Weights, self.weights).tensor, stored) for _, t, stored in found
        }
        if self.int8 and not self.stored_int8:
            self._quantize_late(late, read)
        for _, t, _ in found:
            if not isinstance(t, torch.nn.Parameter):
                t.data.copy_(read[id(t)]())
            elif id(t) in read:
                late.take(t, read[id(t)])
        for layer in self.model.modules():
            if isinstance(layer, (int8.Int8Linear, int8.Int8Embedding)):
                keep_bytes(layer.weight)
                keep_bytes(layer.weight_scale)
        self._load_extra()
        config = _config(zero, self.dtype, self.device)
        engine = initialize(
            Engine, watchers=(), model=self.model, config=config.raw, device=self.device, evaluates=True
        )[0]
        return InferenceEngine(self.model, self.dtype, trainer=engine, ours=True)

    def _quantize_late(self, late: Late, read: dict[int, Callable[[], torch.Tensor]]) -> None:
        """The weights that become int8 are quantised when they go to the disk, one at a time. read: id(parameter) ->
        what reads its values from the file; those of the weights go. What a zero.Init has released is read from
        there, else from memory."""
        chosen, names = int8.quantizable(self.model, self.keep), {id(p): n for n, p in self.model.named_parameters()}
        for weight, q, scale in int8.convert(self.model, self.dtype, chosen, values=False):
            of_file = read.pop(id(weight), None)
            source = _Quantized(weight, of_file, chosen[id(weight)], names[id(weight)])
            together = of_file is None and isinstance(weight, Released)
            late.take(q, source.values, together)
            late.take(scale, source.scale, together)

    def _chosen_by_file(self) -> dict[int, int]:
        """The weights that the file has as int8."""
        can, weights = int8.quantizable(self.model), cast(Weights, self.weights)
        chosen = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if weights.find(name) in self.stored_int8:
                if id(p) not in can:
                    raise CheckpointError(
                        f"{weights.path} has '{name}' in int8, but in this model it is not the weight of a linear "
                        "layer (or of an "
                        "embedding tied to one) alone"
                    )
                chosen[id(p)] = can[id(p)]
        return chosen

    @staticmethod
    def _refuse_meta(names: list[str], why: str) -> None:
        if names:
            raise ArgumentError(
                f"'{names[0]}'{f' and {len(names) - 1} more' * (len(names) > 1)} of the model is on the meta device and"
                f" {why}; build the model with values, or under deepc.zero.Init()"
            )

    def _leave_meta(self) -> None:
        meta = [n for n, t in (*self.model.named_parameters(), *self.model.named_buffers()) if t.is_meta]
        if not meta:
            return
        weights = cast(Weights, self.weights)  # without them build() has refused
        stored = {n for n in meta if weights.find(n)}
        if self.strict or len(stored) < len(meta):
            self._refuse_meta([n for n in meta if n not in stored], f"{weights.path} does not have it")
        own = self._own()
        for module in self.model.modules():
            for registry in (module._parameters, module._buffers):
                for name, t in registry.items():
                    if t is not None and t.is_meta:
                        registry[name] = self._empty(t, own)  # type: ignore[assignment]  # a Parameter for a Parameter

    def _empty(self, t: torch.Tensor, own: dict[int, torch.dtype]) -> torch.Tensor:
        """Untouched memory in place of a tensor without values; the same for the same tensor."""
        made = self.__dict__.setdefault("_made", {})
        if id(t) not in made:
            values = torch.empty(t.shape, dtype=self._dtype_of(t, own), device="cpu")
            if self.zero is not None and isinstance(t, torch.nn.Parameter):
                values = without_memory(values)
            made[id(t)] = (
                (torch.nn.Parameter(values, requires_grad=False) if isinstance(t, torch.nn.Parameter) else values),
                t,
            )
        value: torch.Tensor = made[id(t)][0]
        return value

    def _own(self) -> dict[int, torch.dtype]:
        """By identity the dtypes of the tensors that do not take the model's: scales of int8 layers, fp32, and
        buffers, as in training."""
        layers = (m for m in self.model.modules() if isinstance(m, (int8.Int8Linear, int8.Int8Embedding)))
        scales = {id(m.weight_scale): m.weight_scale.dtype for m in layers}
        return {**buffer_dtypes(self.model, self.dtype, None), **scales}

    def _dtype_of(self, t: torch.Tensor, own: dict[int, torch.dtype]) -> torch.dtype:
        """What `t` has as a part of the model for inference."""
        return own.get(id(t), self.dtype) if casts(t) and not self._as_it_is else t.dtype

    @torch.no_grad()
    def _cast(self) -> None:
        """Parameters and buffers on the device, each in its dtype."""
        own = self._own()
        for t in (*self.model.parameters(), *self.model.buffers()):
            t.data = t.data.to(device=self.device, dtype=self._dtype_of(t, own))

    def _share(self) -> Home:
        """Parameters move into node-shared memory; with one rank they stay."""
        with Init() as made:
            home = made.home
            for module in self.model.modules():
                for p in module._parameters.values():
                    made.take(p)
        return home

    def _load_on_leaders(self, home: Home) -> None:
        """A node's first rank writes what all its ranks see. What it raises is raised on all ranks. Collective."""
        from ..states.access import _raise_everywhere

        failure: Exception | None = None
        try:
            if home.group.leader:
                self._load()
            else:
                self._load(buffers_only=True)
        except Exception as exc:  # told to the other ranks
            failure = exc
        _raise_everywhere(home.group, failure)

    @torch.no_grad()
    def _load(self, buffers_only: bool = False) -> None:
        weights = cast(Weights, self.weights)
        for _, t, stored in self._found():
            if not buffers_only or not isinstance(t, torch.nn.Parameter):
                fill(t, weights.tensor(stored))

    def _load_extra(self) -> None:
        """What get_extra_state of the modules returned when the checkpoint was saved."""
        from ..states.saving import extra_states

        if self.weights is None:
            return
        if left := [n for n, m in extra_states(self.model) if not self.weights.take_extra(m, n)]:
            logger.warning("%s has no extra state of the modules, which keep theirs: %s", self.weights.path, left)

    def _found(self) -> list[tuple[str, torch.Tensor, str]]:
        """(name, parameter or buffer, name that it is stored under) of what is stored, each tensor once."""
        weights = cast(Weights, self.weights)
        out: list[tuple[str, torch.Tensor, str]] = []
        used: set[str] = set()
        wanted = [*self.model.named_parameters(remove_duplicate=False), *_persistent(self.model)]
        by_tensor: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, t in wanted:
            by_tensor.setdefault(id(t), []).append((name, t))
        missing = []
        for names in by_tensor.values():
            found = [f for n, _ in names if (f := weights.find(n)) is not None]
            used.update(found)
            if not found:
                missing.append(names[0][0])
                continue
            self._check_shape(names[0][0], names[0][1], found[0])
            out.append((names[0][0], names[0][1], found[0]))
        extra = [n for n in weights.names if n not in used]
        if self.strict and (missing or extra):
            raise CheckpointError(
                f"{weights.path} does not fit the model: missing {missing[:5]}{'...' * (len(missing) > 5)}, unexpected "
                f"{extra[:5]}"
                f"{'...' * (len(extra) > 5)} ({len(missing)} and {len(extra)}); strict=False loads what fits"
            )
        return out

    def _check_shape(self, name: str, t: torch.Tensor, stored: str) -> None:
        weights = cast(Weights, self.weights)
        shape = weights.names[stored][1]
        if tuple(shape) != tuple(t.shape):
            raise CheckpointError(
                f"{weights.path}: '{stored}' has shape {tuple(shape)} there and {tuple(t.shape)} in the model "
                f"('{name}')"
            )


class _Quantized:
    """A weight of a linear layer that becomes int8 when its values are asked for. read: gives them (None: the weight
    has them); axis: its output channels. Values and scales are asked for once each, one after the other."""

    def __init__(
        self, weight: torch.nn.Parameter, read: Callable[[], torch.Tensor] | None, axis: int, name: str
    ) -> None:
        self._weight, self._read, self._axis, self._name = weight, read, axis, name
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def _make(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._made is None:
            w = self._weight
            # What a file has is rounded to the model's dtype first, as where the model is in memory.
            value = self._read().to(w.dtype) if self._read is not None else _value_of(w)
            self._made = int8.quantize(value, self._axis, self._name)
            return self._made
        made, self._made = self._made, None
        return made

    def values(self) -> torch.Tensor:
        return self._make()[0]

    def scale(self) -> torch.Tensor:
        return self._make()[1]


def _value_of(p: torch.nn.Parameter) -> torch.Tensor:
    return p._deepc_owner.copy_of(p) if isinstance(p, Released) else p.detach()


def _persistent(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, b in module._buffers.items():
            if b is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}." if prefix else "") + name, b


class InferenceEngine(Served):
    """See deepc.inference. `engine(...)` runs the model without gradients, floating-point inputs cast to its dtype;
    `generate(...)` its generation. `module`: the model; gradients with respect to inputs come from calling that.
    trainer: the engine whose weights these are, or None; ours: it was made for this and ends with it."""

    def __init__(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype,
        *,
        trainer: EngineBase | None = None,
        home: Home | None = None,
        ours: bool = False,
    ) -> None:
        super().__init__()
        self.__dict__["trainer"] = trainer  # not a submodule: its parameters are not ours
        self._ours = ours
        self.module, self._dtype, self._home = module, dtype, home

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in now."""
        return self._dtype if self.trainer is None else self.trainer.dtype

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Without gradients; a module that trains is in evaluation mode meanwhile."""
        trains = self.trainer is not None and not self._ours
        cure = CAST_BUFFERS if trains else "model.to(...) before deepc.inference"
        with torch.no_grad(), mixing_is_told(self.module, self.dtype, cure):
            if self.trainer is None:
                yield
                return
            with evaluating(self.module), self.trainer.state.running():
                yield

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        from ..data import cast_floats

        with self._running():
            return self.module(*cast_floats(inputs, self.dtype), **cast_floats(kwargs, self.dtype))

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own generate. Where ZeRO-3 streams the weights they stay gathered meanwhile, and it is
        collective; weights on disk are read again for every token, as far as there is no room for them, and each rank
        generates by itself."""
        if not hasattr(self.module, "generate"):
            raise UnsupportedError(
                f"{type(self.module).__name__} has no generate(); call the engine in your own loop, inside "
                "engine.gathered()"
            )
        on_disk = self.trainer is not None and self.trainer.plan.parameters_on
        with self._running(), contextlib.nullcontext() if on_disk else self.gathered():
            return cast(Any, self.module).generate(*inputs, **kwargs)

    def destroy(self) -> None:
        """The end: what lies on disk goes. Nothing to do for weights in memory, or of an engine that trains."""
        if self.trainer is not None and self._ours:
            cast("Engine", self.trainer).destroy()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Context for many calls in a row: weights that ZeRO-3 streams stay, all of them. No effect elsewhere."""
        return self.trainer.keep_gathered() if self.trainer is not None else contextlib.nullcontext()

    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, each once: at stage 3 of the node, else of this rank."""
        return sum(
            t.numel() * t.element_size()
            for t in {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}.values()
        )
