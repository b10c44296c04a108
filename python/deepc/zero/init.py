"""ZeRO-3's user interface: build models straight into node-shared memory (`Init`), read and write partitioned
parameters (`GatheredParameters`), and what a parameter says of itself under DeepSpeed's names (`ds_id`, `ds_status`,
...).

Between `Init` and deepc.initialize a model's parameters lie in chunks of node-shared memory: once per node, written by
the node's first rank. In resident mode (CPU nodes) that stays so: they are pages that all ranks of a node map, always
readable, and writing is for one rank. Where ranks share no memory (nodes with different numbers of ranks), each has its
part of them (init_shards.py).
"""

from __future__ import annotations

import contextlib
import enum
import gc
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Union, cast

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ArgumentError, ConfigError, StrayWriteError, UnsupportedError
from .param import Released, close_shared, open_shared, share, unshare
from .shards import Shards, give

if TYPE_CHECKING:
    from ..comm.groups import MemoryGroup
    from ..engine.engine import Engine

    ConfigSource = Union[str, os.PathLike[str], dict[str, Any]]  # noqa: UP007
    Params = Sequence[torch.nn.Parameter]

# id(parameter) -> engine that holds it at stage 3; entries go with the engine.
_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_built = WeakIdKeyDictionary()  # parameter -> _Home, from zero.Init to deepc.initialize
_ids = WeakIdKeyDictionary()  # parameter -> ds_id
_next_id = itertools.count()


def _register(params: Iterable[torch.nn.Parameter], engine: Engine) -> None:
    for p in params:
        _engines[id(p)] = engine
        share(p)
        _identify(p)


def _unregister(engine: Engine) -> None:
    """The engine ends: its parameters are ordinary ones."""
    for p in [*engine.state.trained, *(p for _, p in engine.state.frozen)]:
        if _engines.get(id(p)) is engine:
            del _engines[id(p)]
            unshare(p)


def _identify(p: torch.nn.Parameter) -> None:
    if p not in _ids:
        _ids[p] = next(_next_id)


