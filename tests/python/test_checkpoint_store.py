"""Checkpoints on disk: the safetensors format, the store, client state, and that nothing damaged is ever read as
good."""

from __future__ import annotations

import ast
import collections
import contextlib
import json
import math
import os
import random
import resource
import shutil
import struct
import subprocess
import sys

import leftovers
import pytest
import torch
from deepc.checkpoint import files as io
from deepc.checkpoint import store, tool
from deepc.checkpoint.files import SafetensorsFile, Slice, write_safetensors
from deepc.checkpoint.store import (
    CheckpointReader,
    CheckpointWriter,
    decode_client_state,
    encode_client_state,
    write_model,
)
from deepc.errors import ArgumentError, CheckpointError, CheckpointTypeError
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def examples(number: int) -> int:
    """Of a property: all in the full class, a quarter in the quick one."""
    return number if leftovers.LOOKED_FOR else number // 4


def filled(shape, dtype, seed=0) -> torch.Tensor:
    """A tensor of random bytes (0 and 1 for bool), so NaNs and denormals are there too."""
    g = torch.Generator().manual_seed(seed)
    n = math.prod(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    return torch.randint(0, 256, (n * dtype.itemsize,), generator=g, dtype=torch.uint8).view(dtype).view(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, dtype and shape too."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(io.tensor_bytes(a.contiguous())) == bytes(io.tensor_bytes(b.contiguous()))
    )


def everything() -> dict[str, torch.Tensor]:
    out = {f"t.{str(d)[6:]}": filled((3, 5), d, i) for i, d in enumerate(DTYPES)}
    return out | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), 'name with "quotes" and é': torch.ones(2)}


# ---- one file --------------------------------------------------------------------------------------------------------


def test_crc_is_crc32c():
    assert io.crc32c(b"123456789") == 0xE3069283  # the check value of RFC 3720's polynomial
    assert io.crc32c(b"6789", io.crc32c(b"12345")) == 0xE3069283
    assert io.crc32c(torch.tensor(list(b"123456789"), dtype=torch.uint8)) == 0xE3069283


def test_round_trip(tmp_path):
    tensors = everything()
    written = write_safetensors(tmp_path / "a.safetensors", tensors, metadata={"x": "y"})
    assert written.bytes == os.path.getsize(tmp_path / "a.safetensors")
    with SafetensorsFile(
        tmp_path / "a.safetensors", expect_bytes=written.bytes, expect_header_crc=written.header_crc
    ) as f:
        assert set(f.keys()) == set(tensors) and f.metadata["x"] == "y"
        for key, t in tensors.items():
            assert same(f.tensor(key), t), key
        assert all(
            (f._data + i.begin) % i.dtype.itemsize == 0 for i in f.tensors.values()
        )  # aligned, so it can be mapped
        f.verify()


def test_ranges(tmp_path):
    t = filled((7, 11), torch.int32)
    write_safetensors(tmp_path / "a", {"other": torch.ones(3), "t": t})
    with SafetensorsFile(tmp_path / "a") as f:
        for begin, n in ((0, 77), (0, 0), (77, 0), (3, 1), (10, 60), (76, 1)):
            out = torch.empty(n, dtype=torch.int32)
            f.read_into("t", out, begin)
            assert torch.equal(out, t.view(-1)[begin : begin + n])
        for out, begin in (
            (torch.empty(3), 0),
            (torch.empty(3, dtype=torch.int32), 75),
            (torch.empty(6, dtype=torch.int32)[::2], 0),
            (torch.empty(2, dtype=torch.int32), -1),
        ):
            with pytest.raises(ArgumentError):
                f.read_into("t", out, begin)
        with pytest.raises(CheckpointError, match="no tensor 'u'"):
            f.tensor("u")


def test_a_range_is_verified_with_the_rest_of_its_tensor(tmp_path):
    write_safetensors(tmp_path / "a", {"t": torch.arange(100.0)})
    data = bytearray((tmp_path / "a").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a").write_bytes(data)
    with SafetensorsFile(tmp_path / "a") as f:
        out = torch.empty(4)
        with pytest.raises(CheckpointError, match="tensor 't' has the CRC-32C"):
            f.read_into("t", out, 0)
        f.read_into("t", out, 0, verify=False)
        assert torch.equal(out, torch.arange(4.0))


def test_the_library_reads_ours(tmp_path):
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="safetensors is not installed: files are not exchanged with it"
    )
    write_safetensors(tmp_path / "a", everything())
    theirs = safetensors.load_file(tmp_path / "a")
    assert set(theirs) == set(everything())
    for key, t in everything().items():
        assert same(theirs[key], t), key


def test_we_read_the_librarys(tmp_path):
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="safetensors is not installed: files are not exchanged with it"
    )
    safetensors.save_file(everything(), tmp_path / "a", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "a") as f:
        assert set(f.keys()) == set(everything()) and f.metadata == {"format": "pt"}
        for key, t in everything().items():
            assert same(f.tensor(key), t), key
            assert f[key].crc is None


