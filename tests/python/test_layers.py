"""The house has floors: a file of python/deepc imports only from its own room or from one below it, deferred imports
and those for type checkers included, and no chain of imports comes back to where it began."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from programs import run_python

PACKAGE = Path(__file__).resolve().parents[2] / "python/deepc"

# From the ground up. A room may use those before it.
ROOMS = [
    "errors",
    "core",
    "offload",
    "optim",
    "nn",
    "config",
    "plan",
    "comm",
    "zero",
    "parallel",
    "checkpoint",
    "engine",
]
# Around the house: they use the rooms, and no room uses them.
AROUND = ["observe", "launch", "compat"]
# What JAX and TensorFlow will stand on imports no torch, but for these parts.
NO_TORCH = ["core", "config", "plan"]
WITH_TORCH = ["core/ops.py", "core/memory.py", "core/foreign/private.py", "core/foreign/buffers.py", "plan/predict"]


def modules() -> dict[str, Path]:
    """Dotted name below deepc ("" is the package itself) -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def imports(name: str) -> list[str]:
    """The modules of deepc that the file imports, wherever the import stands."""
    found = []
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [p for p in package if p]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            elif (node.module or "").split(".")[0] == "deepc":
                base = (node.module or "").split(".")[1:]
            else:
                continue
            base = [p for p in base if p]
            for alias in node.names:
                full = ".".join([*base, alias.name])
                found.append(full if full in MODULES else ".".join(base))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("deepc."):
                    found.append(alias.name.removeprefix("deepc."))
    return found


def room(name: str) -> str:
    return name.split(".")[0]


def is_top(name: str) -> bool:
    """The package itself, its command line and the public names of parts: above everything."""
    return room(name) not in ROOMS and room(name) not in AROUND


def is_climbing(name: str, target: str) -> bool:
    """Whether `name` may not import `target`."""
    here, there = room(name), room(target)
    if is_top(name) or here == there:
        return False
    if is_top(target) or there in AROUND:
        return here in ROOMS or is_top(target) or AROUND.index(there) > AROUND.index(here)
    return here in ROOMS and ROOMS.index(there) > ROOMS.index(here)


@cache
def climbs() -> set[str]:
    return {f"{name or 'deepc'} -> {t or 'deepc'}" for name in MODULES for t in imports(name) if is_climbing(name, t)}


def circles() -> list[list[str]]:
    """Strongly connected parts of the graph of files with more than one member (Tarjan, 1972)."""
    edges = {n: sorted({t for t in imports(n) if t != n and t in MODULES}) for n in MODULES}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in edges[v]:
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            part = []
            while True:
                part.append(stack.pop())
                if part[-1] == v:
                    break
            if len(part) > 1:
                found.append(sorted(part))

    for v in MODULES:
        if v not in index:
            visit(v)
    return found


@cache
def torch_imports() -> set[str]:
    found = set()
    for name, path in MODULES.items():
        inside = path.relative_to(PACKAGE).as_posix()
        if room(name) not in NO_TORCH or any(inside == w or inside.startswith(w + "/") for w in WITH_TORCH):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(n.split(".")[0] == "torch" for n in named):
                found.add(inside)
    return found


# What is still to be moved or cut; both may only shrink.
KNOWN_CLIMBS: set[str] = set()
KNOWN_TORCH: set[str] = set()
IN_CIRCLES = 0  # files; a cut may make two smaller circles of one


def test_a_file_imports_only_downward() -> None:
    assert climbs() - KNOWN_CLIMBS == set()


def test_the_list_of_exceptions_is_true() -> None:
    assert KNOWN_CLIMBS - climbs() == set() and KNOWN_TORCH - torch_imports() == set()


def test_no_circle() -> None:
    assert sum(map(len, circles())) <= IN_CIRCLES, circles()


def test_ground_without_torch() -> None:
    assert torch_imports() - KNOWN_TORCH == set()


@pytest.mark.parametrize("folder", sorted({p.parent for p in PACKAGE.rglob("*.py")} - {PACKAGE}), ids=str)
def test_rooms_are_small(folder: Path) -> None:
    """A folder has at most nine members: one looks, and sees."""
    members = [
        p
        for p in folder.iterdir()
        if p.name not in ("__init__.py", "__pycache__") and (p.is_dir() or p.suffix == ".py")
    ]
    assert len(members) <= 9
    assert (folder / "__init__.py").exists(), "what reads sources (documentation, freezers) passes it over without"


def test_import_deepc_is_enough_for_its_public_modules() -> None:
    """deepc.memory.keep_heap() and the like, in a process of its own: here others have imported most of them."""
    names = sorted(p.stem for p in PACKAGE.glob("[!_]*.py") if p.stem != "cli") + [
        "comm",
        "checkpoint",
        "optim",
        "zero",
    ]
    assert {"memory", "fsdp", "precision"} <= set(names)
    code = f"import deepc\nlost = [n for n in {names!r} if not hasattr(deepc, n)]\nassert not lost, lost"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


NAMES = """
import importlib, importlib.util, sys, types
for package in map(importlib.import_module, sys.argv[1:]):
    for name in package.__all__:
        if not isinstance(getattr(package, name), types.ModuleType):
            if importlib.util.find_spec(f"{package.__name__}.{name}"):
                print(package.__name__, name)
"""


def test_what_comes_when_it_is_asked_for_has_no_modules_name() -> None:
    """The import of such a module would put it in the place of what was asked for, from the second time on."""
    lazy = [p.parent for p in PACKAGE.rglob("__init__.py") if "\ndef __getattr__" in p.read_text()]
    names = [".".join(p.relative_to(PACKAGE.parent).parts) for p in lazy]
    assert "deepc.observe.profile" in names
    done = run_python("-c", NAMES, *names)
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr
