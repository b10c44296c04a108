"""A checkpoint directory: who writes what, how it becomes visible in one instant, and how any layout reads it back.

    DIR/latest                                the tag of the newest checkpoint and its CRC-32C
    DIR/TAG/index.json                        the manifest, with its own CRC-32C: files, logical tensors, JSON state
    DIR/TAG/rank_00000_of_00002.safetensors   the pieces that a rank owned
    DIR/TAG/state.safetensors                 tensors of the client state, if there are any
    DIR/.tmp-TAG-TOKEN/                       a checkpoint being written

A logical tensor has a name, a dtype and a global shape; it is stored as pieces, each a range of its flattened elements.
A reader asks for any range of any tensor, so the number of ranks and the ZeRO stage of the writer do not matter. Every
byte is covered by a checksum: index.json by its own, a shard's header by the index, tensor data by the shard's header.
Nothing is ever unpickled or evaluated.

The write order makes a crash harmless: files are made durable under .tmp-*, then one rename publishes them, then
`latest` follows.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import errno
import fcntl
import json
import math
import os
import random
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, CheckpointError, CheckpointTypeError, did_you_mean, numeric
from ..parallel.tensor.cut import Cut
from .files import (
    DTYPE_NAMES,
    DTYPES,
    SafetensorsFile,
    Slice,
    Source,
    crc32c,
    dtype_name,
    fsync_dir,
    is_size,
    parse_json,
    replace_file,
    write_file,
    write_safetensors,
)

FORMAT, VERSION = "deepc-checkpoint", 1
INDEX, LATEST, STATE_FILE = "index.json", "latest", "state.safetensors"
# keys of state tensors in a shard: "state.0", ... (a key never holds a logical name, so there is no clash)
_STATE_KEY = "state."
_TAG = re.compile(r"[A-Za-z0-9_+=,@%-][A-Za-z0-9_.+=,@%-]{0,199}\Z")
_HEX8 = re.compile(r"[0-9a-f]{8}")
_SEAL = re.compile(rb',\n"crc32c": "([0-9a-f]{8})"\n}\n\Z')
_SEAL_BYTES = len(b',\n"crc32c": "00000000"\n}\n')


# ---- client state ----------------------------------------------------------------------------------------------------
#
# JSON scalars, lists and dicts with plain string keys stand for themselves; everything else is a dict with one key that
# begins with "$":
#   {"$float": "nan"}  {"$tuple": [...]}  {"$dict": [[key, value], ...]}  {"$odict": ...}  {"$counter": ...}
#   {"$tensor": i}  {"$ndarray": i}  {"$scalar": [dtype, value]}     (i: index in the list of tensors)

_MAPS = {"$dict": dict, "$odict": collections.OrderedDict, "$counter": collections.Counter}
_NP_SCALARS = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_client_state(obj: Any, name: str = "client_state") -> tuple[Any, list[torch.Tensor]]:
    """(JSON tree, tensors) of a value made of None, bool, int, float, str, list, tuple, dict (also OrderedDict,
    Counter) with str or int keys, tensors, NumPy arrays and NumPy scalars. Tensors are detached and come back on the
    CPU; a contiguous CPU tensor is not copied.

    Anything else raises CheckpointTypeError with the path of the key, e.g. client_state["opt"][2]."""
    tensors: list[torch.Tensor] = []
    return _encode(obj, name, tensors, set()), tensors


def _encode(obj: Any, path: str, tensors: list[torch.Tensor], above: set[int]) -> Any:
    kind = type(obj)
    if obj is None or kind in (bool, int, str):
        return obj
    if kind is float:
        return obj if math.isfinite(obj) else {"$float": "nan" if math.isnan(obj) else "inf" if obj > 0 else "-inf"}
    if isinstance(obj, torch.Tensor):
        return _encode_tensor(obj, path, tensors)
    if kind.__module__ == "numpy" and "numpy" in sys.modules:
        return _encode_numpy(obj, path, tensors)
    if kind in (list, tuple) or kind in _MAPS.values():
        if id(obj) in above:
            raise CheckpointTypeError(f"{path} contains itself")
        above.add(id(obj))
        try:
            return _encode_container(obj, path, tensors, above)
        except RecursionError as exc:
            raise CheckpointTypeError(f"{path} is nested too deeply") from exc
        finally:
            above.discard(id(obj))
    raise CheckpointTypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds tensors, NumPy arrays and numbers, "
        "and JSON types "
        "(None, bool, int, float, str, list, tuple, dict). Convert it, e.g. to a dict of its fields."
    )


def _encode_container(obj: Any, path: str, tensors: list[torch.Tensor], above: set[int]) -> Any:
    if isinstance(obj, (list, tuple)):
        items = [_encode(v, f"{path}[{i}]", tensors, above) for i, v in enumerate(obj)]
        return items if isinstance(obj, list) else {"$tuple": items}
    for key in obj:
        if type(key) not in (str, int):
            raise CheckpointTypeError(
                f"{path} has the key {key!r} of type {type(key).__name__}: keys must be str or int"
            )
    values = {k: _encode(v, f"{path}[{k!r}]", tensors, above) for k, v in obj.items()}
    if type(obj) is dict and all(type(k) is str and not k.startswith("$") for k in values):
        return values
    return {next(t for t, c in _MAPS.items() if c is type(obj)): [[k, v] for k, v in values.items()]}


def _encode_tensor(t: torch.Tensor, path: str, tensors: list[torch.Tensor]) -> Any:
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointTypeError(f"{path} is a {type(t).__name__}, a tensor subclass: convert it to a plain tensor")
    if t.layout is not torch.strided or t.is_quantized or t.device.type == "meta":
        raise CheckpointTypeError(
            f"{path} is a {t.layout} {t.device} tensor: only dense tensors with data can be saved"
        )
    try:
        dtype_name(t.dtype)
    except CheckpointTypeError as exc:
        raise CheckpointTypeError(f"{path}: {exc}") from None
    tensors.append(t.detach().cpu().resolve_conj().resolve_neg().contiguous())
    return {"$tensor": len(tensors) - 1}


def _encode_numpy(obj: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    import numpy as np

    if not isinstance(obj, (np.ndarray, np.generic)) or type(obj) not in (
        np.ndarray,
        *(getattr(np, n) for n in _NP_SCALARS[1:]),
        np.bool_,
    ):
        raise CheckpointTypeError(f"{path} is a numpy {type(obj).__name__}: only plain arrays and numbers can be saved")
    if obj.dtype.name not in _NP_SCALARS:
        raise CheckpointTypeError(f"{path} is a NumPy array of {obj.dtype}: only {', '.join(_NP_SCALARS)} can be saved")
    if isinstance(obj, np.generic):
        return {"$scalar": [obj.dtype.name, _encode(obj.item(), path, tensors, set())]}
    native = np.ascontiguousarray(obj, dtype=obj.dtype.newbyteorder("=")).reshape(obj.shape)
    if not native.flags.writeable:
        native = native.copy()
    tensors.append(torch.from_numpy(native))
    return {"$ndarray": len(tensors) - 1}


def decode_client_state(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of encode_client_state. CheckpointError if the tree is not one of its."""
    try:
        return _decode(tree, tensors)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"the saved state is corrupt: {type(exc).__name__}: {exc}") from exc


