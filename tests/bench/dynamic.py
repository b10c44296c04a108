"""Tensors whose length changes: DynamicTensor beside what torch has, and a training over samples of changing length.

    python tests/bench/dynamic.py [--steps 100000] [--rounds 5] [--training]

Lengths: --steps random lengths of 1 to --rows rows of 768 floats, as a buffer that keeps its rows: the new rows of each
step are written. Contenders take turns in parts of the steps, the same for all:
DynamicTensor.resize; torch's Tensor.resize_ of one tensor (which keeps what it once had); a new tensor with a copy of
the rows that stay (as torch.cat does), from torch's allocator as it comes and from the core's heap
(deepc.memory.keep_heap). Figures: seconds per step; bytes that were copied; memory of the buffer over what is used
(mean and worst of the steps with at least 16 pages; what the kernel says of the buffer's pages is compared with what is
counted every 1,000 steps).

--training: a small GPT (plain torch, fused attention) trained by deepc for --train-steps steps on batches of random
lengths, and on batches of the longest length only: the peak of each process's memory (VmHWM), as it comes and with
torch's allocator (DEEPC_KEEP_HEAP=0)."""

from __future__ import annotations

import argparse
import gc
import json
import math
import mmap
import os
import random
import statistics
import subprocess
import sys
import time

from common import emit, machine, paired, require_deepc

WIDTH = 768
PAGE = mmap.PAGESIZE


class Dynamic:
    name, slack = "DynamicTensor", 1 / 32

    def __init__(self, rows: int) -> None:
        import deepc

        self._d = deepc.DynamicTensor((0, WIDTH), most=(rows, WIDTH), slack=self.slack)
        self.copied = 0

    def resize(self, rows: int):
        return self._d.resize(rows)

    def memory(self) -> int:
        return self._d.stats().committed


class Kept(Dynamic):
    name, slack = "DynamicTensor, slack=inf", math.inf


class Resized:
    name = "Tensor.resize_"

    def __init__(self, rows: int) -> None:
        import torch

        self._x = torch.empty(0, WIDTH)
        self.copied = 0

    def resize(self, rows: int):
        before, at, n = self._x.untyped_storage().nbytes(), self._x.data_ptr(), self._x.nbytes
        self._x.resize_(rows, WIDTH)
        if self._x.untyped_storage().nbytes() != before and at != self._x.data_ptr():
            self.copied += n  # at::native::resize_bytes_cpu copies what there was
        return self._x

    def memory(self) -> int:
        return self._x.untyped_storage().nbytes()


class Copied:
    name = "new tensor and copy"

    def __init__(self, rows: int) -> None:
        import torch

        self._x = torch.empty(0, WIDTH)
        self.copied = 0

    def resize(self, rows: int):
        import torch

        x = torch.empty(rows, WIDTH)
        stays = min(rows, len(self._x))
        x[:stays] = self._x[:stays]
        self.copied += stays * WIDTH * 4
        self._x = x
        return x

    def memory(self) -> int:
        return self._x.untyped_storage().nbytes()


class CopiedOnHeap(Copied):
    name = "new tensor and copy, keep_heap"


def resident(x) -> int:
    """Bytes of a tensor's pages that the kernel says have memory."""
    import ctypes

    first, last = x.data_ptr() // PAGE, -(-(x.data_ptr() + x.nbytes) // PAGE)
    found = (ctypes.c_ubyte * (last - first))()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first * PAGE), (last - first) * PAGE, found):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(b & 1 for b in found) * PAGE


