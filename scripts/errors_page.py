"""Writes docs/errors.md and docs/env.md from their sources, and lists every message for the site (docs/messages.md).

Sources: the exceptions in python/deepc (docstrings: what it means, then 'Fix: ...'), the table of statuses in
python/deepc/core/lib.py, ops/base/status.def and ops/base/env.def. Nothing is imported, so it runs without torch and
without a build. `--check` writes nothing and fails if a page is not current; mkdocs calls on_page_markdown, so the list
of messages is never older than the site."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "deepc"
MARK = "<!-- every message -->"

# What to do about a status of the C core where no better message reached Python.
STATUS_FIX = {
    "OK": "",
    "E_INVALID": "the argument that the text names",
    "E_DTYPE": "cast to fp32, bf16 or fp16",
    "E_SHAPE": "the sizes that the text names; all ranks must agree",
    "E_NOMEM": "a smaller micro-batch, stage 3, or a larger memory limit of the container",
    "E_SYSTEM": "the text has the system call and its errno; `deepc doctor` checks the limits behind most of them",
    "E_ENV": "unset the variable, or give it one of the values that the text names ([environment](env.md))",
    "E_MISMATCH": "make the same calls on all ranks; the text has both lines",
    "E_PEER_DIED": "look at that rank's output for the first error",
    "E_TIMEOUT": "find the rank that is behind: `deepc doctor PID`",
    "E_ABORTED": "the text says who aborted, and why",
    "E_PEER": "start all ranks as the same user with the same version of deepc",
    "E_STATE": "the order of the calls; for example a communicator that has failed is only closed",
    "E_UNSUPPORTED": "another machine or build; the text says what is missing",
    "E_OVERFLOW": "smaller sizes: their product does not fit into 64 bits",
    "E_IO": "what errno says: the permission, the path, or a device that fails (dmesg)",
    "E_NOSPC": "free space there, or take another folder",
    "E_CORRUPT": "go back to a checkpoint; if it comes again, the disk fails",
    "E_CUDA": "the text has CUDA's error; `nvidia-smi` and the driver's version",
}


class Error(NamedTuple):
    name: str
    module: str
    bases: list[str]
    meaning: str
    fix: str


class Message(NamedTuple):
    """A message that the code raises; values are shown as an ellipsis."""

    error: str
    text: str
    where: str


@cache
def _trees() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def _words(text: str) -> str:
    return " ".join(text.split())


@cache
def errors() -> list[Error]:
    """Every exception of the package that is a DeepcError, those of errors.py first. ValueError for one without a
    docstring."""
    found: list[Error] = []
    for module, tree in _trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.bases:
                bases = [ast.unparse(b).rpartition(".")[2] for b in node.bases]
                text = ast.get_docstring(node) or ""
                meaning, _, fix = text.partition("Fix:")
                found.append(Error(node.name, module, bases, _words(meaning), _words(fix)))
    ours, size = {"DeepcError"}, 0
    while len(ours) != size:
        size = len(ours)
        ours |= {e.name for e in found if ours & set(e.bases)}
    out = [e for e in found if e.name in ours]
    if bare := [e.name for e in out if not e.meaning]:
        raise ValueError(f"{', '.join(bare)}: an exception needs a docstring that says what it means")
    return sorted(out, key=lambda e: e.module != "errors.py")


def _rows(name: str, macro: str) -> list[tuple[Any, ...]]:
    """The rows of a .def file: the first argument is a name, the others are literals."""
    text = (ROOT / "ops" / "base" / name).read_text(encoding="utf-8")
    return [
        (first, *ast.literal_eval(f"[{rest}]"))
        for first, rest in re.findall(rf"^{macro}\((\w+), (.*)\)$", text, flags=re.M)
    ]


def statuses() -> list[tuple[str, int, str, str]]:
    """(name, value, text, exception in Python) of each C status. ValueError for one without a fix in STATUS_FIX."""
    tree = ast.parse((PACKAGE / "core/lib.py").read_text(encoding="utf-8"))
    table = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_EXCEPTIONS")
    assert isinstance(table, ast.Dict)
    raised = {
        ast.literal_eval(k): ast.unparse(v).rpartition(".")[2]
        for k, v in zip(table.keys, table.values)
        if k is not None
    }
    rows = [
        (name, value, text, raised.get(name, "DeepcError")) for name, value, text in _rows("status.def", "DC_STATUS")
    ]
    if unknown := [name for name, *_ in rows if name not in STATUS_FIX]:
        raise ValueError(f"scripts/errors_page.py: STATUS_FIX lacks {', '.join(unknown)}")
    return rows


def _template(node: ast.expr) -> str | None:
    """The text of an expression that makes a string, with an ellipsis for each value; None where nothing of it is
    literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        return None if left is None and right is None else (left or "…") + (right or "…")
    return None