# ---- what a parameter says of itself ---------------------------------------------------------------------------------
class ZeroParamStatus(enum.Enum):
    """DeepSpeed's states of a stage-3 parameter. In resident mode always AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def describe(p: torch.nn.Parameter, what: str) -> Any:
    """The value of attribute `what` (ds_id, ds_shape, ds_numel, ds_status, ds_persist) of a stage-3 parameter;
    AttributeError for any other."""
    engine = _engines.get(id(p))
    if engine is None and p not in _built:
        raise AttributeError(
            f"parameter of shape {tuple(p.shape)} has no {what}: it is not held by a ZeRO-3 engine and was not built "
            "under zero.Init"
        )
    if what == "ds_id":
        return _ids[p]
    if what == "ds_shape":
        return p.shape
    if what == "ds_numel":
        return p.numel()
    available = not isinstance(p, Released) if engine is None else engine.state.is_available(p)
    if what == "ds_status":
        return ZeroParamStatus.AVAILABLE if available else ZeroParamStatus.NOT_AVAILABLE
    raise AttributeError(
        f"a deepc parameter has no {what}: a rank's partition is a part of deepc's flat space, not a tensor of the "
        "parameter. Read and write "
        "it through deepc.view(p).local or deepc.utils.safe_get_local_*"
    )


def is_zero_param(p: object) -> bool:
    """True if `p` is held by a stage-3 engine or was built under zero.Init."""
    return isinstance(p, torch.Tensor) and (id(p) in _engines or p in _built)


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Accepted as in DeepSpeed, and not needed: parameters that are used outside of their module are found without
    it."""
    if not isinstance(parameter, torch.nn.Parameter):
        raise ArgumentError(f"register_external_parameter takes a torch.nn.Parameter, got {type(parameter).__name__}")
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"register_external_parameter takes a torch.nn.Module, got {type(module).__name__}")
    module.__dict__.setdefault("_external_params", {})[id(parameter)] = parameter


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Takes it back. ArgumentError if it was not registered."""
    if not isinstance(parameter, torch.nn.Parameter):
        raise ArgumentError(f"unregister_external_parameter takes a torch.nn.Parameter, got {type(parameter).__name__}")
    if getattr(module, "_external_params", {}).pop(id(parameter), None) is None:
        raise ArgumentError(
            f"parameter of shape {tuple(parameter.shape)} was not registered as an external parameter of "
            f"{type(module).__name__}"
        )


# ---- zero.Init -------------------------------------------------------------------------------------------------------
class _Arena:
    """Chunks of node-shared memory that parameters are built into. `seal` gives the chunks to their tensors: then one
    goes when its last tensor does."""

    CHUNK = 64 << 20

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group
        self._chunks: list[list[Any]] = []  # [segment, bytes used]
        self._ranges: list[tuple[int, int]] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of shared memory. Collective."""
        nbytes = (numel * dtype.itemsize + 127) // 128 * 128
        fits = (c for c in self._chunks[-1:] if c[1] + nbytes <= c[0].nbytes)
        chunk = next(fits, None)
        if chunk is None:
            segment = self._group.segment(max(self.CHUNK, nbytes))
            base = segment.tensor(torch.uint8, 0, segment.nbytes).data_ptr()
            self._ranges.append((base, base + segment.nbytes))
            chunk = [segment, 0]
            at = len(self._chunks) - 1 if nbytes >= self.CHUNK and self._chunks else len(self._chunks)
            self._chunks.insert(at, chunk)  # a chunk of its own does not end the one being filled
        out: torch.Tensor = chunk[0].tensor(dtype, chunk[1], numel)
        chunk[1] += nbytes
        return out

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is a CPU tensor over this arena's memory."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        address = tensor.data_ptr()
        return any(lo <= address < hi for lo, hi in self._ranges)

    def spread(self) -> None:
        """Rank 0's values of everything to all nodes; called on every rank. Chunks, not parameters: which of those
        still live is the garbage collector's choice, and may differ between ranks."""
        for segment, used in self._chunks:
            if used:
                self._group.spread(segment.tensor(torch.uint8, 0, used))

    def seal(self) -> None:
        self._chunks = []


class _Home:
    """Where the parameters of one zero.Init (with the ones nested in it) lie, and the ranks that share them; closed
    when the last of them has gone to an engine or away. arena: of ranks that share memory; shards: of others (nodes
    with different numbers of ranks).
    """

    def __init__(self) -> None:
        import datetime

        from ..comm.groups import MultiNodeGroup, NodeGroup, open_group
        from ..comm.start import init_distributed

        init_distributed()
        self.group = open_group(torch.device("cpu"), datetime.timedelta(minutes=10), "init")
        shared = isinstance(self.group, (NodeGroup, MultiNodeGroup))
        self.arena = _Arena(cast("MemoryGroup", self.group)) if shared else None
        self.shards = Shards() if self.group.world > 1 and not shared else None
        self.taken: list[weakref.ref[torch.nn.Parameter]] = []
        self.versions = WeakIdKeyDictionary()

    def take(self, p: torch.nn.Parameter, dtype: torch.dtype) -> None:
        """Moves `p` into shared memory (collective); with one rank it is only cast."""
        if self.arena is not None:
            shared = self.arena.take(p.numel(), dtype)
            if self.group.leader:
                shared.copy_(p.data.reshape(-1))
            p.data = shared.view(p.shape)
        elif self.shards is not None:
            self.shards.take(p, dtype)
        elif dtype != p.dtype:
            p.data = p.data.to(dtype)
        self.taken.append(weakref.ref(p))
        _built[p] = self
        _identify(p)

    def _moved(self, arena: _Arena) -> list[torch.nn.Parameter]:
        """Parameters whose memory was replaced since (`p.data = ...` in a constructor)."""
        return [p for r in self.taken if (p := r()) is not None and p.numel() and not p.is_meta and not arena.holds(p)]

    def finish(self) -> None:
        """The end of the context. Collective."""
        if self.arena is not None:
            self._finish_arena(self.arena)
        if self.shards is not None:
            self.shards.finish()
        for p in (p for r in self.taken if (p := r()) is not None and _built.get(p) is self):
            share(p)
            self.versions[p] = p._version
        self.taken = []

    def _finish_arena(self, arena: _Arena) -> None:
        moved = self._moved(arena)
        if any(self.group.gather_all(torch.tensor([len(moved)])).view(-1).tolist()):
            gc.collect()  # what is garbage on one rank and not yet on another must not count
            moved = self._moved(arena)
            if (
                len(
                    {
                        *map(
                            tuple,
                            self.group.gather_all(torch.tensor([len(moved), sum(p.numel() for p in moved)])).tolist(),
                        )
                    }
                )
                == 1
            ):
                for p in moved:
                    self.take(p, p.dtype)
        self.group.node_barrier()
        if self.group.leader:
            arena.spread()
        self.group.barrier()
        arena.seal()

    def wrote(self, p: torch.nn.Parameter) -> bool:
        """Whether this rank, which is not the first of its node, wrote into `p` since the context ended."""
        if self.arena is None or self.group.leader or p not in self.versions:
            return False
        return p._version != self.versions[p] and self.arena.holds(p)

    def close(self) -> None:
        group = self.__dict__.pop("group", None)  # also of one whose making failed
        if group is not None:
            group.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process, what it needs may be gone
            self.close()