def _decode(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(v, tensors) for v in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree)) if len(tree) == 1 else ""
    if not tag.startswith("$"):
        if any(k.startswith("$") for k in tree):
            raise CheckpointError(f"the saved state is corrupt: keys {sorted(tree)}")
        return {k: _decode(v, tensors) for k, v in tree.items()}
    value = tree[tag]
    if tag == "$float":
        return _SPECIAL[value]
    if tag == "$tuple":
        return tuple(_decode(v, tensors) for v in value)
    if tag in _MAPS:
        return _MAPS[tag]({k if type(k) in (str, int) else _bad_key(k): _decode(v, tensors) for k, v in value})
    if tag in ("$tensor", "$ndarray"):
        if not is_size(value):
            raise CheckpointError(f"the saved state is corrupt: {tag} {value!r}")
        return tensors[value] if tag == "$tensor" else tensors[value].numpy()
    if tag == "$scalar":
        import numpy as np

        name, number = value
        if name not in _NP_SCALARS:
            raise CheckpointError(f"the saved state is corrupt: NumPy type {name!r}")
        return np.dtype(name).type(_decode(number, tensors))
    raise CheckpointError(f"the saved state is corrupt or from a newer deepc: {tag!r}")


def _bad_key(key: Any) -> Any:
    raise CheckpointError(f"the saved state is corrupt: key {key!r}")