def raw_file(path, header, data=b"", length=None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return str(path)


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data", "length", "text"),
    [
        ({"a": F4}, b"\0\0\0\0", 2**40, "the header should have"),
        ({"a": F4}, b"\0\0\0\0", 100_000_001, "the header should have"),
        (b"", b"", None, "no JSON object"),
        (b"[1]", b"", None, "no JSON object"),
        (b"{", b"", None, "corrupt"),
        (b'{"a": \xff}', b"", None, "corrupt"),
        (
            (
                b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":'
                b' {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
            ),
            b"\0" * 4,
            None,
            "stands twice",
        ),
        ({"a": F4}, b"\0" * 5, None, "the tensors end at byte"),
        ({"a": F4}, b"\0" * 3, None, "the tensors end at byte"),
        ({"a": {**F4, "dtype": "F31"}}, b"\0" * 4, None, "unknown dtype"),
        ({"a": {**F4, "shape": [2]}}, b"\0" * 4, None, "does not have 4 bytes"),
        ({"a": {**F4, "shape": [-1]}}, b"\0" * 4, None, "bad shape"),
        ({"a": {**F4, "shape": [True]}}, b"\0" * 4, None, "bad shape"),
        ({"a": {**F4, "shape": [1.0]}}, b"\0" * 4, None, "bad shape"),
        ({"a": {**F4, "data_offsets": [4, 0]}}, b"\0" * 4, None, "bad offsets"),
        ({"a": {**F4, "data_offsets": [0, 4, 8]}}, b"\0" * 4, None, "bad offsets"),
        ({"a": {**F4, "extra": 1}}, b"\0" * 4, None, "must have dtype"),
        ({"a": {"dtype": "F32"}}, b"", None, "must have dtype"),
        ({"a": 3}, b"", None, "must have dtype"),
        ({"a": F4, "b": {**F4, "data_offsets": [8, 12]}}, b"\0" * 12, None, "a hole or an overlap"),
        ({"a": F4, "b": F4}, b"\0" * 4, None, "a hole or an overlap"),
        ({"a": F4, "b": {**F4, "data_offsets": [2, 6]}}, b"\0" * 6, None, "a hole or an overlap"),
        ({"__metadata__": {"a": 1}}, b"", None, "strings to strings"),
        ({"__metadata__": {"deepc.crc32c": "{"}}, b"", None, "corrupt"),
        ({"__metadata__": {"deepc.crc32c": "[]"}}, b"", None, "no JSON object"),
        ({"__metadata__": {"deepc.crc32c": "{}"}, "a": F4}, b"\0" * 4, None, "no valid checksum"),
        ({"__metadata__": {"deepc.crc32c": '{"a":"0000000G"}'}, "a": F4}, b"\0" * 4, None, "no valid checksum"),
        (
            {"__metadata__": {"deepc.crc32c": '{"a":"00000000","b":"00000000"}'}, "a": F4},
            b"\0" * 4,
            None,
            "not those of its tensors",
        ),
        (
            {"__metadata__": {"deepc.slices": '{"a":{"name":"w","shape":[4],"begin":4}}'}, "a": F4},
            b"\0" * 4,
            None,
            "slice",
        ),
        (
            {"__metadata__": {"deepc.slices": '{"b":{"name":"w","shape":[4],"begin":0}}'}, "a": F4},
            b"\0" * 4,
            None,
            "not among its tensors",
        ),
    ],
)
def test_a_file_outside_the_format_is_refused(tmp_path, header, data, length, text):
    path = raw_file(tmp_path / "bad.safetensors", header, data, length)
    with pytest.raises(CheckpointError) as error:
        SafetensorsFile(path)
    assert text in str(error.value) and "bad.safetensors" in str(error.value)


def test_short_and_missing_files(tmp_path):
    for data in (b"", b"1234567"):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(CheckpointError, match="no safetensors file"):
            SafetensorsFile(tmp_path / "a")
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "none")


def test_a_file_that_shrinks_while_open(tmp_path):
    write_safetensors(tmp_path / "a", {"t": torch.zeros(4000)})
    with SafetensorsFile(tmp_path / "a") as f:
        os.truncate(tmp_path / "a", 5000)
        with pytest.raises(CheckpointError, match="it ends at byte 5000"):
            f.tensor("t")


@given(st.binary(max_size=200))
@settings(max_examples=examples(80), deadline=None)
def test_random_bytes_never_crash_the_reader(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "a"
    for content in (data, struct.pack("<Q", len(data)) + data, struct.pack("<Q", len(data) + 1) + b"{" + data):
        path.write_bytes(content)
        with contextlib.suppress(CheckpointError):  # b"{}" is a valid, empty file
            SafetensorsFile(path).close()


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.ones(4, 4).t(), ArgumentError),
        (torch.ones(2, device="meta"), ArgumentError),
        (torch.ones(2).to_sparse(), ArgumentError),
        (torch.ones(2, dtype=torch.complex128), CheckpointTypeError),
        ([1.0], CheckpointTypeError),
    ],
)
def test_what_can_not_be_written_is_named(tmp_path, tensor, error):
    with pytest.raises(error, match="'weight'|complex128"):
        write_safetensors(tmp_path / "a", {"weight": tensor})
    assert not (tmp_path / "a").exists()


def test_writing_fails_cleanly(tmp_path):
    write_safetensors(tmp_path / "a", {"t": torch.ones(2)})
    with pytest.raises(CheckpointError, match="File exists"):
        write_safetensors(tmp_path / "a", {"t": torch.ones(2)})
    with pytest.raises(CheckpointError, match="No such file or directory"):
        write_safetensors(tmp_path / "none" / "a", {"t": torch.ones(2)})
    with pytest.raises(CheckpointError, match="No space left"):
        fd = os.open("/dev/full", os.O_WRONLY)
        try:
            io.write_all(fd, b"x" * 100, "/dev/full")
        finally:
            os.close(fd)
    with pytest.raises(ArgumentError, match="not inside 'w'"):
        write_safetensors(tmp_path / "b", {"t": torch.ones(4)}, slices={"t": Slice("w", (2, 3), 3)})


