"""One safetensors file: strict reader, streaming writer. Needs torch and the C core (CRC-32C), nothing else.

The format: 8 bytes little-endian header length N <= 100 MB, N bytes of JSON (padded with spaces), then the data. The
header maps a tensor's key to dtype, shape and [begin, end) offsets in the data; "__metadata__" maps strings to strings.
Offsets leave no hole and no overlap.

What we add, in "__metadata__" where other readers ignore it: "deepc.crc32c", a CRC-32C per tensor (RFC 3720), and
"deepc.slices", for tensors that are a piece of a larger logical one: its name, its global shape and the flat offset at
which the piece begins.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core import dtypes, files
from ..core import lib as _lib
from ..errors import ArgumentError, CheckpointError, CheckpointTypeError, DiskError

MAX_HEADER_BYTES = 100_000_000
CRC_KEY, SLICES_KEY = "deepc.crc32c", "deepc.slices"
_CHUNK = 8 << 20  # bytes per read or write call
# Of the dtypes that safetensors knows, what this torch has: name in a file <-> dtype.
DTYPES: dict[str, torch.dtype] = {d.tag: getattr(torch, d.name) for d in dtypes.TABLE if hasattr(torch, d.name)}
DTYPE_NAMES: dict[torch.dtype, str] = {v: k for k, v in DTYPES.items()}
_HEX8 = re.compile(r"[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class Slice:
    """A stored tensor is elements [begin, begin + numel) of the flattened logical tensor `name` of shape `shape`."""

    name: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. `begin` and `end` are byte offsets in the data section; `crc` is None in files of other
    writers."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    crc: int | None
    slice: Slice | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Written:
    """What write_safetensors wrote. `header_crc` is the CRC-32C of everything before the data: together with the CRC of
    each tensor, which the header holds, and the size, it covers every byte of the file."""

    path: str
    bytes: int
    header_crc: int


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a torch dtype. CheckpointTypeError if it has none."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise CheckpointTypeError(f"safetensors has no dtype {dtype}") from None


def tensor_bytes(t: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes, not copied. The caller keeps the tensor alive."""
    nbytes = t.numel() * t.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(t.data_ptr())).cast("B")


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of bytes or of a contiguous CPU tensor, continued from `crc`."""
    if isinstance(data, torch.Tensor):
        nbytes = data.numel() * data.element_size()
        return _lib.C.dc_crc32c(crc, data.data_ptr(), nbytes) if nbytes else crc
    data = bytes(data)
    return _lib.C.dc_crc32c(crc, data, len(data)) if data else crc


def _writable(key: str, t: Any) -> None:
    if not isinstance(t, torch.Tensor):
        raise CheckpointTypeError(f"{key!r} is {type(t).__name__}, not a tensor")
    if t.layout is not torch.strided or t.device.type != "cpu" or not t.is_contiguous() or t.is_quantized:
        raise ArgumentError(
            f"tensor {key!r} ({t.dtype}, {t.layout}, {t.device}, strides "
            f"{t.stride() if t.layout is torch.strided else None}) "
            "must be a contiguous CPU tensor to be written: pass t.detach().cpu().contiguous()"
        )
    if t.is_conj() or t.is_neg():
        raise ArgumentError(f"tensor {key!r} is a lazy view: pass t.resolve_conj().resolve_neg()")
    dtype_name(t.dtype)


def write_all(fd: int, data: memoryview | bytes, path: str) -> None:
    """Writes every byte, whatever the kernel takes per call. CheckpointError names the file and the reason (no space,
    ...)."""
    view = memoryview(data)
    while len(view):
        try:
            n = os.write(fd, view[:_CHUNK])
        except OSError as exc:
            raise CheckpointError(f"can't write {path}: {exc.strerror}") from exc
        if n == 0:
            raise CheckpointError(f"can't write {path}: the kernel takes no more bytes")
        view = view[n:]


def fsync_dir(path: str) -> None:
    """Makes names in a directory durable. CheckpointError."""
    try:
        files.fsync_dir(path)
    except OSError as exc:
        raise CheckpointError(f"can't make the names in {path} durable: {exc.strerror}") from exc


def replace_file(path: str, data: bytes) -> None:
    """Puts a file in place in one instant, durable. CheckpointError."""
    try:
        with files.atomic_write(path, durable=True) as f:
            f.write(data)
    except OSError as exc:
        raise CheckpointError(f"can't write {path}: {exc.strerror}") from exc


def write_file(
    path: str, parts: Iterable[memoryview | bytes], *, fsync: bool = True, head: Callable[[], bytes] | None = None
) -> None:
    """Creates `path` (which must not exist) from parts and makes its content durable. On failure the file is removed.
    head: called when all parts are written; what it gives is written over the beginning."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as exc:
        raise CheckpointError(f"can't create {path}: {exc.strerror}") from exc
    done = False
    try:
        for part in parts:
            write_all(fd, part, path)
        if head is not None:
            os.lseek(fd, 0, os.SEEK_SET)
            write_all(fd, head(), path)
        if fsync:
            os.fsync(fd)
        done = True
    except DiskError:  # of what was to be written: a part could not be read
        raise
    except OSError as exc:
        raise CheckpointError(f"can't write {path}: {exc.strerror}") from exc
    finally:
        os.close(fd)
        if not done:
            os.unlink(path)