def rng_state() -> dict[str, Any]:
    """States of torch's CPU generator, of every GPU's, of Python's `random` and, if it is loaded, of NumPy's global
    generator, as a value that encode_client_state takes."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what rng_state() returned; generators that this process does not have are left out."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


# ---- small parts -----------------------------------------------------------------------------------------------------


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_size, value))


def new_token() -> str:
    """Names one save; made by one rank and given to all."""
    return secrets.token_hex(8)


def _check_tag(tag: Any) -> str:
    if not isinstance(tag, str) or not _TAG.match(tag) or tag == LATEST:
        raise ArgumentError(
            f"{tag!r} can't be the tag of a checkpoint: letters, digits and _ . + = , @ % - (not a leading dot, not "
            f'"latest", at '
            "most 200)"
        )
    return tag


def shard_name(rank: int, world_size: int) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.safetensors"


def _seal(obj: dict[str, Any]) -> bytes:
    """JSON text of a dict whose last member is the CRC-32C of all bytes before it: no byte of the file is uncovered."""
    body = json.dumps(obj, indent=None, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return body + f',\n"crc32c": "{crc32c(body):08x}"\n}}\n'.encode()


def _unseal(data: bytes, path: str) -> dict[str, Any]:
    seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None:
        raise CheckpointError(f"{path} is corrupt: it does not end with its checksum (truncated?)")
    if crc32c(data[: seal.start()]) != int(seal.group(1), 16):
        raise CheckpointError(f"{path} is corrupt: its CRC-32C differs")
    obj = parse_json(data, path)
    if not isinstance(obj, dict):
        raise CheckpointError(f"{path} is corrupt: no JSON object")
    return obj


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as f:
            data: bytes | None = f.read()
    except OSError as exc:
        raise CheckpointError(f"can't read {path}: {exc.strerror}") from exc
    if data is None:  # Python's word for EAGAIN
        raise CheckpointError(f"can't read {path}: the kernel says to try again")
    return data


def _load_renameat2() -> Any:
    fn = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if fn is not None:
        fn.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        fn.restype = ctypes.c_int
    return fn


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(a: str, b: str) -> bool:
    """Swaps two names in one instant; False where the kernel, the C library or the file system can't."""
    fn = _load_renameat2()
    if fn is None:
        return False
    if fn(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise CheckpointError(f"can't replace {b} by {a}: {os.strerror(code)}")


def _hold(path: str) -> int:
    """A descriptor of a folder, by which others on this host see that somebody works in it, where the file system has
    locks; -1: there is no such folder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        return exc.errno == errno.EWOULDBLOCK
    return False


def _remove_tree(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


# ---- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    name: str
    shape: tuple[int, ...]
    begin: int
    tensor: torch.Tensor | Source
    cut: Cut | None


class CheckpointWriter:
    """Writes one checkpoint, together with the writers of the other ranks.

    Every rank: w = CheckpointWriter(dir, tag, rank=, world_size=, token=) with the same token (rank 0 makes it with
    new_token() and sends it), w.add(...) for each piece that it owns, w.write(). Then, after a barrier: rank 0 calls
    w.publish(). After a failure: w.abort(). Nothing is visible under DIR/TAG before publish() has everything. Errors:
    CheckpointError (I/O, missing rank, holes), ArgumentError, CheckpointTypeError."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tag: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        token: str | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ArgumentError(f"rank {rank} is not in a world of {world_size}")
        if token is None and world_size > 1:
            raise ArgumentError(
                "with several ranks all need the same token: make it on one rank with new_token() and send it to all"
            )
        self.directory = os.path.abspath(os.fspath(directory))
        self.tag, self.rank, self.world_size = _check_tag(tag), rank, world_size
        self.token = token or new_token()
        if not re.fullmatch(r"[0-9a-zA-Z]{1,64}", self.token):
            raise ArgumentError(f"token {self.token!r} must be letters and digits")
        self.path = os.path.join(self.directory, f".tmp-{self.tag}-{self.token}")
        self._pieces: list[_Piece] = []
        self._held = -1  # by rank 0, whose end is that of the save
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as exc:
            raise CheckpointError(f"can't create {self.path}: {exc.strerror}") from exc
        if rank == 0:
            self._held = _hold(self.path)

    def add(
        self,
        name: str,
        tensor: torch.Tensor | Source,
        *,
        shape: Iterable[int] | None = None,
        begin: int = 0,
        cut: Cut | None = None,
    ) -> None:
        """Elements [begin, begin + tensor.numel()) of the flattened logical tensor `name` of global `shape` (default:
        the tensor's own). cut: `begin` counts where its shards lie one after the other; the same for all of a name.

        tensor: contiguous, on the CPU; borrowed, not copied: it must stay alive and unchanged until write() returns. A
        Source gives its values then.
        Over all ranks the pieces of a name must cover it exactly once."""
        whole = tuple(tensor.shape) if shape is None else tuple(int(s) for s in shape)
        if not isinstance(name, str):
            raise ArgumentError(f"the name of a tensor is a string, not {name!r}")
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointTypeError(
                f"{name!r} is {tensor.dtype}, which safetensors has not: keep it in another dtype, or, if it is a"
                " buffer that the model makes anew, give register_buffer persistent=False"
            )
        if begin < 0 or begin + tensor.numel() > math.prod(whole):
            raise ArgumentError(
                f"{name!r}: elements [{begin}, {begin + tensor.numel()}) are not inside the shape {whole}"
            )
        self._pieces.append(_Piece(name, whole, begin, tensor.detach(), None if cut is None or cut.is_plain else cut))

    def write(self, rank_state: Any = None) -> str:
        """Writes and syncs this rank's shard; returns its path. `rank_state` is what this rank alone needs again (RNG
        states, the position of its data loader): anything that encode_client_state takes."""
        tree, state_tensors = encode_client_state(rank_state, "rank_state")
        tensors: dict[str, torch.Tensor | Source] = {str(i): p.tensor for i, p in enumerate(self._pieces)}
        slices = {str(i): Slice(p.name, p.shape, p.begin) for i, p in enumerate(self._pieces)}
        tensors.update({f"{_STATE_KEY}{i}": t for i, t in enumerate(state_tensors)})
        self._room(tensors)
        file = shard_name(self.rank, self.world_size)
        written = write_safetensors(
            os.path.join(self.path, file), tensors, slices=slices, metadata={"format": "pt", "deepc.token": self.token}
        )
        pieces = [
            [p.name, dtype_name(p.tensor.dtype), list(p.shape), str(i), p.begin, p.tensor.numel()]
            for i, p in enumerate(self._pieces)
        ]
        report = {
            "token": self.token,
            "world_size": self.world_size,
            "rank": self.rank,
            "state": tree,
            "pieces": pieces,
            "cuts": {p.name: p.cut.to_json() for p in self._pieces if p.cut is not None},
            "file": {"bytes": written.bytes, "header_crc32c": f"{written.header_crc:08x}"},
        }
        write_file(os.path.join(self.path, f"{file}.json"), [_seal(report)])
        fsync_dir(self.path)
        self._pieces.clear()
        return written.path

    def _room(self, tensors: dict[str, torch.Tensor | Source]) -> None:
        need = sum(t.numel() * t.element_size() for t in tensors.values())
        try:
            stat = os.statvfs(self.path)
        except OSError as exc:
            raise CheckpointError(f"can't write into {self.path}: {exc.strerror}") from exc
        free = stat.f_bavail * stat.f_frsize
        if need > free:
            raise CheckpointError(
                f"the shard of rank {self.rank} needs {need} bytes, {self.directory} has {free} free. Make room, or "
                "save elsewhere."
            )

    def publish(self, client_state: Any = None, *, latest: bool = True) -> str:
        """Rank 0, after every rank's write(): checks that the shards are complete, writes index.json, makes the
        checkpoint visible as DIR/TAG by one rename, then points `latest` to it. Returns the path. An older checkpoint
        of the same tag is replaced in one instant (where the kernel can exchange names) and deleted afterwards; files
        in it that are not the checkpoint's are kept. Of a link to one the link is replaced.
        """
        if self.rank != 0:
            raise ArgumentError(f"rank {self.rank} called publish(): it is rank 0's")
        index, reports = self._index(), []
        for rank in range(self.world_size):
            reports.append(self._report(rank))
            self._merge(index, rank, reports[-1])
        for name, tensor in index["tensors"].items():
            tensor["pieces"].sort(key=lambda p: (p[2], p[3]))
            problem = _coverage(tensor["pieces"], math.prod(tensor["shape"]))
            if problem:
                raise CheckpointError(f"checkpoint {self.tag}: tensor {name!r} of shape {tensor['shape']}: {problem}")
        index["client_state"] = self._client_state(client_state, index)
        write_file(os.path.join(self.path, INDEX), [_seal(index)])
        final = self._rename()
        if latest:
            line = f"{self.tag}\n"
            replace_file(os.path.join(self.directory, LATEST), f"{line}crc32c {crc32c(line.encode()):08x}\n".encode())
        self._sweep()
        self._let_go()
        return final

    def _index(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "tag": self.tag,
            "token": self.token,
            "written": round(time.time(), 3),
            "world_size": self.world_size,
            "files": {},
            "tensors": {},
            "rank_state": [],
        }

    def _report(self, rank: int) -> dict[str, Any]:
        path = os.path.join(self.path, f"{shard_name(rank, self.world_size)}.json")
        if not os.path.exists(path):
            raise CheckpointError(
                f"checkpoint {self.tag}: rank {rank} of {self.world_size} has not written its shard (no {path}). "
                "Every rank must save, and a barrier must come before publish()."
            )
        report = _unseal(_read_bytes(path), path)
        if (
            report.get("token") != self.token
            or report.get("world_size") != self.world_size
            or report.get("rank") != rank
        ):
            raise CheckpointError(f"{path} belongs to another save")
        return report

    def _merge(self, index: dict[str, Any], rank: int, report: dict[str, Any]) -> None:
        file = shard_name(rank, self.world_size)
        index["files"][file] = report["file"]
        index["rank_state"].append(report["state"])
        for name, dtype, shape, key, begin, length in report["pieces"]:
            cut = {"cut": report["cuts"][name]} if name in report["cuts"] else {}
            tensor = index["tensors"].setdefault(name, {"dtype": dtype, "shape": shape, "pieces": [], **cut})
            if tensor["dtype"] != dtype or tensor["shape"] != shape or tensor.get("cut") != cut.get("cut"):
                raise CheckpointError(
                    f"checkpoint {self.tag}: rank {rank} has tensor {name!r} as {dtype} {shape}, another rank as "
                    f"{tensor['dtype']} "
                    f"{tensor['shape']}"
                )
            tensor["pieces"].append([file, key, begin, length])

    def _client_state(self, client_state: Any, index: dict[str, Any]) -> Any:
        tree, tensors = encode_client_state(client_state)
        if tensors:
            written = write_safetensors(
                os.path.join(self.path, STATE_FILE),
                {f"{_STATE_KEY}{i}": t for i, t in enumerate(tensors)},
                metadata={"format": "pt", "deepc.token": self.token},
            )
            index["files"][STATE_FILE] = {"bytes": written.bytes, "header_crc32c": f"{written.header_crc:08x}"}
        return tree

    def _rename(self) -> str:
        final = os.path.join(self.directory, self.tag)
        try:
            for rank in range(self.world_size):
                os.unlink(os.path.join(self.path, f"{shard_name(rank, self.world_size)}.json"))
            fsync_dir(self.path)
            if not os.path.lexists(final):
                os.rename(self.path, final)
            else:
                self._replace(final)
            fsync_dir(self.directory)
        except OSError as exc:
            raise CheckpointError(f"can't publish {final}: {exc.strerror}") from exc
        return final

    def _replace(self, final: str) -> None:
        old_files = _own_files(final)
        if old_files is None:
            raise CheckpointError(f"{final} exists and is not a deepc checkpoint. Move it away, or use another tag.")
        old, held = self.path, _hold(final)
        try:
            if not _exchange(self.path, final):
                # two renames: between them the old checkpoint is still complete, under a name that CheckpointReader
                # knows
                old = os.path.join(self.directory, f".old-{self.tag}-{self.token}")
                os.rename(final, old)
                os.rename(self.path, final)
            fsync_dir(self.directory)
            if os.path.islink(old):  # the link alone was replaced: what it led to is where somebody wanted it
                os.unlink(old)
                return
            for entry in os.listdir(old):
                if entry not in old_files and not os.path.lexists(os.path.join(final, entry)):
                    os.rename(os.path.join(old, entry), os.path.join(final, entry))
            _remove_tree(old)
        finally:
            if held >= 0:
                os.close(held)

    def _sweep(self) -> None:
        """Removes what crashed saves of this tag left behind. Another job may be at such a save (it was started twice):
        where that can be seen its files stay. Where not, it may publish them at this moment, so they get another name
        first, under which it finds nothing to publish: else what is removed would be the published checkpoint."""
        for entry in os.listdir(self.directory):
            if not re.fullmatch(rf"\.(tmp|old)-{re.escape(self.tag)}-[0-9a-zA-Z]+", entry):
                continue
            fd = _hold(os.path.join(self.directory, entry))
            try:
                if fd < 0 or _is_held(fd):
                    continue
                gone = os.path.join(self.directory, f".tmp-{self.tag}-{new_token()}")
                os.rename(os.path.join(self.directory, entry), gone)
                _remove_tree(gone)
            except OSError:  # somebody else has removed it
                continue
            finally:
                if fd >= 0:
                    os.close(fd)

    def abort(self) -> None:
        """Removes everything that was written and not published; safe on any rank, any time."""
        self._pieces.clear()
        self._let_go()
        _remove_tree(self.path)

    def _let_go(self) -> None:
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def __del__(self) -> None:
        if getattr(self, "_held", -1) >= 0:
            self._let_go()


def _own_files(path: str) -> set[str] | None:
    """Names of the files that belong to the checkpoint in `path`; None if there is none. A damaged one counts: it may
    be replaced."""
    if not os.path.isdir(path) or not os.path.isfile(os.path.join(path, INDEX)):
        return None
    data = _read_bytes(os.path.join(path, INDEX))
    if FORMAT.encode() not in data[:200]:
        return None
    return {
        e
        for e in os.listdir(path)
        if e in (INDEX, STATE_FILE) or re.fullmatch(r"rank_\d{5,}_of_\d{5,}\.safetensors", e)
    }


def _coverage(pieces: list[list[Any]], numel: int) -> str:
    """'' if sorted pieces cover [0, numel) exactly once, else what is wrong."""
    at = 0
    for file, _, begin, length in pieces:
        if begin > at:
            return f"nobody has elements [{at}, {begin})"
        if begin < at and length > 0:
            return f"elements from {begin} are there twice ({file})"
        at = max(at, begin + length)
    return "" if at == numel else f"nobody has elements [{at}, {numel})"


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor as the model knows it. `pieces`: (file, key in the file, first flat element, number of elements), in
    order. cut: it is stored as the shards of this, one after the other, in which elements are counted (tensor
    parallelism); None: as it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, str, int, int], ...]
    cut: Cut | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def list_tags(directory: str | os.PathLike[str]) -> list[str]:
    """Tags of the published checkpoints in a directory, sorted by name."""
    try:
        entries = os.listdir(directory)
    except OSError:
        return []
    return sorted(e for e in entries if _TAG.match(e) and os.path.isfile(os.path.join(directory, e, INDEX)))


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether it is the folder of a tag, or may be one that can't be read."""
    try:
        return _own_files(os.fspath(path)) is not None
    except CheckpointError:
        return True


