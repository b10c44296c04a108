"""`deepc ckpt`: what is in a checkpoint, whether it is whole, what differs between two, and its weights as Hugging Face
files. Reads through store.py only: nothing is unpickled, and no tensor is held that need not be."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core import dtypes
from ..core.ops import casts, name_of, torch_dtype
from ..errors import ArgumentError, CheckpointError, numeric
from .files import SafetensorsFile
from .store import INDEX, CheckpointReader, deepspeeds, list_tags, read_latest, write_model

_CHUNK = 4 << 20  # elements that are compared or converted at a time
_LEFT = re.compile(r"\.(tmp|old)-(.+)-([0-9a-zA-Z]+)")
_SIZES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def _no_folder(path: str | os.PathLike[str]) -> str:
    what = (
        f"{os.fspath(path)!r} is a file, and no part of a checkpoint"
        if os.path.exists(path)
        else f"there is no folder {os.fspath(path)!r}"
    )
    return f"{what} (looked in {os.getcwd()}). Give the folder that save_checkpoint got, or FOLDER/TAG"


# ---- finding ---------------------------------------------------------------------------------------------------------
def locate(path: str | os.PathLike[str], tag: str | None = None) -> tuple[str, str]:
    """(directory, tag) that PATH means: a checkpoint directory (its latest, or `tag`) or DIR/TAG. CheckpointError if
    there is none, which says what is there instead."""
    folder = os.path.abspath(os.fspath(path))
    if os.path.isfile(folder) and os.path.basename(folder) in (INDEX, "latest"):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise CheckpointError(_no_folder(path))
    if tag is None and os.path.isfile(os.path.join(folder, INDEX)):
        return os.path.dirname(folder), os.path.basename(folder)
    tags = list_tags(folder)
    if not tags:
        raise CheckpointError(f"{os.fspath(path)} holds no deepc checkpoint.{_instead(Path(folder))}")
    if tag is not None and tag not in tags:
        raise CheckpointError(f"there is no checkpoint {tag!r} in {os.fspath(path)}. It has: {', '.join(tags)}.")
    return folder, tag if tag is not None else read_latest(folder)


def _instead(folder: Path) -> str:
    if theirs := deepspeeds(folder):
        return theirs
    names = {p.name for p in folder.iterdir()}
    if any(n.endswith(".safetensors") for n in names):
        return " It holds safetensors files without optimizer states: load them into the model itself."
    inside = [p.name for p in sorted(folder.iterdir()) if p.is_dir() and list_tags(p)]
    return (
        f" Its folder{'s' * (len(inside) > 1)} {', '.join(inside[:5])} {'do' if len(inside) > 1 else 'does'}: give one."
        if inside
        else ""
    )


def size_text(nbytes: float) -> str:
    """ "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500MiB", "1000000"."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    unit = (match[2] or "B").upper() if match else ""
    try:
        value = int(float(match[1]) * _SIZES[unit]) if match else 0
    except (KeyError, ValueError):
        value = 0
    if value < 1:
        raise ArgumentError(f"{text!r} is not a size, such as 5GB or 500MiB")
    return value


def _files_bytes(path: str) -> int:
    return sum(e.stat().st_size for e in os.scandir(path) if e.is_file())


# ---- ls --------------------------------------------------------------------------------------------------------------
def listing(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """{"directory", "latest", "checkpoints": [{"tag", "bytes", "written", "ranks", "step", "stage", "dtype",
    "problem"}], "left": [...]}: newest last; left: what saves that were killed left behind."""
    folder = os.path.abspath(os.fspath(directory))
    if not os.path.isdir(folder):
        raise CheckpointError(_no_folder(directory))
    rows, problem = [], ""
    tags = list_tags(folder)
    try:
        latest = read_latest(folder) if tags else None
    except CheckpointError as exc:
        latest, problem = None, str(exc)
    for tag in tags:
        path = os.path.join(folder, tag)
        row: dict[str, Any] = {
            "tag": tag,
            "bytes": _files_bytes(path),
            "written": os.stat(os.path.join(path, INDEX)).st_mtime,
            "problem": "",
        }
        try:
            with CheckpointReader(folder, tag) as reader:
                engine = _engine_state(reader)
                row |= {
                    "written": reader.written,
                    "ranks": reader.world_size,
                    "step": engine.get("global_steps"),
                    "stage": engine.get("stage"),
                    "dtype": engine.get("dtype"),
                }
        except CheckpointError as exc:
            row["problem"] = str(exc)
        rows.append(row)
    if not rows and not _left(folder):
        raise CheckpointError(f"{os.fspath(directory)} holds no deepc checkpoint.{_instead(Path(folder))}")
    rows.sort(key=lambda r: r["written"])
    return {
        "directory": folder,
        "latest": latest,
        "problem": problem,
        "checkpoints": rows,
        "left": [_left_row(p) for p in _left(folder)],
    }


def _engine_state(reader: CheckpointReader) -> dict[str, Any]:
    state = reader.client_state()
    engine = state.get("engine") if isinstance(state, dict) else None
    return engine if isinstance(engine, dict) else {}


def _left(folder: str) -> list[str]:
    return sorted(
        os.path.join(folder, e)
        for e in os.listdir(folder)
        if _LEFT.fullmatch(e) and os.path.isdir(os.path.join(folder, e))
    )


def _left_row(path: str) -> dict[str, Any]:
    written = max(os.stat(p).st_mtime for p in (path, *os.scandir(path)))  # a file may be growing for hours
    return {"path": path, "bytes": _files_bytes(path), "age_s": time.time() - written}


def _print_listing(found: dict[str, Any]) -> None:
    print(f"{found['directory']}")
    width = max([len(r["tag"]) for r in found["checkpoints"]] + [3])
    for r in found["checkpoints"]:
        mark = "*" if r["tag"] == found["latest"] else " "
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(r["written"]))
        if r["problem"]:
            print(f"{mark} {r['tag']:<{width}}  {when}  {size_text(r['bytes']):>10}  WRONG: {r['problem']}")
            continue
        what = (
            f"step {r['step']}, ZeRO stage {r['stage']}, {r['dtype']}"
            if r["step"] is not None
            else "not written by an engine"
        )
        print(
            f"{mark} {r['tag']:<{width}}  {when}  {size_text(r['bytes']):>10}  {r['ranks']}"
            f" rank{'s' * (r['ranks'] > 1)}, {what}"
        )
    if found["latest"]:
        print("* latest: what load_checkpoint reads without a tag")
    if found["problem"]:
        print(f"latest: {found['problem']}")
    for r in found["left"]:
        print(
            f"  left by a save that did not end: {os.path.basename(r['path'])}, {size_text(r['bytes'])} (deepc ckpt"
            " clean removes it)"
        )


# ---- info ------------------------------------------------------------------------------------------------------------
def info(path: str | os.PathLike[str], tag: str | None = None) -> dict[str, Any]:
    """What a checkpoint holds, as data: tag, engine's figures, kinds of tensors with counts and bytes, files, tensors,
    keys of the client state."""
    directory, tag = locate(path, tag)
    with CheckpointReader(directory, tag) as reader:
        engine = _engine_state(reader)
        state = reader.client_state()
        kinds: dict[str, dict[str, int]] = {}
        tensors = []
        for name, t in reader.tensors.items():
            nbytes = t.numel * t.dtype.itemsize
            kind = kinds.setdefault(name.split("/", 1)[0], {"tensors": 0, "elements": 0, "bytes": 0})
            kind["tensors"] += 1
            kind["elements"] += t.numel
            kind["bytes"] += nbytes
            tensors.append(
                {
                    "name": name,
                    "dtype": name_of(t.dtype),
                    "shape": list(t.shape),
                    "bytes": nbytes,
                    "pieces": len(t.pieces),
                }
            )
        client = state.get("client") if isinstance(state, dict) else state
        return {
            "path": reader.path,
            "tag": reader.tag,
            "token": reader.token,
            "ranks": reader.world_size,
            "bytes": _files_bytes(reader.path),
            "written": reader.written,
            "engine": engine,
            "kinds": kinds,
            "tensors": tensors,
            "files": {e.name: e.stat().st_size for e in sorted(os.scandir(reader.path), key=lambda e: e.name)},
            "client_state": sorted(map(str, client)) if isinstance(client, dict) else [],
        }


_MEANING = {"fp32": "trained parameters (fp32)", "frozen": "frozen parameters", "buffer": "buffers"}


def _print_info(found: dict[str, Any], tensors: bool) -> None:
    e = found["engine"]
    print(
        f"{found['path']}: {size_text(found['bytes'])}, written"
        f" {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found['written']))} by {found['ranks']}"
        f" rank{'s' * (found['ranks'] > 1)}"
    )
    if e:
        print(
            f"  step {e.get('global_steps')} ({e.get('skipped_steps')} skipped), {e.get('global_samples')} samples;"
            f" ZeRO stage {e.get('stage')}, {e.get('dtype')}"
            + (
                f", loss scale {e['scaler'].get('loss_scale', e['scaler'].get('cur_scale'))}"
                if isinstance(e.get("scaler"), dict)
                else ""
            )
        )
        groups = e.get("optimizer", {}).get("param_groups", []) if isinstance(e.get("optimizer"), dict) else []
        for i, g in enumerate(groups if isinstance(groups, list) else []):
            print(
                f"  parameter group {i}: "
                + ", ".join(f"{k} {v}" for k, v in g.items() if isinstance(v, (int, float, tuple, list, bool)))
            )
    for kind, k in found["kinds"].items():
        print(
            f"  {_MEANING.get(kind, 'optimizer state ' + kind):<36}{k['tensors']:>6} tensors{k['elements']:>16,} "
            f"elements{size_text(k['bytes']):>12}"
        )
    for name, nbytes in found["files"].items():
        print(f"  file {name:<44}{size_text(nbytes):>12}")
    if found["client_state"]:
        print(f"  client state: {', '.join(found['client_state'])}")
    for t in found["tensors"] if tensors else []:
        print(
            f"    {t['name']:<56} {t['dtype']:<9}"
            f" {'x'.join(map(str, t['shape'])) or 'scalar':<18}{size_text(t['bytes']):>12}  {t['pieces']}"
            f" piece{'s' * (t['pieces'] != 1)}"
        )


# ---- verify ----------------------------------------------------------------------------------------------------------
def verify(path: str | os.PathLike[str], tag: str | None = None, *, every: bool = False) -> list[tuple[str, str, int]]:
    """(tag, what is wrong or "", bytes read) of the checkpoint, or of all of a directory. Reads every byte and checks
    every checksum."""
    if every:
        directory = os.path.abspath(os.fspath(path))
        tags = list_tags(directory)
        if not tags:
            locate(path)
    else:
        directory, only = locate(path, tag)
        tags = [only]
    out = []
    for name in tags:
        nbytes = _files_bytes(os.path.join(directory, name))
        try:
            with CheckpointReader(directory, name) as reader:
                reader.verify()
            out.append((name, "", nbytes))
        except CheckpointError as exc:
            out.append((name, str(exc), nbytes))
    return out


# ---- export ----------------------------------------------------------------------------------------------------------
@numeric
def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: str = "fp32",
    max_shard_bytes: int = 5_000_000_000,
    buffers: bool = True,
) -> list[str]:
    """Writes the model's weights of a checkpoint as Hugging Face's safetensors, whole tensors under their names;
    returns the file names.

    dtype: "fp32", "bf16" or "fp16", of every floating-point tensor of 16 bits and more (from the fp32 masters: rounded
    once; 8 bits are codes, which stay). Holds one
    file's tensors at a time. A tied weight is stored once, under the name that it was trained by. The counterpart of
    DeepSpeed's zero_to_fp32.py.
    """
    directory, tag = locate(path, tag)
    with CheckpointReader(directory, tag) as reader:
        return write_model(
            out,
            _weights(reader, torch_dtype(dtypes.dtype(dtype, dtypes.TRAINED)), buffers),
            max_shard_bytes,
            metadata={"deepc.tag": tag},
        )