class Source:
    """A 1-D tensor to be written whose values come when they are wanted, in contiguous CPU tensors of `dtype`, a part
    at a time: what does not lie in memory."""

    def __init__(self, numel: int, dtype: torch.dtype, parts: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.shape, self.dtype, self.parts = (numel,), dtype, parts

    def numel(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def detach(self) -> Source:
        return self


def _data(
    tensors: Mapping[str, torch.Tensor | Source], order: Sequence[str], crcs: dict[str, int], path: str
) -> Iterator[memoryview]:
    """The bytes of all, in order; what a Source gives is counted into `crcs` as it goes by."""
    for key in order:
        t = tensors[key]
        if isinstance(t, torch.Tensor):
            yield tensor_bytes(t)
            continue
        given = 0
        for part in t.parts():
            crcs[key] = crc32c(part, crcs[key])
            given += part.numel()
            yield tensor_bytes(part)
        if given != t.numel():
            raise CheckpointError(f"can't write {path}: {key!r} gave {given} of its {t.numel()} elements")


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor | Source],
    *,
    slices: Mapping[str, Slice] | None = None,
    metadata: Mapping[str, str] | None = None,
    fsync: bool = True,
) -> Written:
    """Writes contiguous CPU tensors to a new file, straight from their memory (no copy of the data is made), and what
    sources give.

    slices: for keys that are pieces of a logical tensor. metadata: more strings for "__metadata__". The tensors must
    not change during the call. Raises ArgumentError (wrong layout or device), CheckpointTypeError (dtype),
    CheckpointError (I/O, file exists).
    """
    path, slices = os.fspath(path), slices or {}
    for key, t in tensors.items():
        if not isinstance(key, str) or key == "__metadata__":
            raise ArgumentError(f"{key!r} can't be the key of a tensor")
        if isinstance(t, Source):
            dtype_name(t.dtype)
        else:
            _writable(key, t)
    for key, s in slices.items():
        if key not in tensors:
            raise ArgumentError(f"slice of {key!r}, which is not among the tensors")
        if s.begin < 0 or s.begin + tensors[key].numel() > math.prod(s.shape):
            raise ArgumentError(
                f"tensor {key!r}: elements [{s.begin}, {s.begin + tensors[key].numel()}) are not inside {s.name!r} of "
                f"shape {s.shape}"
            )
    # Wide types first: every tensor stays aligned to its element.
    order = sorted(tensors, key=lambda k: -tensors[k].element_size())
    meta = dict(metadata or {})
    crcs = {k: crc32c(t) if isinstance(t := tensors[k], torch.Tensor) else 0 for k in order}
    if slices:
        meta[SLICES_KEY] = json.dumps(
            {k: {"name": s.name, "shape": list(s.shape), "begin": s.begin} for k, s in slices.items()}
        )
    header: dict[str, Any] = {"__metadata__": meta}
    offset = 0
    for key in order:
        t = tensors[key]
        end = offset + t.numel() * t.element_size()
        header[key] = {"dtype": dtype_name(t.dtype), "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end

    def make_head() -> bytes:
        meta[CRC_KEY] = json.dumps({k: f"{crcs[k]:08x}" for k in order})  # of one length, whatever the checksums
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)  # the data begins on a cache line, so that a mapped tensor is aligned
        return len(text).to_bytes(8, "little") + text

    head = make_head()
    if len(head) - 8 > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header of {len(tensors)} tensors needs {len(head) - 8} bytes, the format allows "
            f"{MAX_HEADER_BYTES}. "
            "Write fewer tensors per file."
        )
    later = any(isinstance(t, Source) for t in tensors.values())
    write_file(
        path, itertools.chain([head], _data(tensors, order, crcs, path)), fsync=fsync, head=make_head if later else None
    )
    return Written(path, len(head) + offset, crc32c(make_head() if later else head))


