"""deepspeed.checkpointing: blocks that are computed again in backward, by torch.utils.checkpoint, with DeepSpeed's
options: parts of their inputs on tensor-parallel ranks, one piece of memory for them, random states.

configure() and the names in capitals, which scripts set, are about the calls of checkpoint() here. A section
activation_checkpointing of an engine's configuration is about every checkpoint in its forward, torch's too; where both
ask for parts, the engine cuts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

from ...core.foreign import private
from ...engine.states.activations import Activations, Place, packed, place_of, unpack
from ...errors import ConfigError, UnsupportedError
from ...parallel.saved import Partition
from ...parallel.tensor.group import TensorGroup, tensor_group
from ..helpers import groups
from ..helpers.devices.accelerator import get_accelerator
from ..helpers.utils import logger

# As in DeepSpeed: what configure() has set.
deepspeed_checkpointing_enabled = False
mpu: Any = None
num_layers: int | None = None
PARTITION_ACTIVATIONS = False
CPU_CHECKPOINT = False
CONTIGUOUS_CHECKPOINTING = False
SYNCHRONIZE = False
PROFILE_TIME = False

_told: set[str] = set()
_piece: Place | None = None  # of CONTIGUOUS_CHECKPOINTING
_host: Place | None = None  # of CPU_CHECKPOINT, on a GPU
_group: tuple[Any, TensorGroup] | None = None  # of an mpu's process group


class _ConfigureError(ConfigError, AssertionError):
    """DeepSpeed asserts."""


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """What checkpoint() does. mpu_: has get_tensor_model_parallel_group() or get_model_parallel_group(); without it the
    tensor-parallel ranks are those of the last engine. deepspeed_config: a configuration, whose section
    activation_checkpointing the arguments replace."""
    global deepspeed_checkpointing_enabled, mpu, num_layers
    global PARTITION_ACTIVATIONS, CPU_CHECKPOINT, CONTIGUOUS_CHECKPOINTING, SYNCHRONIZE, PROFILE_TIME
    mpu = mpu_ if mpu_ is not None else mpu
    asked: dict[str, Any] = {}
    if deepspeed_config is not None:
        from ...config.tree import Config

        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        device = get_accelerator().device_name()
        config = Config.load(deepspeed_config, world_size=world, device_type=device, allow_auto=True, needs_batch=False)
        section = config.activation_checkpointing
        asked = {
            "partition_activations": section.partition_activations,
            "contiguous_checkpointing": section.contiguous_memory_optimization,
            "num_checkpoints": section.number_checkpoints,
            "checkpoint_in_cpu": section.cpu_checkpointing,
            "synchronize": section.synchronize_checkpoint_boundary,
            "profile": section.profile,
        }
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    asked |= {k: v for k, v in given.items() if v is not None}
    if asked.get("contiguous_checkpointing"):
        if not asked.get("partition_activations"):
            raise _ConfigureError(
                "checkpointing.configure(contiguous_checkpointing=True) needs partition_activations=True, as in"
                " DeepSpeed; add it, or set activation_checkpointing.contiguous_memory_optimization in the engine's"
                " configuration, which does not need it"
            )
        if asked.get("num_checkpoints") is None:
            raise _ConfigureError(
                "checkpointing.configure(contiguous_checkpointing=True): must specify the number of layers, as"
                " num_checkpoints= or activation_checkpointing.number_checkpoints"
            )
        if get_accelerator().device_name() != "cpu":
            raise UnsupportedError(
                "checkpointing.configure(contiguous_checkpointing=True) exists on CPUs; leave it out"
            )
    num_layers = asked.get("num_checkpoints")
    PARTITION_ACTIVATIONS = bool(asked.get("partition_activations"))
    CPU_CHECKPOINT = bool(asked.get("checkpoint_in_cpu"))
    CONTIGUOUS_CHECKPOINTING = bool(asked.get("contiguous_checkpointing"))
    SYNCHRONIZE, PROFILE_TIME = bool(asked.get("synchronize")), bool(asked.get("profile"))
    deepspeed_checkpointing_enabled = True
    reset()


def follow(section: Any) -> None:
    """What the configuration of an engine asks of calls here, where the script has not called configure()."""
    global SYNCHRONIZE, PROFILE_TIME
    if not deepspeed_checkpointing_enabled:
        SYNCHRONIZE, PROFILE_TIME = section.synchronize_checkpoint_boundary, section.profile


def is_configured() -> bool:
    return deepspeed_checkpointing_enabled


def set_num_layers(nlayers: int) -> None:
    global num_layers
    num_layers = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    global PARTITION_ACTIVATIONS
    PARTITION_ACTIVATIONS = partition_activation


def reset() -> None:
    """The contiguous memory is given back when what lies there has gone; the next forward has a new piece."""
    global _piece
    _piece = None


# ---- a checkpoint ----------------------------------------------------------------------------------------------------
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), whose activations are computed again in backward. As DeepSpeed's, it gives parameters
    a gradient only where some tensor argument requires one."""
    return _run(function, args, kwargs, True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same, which inputs may be without gradients for."""
    return _run(function, args, {}, False)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reentrant: bool) -> Any:
    _wait()
    began = time.perf_counter()
    replayed = _Replayed(function, len(args), tuple(kwargs))
    with _hooks():
        out = _checkpoint(replayed, *args, *kwargs.values(), use_reentrant=reentrant)
    _wait()
    if PROFILE_TIME:
        logger.info("checkpoint forward: %.3f ms", 1000 * (time.perf_counter() - began))
    if (PROFILE_TIME or SYNCHRONIZE) and torch.is_grad_enabled():
        _watch_backward(out, (*args, *kwargs.values()), reentrant)
    if isinstance(out, torch.Tensor) or not isinstance(out, (tuple, list)):
        return out
    return out[0] if len(out) == 1 else tuple(out)


class _Replayed:
    """A function that runs in a forward, and again in backward with the random states that the tracker had then."""

    def __init__(self, function: Callable[..., Any], positional: int, keywords: tuple[str, ...]) -> None:
        self._function, self._positional, self._keywords = function, positional, keywords
        self._states: dict[str, torch.Tensor] | None = None

    def __call__(self, *given: Any) -> Any:
        args, kwargs = given[: self._positional], dict(zip(self._keywords, given[self._positional :]))
        if self._states is None:
            self._states = _tracker.get_states()
            return self._function(*args, **kwargs)
        now = _tracker.get_states()
        _tracker.set_states(dict(self._states))
        try:
            return self._function(*args, **kwargs)
        finally:
            _tracker.set_states(now)


def _wait() -> None:
    if SYNCHRONIZE or PROFILE_TIME:
        get_accelerator().synchronize()


def _watch_backward(out: Any, inputs: tuple[Any, ...], reentrant: bool) -> None:
    """Waits and takes the time where the call's backward begins and ends. The end of a checkpoint that is not reentrant
    is where one of its inputs has its gradient."""
    outs = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
    last = next((t.grad_fn for t in outs if t.grad_fn is not None), None)
    if last is None:
        return
    began: list[float] = []
    profiled = PROFILE_TIME

    def begin(*_: Any) -> None:
        get_accelerator().synchronize()
        began.append(time.perf_counter())

    def end(*_: Any) -> None:
        get_accelerator().synchronize()
        if profiled and began:
            logger.info("checkpoint backward: %.3f ms", 1000 * (time.perf_counter() - began.pop()))

    last.register_prehook(begin)
    before = next((t.grad_fn for t in inputs if isinstance(t, torch.Tensor) and t.grad_fn is not None), None)
    if reentrant:
        last.register_hook(end)
    elif before is not None:
        before.register_prehook(end)
    else:
        last.register_prehook(lambda *_: private.at_end_of_backward(end))


def _hooks() -> contextlib.AbstractContextManager[Any]:
    """Around a call: of its inputs, which are all that is saved there, the part and the place that were asked for."""
    place, group = _place(), _tensor_ranks()
    if (group is None and not place.moves) or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    above = private.top_saved_hooks(False)
    engine = getattr(above[0], "__self__", None) if above else None
    if isinstance(engine, Activations) and (engine.cuts or group is None):
        return contextlib.nullcontext()
    cut = None if group is None else Partition(group, place.put)

    def pack(x: torch.Tensor) -> Any:
        alike = x.is_floating_point() and x.device.type == "cpu" and getattr(x, "no_checkpointing", False) is False
        return packed(x, place if x.device.type == place.of else Place(), cut if alike else None)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _place() -> Place:
    global _piece, _host
    if CONTIGUOUS_CHECKPOINTING:
        if _piece is None:
            _piece = place_of("contiguous", num_layers or 1)
        return _piece
    if not CPU_CHECKPOINT:
        return Place()
    device = get_accelerator().device_name()
    if device == "cpu":
        _tell("checkpoint_in_cpu has no effect here: a CPU run keeps everything in host memory anyway")
        return Place()
    if _host is None:
        _host = place_of("host", device)
    return _host


def _tensor_ranks() -> TensorGroup | None:
    """Who shares the parts; None: nobody, or nothing was asked for."""
    global _group
    if not PARTITION_ACTIVATIONS:
        return None
    found = TensorGroup(None, 0, 1)
    if mpu is not None:
        own = _of_mpu("group")
        if _group is None or _group[0] is not own:
            _group = own, TensorGroup.of(own)
        found = _group[1]
    elif groups._cut():
        found = tensor_group(groups._mesh)
    if found.size == 1:
        _tell("partition_activations has no effect here: there are no tensor-parallel ranks that have the other parts")
        return None
    return found


def _of_mpu(what: str) -> Any:
    """get_tensor_model_parallel_<what>() of the mpu, or its older name."""
    for name in (f"get_tensor_model_parallel_{what}", f"get_model_parallel_{what}"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise UnsupportedError(
        f"checkpointing.configure(mpu_={type(mpu).__name__}): it has neither get_tensor_model_parallel_{what} nor"
        f" get_model_parallel_{what}; give it one of them, or None for the ranks of the engine"
    )


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        logger.info("checkpointing: %s", text)


# ---- random states ---------------------------------------------------------------------------------------------------
_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"


class RNGStatesTracker:
    """Named random states (Megatron's): fork(name) runs with one and puts the other back. On the CPU or the current
    GPU. checkpoint() computes again with the states that its forward had."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists")
        if name in self.states_:
            raise ValueError(f"random state {name} already exists")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise ValueError(f"random state {name} is not added")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


CudaRNGStatesTracker = RNGStatesTracker
_tracker = RNGStatesTracker()


def get_cuda_rng_tracker() -> RNGStatesTracker:
    return _tracker


def _tensor_rank() -> int:
    if mpu is not None:
        return int(_of_mpu("rank"))
    return tensor_group(groups._mesh).rank if groups._cut() else 0


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default generator with `seed`, the same on all tensor-parallel ranks, and the tracker's model-parallel
    state with another one on each: seed + 2718 + rank, as in Megatron."""
    rank = _tensor_rank()
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """The tracker's model-parallel state begins anew from `seed`; the default generator goes on."""
    with _tracker.fork():
        get_accelerator().manual_seed(seed + 2718 + _tensor_rank())