def deepspeed_tags(directory: str | os.PathLike[str]) -> list[str]:
    """Tags of the checkpoints of DeepSpeed's in a directory, sorted by name; [""] if it is one itself."""

    def names(path: str) -> list[str]:
        try:
            return os.listdir(path)
        except OSError:
            return []

    def is_one(path: str) -> bool:
        return any(n.endswith(("_model_states.pt", "_optim_states.pt")) for n in names(path))

    folder = os.fspath(directory)
    return [""] if is_one(folder) else sorted(n for n in names(folder) if is_one(os.path.join(folder, n)))


def deepspeeds(directory: str | os.PathLike[str]) -> str:
    """The end of an error: what to do with a folder of DeepSpeed's; "" if it is none."""
    if not deepspeed_tags(directory):
        return ""
    return (
        f" It is DeepSpeed's: `deepc ckpt import {os.fspath(directory)} NEW_FOLDER` makes one of it that deepc loads."
    )


def read_latest(directory: str | os.PathLike[str]) -> str:
    """The tag in DIR/latest. CheckpointError if the file is missing or damaged."""
    path = os.path.join(os.fspath(directory), LATEST)
    if not os.path.exists(path):
        tags, folder = list_tags(directory), os.path.abspath(os.fspath(directory))
        hint = f" Give one of the tags {tags}." if tags else deepspeeds(directory)
        if is_checkpoint(folder):
            inside, tag = os.path.split(folder)
            hint = f" That is a checkpoint itself: give {inside} and the tag {tag!r}."
        raise CheckpointError(f"there is no checkpoint to load: {path} does not exist.{hint}")
    data = _read_bytes(path)
    match = re.fullmatch(rb"([^\n]+\n)crc32c ([0-9a-f]{8})\n", data)
    if match is None or crc32c(match.group(1)) != int(match.group(2), 16):
        if not list_tags(directory) and (theirs := deepspeeds(directory)):
            raise CheckpointError(f"{path} names no checkpoint of deepc.{theirs}")
        raise CheckpointError(
            f"{path} is corrupt, or was written by hand (it has a checksum). Give the tag: one of"
            f" {list_tags(directory)}."
        )
    return match.group(1)[:-1].decode("utf-8", "replace")


