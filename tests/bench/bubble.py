"""How long ranks of a pipeline wait, measured and simulated: 2 stages with 1 thread each.

    python tests/bench/bubble.py --rounds 7

The model and the cut are those of pipelines.py. Each round measures one batch of each schedule (engine.measure_batch):
the part of the makespan in which ranks wait, and what the simulation of the schedule says with the medians of the same
batch's times. A rank that is slowed by something else makes both differ."""

from __future__ import annotations

import argparse
import statistics

import pipelines
import torch
from common import emit, require_deepc, version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--svg", metavar="FOLDER", help="draw the last batch of each schedule, measured and simulated")
    args = parser.parse_args()
    deepc = require_deepc()
    from deepc.plan.predict.timeline import svg

    torch.set_num_threads(1)
    deepc.init_distributed()
    rank = torch.distributed.get_rank()
    draw = torch.Generator().manual_seed(1)
    sizes = (pipelines.MICRO * pipelines.MICRO_BATCHES, 257)
    ids = torch.randint(0, pipelines.VOCAB, sizes, generator=draw)
    for kind in args.schedules:
        method = "type:BesideTheCut" if kind in ("1f1b", "gpipe", "zb-h1") else "uniform"
        model = deepc.pipe.PipelineModule(
            pipelines.parts(), num_stages=2, loss_fn=pipelines.loss_of, partition_method=method, schedule=kind
        )
        engine, *_ = deepc.initialize(model=model, config=pipelines.config())

        def batch():
            return iter(zip(*(t.split(pipelines.MICRO) for t in (ids[:, :-1], ids[:, 1:]))))

        engine.train_batch(batch())
        found = [engine.measure_batch(batch()) for _ in range(args.rounds)]
        engine.destroy()
        if rank:
            continue
        real = [100 * m.timeline.bubble for m in found]
        simulated = [100 * m.predicted.bubble for m in found]
        makespan = statistics.median(m.timeline.makespan / m.predicted.makespan for m in found)
        emit("bubble", f"2 stages, {pipelines.MICRO_BATCHES} micro-batches, {kind}", "measured", "% waiting", real)
        emit(
            "bubble",
            f"2 stages, {pipelines.MICRO_BATCHES} micro-batches, {kind}",
            "simulated with the measured times",
            "% waiting",
            simulated,
            points=round(statistics.median(a - b for a, b in zip(real, simulated)), 2),
            makespan_measured_to_simulated=round(makespan, 3),
            torch=version("torch"),
        )
        if args.svg:
            for name, timeline in (("measured", found[-1].timeline), ("simulated", found[-1].predicted)):
                with open(f"{args.svg}/{kind}.{name}.svg", "w") as f:
                    f.write(svg(found[-1].schedule, timeline, f"{kind}, {name}"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
