"""Pipelines of 2 stages with 1 thread each: deepc's schedules against torch.distributed.pipelining's and DeepSpeed's
PipelineModule, on one model with one cut, 8 micro-batches a batch, AdamW in fp32.

    python tests/bench/pipelines.py --rounds 5
    python tests/bench/pipelines.py --contenders deepc-1f1b deepc-zb-v torch-1f1b+keep

The model is a GPT of 12 blocks whose head takes as long as two of them, so that there is an even cut: the embedding and
7 blocks, 5 blocks and the head. All get that cut, but `deepc-auto` ("pipeline": {"stages": 2} on the model as it is,
cut by measured time) and `deepspeed-parameters` (DeepSpeed's default cut). `independent`: two processes that train the
whole model each and never talk, what no pipeline can exceed. As in train.py all take turns, a peer may have an
allocator (+keep, +huge, +glibc), and memory is sampled in bursts of their own."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import train
from common import emit, paired, require_deepc, version
from contenders import ALLOCATORS, ENVIRONMENT, HYPER

WIDTH, HEADS, BLOCKS, VOCAB, MICRO, MICRO_BATCHES, CUT = 384, 6, 12, 9216, 2, 8, 7
BASES = {
    "independent": "as many processes that never talk",
    "torch-gpipe": "torch.distributed.pipelining GPipe",
    "torch-1f1b": "torch.distributed.pipelining 1F1B",
    "torch-zbv": "torch.distributed.pipelining ZBV",
    "deepspeed": "DeepSpeed PipelineModule",
    "deepspeed-parameters": "DeepSpeed PipelineModule, its own cut",
    "deepc-gpipe": "deepc GPipe",
    "deepc-1f1b": "deepc 1F1B",
    "deepc-interleaved": "deepc interleaved 1F1B",
    "deepc-zb-h1": "deepc ZB-H1",
    "deepc-zb-v": "deepc ZB-V",
    "deepc-auto": "deepc 1F1B, cut by itself",
}
DEFAULT = (
    "independent+keep torch-1f1b torch-1f1b+keep torch-zbv+keep deepspeed deepspeed+keep deepspeed-parameters+keep"
    " deepc-1f1b deepc-zb-h1 deepc-zb-v deepc-auto"
).split()


class _Named(NamedTuple):
    base: str
    allocator: str = ""


class Contender(_Named):
    """Of benches in which everybody runs on all ranks; tensor.py's too."""

    BASES = BASES

    @classmethod
    def parse(cls, text: str) -> Contender:
        base, _, allocator = text.partition("+")
        if base not in cls.BASES or (allocator and (allocator not in ALLOCATORS or base.startswith("deepc"))):
            raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(cls.BASES)}, peers with +ALLOCATOR")
        return cls(base, allocator)

    def __str__(self) -> str:
        return self.base + ("+" + self.allocator if self.allocator else "")

    @property
    def title(self) -> str:
        return self.BASES[self.base] + (f", {ALLOCATORS[self.allocator]}" if self.allocator else "")

    @property
    def mine(self) -> bool:
        return self.base.startswith("deepc")

    def ranks(self, world: int) -> int:
        return world

    def environment(self) -> dict[str, str]:
        return ENVIRONMENT.get(self.allocator, {})

    def missing(self) -> str:
        if self.base.startswith("deepspeed") and version("deepspeed") is None:
            return "deepspeed is not installed (run.py --install-peers)"
        return ""


# ---- the model -------------------------------------------------------------------------------------------------------
def parts() -> list[Any]:
    """Its layers, each called with what the one before returned."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(1024, WIDTH)

        def forward(self, ids):
            return self.tokens(ids) + self.places(torch.arange(ids.shape[1]))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
            x = x + self.proj(mixed)
            return x + self.down(F.gelu(self.up(self.ln2(x))))

    class BesideTheCut(Block):
        """What partition_method="type:BesideTheCut" cuts between."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

        def forward(self, x):
            return self.out(self.norm(x))

    torch.manual_seed(0)
    return [Embed(), *[BesideTheCut() if i in (CUT - 1, CUT) else Block() for i in range(BLOCKS)], Head()]


def loss_of(logits, labels):
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def chain():
    """The layers as one module, which returns the loss."""
    from torch import nn

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = parts()
            self.first, self.blocks, self.last = layers[0], nn.ModuleList(layers[1:-1]), layers[-1]

        def forward(self, ids, labels):
            x = self.first(ids)
            for block in self.blocks:
                x = block(x)
            return loss_of(self.last(x), labels)

    return Chain()


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": HYPER},
        **more,
    }


