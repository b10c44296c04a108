"""Writing and reading one file past the page cache: deepc.offload over both rings, plain calls in threads, fio over
libaio and io_uring, and DeepSpeed's asynchronous I/O handle, in turns.

    python tests/bench/io.py --folder /nvme [--mib 1024] [--rounds 7]

MB/s; writes end when they are durable. A ratio is deepc's rate over the peer's, the median of the rounds' own. Without
fio its rows are skipped (apt install fio), and DeepSpeed's without deepspeed, libaio-dev and a compiler, with which it
builds its handle (TORCH_EXTENSIONS_DIR says where; not timed)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import best_of, emit, paired, require_deepc, skip


def fio(path: Path, nbytes: int, how: str, engine: str, depth: int) -> float:
    """MB/s of one run of fio over the file."""
    command = ["fio", "--name=deepc", f"--filename={path}", f"--rw={how}", f"--ioengine={engine}", f"--size={nbytes}"]
    command += ["--bs=1M", f"--iodepth={depth}", "--direct=1", "--end_fsync=1", "--overwrite=1", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-300:] or done.stdout.strip()[-300:]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return nbytes / (job["job_runtime"] / 1e3) / 1e6  # with the fsync at the end


class DeepSpeedAio:
    """DeepSpeed's handle in blocks of 1 MiB, as its tuning (ds_nvme_tune) sets it, from and into its own locked
    memory."""

    def __init__(self, path: Path, data, depth: int, threads: int) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        aio = AsyncIOBuilder().load(verbose=False)
        self._handle = aio.aio_handle(1 << 20, depth, False, True, threads)
        self._buffer = self._handle.new_cpu_locked_tensor(data.numel(), data)
        self._buffer.copy_(data)
        self._path = str(path)

    def __call__(self, how: str) -> None:
        if how == "read":
            self._handle.sync_pread(self._buffer, self._path, 0)
            return
        self._handle.sync_pwrite(self._buffer, self._path, 0)
        fd = os.open(self._path, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)

    def close(self) -> None:
        self._handle.free_cpu_locked_tensor(self._buffer)


def deepspeed_handles(path: Path, data, depth: int) -> dict:
    """With one thread, its default, and with one a core."""
    try:
        return {f"DeepSpeed aio, {n} thread{'s' * (n > 1)}": DeepSpeedAio(path, data, depth, n) for n in (1, 2)}
    except Exception as exc:
        skip("io", "DeepSpeed aio", f"its handle can't be had: {str(exc).splitlines()[0][:200]}")
        return {}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", default=".")
    p.add_argument("--mib", type=int, default=1024)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--depth", type=int, default=32, help="of fio")
    args = p.parse_args()
    deepc = require_deepc()
    import torch
    from deepc.observe.diagnose import disk

    nbytes = disk.size_for(args.folder, args.mib << 20)
    given = deepc.offload.check(args.folder, need_bytes=nbytes)
    data = deepc.offload.empty(nbytes, dtype=torch.uint8)
    data.view(torch.int64).random_()
    engines = ["libaio", "io_uring"] if shutil.which("fio") else []
    if not engines:
        skip("io", "fio", "fio is not installed (apt install fio)")
    with tempfile.TemporaryDirectory(prefix=".deepc-bench-", dir=args.folder) as inside:
        path = Path(inside) / "data"
        with deepc.offload.File(path, "w", reserve_bytes=nbytes) as f:
            f.write(data)
        ours = {disk.PLAIN: disk.Plain(path, data, given.direct)}
        for ring in ["io_uring"] * given.io_uring + ["threads"]:
            ours[f"deepc, {ring}"] = disk.Ours(path, data, ring, given.direct)
        ours.update(deepspeed_handles(path, data, args.depth))
        for how in ("write", "read"):
            rates: dict[str, list[float]] = {n: [] for n in [*ours, *(f"fio, {e}" for e in engines)]}
            for r in range(-1, args.rounds):
                for name, found in rates.items():
                    if name in ours:
                        began = time.perf_counter()
                        ours[name](how)
                        rate = nbytes / (time.perf_counter() - began) / 1e6
                    else:
                        rate = fio(path, nbytes, how, name.removeprefix("fio, "), args.depth)
                    if r >= 0:
                        found.append(rate)
            more = {"bytes": nbytes, "file_system": given.file_system, "direct": given.direct, "cores": os.cpu_count()}
            peers = [n for n in rates if not n.startswith("deepc")]
            for name, found in rates.items():
                emit("io", how, name, "MB/s", found, **more)
            for name in (n for n in rates if n.startswith("deepc")):
                for peer in peers:
                    emit(
                        "io", how, name, "MB/s", rates[name], ratio=paired(rates[name], rates[peer]), peer=peer, **more
                    )
                # the faster peer of each round: best_of takes the least, so of times
                least = best_of({n: [1 / x for x in rates[n]] for n in peers}, peers)
                ratio = paired(rates[name], [1 / t for t in least])
                emit("io", how, name, "MB/s", rates[name], ratio=ratio, peer="best of: " + "; ".join(peers), **more)
        for contender in ours.values():
            contender.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