def _weights(reader: CheckpointReader, dtype: torch.dtype, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model, tensor), one at a time."""
    wanted = ("fp32", "frozen", "buffer") if buffers else ("fp32", "frozen")
    names = [n for n in reader.tensors if n.split("/", 1)[0] in wanted]
    if not any(n.startswith(("fp32/", "frozen/")) for n in names):
        raise CheckpointError(
            f"checkpoint {reader.path} holds no parameters of a model: it was not written by engine.save_checkpoint"
        )
    for name in names:
        tensor = reader.tensor(name)
        yield name.split("/", 1)[1], tensor.to(dtype) if casts(tensor) else tensor


# ---- diff ------------------------------------------------------------------------------------------------------------
class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]  # (begin, count) -> 1-D tensor


class _Source:
    """Tensors by name: of a checkpoint, or of a folder or file of safetensors (its parameters then count as
    "fp32/...")."""

    def __init__(self, path: str | os.PathLike[str], tag: str | None) -> None:
        self._open: list[Any] = []
        self.entries: dict[str, _Entry] = {}
        files = [Path(path)] if Path(path).is_file() and Path(path).suffix == ".safetensors" else []
        if (
            not files
            and Path(path).is_dir()
            and tag is None
            and not list_tags(path)
            and not (Path(path) / INDEX).exists()
        ):
            files = sorted(Path(path).glob("*.safetensors"))
        if files:
            self.name = str(path)
            for f in files:
                self._file(SafetensorsFile(f))
            return
        directory, tag = locate(path, tag)
        reader = CheckpointReader(directory, tag)
        self._open.append(reader)
        self.name = reader.path
        for name, t in reader.tensors.items():
            self.entries[name] = _Entry(t.dtype, t.shape, _range_reader(reader.read, name, t.dtype))

    def _file(self, opened: SafetensorsFile) -> None:
        self._open.append(opened)
        for key, t in opened.tensors.items():
            self.entries[key] = _Entry(t.dtype, t.shape, _range_reader(opened.read_into, key, t.dtype))

    @property
    def plain(self) -> bool:
        """Names are those of the model, without a kind before them."""
        return not any(n.startswith(("fp32/", "frozen/")) for n in self.entries)

    def as_model(self) -> None:
        """Names of the model only, to compare with a model's files."""
        self.entries = {
            n.split("/", 1)[1]: e for n, e in self.entries.items() if n.split("/", 1)[0] in ("fp32", "frozen", "buffer")
        }

    def close(self) -> None:
        for o in self._open:
            o.close()


def _range_reader(read: Callable[..., Any], name: str, dtype: torch.dtype) -> Callable[[int, int], torch.Tensor]:
    def get(begin: int, count: int) -> torch.Tensor:
        out = torch.empty(count, dtype=dtype, device="cpu")
        read(name, out, begin)
        return out

    return get


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same. what: "only in A", "only in B", "dtype", "shape" or "values"; the figures are of
    values: largest absolute difference, the same relative to the tensor's largest absolute value, and how many elements
    differ."""

    name: str
    what: str
    detail: str = ""
    largest: float = 0.0
    relative: float = 0.0
    elements: int = 0
    numel: int = 0


@numeric
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    tolerance: float = 0.0,
) -> tuple[list[Difference], int]:
    """(differences, tensors compared) of two checkpoints, or of a checkpoint and a model's safetensors files
    (parameters only then; values of different dtypes are compared as fp64). tolerance: largest difference relative to
    the tensor's largest value that counts as none; 0: equal bits."""
    if not 0 <= tolerance < math.inf:
        raise ArgumentError(f"tolerance {tolerance} must be a number >= 0")
    first = _Source(a, tag_a)
    try:
        second = _Source(b, tag_b)
    except Exception:
        first.close()
        raise
    try:
        same_kind = first.plain == second.plain
        if not same_kind:
            (second if first.plain else first).as_model()
        out = [Difference(n, "only in A") for n in first.entries if n not in second.entries]
        out += [Difference(n, "only in B") for n in second.entries if n not in first.entries]
        common = [n for n in first.entries if n in second.entries]
        for name in common:
            found = _compare(name, first.entries[name], second.entries[name], tolerance, same_kind)
            if found is not None:
                out.append(found)
        return out, len(common)
    finally:
        first.close()
        second.close()