class CheckpointReader:
    """A published checkpoint: reads any range of any logical tensor, whatever layout wrote it.

    Opening checks index.json (checksum, version, coverage of every tensor) and that each file is there with its size;
    headers and data are checked when they are read; verify() reads everything. Not thread safe; use as a context
    manager or close(). All errors are CheckpointError and name the file, and the tensor where there is one."""

    def __init__(self, directory: str | os.PathLike[str], tag: str | None = None) -> None:
        self.directory = os.path.abspath(os.fspath(directory))
        self._files: dict[str, SafetensorsFile] = {}
        self._last: tuple[tuple[str, Cut | None], torch.Tensor] | None = None
        self.tag = read_latest(self.directory) if tag is None else str(tag)
        if not _TAG.match(self.tag):
            raise CheckpointError(f"{self.tag!r} is not the tag of a checkpoint")
        self.path = self._locate()
        self._index = self._read_index()
        self.token: str = self._index["token"]
        self.world_size: int = self._index["world_size"]
        written = self._index.get("written")  # a copy of the file has another time than the save
        self.written = (
            float(written) if isinstance(written, (int, float)) else os.stat(self.path + f"/{INDEX}").st_mtime
        )
        self.tensors: dict[str, LogicalTensor] = {n: self._logical(n, t) for n, t in self._index["tensors"].items()}
        self._check_files()

    def _locate(self) -> str:
        path = os.path.join(self.directory, self.tag)
        if os.path.isdir(path):
            return path
        # a save that was killed between its two renames (file systems that can't exchange names) left the old one under
        # this name
        pattern = re.compile(rf"\.old-{re.escape(self.tag)}-[0-9a-zA-Z]+")
        old = [e for e in (os.listdir(self.directory) if os.path.isdir(self.directory) else []) if pattern.fullmatch(e)]
        if len(old) == 1:
            return os.path.join(self.directory, old[0])
        raise CheckpointError(f"there is no checkpoint {path}. Tags in {self.directory}: {list_tags(self.directory)}.")

    def _bad(self, text: str) -> CheckpointError:
        return CheckpointError(f"{os.path.join(self.path, INDEX)} is wrong: {text}")

    def _read_index(self) -> dict[str, Any]:
        path = os.path.join(self.path, INDEX)
        if not os.path.exists(path):
            raise CheckpointError(
                f"{self.path} is not a complete checkpoint: it has no {INDEX}.{deepspeeds(self.path)}"
            )
        index = _unseal(_read_bytes(path), path)
        if index.get("format") != FORMAT:
            raise self._bad(f"format {index.get('format')!r}, not {FORMAT!r}")
        if index.get("version") != VERSION:
            raise self._bad(
                f"version {index.get('version')!r}; this deepc reads version {VERSION}. Use the deepc that wrote it, or"
                " a newer one."
            )
        kinds = {"tag": str, "token": str, "world_size": int, "files": dict, "tensors": dict, "rank_state": list}
        for key, kind in kinds.items():
            if not isinstance(index.get(key), kind):
                raise self._bad(f"{key} is missing or no {kind.__name__}")
        if index["tag"] != self.tag:
            raise self._bad(f"it belongs to the tag {index['tag']!r}: the directory was renamed")
        if "client_state" not in index or len(index["rank_state"]) != index["world_size"]:
            raise self._bad("states are missing")
        return index

    def _logical(self, name: str, t: Any) -> LogicalTensor:
        if (
            not isinstance(t, dict)
            or set(t) - {"cut"} != {"dtype", "shape", "pieces"}
            or t["dtype"] not in DTYPES
            or not _is_sizes(t["shape"])
            or not isinstance(t["pieces"], list)
        ):
            raise self._bad(f"tensor {name!r}: {str(t)[:200]}")
        for p in t["pieces"]:
            if (
                not isinstance(p, list)
                or len(p) != 4
                or not all(isinstance(x, str) for x in p[:2])
                or not _is_sizes(p[2:])
            ):
                raise self._bad(f"tensor {name!r} has the piece {p!r}")
            if p[0] not in self._index["files"]:
                raise self._bad(f"tensor {name!r} has a piece in {p[0]!r}, which is not among the files")
        problem = _coverage(t["pieces"], math.prod(t["shape"]))
        if problem:
            raise self._bad(f"tensor {name!r}: {problem}")
        try:
            cut = Cut.from_json(tuple(t["shape"]), t["cut"]) if "cut" in t else None
        except ArgumentError as exc:
            raise self._bad(f"tensor {name!r}: {exc}") from None
        return LogicalTensor(name, DTYPES[t["dtype"]], tuple(t["shape"]), tuple(tuple(p) for p in t["pieces"]), cut)

    def _check_files(self) -> None:
        for name, entry in self._index["files"].items():
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise self._bad(f"file name {name!r}")
            if (
                not isinstance(entry, dict)
                or not is_size(entry.get("bytes"))
                or not _HEX8.fullmatch(str(entry.get("header_crc32c")))
            ):
                raise self._bad(f"file {name!r}: {entry!r}")
            path = os.path.join(self.path, name)
            try:
                size = os.stat(path).st_size
            except OSError as exc:
                raise CheckpointError(f"checkpoint {self.tag}: the file {path} can't be found: {exc.strerror}") from exc
            if size != entry["bytes"]:
                raise CheckpointError(
                    f"{path} is corrupt: it has {size} bytes, the index says {entry['bytes']}"
                    + (" (truncated)" if size < entry["bytes"] else "")
                )

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            entry = self._index["files"].get(name)
            if entry is None:
                raise self._bad(f"{name!r} is not among the files")
            self._files[name] = SafetensorsFile(
                os.path.join(self.path, name),
                expect_bytes=entry["bytes"],
                expect_header_crc=int(entry["header_crc32c"], 16),
            )
        return self._files[name]

    def __getitem__(self, name: str) -> LogicalTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"checkpoint {self.path} has no tensor {name!r}.{did_you_mean(name, self.tensors)}"
            ) from None

    def read(
        self, name: str, out: torch.Tensor, begin: int = 0, *, verify: bool = True, cut: Cut | None = None
    ) -> None:
        """Fills `out` with elements [begin, begin + out.numel()) of the flattened logical tensor `name`; with `cut`, of
        its shards one after the other. (Where it is stored in another order it is read whole, once for calls that
        follow each other.)

        out: contiguous, on the CPU, of the tensor's dtype, any shape. Every stored piece that is touched is checked as
        a whole.
        """
        tensor = self[name]
        if (
            not isinstance(out, torch.Tensor)
            or out.dtype != tensor.dtype
            or out.device.type != "cpu"
            or not out.is_contiguous()
        ):
            raise ArgumentError(f"tensor {name!r} is {tensor.dtype}: it needs a contiguous CPU buffer of that dtype")
        end = begin + out.numel()
        if begin < 0 or end > tensor.numel:
            raise ArgumentError(f"elements [{begin}, {end}) are not inside {name!r} of shape {tensor.shape}")
        flat = out.detach().view(-1)
        if not (tensor.cut.same_order(cut) if tensor.cut is not None else cut is None or cut.is_plain):
            flat.copy_(self._reordered(tensor, cut, verify)[begin:end])
            return
        first = max(0, bisect.bisect_right(tensor.pieces, begin, key=lambda p: p[2]) - 1)
        for file, key, start, length in tensor.pieces[first:]:
            low, high = max(begin, start), min(end, start + length)
            if start >= end and start > begin:
                break
            if low < high:
                self._piece(tensor, file, key, start, length).read_into(
                    key, flat[low - begin : high - begin], low - start, verify=verify
                )

    def _reordered(self, tensor: LogicalTensor, cut: Cut | None, verify: bool) -> torch.Tensor:
        """[n]: all of it, in the order of `cut`."""
        key = tensor.name, cut
        if self._last is None or self._last[0] != key:
            self._last = None  # one at a time
            stored = torch.empty(tensor.numel, dtype=tensor.dtype, device="cpu")
            self.read(tensor.name, stored, verify=verify, cut=tensor.cut)
            whole = stored.view(tensor.shape) if tensor.cut is None else tensor.cut.from_order(stored)
            self._last = key, whole.view(-1) if cut is None else cut.in_order(whole)
        return self._last[1]

    def _piece(self, tensor: LogicalTensor, file: str, key: str, start: int, length: int) -> SafetensorsFile:
        """The file of a piece, after a check that the file and the index mean the same thing by it."""
        opened = self._file(file)
        info = opened[key]
        if info.slice != Slice(tensor.name, tensor.shape, start) or info.numel != length or info.dtype != tensor.dtype:
            raise CheckpointError(
                f"{opened.path}: tensor {key!r} is {info.slice} with {info.numel} elements of {info.dtype}, but the "
                "index takes it for "
                f"elements [{start}, {start + length}) of {tensor.name!r}"
            )
        return opened

    def tensor(self, name: str) -> torch.Tensor:
        """A whole logical tensor, in new memory."""
        info = self[name]
        out = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        self.read(name, out)
        return out

    def _state(self, tree: Any, file: str) -> Any:
        """A state whose tensors are in `file`, if it has any: then there is one."""
        if file not in self._index["files"]:
            try:
                return decode_client_state(tree, [])
            except CheckpointError as exc:
                raise self._bad(f"a state has tensors, and {file!r} is not among the files ({exc})") from exc
        opened = self._file(file)
        count = sum(k.startswith(_STATE_KEY) for k in opened.keys())
        return decode_client_state(tree, [opened.tensor(f"{_STATE_KEY}{i}") for i in range(count)])

    def client_state(self) -> Any:
        """What was given to publish()."""
        return self._state(self._index["client_state"], STATE_FILE)

    def rank_state(self, rank: int) -> Any:
        """What `rank` of the writing world gave to write()."""
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"the checkpoint was written by {self.world_size} ranks, there is no rank {rank}")
        return self._state(self._index["rank_state"][rank], shard_name(rank, self.world_size))

    def verify(self) -> None:
        """Reads every byte and checks every checksum."""
        for name in self._index["files"]:
            self._file(name).verify()
        for tensor in self.tensors.values():
            for piece in tensor.pieces:
                self._piece(tensor, *piece)
        self.client_state()
        for rank in range(self.world_size):
            self.rank_state(rank)

    def close(self) -> None:
        for f in self._files.values():
            f.close()
        self._files.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


