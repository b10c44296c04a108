"""deepc.offload.array: an array on disk that is read and written in parts, in a file without a name."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def make(tmp_path):
    from deepc.offload.array import DiskArray

    made = []

    def array(numel=3 * 4096 + 17, dtype=torch.float32, **kw):
        made.append(DiskArray(tmp_path, numel, dtype, "the test's array", **kw))
        return made[-1]

    yield array
    for a in made:
        a.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_part_is_read_and_written(make, dtype):
    n = 5 * 4096 + 17
    array, mirror = make(n, dtype), torch.zeros(n, dtype=dtype)
    g = torch.Generator().manual_seed(0)
    places = [(0, n), (1, 4095), (4096, 4096), (4095, 2), (n - 1, 1), (8000, 9000), (3, 0)]
    for begin, length in [*places, *reversed(places)]:
        values = torch.randn(length, generator=g)
        array.put(begin, values)
        mirror[begin : begin + length] = values.to(dtype)
        for at, m in places:
            assert torch.equal(array.get(at, m), mirror[at : at + m])
    assert torch.equal(array.get(0, n), mirror)


def test_it_begins_as_zeros_and_leaves_nothing(make, tmp_path):
    array = make()
    assert not array.get(0, array.numel).any() and os.listdir(tmp_path) == []


def test_what_was_changed_behind_it_is_an_error_that_names_the_elements(make):
    from deepc.errors import DamagedError

    array = make()
    array.put(0, torch.arange(3 * 4096.0))
    with open(array.path, "r+b", buffering=0) as f:
        f.seek(4 * (4096 + 100))
        f.write(b"\x01")
    assert array.get(0, 4096)[5] == 5, "other blocks can be read"
    with pytest.raises(DamagedError, match=r"the test's array.*\[4096, 8192\)"):
        array.get(5000, 1)
    array.put(4096, torch.ones(4096))  # a whole block is written without a look at the old one
    assert array.get(4096, 4096).eq(1).all()


def test_a_file_that_ends_too_early_is_an_error_with_its_name(make):
    from deepc.errors import DiskError

    array = make()
    os.truncate(array.path, 4096)
    with pytest.raises(DiskError, match="the test's array.*without a name"):
        array.get(0, array.numel)


def test_no_such_folder(tmp_path):
    from deepc.errors import DiskError
    from deepc.offload.array import DiskArray

    with pytest.raises(DiskError, match="no folder"):
        DiskArray(tmp_path / "missing", 10, torch.float32, "x")


def test_arguments(make):
    from deepc.errors import ArgumentError

    array = make()
    with pytest.raises(ArgumentError, match="outside"):
        array.get(array.numel + 4096, 1)
    with pytest.raises(ArgumentError, match="outside"):
        array.put(array.numel - 1, torch.zeros(2))
    with pytest.raises(ArgumentError, match="float32"):
        array.read(0, torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="whole blocks"):
        array.write_async(1, torch.zeros(4096))


def test_two_that_share_a_file(make):
    one = make()
    two = make(path=one.path, sums=one.sums)
    one.put(100, torch.ones(5000))
    assert torch.equal(two.get(0, one.numel), one.get(0, one.numel))
    two.put(0, torch.full((10,), 2.0))
    assert one.get(0, 11).tolist() == [2.0] * 10 + [0.0]


def test_another_process_opens_that_file_and_no_other(make):
    from deepc.errors import DiskError

    one = make()
    place = one.place()
    assert place.path() == one.path
    with pytest.raises(DiskError, match="PID namespaces"):
        place._replace(inode=place.inode + 1).path()
    with pytest.raises(DiskError, match="can't be reached"):
        place._replace(descriptor=10**6).path()


def test_a_window_has_memory_for_what_is_under_way(make):
    from deepc.offload.array import Window

    array = make(8 * 4096)
    array.put(0, torch.arange(8 * 4096.0))
    window = Window(array)
    for lo in range(0, 8 * 4096, 2 * 4096):
        window.fetch(lo, lo + 2 * 4096)
        window.ready(lo)
        window.tensor(lo, lo + 2 * 4096).add_(1)
        window.store(lo, lo + 2 * 4096)
        window.settle(1)
    window.settle()
    assert torch.equal(array.get(0, array.numel), torch.arange(8 * 4096.0) + 1)
    assert not window.tensor(0, 8 * 4096).any(), "its memory has gone back"


class _LargePages:
    """A map of a kernel with pages of 64 KiB (arm64): whole pages go, and none in part."""

    def __init__(self, window):
        self.bytes = window.tensor(0, window.array.numel).view(torch.uint8)

    def madvise(self, advice, begin, length):
        assert begin % 65536 == 0
        self.bytes[begin : -(-(begin + length) // 65536) * 65536] = 0


def test_large_pages_have_elements_of_two_parts(make, monkeypatch):
    from deepc.offload import array as module

    monkeypatch.setattr(module, "_PAGE", 65536)
    array = make(16 * 4096)
    window = module.Window(array)
    window._map = _LargePages(window)
    ends = [0, 3, 4, 13, 16]  # 64 KiB are 4 of these blocks
    for first in range(4):
        values = window.tensor(0, array.numel).copy_(torch.arange(1.0, array.numel + 1))
        lo, hi = (4096 * end for end in ends[first : first + 2])
        window.drop(lo, hi)
        assert not values[lo:hi].any() and values[:lo].all() and values[hi:].all()


def test_places(tmp_path):
    from deepc.errors import DamagedError
    from deepc.offload.array import DiskPlaces

    places = DiskPlaces(tmp_path, "values")
    a = places.put(torch.arange(10.0))
    b = places.put(torch.arange(5000, dtype=torch.int64).view(50, 100))
    a = places.put(torch.arange(10.0) + 1, a)
    assert places.get(a, torch.float32).tolist() == [float(i + 1) for i in range(10)]
    assert torch.equal(places.get(b, torch.int64), torch.arange(5000))
    assert places.get(places.put(torch.empty(0)), torch.float32).numel() == 0
    with open(places._own.path, "r+b", buffering=0) as f:
        f.seek(b.offset)
        f.write(b"\x07")
    with pytest.raises(DamagedError, match="values"):
        places.get(b, torch.int64)
    places.close()
