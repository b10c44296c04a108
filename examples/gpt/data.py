"""Bytes to train on: finds the files, splits them into training and validation, draws windows of them.

By default the text is the Python standard library's own source, read from the interpreter's installation: some 10 MB of
real text that every machine with Python has. The split is by file, so that no validation byte was seen in training, and
by a hash of the file's relative name, so that it is the same on every machine, rank and run."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_SHARE = 0.05
MAX_BYTES = 1 << 30  # a folder larger than this is cut: the example holds its text in memory
_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "node_modules",
    "pydoc_data",
}


@dataclass(frozen=True)
class Corpus:
    """train, validation: uint8 (bytes,), each at least two windows long. `source` says where they came from."""

    train: Tensor
    validation: Tensor
    files: int
    source: str

    @property
    def bits_per_byte_order0(self) -> float:
        """Entropy of a byte of the validation text given only how often each byte occurs in it: the best that a model
        without context could reach, in bits per byte."""
        counts = torch.bincount(self.validation.long(), minlength=256).double()
        p = counts[counts > 0] / counts.sum()
        return float(-(p * p.log2()).sum())


def _standard_library() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not _SKIPPED & set(f.relative_to(root).parts[:-1])]
    return root, files


def _find(data: str | None, limit: int) -> tuple[Path, list[Path], str]:
    if data is None:
        root, files = _standard_library()
        return root, files, f"the standard library of Python in {root}"
    path = Path(data).expanduser()
    if path.is_file():
        return path.parent, [path], str(path)
    if path.is_dir():
        return (
            path,
            [f for f in path.rglob("*") if f.is_file() and not f.is_symlink() and not _hidden(f.relative_to(path))],
            str(path),
        )
    raise FileNotFoundError(
        f"no file or folder {data!r} to train on: give DATA=path of a text file or of a folder of them"
    )


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts) or bool(_SKIPPED & set(relative.parts[:-1]))


def _in_validation(name: str) -> bool:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def _tensor(parts: list[bytes]) -> Tensor:
    return (
        torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)
        if parts
        else torch.empty(0, dtype=torch.uint8)
    )


def load(data: str | None, context: int) -> Corpus:
    """Reads the text: the standard library (data=None), one file, or every file below a folder.

    One file, or so few that a side would be empty, is split at the end: the last 5 % of the bytes are validation.
    Raises ValueError if what is there is too short for windows of `context` bytes, FileNotFoundError if nothing is
    there."""
    root, files, source = _find(data, MAX_BYTES)
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for file in sorted(files, key=lambda f: f.relative_to(root).as_posix()):
        try:
            content = file.read_bytes()
        except OSError:  # not ours to read: train on the rest
            continue
        if b"\0" in content[:4096]:  # binary
            continue
        sides[_in_validation(file.relative_to(root).as_posix())].append(content)
        total += len(content)
        if total > MAX_BYTES:
            break
    train, validation = _tensor(sides[False]), _tensor(sides[True])
    need = 2 * (context + 1)
    if min(len(train), len(validation)) < need:
        whole = _tensor(sides[False] + sides[True])
        cut = len(whole) - max(need, int(len(whole) * VALIDATION_SHARE))
        if cut < need:
            raise ValueError(
                f"{source} holds {len(whole)} bytes of text: at least {2 * need} are needed for windows of {context}"
                " bytes"
            )
        train, validation = whole[:cut], whole[cut:]
    return Corpus(train, validation, len(sides[False]) + len(sides[True]), source)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (windows, context) each: the bytes from each start, and the same shifted by one."""
    block = text[starts[:, None] + torch.arange(context + 1)].long()
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


class Sampler:
    """Random windows of the training text, a pure function of (seed, global micro-batch index): the global batch of a
    step is the same however many ranks share it, and a resumed run draws what the first would have drawn."""

    def __init__(self, text: Tensor, context: int, micro_batch: int, seed: int) -> None:
        self.text, self.context, self.micro_batch, self.seed = text, context, micro_batch, seed

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Micro-batch `index`, counted over all ranks and steps."""
        key = hashlib.sha256(f"{self.seed}:{index}".encode()).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        starts = torch.randint(len(self.text) - self.context, (self.micro_batch,), generator=draw)
        return windows(self.text, starts, self.context)


def validation_starts(text: Tensor, context: int, count: int) -> Tensor:
    """At most `count` window starts spread evenly over the text, the same in every run. int64 (n,)."""
    n = min(count, (len(text) - 1) // context)
    return torch.linspace(0, len(text) - context - 1, n, dtype=torch.float64).long()


NATS_TO_BITS = 1 / math.log(2)
