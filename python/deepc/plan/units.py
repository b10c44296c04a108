"""How ZeRO-3's streamed mode cuts a model into units: the sets of parameters that are gathered and released together,
and the modules whose calls use them. Data alone: a model is a tree of `Node`s, a parameter an identity and a size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

SMALL = 1 << 16  # elements: less than this is not worth a gather of its own and goes with what is around it


@dataclass(eq=False)
class Node:
    """A module. kind: a "list" of modules whose calls are theirs alone, a "sequence" that calls its members in turn, or
    any other ("call"). own: the parameters that are its own, by identity; children: by name, the same Node for the same
    module."""

    kind: Literal["call", "list", "sequence"]
    own: list[int] = field(default_factory=list)
    children: list[tuple[str, Node]] = field(default_factory=list)

    def walk(self, seen: set[Node] | None = None) -> Iterator[Node]:
        """This node and all below it, each once."""
        seen = set() if seen is None else seen
        if self not in seen:
            seen.add(self)
            yield self
            for _, child in self.children:
                yield from child.walk(seen)


@dataclass
class UnitSpec:
    """Parameters that come and go together, in the order of registration, by identity."""

    name: str
    params: list[int] = field(default_factory=list)


@dataclass
class Cut:
    """units, and the units that a call of a module uses: those of `needs[module]` are there while it runs."""

    units: list[UnitSpec]
    needs: dict[Node, list[int]]
    blocks: list[Node]  # the modules that are units of their own with all inside them: what is compiled one by one


def cut(model: Node, elems: Mapping[int, int]) -> Cut:
    """Cuts the parameters of `model` that are in `elems`: identity -> elements.

    A unit is an element of a list or (outside of blocks) of a sequence, with all inside it that is not a unit itself;
    or the parameters of one module outside of such blocks; if it has at least `SMALL` elements, or 1/16 of the model if
    that is less. What remains belongs to the unit around it, at last to the root's, which is there for the
    whole forward. A tied parameter belongs to where it is found first. Modules outside of blocks that own parameters of
    the root's unit, or own a tied one, use that unit by themselves.
    """
    return _Cutter(model, elems).run()


class _Cutter:
    def __init__(self, model: Node, elems: Mapping[int, int]) -> None:
        self._model, self._elems = model, elems
        self._small = max(1, min(SMALL, sum(elems.values()) // 16))
        self._units: list[UnitSpec] = []
        self._unit_of: dict[int, int] = {}
        self._around: dict[Node, int] = {}  # module -> the unit whose module it is, or is inside of
        self._blocks: list[Node] = []

    def run(self) -> Cut:
        root = self._open("")
        self._walk(self._model, "", root, inside=False)
        used = {i for i, u in enumerate(self._units) if u.params}
        number = {old: new for new, old in enumerate(sorted(used))}
        needs = {m: [number[i] for i in wanted if i in number] for m, wanted in self._needs().items()}
        needs.setdefault(self._model, [])
        return Cut([self._units[i] for i in sorted(used)], needs, self._blocks)

    def _open(self, name: str) -> int:
        self._units.append(UnitSpec(name or "(root)"))
        return len(self._units) - 1

    def _own(self, module: Node) -> list[int]:
        return [p for p in module.own if p in self._elems]

    def _new_elems(self, *modules: Node) -> int:
        """Of parameters of the modules' own that are in no unit yet."""
        params = {p for m in modules for p in self._own(m)}
        return sum(self._elems[p] for p in params if p not in self._unit_of)

    def _walk(self, module: Node, name: str, unit: int, inside: bool) -> None:
        """Assigns what is under `module`, which lies in `unit`; inside: of a block."""
        if module in self._around:
            return
        own = self._own(module)
        if not inside and module is not self._model and self._new_elems(module) >= self._small:
            unit = self._open(name)
        self._around[module] = unit
        for p in own:
            if p not in self._unit_of:
                self._unit_of[p] = unit
                self._units[unit].params.append(p)
        listed = module.kind == "list" or (module.kind == "sequence" and not inside)
        for key, child in module.children:
            if child in self._around:
                continue
            path = f"{name}.{key}" if name else key
            if listed and self._new_elems(*child.walk()) >= self._small:
                block = self._open(path)
                self._blocks.append(child)
                self._walk(child, path, block, inside=True)
            else:
                self._walk(child, path, unit, inside)

    def _needs(self) -> dict[Node, list[int]]:
        """Which modules are hooked, with the units that they use."""
        blocks, out = set(self._blocks), {}
        roots = {self._around[b] for b in self._blocks}
        for module, around in self._around.items():
            wanted = [around] if module in blocks or module is self._model else []
            own = {self._unit_of[p] for p in self._own(module)}
            wanted += sorted(u for u in own if u not in wanted and (u != around or around not in roots))
            if wanted:
                out[module] = wanted
        return out
