"""DeepNVMe's handle under the name deepspeed: what it reads and writes, what it counts, what it refuses."""

from __future__ import annotations

import os

import pytest
import torch
from deepc.errors import ArgumentError, DiskError


@pytest.fixture
def handle(deepspeed):
    from deepspeed.ops.aio import AsyncIOBuilder

    assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME]
    return AsyncIOBuilder().load().aio_handle(1024, 2, True, False, 3)


def test_it_says_what_it_was_made_with(handle):
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1024, 2, 3)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (True, False)
    assert handle.get_alignment() % 4096 == 0


@pytest.mark.parametrize("nbytes", [1, 4096, 10_000, 1 << 20])
def test_round_trip(handle, tmp_path, nbytes):
    path, data = str(tmp_path / "a"), torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    assert handle.sync_pwrite(data, path, 0) == 1
    assert (tmp_path / "a").read_bytes() == data.numpy().tobytes()
    out = torch.zeros_like(data)
    assert handle.sync_pread(out, path, 0) == 1
    assert torch.equal(out, data)
    assert handle.read(out.zero_(), path, True) == handle.write(data, path, True) == 1
    assert torch.equal(out, data)


def test_many_at_once_at_offsets_and_by_descriptor(handle, tmp_path):
    path, parts = tmp_path / "a", [torch.full((n,), n % 251, dtype=torch.uint8) for n in (4096, 100, 8192)]
    path.write_bytes(b"")
    places = [0, 4096, 8192]
    for part, at in zip(parts[:2], places):
        assert handle.async_pwrite(part, str(path), at) == 0
    fd = os.open(path, os.O_WRONLY)
    assert handle.async_pwrite(buffer=parts[2], fd=fd, file_offset=places[2]) == 0
    assert handle.wait() == 3 and handle.wait() == 0
    os.close(fd)
    there = path.read_bytes()
    outs = [torch.empty_like(p) for p in parts]
    for part, out, at in zip(parts, outs, places):
        assert there[at : at + part.numel()] == part.numpy().tobytes()
        assert handle.async_pread(out, str(path), at) == 0
    alone = torch.empty_like(parts[0])
    assert handle.sync_pread(alone, str(path), 0) == 1, "of those that were started it counts none"
    assert handle.wait() == 3
    assert all(torch.equal(o, p) for o, p in zip(outs, parts))


def test_locked_tensors(handle):
    tensor = handle.new_cpu_locked_tensor(3000, torch.empty(0, dtype=torch.float16))
    assert tensor.dtype == torch.float16 and tensor.shape == (3000,) and tensor.data_ptr() % 4096 == 0
    assert handle.is_pinned(tensor) and handle.is_pinned(tensor[10:20])
    assert not handle.is_pinned(torch.empty(8))
    assert handle.free_cpu_locked_tensor(tensor) and not handle.free_cpu_locked_tensor(tensor)
    other = type(handle)()
    shared = handle.new_cpu_locked_tensor(3000, torch.empty(0))
    assert other.is_pinned(shared[10:20]) and other.free_cpu_locked_tensor(shared) and not handle.is_pinned(shared)


def test_failures_are_told_and_leave_it_usable(handle, tmp_path):
    short = tmp_path / "short"
    short.write_bytes(b"abc")
    with pytest.raises(DiskError, match="missing"):
        handle.sync_pread(torch.empty(8), str(tmp_path / "missing"), 0)
    assert handle.async_pread(torch.empty(1000), str(short), 0) == 0
    good = torch.empty(3, dtype=torch.uint8)
    assert handle.async_pread(good, str(short), 0) == 0
    with pytest.raises(DiskError, match="short"):
        handle.wait()
    assert bytes(good.tolist()) == b"abc" and handle.wait() == 0
    with pytest.raises(ArgumentError, match="name a file"):
        handle.async_pwrite(good)
    assert handle.sync_pwrite(good, str(short), 0) == 1


def test_scripts_may_ask_for_rocm_and_are_told_that_nothing_is_built(deepspeed, monkeypatch):
    from deepc.errors import UnsupportedError
    from deepspeed.ops.op_builder import OpBuilder

    assert OpBuilder.installed_rocm_version() == (0, 0) and not OpBuilder.is_rocm_pytorch()
    monkeypatch.setattr(torch.version, "hip", "6.2.41133-dd7f95766")
    assert OpBuilder.installed_rocm_version() == (6, 2) and OpBuilder.is_rocm_pytorch()
    with pytest.raises(UnsupportedError, match="compiles nothing"):
        OpBuilder()
