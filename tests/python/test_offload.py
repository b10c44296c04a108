"""deepc.offload: tensors in and out of files, in the background too; extents that change all at once; messages."""

from __future__ import annotations

import errno
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepc import counters, offload
from deepc.errors import (
    ArgumentError,
    ConfigError,
    DamagedError,
    DeepcError,
    DiskError,
    DiskFullError,
    OutOfMemoryError,
    UnsupportedError,
)

RINGS = ["io_uring", "threads"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


@pytest.fixture(params=RINGS)
def ring(request, tmp_path) -> str:
    if request.param == "io_uring" and not (disk := offload.check(tmp_path)).io_uring:
        pytest.skip(disk.why_not_io_uring)
    return request.param


def some(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 50).to(dtype)


# ---- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("direct", [True, False])
def test_tensors_come_back_as_they_were(tmp_path, ring, direct):
    tensors = [some(1 + 7777 * i, dtype, i).view(1, -1) for i, dtype in enumerate(DTYPES)]
    tensors.append(torch.tensor(3.5))
    tensors.append(torch.empty(0))
    offsets = [sum(t.nbytes + 5 for t in tensors[:i]) for i in range(len(tensors))]
    with offload.File(tmp_path / "x", "w", ring=ring, direct=direct, block_bytes=8192, depth=4) as f:
        f.write(tensors, offsets)
        f.sync()
        found = [torch.full_like(t, 1) for t in tensors]
        f.read(found, offsets)
        assert f.info()["ring"] == ring and f.info()["size_bytes"] == offsets[-2] + tensors[-2].nbytes
        assert direct or "no O_DIRECT: direct=False asks" in f.info()["why"]
    assert all(torch.equal(a, b) for a, b in zip(tensors, found))
    with offload.File(tmp_path / "x", ring=ring) as f:
        f.read(found[3], offsets[3])
        assert torch.equal(found[3], tensors[3])
        with pytest.raises(ArgumentError, match="opened for reading"):
            f.write(found[3])


def test_what_is_aligned_is_not_copied(tmp_path, ring):
    aligned = offload.empty(100, 1024)
    assert aligned.data_ptr() % 4096 == 0 and aligned.shape == (100, 1024)
    assert offload.empty(5, dtype=torch.int8).data_ptr() % 4096 == 0
    with offload.File(tmp_path / "x", "w", ring=ring) as f:
        aligned.fill_(2.0)
        before = counters()["disk_bytes_bounced"]
        registered = f.register(aligned)
        assert registered or "registered" in f.info()["why"]
        f.write(aligned, 4096)
        f.read(aligned, 4096)
        assert counters()["disk_bytes_bounced"] == before
        skewed = torch.empty(aligned.nbytes + 4096, dtype=torch.int8)[1:][: aligned.nbytes]
        f.read(skewed, 4096)
        assert (counters()["disk_bytes_bounced"] > before) == f.info()["direct"]
        assert torch.equal(skewed.clone().view(torch.float32), aligned.flatten())


def test_requests_in_the_background(tmp_path, ring):
    with offload.File(tmp_path / "x", "w", ring=ring, depth=2, block_bytes=4096) as f:
        tensors = [some(10000, torch.float32, i) for i in range(8)]
        handles = [f.write_async(t, i * t.nbytes) for i, t in enumerate(tensors)]
        for handle in reversed(handles):
            while not handle.done():
                pass
            handle.wait()
            handle.wait(timeout=5)
            handle.wait(timeout=math.inf)
        found = [torch.empty(10000) for _ in tensors]
        version = found[0]._version
        handles = [f.read_async(t, i * t.nbytes) for i, t in enumerate(found)]
        assert found[0]._version > version, "autograd must see that it was written"
        del handles[:4]  # a handle that is dropped is waited for
        handles[0].wait()
        with pytest.raises(ArgumentError, match="timeout 0"):
            handles[0].wait(0)
    assert all(torch.equal(a, b) for a, b in zip(tensors, found)), "closing waits"
    with pytest.raises(ArgumentError, match="is closed"):
        handles[0].wait()
    with pytest.raises(ArgumentError, match="is closed"):
        f.read(found[0])
    f.close()


def test_messages(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(DiskError, match=r"open .*x: No such file or directory \(errno 2\)") as caught:
        offload.File(path)
    assert isinstance(caught.value, OSError) and isinstance(caught.value, DeepcError)
    with offload.File(path, "c") as f:
        with pytest.raises(ArgumentError, match="must be contiguous and on the CPU"):
            f.write(torch.ones(4, 4).t())
        with pytest.raises(ArgumentError, match="on the CPU"):
            f.write(torch.ones(4, device="meta"))
        with pytest.raises(ArgumentError, match="resolve_conj"):
            f.write(torch.ones(4, dtype=torch.complex64).conj())
        with pytest.raises(ArgumentError, match="number 1 is a int"):
            f.write([torch.ones(4), 3], [0, 1])
        with pytest.raises(ArgumentError, match="2 tensors and 1 offsets"):
            f.write([torch.ones(4), torch.ones(4)], 0)
        with pytest.raises(ArgumentError, match="offset -1"):
            f.read(torch.ones(4), -1)
        with pytest.raises(DiskError, match=r"read of 4 bytes at offset 16 of .*x: the file ends"):
            f.write(torch.ones(4))
            f.read(torch.ones(5))
        with pytest.raises(ArgumentError, match="multiples of 4096"):
            f.register(torch.ones(5))
        f.read(torch.ones(4))
    for kwargs, said in (
        ({"mode": "a"}, "mode 'a': expected one of r, r\\+, c, w"),
        ({"ring": "libaio"}, "ring 'libaio'"),
        ({"depth": -1}, "depth -1"),
        ({"depth": 5000}, "depth is 5000; it must be from 1 to 4096"),
        ({"block_bytes": 1000}, "multiple of 4096"),
        ({"reserve_bytes": 5}, 'must be opened with mode="r\\+"'),
    ):
        with pytest.raises(ArgumentError, match=said):
            offload.File(path, **kwargs)
    with offload.File(path) as f, pytest.raises(ArgumentError, match='opened for reading; open it with mode="r\\+"'):
        f.write(torch.ones(4))
    with pytest.raises(DamagedError, match='open it with mode="w" to begin anew'):
        offload.Extents(path, [5])
    with pytest.raises(ArgumentError, match="negative"):
        offload.empty(-1)
    with pytest.raises(DiskFullError, match="errno"):
        offload.File(path, "c", reserve_bytes=1 << 62)


@pytest.fixture
def device(tmp_path):
    """The path of a block device of 1 MiB."""
    tool = shutil.which("losetup", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if tool is None or os.geteuid():
        pytest.skip("needs root and losetup, which make a block device of a file")
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    made = subprocess.run([tool, "--find", "--show", tmp_path / "disk"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"losetup makes no block device here: {made.stderr.strip()}")
    yield made.stdout.strip()
    subprocess.run([tool, "--detach", made.stdout.strip()], check=True)


@pytest.mark.full
def test_a_block_device_is_a_file_of_its_size(device):
    with offload.File(device, "r+", reserve_bytes=1 << 20) as f:
        f.write(torch.ones(1000), 12345)
        assert f.info()["size_bytes"] == 1 << 20
    with pytest.raises(DiskFullError, match="room for 1048577 bytes in"):
        offload.File(device, "r+", reserve_bytes=(1 << 20) + 1)
    with pytest.raises(DiskFullError, match="room for"):
        offload.Extents(device, [1 << 20])
    for value in (1.0, 2.0):  # what was committed goes with "w" alone
        with offload.Extents(device, [4000, 100], "w") as x:
            assert x.generation == 0
            x.write(0, torch.full((1000,), value))
            x.commit()
        with offload.Extents(device, [4000, 100]) as x:
            assert x.generation == 1
            x.read(0, found := torch.empty(1000))
            assert torch.equal(found, torch.full((1000,), value))
    with offload.File(device, "r+") as f:
        f.write(torch.ones(2048))
    with pytest.raises(DamagedError, match="is not a file of extents"):
        offload.Extents(device, [4000, 100])
    with pytest.raises(DiskError, match="Not a directory"):
        offload.Stream(device, {"a": torch.float32}, 10)


def test_the_variable_chooses_the_ring(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPC_RING", "threads")
    with offload.File(tmp_path / "x", "w") as f:
        assert f.info()["ring"] == "threads"
    monkeypatch.setenv("DEEPC_RING", "libaio")
    with pytest.raises(ConfigError, match="auto, uring or threads"):
        offload.File(tmp_path / "x", "w")


def test_a_full_disk_and_a_limit_are_exceptions(tmp_path, ring):
    if os.path.exists("/dev/full"):
        with offload.File("/dev/full", "r+", ring=ring) as f:
            with pytest.raises(DiskFullError, match=r"at offset 0 of /dev/full: No space left on device \(errno 28\)"):
                f.write(torch.ones(5000))
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, was[1]))
        with offload.File(tmp_path / "x", "w", ring=ring) as f:
            with pytest.raises(DiskFullError, match=f"errno {errno.EFBIG}.*ulimit -f"):
                f.write(torch.ones(1 << 19))
            f.write(torch.ones(1 << 18))  # what fits can still be written
        with pytest.raises(DiskFullError, match="ulimit -f"):
            offload.check(tmp_path, need_bytes=1 << 21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
        signal.signal(signal.SIGXFSZ, handler)


def test_check(tmp_path):
    disk = offload.check(tmp_path, need_bytes=1 << 16)
    assert disk.free_bytes > 0 and disk.file_system and disk.direct == (not disk.why_not_direct)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DiskFullError, match="has .* GB free, .* GB are needed"):
        offload.check(tmp_path, need_bytes=1 << 62)
    with pytest.raises(ArgumentError, match="need_bytes 18446744073709551617 is out of range"):
        offload.check(tmp_path, need_bytes=(1 << 64) + 1)  # which passed for 1
    with pytest.raises(DiskError, match="make the folder first"):
        offload.check(tmp_path / "none")
    if disk.lock_bytes < 1 << 62:
        with pytest.raises(OutOfMemoryError, match="ulimit -l"):
            offload.check(tmp_path, lock_bytes=1 << 62)


def test_a_forked_child_opens_its_own(tmp_path, ring):
    with offload.File(tmp_path / "x", "w", ring=ring) as f:
        f.write(torch.arange(1000.0))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    f.read(torch.empty(1000))
                except DeepcError as exc:
                    code = 0 if "before a fork" in str(exc) else 2
                f.close()
                with offload.File(tmp_path / "x", ring=ring) as own:
                    found = torch.empty(1000)
                    own.read(found)
                    code = code or (0 if found[999] == 999 else 3)
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        found = torch.empty(1000)
        f.read(found)
        assert found[999] == 999


# ---- extents ---------------------------------------------------------------------------------------------------------
def test_extents_change_all_at_once(tmp_path, ring):
    path = tmp_path / "states"
    first, second = [[some(5000 + i, torch.float32, 10 * g + i) for i in range(3)] for g in range(2)]
    with offload.Extents(path, [t.nbytes for t in first], ring=ring) as x:
        assert len(x) == 3 and x.generation == 0 and x.copies == 2
        with pytest.raises(DeepcError, match="extent 0 of .*states was never written"):
            x.read(0, torch.empty(1))
        for handle in [x.write_async(i, t) for i, t in enumerate(first)]:
            handle.wait()
        x.commit()
        x.write(1, second[1])  # lost with the process
        assert x[1] == offload.Extent(first[1].nbytes, second[1].nbytes, 2)
        found = torch.empty_like(first[1])
        x.read(1, found)
        assert torch.equal(found, second[1])
    with offload.Extents(path, mode="r+", ring=ring) as x:
        assert x.generation == 1 and x[1].generation == 1
        x.read(1, found)
        assert torch.equal(found, first[1])
        x.write(0, second[0])
        x.rollback()
        found = torch.empty_like(first[0])
        x.read(0, found)
        assert torch.equal(found, first[0])
        with pytest.raises(DeepcError, match="open for writing already"):  # one mode of two: each waits for 2 s
            offload.Extents(path, *((None, "r+") if ring == "io_uring" else ([7], "w")))
        with offload.Extents(path, mode="r") as reader:  # "w" has emptied nothing
            reader.read(0, found)
            assert torch.equal(found, first[0]) and [e.nbytes for e in reader] == [t.nbytes for t in first]
        with pytest.raises(ArgumentError, match="holds 20000 bytes, 4 are asked for"):
            x.read(0, torch.empty(1))
        with pytest.raises(ArgumentError, match="has no extent 3"):
            x.write(3, torch.empty(1))
        with pytest.raises(ArgumentError, match="has no extent 9"):
            x[9]
        assert x.info()["ring"] == ring
    with pytest.raises(ArgumentError, match="extent 2 of .* has room for"):
        offload.Extents(path, [t.nbytes for t in first[:2]] + [7])
    for capacities in ([], [-1], ["a"]):
        with pytest.raises(ArgumentError, match="capacities"):
            offload.Extents(path, capacities)
    with offload.Extents(path, [7], "w", ring=ring) as x:
        assert list(x) == [offload.Extent(7, 0, 0)]


@pytest.mark.parametrize("copies", [1, 2])
def test_damage_is_an_error_that_names_the_extent(tmp_path, copies):
    path = tmp_path / "states"
    value = some(3000, torch.float32, 1)
    with offload.Extents(path, [value.nbytes] * 2, copies=copies) as x:
        for i in range(2):
            x.write(i, value)
        x.commit(durable=False)
    raw = bytearray(path.read_bytes())
    at = raw.rindex(value.numpy().tobytes()[:64])  # extent 1's
    raw[at + 1000] ^= 1
    path.write_bytes(bytes(raw))
    with offload.Extents(path, mode="r+") as x:
        found = torch.empty_like(value)
        x.read(0, found)
        assert torch.equal(found, value)
        handle = x.read_async(1, found)
        with pytest.raises(DamagedError, match=r"extent 1 of .*states, generation 1, is torn or damaged: checksum"):
            handle.wait()
        with pytest.raises(DamagedError):
            handle.wait()
        x.write(1, value)
        x.read(1, found)
    text = tmp_path / "text"
    text.write_text("no extents")
    with pytest.raises(DamagedError, match="is not a file of extents"):
        offload.Extents(text, [4])


_WRITER = """
import sys
import torch
from deepc import offload
x = offload.Extents(sys.argv[1], [40000] * 4)
print("open", flush=True)
for generation in range(x.generation + 1, 1 << 30):
    for i in range(4):
        x.write(i, torch.full((10000,), float(generation * 10 + i)))
    x.commit(durable=False)
    print(generation, flush=True)
"""


@pytest.mark.full  # the C test kills in the quick class
def test_killed_while_it_writes(tmp_path):
    """From Python too; a thousand kills are in tests/c/test_offload.cpp."""
    path, env = tmp_path / "states", dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(Path(offload.__file__).parents[2]), env.get("PYTHONPATH", "")])
    least = 0
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=env)
        lines = [child.stdout.readline().strip() for _ in range(4)]
        child.kill()
        lines += child.stdout.read().split()
        child.wait()
        child.stdout.close()
        assert lines[0] == "open"
        said = int(lines[-1])
        with offload.Extents(path, mode="r") as x:
            now = x.generation
            assert now in (said, said + 1) and now > least
            for i in range(4):
                found = torch.empty(10000)
                x.read(i, found)
                assert bool((found == now * 10 + i).all())
        least = now