# ---- reading ---------------------------------------------------------------------------------------------------------


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(items)
    if len(out) != len(items):
        raise ValueError("a key stands twice")
    return out


def _constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def parse_json(data: bytes, what: str) -> Any:
    """Strict JSON (UTF-8, no duplicate keys, no NaN). CheckpointError naming `what`."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{what} is corrupt: {exc}") from exc


def is_size(value: Any) -> bool:
    """A non-negative JSON integer that fits 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_size, value))


class SafetensorsFile:
    """A safetensors file open for reading. Everything in it is checked against the format when it is opened, the data
    when it is read.

    Use as a context manager, or close(). Not thread safe. Raises CheckpointError, naming file and tensor, for whatever
    is wrong.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, expect_bytes: int | None = None, expect_header_crc: int | None = None
    ) -> None:
        self.path = os.fspath(path)
        self._fd = -1
        self._checked: set[str] = set()  # keys of tensors whose bytes had their checksum
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.bytes = os.fstat(self._fd).st_size
        except OSError as exc:
            self.close()
            raise CheckpointError(f"can't open {self.path}: {exc.strerror}") from exc
        try:
            self._open(expect_bytes, expect_header_crc)
        except BaseException:
            self.close()
            raise

    def _bad(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is corrupt: {text}")

    def _open(self, expect_bytes: int | None, expect_header_crc: int | None) -> None:
        if expect_bytes is not None and self.bytes != expect_bytes:
            raise self._bad(f"it has {self.bytes} bytes, the index says {expect_bytes}")
        if self.bytes < 8:
            raise self._bad(f"{self.bytes} bytes are no safetensors file")
        length = self._pread(0, 8)
        n = int.from_bytes(length, "little")
        if n > MAX_HEADER_BYTES or 8 + n > self.bytes:
            raise self._bad(f"the header should have {n} bytes, the file has {self.bytes}")
        text = self._pread(8, n)
        if expect_header_crc is not None and crc32c(length + text) != expect_header_crc:
            raise self._bad("the CRC-32C of its header differs from the index")
        if not text.startswith(b"{"):
            raise self._bad("the header is no JSON object")
        header = parse_json(text, f"the header of {self.path}")
        self._data = 8 + n
        self.metadata = self._metadata(header.pop("__metadata__", {}))
        crcs, slices = self._own(CRC_KEY), self._own(SLICES_KEY)
        self.tensors: dict[str, TensorInfo] = {k: self._entry(k, v, crcs, slices) for k, v in header.items()}
        if crcs is not None and set(crcs) != set(self.tensors):
            raise self._bad("its checksums are not those of its tensors")
        if slices is not None and not set(slices) <= set(self.tensors):
            raise self._bad("it describes slices that are not among its tensors")
        self._contiguous()

    def _metadata(self, meta: Any) -> dict[str, str]:
        if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
            raise self._bad("__metadata__ must map strings to strings")
        return meta

    def _own(self, key: str) -> dict[str, Any] | None:
        if key not in self.metadata:
            return None
        value = parse_json(self.metadata[key].encode("utf-8", "surrogatepass"), f"{key} in the header of {self.path}")
        if not isinstance(value, dict):
            raise self._bad(f"{key} is no JSON object")
        return value

    def _entry(self, key: str, v: Any, crcs: dict[str, Any] | None, slices: dict[str, Any] | None) -> TensorInfo:
        if not isinstance(v, dict) or set(v) != {"dtype", "shape", "data_offsets"}:
            raise self._bad(f"tensor {key!r} must have dtype, shape and data_offsets")
        if v["dtype"] not in DTYPES:
            raise self._bad(f"tensor {key!r} has the unknown dtype {v['dtype']!r}")
        offsets = v["data_offsets"]
        if not _is_shape(v["shape"]) or not _is_shape(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._bad(f"tensor {key!r} has a bad shape {v['shape']!r} or bad offsets {offsets!r}")
        dtype, shape = DTYPES[v["dtype"]], tuple(v["shape"])
        if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
            raise self._bad(f"tensor {key!r}: shape {shape} of {dtype} does not have {offsets[1] - offsets[0]} bytes")
        crc = None
        if crcs is not None:
            text = crcs.get(key)
            if not isinstance(text, str) or not _HEX8.match(text):
                raise self._bad(f"tensor {key!r} has no valid checksum")
            crc = int(text, 16)
        return TensorInfo(
            key, dtype, shape, offsets[0], offsets[1], crc, self._slice(key, shape, (slices or {}).get(key))
        )

    def _slice(self, key: str, shape: tuple[int, ...], s: Any) -> Slice | None:
        if s is None:
            return None
        if (
            not isinstance(s, dict)
            or set(s) != {"name", "shape", "begin"}
            or not isinstance(s["name"], str)
            or not _is_shape(s["shape"])
            or not is_size(s["begin"])
            or s["begin"] + math.prod(shape) > math.prod(s["shape"])
        ):
            raise self._bad(f"the slice of tensor {key!r} is wrong: {s!r}")
        return Slice(s["name"], tuple(s["shape"]), s["begin"])

    def _contiguous(self) -> None:
        at = 0
        for info in sorted(self.tensors.values(), key=lambda i: (i.begin, i.end)):
            if info.begin != at:
                raise self._bad(
                    f"tensor {info.key!r} begins at byte {info.begin} of the data, not at {at}: a hole or an overlap"
                )
            at = info.end
        if self._data + at != self.bytes:
            raise self._bad(f"the tensors end at byte {self._data + at}, the file at {self.bytes}")

    def _pread(self, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self._pread_into(offset, memoryview(buffer))
        return bytes(buffer)

    def _pread_into(self, offset: int, view: memoryview) -> None:
        while len(view):
            try:
                n = os.preadv(self._fd, [view[:_CHUNK]], offset)
            except OSError as exc:
                raise CheckpointError(f"can't read {self.path}: {exc.strerror}") from exc
            if n == 0:
                raise self._bad(f"it ends at byte {offset}, although it had {self.bytes} bytes when it was opened")
            offset, view = offset + n, view[n:]

    def __getitem__(self, key: str) -> TensorInfo:
        try:
            return self.tensors[key]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {key!r}") from None

    def keys(self) -> list[str]:
        return list(self.tensors)

    def read_into(self, key: str, out: torch.Tensor, begin: int = 0, *, verify: bool = True) -> None:
        """Fills `out` with elements [begin, begin + out.numel()) of the flattened tensor `key`.

        out: contiguous, on the CPU, of the stored dtype, any shape. With `verify` the whole stored tensor is read once,
        in pieces, and its CRC-32C checked; `out` is then what was checked. Later calls for other parts of it read these
        alone: whoever loads a tensor a part at a time does not read it as often as it has parts. CheckpointError on a
        mismatch (`out` is then undefined)."""
        info = self[key]
        if (
            not isinstance(out, torch.Tensor)
            or out.dtype != info.dtype
            or out.device.type != "cpu"
            or not out.is_contiguous()
        ):
            raise ArgumentError(
                f"tensor {key!r} of {self.path} is {info.dtype}: it needs a contiguous CPU buffer of that dtype"
            )
        if begin < 0 or begin + out.numel() > info.numel:
            raise ArgumentError(
                f"elements [{begin}, {begin + out.numel()}) are not inside tensor {key!r} of {self.path}, which has "
                f"{info.numel}"
            )
        size = info.dtype.itemsize
        low = self._data + info.begin
        first, last = low + begin * size, low + (begin + out.numel()) * size
        view = tensor_bytes(out)
        if not verify or info.crc is None or (key in self._checked and len(view)):
            self._pread_into(first, view)
            return
        crc = self._skim(low, first, 0)
        if len(view):
            self._pread_into(first, view)
            crc = crc32c(out, crc)
        crc = self._skim(last, self._data + info.end, crc)
        if crc != info.crc:
            raise self._bad(
                f"tensor {key!r}{f' (of {info.slice.name!r})' if info.slice else ''} has the CRC-32C {crc:08x}, not "
                f"{info.crc:08x}: "
                "its bytes changed since they were written"
            )
        self._checked.add(key)

    def _skim(self, begin: int, end: int, crc: int) -> int:
        """CRC-32C of bytes [begin, end) of the file, continued."""
        if begin == end:
            return crc
        scratch = torch.empty(min(end - begin, _CHUNK), dtype=torch.uint8, device="cpu")
        while begin < end:
            part = scratch[: min(end - begin, _CHUNK)]
            self._pread_into(begin, tensor_bytes(part))
            crc = crc32c(part, crc)
            begin += part.numel()
        return crc

    def tensor(self, key: str, *, verify: bool = True) -> torch.Tensor:
        """The tensor, in new memory."""
        info = self[key]
        out = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        self.read_into(key, out, verify=verify)
        return out

    def verify(self) -> None:
        """Reads everything that has a checksum and checks it."""
        for info in self.tensors.values():
            if info.crc is not None:
                self.read_into(info.key, torch.empty(0, dtype=info.dtype, device="cpu"))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()
