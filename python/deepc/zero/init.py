"""zero.Init: models are built straight into node-shared memory.

Between `Init` and deepc.initialize a model's parameters lie in chunks of node-shared memory: once per node, written by
the node's first rank. In resident mode (CPU nodes) that stays so: they are pages that all ranks of a node map, always
readable, and writing is for one rank. Where ranks share no memory (nodes with different numbers of ranks), each has its
part of them (shards.py).
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.groups import MultiNodeGroup, NodeGroup, open_group
from ..comm.start import default_device, init_distributed
from ..config.tree import Config
from ..core import memory
from ..core.foreign import patches
from ..core.ops import casts
from ..errors import ArgumentError, ConfigError, StrayWriteError, UnsupportedError
from ..offload.place import make_folder
from .parameters import around
from .parameters.gathered import Params, SharedMemory, Whole, built, holder_of, number
from .parameters.param import Released, share, unshare
from .shards import Shards, give

if TYPE_CHECKING:
    from ..comm.groups import MemoryGroup

    ConfigSource = Union[str, os.PathLike[str], dict[str, Any]]  # noqa: UP007


# ---- zero.Init -------------------------------------------------------------------------------------------------------
class _Drawn(NamedTuple):
    """What a rank that does not write the memory at `address` drew in its place: contiguous."""

    address: int
    values: torch.Tensor

    def view(self, x: torch.Tensor) -> torch.Tensor | None:
        """The same view of `values` that `x` is of that memory; None of other tensors."""
        if x.device.type != "cpu" or x.layout != torch.strided or x.dtype != self.values.dtype or not x.numel():
            return None
        at, end = _span(x)
        if at < self.address or end > self.address + self.values.nbytes or x.is_conj() or x.is_neg():
            return None
        return self.values.as_strided(x.shape, x.stride(), (at - self.address) // x.itemsize)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses from and to which `x` lies."""
    at = x.data_ptr()
    return at, at + (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.itemsize


def _like(target: torch.Tensor) -> torch.Tensor:
    """Other memory for a tensor with the strides of `target`: how much a generator draws depends on them."""
    if torch.ops.aten.is_non_overlapping_and_dense(target):
        return torch.empty_like(target)
    span = 1 + sum((n - 1) * stride for n, stride in zip(target.shape, target.stride()))
    flat = torch.empty(span if target.numel() else 0, dtype=target.dtype, device=target.device)
    return flat.as_strided(target.shape, target.stride())


def _replaced(x: Any, drawn: _Drawn | None) -> Any:
    """`x` with tensors over the memory of `drawn` replaced; itself if there are none."""
    if drawn is None:
        return x
    if isinstance(x, torch.Tensor):
        view = drawn.view(x)
        return x if view is None else view
    if type(x) not in (list, tuple, dict):
        return x
    old = list(x.values()) if isinstance(x, dict) else x
    own = [_replaced(y, drawn) for y in old]
    if all(a is b for a, b in zip(own, old, strict=True)):
        return x
    return dict(zip(x, own, strict=True)) if isinstance(x, dict) else type(x)(own)


def _is_value(x: Any, drawn: _Drawn) -> bool:
    """Whether `x` is numbers or tensors with memory of their own, not that of `drawn`."""
    if isinstance(x, torch.Tensor):
        strided = x.layout == torch.strided
        return not strided or x.untyped_storage().data_ptr() != drawn.values.untyped_storage().data_ptr()
    if isinstance(x, (list, tuple)):
        return all(_is_value(y, drawn) for y in x)
    return isinstance(x, (bool, int, float, complex))


class _Arena:
    """Chunks of node-shared memory that parameters are built into. `seal` gives the chunks to their tensors: then one
    goes when its last tensor does. drawn: what this rank, which does not write them, last drew for some."""

    CHUNK = 64 << 20

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group
        self._chunks: list[list[Any]] = []  # [segment, bytes used]
        self._ranges: list[tuple[int, int]] = []
        self.drawn: _Drawn | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of shared memory. Collective."""
        self.drawn = None  # a rank holds one parameter, the one just being made
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

    def forget(self, written: Any) -> None:
        """`written`, or what it lists, was written by the first rank alone: `drawn` stands for none of it any more."""
        tensors = [written] if isinstance(written, torch.Tensor) else written
        for x in tensors:
            if self.drawn is not None and x.numel() and self.holds(x):
                at, end = _span(x)
                if at < self.drawn.address + self.drawn.values.nbytes and end > self.drawn.address:
                    self.drawn = None

    def spread(self) -> None:
        """Rank 0's values of everything to all nodes; called on every rank. Chunks, not parameters: which of those
        still live is the garbage collector's choice, and may differ between ranks."""
        for segment, used in self._chunks:
            if used:
                self._group.spread(segment.tensor(torch.uint8, 0, used))

    def seal(self) -> None:
        self._chunks, self.drawn = [], None


class _Tied:
    """Parameter objects that came over one memory: each gets its own under Init, so that they part. That two are in the
    model is known when it goes to an engine: a constructor may as well put one into the other's place."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[StorageWeakRef, list[weakref.ref[torch.nn.Parameter]]]] = {}
        self._over_one: list[list[weakref.ref[torch.nn.Parameter]]] = []

    def see(self, p: torch.nn.Parameter) -> None:
        """`p` lies where it lies, about to be moved or just moved."""
        if not p.numel() or p.is_meta:
            return
        storage = p.untyped_storage()
        key = (storage._cdata, p.data_ptr())
        seen = self._seen.get(key)
        if seen is None or seen[0].expired():  # of other memory, which is gone
            seen = self._seen[key] = StorageWeakRef(storage), []
        if all(other() is not p for other in seen[1]):
            seen[1].append(weakref.ref(p))
            if len(seen[1]) == 2:
                self._over_one.append(seen[1])

    def finish(self) -> None:
        self._seen = {}

    def refuse(self, names: dict[int, str]) -> None:
        """names: id(parameter) -> name of those that go to an engine."""
        for over_one in self._over_one:
            here = [p for r in over_one if (p := r()) is not None and id(p) in names]
            if len(here) > 1 and any(p.requires_grad for p in here):
                raise ConfigError(
                    f"parameters '{names[id(here[0])]}' and '{names[id(here[1])]}' shared memory when they came to"
                    " zero.Init but are different Parameter objects; tie them by assigning the same Parameter to both"
                    " modules"
                )


class Home:
    """Where the parameters of one zero.Init (with the ones nested in it) lie, and the ranks that share them; closed
    when the last of them has gone to an engine or away. arena: of ranks that share memory; shards: of others (nodes
    with different numbers of ranks), or on disk, in `folder`.
    """

    def __init__(self, folder: str) -> None:
        init_distributed()
        self.group = open_group(torch.device("cpu"), datetime.timedelta(minutes=10), "init")
        shared = isinstance(self.group, (NodeGroup, MultiNodeGroup)) and not folder
        if folder:
            memory.keep_heap()  # as initialize will: values that come and go leave no holes in malloc's memory
        apart = folder or (self.group.world > 1 and not shared)
        self.arena = _Arena(cast("MemoryGroup", self.group)) if shared else None
        self.tied = _Tied()
        self.shards = Shards(self.group.world, folder, self.tied.see) if apart else None
        self.taken: list[weakref.ref[torch.nn.Parameter]] = []
        self.versions = WeakIdKeyDictionary()

    def take(self, p: torch.nn.Parameter, dtype: torch.dtype) -> None:
        """Moves `p` into shared memory (collective); with one rank it is only cast."""
        self.tied.see(p)
        if self.arena is not None:
            shared = self.arena.take(p.numel(), dtype)
            if self.group.leader:
                shared.copy_(p.data.reshape(-1))
            p.data = shared.view(p.shape)
        elif self.shards is not None:
            self.shards.take(p, dtype)
        elif dtype != p.dtype:
            p.data = p.data.to(dtype)
        if not isinstance(p, Released):
            self.tied.see(p)
        self.taken.append(weakref.ref(p))
        built[p] = self
        number(p)

    def _moved(self, arena: _Arena) -> list[torch.nn.Parameter]:
        """Parameters whose memory was replaced since (`p.data = ...` in a constructor) on some rank, on all of which
        they live and have one size. Collective: they were taken in the same order everywhere."""
        living = self._living()
        mine = [0 if p is None else 2 * p.nbytes + 2 + self._is_moved(p, arena) for p in living]
        ranks = self.group.gather_all(torch.tensor(mine, device="cpu"))
        alike = (ranks > 0).all(0) & (ranks // 2 == ranks[0] // 2).all(0)
        found = alike & (ranks % 2).any(0)
        return [p for p, is_found in zip(living, found.tolist(), strict=True) if is_found and p is not None]

    def _living(self) -> list[torch.nn.Parameter | None]:
        """The parameters in the order of `taken`; None for one that is gone, or with an engine already, which has given
        it other memory."""
        found = [r() for r in self.taken]
        return [p if p is not None and built.get(p) is self else None for p in found]

    @staticmethod
    def _is_moved(p: torch.nn.Parameter, arena: _Arena) -> bool:
        return bool(p.numel()) and not p.is_meta and not arena.holds(p)

    def finish(self) -> None:
        """The end of the context. Collective."""
        if self.arena is not None:
            self._finish_arena(self.arena)
        if self.shards is not None:
            self.shards.finish()
        if self.shards is not None and self.shards.on_disk:
            memory.trim_heap()
        for p in (p for p in self._living() if p is not None):
            share(p)
            self.versions[p] = p._version
        self.taken = []
        self.tied.finish()

    def _finish_arena(self, arena: _Arena) -> None:
        moved = any(self._is_moved(p, arena) for p in self._living() if p is not None)
        if self.group.gather_all(torch.tensor([int(moved)], device="cpu")).any():
            gc.collect()  # what is garbage on one rank and not yet on another must not count
            for p in self._moved(arena):
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

    # ---- as a Holder (gathered.py) ---------------------------------------------------------------------------------
    def whole(self, params: Params, writer: int | None) -> Whole:
        inner = Whole()
        if self.shards is not None:
            inner = self.shards.whole(params, writer)
        elif self.arena is not None:
            inner = SharedMemory(self.group, params, writer)
        return _Noted(inner, self, params if writer is not None else ())

    def written(self, params: Params) -> str | None:
        wrote = [p for p in params if p in self.versions and p._version != self.versions[p]]
        for p in wrote if self.shards is not None else ():
            self.versions[p] = p._version  # it was this rank's copy, which is gone
        return f"of shape {tuple(wrote[0].shape)}" if wrote and self.group.world > 1 else None

    def is_available(self, p: torch.nn.Parameter) -> bool:
        return not isinstance(p, Released)

    def close(self) -> None:
        group = self.__dict__.pop("group", None)  # also of one whose making failed
        if group is not None:
            group.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at the end of the process, what it needs may be gone, contextlib too
            pass


class _Noted(Whole):
    """`inner`; writes to `params` inside of it are no stray ones."""

    def __init__(self, inner: Whole, home: Home, params: Params) -> None:
        self._inner, self._home, self._params = inner, home, params

    def begin(self) -> None:
        self._inner.begin()

    def end(self) -> None:
        self._inner.end()
        for p in self._params:
            self._home.versions[p] = p._version


def adopt(named: Sequence[tuple[str, torch.nn.Parameter]], sharded: bool) -> None:
    """The parameters go to an engine. Raises on all ranks if some rank wrote into memory that others share. sharded:
    the engine takes those that are released one at a time (shards.give). Collective if any was built under
    Init."""
    homes: dict[int, Home] = {}
    stray = -1
    for i, (_, p) in enumerate(named):
        home = built.get(p)
        if home is not None:
            homes[id(home)] = home
            if stray < 0 and home.wrote(p):
                stray = i
    names = {id(p): n for n, p in named}
    for home in homes.values():
        home.tied.refuse(names)
        if home.shards is not None and home.taken:  # its context has not ended: the engine's are as they will be then
            home.shards.cut_all()
        if home.arena is not None:
            for rank, i in enumerate(home.group.gather_all(torch.tensor([stray], device="cpu")).view(-1).tolist()):
                if i >= 0:
                    raise StrayWriteError(
                        f"parameter '{named[i][0]}' was written on rank {rank} after zero.Init. It lies in memory that"
                        " all ranks of the node share, so every rank's write acted. Write it inside the zero.Init"
                        " context, or under deepc.zero.GatheredParameters(params, modifier_rank=0)"
                    )
    for _, p in named:
        if built.pop(p, None) is not None:
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
# What is asked of the tensor itself, not of its values: properties, its identity, hooks.
_OF_ITSELF = frozenset(
    {
        "__get__",
        "__set__",
        "__hash__",
        "__deepcopy__",
        "__reduce_ex__",
        "data_ptr",
        "is_shared",
        "storage_offset",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
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
    draw into scratch, so that all ranks' generators stay equal.

    The last scratch stands for that memory until another comes or a parameter is registered: reads and further writes
    go there. The first rank may not have written yet, or again, and an initializer may draw by what it reads (torch's
    trunc_normal_ redraws what lies outside)."""

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
            rest = args[1:], {k: v for k, v in kwargs.items() if k != "tensor"}
            self._write(func, name in _RANDOM or getattr(func, "__module__", "") == "torch.nn.init", target, *rest)
            return target
        drawn = self._arena.drawn
        if "out" in kwargs and self._held(out := kwargs["out"]):
            own = _replaced(out, drawn)
            if own is out:
                self._arena.forget(out)
                own = torch.empty_like(out) if isinstance(out, torch.Tensor) else type(out)(map(torch.empty_like, out))
            func(*_replaced(args, drawn), **{**_replaced(kwargs, drawn), "out": own})
            return out
        if drawn is not None and name not in _METADATA and name not in _OF_ITSELF:
            own_args, own_kwargs = _replaced(args, drawn), _replaced(kwargs, drawn)
            if own_args is not args or own_kwargs is not kwargs:
                result = func(*own_args, **own_kwargs)
                if _is_value(result, drawn):
                    return result  # of others, views among them, whoever asks wants the parameter's
        return func(*args, **kwargs)

    def _write(
        self, func: Callable[..., Any], random: bool, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        drawn = self._arena.drawn
        if isinstance(target, torch.Tensor) and (own := _replaced(target, drawn)) is not target:
            func(own, *_replaced(args, drawn), **_replaced(kwargs, drawn))
        elif random:
            self._arena.drawn = drawn = None  # its memory goes first
            scratch = _like(target)
            func(scratch, *args, **kwargs)
            if target.is_contiguous():
                self._arena.drawn = _Drawn(target.data_ptr(), scratch.detach())
        else:
            self._arena.forget(target)


class Init:
    """Context in which every parameter that a module gets lies in node-shared memory from that moment on, so that no
    rank ever holds the model: one copy per node, and of private memory at most the parameter just being made. With one
    rank it only sets the dtype. The values are rank 0's; on other nodes they are so when the context ends. All ranks
    build the same model. Contexts may be nested; of the dtypes the innermost counts.

    transformers' from_config and from_pretrained build and load one parameter at a time under it, also while an
    HfDeepSpeedConfig lives.

    config_dict_or_path (or config): a DeepSpeed JSON (its fp16/bf16 section sets the dtype); dtype overrides it;
    without either, parameters keep theirs. With its zero_optimization.offload_param.device "nvme" parameters go to the
    disk (nvme_path) as they are built: whole ones take at most 16 MiB of memory, or one does. `enabled=False`: does
    nothing. `module`: converts an existing module at once. data_parallel_group, sequence_data_parallel_group, mpu: must
    span all ranks. remote_device: "nvme" asks for the disk as well, "none" and "cpu" for memory whatever the
    configuration says. The other arguments of deepspeed.zero.Init are accepted and have no meaning here."""

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
        if remote_device not in (None, "none", "cpu", "nvme"):
            raise ArgumentError(f'zero.Init(remote_device={remote_device!r}): it is "none", "cpu" or "nvme"')
        if param_swapper is not None:
            raise UnsupportedError("zero.Init(param_swapper=...): deepc has its own way to the disk; leave it out")
        raw = config_dict_or_path if config_dict_or_path is not None else config
        read = None if raw is None else _read(raw)
        self.dtype = dtype if dtype is not None or read is None else _dtype_of(read)
        self._folder = _folder_of(read, remote_device)
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
                        self.take(p)

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        self._outermost = not _active
        if self._outermost:
            self.home = Home(self._folder)
            self._stack = contextlib.ExitStack()
            self._stack.enter_context(patches.applied_inside("parameter-hook"))
            self._stack.callback(register_module_parameter_registration_hook(_registered).remove)
            self._stack.enter_context(_taking_copies())
            for make in around.contexts:
                self._stack.enter_context(make())
            if self.home.shards is not None:
                self._stack.enter_context(self.home.shards.parameters_of_parameters())
            if self.home.arena is not None and not self.home.group.leader:
                self._stack.enter_context(_OwnerWrites(self.home.arena))
        else:
            self.home = _active[-1].home
        _active.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        if not self.enabled:
            return
        _active.remove(self)
        home = self.__dict__.pop("home")
        if self._outermost:
            self._stack.close()
            if exc[0] is None:
                home.finish()
            else:
                home.close()

    @torch.no_grad()
    def take(self, p: torch.nn.Parameter | None) -> None:
        if p is None or holder_of(p) is not None:
            return
        if torch.nn.parameter.is_lazy(p) or p.device.type != "cpu" or p.layout != torch.strided:
            return
        self.home.take(p, self.dtype if self.dtype is not None and casts(p) else p.dtype)


_active: list[Init] = []


def _registered(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    _active[-1].take(param)


@contextlib.contextmanager
def _taking_copies() -> Iterator[None]:
    """Inside, a deep copy of a parameter that was built here is taken as it is made: nobody registers it in the copy of
    its module (torch.nn.TransformerEncoder makes its layers so)."""
    befores = {kind: kind.__deepcopy__ for kind in (torch.nn.Parameter, Released)}

    def taking(before: Callable[[Any, dict[int, Any]], Any]) -> Callable[[Any, dict[int, Any]], Any]:
        def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
            known, ours = id(self) in memo, built.get(self) is _active[-1].home
            copy = before(self, memo)
            if ours and not known:
                _active[-1].take(copy)
            return copy

        return deepcopy

    for kind, before in befores.items():
        kind.__deepcopy__ = taking(before)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, before in befores.items():
            kind.__deepcopy__ = before  # type: ignore[method-assign]


def _check_groups(groups: dict[str, Any]) -> None:
    for name, group in groups.items():
        if group is not None and dist.is_initialized() and dist.get_world_size(group) != dist.get_world_size():
            raise UnsupportedError(
                f"zero.Init({name}=...): a group of {dist.get_world_size(group)} of the {dist.get_world_size()} ranks; "
                "deepc partitions over all "
                "ranks (model parallelism does not exist yet). Leave it out"
            )


def _read(source: ConfigSource) -> Config:
    """As deepc.initialize reads it, but batch sizes may be missing and values may be "auto"."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return Config.load(source, world_size=world, device_type=default_device().type, allow_auto=True, needs_batch=False)


def _folder_of(config: Config | None, remote_device: str | None) -> str:
    """The folder on the disk that parameters go to, or ""."""
    asked = config.zero.offload_param if config is not None else None
    if remote_device in ("none", "cpu") or (remote_device is None and (asked is None or asked.device != "nvme")):
        return ""
    if asked is None or not asked.nvme_path:
        raise ArgumentError(
            'zero.Init(remote_device="nvme") needs a folder: pass config_dict_or_path with'
            " zero_optimization.offload_param.nvme_path"
        )
    return make_folder(asked.nvme_path)


def _dtype_of(config: Config) -> torch.dtype | None:
    """The dtype that a configuration asks for by fp16 or bf16, or None."""
    return torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
