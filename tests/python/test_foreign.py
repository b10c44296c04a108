"""Other people's code: private names of torch stand in one file, changes to torch and others in one table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from deepc.core.foreign import patches, private
from deepc.errors import ArgumentError
from programs import run_python

PACKAGE = Path(__file__).resolve().parents[2] / "python/deepc"
PRIVATE = PACKAGE / "core/foreign/private.py"
# A change of a thing that is not ours, as it looks in the source.
CHANGES = (
    r'torch\.library\.Library\("aten"',
    r"register_module_parameter_registration_hook\(",
    r"sys\.meta_path\.(insert|append)",
    r"torch\.set_num_threads\(",
    r'environ\.setdefault\("THP_',
    r"\.propagate = ",
    r"torch\.[\w.]+\.__?\w+ = ",
    r"torch\.nn\.Module\.\w+ = ",
    r"\bmodule\.\w+ = .*# type: ignore\[attr-defined\]",
    r"\bstate\._\w+ = ",
    r"\bcls\.__next__ = ",
    r"= use_heap\(",
    r"_hf_deepspeed_config_weak_ref",
)
# Programs of their own, whose processes end with them.
PROGRAMS = {"observe/diagnose/bench.py", "observe/diagnose/onebit.py", "parallel/simulate/run.py"}


def files() -> list[tuple[str, str]]:
    return [(p.relative_to(PACKAGE).as_posix(), p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))]


def private_uses(tree: ast.AST) -> list[str]:
    """What reaches into torch by a name with a leading underscore; operators (torch.ops) have names of their own."""
    names: dict[str, str] = {}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] == "torch":
                    names[a.asname or "torch"] = a.name if a.asname else "torch"
                    found += [a.name] if "._" in a.name else []
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for a in node.names:
                full = f"{node.module}.{a.name}"
                names[a.asname or a.name] = full
                found += [full] if "._" in full else []
    for node in ast.walk(tree):
        parts: list[str] = []
        at: ast.AST = node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if isinstance(at, ast.Name) and at.id in names and parts:
            full = ".".join([names[at.id], *reversed(parts)])
            if re.search(r"\._(?!_)", full) and not full.startswith("torch.ops."):
                found.append(full)
    return found


def test_the_searcher_finds_private_names() -> None:
    for line in (
        "import torch\ntorch._C._x()",
        "from torch.utils._pytree import tree_map",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(f)",
    ):
        assert private_uses(ast.parse(line)), line
    assert not private_uses(ast.parse("import torch\ntorch.ops.aten._local_scalar_dense\ntorch.nn.Linear"))


def test_private_names_of_torch_stand_in_one_file() -> None:
    found = {f"{name}: {use}" for name, text in files() for use in private_uses(ast.parse(text))}
    assert {f for f in found if not f.startswith("core/foreign/private.py: ")} == set()


def test_every_private_name_is_told_of() -> None:
    """Each use in the file belongs to a row, and each row is there in this torch."""
    told = {row.name for row in private.NAMES}
    for use in private_uses(ast.parse(PRIVATE.read_text(encoding="utf-8"))):
        last = use.rpartition(".")[0]
        assert any(
            use == name or name.startswith(use + ".") or use.startswith(name + ".") or last == name.rpartition(".")[0]
            for name in told
        ), use
    assert [row.name for row in private.missing()] == []
    assert all(row.used and row.since and row.without for row in private.NAMES)
    for name in private._LATER:
        assert getattr(private, name) is not None


def test_attributes_are_there() -> None:
    owners = {
        "torch.Tensor": torch.empty(1),
        "torch.UntypedStorage": torch.empty(1).untyped_storage(),
        "torch.nn.Module": torch.nn.Linear(1, 1),
    }
    for owner, attributes in private.ATTRIBUTES.items():
        for attribute in attributes:
            assert hasattr(owners[owner], attribute), (owner, attribute)


def test_every_change_has_a_row() -> None:
    asked: dict[str, set[str]] = {}
    for name, text in files():
        rows = set(re.findall(r'(?:applied|undone|applied_inside)\)?\("([\w-]+)"\)', text))
        if name.startswith("core/foreign/"):
            continue
        for row in rows:
            asked.setdefault(row, set()).add(name)
        changes = [c for c in CHANGES if re.search(c, text)]
        assert not changes or rows or name in PROGRAMS, f"{name} changes what is not ours without a row: {changes}"
    assert set(asked) == {p.name for p in patches.PATCHES}
    assert all(p.changes and p.why and p.off for p in patches.PATCHES)


def test_a_change_is_counted_while_it_is_on() -> None:
    before = [p.name for p in patches.active()]
    with patches.applied_inside("data-loader"), patches.applied_inside("data-loader"):
        assert "data-loader" in [p.name for p in patches.active()]
    assert [p.name for p in patches.active()] == before
    with pytest.raises(ArgumentError, match="nonsense"):
        patches.applied("nonsense")


_LAYER = """
import deepc.compat.deepspeed
import torch
from deepc.compat import finder
from deepc.core.foreign import patches
finder.install()
assert {"import-deepspeed", "tensor-names", "clip-grad"} <= {p.name for p in patches.active()}
assert not hasattr(torch.ones(2), "ds_status")
finder.uninstall()
assert not {"import-deepspeed", "tensor-names", "clip-grad"} & {p.name for p in patches.active()}
assert not hasattr(torch.Tensor, "ds_status")
assert torch.nn.utils.clip_grad_norm_.__module__ == "torch.nn.utils.clip_grad"
assert not hasattr(torch.nn.utils.clip_grad_norm_, "_deepc")
"""


def test_the_compatibility_layer_is_on_the_table() -> None:
    """In a process of its own: others of this one may have a real DeepSpeed, or look for one."""
    done = run_python("-c", _LAYER)
    assert done.returncode == 0, done.stderr


def test_doctor_lists_both() -> None:
    from deepc.observe.diagnose import doctor

    checks = {c.name: c for c in doctor._foreign()}
    assert checks["private names of torch"].state == "ok"
    for p in patches.PATCHES:
        assert p.off in checks[f"patch {p.name}"].value