def _adopt(named: Sequence[tuple[str, torch.nn.Parameter]], sharded: bool) -> None:
    """The parameters go to an engine. Raises on all ranks if some rank wrote into memory that others share. sharded:
    the engine takes those that are released one at a time (init_shards.give). Collective if any was built under
    Init."""
    homes: dict[int, _Home] = {}
    stray = -1
    for i, (_, p) in enumerate(named):
        home = _built.get(p)
        if home is not None:
            homes[id(home)] = home
            if stray < 0 and home.wrote(p):
                stray = i
    for home in homes.values():
        if home.arena is not None:
            for rank, i in enumerate(home.group.gather_all(torch.tensor([stray])).view(-1).tolist()):
                if i >= 0:
                    raise StrayWriteError(
                        f"parameter '{named[i][0]}' was written on rank {rank} after zero.Init. It lies in memory that"
                        " all ranks of the node share, so every rank's write acted. Write it inside the zero.Init"
                        " context, or under deepc.zero.GatheredParameters(params, modifier_rank=0)"
                    )
    for _, p in named:
        if _built.pop(p, None) is not None:
            unshare(p)  # the engine decides anew
            if not sharded:
                give(p)


_METADATA = frozenset(
    {
        "requires_grad_",
        "detach_",
        "set_",
        "resize_",
        "resize_as_",
        "rename_",
        "squeeze_",
        "unsqueeze_",
        "t_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "as_strided_",
        "share_memory_",
        "retain_grad_",
    }
)
_RANDOM = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"}
)
_INPLACE = frozenset(
    {
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
    }
)