def test_no_copy_of_the_data_is_made(tmp_path):
    """128 MiB are written and read back with less than 48 MiB of additional memory."""
    code = f"""
import torch
from deepc.checkpoint.files import write_safetensors, SafetensorsFile
t = torch.ones(32 << 20)
write_safetensors({str(tmp_path / "a")!r}, {{"t": t[:1024]}}, fsync=False)
def peak():  # KiB. ru_maxrss would begin with that of the process that forked this one
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM:"))
before = peak()
write_safetensors({str(tmp_path / "b")!r}, {{"t": t}}, fsync=False)
with SafetensorsFile({str(tmp_path / "b")!r}) as f:
    f.read_into("t", t)
    f.verify()
print(peak() - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert grown < 48 << 10


# ---- the store -------------------------------------------------------------------------------------------------------


def save(
    directory,
    tag: str,
    tensors: dict[str, torch.Tensor],
    cuts: list[list[tuple[str, int, int]]],
    client_state=None,
    rank_state=None,
    **kw,
) -> str:
    """Writes `tensors` as len(cuts) ranks; cuts[r] lists (name, begin, end) of what rank r owns."""
    token, first = store.new_token(), None
    for rank, owned in enumerate(cuts):
        w = CheckpointWriter(directory, tag, rank=rank, world_size=len(cuts), token=token)
        for name, begin, end in owned:
            w.add(name, tensors[name].view(-1)[begin:end], shape=tensors[name].shape, begin=begin)
        w.write(rank_state(rank) if rank_state else None)
        first = first or w
    return first.publish(client_state, **kw)


def cut(tensors: dict[str, torch.Tensor], ranks: int, seed: int) -> list[list[tuple[str, int, int]]]:
    """Cuts every tensor at random places and deals the pieces to ranks at random."""
    rng, cuts = random.Random(seed), [[] for _ in range(ranks)]
    for name, t in tensors.items():
        n = t.numel()
        edges = sorted({0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 4)))})
        for begin, end in zip(edges, edges[1:], strict=False) if n else [(0, 0)]:
            cuts[rng.randrange(ranks)].append((name, begin, end))
    return cuts


@pytest.mark.parametrize("seed", range(8))
def test_any_layout_is_read_by_any_other(tmp_path, seed):
    tensors = {
        "w": filled((13, 7), torch.float32, seed),
        "b": filled((17,), torch.bfloat16, seed),
        "n": torch.tensor(seed),
        "e": torch.empty(0, 3),
    }
    save(tmp_path, "t", tensors, cut(tensors, 1 + seed % 4, seed))
    rng = random.Random(seed)
    with CheckpointReader(tmp_path) as r:
        assert r.tag == "t" and r.world_size == 1 + seed % 4 and set(r.tensors) == set(tensors)
        r.verify()
        for name, t in tensors.items():
            assert r.tensors[name].shape == t.shape and r.tensors[name].dtype == t.dtype
            assert same(r.tensor(name), t)
            for _ in range(20):
                begin = rng.randint(0, t.numel())
                end = rng.randint(begin, t.numel())
                out = torch.empty(end - begin, dtype=t.dtype)
                r.read(name, out, begin)
                assert same(out, t.view(-1)[begin:end])


def test_reading_checks_its_arguments(tmp_path):
    save(tmp_path, "t", {"w": torch.arange(6.0)}, [[("w", 0, 6)]])
    with CheckpointReader(tmp_path) as r:
        with pytest.raises(CheckpointError, match="no tensor 'v'"):
            r.tensor("v")
        for out, begin in (
            (torch.empty(2, dtype=torch.int32), 0),
            (torch.empty(7), 0),
            (torch.empty(2), -1),
            (torch.empty(2), 5),
            (torch.empty(4)[::2], 0),
        ):
            with pytest.raises(ArgumentError, match="'w'"):
                r.read("w", out, begin)
        with pytest.raises(ArgumentError, match="no rank 1"):
            r.rank_state(1)


def test_states(tmp_path):
    state = {"step": 3, "tensor": torch.arange(4), "nested": [(1, 2), {"x": torch.ones(2, 2)}]}
    save(
        tmp_path,
        "t",
        {"w": torch.ones(4)},
        [[("w", 0, 2)], [("w", 2, 4)]],
        client_state=state,
        rank_state=lambda r: {"rank": r, "t": torch.full((3,), r)},
    )
    with CheckpointReader(tmp_path) as r:
        got = r.client_state()
        assert got["step"] == 3 and torch.equal(got["tensor"], torch.arange(4)) and got["nested"][0] == (1, 2)
        for rank in range(2):
            assert r.rank_state(rank)["rank"] == rank and torch.equal(r.rank_state(rank)["t"], torch.full((3,), rank))
    assert sorted(os.listdir(tmp_path / "t")) == [
        "index.json",
        "rank_00000_of_00002.safetensors",
        "rank_00001_of_00002.safetensors",
        "state.safetensors",
    ]


def test_latest_follows_the_last_save(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint to load"):
        CheckpointReader(tmp_path)
    for tag in ("global_step1", "global_step2"):
        save(tmp_path, tag, {"w": torch.ones(1)}, [[("w", 0, 1)]])
        assert CheckpointReader(tmp_path).tag == tag
    save(tmp_path, "other", {"w": torch.ones(1)}, [[("w", 0, 1)]], latest=False)
    assert CheckpointReader(tmp_path).tag == "global_step2" and CheckpointReader(tmp_path, "other").tag == "other"
    assert store.list_tags(tmp_path) == ["global_step1", "global_step2", "other"]
    with pytest.raises(CheckpointError, match="global_step2"):
        CheckpointReader(tmp_path, "global_step3")


@pytest.mark.parametrize("exchange", [True, False])
def test_saving_over_a_link_to_a_checkpoint_replaces_the_link(tmp_path, monkeypatch, exchange):
    """As where it was moved to a larger disk: the link stayed, under a name that nothing removes."""
    if not exchange:
        monkeypatch.setattr(store, "_exchange", lambda a, b: False)
    here, there = tmp_path / "here", tmp_path / "there"
    cuts = [[("w", 0, 2)]]
    for tag in ("t", "u"):
        save(here, tag, {"w": torch.ones(2)}, cuts)
    there.mkdir()
    for tag in ("t", "u"):
        os.rename(here / tag, there / tag)
        os.symlink(there / tag, here / tag)
    save(here, "t", {"w": torch.zeros(2)}, cuts)
    assert sorted(os.listdir(here)) == ["latest", "t", "u"] and not (here / "t").is_symlink()
    for folder, value in ((here, 0.0), (there, 1.0)):
        with CheckpointReader(folder, "t") as r:
            assert r.tensor("w").tolist() == [value, value]
    assert [os.path.basename(path) for path, *_ in tool.clean(here, keep=1, really=True)] == ["u"]
    assert sorted(os.listdir(here)) == ["latest", "t"] and (there / "u" / "index.json").exists()


@pytest.mark.parametrize("exchange", [True, False])
def test_saving_a_tag_again_replaces_it(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(store, "_exchange", lambda a, b: False)
    save(tmp_path, "t", {"w": torch.ones(4)}, [[("w", 0, 2)], [("w", 2, 4)]], client_state={"t": torch.ones(1)})
    (tmp_path / "t" / "tokenizer.json").write_text("a user's file")
    save(tmp_path, "t", {"v": torch.zeros(3)}, [[("v", 0, 3)]])
    with CheckpointReader(tmp_path) as r:
        assert list(r.tensors) == ["v"]
        r.verify()
    assert sorted(os.listdir(tmp_path / "t")) == ["index.json", "rank_00000_of_00001.safetensors", "tokenizer.json"]
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]


def _begun(directory, value: float) -> CheckpointWriter:
    """A save of the tag "t" by another job, which has written its files."""
    w = CheckpointWriter(directory, "t")
    w.add("w", torch.full((2,), value))
    w.write()
    return w


def test_a_job_that_was_started_twice_saves_beside_itself(tmp_path):
    other = _begun(tmp_path, 2.0)
    for _ in range(2):
        save(tmp_path, "t", {"w": torch.ones(2)}, [[("w", 0, 2)]])
    other.publish()
    with CheckpointReader(tmp_path) as r:
        assert r.tensor("w").tolist() == [2.0, 2.0]
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]
    del other
    _begun(tmp_path, 3.0)._let_go()  # as by a kill
    save(tmp_path, "t", {"w": torch.ones(2)}, [[("w", 0, 2)]])
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]


def test_what_is_removed_is_never_what_another_job_has_published_meanwhile(tmp_path, monkeypatch):
    """Where its lock is not seen (another host): files went that had become the checkpoint."""
    save(tmp_path, "t", {"w": torch.zeros(2)}, [[("w", 0, 2)]])
    other, told = _begun(tmp_path, 2.0), []

    def remove(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if os.stat(path).st_ino == inode and not told:
            told.append(path)
            with contextlib.suppress(CheckpointError):
                other.publish()
        for name in os.listdir(fd):
            os.unlink(name, dir_fd=fd)
        os.close(fd)

    inode = os.stat(other.path).st_ino
    monkeypatch.setattr(store, "_is_held", lambda fd: False)
    monkeypatch.setattr(store, "_remove_tree", remove)
    save(tmp_path, "t", {"w": torch.ones(2)}, [[("w", 0, 2)]])
    assert told
    with CheckpointReader(tmp_path) as r:
        r.verify()


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path, "t", {"w": torch.ones(4)}, [[("w", 0, 4)]])
    monkeypatch.setattr(store, "_exchange", lambda a, b: False)
    real, calls = os.rename, []

    def rename(a, b):
        calls.append(a)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(a, b)

    monkeypatch.setattr(store.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, "t", {"w": torch.zeros(4)}, [[("w", 0, 4)]])
    monkeypatch.undo()
    assert not (tmp_path / "t").exists()
    with CheckpointReader(tmp_path) as r:
        assert torch.equal(r.tensor("w"), torch.ones(4))
    save(tmp_path, "t", {"w": torch.zeros(4)}, [[("w", 0, 4)]])
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]  # what the killed save left is gone


KILLED = """
import os, sys, torch
from deepc.checkpoint import store
from deepc.checkpoint.store import CheckpointWriter
steps = int(sys.argv[2])
count = 0
def counting(name, module):
    real = getattr(module, name)
    def call(*a, **k):
        global count
        count += 1
        if count == steps: os._exit(9)
        return real(*a, **k)
    setattr(module, name, call)
