"""What the log line costs: CPU time of training steps with and without it, in turn, on 2 ranks of 1 thread.

    python tests/bench/log.py [--models tiny 25M] [--rounds 7]

Three contenders in one process: "off" (calls that do nothing in the meter's place; the message of the gradient norm
keeps its length), "line" (the default: lines by time, no files) and "files" (metrics.jsonl as well).

"CPU time": of the whole process per step, user and system, so that the drawing of lines, the building of rows and the
thread that writes count, and waiting and other programs' time do not. "more than off": the medians of the rounds' own
differences to "off", and the share of a step that they are, with quartiles: where these lie on both sides of 0, the
cost is below what the machine lets one see. "calls": the meter's own calls around nothing, which have no noise and
leave the drawing and the writer out."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time

from common import emit, paired, quartiles, require_deepc
from train import MODELS, engine_config, make_model

STEPS = {"tiny": 200, "25M": 4}
TOKENS = {"tiny": 32, "25M": 256}


class Off:
    """The meter's interface to the engine; does nothing."""

    def __init__(self, width: int) -> None:
        self._row = [0.0] * width

    def row(self) -> list[float]:
        return self._row

    def _nothing(self, *_: object) -> None:
        pass

    begin = end = put = take = close = note = log = _nothing


def alone(meter, engine, batch, calls: int = 400) -> float:
    """Microseconds of this thread for one step's calls of the meter, around nothing: without the building of the
    message, which goes anyway."""
    import torch

    loss = torch.zeros(())
    result = engine.last_step
    rows = torch.tensor([meter.row()] * engine.world_size, dtype=torch.float64)
    began = time.thread_time()
    for _ in range(calls):
        meter.begin("forward", 0, ((), batch))
        meter.end("forward", 0, loss)
        meter.begin("backward", 0, loss)
        meter.end("backward", 0, loss)
        meter.begin("step", 0, None)
        meter.row()
        meter.put(rows[0])
        meter.take(rows)
        meter.end("step", 0, result)
    return 1e6 * (time.thread_time() - began) / calls


def put_in(engine, meter) -> None:
    """`meter` in the place of the engine's."""
    was, engine.monitor = engine.monitor, meter
    engine.events.drop(was)
    engine.events.add(meter)
    engine.norm_riders[:] = [meter if rider is was else rider for rider in engine.norm_riders]


def measure(model: str, rounds: int, folder: str) -> None:
    import torch

    deepc = require_deepc()
    from deepc.monitor import Meter

    config = engine_config("fp32", 3)
    del config["steps_per_print"]  # by time, as it comes
    engine = deepc.initialize(model=make_model(model), config=config)[0]
    os.environ["DEEPC_RUN_DIR"] = folder
    contenders = {"off": Off(Meter.ROW), "line": engine.monitor, "files": Meter(engine)}
    del os.environ["DEEPC_RUN_DIR"]
    generator = torch.Generator().manual_seed(engine.global_rank)
    x = torch.randint(0, MODELS[model]["vocab_size"], (2, TOKENS[model]), generator=generator)
    batch = {"input_ids": x, "labels": x}

    def burst(steps: int) -> tuple[float, float]:
        """Milliseconds a step: by the clock, and of this process' CPU time."""
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            engine.backward(engine(**batch).loss)
            engine.step()
        return tuple(1e3 * took / steps for took in (time.perf_counter() - began, time.process_time() - used))

    times: dict[str, list[float]] = {n: [] for n in contenders}
    used: dict[str, list[float]] = {n: [] for n in contenders}
    own: dict[str, list[float]] = {n: [] for n in contenders}
    for r in range(-1, rounds):
        for name, meter in contenders.items():
            put_in(engine, meter)
            burst(1)
            took, cpu = burst(STEPS[model])
            cost = alone(meter, engine, batch)
            if r >= 0:
                times[name].append(took)
                used[name].append(cpu)
                own[name].append(cost)
    if engine.global_rank == 0:
        step = statistics.median(times["off"])
        for name in contenders:
            ratio = None if name == "off" else paired(times["off"], times[name])
            emit("log", f"step of {model}", name, "ms", times[name], ratio=ratio, peer=None if name == "off" else "off")
            emit("log", f"CPU time of a step of {model}", name, "ms", used[name])
            if name != "off":
                more = [1e3 * (on - off) for on, off in zip(used[name], used["off"])]
                shares = [float(f"{x / 1e3 / statistics.median(used['off']):.2g}") for x in quartiles(more)]
                emit(
                    "log",
                    f"CPU time of a step of {model}",
                    f"{name}, more than off",
                    "us",
                    more,
                    share_quartiles=shares,
                )
            emit(
                "log",
                f"calls of one step of {model}",
                name,
                "us",
                own[name],
                share_of_step=float(f"{statistics.median(own[name]) / 1e3 / step:.3g}"),
            )
    for name in ("line", "files"):
        contenders[name].close()
    put_in(engine, contenders["off"])
    engine.destroy()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=sorted(STEPS), default=["tiny", "25M"])
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--ranks", type=int, default=2)
    args = p.parse_args()
    require_deepc()
    if "RANK" not in os.environ:
        from deepc.cli import main as cli

        return cli(["run", "--num_ranks", str(args.ranks), "--cpu", __file__, *sys.argv[1:]])
    import torch

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            measure(model, args.rounds, os.path.join(folder, model))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
