"""The update of a step with masters and moments on disk, against what disk and arithmetic alone take.

    python tests/bench/nvme.py --folder /nvme [--melems 48] [--rounds 7] [--precision bf16]

One rank, in turns: the update in memory ("arithmetic"); reading and writing the same bytes at the same time, past the
page cache, with nothing computed ("disk"), in each of RAW's ways, of which the fastest of a round counts; the update on
disk. The ratio is max(disk, arithmetic) over the update on disk, the median of the rounds' own: 1 is perfect overlap.
`wait`: the share of the update that waited for the disk."""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import time

from common import emit, paired, require_deepc


def engine_for(elems: int, precision: str, folder: str | None, buffers: int, cell: int):
    import deepc
    import torch

    model = torch.nn.Linear(elems // 1024, 1024, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,  # accumulators that stay
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 0},
        "deepc": {"log": {"format": "none"}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if folder is not None:
        config["zero_optimization"]["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": folder,
            "buffer_count": buffers,
        }
        config["zero_optimization"]["sub_group_size"] = cell
    engine = deepc.initialize(model=model, config=config)[0]
    engine.state.acc.normal_(generator=torch.Generator().manual_seed(1))
    return engine


RAW = ((32, 1), (4, 4), (1, 16), (1, 48))  # MiB of a window, windows on their way each way


class Raw:
    """Every byte is read and written once, reads before writes as in a step; nothing is computed. windows: of `mib`
    MiB, so many on their way each way."""

    def __init__(self, file, nbytes: int, mib: int, windows: int) -> None:
        import torch
        from deepc import offload

        self.file, self.nbytes, self.window, self.windows = file, nbytes, mib << 20, windows
        self.there, self.back = (offload.empty(windows * self.window, dtype=torch.uint8) for _ in range(2))

    def __call__(self) -> None:
        reading: collections.deque = collections.deque()
        writing: collections.deque = collections.deque()
        for i, at in enumerate(range(0, self.nbytes, self.window)):
            n, slot = min(self.window, self.nbytes - at), i % self.windows * self.window
            if len(reading) == self.windows:
                self._turn(reading, writing)
            reading.append((at, n, slot, self.file.read_async(self.there[slot : slot + n], at)))
        while reading:
            self._turn(reading, writing)
        while writing:
            writing.popleft().wait()

    def _turn(self, reading, writing) -> None:
        """What was read first is there, and its place is written."""
        at, n, slot, handle = reading.popleft()
        handle.wait()
        if len(writing) == self.windows:
            writing.popleft().wait()
        writing.append(self.file.write_async(self.back[slot : slot + n], at))


def raw_file(folder: str, nbytes: int):
    """A file of written blocks."""
    import torch
    from deepc import offload

    file = offload.File(folder, "nameless", reserve_bytes=nbytes)
    block = offload.empty(32 << 20, dtype=torch.uint8)
    for at in range(0, nbytes, block.numel()):
        file.write(block[: min(block.numel(), nbytes - at)], at)
    return file


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", default=".")
    p.add_argument("--melems", type=int, default=48, help="millions of parameters")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    p.add_argument("--buffers", type=int, default=0, help="offload_optimizer.buffer_count: at least so many cells")
    p.add_argument("--cell", type=int, default=1 << 17, help="sub_group_size")
    args = p.parse_args()
    deepc = require_deepc()
    elems = args.melems * 1_000_000 // 1024 * 1024
    with tempfile.TemporaryDirectory(prefix=".deepc-bench-", dir=args.folder) as inside:
        memory, tiered = (engine_for(elems, args.precision, f, args.buffers, args.cell) for f in (None, inside))
        stream = tiered.state.tier.stream
        file = raw_file(inside, stream.disk_bytes)
        raw = {f"disk, {n} x {mib} MiB": Raw(file, stream.disk_bytes, mib, n) for mib, n in RAW}
        runs = {
            "arithmetic": lambda: memory.optimizer.update(1.0),
            **raw,
            "update on disk": lambda: tiered.optimizer.update(1.0),
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        waits: list[float] = []
        for r in range(-2, args.rounds):
            for name, run in runs.items():
                waited, began = stream.wait_ns, time.perf_counter()
                run()
                took = time.perf_counter() - began
                if r >= 0:
                    times[name].append(took * 1e3)
                    if name == "update on disk":
                        waits.append((stream.wait_ns - waited) / 1e6 / (took * 1e3))
        info, given = stream.info(), deepc.offload.check(inside)
        more = {
            "elems": elems,
            "precision": args.precision,
            "slots": tiered.plan.disk.slots,
            "cell_elems": stream.cell_elems,
            "bytes_each_way": stream.disk_bytes,
            "ring": info["ring"],
            "direct": info["direct"],
            "file_system": given.file_system,
            "cores": os.cpu_count(),
        }
        for name, found in times.items():
            emit("nvme", "update", name, "ms", found, **more)
        times["disk"] = [min(ways) for ways in zip(*(times.pop(name) for name in raw))]
        emit("nvme", "update", "disk", "ms", times["disk"], **more)
        bound = [max(a, b) for a, b in zip(times["arithmetic"], times["disk"])]
        emit(
            "nvme",
            "update",
            "update on disk",
            "ms",
            times["update on disk"],
            ratio=paired(bound, times["update on disk"]),
            peer="max(disk, arithmetic)",
            **more,
        )
        emit("nvme", "wait", "update on disk", "share", waits, **more)
        memory.destroy()
        tiered.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