for name in ("fsync", "rename", "replace", "unlink", "write"): counting(name, os)
real_exchange = store._exchange
def exchange(a, b):
    global count
    count += 1
    if count == steps: os._exit(9)
    return real_exchange(a, b)
store._exchange = exchange
w = CheckpointWriter(sys.argv[1], "t")
w.add("w", torch.zeros(4)); w.write(); w.publish({"new": torch.ones(1)})
"""


@pytest.mark.full
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path):
    """The save is ended before its 1st, 2nd, 3rd, ... system call that changes the disk; old or new must load whole."""
    save(tmp_path / "base", "t", {"w": torch.ones(4)}, [[("w", 0, 4)]])
    seen = set()
    for steps in range(1, 60):
        work = tmp_path / f"k{steps}"
        shutil.copytree(tmp_path / "base", work)
        done = subprocess.run([sys.executable, "-c", KILLED, str(work), str(steps)]).returncode
        with CheckpointReader(work) as r:
            r.verify()
            w = r.tensor("w")
        assert torch.equal(w, torch.ones(4)) or torch.equal(w, torch.zeros(4))
        seen.add(bool(w[0] == 0))
        if done == 0:
            break
        assert done == 9
    assert done == 0 and seen == {True, False}


def test_publish_refuses_what_is_incomplete(tmp_path):
    w0 = CheckpointWriter(tmp_path, "t", rank=0, world_size=2, token="a")
    w0.add("w", torch.ones(2), shape=(4,))
    w0.write()
    with pytest.raises(CheckpointError, match="rank 1 of 2 has not written its shard"):
        w0.publish()
    w1 = CheckpointWriter(tmp_path, "t", rank=1, world_size=2, token="a")
    w1.add("w", torch.ones(1), shape=(4,), begin=2)
    w1.write()
    with pytest.raises(CheckpointError, match=r"tensor 'w' of shape \[4\]: nobody has elements \[3, 4\)"):
        w0.publish()
    with pytest.raises(ArgumentError, match="rank 0's"):
        w1.publish()
    assert not (tmp_path / "t").exists() and not (tmp_path / "latest").exists()
    w0.abort()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("cuts", "shapes", "text"),
    [
        ([[("w", 0, 3)], [("w", 2, 4)]], [(4,), (4,)], "there twice"),
        ([[("w", 0, 1)], [("w", 2, 4)]], [(4,), (4,)], r"elements \[1, 2\)"),
        ([[("w", 0, 2)], [("w", 2, 4)]], [(4,), (2, 2)], "another rank as"),
    ],
)
def test_publish_refuses_what_does_not_fit(tmp_path, cuts, shapes, text):
    for rank, owned in enumerate(cuts):
        w = CheckpointWriter(tmp_path, "t", rank=rank, world_size=2, token="a")
        for name, begin, end in owned:
            w.add(name, torch.arange(4.0)[begin:end], shape=shapes[rank], begin=begin)
        w.write()
        first = w if rank == 0 else first  # noqa: F821
    with pytest.raises(CheckpointError, match=text):
        first.publish()


def test_writer_arguments(tmp_path):
    for tag in ("", "a/b", "..", ".hidden", "latest", "a" * 201, "a b", "a\n", 3):
        with pytest.raises(ArgumentError, match="tag"):
            CheckpointWriter(tmp_path, tag)
    with pytest.raises(ArgumentError, match="same token"):
        CheckpointWriter(tmp_path, "t", rank=0, world_size=2)
    with pytest.raises(ArgumentError, match="rank 2"):
        CheckpointWriter(tmp_path, "t", rank=2, world_size=2, token="a")
    with pytest.raises(ArgumentError, match="token"):
        CheckpointWriter(tmp_path, "t", token="../x")
    with pytest.raises(ArgumentError, match="not inside"):
        CheckpointWriter(tmp_path, "t").add("w", torch.ones(4), shape=(5,), begin=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't create"):
        CheckpointWriter(tmp_path / "file", "t")


def test_a_foreign_directory_is_not_replaced(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match="is not a deepc checkpoint"):
        save(tmp_path, "t", {"w": torch.ones(4)}, [[("w", 0, 4)]])
    assert (tmp_path / "t" / "thesis.tex").read_text() == "years"


def test_a_full_disk_is_told_before_writing(tmp_path, monkeypatch):
    w = CheckpointWriter(tmp_path, "t")
    w.add("w", torch.ones(1000))
    monkeypatch.setattr(store.os, "statvfs", lambda p: collections.namedtuple("S", "f_bavail f_frsize")(1, 512))
    with pytest.raises(CheckpointError, match="needs 4000 bytes, .* has 512 free"):
        w.write()


# ---- damage ----------------------------------------------------------------------------------------------------------


def load_all(directory) -> None:
    with CheckpointReader(directory) as r:
        r.verify()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of two ranks with every kind of file; (directory, files relative to it)."""
    d = tmp_path_factory.mktemp("small")
    tensors = {"w": filled((5, 3), torch.float32), "b": filled((4,), torch.bfloat16)}
    save(
        d,
        "step-1",
        tensors,
        cut(tensors, 2, 1),
        client_state={"t": torch.arange(3), "x": 1.5},
        rank_state=lambda r: {"r": (r, torch.ones(1))},
    )
    load_all(d)
    files = sorted(str(p.relative_to(d)) for p in d.rglob("*") if p.is_file())
    assert files == [
        "latest",
        "step-1/index.json",
        "step-1/rank_00000_of_00002.safetensors",
        "step-1/rank_00001_of_00002.safetensors",
        "step-1/state.safetensors",
    ]
    return d, files