class _OwnerWrites(torch.overrides.TorchFunctionMode):
    """On ranks other than the first of their node, in-place writes to parameters under construction (`init.normal_`,
    `p.data.copy_`, a parent's weight init) are left out: the memory is shared and the first one writes it. Random ones
    draw into scratch, so that all ranks' generators stay equal."""

    def __init__(self, arena: _Arena) -> None:
        super().__init__()
        self._arena = arena

    def _held(self, x: Any) -> bool:
        return (
            isinstance(x, torch.Tensor)
            and self._arena.holds(x)
            or isinstance(x, (list, tuple))
            and any(map(self._held, x))
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = name in _INPLACE or (name.endswith("_") and not name.endswith("__") and name not in _METADATA)
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes its tensor by name
        if writes and self._held(target):
            if name in _RANDOM or getattr(func, "__module__", "") == "torch.nn.init":
                scratch = torch.empty_like(cast(torch.Tensor, target))
                func(scratch, *args[1:], **{k: v for k, v in kwargs.items() if k != "tensor"})
            return target
        if "out" in kwargs and self._held(out := kwargs["out"]):
            scratch = torch.empty_like(out) if isinstance(out, torch.Tensor) else type(out)(map(torch.empty_like, out))
            func(*args, **{**kwargs, "out": scratch})
            return out
        return func(*args, **kwargs)


class Init:
    """Context in which every parameter that a module gets lies in node-shared memory from that moment on, so that no
    rank ever holds the model: one copy per node, and of private memory at most the parameter just being made. With one
    rank it only sets the dtype. The values are rank 0's; on other nodes they are so when the context ends. All ranks
    build the same model. Contexts may be nested; of the dtypes the innermost counts.

    transformers' from_config and from_pretrained build and load one parameter at a time under it, also while an
    HfDeepSpeedConfig lives.

    config_dict_or_path (or config): a DeepSpeed JSON (its fp16/bf16 section sets the dtype); dtype overrides it;
    without either, parameters keep theirs. `enabled=False`: does nothing. `module`: converts an existing module at
    once. data_parallel_group, sequence_data_parallel_group, mpu: must span all ranks. remote_device: None, "none" or
    "cpu". The other arguments of deepspeed.zero.Init are accepted and have no meaning here."""

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: ConfigSource | None = None,
        config: ConfigSource | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: dist.ProcessGroup | None = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        param_swapper: object = None,
        tensor_overrides: object = None,
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"zero.Init(dtype={dtype!r}): it is a floating-point torch.dtype")
        if remote_device not in (None, "none", "cpu"):
            raise UnsupportedError(
                f"zero.Init(remote_device={remote_device!r}): parameters lie in the node's memory; NVMe does not exist "
                "yet. Leave it out"
            )
        if param_swapper is not None:
            raise UnsupportedError("zero.Init(param_swapper=...): parameters are not swapped to NVMe yet; leave it out")
        raw = config_dict_or_path if config_dict_or_path is not None else config
        self.dtype = dtype if dtype is not None or raw is None else _dtype_of(raw)
        _check_groups(
            {
                "data_parallel_group": data_parallel_group,
                "sequence_data_parallel_group": sequence_data_parallel_group,
                "zero_param_parallel_group": zero_param_parallel_group,
                "mpu": mpu.get_data_parallel_group() if mpu is not None else None,
            }
        )
        if module is not None:
            with self:
                for m in module.modules():
                    for p in m._parameters.values():
                        self._take(p)

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        self._outermost = not _active
        if self._outermost:
            self._home = _Home()
            self._stack = contextlib.ExitStack()
            self._stack.callback(register_module_parameter_registration_hook(_registered).remove)
            self._stack.enter_context(_transformers_loads_one_by_one())
            if self._home.shards is not None:
                self._stack.enter_context(self._home.shards.parameters_of_parameters())
            if self._home.arena is not None and not self._home.group.leader:
                self._stack.enter_context(_OwnerWrites(self._home.arena))
        else:
            self._home = _active[-1]._home
        _active.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        if not self.enabled:
            return
        _active.remove(self)
        home = self.__dict__.pop("_home")
        if self._outermost:
            self._stack.close()
            if exc[0] is None:
                home.finish()
            else:
                home.close()

    @torch.no_grad()
    def _take(self, p: torch.nn.Parameter | None) -> None:
        if p is None or p in _built or id(p) in _engines:
            return
        if torch.nn.parameter.is_lazy(p) or p.device.type != "cpu" or p.layout != torch.strided:
            return
        self._home.take(p, self.dtype if self.dtype is not None and p.is_floating_point() else p.dtype)


_active: list[Init] = []


