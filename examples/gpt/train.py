"""Trains a byte-level GPT on real text with deepc, in at most three minutes on two cores.

    make train                                              two ranks on the CPU, or all GPUs
    deepc run --num_gpus 2 examples/gpt/train.py            the same under the launcher (or torchrun)
    python examples/gpt/train.py                            one process
    python examples/gpt/train.py --ranks 4 --stage 2        starts four ranks by itself

The loop is the one every deepc (or DeepSpeed) script has: forward, engine.backward(loss), engine.step(). All the rest
of this file is what a run needs around it: options, a budget of time, evaluation, a picture, a sample."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

import data
import deepc
import model as gpt
import report
import torch
import torch.distributed as dist
from deepc.precision import recommended_dtype

BITS = 1 / math.log(2)  # a nat in bits
WARMUP_STEPS = 20
UNKNOWN_STEPS = 10**6  # until the speed is measured


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description="Trains a byte-level GPT with deepc.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument(
        "--size",
        choices=sorted(gpt.SIZES),
        default="base",
        help="tiny 0.1 M, small 3 M, base 11 M, large 25 M parameters",
    )
    p.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage")
    p.add_argument(
        "--precision",
        choices=["auto", "fp32", "bf16", "fp16"],
        default="auto",
        help="auto: bf16 where the hardware computes in it",
    )
    p.add_argument(
        "--ranks",
        help="a number, or auto: all GPUs, or 2 on the CPU; without it, one process (or what the launcher started)",
    )
    p.add_argument("--device", choices=["auto", "cpu"], default="auto", help="cpu: stay off the GPUs (with --ranks)")
    p.add_argument("--steps", type=int, help="optimizer steps in all; default: what fits into --minutes")
    p.add_argument(
        "--minutes", type=float, default=2.75, help="training stops after this, or after --steps, whichever comes first"
    )
    p.add_argument("--micro-batch", type=int, default=2, help="sequences per rank and pass")
    p.add_argument("--accumulation", type=int, help="passes per optimizer step; default: 1, or 8 with --pipeline")
    p.add_argument("--pipeline", type=int, default=1, metavar="STAGES", help="ranks that share the model by its blocks")
    p.add_argument("--tensor", type=int, default=1, metavar="RANKS", help="ranks that share every layer")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--data",
        default=os.environ.get("DATA") or None,
        help="a file or folder of text; default: Python's standard library",
    )
    p.add_argument("--config", "--deepspeed_config", help="a DeepSpeed JSON whose keys replace those of this script")
    p.add_argument(
        "--out",
        type=Path,
        default=Path("runs/gpt"),
        help="checkpoint, metrics.jsonl, loss.csv, loss.png and sample.txt go here",
    )
    p.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    p.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    args = p.parse_args(argv)
    args.accumulation = args.accumulation or (8 if args.pipeline > 1 else 1)
    return args


def start_ranks(args: argparse.Namespace) -> int | None:
    """Starts this script again on --ranks ranks and returns the exit code; None if this process is to train."""
    if args.ranks is None or "RANK" in os.environ:
        return None
    from deepc.cli import main

    gpus = torch.cuda.device_count() if args.device == "auto" else 0
    ranks = (str(gpus) if gpus else str(min(2, len(os.sched_getaffinity(0))))) if args.ranks == "auto" else args.ranks
    return main(["run", "--num_ranks", ranks, *(["--cpu"] if args.device == "cpu" else []), __file__, *sys.argv[1:]])


def make_config(args: argparse.Namespace, precision: str) -> dict:
    """A DeepSpeed configuration, as it could stand in ds_config.json."""
    warmup = WARMUP_STEPS if args.steps is None else max(2, min(WARMUP_STEPS, args.steps // 5))
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": args.lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": args.steps or UNKNOWN_STEPS,
                "warmup_num_steps": warmup,
                "warmup_type": "linear",
                "cos_min_ratio": 0.05,
            },
        },
        "deepc": {
            "run_dir": str(args.out),
            "log": {"seconds": 5},
        },  # run.json and metrics.jsonl go to --out, a line every 5 seconds
    }
    if args.pipeline > 1:
        config["pipeline"] = {"stages": args.pipeline}
    if args.tensor > 1:
        config["tensor_parallel"] = {
            "autotp_size": args.tensor,
            "partition_config": {
                "layer_specs": [
                    {"patterns": [r".*\.qkv$"], "partition_type": "column", "shape": [3, -1]},
                    {"patterns": [r".*\.up$"], "partition_type": "column"},
                    {"patterns": [r".*\.(proj|down)$"], "partition_type": "row"},
                    {"patterns": ["tokens$"], "partition_type": "vocabulary"},
                    {"patterns": ["head$"], "partition_type": "head"},
                ]
            },
        }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def choose_config(args: argparse.Namespace) -> tuple[dict, str, str]:
    """(configuration, precision, why this one)."""
    given = json.loads(Path(args.config).read_text()) if args.config else {}
    if args.precision != "auto":
        precision, why = args.precision, "asked for"
    else:
        precision, why = recommended_dtype("cuda" if torch.cuda.is_available() else "cpu")
    if {"fp16", "bf16"} & given.keys():
        precision = next((p for p in ("fp16", "bf16") if given.get(p, {}).get("enabled")), "fp32")
        why = f"as {args.config} says"
    return {**make_config(args, precision), **given}, precision, why


class Budget:
    """Steps and seconds that a run may take. Rank 0's clock decides for all: `share` is a collective of one small
    message a step."""

    def __init__(self, engine, steps: int | None, seconds: float) -> None:
        self.engine, self.steps, self.seconds = engine, steps, seconds
        self.begin, self.done_before = time.monotonic(), engine.global_steps
        self.spent = 0.0
        self.total = steps or UNKNOWN_STEPS
        self._speed_since: tuple[int, float] | None = None

    def tick(self, want_report: bool) -> tuple[bool, bool]:
        """(training is over, it is time to report), the same on every rank. Also estimates how many steps fit."""
        message = torch.tensor(
            [time.monotonic() - self.begin, float(want_report)], dtype=torch.float64, device=self.engine.device
        )
        dist.broadcast(message, 0)
        self.spent, report_now = message.tolist()
        done = self.engine.global_steps
        if done == self.done_before + 3:  # the first steps also warm the caches up
            self._speed_since = (done, self.spent)
        self.total = self._estimate(done)
        return done >= self.total or self.spent >= self.seconds, bool(report_now)

    def _estimate(self, done: int) -> int:
        fits = UNKNOWN_STEPS
        if self._speed_since and done > self._speed_since[0]:
            per_step = (self.spent - self._speed_since[1]) / (done - self._speed_since[0])
            fits = done + max(0, int((self.seconds - self.spent) / per_step))
        return min(self.steps or UNKNOWN_STEPS, fits)

    @property
    def share(self) -> float:
        return max(
            self.spent / self.seconds,
            (self.engine.global_steps - self.done_before) / max(1, self.total - self.done_before),
        )


def loss_of(engine, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """Without gradients; None on the ranks of a pipeline that have not its last stage."""
    if engine.mesh.pp == 1:
        return engine(x, y)
    losses = engine.eval_batch(iter([(x, y)]), reduce_output=None, num_micro_batches=1)
    return losses[0] if losses else None


@torch.no_grad()
def evaluate(engine, text: torch.Tensor, context: int, count: int, batch: int = 8) -> float:
    """Bits per byte over `count` windows (or as many as there are) spread over the text and shared by the ranks."""
    engine.eval()
    starts = data.validation_starts(text, context, count)
    each = -(-len(starts) // engine.world_size)
    mine = starts[engine.global_rank * each : (engine.global_rank + 1) * each]
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for first in range(
        0, each, batch
    ):  # every rank runs as many passes as the others; one without windows counts for nothing
        part = mine[first : first + batch]
        x, y = data.windows(text, part if len(part) else starts[:1], context)
        loss = loss_of(engine, x.to(engine.device), y.to(engine.device))
        if loss is not None:
            total += torch.tensor([loss.item() * len(part), len(part)], dtype=torch.float64, device=engine.device)
    dist.all_reduce(total)
    engine.train()
    return float(total[0] / total[1]) * BITS


def measure(engine, loss: float) -> tuple[float, int]:
    """(loss in bits per byte averaged over the ranks, memory of all ranks in bytes: PSS, which counts a shared page
    once)."""
    both = torch.tensor(
        [loss / dist.get_world_size(), engine.memory_summary()["pss_bytes"]], dtype=torch.float64, device=engine.device
    )
    dist.all_reduce(both)
    return float(both[0]) * BITS, int(both[1])


def train(engine, scheduler, corpus: data.Corpus, args: argparse.Namespace, points: list[report.Point]) -> Budget:
    """The loop. Appends to `points`; leaves the engine trained."""
    context, rank, world = engine.module.config.context, engine.global_rank, engine.world_size
    micro, passes = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    sampler = data.Sampler(corpus.train, context, micro, args.seed)
    tokens_per_step = micro * passes * world * context
    budget = Budget(engine, args.steps, args.minutes * 60)
    adjust = args.steps is None and not args.config
    before, tokens_before = (points[-1].seconds, points[-1].tokens) if points else (0.0, 0)
    reported = evaluated = loss = 0.0

    def add_point() -> None:
        nonlocal evaluated
        bits, memory = measure(engine, loss)
        done = engine.global_steps - budget.done_before
        seconds = max(time.monotonic() - budget.begin, 1e-9)
        validation = None
        if budget.share - evaluated >= 0.1:  # a glance; the verdict comes at the end
            validation, evaluated = evaluate(engine, corpus.validation, context, 32), budget.share
        points.append(
            report.Point(
                engine.global_steps,
                tokens_before + done * tokens_per_step,
                before + seconds,
                bits,
                validation,
                engine.get_lr()[0],
                done * tokens_per_step / seconds,
                memory,
            )
        )
        if validation is not None:  # the log and the report show it beside the loss, in the same unit
            engine.log({"val_loss": validation / BITS})

    while True:
        over, report_now = budget.tick(want_report=time.monotonic() - reported > 0.5)
        if over:
            break
        engine.monitor.set_total_steps(budget.total if budget.total < UNKNOWN_STEPS else 0, about=args.steps is None)
        if adjust:
            scheduler.total_num_steps = max(budget.total, WARMUP_STEPS + 1)
        step, loss = engine.global_steps, 0.0
        batches = (sampler.batch((step * passes + i) * world + rank) for i in range(passes))
        if engine.mesh.pp > 1:
            loss = float(engine.train_batch(batches))
        else:
            for x, y in batches:
                output = engine(x.to(engine.device), y.to(engine.device))
                engine.backward(output)
                engine.step()
                loss += float(output.detach()) / passes
        if report_now:
            add_point()
            reported = time.monotonic()
    if engine.global_steps > budget.done_before and points[-1].step != engine.global_steps:
        add_point()
    engine.monitor.pause()
    return budget


def conclude(engine, corpus: data.Corpus, args: argparse.Namespace, points: list[report.Point], precision: str) -> None:
    """Evaluates, saves, draws, writes a sample."""
    order0, context = corpus.bits_per_byte_order0, engine.module.config.context
    bits = evaluate(engine, corpus.validation, context, 256)
    engine.log({"val_loss": bits / BITS})
    train_bits, memory = measure(engine, points[-1].train / BITS if points else math.nan)
    last = points[-1] if points else report.Point(engine.global_steps, 0, 0.0, train_bits, None, 0.0, 0.0, memory)
    points.append(
        report.Point(
            engine.global_steps, last.tokens, last.seconds, last.train, bits, last.lr, last.tokens_per_second, memory
        )
    )
    engine.save_checkpoint(
        args.out / "checkpoint", client_state={"size": args.size, "precision": precision, "bits_per_byte": bits}
    )
    engine.eval()
    if engine.mesh.pp > 1 and dist.get_rank() != 0:
        return
    model = engine.module if engine.mesh.pp == 1 else whole_model(args)
    sample = gpt.generate(model, b"def ", args.sample, context=context, device=engine.device, seed=args.seed)
    if dist.get_rank() != 0:
        return
    print(
        f"validation {bits:.3f} bits per byte; order-0 entropy of the same text {order0:.3f}: {order0 - bits:.3f}"
        " below it"
    )
    write_results(engine, corpus, args, points, precision, sample, order0 - bits)


def whole_model(args: argparse.Namespace) -> gpt.GPT:
    """Of a pipeline, whose ranks have parts of it: from its checkpoint."""
    from deepc.checkpoint.tool import export
    from safetensors.torch import load_file

    model = gpt.GPT(gpt.SIZES[args.size]).eval()
    for name in export(args.out / "checkpoint", args.out / "model"):
        if name.endswith(".safetensors"):
            model.load_state_dict(load_file(args.out / "model" / name), strict=False)
    return model


def write_results(
    engine,
    corpus: data.Corpus,
    args: argparse.Namespace,
    points: list[report.Point],
    precision: str,
    sample: bytes,
    gain: float,
) -> None:
    last = points[-1]
    report.write_csv(args.out / "loss.csv", points)
    (args.out / "sample.txt").write_bytes(sample)
    summary = {
        "steps": last.step,
        "tokens": last.tokens,
        "seconds": round(last.seconds, 1),
        "ranks": dist.get_world_size(),
        "stage": args.stage,
        "pipeline": args.pipeline,
        "tensor": args.tensor,
        "precision": precision,
        "size": args.size,
        "validation_bits_per_byte": last.validation,
        "order0_bits_per_byte": corpus.bits_per_byte_order0,
        "below_order0": gain,
        "tokens_per_second": last.tokens_per_second,
        "memory_bytes_all_ranks": last.memory,
        "data": corpus.source,
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = (
        f"byte-level GPT, {args.size}, ZeRO-{args.stage}, {precision}, {dist.get_world_size()}"
        f" rank{'s' if dist.get_world_size() > 1 else ''}{f', pipeline of {args.pipeline}' * (args.pipeline > 1)}"
        f"{f', tensors over {args.tensor}' * (args.tensor > 1)}"
    )
    missing = report.write_png(args.out / "loss.png", points, corpus.bits_per_byte_order0, title)
    picture = (
        f"loss curve {args.out / 'loss.png'}"
        if missing is None
        else f"no picture, {missing}; its numbers are in {args.out / 'loss.csv'}"
    )
    print(f"checkpoint {args.out / 'checkpoint'}, {picture}")
    print(f"\na sample that the model wrote, from 'def ':\n{'-' * 80}\n{sample.decode(errors='replace')}\n{'-' * 80}")


def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def main() -> int:
    args = parse()
    code = start_ranks(args)
    if code is not None:
        return code
    config, precision, why = choose_config(args)
    torch.manual_seed(args.seed)
    model = gpt.GPT(gpt.SIZES[args.size])
    corpus = data.load(args.data, model.config.context)
    say(
        f"data: {corpus.source}, {corpus.files} files, {len(corpus.train):,} bytes to train on,"
        f" {len(corpus.validation):,} to validate; order-0 entropy {corpus.bits_per_byte_order0:.3f} bits per byte"
    )
    say(f"precision: {precision} ({why}){'' if precision == 'fp32' else ', master weights in fp32'}")
    say(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {args.size}")

    sample = data.Sampler(corpus.train, model.config.context, args.micro_batch, args.seed).batch(0)
    engine, _, _, scheduler = deepc.initialize(
        model=model,
        config=config,
        model_parameters=model.parameters(),
        sample_batch=sample if args.pipeline > 1 else None,  # to see where the model is to be cut
    )
    points: list[report.Point] = []
    if args.resume:
        path, state = engine.load_checkpoint(args.out / "checkpoint")
        if path is None:
            raise FileNotFoundError(
                f"--resume: there is no checkpoint in {args.out / 'checkpoint'}; train once without --resume"
            )
        points = report.read_csv(args.out / "loss.csv", engine.global_steps)
        say(f"resumed at step {engine.global_steps} from {path} ({state['bits_per_byte']:.3f} bits per byte)")
    args.out.mkdir(parents=True, exist_ok=True)
    budget = train(engine, scheduler, corpus, args, points)
    say(f"trained {engine.global_steps - budget.done_before} steps in {budget.spent:.0f} s")
    conclude(engine, corpus, args, points, precision)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