def damaged(small, file: str, content: bytes | None) -> None:
    """Puts `content` in the place of a file, loads, and puts the file back."""
    path = small[0] / file
    good = path.read_bytes()
    try:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            load_all(small[0])
        assert str(small[0]) in str(error.value)
    finally:
        path.write_bytes(good)


@given(data=st.data())
@settings(max_examples=examples(300), deadline=None)
def test_any_single_bit_flip_is_found(small, data):
    file = data.draw(st.sampled_from(small[1]))
    content = bytearray((small[0] / file).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    damaged(small, file, bytes(content))


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_truncation_is_found(small, data):
    file = data.draw(st.sampled_from(small[1]))
    content = (small[0] / file).read_bytes()
    damaged(small, file, content[: data.draw(st.integers(0, len(content) - 1))])


@given(data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_any_overwritten_range_is_found(small, data):
    """Torn writes: a range of zeros, or bytes from elsewhere in the file, or bytes appended."""
    file = data.draw(st.sampled_from(small[1]))
    content = (small[0] / file).read_bytes()
    begin = data.draw(st.integers(0, len(content)))
    length = data.draw(st.integers(1, 64))
    other = data.draw(
        st.one_of(
            st.just(b"\0" * length),
            st.integers(0, len(content) - 1).map(lambda i: content[i : i + length]),
            st.binary(min_size=1, max_size=8),
        )
    )
    changed = content[:begin] + other + content[begin + len(other) :]
    if changed != content:
        damaged(small, file, changed)


def test_a_missing_file_is_found(small):
    for file in small[1]:
        damaged(small, file, None)


@pytest.mark.full
def test_every_bit_of_every_file(small):
    for file in small[1]:
        content = (small[0] / file).read_bytes()
        for bit in range(8 * len(content)):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            damaged(small, file, bytes(changed))


def test_damage_is_named(small):
    path = small[0] / "step-1" / "rank_00000_of_00002.safetensors"
    good = path.read_bytes()
    try:
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 64]))
        with pytest.raises(
            CheckpointError, match=r"rank_00000_of_00002.safetensors is corrupt: tensor '.*' .*has the CRC-32C"
        ):
            load_all(small[0])
        path.write_bytes(good[:-1])
        with pytest.raises(CheckpointError, match=r"rank_00000_of_00002.safetensors is corrupt: .*\(truncated\)"):
            load_all(small[0])
    finally:
        path.write_bytes(good)