# ---- Hugging Face model files ----------------------------------------------------------------------------------------


@numeric
def write_model(
    directory: str | os.PathLike[str],
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int = 5_000_000_000,
    *,
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes a model as Hugging Face stores one: model.safetensors, or model-00001-of-0000N.safetensors with
    model.safetensors.index.json.

    named_tensors: a mapping, or an iterable of (name, tensor) that may make each tensor on demand: at most one shard is
    held at a time. In a mapping, names of the very same memory (tied weights) are stored once, under the first name;
    the others are recorded in "__metadata__" as name -> stored name, as safetensors.torch.save_model does. Any device
    and layout; data goes through the CPU. Returns the file names. Each file appears complete, under its final name, the
    index last; files of an earlier, larger save are removed last."""
    if max_shard_bytes < 1:
        raise ArgumentError(f"max_shard_bytes {max_shard_bytes} must be >= 1")
    directory = os.path.abspath(os.fspath(directory))
    os.makedirs(directory, exist_ok=True)
    ties = _ties(named_tensors) if isinstance(named_tensors, Mapping) else {}
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    meta = {"format": "pt", **(metadata or {}), **ties}
    token, total = new_token(), 0
    shards: list[tuple[str, list[str]]] = []
    shard: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal shard, size
        path = os.path.join(directory, f".model-{len(shards):05d}-{token}.tmp")
        shards.append((path, list(shard)))
        write_safetensors(path, shard, metadata=meta)
        shard, size = {}, 0

    seen: set[str] = set()
    try:
        for name, tensor in pairs:
            if name in seen:
                raise ArgumentError(f"two tensors are named {name!r}")
            seen.add(name)
            if name in ties:
                continue
            nbytes = tensor.numel() * tensor.element_size()
            if shard and size + nbytes > max_shard_bytes:
                flush()
            dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
            shard[name] = dense.cpu().resolve_conj().resolve_neg().contiguous()
            size, total = size + nbytes, total + nbytes
        flush()
        return _place_model(directory, shards, total)
    finally:
        for path, _ in shards:
            if os.path.exists(path):
                os.unlink(path)


def _ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for name, t in tensors.items():
        if t.numel() == 0 or t.device.type == "meta":
            continue
        identity = (t.device, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.is_conj(), t.is_neg())
        if identity in first:
            ties[name] = first[identity]
        else:
            first[identity] = name
    return ties


def forget_shards(directory: str, index: str, names: list[str]) -> None:
    """Before files `names` take the places of earlier ones, one after the other: an index that names several of these
    goes, which would be of a model that has tensors of both if that were broken off."""
    if len(names) > 1 and any(os.path.lexists(os.path.join(directory, name)) for name in names):
        Path(directory, index).unlink(missing_ok=True)
        fsync_dir(directory)


def _place_model(directory: str, shards: list[tuple[str, list[str]]], total: int) -> list[str]:
    n = len(shards)
    names = ["model.safetensors"] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    index = "model.safetensors.index.json"
    forget_shards(directory, index, names)
    for (path, _), name in zip(shards, names, strict=True):
        os.replace(path, os.path.join(directory, name))
    fsync_dir(directory)
    if n > 1:
        weight_map = {key: name for (_, keys), name in zip(shards, names, strict=True) for key in keys}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
        replace_file(os.path.join(directory, index), text.encode())
    keep = {*names, index} if n > 1 else set(names)
    for entry in os.listdir(directory):
        if entry not in keep and (
            entry in (index, "model.safetensors") or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", entry)
        ):
            Path(directory, entry).unlink()
    return names + ([index] if n > 1 else [])
