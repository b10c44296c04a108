"""`deepc config`: what a configuration means here, key by key, and the list of all keys. Owns the words; the keys are
rows of config_keys.py, the rules are config.py's."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from ..errors import ArgumentError, ConfigError
from .keys import ANY, DIFFERS, KEYS, LATER_OPTIMIZERS, OPTIMIZER_PARAMS, Key, State
from .rules import TRIANGLE, Loader, resolve_batch
from .schema import write_schema
from .source import read
from .tree import Config, Default

_ERROR = re.compile(r'unknown key "(?P<unknown>[^"]+)"[.:]?\s*|(?P<known>[\w.]+) = ')
_STATES = {
    "used": "used",
    "inert": "without effect here",
    "off": "not asked for (a capability that deepc lacks, with the value that leaves it off)",
    "auto": 'still "auto": an integration (Hugging Face Trainer, Accelerate) fills these before deepc.initialize',
}


@dataclass(frozen=True)
class Finding:
    """One key of a configuration. state: "used", "inert", "off" or "auto"; says: what it does, or why it does nothing;
    differs: from DeepSpeed, or ""."""

    key: str
    value: Any
    state: str
    says: str
    differs: str = ""


@dataclass(frozen=True)
class Wrong:
    """One error. key: "" if it is about several keys or the file."""

    key: str
    message: str


@dataclass
class Check:
    """What a configuration means. batch: the three numbers and which of them are derived; None if they don't fit
    together or are "auto". defaults: of keys that are not given, those that change results."""

    source: str
    ranks: int
    device: str
    ranks_from: str = "given"
    precision: str | None = None
    errors: list[Wrong] = field(default_factory=list)
    batch: dict[str, Any] | None = None
    keys: list[Finding] = field(default_factory=list)
    defaults: list[Default] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.errors

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "defaults": [d._asdict() for d in self.defaults], "ok": self.ok}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def check(source: Any, *, ranks: int | None = None, device: str = "cpu") -> Check:
    """Explains a configuration (what Config.load takes). ranks: None: what the batch sizes say if all three are given,
    else 1. Wrong configurations are explained as well, as far as they can be read."""
    try:
        raw, name = read(source)
    except ConfigError as exc:
        return Check(
            str(source) if isinstance(source, (str, os.PathLike)) else "the configuration",
            ranks or 1,
            device,
            errors=[Wrong("", str(exc))],
        )
    world, said = (ranks, "given") if ranks is not None else _ranks_of(raw)
    loader = Loader(raw, name, world, device, True)
    out = Check(name, world, device, said)
    try:
        config = Config.read(loader)
        out.precision, out.defaults = config.precision_in_words, list(config.defaults)
    except ConfigError:
        out.errors = [_wrong(text, name) for text in loader.errors]
    out.batch = _batch(loader)
    wrong = {e.key.removesuffix(".enabled") for e in out.errors}
    out.keys = [k for k in _findings(loader) if k.key not in wrong]
    return out


def _ranks_of(raw: dict[str, Any]) -> tuple[int, str]:
    """Without --ranks: the number that makes the batch triangle fit, if there is one."""
    train, micro, accumulation = (cast(int, raw.get(k)) for k in TRIANGLE)
    if all(type(v) is int and v > 0 for v in (train, micro, accumulation)) and train % (micro * accumulation) == 0:
        return train // (micro * accumulation), "from the batch sizes"
    return 1, "default"


def _wrong(text: str, name: str) -> Wrong:
    body = text.removeprefix(f"{name}: ")
    match = _ERROR.match(body)
    if match is None:
        return Wrong("", body)
    if match["unknown"]:
        rest = body[match.end() :]
        return Wrong(
            match["unknown"],
            "unknown key. " + (rest or "It is not among DeepSpeed's or deepc's; `deepc config keys` lists them."),
        )
    return Wrong(match["known"], body)


def _batch(loader: Loader) -> dict[str, Any] | None:
    given: dict[str, int | None] = {k: loader.values.get(k) for k in TRIANGLE}
    if any(k in loader.auto for k in TRIANGLE) or loader.triangle is None:
        return None
    whole, part, times = given.values()
    train, micro, accumulation = resolve_batch(whole, part, times, loader.world)
    return {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "ranks": loader.world,
        "derived": [k for k, v in given.items() if v is None],
    }


def _findings(loader: Loader) -> list[Finding]:
    why = {i.key: i for i in loader.inert}
    out = []
    for row in KEYS:
        if row.path in loader.auto:
            out.append(Finding(row.path, "auto", "auto", row.help, DIFFERS.get(row.path, "")))
        elif row.path in loader.values:
            value = loader.values[row.path]
            out.append(_finding(row, "(hidden)" if row.path == "comet.api_key" and value else value, why))
            if row.path == "optimizer.params":
                out += _arguments(loader, why)
        elif row.kind == "gated" and isinstance(loader.raw.get(row.path), dict):
            out.append(Finding(row.path, loader.raw[row.path], "off", row.help))
    return out


def _finding(row: Key, value: Any, why: dict[str, Any]) -> Finding:
    if row.path in why:
        return Finding(row.path, value, "inert", why[row.path].reason)
    if row.state in (State.LATER, State.REMOVED):
        return Finding(
            row.path, value, "off", row.help if row.state is State.LATER else f"{row.help} Instead: {row.why}."
        )
    return Finding(row.path, value, "used", row.help, DIFFERS.get(row.path, ""))


def _arguments(loader: Loader, why: dict[str, Any]) -> list[Finding]:
    """The arguments of Adam and AdamW, whose rows are a table of their own."""
    if str(loader.values.get("optimizer.type", "")).lower() not in ("adam", "adamw"):
        return []
    out = []
    for name, value in (loader.values["optimizer.params"] or {}).items():
        path = f"optimizer.params.{name}"
        row = OPTIMIZER_PARAMS.get(name)
        if row is None:
            continue  # an error says so
        if path in why:
            out.append(Finding(path, value, "inert", why[path].reason))
        else:
            out.append(
                Finding(
                    path,
                    value,
                    "auto" if path in loader.auto else "off" if row.state is State.LATER else "used",
                    row.help,
                )
            )
    return out


# ---- in words --------------------------------------------------------------------------------------------------------
def _value(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 90 else text[:87] + "..."


def _wrapped(text: str, indent: int) -> list[str]:
    pad = " " * indent
    return textwrap.wrap(
        text, 118, initial_indent=pad, subsequent_indent=pad, break_long_words=False, break_on_hyphens=False
    )


def _lines(c: Check) -> list[str]:
    ranks = f"{c.ranks} rank{'s' * (c.ranks > 1)}" + {"given": "", "default": " (--ranks N for more)"}.get(
        c.ranks_from, f" ({c.ranks_from})"
    )
    verdict = "no errors" if c.ok else f"{len(c.errors)} error{'s' * (len(c.errors) > 1)}"
    out = [f"{c.source}: {verdict}; {ranks} on {c.device}" + (f", {c.precision}" if c.precision else "")]
    if c.errors:
        out += ["", "wrong:"]
        for e in c.errors:
            out += [*_wrapped(f"{e.key}: {e.message}" if e.key and not e.message.startswith(e.key) else e.message, 2)]
    if c.batch is not None:
        b = c.batch
        note = {k: " (derived)" if k in b["derived"] else "" for k in TRIANGLE}
        out += [
            "",
            "batch:",
            (
                f"  train_batch_size {b[TRIANGLE[0]]}{note[TRIANGLE[0]]} = train_micro_batch_size_per_gpu"
                f" {b[TRIANGLE[1]]}{note[TRIANGLE[1]]} * gradient_accumulation_steps"
                f" {b[TRIANGLE[2]]}{note[TRIANGLE[2]]} * {c.ranks} rank{'s' * (c.ranks > 1)}"
            ),
        ]
    if c.defaults:
        out += ["", "not given, and the default changes results:"]
        for d in c.defaults:
            out += [f"  {d.key} = {_value(d.value)}", *_wrapped(d.says, 6)]
    for state, title in _STATES.items():
        found = [k for k in c.keys if k.state == state]
        if not found:
            continue
        out += ["", f"{title}:"]
        for k in found:
            out.append(f"  {k.key} = {_value(k.value)}")
            out += _wrapped(k.says, 6) if k.says else []
            out += _wrapped(f"differs from DeepSpeed: {k.differs}", 6) if k.differs else []
    return out


# ---- all keys --------------------------------------------------------------------------------------------------------
_STATE_WORDS = {State.ACTIVE: "used", State.INERT: "inert", State.LATER: "error", State.REMOVED: "error"}
_KINDS = {
    "bool": "true, false",
    "int": "integer",
    "number": "number",
    "str": "string",
    "strings": "list of strings",
    "ints": "list of integers",
    "numbers": "list of numbers",
    "object": "object",
    "gated": 'object with "enabled"',
    "any": "any",
}


def _kind(row: Key) -> str:
    if row.kind == "pick":
        return 'true, false, "auto", list of ' + ", ".join(f'"{c}"' for c in row.choices)
    if row.choices:
        return ", ".join(f'"{c}"' for c in row.choices)
    limits = " and ".join(
        f"{op} {b:g}" for op, b in ((">=", row.ge), (">", row.gt), ("<=", row.le), ("<", row.lt)) if b is not None
    )
    return _KINDS[row.kind] + (f" {limits}" if limits else "")


def _default(row: Key) -> str:
    if row.kind == "gated" or row.state is State.REMOVED:
        return "absent"
    if row.default == sys.maxsize:
        return "unlimited"
    return json.dumps(list(row.default) if isinstance(row.default, tuple) else row.default)


def _does(row: Key, prefix: str = "") -> str:
    also = f' Also called "{row.alias}".' if row.alias else ""
    return _meaning(row, prefix) + also


def _meaning(row: Key, prefix: str) -> str:
    differs = DIFFERS.get(prefix + row.path, "")
    if row.state is State.ACTIVE:
        return row.help + (f" Differs from DeepSpeed: {differs}" if differs else "")
    if row.state is State.INERT:
        where = f" on a {row.inert_on.upper()}" if row.inert_on else ""
        return f"{row.help} Without effect{where}: {row.why}."
    only = "" if row.ok is ANY else "; accepted: " + (" or ".join(json.dumps(o) for o in row.ok) or "nothing")
    if row.kind == "gated":
        only = '; accepted: {"enabled": false}'
    if row.state is State.LATER:
        return (
            f"deepc does not have {row.why}{only}."
            if row.ok is not ANY
            else f"Of what deepc does not have ({row.why}): read only when that is switched on."
        )
    return f"Removed from DeepSpeed: {row.why}{only}."


def key_rows() -> list[dict[str, str]]:
    """Every key: {"key", "values", "default", "state" (used, inert, error: asking for it is one), "does"}, in the order
    of the table."""
    out = []
    for row in KEYS:
        out.append(
            {
                "key": row.path,
                "values": _kind(row),
                "default": _default(row),
                "state": _STATE_WORDS[row.state] if row.ok is not ANY else "inert",
                "does": _does(row),
            }
        )
        if row.path == "optimizer.params":
            out += [
                {
                    "key": f"optimizer.params.{r.path}",
                    "values": _kind(r),
                    "default": _default(r),
                    "state": _STATE_WORDS[r.state],
                    "does": _does(r, "optimizer.params."),
                }
                for r in OPTIMIZER_PARAMS.values()
            ]
    return out


_HEAD = """# Configuration

