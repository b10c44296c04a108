"""How ZeRO-3's streamed mode cuts a model into units: the sets of parameters that are gathered and released together,
and the modules whose calls use them. Looks at modules only: no tensors are read, no processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

SMALL = 1 << 16  # elements: less than this is not worth a gather of its own and goes with what is around it


@dataclass
class UnitSpec:
    """Parameters that come and go together, in the order of registration."""

    name: str
    params: list[nn.Parameter] = field(default_factory=list)


@dataclass
class Cut:
    """units, and the units that a call of a module uses: those of `needs[module]` are there while it runs."""

    units: list[UnitSpec]
    needs: dict[nn.Module, list[int]]
    blocks: list[nn.Module]  # the modules that are units of their own with all inside them: what is compiled one by one


def cut(model: nn.Module, elems: Mapping[int, int]) -> Cut:
    """Cuts the parameters of `model` that are in `elems`: id(parameter) -> elements (a parameter's own shape may be
    gone by now).

    A unit is an element of a ModuleList, ModuleDict or (outside of blocks) Sequential, with all inside it that is not a
    unit itself; or the parameters of one module outside of such blocks; if it has at least `SMALL` elements, or 1/16 of
    the model if that is less. What remains belongs to the unit around it, at last to the root's, which is there for the
    whole forward. A tied parameter belongs to where it is found first. Modules outside of blocks that own parameters of
    the root's unit, or own a tied one, use that unit by themselves.
    """
    return _Cutter(model, elems).run()


class _Cutter:
    def __init__(self, model: nn.Module, elems: Mapping[int, int]) -> None:
        self._model, self._elems = model, elems
        self._small = max(1, min(SMALL, sum(elems.values()) // 16))
        self._units: list[UnitSpec] = []
        self._unit_of: dict[nn.Parameter, int] = {}
        self._around: dict[nn.Module, int] = {}  # module -> the unit whose module it is, or is inside of
        self._blocks: list[nn.Module] = []

    def run(self) -> Cut:
        root = self._open("", self._model)
        self._walk(self._model, "", root, inside=False)
        used = {i for i, u in enumerate(self._units) if u.params}
        number = {old: new for new, old in enumerate(sorted(used))}
        needs = {m: [number[i] for i in wanted if i in number] for m, wanted in self._needs().items()}
        needs.setdefault(self._model, [])
        return Cut([self._units[i] for i in sorted(used)], needs, self._blocks)

    def _open(self, name: str, module: nn.Module) -> int:
        self._units.append(UnitSpec(name or "(root)"))
        return len(self._units) - 1

    def _own(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module._parameters.values() if p is not None and id(p) in self._elems]

    def _new_elems(self, params: Iterable[nn.Parameter]) -> int:
        return sum(self._elems.get(id(p), 0) for p in {id(p): p for p in params}.values() if p not in self._unit_of)

    def _walk(self, module: nn.Module, name: str, unit: int, inside: bool) -> None:
        """Assigns what is under `module`, which lies in `unit`; inside: of a block."""
        if module in self._around:
            return
        own = self._own(module)
        if not inside and module is not self._model and self._new_elems(own) >= self._small:
            unit = self._open(name, module)
        self._around[module] = unit
        for p in own:
            if p not in self._unit_of:
                self._unit_of[p] = unit
                self._units[unit].params.append(p)
        listed = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or (
            isinstance(module, nn.Sequential) and not inside
        )
        for key, child in module._modules.items():
            if child is None or child in self._around:
                continue
            path = f"{name}.{key}" if name else key
            if listed and self._new_elems(child.parameters()) >= self._small:
                block = self._open(path, child)
                self._blocks.append(child)
                self._walk(child, path, block, inside=True)
            else:
                self._walk(child, path, unit, inside)

    def _needs(self) -> dict[nn.Module, list[int]]:
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