def test_io_uring_that_is_not_there_is_an_error(tmp_path):
    if offload.check(tmp_path).io_uring:
        with offload.File(tmp_path / "x", "w", ring="io_uring") as f:
            assert f.info()["ring"] == "io_uring"
    else:
        with pytest.raises(UnsupportedError, match="DEEPC_RING=auto"):
            offload.File(tmp_path / "x", "w", ring="io_uring")


# ---- streams ---------------------------------------------------------------------------------------------------------
def test_a_walk_over_a_stream_is_the_same_work_in_memory(tmp_path, ring):
    arrays = {"weight": torch.float32, "momentum": torch.bfloat16, "scale": torch.float32}
    n, weight, momentum = 10_000, some(10_000, torch.float32, 1), torch.zeros(10_000, dtype=torch.bfloat16)
    per = {"scale": 64}
    with offload.Stream(tmp_path, arrays, n, cell_elems=1024, slots=3, ring=ring, per=per) as stream:
        stream.write("scale", 0, torch.arange(157.0))
        assert stream.cells == 10 and stream.info()["ring"] == ring and not os.listdir(tmp_path)
        stream.write("weight", 0, weight)
        for _ in range(3):
            with stream.walk() as cells:
                for cell in cells:
                    w, m = cell.tensor("weight"), cell.tensor("momentum")
                    assert torch.equal(cell.tensor("scale"), torch.arange(cell.begin // 64, -(-cell.end // 64)).float())
                    assert len(w) == cell.end - cell.begin
                    m.mul_(0.5).add_(w)
                    w.sub_(m, alpha=0.1)
            momentum.mul_(0.5).add_(weight)
            weight.sub_(momentum, alpha=0.1)
        assert torch.equal(stream.read("weight", 0, torch.empty(n)), weight)
        assert torch.equal(stream.read("momentum", 0, torch.empty(n, dtype=torch.bfloat16)), momentum)
        assert torch.equal(stream.read("weight", 1000, torch.empty(100)), weight[1000:1100])
        disk, memory = offload.stream_bytes(arrays, n, cell_elems=1024, slots=3)
        assert (disk, memory) == (stream.disk_bytes, stream.memory_bytes)


def test_a_walk_that_is_left_keeps_what_was_done(tmp_path):
    with offload.Stream(tmp_path, {"x": torch.float32}, 4000, cell_elems=1000) as stream:
        walk = stream.walk(1)
        with pytest.raises(KeyError), walk as cells:
            for cell in cells:
                cell.tensor("x").fill_(1.0)
                if cell.number == 2:
                    raise KeyError
        assert walk.at == 2
        wanted = torch.zeros(4000)
        wanted[1000:2000] = 1.0
        assert torch.equal(stream.read("x", 0, torch.empty(4000)), wanted)
        with stream.walk(walk.at, reads=[]) as cells:
            for cell in cells:
                cell.tensor("x").fill_(2.0)
        wanted[2000:] = 2.0
        assert torch.equal(stream.read("x", 0, torch.empty(4000)), wanted)


def test_an_array_may_be_named_twice(tmp_path):
    with offload.Stream(tmp_path, {"x": torch.float32, "y": torch.float32}, 4000, cell_elems=1000) as stream:
        stream.write("x", 0, torch.arange(4000.0))
        with stream.walk(reads=["x", "x"], writes=("x", "x")) as cells:
            for cell in cells:
                cell.tensor("x").add_(1.0)
        assert torch.equal(stream.read("x", 0, torch.empty(4000)), torch.arange(1.0, 4001.0))


def test_autograd_sees_what_is_read_into_a_tensor(tmp_path):
    with (
        offload.Stream(tmp_path, {"x": torch.float32}, 4) as stream,
        offload.File(tmp_path / "x", "w") as file,
        offload.Extents(tmp_path / "y", [16], mode="w") as extents,
    ):
        file.write(torch.ones(4))
        extents.write(0, torch.ones(4))
        extents.commit()
        for read in (
            lambda out: stream.read("x", 0, out),
            lambda out: file.read(out),
            lambda out: extents.read(0, out),
        ):
            w, out = torch.ones(4, requires_grad=True), torch.ones(4)
            loss = (w * out).sum()  # saves `out`
            read(out)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        with torch.inference_mode():  # which counts no versions
            assert stream.read("x", 0, torch.ones(4)).tolist() == [0.0] * 4


def test_wrong_windows_are_errors(tmp_path):
    with offload.Stream(tmp_path, {"x": torch.float32}, 4000) as stream:
        for call, text in [
            (lambda: stream.read("y", 0, torch.empty(1)), "no array 'y'"),
            (lambda: stream.read("x", 3999, torch.empty(2)), "there are 4000"),
            (lambda: stream.write("x", 0, torch.ones(3, dtype=torch.float64)), "the tensor torch.float64"),
            (lambda: stream.write("x", 0, torch.ones(4, 4)[:, 0]), "contiguous"),
            (lambda: stream.walk(0, 2).__enter__(), "of 1"),
        ]:
            with pytest.raises(ArgumentError, match=text):
                call()
        with stream.walk() as cells:
            next(cells)
            with pytest.raises(DeepcError, match="in a walk"):
                stream.read("x", 0, torch.empty(1))
    with pytest.raises(ArgumentError, match="closed"):
        stream.flush()
    with pytest.raises(ArgumentError, match="arrays"):
        offload.Stream(tmp_path, {}, 10)
    with pytest.raises(ArgumentError, match="an item for 64 elements, and cells are of 100"):
        offload.Stream(tmp_path, {"x": torch.float32}, 1000, cell_elems=100, per={"x": 64})
    with pytest.raises(DiskError, match="nowhere"):
        offload.Stream(tmp_path / "nowhere", {"x": torch.float32}, 10)