# ---- steps -----------------------------------------------------------------------------------------------------------
def with_torch(kind: str, rank: int) -> Callable[[Any], float]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining

    dist.init_process_group("gloo")
    layers = parts()
    cuts = [0, CUT + 1, len(layers)]
    if kind == "zbv":  # rank 0 has the first and the last quarter
        cuts = [0, 4, CUT + 1, 11, len(layers)]
    mine = [s for s in range(len(cuts) - 1) if s in (rank, 3 - rank)]
    stages = [
        pipelining.PipelineStage(nn.Sequential(*layers[cuts[s] : cuts[s + 1]]), s, len(cuts) - 1, torch.device("cpu"))
        for s in mine
    ]
    schedule: Any = {
        "gpipe": lambda: pipelining.ScheduleGPipe(stages[0], MICRO_BATCHES, loss_of),
        "1f1b": lambda: pipelining.Schedule1F1B(stages[0], MICRO_BATCHES, loss_of),
        "zbv": lambda: pipelining.ScheduleZBVZeroBubble(stages, MICRO_BATCHES, loss_of),
    }[kind]()
    optimizer = torch.optim.AdamW([p for s in stages for p in s.submod.parameters()], fused=True, **HYPER)

    def step(batch: Any) -> float:
        ids, labels = batch
        losses: list[Any] = []
        first, last = 0 in mine, len(cuts) - 2 in mine
        schedule.step(*([ids] if first else []), **({"target": labels, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told = torch.tensor([sum(map(float, losses)) / MICRO_BATCHES])  # all ranks know it, as from the others
        dist.all_reduce(told)
        return told.item()

    return step


def by_batches(engine: Any) -> Callable[[Any], float]:
    def step(batch: Any) -> float:
        ids, labels = (t.split(MICRO) for t in batch)
        return float(engine.train_batch(iter(zip(ids, labels))))

    return step


def with_deepspeed(own_cut: bool) -> Callable[[Any], float]:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    method = "parameters" if own_cut else "type:BesideTheCut"
    model = PipelineModule(parts(), num_stages=2, loss_fn=loss_of, partition_method=method)
    engine, *_ = deepspeed.initialize(
        model=model, config=config(), model_parameters=[p for p in model.parameters() if p.requires_grad]
    )
    return by_batches(engine)


def with_deepc(kind: str) -> Callable[[Any], float]:
    import torch

    deepc = require_deepc()
    if kind == "auto":
        ids = torch.zeros(MICRO, 256, dtype=torch.int64)
        asked = config(pipeline={"stages": 2})
        return by_batches(deepc.initialize(model=chain(), config=asked, sample_batch=(ids, ids))[0])
    method = "type:BesideTheCut" if kind in ("1f1b", "gpipe", "zb-h1") else "uniform"
    model = deepc.pipe.PipelineModule(parts(), num_stages=2, loss_fn=loss_of, partition_method=method, schedule=kind)
    return by_batches(deepc.initialize(model=model, config=config())[0])


def alone() -> Callable[[Any], float]:
    import torch

    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def step(batch: Any) -> float:
        total = 0.0
        # as many tokens as a rank of a pipeline computes on: half of the batch
        for ids, labels in list(zip(*(t.split(MICRO) for t in batch)))[: MICRO_BATCHES // 2]:
            loss = model(ids, labels) * 2 / MICRO_BATCHES
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


class Rank(train.Rank):
    def prepare(self, args: argparse.Namespace) -> tuple[list[Any], Callable[[Any], float]]:
        import torch

        if args.contender.allocator == "keep" and not require_deepc().memory.keep_heap():
            raise RuntimeError("deepc.memory.keep_heap() has no effect here")
        draw = torch.Generator().manual_seed(1234)
        ids = [torch.randint(0, VOCAB, (MICRO * MICRO_BATCHES, args.tokens + 1), generator=draw) for _ in range(4)]
        kind, _, how = args.contender.base.partition("-")
        makers: dict[str, Callable[[], Callable[[Any], float]]] = {
            "independent": alone,
            "torch": lambda: with_torch(how, self.rank),
            "deepspeed": lambda: with_deepspeed(how == "parameters"),
            "deepc": lambda: with_deepc(how),
        }
        return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in ids], makers[kind]()


class Pair(train.Pair):
    program = __file__

    def options(self, args: argparse.Namespace) -> list[str]:
        return ["--tokens", str(args.tokens)]


# ---- the driver ------------------------------------------------------------------------------------------------------
def tell(args: argparse.Namespace, bursts: dict[Contender, list[dict]], memory: dict[Contender, float]) -> None:
    figure = f"GPT of {BLOCKS} x {WIDTH}, 2 stages, {MICRO_BATCHES} micro-batches, fp32"
    tokens = args.steps * MICRO * MICRO_BATCHES * args.tokens
    speed = {c: [tokens / b["seconds"] for b in rounds] for c, rounds in bursts.items()}
    for c, values in speed.items():
        emit("pipelines", figure, c.title, "tokens/s", values, loss=round(bursts[c][-1]["loss"], 5))
        emit("pipelines", figure, c.title, "MiB, sum over ranks", [memory[c]])
    for c in (c for c in speed if c.mine):
        for other in (o for o in speed if o != c and (not o.mine or o.base == "deepc-1f1b")):
            emit(
                "pipelines",
                figure,
                c.title,
                "tokens/s",
                speed[c],
                ratio=paired(speed[c], speed[other]),
                peer=other.title,
                memory=round(memory[other] / memory[c], 3),
            )
    check_losses(bursts)


def check_losses(bursts: dict[Contender, list[dict]]) -> None:
    """All pipelines did the same steps on the same data: their losses differ by 1e-4 at most. RuntimeError if not."""
    last = {str(c): rounds[-1]["loss"] for c, rounds in bursts.items() if c.base != "independent"}
    middle = statistics.median(last.values())
    if wrong := {name: x for name, x in last.items() if not abs(x - middle) <= 1e-4 * abs(middle)}:
        raise RuntimeError(f"losses differ by more than 1e-4 of {middle:.6f}: {wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", type=Contender.parse, default=[Contender.parse(c) for c in DEFAULT])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="timed batches per burst, after one to warm up")
    parser.add_argument("--ranks", type=int, default=2, choices=[2], help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=256, help="length of a sequence; a micro-batch has 2")
    parser.set_defaults(warmup=0, sampled=1)
    parser.add_argument("--contender", type=Contender.parse, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        Rank(args).loop()
    else:
        tell(args, *train.take_turns("pipelines", Pair, args.contenders, lambda c: c.title, args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