*Generated by `deepc config keys --markdown`; do not edit.*

deepc reads DeepSpeed's JSON. `deepc config check ds_config.json --ranks 2` explains a file key by key, with what is wrong and the nearest
spelling; `deepc config schema -o deepc.schema.json` writes a JSON Schema for editors and CI. Comments and trailing commas are allowed.

**used**: the key has its meaning. **inert**: a hint about performance that means nothing here, or part of something that is off; it is
accepted and reported with the reason. **error**: asks for what deepc does not have; only the value that leaves it off is accepted. A key
that is not here is an error, with the nearest spelling.

The batch: `train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks`. Give one or two of them; the others
are derived.
"""  # noqa: E501


def markdown() -> str:
    """docs/config.md."""
    rows = key_rows()
    out, section = [_HEAD], None
    count = {s: sum(r["state"] == s for r in rows) for s in ("used", "inert", "error")}
    out.append(f"{len(rows)} keys: {count['used']} used, {count['inert']} inert, {count['error']} error.\n")
    groups: dict[str, list[dict[str, str]]] = {}
    for r in rows:
        top = r["key"].split(".")[0] if "." in r["key"] else ""
        groups.setdefault(top, []).append(r)
    for section, found in groups.items():
        out.append(f"## {section or 'Top level'}\n")
        out.append("| key | values | default | | what it does here |\n|---|---|---|---|---|")
        for r in found:
            cells = [
                f"`{r['key']}`",
                r["values"].replace("|", "\\|"),
                f"`{r['default']}`",
                r["state"],
                r["does"].replace("|", "\\|"),
            ]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    names = ", ".join(f"`{k}` ({v})" for k, v in LATER_OPTIMIZERS.items())
    out.append(f"## Optimizers that are errors\n\n{names}.\n")
    return "\n".join(out)


# ---- command line ----------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    commands = parser.add_subparsers(dest="config_command", metavar="COMMAND", required=True)
    one = commands.add_parser(
        "check",
        help="explain a configuration and find what is wrong in it",
        description=(
            "Explains each key of a configuration: what it does here, what differs from "
            "DeepSpeed, what is inert\nand why, what is wrong and the nearest spelling; and the batch sizes as derived."
        ),
        epilog=(
            "examples:\n  deepc config check ds_config.json --ranks 2\n  deepc config check ds_config.json --device"
            " cuda --json\n\nexit code: 0 no errors, 1 the configuration is wrong"
        ),
        **form,
    )
    one.add_argument("config", metavar="FILE", help="the DeepSpeed JSON; - reads standard input")
    one.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="data-parallel ranks; default: what the batch sizes say if all three are given, else 1",
    )
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="decides which hints are inert (cpu)")
    one.add_argument("--json", action="store_true", help="for programs")
    keys = commands.add_parser(
        "keys",
        help="list all keys with defaults",
        description="Every key that deepc knows: values, default, and what it does here.",
        epilog="examples:\n  deepc config keys zero_optimization\n  deepc config keys --json",
        **form,
    )
    keys.add_argument("section", nargs="?", default="", metavar="PART", help="only keys that contain this")
    keys.add_argument("--json", action="store_true", help="for programs")
    keys.add_argument("--markdown", action="store_true", help="docs/config.md")
    schema = commands.add_parser(
        "schema",
        help="a JSON Schema of all keys",
        description="Writes the JSON Schema (draft 2020-12) of everything that deepc accepts, for editors and CI.",
        epilog="example:\n  deepc config schema -o deepc.schema.json",
        **form,
    )
    schema.add_argument("-o", "--output", metavar="FILE", help="default: print it")


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    return {"check": _run_check, "keys": _run_keys, "schema": _run_schema}[args.config_command](args)


def _run_check(args: argparse.Namespace) -> int:
    if args.config != "-" and (not os.path.exists(args.config) or os.path.isdir(args.config)):  # a pipe is good
        what = f"{args.config!r} is a folder" if os.path.isdir(args.config) else f"there is no file {args.config!r}"
        raise ArgumentError(
            f"{what} (looked in {os.getcwd()}). Give the DeepSpeed JSON, or - to read it from standard input"
        )
    source = sys.stdin.read() if args.config == "-" else Path(args.config)
    found = check(source, ranks=args.ranks, device=args.device)
    print(json.dumps(found.to_dict(), indent=1, default=str) if args.json else found)
    return 0 if found.ok else 1


def _run_keys(args: argparse.Namespace) -> int:
    if args.markdown:
        print(markdown(), end="")
        return 0
    rows = [r for r in key_rows() if args.section in r["key"]]
    if not rows:
        from .values import suggest

        raise ConfigError(f"no key contains {args.section!r}.{suggest(args.section)}")
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for r in rows:
        print(f"{r['key']}  [{r['state']}]  {r['values']}; default {r['default']}")
        print("\n".join(_wrapped(r["does"], 4)))
    return 0


def _run_schema(args: argparse.Namespace) -> int:
    try:
        text = write_schema(args.output)
    except OSError as exc:
        raise ArgumentError(f"--output {args.output}: {exc.strerror}") from exc
    if args.output is None:
        print(text, end="")
    return 0


# ---- python -m deepc.config ------------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> int:
    """`python -m deepc.config`."""
    parser = argparse.ArgumentParser(prog="python -m deepc.config", description="The keys of a deepc configuration.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--schema", nargs="?", const="-", metavar="FILE", help="write the JSON Schema of all keys to FILE, or print it"
    )
    what.add_argument("--explain", metavar="CONFIG", help="check a configuration and show what it means")
    parser.add_argument("--world-size", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    if args.schema:
        text = write_schema(None if args.schema == "-" else args.schema)
        if args.schema == "-":
            print(text, end="")
        return 0
    try:
        print(Config.load(args.explain, world_size=args.world_size, device_type=args.device, allow_auto=True).explain())
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0
