"""Buffers that forwards change in training (a batch norm's statistics, the vectors of a spectral norm): a block that is
computed again finds those that its forward found, and what it writes into them again goes nowhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from ....core.foreign import private
from ....errors import ConfigError

Differ = Callable[[torch.Tensor, torch.Tensor], bool]


class Changed:
    """Which buffers of their own modules change in a forward, in training and in evaluation mode: found out in the
    first one that may be computed again. differ: whether a buffer has other values than a copy of it."""

    def __init__(self, differ: Differ) -> None:
        self.differ = differ
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[bool, frozenset[str]]]
        self._names = weakref.WeakKeyDictionary()

    def names(self, module: torch.nn.Module) -> frozenset[str] | None:
        """None: not known yet."""
        return self._names.get(module, {}).get(module.training)

    def learn(self, module: torch.nn.Module, names: frozenset[str]) -> None:
        self._names.setdefault(module, {})[module.training] = names


class Before:
    """The buffers of a block's modules before one of its calls, as far as the call changes them. given: the tensors
    that the block gets, which it must leave as they are."""

    def __init__(
        self, changed: Changed, modules: Sequence[torch.nn.Module], given: Sequence[torch.Tensor] = ()
    ) -> None:
        self._changed, self.modules = changed, modules
        self._given = [(t, _version(t)) for t in given]
        # a module, its buffer's name, the buffer, its version, and a copy where it changes or may
        self._had: list[tuple[torch.nn.Module, str, torch.Tensor | None, int, torch.Tensor | None]] = []
        self._kept: list[tuple[torch.nn.Module, str, torch.Tensor | None]] = []
        self._there: list[tuple[torch.nn.Module, str, torch.Tensor | None]] = []

    @property
    def nbytes(self) -> int:
        """Of the copies, which live until the block's backward."""
        return sum({id(t): _nbytes(t) for _, _, t in self._kept if t is not None}.values())

    @private.uncompiled
    def begin(self) -> None:
        """The call begins."""
        copies: dict[int, torch.Tensor] = {}  # modules may share a buffer
        for module in self.modules:
            names = self._changed.names(module)
            for name, t in module._buffers.items():
                copy = None
                if t is not None and (names is None or name in names):
                    copy = copies[id(t)] = copies[id(t)] if id(t) in copies else _copy(t)
                self._had.append((module, name, t, _version(t), copy))

    @private.uncompiled
    def end(self) -> None:
        """It has ended. ConfigError where it has written into a buffer of which nobody expected it, or into what it
        was given: computed again it would find that, and autograd does not look at what a checkpoint keeps."""
        given, self._given = self._given, []  # nothing is held by this
        if any(_version(t) != version for t, version in given):
            kind = type(self.modules[0]).__name__ if self.modules else "a block"
            raise ConfigError(
                f"activation_checkpointing.budget: a forward of {kind} has changed a tensor that it was given in place;"
                " computed again it would find other values. Write it out of place (x = x + y for x += y,"
                " inplace=False of its first module), or remove the key"
            )
        found: dict[torch.nn.Module, set[str]] = {m: set() for m in self.modules if self._changed.names(m) is None}
        # All of a module's if it changes one: another may have kept its values by chance (the mean of a batch of
        # zeros), and kernels write without a version.
        changing = {
            m for m, name, t, version, copy in self._had if m in found and self._is_other(m, name, t, version, copy)
        }
        for module, name, t, version, copy in self._had:
            replaced, written = module._buffers.get(name) is not t, _version(t) != version
            if module in found:
                if module not in changing:
                    continue
                found[module].add(name)
            elif name not in (self._changed.names(module) or ()):
                if written:
                    raise ConfigError(
                        f"activation_checkpointing.budget: a forward of {type(module).__name__} has changed its buffer"
                        f" '{name}', which its first one had left alone; computed again it would find another value."
                        " Change the buffer in every forward, or outside of the model's blocks, or remove the key"
                    )
                if not replaced:
                    continue
            self._kept.append((module, name, _copy(t) if copy is None and t is not None else copy))
        self._had.clear()
        for module, names in found.items():
            self._changed.learn(module, frozenset(names))

    def _is_other(
        self, module: torch.nn.Module, name: str, t: torch.Tensor | None, version: int, copy: torch.Tensor | None
    ) -> bool:
        """Whether a buffer is another one than it was, or has other values."""
        if module._buffers.get(name) is not t or _version(t) != version:
            return True
        return t is not None and copy is not None and self._changed.differ(copy, t)

    @private.uncompiled
    def put(self) -> None:
        """The call is computed again: it finds what it found. What is written then goes into copies of its own, as it
        may be computed once more (a backward that keeps its graph)."""
        copies: dict[int, torch.Tensor] = {}
        for module, name, t in self._kept:
            self._there.append((module, name, module._buffers.get(name)))
            if t is not None and id(t) not in copies:
                copies[id(t)] = _copy(t)
            module._buffers[name] = None if t is None else copies[id(t)]

    @private.uncompiled
    def take_back(self) -> None:
        """It has been: the buffers that were there are there again."""
        for module, name, t in self._there:
            module._buffers[name] = t
        self._there.clear()


def _copy(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _nbytes(t: torch.Tensor) -> int:
    """Of its values; of a sparse one, whose copy is small beside what it stands for, none."""
    return t.nbytes if t.layout == torch.strided else 0


def _version(t: torch.Tensor | None) -> int:
    return 0 if t is None or t.is_inference() else t._version