def _compare(name: str, a: _Entry, b: _Entry, tolerance: float, dtypes: bool) -> Difference | None:
    if a.shape != b.shape:
        return Difference(name, "shape", f"{list(a.shape)} and {list(b.shape)}")
    numel, largest, size, elements, bad = math.prod(a.shape), 0.0, 0.0, 0, 0
    for begin in range(0, numel, _CHUNK):
        count = min(_CHUNK, numel - begin)
        x, y = a.read(begin, count), b.read(begin, count)
        both = _same_bits(x, y) if a.dtype == b.dtype else torch.zeros(count, dtype=torch.bool, device="cpu")
        if bool(both.all()):
            size = max(size, _largest(x.to(_wide(x)))) if tolerance else size
            continue
        x, y = x.to(_wide(x)), y.to(_wide(y))
        if tolerance or a.dtype != b.dtype:
            both |= (x == y) | (x.isnan() & y.isnan())
        elements += int((~both).sum())
        gap = torch.where(both, 0.0, (x - y).abs())
        bad += int((~gap.isfinite()).sum())
        largest, size = max(largest, _largest(gap)), max(size, _largest(x))
    relative = largest / size if size else (math.inf if largest else 0.0)
    if elements == 0 and (a.dtype == b.dtype or tolerance or not dtypes):
        return None
    if tolerance and not bad and relative <= tolerance:
        return None
    if elements == 0:
        return Difference(name, "dtype", f"{name_of(a.dtype)} and {name_of(b.dtype)}, equal values", numel=numel)
    return Difference(
        name, "values", f"{bad} where one is not finite" if bad else "", largest, relative, elements, numel
    )


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[n] bool of two [n] of one dtype. As fp64 large integers that differ are equal, and so are zeros of two signs."""
    return (x.view(torch.uint8) == y.view(torch.uint8)).view(len(x), -1).all(1)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _largest(x: torch.Tensor) -> float:
    return float(x[x.isfinite()].abs().amax()) if x.numel() and bool(x.isfinite().any()) else 0.0


# ---- clean -----------------------------------------------------------------------------------------------------------
@numeric
def clean(
    directory: str | os.PathLike[str], *, keep: int | None = None, really: bool = False, least_age_s: float = 3600.0
) -> list[tuple[str, int, str]]:
    """(path, bytes, why) of what is superfluous in a checkpoint directory: what killed saves left (older than
    least_age_s, and not the only copy of its tag), and with `keep` all but the newest so many checkpoints (the latest
    always stays). Removes it if `really`.
    """
    import shutil

    folder = os.path.abspath(os.fspath(directory))
    found = listing(folder)
    if keep is not None and keep < 1:
        raise ArgumentError(f"--keep {keep} must be at least 1")
    out = []
    for row in found["left"]:
        left = _LEFT.fullmatch(os.path.basename(row["path"]))
        assert left is not None  # listing() chose by it
        kind, tag, _ = left.groups()
        if row["age_s"] < least_age_s or (kind == "old" and not os.path.isdir(os.path.join(folder, tag))):
            continue  # it may be being written, or be the only copy
        out.append((row["path"], row["bytes"], "left by a save that did not end"))
    if keep is not None:
        whole = [r for r in found["checkpoints"] if not r["problem"]]
        kept = {r["tag"] for r in whole[-keep:]} | {found["latest"]}
        out += [
            (os.path.join(folder, r["tag"]), r["bytes"], "older than the ones that are kept")
            for r in whole
            if r["tag"] not in kept
        ]
    if really:
        for path, _, _ in out:
            gone = (
                path
                if _LEFT.fullmatch(os.path.basename(path))
                else os.path.join(folder, f".tmp-{os.path.basename(path)}-removed")
            )
            if gone != path:
                shutil.rmtree(gone, ignore_errors=True)
                os.rename(path, gone)  # a half-removed checkpoint must not look like one
            if os.path.islink(gone):  # what it leads to was put there by somebody, and stays
                os.unlink(gone)
            else:
                shutil.rmtree(gone)
    return out


# ---- import ----------------------------------------------------------------------------------------------------------
def _run_import(args: argparse.Namespace) -> int:
    from .deepspeed import import_checkpoint

    done = import_checkpoint(args.path, args.output, tag=args.tag, optimizer=not args.no_optimizer)
    print(
        f"{done.path}: {done.parameters} trained parameters ({done.elements:,} elements) of DeepSpeed's ZeRO stage"
        f" {done.stage}, {done.ranks} rank{'s' * (done.ranks != 1)}"
    )
    print(
        f"  optimizer states {', '.join(done.kinds)}, after {done.step} updates"
        if done.kinds
        else "  no optimizer states: engine.load_checkpoint(..., load_optimizer_states=False)"
    )
    for why in done.left_out.values():
        print(f"  left out: {why}")
    return 0


# ---- command line ----------------------------------------------------------------------------------------------------
def run(args: argparse.Namespace) -> int:
    """The exit code."""
    try:
        return _RUN[args.ckpt_command](args)
    except CheckpointError as exc:
        print(f"deepc ckpt {args.ckpt_command}: error: {exc}", file=sys.stderr)
        return 2


def _run_ls(args: argparse.Namespace) -> int:
    found = listing(args.path)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print_listing(found)
    return 1 if found["problem"] or any(r["problem"] for r in found["checkpoints"]) else 0


def _run_info(args: argparse.Namespace) -> int:
    found = info(args.path, args.tag)
    if args.json:
        print(json.dumps(found, indent=1, default=str))
    else:
        _print_info(found, args.tensors)
    return 0


def _run_verify(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    found = verify(args.path, args.tag, every=args.all)
    for tag, wrong, nbytes in found:
        print(f"{'WRONG' if wrong else 'whole'} {tag}  {size_text(nbytes)}{'  ' + wrong if wrong else ''}")
    took = time.perf_counter() - begin
    print(f"{size_text(sum(n for *_, n in found))} read and checked in {took:.2f} s")
    return 1 if any(wrong for _, wrong, _ in found) else 0


def _run_export(args: argparse.Namespace) -> int:
    names = export(
        args.path,
        args.output,
        tag=args.tag,
        dtype=args.dtype,
        max_shard_bytes=parse_size(args.max_shard_size),
        buffers=not args.no_buffers,
    )
    for name in names:
        print(f"{os.path.join(args.output, name)}  {size_text(os.path.getsize(os.path.join(args.output, name)))}")
    if not os.path.exists(os.path.join(args.output, "config.json")):
        print(
            "A checkpoint does not know the architecture: put the model's config.json (and tokenizer) beside it for"
            " from_pretrained."
        )
    return 0


def _run_diff(args: argparse.Namespace) -> int:
    found, compared = diff(args.a, args.b, tolerance=args.tolerance)
    found.sort(key=lambda d: -d.relative)
    for d in found[: args.n]:
        if d.what == "values":
            print(
                f"{d.name}: {d.elements:,} of {d.numel:,} elements differ, by at most {d.largest:.3g} ({d.relative:.2g}"
                " of the largest value)" + (f"; {d.detail}" if d.detail else "")
            )
        else:
            print(f"{d.name}: {d.what}{' ' + d.detail if d.detail else ''}")
    if len(found) > args.n:
        print(f"... and {len(found) - args.n} more (-n)")
    print(f"{compared} tensors compared: " + ("the same" if not found else f"{len(found)} differ"))
    return 1 if found else 0


def _run_clean(args: argparse.Namespace) -> int:
    found = clean(args.path, keep=args.keep, really=args.yes)
    for path, nbytes, why in found:
        print(f"{'removed' if args.yes else 'would remove'} {path}  {size_text(nbytes)}  ({why})")
    total = size_text(sum(n for _, n, _ in found))
    print(f"{total} {'freed' if args.yes else 'could be freed: --yes does it'}" if found else "nothing is superfluous")
    return 0


_RUN = {
    "ls": _run_ls,
    "info": _run_info,
    "verify": _run_verify,
    "export": _run_export,
    "diff": _run_diff,
    "clean": _run_clean,
    "import": _run_import,
}
