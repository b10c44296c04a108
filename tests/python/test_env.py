"""Environment variables: one table, one parser, one precedence, and nobody reads past them."""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepc.core import env
from deepc.errors import ArgumentError, ConfigError
from programs import run_python

PACKAGE = Path(__file__).resolve().parents[2] / "python/deepc"
# Who may ask the environment itself for a DEEPC_* variable: the parser, who needs one before there is a table, and what
# runs where deepc can't be imported.
READERS = {"core/env.py", "core/lib.py"}
NAME = re.compile(r"DEEPC_[A-Z0-9_]+")
# Of the build and of the tests; "DEEPC_" alone is a prefix.
NOT_IN_THE_TABLE = {"DEEPC_CUDA", "DEEPC_NATIVE", "DEEPC_TEST"}


@functools.cache
def sources(*words: str) -> list[tuple[str, ast.Module]]:
    """Files with one of the words."""
    texts = [(p, p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))]
    return [(p.relative_to(PACKAGE).as_posix(), ast.parse(t)) for p, t in texts if any(w in t for w in words)]


def reads_of_the_environment(tree: ast.AST) -> list[str]:
    """DEEPC_* names that are looked up in os.environ or by os.getenv."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            asked, of = node.args, ast.unparse(node.func)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            asked, of = [node.slice], ast.unparse(node.value)
        elif isinstance(node, ast.Compare):
            asked, of = [node.left], ast.unparse(node.comparators[-1])
        else:
            continue
        if "environ" in of or "getenv" in of:
            found += [name for a in asked for name in NAME.findall(ast.unparse(a))]
    return found


def test_the_searcher_finds_reads() -> None:
    for line in ("os.environ.get('DEEPC_X')", "os.environ['DEEPC_X']", "os.getenv('DEEPC_X')", "'DEEPC_X' in environ"):
        assert reads_of_the_environment(ast.parse(line)), line


def test_python_reads_deepcs_variables_in_one_place() -> None:
    found = {
        f"{name}: {variable}"
        for name, tree in sources("environ", "getenv")
        if name not in READERS and not name.startswith("launch/host/")
        for variable in reads_of_the_environment(tree)
    }
    assert found == set()


def test_every_name_in_the_sources_has_a_row() -> None:
    named = {
        name
        for _, tree in sources("DEEPC_")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in NAME.findall(node.value)
    }
    assert len(named) > 15
    assert named - set(env.variables()) - NOT_IN_THE_TABLE == set()


def test_switches_have_one_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = [v.name for v in env.variables().values() if v.values == "0|1"]
    assert {"DEEPC_DEBUG", "DEEPC_STREAMED", "DEEPC_WIRE_FP32", "DEEPC_HUGEPAGES", "DEEPC_KEEP_HEAP"} <= set(switches)
    for name in switches:
        for value, expected in (("0", False), ("1", True)):
            monkeypatch.setenv(name, value)
            assert env.switch(name) is expected
        for wrong in ("yes", "true", "2", "-"):
            monkeypatch.setenv(name, wrong)
            with pytest.raises(ConfigError, match=f"{name}='{wrong}'.*0 or 1"):
                env.switch(name)
        monkeypatch.delenv(name)
        on = "HUGEPAGES", "KEEP_HEAP", "CHUNKED_LOSS", "MATMUL", "MEMBARRIER", "CMA"
        assert env.switch(name) is (name.removeprefix("DEEPC_") in on)


def test_argument_environment_config_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPC_PROGRESS", raising=False)
    assert env.text("DEEPC_PROGRESS") == "auto" and env.given("DEEPC_PROGRESS") == ""
    assert env.text("DEEPC_PROGRESS", config="thread") == "thread"
    monkeypatch.setenv("DEEPC_PROGRESS", "")  # set to nothing is not set
    assert env.text("DEEPC_PROGRESS", config="thread") == "thread"
    monkeypatch.setenv("DEEPC_PROGRESS", "INLINE")
    assert env.text("DEEPC_PROGRESS", config="thread") == "inline"
    assert env.text("DEEPC_PROGRESS", argument="auto", config="thread") == "auto"
    monkeypatch.setenv("DEEPC_DEBUG", "1")
    assert env.switch("DEEPC_DEBUG", config=False) and not env.switch("DEEPC_DEBUG", argument=False)
    monkeypatch.delenv("DEEPC_DEBUG")
    assert env.switch("DEEPC_DEBUG", config=True)
    with pytest.raises(ArgumentError, match="DEEPC_NOWHERE"):
        env.given("DEEPC_NOWHERE")


def test_a_run_has_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the variable and the configuration both set, all files of a run lie where the variable says."""
    from deepc.observe.profile import run_folder

    asked = SimpleNamespace(deepc=SimpleNamespace(run_dir="of the configuration"))
    assert run_folder(asked) == "of the configuration"
    monkeypatch.setenv("DEEPC_RUN_DIR", str(tmp_path))
    assert run_folder(asked) == str(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("DEEPC_HUGEPAGES", "no"), ("DEEPC_LOG_LEVEL", "LOUD")])
def test_a_wrong_value_at_import_is_told(name: str, value: str) -> None:
    done = run_python("-c", "import deepc", env={**os.environ, name: value})
    assert done.returncode == 1 and f"ConfigError: {name}='{value}'" in done.stderr, done.stderr
