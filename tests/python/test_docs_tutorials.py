"""The tutorials in docs/tutorials are programs: a block with a title is a file, a block `sh` is run, in order, in one
empty folder; or, where a page says `<!-- in: a copy of the sources -->`, in such a copy.

Every command has to succeed, and a comment `<!-- expect: REGEX -->` has to match the output of the `sh` block before
it. Blocks of other kinds (`console`, `text`) are for the reader. Needs nothing but what trains: no network, no GPU."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
LIMIT_S = 600
# What a process says in which a C++ thread of torch's is left at its end: seen once, of a rank of Gloo under load.
# deepc has no such threads.
TORCHS_END = "terminate called without an active exception"
NEEDS = {"reading-the-report.md": ("rich",)}
IN_SOURCES = "<!-- in: a copy of the sources -->"
PAGES = {
    "first-run",
    "from-deepspeed",
    "from-fsdp",
    "does-not-fit",
    "slow-networks",
    "long-sequences",
    "reading-the-report",
    "adding-an-op",
    "adding-a-collective",
    "adding-an-optimizer",
    "adding-a-config-key",
}


class Step(NamedTuple):
    """A file to write (name, content), a command to run, or an expectation (a regular expression)."""

    kind: str
    name: str
    text: str


def steps(markdown: str) -> list[Step]:
    """What a page says to do, in order."""
    pattern = r"^```(?P<lang>\w+)(?P<rest>[^\n]*)\n(?P<body>.*?)^```$|<!-- expect: (?P<expect>.*?) -->"
    out: list[Step] = []
    for m in re.finditer(pattern, markdown, flags=re.M | re.S):
        if m["expect"]:
            out.append(Step("expect", "", m["expect"]))
        elif title := re.search(r'title="([^"]+)"', m["rest"]):
            out.append(Step("file", title[1], m["body"]))
        elif m["lang"] == "sh":
            out.append(Step("run", "", m["body"]))
    return out


def programs(folder: Path) -> Path:
    """python, deepc and torchrun of this interpreter, as a user has them on the PATH."""
    folder.mkdir()
    for name, arguments in {"python": "", "deepc": "-m deepc", "torchrun": "-m torch.distributed.run"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def copy_sources(work: Path) -> None:
    """What a clone has of what is built and tested, without what builds and tests left there."""
    for part in (
        "CMakeLists.txt",
        "pyproject.toml",
        "ops",
        "zero",
        "offload",
        "comm",
        "shim",
        "python",
        "tests/c",
        "tests/python",
    ):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, work / part, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy(ROOT / part, work / part)


def what_is_missing(name: str) -> str:
    """What a page needs and this machine lacks; "" if nothing."""
    missing = [module for module in NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]
    if IN_SOURCES in (TUTORIALS / name).read_text(encoding="utf-8"):
        missing += [program for program in ("cmake", "c++") if shutil.which(program) is None]
        gtest = "#include <gtest/gtest.h>"
        if (
            not missing
            and subprocess.run(["c++", "-E", "-x", "c++", "-"], input=gtest, capture_output=True, text=True).returncode
        ):
            missing.append("GoogleTest")
    return ", ".join(missing)


def _run(commands: str, work: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-e", "-c", commands],
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def follow(page: Path, folder: Path) -> list[str]:
    """Does what the page says, in `folder`; returns the output of each command block. AssertionError names the step
    that went wrong."""
    import deepc
    from deepc.core import lib

    work, bin_folder = folder / "work", programs(folder / "bin")
    work.mkdir()
    if IN_SOURCES in page.read_text(encoding="utf-8"):
        copy_sources(work)
    env = {k: v for k, v in os.environ.items() if not k.startswith("DEEPC_")}
    env["DEEPC_LIBRARY_DIR"] = str(
        lib.library_dir()
    )  # the tests are of what is installed; some pages work on its sources
    source = str(Path(deepc.__file__).parents[1])
    env |= {
        "PATH": f"{bin_folder}:{env['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (source, env.get("PYTHONPATH")))),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
    }
    outputs: list[str] = []
    for step in steps(page.read_text(encoding="utf-8")):
        if step.kind == "file":
            (work / step.name).write_text(step.text)
        elif step.kind == "run":
            done = _run(step.text, work, env)
            if done.returncode and TORCHS_END in done.stdout:
                done = _run(step.text, work, env)
            outputs.append(done.stdout)
            assert done.returncode == 0, f"{page.name}: exit code {done.returncode} of\n{step.text}\n{done.stdout}"
        else:
            assert outputs, f"{page.name}: an expectation stands before any command"
            assert re.search(step.text, outputs[-1]), (
                f"{page.name}: nothing in the output matches {step.text!r}:\n{outputs[-1]}"
            )
    return outputs


def test_pages_are_read_as_programs():
    text = (
        '```python title="a.py"\nprint(1)\n```\ntext\n```sh\npython a.py\n```\n\n<!-- expect: ^1'
        " -->\n```text\nno\n```\n"
    )
    assert steps(text) == [
        Step("file", "a.py", "print(1)\n"),
        Step("run", "", "python a.py\n"),
        Step("expect", "", "^1"),
    ]


def test_a_failed_command_or_expectation_is_seen(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a.md").write_text("```sh\nfalse\ntrue\n```\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        follow(tmp_path / "a.md", tmp_path / "a")
    (tmp_path / "b.md").write_text("```sh\necho no\n```\n<!-- expect: yes -->\n")
    (tmp_path / "b").mkdir()
    with pytest.raises(AssertionError, match="matches 'yes'"):
        follow(tmp_path / "b.md", tmp_path / "b")


def test_the_tutorials_are_in_the_menu():
    assert {p.stem for p in TUTORIALS.glob("*.md")} == PAGES
    menu = re.search(
        r"^  - Tutorials:\n((?:      - .*\n)+)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M
    )
    assert menu and sorted(re.findall(r": tutorials/(\S+)\.md$", menu[1], flags=re.M)) == sorted(PAGES)


def test_every_tutorial_runs_something():
    for page in TUTORIALS.glob("*.md"):
        kinds = {s.kind for s in steps(page.read_text(encoding="utf-8"))}
        assert {"file", "run", "expect"} <= kinds, f"{page.name} has no {', '.join({'file', 'run', 'expect'} - kinds)}"


def test_a_new_collectives_method_uses_what_there_is():
    """Its tutorial compiles the core, which the quick class leaves out: the names that its Python has."""
    from deepc.comm import shared

    page = (TUTORIALS / "adding-a-collective.md").read_text(encoding="utf-8")
    (method,) = (s.text for s in steps(page) if s.name == "method.py")
    tree = ast.parse(textwrap.dedent(method))
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    made = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    assert not [n for n in names - made - given if not hasattr(shared, n) and not hasattr(builtins, n)]
    own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "self"}
    source = inspect.getsource(shared.Comm)
    assert own and not [n for n in own if not re.search(rf"self\.{n}\b", source)]


@pytest.mark.full
def test_the_short_tutorial(tmp_path):
    outputs = follow(TUTORIALS / "slow-networks.md", tmp_path)
    sent = [float(re.search(r"([\d.]+) bytes sent per parameter", out)[1]) for out in outputs]
    assert sent[1] < 0.3 * sent[0]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(p.name for p in TUTORIALS.glob("*.md")))
def test_tutorial(name, tmp_path):
    if missing := what_is_missing(name):
        pytest.skip(f"not here: {missing}")
    follow(TUTORIALS / name, tmp_path)
