"""ZeRO-3's user interface: build models straight into node-shared memory (`Init`), read and write partitioned parameters
(`GatheredParameters`).

In resident mode (CPU nodes) parameters are pages that all ranks of a node map: they are always readable, and writing is for one rank."""

from __future__ import annotations

import functools
import weakref
from typing import Iterable

import torch
import torch.distributed as dist

from .errors import ArgumentError, UnsupportedError

# id(parameter) -> engine that holds it at stage 3; entries go with the engine.
_engines: "weakref.WeakValueDictionary[int, object]" = weakref.WeakValueDictionary()


def _register(params: Iterable[torch.nn.Parameter], engine: object) -> None:
    for p in params:
        _engines[id(p)] = engine


class _Arena:
    """Chunks of node-shared memory that parameters are built into; a chunk goes when its last tensor does."""

    CHUNK = 64 << 20

    def __init__(self, group) -> None:
        self._group, self._chunk, self._used, self._size = group, None, 0, 0
        self._ranges: list[tuple[int, int]] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = (numel * dtype.itemsize + 127) // 128 * 128
        if self._chunk is None or self._used + nbytes > self._size:
            self._size = max(self.CHUNK, nbytes)
            self._chunk, self._used = self._group.segment(self._size), 0
            base = self._chunk.tensor(torch.uint8, 0, self._size).data_ptr()
            self._ranges.append((base, base + self._size))
        out = self._chunk.tensor(dtype, self._used, numel)
        self._used += nbytes
        return out

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is a CPU tensor over this arena's memory."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        address = tensor.data_ptr()
        return any(lo <= address < hi for lo, hi in self._ranges)


class Init:
    """Context in which every nn.Module that is built puts its parameters into node-shared memory as soon as its __init__ ends,
    so that no rank ever holds the model: one copy per node. With one rank it only sets the dtype. The values are rank 0's; on other nodes they are
    so when the context ends.

    config_dict_or_path: a DeepSpeed JSON (its fp16/bf16 section sets the dtype); dtype overrides it. `enabled=False`: does nothing. `module`:
    converts an existing module instead. Other arguments of deepspeed.zero.Init are accepted and have no meaning here."""

    def __init__(self, module: torch.nn.Module | None = None, data_parallel_group=None, mem_efficient_linear: bool = True, remote_device=None,
                 pin_memory: bool = False, config_dict_or_path=None, config=None, enabled: bool = True, dtype: torch.dtype | None = None, mpu=None) -> None:
        self.enabled = enabled
        raw = config_dict_or_path if config_dict_or_path is not None else config
        if dtype is None and raw is not None:
            dtype = _dtype_of(raw)
        self.dtype = dtype
        self._group = self._arena = None
        if enabled:
            self._open()
        if module is not None and enabled:
            for m in module.modules():
                self._take(m)
            self._done()

    def _open(self) -> None:
        import datetime

        from .group import MultiNodeGroup, NodeGroup, open_group
        from .comm import init_distributed

        init_distributed()
        group = open_group(torch.device("cpu"), datetime.timedelta(minutes=10), "init")
        if group.world > 1 and not isinstance(group, (NodeGroup, MultiNodeGroup)):
            raise UnsupportedError("zero.Init over nodes with different numbers of ranks needs ZeRO-3's streamed mode, which does not exist yet "
                                   f"({group.uneven}); start equally many ranks on each node, or build the model without it")
        if isinstance(group, (NodeGroup, MultiNodeGroup)):
            self._group, self._arena, self._taken = group, _Arena(group), []

    def __enter__(self) -> "Init":
        if self.enabled:
            _patch_all(self)
            self._mode = _OwnerWrites(self._arena) if self._arena is not None and not self._group.leader else None
            if self._mode is not None:
                self._mode.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        if self.enabled:
            if self._mode is not None:
                self._mode.__exit__(*exc)
            _unpatch(self)
            if exc[0] is None:
                self._done()

    def _done(self) -> None:
        if self._group is not None:
            if self._group.leader:
                for shared in self._taken:
                    self._group.spread(shared)
            self._taken = []
            self._group.barrier()
            self._group.close()

    @torch.no_grad()
    def _take(self, module: torch.nn.Module) -> None:
        for p in module._parameters.values():
            if p is None or getattr(p, "_deepc_init", False) or p.is_meta:
                continue
            dtype = self.dtype if self.dtype is not None and p.is_floating_point() else p.dtype
            if self._arena is not None:
                shared = self._arena.take(p.numel(), dtype)
                if self._group.leader:
                    shared.copy_(p.data.reshape(-1))
                    self._taken.append(shared)
                p.data = shared.view(p.shape)
                p._deepc_init = True
            elif dtype != p.dtype:
                p.data = p.data.to(dtype)