def _registered(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    _active[-1]._take(param)


@contextlib.contextmanager
def _transformers_loads_one_by_one() -> Iterator[None]:
    """transformers would take a living HfDeepSpeedConfig as a sign to import deepspeed, and reads checkpoints ahead in
    threads, the whole model if they are faster than its main thread. Both are switched off while a zero.Init is
    open."""
    name, key = "HF_DEACTIVATE_ASYNC_LOAD", "_hf_deepspeed_config_weak_ref"
    before = os.environ.get(name)
    os.environ[name] = "1"
    module = sys.modules.get("transformers.integrations.deepspeed")
    living = getattr(module, key, None)
    if living is not None:
        setattr(module, key, None)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
        if living is not None:
            setattr(module, key, living)


def _check_groups(groups: dict[str, Any]) -> None:
    for name, group in groups.items():
        if group is not None and dist.is_initialized() and dist.get_world_size(group) != dist.get_world_size():
            raise UnsupportedError(
                f"zero.Init({name}=...): a group of {dist.get_world_size(group)} of the {dist.get_world_size()} ranks; "
                "deepc partitions over all "
                "ranks (model parallelism does not exist yet). Leave it out"
            )


def _dtype_of(raw: Any) -> torch.dtype | None:
    """The dtype that a DeepSpeed configuration (dict, JSON text or path) asks for, or None."""
    import json
    from pathlib import Path

    if not isinstance(raw, dict):
        try:
            text = str(raw)
            raw = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"zero.Init: {str(raw)[:200]!r} is no DeepSpeed configuration (a dict, JSON text or the path of a JSON "
                f"file): {exc}"
            ) from exc
    for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        if isinstance(raw.get(key), dict) and raw[key].get("enabled") is True:
            return dtype
    return None