def lengths(a) -> None:
    import deepc

    rng = random.Random(a.seed)
    sizes = [rng.randint(1, a.rows) for _ in range(a.steps)]
    part = -(-a.steps // a.rounds)
    contenders = [kind(a.rows) for kind in (Dynamic, Kept, Resized, Copied, CopiedOnHeap)]
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    over: dict[str, list[float]] = {c.name: [] for c in contenders}
    last = dict.fromkeys(seconds, 0)
    for r in range(a.rounds):
        for c in contenders[r % len(contenders) :] + contenders[: r % len(contenders)]:
            deepc.memory.keep_heap(isinstance(c, CopiedOnHeap))
            spent, steps = 0.0, sizes[r * part : (r + 1) * part]
            for k, rows in enumerate(steps):
                begin = time.perf_counter()
                x = c.resize(rows)
                if rows > last[c.name]:
                    x[last[c.name] :] = 1.0
                spent += time.perf_counter() - begin
                last[c.name] = rows
                if x.nbytes >= 16 * PAGE:
                    over[c.name].append(c.memory() / x.nbytes)
                if k % 1000 == 0:
                    if not bool((x == 1.0).all()):
                        raise SystemExit(f"{c.name}: rows were lost at step {k} of round {r}")
                    if isinstance(c, Dynamic) and not 0 <= resident(x) - x.nbytes < 2 * PAGE:
                        raise SystemExit(f"step {k}: {resident(x)} bytes of {x.nbytes} have memory")
            seconds[c.name].append(spent / len(steps))
    deepc.memory.keep_heap(False)
    mine = contenders[0]
    for c in contenders:
        emit(
            "dynamic",
            "resize and write of what is new",
            c.name,
            "s",
            seconds[c.name],
            ratio=None if c is mine else paired(seconds[c.name], seconds[mine.name]),
            peer=None if c is mine else f"{mine.name} is faster by",
            steps=a.steps,
            rows=a.rows,
            bytes_copied=c.copied,
            memory_over_used_mean=round(statistics.fmean(over[c.name]), 4),
            memory_over_used_worst=round(max(over[c.name]), 4),
        )


def train(a) -> None:
    """One process: prints the peak of its memory and what it computed."""
    import deepc
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(a.width), nn.LayerNorm(a.width)
            self.qkv, self.out = nn.Linear(a.width, 3 * a.width), nn.Linear(a.width, a.width)
            self.up, self.down = nn.Linear(a.width, 4 * a.width), nn.Linear(4 * a.width, a.width)

        def forward(self, x):
            q, k, v = self.qkv(self.n1(x)).view(*x.shape[:2], 3, a.width // 64, 64).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(x.shape))
            return x + self.down(nn.functional.gelu(self.up(self.n2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(4096, a.width), nn.Embedding(a.longest, a.width)
            self.blocks = nn.Sequential(*(Block() for _ in range(a.layers)))
            self.head = nn.Linear(a.width, 4096, bias=False)

        def forward(self, ids):
            x = self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])
            return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    engine = deepc.initialize(model=Gpt(), config=config | {"zero_optimization": {"stage": 2}})[0]
    rng, lengths = random.Random(a.seed), []
    for step in range(a.train_steps):
        length = a.longest if a.work == "longest" or step == a.train_steps // 2 else rng.randint(16, a.longest)
        loss = engine(torch.randint(4096, (4, length)))
        engine.backward(loss)
        engine.step()
        lengths.append(length)
    stats = deepc.memory.process_bytes()
    engine.destroy()
    print(json.dumps({"peak": stats["peak_rss_bytes"], "tokens": sum(lengths), "loss": loss.item()}))


def training(a) -> None:
    for how, env in (("deepc", {}), ("torch's allocator", {"DEEPC_KEEP_HEAP": "0"})):
        peaks: dict[str, list[float]] = {"random": [], "longest": []}
        for seed in range(a.train_rounds):
            for work in peaks:
                out = subprocess.run(
                    [sys.executable, *sys.argv, "--work", work, "--seed", str(seed)],
                    env={**os.environ, "DEEPC_LOG_LEVEL": "WARNING", **env},
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
                peaks[work].append(json.loads(out.splitlines()[-1])["peak"] / 2**20)
        emit(
            "dynamic",
            "peak of a training on random lengths",
            how,
            "MiB",
            peaks["random"],
            ratio=paired(peaks["random"], peaks["longest"]),
            peer="over the peak on batches of the longest length",
            longest_mib=round(statistics.median(peaks["longest"])),
            worst=round(max(r / q for r, q in zip(*peaks.values(), strict=True)), 4),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("steps", 100_000),
        ("rounds", 5),
        ("rows", 2048),
        ("seed", 0),
        ("width", 256),
        ("layers", 6),
        ("longest", 768),
        ("train-steps", 40),
        ("train-rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--work", default="")
    a = parser.parse_args()
    require_deepc()
    if a.work:
        return train(a)
    print(json.dumps(machine()), flush=True)
    gc.disable()
    return training(a) if a.training else lengths(a)


if __name__ == "__main__":
    main()