class _OwnerWrites(torch.overrides.TorchFunctionMode):
    """On ranks other than the first of their node, in-place writes to parameters under construction (`init.normal_`, `p.data.copy_`, a parent's
    weight init) are left out: the memory is shared and the first one writes it."""

    def __init__(self, arena: _Arena) -> None:
        super().__init__()
        self._arena = arena

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_"))
        if writes and args and isinstance(args[0], torch.Tensor) and self._arena.holds(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _dtype_of(raw) -> torch.dtype | None:
    import json
    from pathlib import Path

    if not isinstance(raw, dict):
        raw = json.loads(Path(raw).read_text())
    for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if isinstance(raw.get(key), dict) and raw[key].get("enabled") is True:
            return dtype
    return None


_active: list[Init] = []


def _patch_all(context: Init) -> None:
    """Wraps the construction of modules: after the outermost __init__ of an object returns, its parameters move. torch has no
    hook for that; nn.Module.__init__ runs too early (before the subclass made its parameters)."""
    _active.append(context)
    if len(_active) > 1:
        return

    def wrap(cls: type) -> None:
        if "__init__" not in cls.__dict__ or hasattr(cls.__dict__["__init__"], "_deepc_original"):
            return
        original = cls.__dict__["__init__"]

        @functools.wraps(original)
        def init(self, *args, **kwargs):
            outermost = not self.__dict__.get("_deepc_building", False)
            if outermost:
                self.__dict__["_deepc_building"] = True
            original(self, *args, **kwargs)
            if outermost:
                self.__dict__.pop("_deepc_building", None)
                if _active:
                    _active[-1]._take(self)

        init._deepc_original = original
        cls.__init__ = init

    def walk(cls: type) -> None:
        for sub in cls.__subclasses__():
            wrap(sub)
            walk(sub)

    walk(torch.nn.Module)
    original_subclass = torch.nn.Module.__dict__.get("__init_subclass__")

    @classmethod
    def subclass(cls, **kwargs):
        super(torch.nn.Module, cls).__init_subclass__(**kwargs)
        wrap(cls)

    torch.nn.Module._deepc_init_subclass = original_subclass
    torch.nn.Module.__init_subclass__ = subclass


def _unpatch(context: Init) -> None:
    _active.remove(context)
    if _active:
        return

    def walk(cls: type) -> None:
        for sub in cls.__subclasses__():
            init = sub.__dict__.get("__init__")
            if hasattr(init, "_deepc_original"):
                sub.__init__ = init._deepc_original
            walk(sub)

    walk(torch.nn.Module)
    original = torch.nn.Module.__dict__.get("_deepc_init_subclass")
    if original is None:
        del torch.nn.Module.__init_subclass__
    else:
        torch.nn.Module.__init_subclass__ = original
    del torch.nn.Module._deepc_init_subclass


class GatheredParameters:
    """Context for reading, and with `modifier_rank` writing, parameters of a stage-3 model. Collective over the ranks.

    Parameters are whole and readable inside (in resident mode: outside as well). With modifier_rank=r, what rank r writes in place
    is seen by all ranks after the context, and the fp32 masters follow; writes of other ranks stay private and are dropped.
    Parameters that no stage-3 engine holds are left alone."""

    def __init__(self, params, modifier_rank: int | None = None, fwd_module=None, enabled: bool = True) -> None:
        if isinstance(params, torch.nn.Parameter):
            params = [params]
        elif isinstance(params, torch.nn.Module):
            params = list(params.parameters())
        params = [p for p in params if p is not None]
        for p in params:
            if not isinstance(p, torch.Tensor):
                raise ArgumentError(f"GatheredParameters takes parameters, got {type(p).__name__}")
        self._params = [p for p in params if id(p) in _engines] if enabled else []
        self._modifier = modifier_rank

    def __enter__(self) -> None:
        if not self._params or self._modifier is None:
            return
        self._engine = _engines[id(self._params[0])]
        self._group = self._engine.group
        if not 0 <= self._modifier < self._group.world:
            raise ArgumentError(f"modifier_rank {self._modifier} is not one of {self._group.world} ranks")
        self._engine._raise_stray_write()
        self._group.barrier()  # nobody reads any more
        self._before = [p._version for p in self._params]
        self._views = None
        if self._group.rank != self._modifier:
            self._views = [p.data for p in self._params]
            for p in self._params:
                p.data = p.data.clone()

    def __exit__(self, *exc) -> None:
        if not self._params or self._modifier is None:
            return
        if self._views is not None:
            for p, view in zip(self._params, self._views):
                p.data = view
        self._group.barrier()  # the modifier's values are visible on its node
        if self._group.nodes > 1:
            for p in self._params:
                self._group.spread(p.data.view(-1), self._modifier)
            self._group.barrier()
        self._engine._parameters_modified(self._params)