# ---- zero.GatheredParameters -----------------------------------------------------------------------------------------
class GatheredParameters:
    """Context for reading, and with `modifier_rank` writing, parameters of a stage-3 model, or of one that was built
    under zero.Init and has no engine yet. Collective over the ranks; parameters are whole inside.

    modifier_rank=None: for reading; a write inside raises StrayWriteError at the end. modifier_rank=r: what rank r
    writes in place is seen by all ranks after the context, and the fp32 masters follow; what other ranks write is
    private and dropped, as in DeepSpeed, where scripts often run the same code on all ranks (with DEEPC_DEBUG=1 it is
    an error that names rank and parameter). fwd_module: the parameters become external parameters of it. Parameters
    that are neither are left alone. Contexts that write may not overlap in parameters."""

    def __init__(
        self,
        params: torch.Tensor | torch.nn.Module | Iterable[torch.Tensor | None],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: Iterable[Any]
        if isinstance(params, torch.Tensor):
            given = [params]
        elif isinstance(params, torch.nn.Module):
            given = params.parameters()
        else:
            given = params
        given = [p for p in given if p is not None]
        for p in given:
            if not isinstance(p, torch.Tensor):
                raise ArgumentError(f"GatheredParameters takes parameters, got {type(p).__name__}")
        unique = {id(p): p for p in given} if enabled else {}
        self._params = [p for p in unique.values() if is_zero_param(p)]
        self._modifier = modifier_rank
        if modifier_rank is not None and not (isinstance(modifier_rank, int) and not isinstance(modifier_rank, bool)):
            raise ArgumentError(f"modifier_rank is a rank or None, got {modifier_rank!r}")
        if fwd_module is not None:
            for p in self._params:
                register_external_parameter(fwd_module, p)

    def __enter__(self) -> None:
        holders: dict[int, tuple[Engine | _Home, list[torch.nn.Parameter]]] = {}
        for p in self._params:
            holder: Engine | _Home = _engines.get(id(p)) or _built[p]
            holders.setdefault(id(holder), (holder, []))[1].append(p)
        self._open = [
            _Opened(_Unowned(h) if isinstance(h, _Home) else _Owned(h), params, self._modifier)
            for h, params in holders.values()
        ]
        for opened in self._open:
            opened.begin()

    def __exit__(self, *exc: Any) -> None:
        opened, self._open = self._open, []
        errors: list[Exception] = []
        for o in reversed(opened):
            try:
                o.end(exc[0] is not None)
            except StrayWriteError as error:  # the others' parameters go home first
                errors.append(error)
        if errors:
            raise errors[0]


class _Owned:
    """What GatheredParameters needs of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.group, self.state = engine, engine.group, engine.state

    def begin(self, params: Params, writer: int | None) -> Any:
        if writer is not None:
            self.engine._raise_stray_writes()
        return self.state.open_params(params, writer)

    def end(self, params: Params, writer: int | None, opened: Any) -> None:
        self.state.close_params(params, writer, opened)
        if writer is not None:
            self.engine._parameters_modified(params)

    def written(self, params: Params) -> str | None:
        """The name of the first of `params` that this rank wrote."""
        indices = set(self.state.changed())
        mine = {id(p) for p in params}
        names = [self.state.names[i] for i in indices if id(self.state.trained[i]) in mine]
        return names[0] if names else self.state.frozen_write(mine)


class _Unowned:
    """The same of parameters that no engine has yet."""

    def __init__(self, home: _Home) -> None:
        self.home, self.group = home, home.group

    def begin(self, params: Params, writer: int | None) -> Any:
        if self.home.shards is not None:
            return self.home.shards.open(params)
        return open_shared(self.group, params, writer) if self.home.arena is not None else None

    def end(self, params: Params, writer: int | None, opened: Any) -> None:
        if self.home.arena is not None:
            close_shared(self.group, params, writer, opened)
        if self.home.shards is not None:
            self.home.shards.close(params, opened, writer)
        if writer is not None:
            for p in params:
                self.home.versions[p] = p._version

    def written(self, params: Params) -> str | None:
        wrote = [p for p in params if p in self.home.versions and p._version != self.home.versions[p]]
        for p in wrote if self.home.shards is not None else ():
            self.home.versions[p] = p._version  # it was this rank's copy, which is gone
        return f"of shape {tuple(wrote[0].shape)}" if wrote and self.group.world > 1 else None


class _Opened:
    """One GatheredParameters over the parameters of one holder."""

    _writing: set[int] = set()  # id(parameter) of all contexts that write now

    def __init__(self, holder: _Owned | _Unowned, params: list[torch.nn.Parameter], writer: int | None) -> None:
        self._holder, self._params, self._writer = holder, params, writer

    def begin(self) -> None:
        group = self._holder.group
        if self._writer is not None:
            if not 0 <= self._writer < group.world:
                raise ArgumentError(f"modifier_rank {self._writer} is not one of {group.world} ranks")
            if _Opened._writing & {id(p) for p in self._params}:
                raise ArgumentError(
                    "GatheredParameters with a modifier_rank inside another one over the same parameter; close the"
                    " outer one first"
                )
        self._opened = self._holder.begin(self._params, self._writer)
        if self._writer is not None:
            _Opened._writing.update(id(p) for p in self._params)
        self._versions = [p._version for p in self._params]

    def end(self, failed: bool) -> None:
        if self._writer is None:
            self._holder.end(self._params, None, self._opened)
            name = None if failed else self._holder.written([p for p in self._params if id(p) not in _Opened._writing])
            if name is not None:
                raise StrayWriteError(
                    f"parameter {name} was written under GatheredParameters without modifier_rank (or before it), which"
                    " is for reading. Its memory is shared by all ranks of the node: pass modifier_rank=r, and what"
                    " rank r writes counts"
                )
            return
        _Opened._writing.difference_update(id(p) for p in self._params)
        stray = next((i for i, (p, v) in enumerate(zip(self._params, self._versions)) if p._version != v), -1)
        self._holder.end(self._params, self._writer, self._opened)
        if os.environ.get("DEEPC_DEBUG", "0") == "1" and self._holder.group.world > 1:
            for rank, i in enumerate(self._holder.group.gather_all(torch.tensor([stray])).view(-1).tolist()):
                if i >= 0 and rank != self._writer:
                    raise StrayWriteError(
                        f"parameter {i} of GatheredParameters, of shape {tuple(self._params[i].shape)}, was written on "
                        f"rank {rank}, but modifier_rank is "
                        f"{self._writer}: that write was dropped. Guard it by `if rank == {self._writer}:`"
                    )