def test_a_shard_of_another_save_is_found(tmp_path):
    tensors = {"w": torch.ones(4)}
    save(tmp_path, "a", tensors, [[("w", 0, 4)]])
    save(tmp_path, "b", {"w": torch.zeros(4)}, [[("w", 0, 4)]])
    name = "rank_00000_of_00001.safetensors"
    shutil.copy(tmp_path / "a" / name, tmp_path / "b" / name)
    with pytest.raises(CheckpointError, match="CRC-32C of its header differs"):
        load_all(tmp_path)


def test_a_renamed_checkpoint_is_found(tmp_path):
    save(tmp_path, "a", {"w": torch.ones(4)}, [[("w", 0, 4)]])
    os.rename(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointError, match="belongs to the tag 'a'"):
        CheckpointReader(tmp_path, "b")


def _set(path, value):
    def change(index):
        node = index
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_set(["version"], 2), "version 2; this deepc reads version 1"),
        (_set(["format"], "zip"), "format 'zip'"),
        (_set(["world_size"], "2"), "world_size"),
        (_set(["rank_state"], []), "states are missing"),
        (_set(["tensors", "w", "shape"], [5]), r"nobody has elements \[4, 5\)"),
        (_set(["tensors", "w", "dtype"], "F99"), "tensor 'w'"),
        (_set(["tensors", "w", "dtype"], "I32"), "but the index takes it for"),
        (_set(["tensors", "w", "pieces"], [["../x", "0", 0, 4]]), "not among the files"),
        (_set(["tensors", "w", "pieces"], [[1, 2, 3]]), "the piece"),
        (_set(["tensors", "w", "pieces", 0, 1], "1"), "but the index takes it for"),
        (_set(["tensors", "w", "pieces", 0, 1], "7"), "has no tensor '7'"),
        (_set(["tensors", "w", "shape"], [2, 2]), "but the index takes it for"),
        (_set(["files", "../../etc/passwd"], {"bytes": 1, "header_crc32c": "00000000"}), "file name"),
        (_set(["files", "rank_00000_of_00001.safetensors", "bytes"], 7), "the index says 7"),
        (_set(["files", "rank_00000_of_00001.safetensors", "header_crc32c"], "00000000"), "header differs"),
        (_set(["client_state"], {"$tensor": 9}), "state.safetensors"),
        (_set(["client_state"], {"$eval": "1"}), "newer deepc"),
        (_set(["client_state"], {"$scalar": ["object", 1]}), "NumPy type"),
        (_set(["client_state"], {"$dict": [[[1], 2]]}), "corrupt"),
    ],
)
def test_an_index_that_is_sealed_but_wrong(tmp_path, change, text):
    save(tmp_path, "t", {"w": torch.ones(4), "v": torch.ones(4)}, [[("w", 0, 4), ("v", 0, 4)]])
    path = tmp_path / "t" / "index.json"
    index = json.loads(path.read_text())
    del index["crc32c"]
    change(index)
    path.write_bytes(store._seal(index))
    with pytest.raises(CheckpointError, match=text):
        load_all(tmp_path)


# ---- client state ----------------------------------------------------------------------------------------------------