@cache
def messages() -> list[Message]:
    """Every message with literal text that the package gives to one of its exceptions, in the order of exception, file
    and line."""
    names = {e.name: i for i, e in enumerate(errors())}
    out: list[Message] = []
    for module, tree in _trees():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and node.args
                and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in names
            ):
                text = _template(node.args[0])
                if text and re.search(r"[A-Za-z]{3}", text.replace("…", "")):
                    out.append(Message(name, _words(text), module))
    return sorted(out, key=lambda m: names[m.error])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def errors_page() -> str:
    lines = [
        "# Errors",
        "",
        (
            "Each exception of deepc, what it means and what to do. All are `deepc.DeepcError`. A message names the"
            " value, the place and the"
        ),
        (
            "fix; what the ranks of a job were doing is in [When something is wrong](diagnosis.md). All messages, to"
            " search in:"
        ),
        "[messages](messages.md).",
        "",
        "This page is made by `python scripts/errors_page.py` from the docstrings and `ops/base/status.def`.",
        "",
        "## Exceptions",
        "",
        "| exception | is also | means | what to do |",
        "|---|---|---|---|",
    ]
    for e in errors():
        place = (
            ""
            if e.module == "errors.py"
            else f" (`deepc.{e.module.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}`)"
        )
        fix = e.fix or "as the message says."
        also = ", ".join(f"`{b}`" for b in e.bases)
        lines.append(f"| `{e.name}`{place} | {also} | {_cell(e.meaning)} | {_cell(fix[0].upper() + fix[1:])} |")
    lines += [
        "",
        "## Statuses of the C core",
        "",
        (
            "A function of `libdeepc.so` returns one of these; Python raises the exception beside it with the core's"
            " own text of the"
        ),
        "failure.",
        "",
        "| status | value | means | exception | what to do |",
        "|---|---|---|---|---|",
    ]
    for name, value, text, exception in statuses():
        lines.append(
            f"| `DC_{name}` | {value} | {_cell(text)} | {f'`{exception}`' if value else ''} |"
            f" {_cell(STATUS_FIX[name])} |"
        )
    return "\n".join(lines) + "\n"


def env_page() -> str:
    lines = [
        "# Environment variables",
        "",
        (
            "Read when `import deepc` or the first call that needs them runs. This page is made by `python"
            " scripts/errors_page.py` from"
        ),
        "`ops/base/env.def`.",
        "",
        "An argument of a function comes before the environment, the environment before the configuration, and that",
        "before the default. Set to nothing is not set. Any other value than those in the table is a ConfigError that",
        "names both.",
        "",
        "| variable | values | default | meaning |",
        "|---|---|---|---|",
    ]
    rows = _rows("env.def", "DC_ENV")
    for name, values, default, text in rows:
        if values != "internal":
            shown = ", ".join(f"`{v}`" for v in values.split("|")) if "|" in values else values
            lines.append(f"| `{name}` | {shown} | {f'`{default}`' if default else ''} | {_cell(text)} |")
    lines += [
        "",
        "Parts of deepc hand these to each other; nobody sets them by hand:",
        "",
        "| variable | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {_cell(text)} |" for name, values, _, text in rows if values == "internal"]
    return "\n".join(lines) + "\n"


def messages_table() -> str:
    rows, error = [], ""
    for m in messages():
        if m.error != error:
            error = m.error
            rows += ["", f"## {error}", "", "| message | raised in |", "|---|---|"]
        text = re.sub(r"[&<>*_`\[\]]", lambda c: f"&#{ord(c[0])};", m.text)  # as it is, not as Markdown
        rows.append(f"| {_cell(text)} | `{m.where}` |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A hook of mkdocs: puts the list of messages where MARK stands."""
    return markdown.replace(MARK, messages_table()) if MARK in markdown else markdown


PAGES = {"errors.md": errors_page, "env.md": env_page}


def main(arguments: list[str]) -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / "docs" / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if "--check" in arguments and stale:
        print(f"docs/{', docs/'.join(stale)}: not current; run python scripts/errors_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