def round_trip(value):
    tree, tensors = encode_client_state(value)
    return decode_client_state(json.loads(json.dumps(tree, allow_nan=False)), tensors)


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
KEYS = st.one_of(st.text(max_size=5), st.integers(), st.sampled_from(["$tensor", "$tuple", "$dict", "$"]))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def typed(value):
    """A value with the type of everything in it, so that 1, 1.0 and True differ, and lists and tuples do."""
    if isinstance(value, dict):
        return type(value), [(type(k), k, typed(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(v) for v in value]
    return type(value), repr(value)


@given(VALUES)
@settings(max_examples=examples(200), deadline=None)
def test_json_types_come_back_exactly(value):
    assert typed(round_trip(value)) == typed(value)


def test_special_values():
    got = round_trip([float("nan"), float("inf"), float("-inf"), -0.0, 10**40, 5e-324, "\ud800", "\0"])
    assert math.isnan(got[0]) and got[1:3] == [float("inf"), float("-inf")] and math.copysign(1, got[3]) == -1
    assert got[4:] == [10**40, 5e-324, "\ud800", "\0"]
    for value in (collections.OrderedDict([("b", 1), ("a", 2)]), collections.Counter({3: 2, 5: 1})):
        assert typed(round_trip(value)) == typed(value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_in_a_state(dtype):
    t = filled((2, 3), dtype)
    got = round_trip({"a": t, "b": [t.t()], "c": torch.nn.Parameter(t) if t.is_floating_point() else t})
    assert same(got["a"], t) and same(got["b"][0], t.t().contiguous()) and same(got["c"], t)
    assert not got["c"].requires_grad


def test_numpy_in_a_state():
    np = pytest.importorskip("numpy", reason="numpy is not installed: its values are not tried")
    arrays = [
        np.arange(6).reshape(2, 3),
        np.ones((0, 2), np.float16),
        np.array(3.5),
        np.array([True, False]),
        np.arange(5, dtype=np.uint32)[::-1],
        np.arange(3, dtype=">i4"),
        np.asfortranarray(np.ones((2, 3))),
    ]
    for a, b in zip(arrays, round_trip(arrays), strict=True):
        assert (
            isinstance(b, np.ndarray)
            and b.shape == a.shape
            and b.dtype == a.dtype.newbyteorder("=")
            and np.array_equal(a, b)
        )
    numbers = [
        np.float32(0.1),
        np.float64(0.1),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.float16(1.5),
        np.float64("nan"),
    ]
    for a, b in zip(numbers, round_trip(numbers), strict=True):
        assert type(a) is type(b) and (a == b or (a != a and b != b))


class Custom:
    pass


def cases_of_wrong_types():
    import datetime
    import pathlib

    yield {"a": {"b": [0, Custom()]}}, "client_state['a']['b'][1] is a"
    yield {"f": lambda: 0}, "client_state['f'] is a"
    yield {"d": torch.float32}, "client_state['d'] is a torch.dtype"
    yield {"s": {1, 2}}, "client_state['s'] is a builtins.set"
    yield {"b": b"x"}, "client_state['b'] is a builtins.bytes"
    yield {"c": 1j}, "client_state['c'] is a builtins.complex"
    yield {"p": pathlib.Path("x")}, "client_state['p']"
    yield {"t": datetime.datetime(2020, 1, 1)}, "client_state['t']"
    yield {(1, 2): 3}, "has the key (1, 2) of type tuple"
    yield {True: 3}, "has the key True of type bool"
    yield {1.5: 3}, "has the key 1.5"
    yield {"n": collections.namedtuple("N", "x")(1)}, "client_state['n']"
    yield {"q": collections.deque()}, "client_state['q']"
    yield {"z": torch.ones(2).to_sparse()}, "client_state['z'] is a torch.sparse_coo"
    yield {"m": torch.ones(2, device="meta")}, "client_state['m']"
    yield {"k": torch.ones(2, dtype=torch.complex128)}, "client_state['k']"


@pytest.mark.parametrize(("value", "text"), list(cases_of_wrong_types()), ids=lambda v: v if isinstance(v, str) else "")
def test_other_types_are_refused_by_key(value, text):
    with pytest.raises(CheckpointTypeError) as error:
        encode_client_state(value)
    assert text in str(error.value)
    assert isinstance(error.value, TypeError)


def test_numpy_types_that_are_refused():
    np = pytest.importorskip("numpy", reason="numpy is not installed: its values are not tried")
    for value in (
        np.array(["a"]),
        np.array([object()]),
        np.array([1j]),
        np.complex64(1),
        np.datetime64("2020"),
        np.ma.array([1]),
        np.dtype("f4"),
    ):
        with pytest.raises(CheckpointTypeError, match=r"client_state\['x'\]"):
            encode_client_state({"x": value})


def test_cycles_and_depth():
    loop: list = []
    loop.append({"x": loop})
    with pytest.raises(CheckpointTypeError, match=r"client_state\[0\]\['x'\] contains itself"):
        encode_client_state(loop)
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]
    deep: list = []
    for _ in range(100000):
        deep = [deep]
    with pytest.raises(CheckpointTypeError, match="too deeply"):
        encode_client_state(deep)


def test_a_wrong_state_leaves_nothing_visible(tmp_path):
    w = CheckpointWriter(tmp_path, "t")
    w.add("w", torch.ones(4))
    w.write()
    with pytest.raises(CheckpointTypeError, match=r"client_state\['model'\]"):
        w.publish({"model": torch.nn.Linear(2, 2)})
    assert not (tmp_path / "t").exists()


def test_rng_states_resume_exactly(tmp_path):
    np = pytest.importorskip("numpy", reason="numpy is not installed: its generator is not tried")
    torch.rand(3), random.random(), np.random.rand(3), random.gauss(0, 1), np.random.randn()
    save(tmp_path, "t", {"w": torch.ones(4)}, [[("w", 0, 4)]], rank_state=lambda r: store.rng_state())
    want = torch.rand(5), [random.gauss(0, 1) for _ in range(5)], np.random.randn(5)
    with CheckpointReader(tmp_path) as r:
        store.set_rng_state(r.rank_state(0))
    assert (
        torch.equal(torch.rand(5), want[0])
        and [random.gauss(0, 1) for _ in range(5)] == want[1]
        and (np.random.randn(5) == want[2]).all()
    )


def test_nothing_is_pickled_or_evaluated():
    for module in (io, store):
        with open(module.__file__) as f:
            tree = ast.parse(f.read())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {a.name for a in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
            if isinstance(node, ast.Name):
                assert node.id not in ("eval", "exec", "compile", "__import__")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("load", "save")


# ---- Hugging Face files ----------------------------------------------------------------------------------------------


def model_tensors() -> dict[str, torch.Tensor]:
    embed = torch.randn(8, 4)
    return {
        "embed.weight": embed,
        "a.weight": torch.randn(4, 4).t(),
        "a.bias": torch.randn(4, dtype=torch.bfloat16),
        "head.weight": embed,
    }


def test_one_file_model(tmp_path):
    tensors = model_tensors()
    assert write_model(tmp_path, tensors) == ["model.safetensors"]
    with SafetensorsFile(tmp_path / "model.safetensors") as f:
        assert (
            f.metadata["format"] == "pt"
            and f.metadata["head.weight"] == "embed.weight"
            and "head.weight" not in f.keys()
        )
        for key in f.keys():
            assert same(f.tensor(key), tensors[key].contiguous())


def test_sharded_model_and_its_successors(tmp_path):
    tensors = model_tensors()
    names = write_model(tmp_path, tensors, max_shard_bytes=130)
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"]["total_size"] == 8 * 4 * 4 + 4 * 4 * 4 + 4 * 2
    for key, file in index["weight_map"].items():
        with SafetensorsFile(tmp_path / file) as f:
            assert same(f.tensor(key), tensors[key].contiguous())
    (tmp_path / "config.json").write_text("{}")
    assert write_model(tmp_path, tensors) == ["model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    write_model(tmp_path, ((k, v) for k, v in tensors.items() if k != "head.weight"), max_shard_bytes=1)
    assert (
        len([f for f in os.listdir(tmp_path) if f.endswith("-of-00003.safetensors")]) == 3
        and not (tmp_path / "model.safetensors").exists()
    )


def test_a_model_in_several_files_is_never_one_of_two_saves(tmp_path, monkeypatch):
    """They are replaced one after the other: what the disk breaks off between two left an index of both."""
    from deepc.engine.serve.export import open_weights

    write_model(tmp_path, {"a": torch.zeros(50), "b": torch.zeros(50)}, max_shard_bytes=200)
    with open_weights(tmp_path) as whole:
        assert set(whole.names) == {"a", "b"}
    replace = os.replace

    def fails(source, to):
        if "00002-of-00002" in os.fspath(to):
            raise OSError(5, "Input/output error")
        replace(source, to)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="Input/output error"):
        write_model(tmp_path, {"a": torch.ones(50), "b": torch.ones(50)}, max_shard_bytes=200)
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_weights(tmp_path)
    monkeypatch.undo()
    write_model(tmp_path, {"a": torch.ones(50), "b": torch.ones(50)}, max_shard_bytes=200)
    with open_weights(tmp_path) as whole:
        assert all(torch.equal(whole.tensor(n), torch.ones(50)) for n in "ab")
    assert len(os.listdir(tmp_path)) == 3


def test_model_errors(tmp_path):
    with pytest.raises(ArgumentError, match="two tensors are named 'a'"):
        write_model(tmp_path, [("a", torch.ones(2)), ("a", torch.ones(2))])
    with pytest.raises(ArgumentError, match="max_shard_bytes"):
        write_model(tmp_path, {}, max_shard_bytes=0)
    with pytest.raises(CheckpointTypeError, match="complex128"):
        write_model(tmp_path, {"a": torch.ones(200), "b": torch.ones(2, dtype=torch.complex128)}, max_shard_bytes=100)
    assert os.listdir(tmp_path) == []


def test_transformers_loads_it(tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: the export is not loaded by it"
    )
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path)
    assert len(write_model(tmp_path, model.state_dict(), max_shard_bytes=9000)) > 2
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_what_torch_saves_appears_whole_or_not_at_all(tmp_path):
    """pytorch_model.bin of save_16bit_model and zero_to_fp32: a full disk left half of one in a good one's place."""
    from deepc.compat.runtime.zero_to_fp32 import write_pickled

    path = tmp_path / "pytorch_model.bin"
    write_pickled(path, {"w": torch.ones(3)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"can't write .*pytorch_model.bin: File too large"):
            write_pickled(path, {"w": torch.ones(1 << 16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]
    assert torch.equal(torch.load(path, weights_only=True)["w"], torch.ones(3))


def test_latest_that_was_written_by_hand_is_told(tmp_path):
    save(tmp_path, "t", {"w": torch.ones(1)}, [[("w", 0, 1)]])
    (tmp_path / "latest").write_text("t\n")
    with pytest.raises(CheckpointError, match=r"written by hand \(it has a checksum\). Give the tag: one of \['t'\]"):
        CheckpointReader(tmp_path)
