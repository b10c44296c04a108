"""Tensor parallelism over 2 ranks with 1 thread each: deepc's against torch's own (parallelize_module on DTensors), on
transformers' Llama with one batch, AdamW in fp32.

    python tests/bench/tensor.py --rounds 5

Both cut attention and MLPs by heads and width, embedding and head by vocabulary, and compute the loss from each rank's
part of the logits (torch: loss_parallel; `torch-gathered`: on whole ones). `torch-on-deepc` runs torch's code over
the backend "deepc" instead of Gloo. `data-parallel`: deepc on the same ranks with half of the batch each, what two
ranks do that need not share a layer. `independent`: two processes that train the whole model on half of the batch each
and never talk. As in train.py all take turns, a peer may have an allocator (+keep, +huge, +glibc), and memory is
sampled in bursts of their own."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import pipelines
import train
from common import emit, paired, require_deepc
from contenders import HYPER

SIZES = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=6)
VOCAB, SAMPLES = 8192, 8
BASES = {
    "independent": "as many processes that never talk",
    "torch": "torch parallelize_module",
    "torch-gathered": "torch parallelize_module, whole logits",
    "torch-on-deepc": 'torch parallelize_module on backend "deepc"',
    "data-parallel": "deepc, data-parallel",
    "deepc": "deepc",
    "deepc-gathered": "deepc, whole logits",
}
DEFAULT = "independent+keep torch torch+keep torch-gathered+keep torch-on-deepc+keep data-parallel deepc".split()


class Contender(pipelines.Contender):
    BASES = BASES


def make_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=1024, **SIZES)).train()


def loop(model: Any, optimizer: Any, around: Callable[[], Any] = contextlib.nullcontext) -> Callable[[Any], float]:
    def step(ids: Any) -> float:
        with around():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    return step


def with_torch(kind: str) -> Callable[[Any], float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    if kind == "on-deepc":
        require_deepc()
    dist.init_process_group("deepc" if kind == "on-deepc" else "gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, gathered = make_model(), kind == "gathered"
    column, row = ColwiseParallel, RowwiseParallel
    plan: dict[str, Any] = {
        "model.embed_tokens": row(input_layouts=Replicate()),
        "lm_head": column(output_layouts=Replicate()) if gathered else column(use_local_output=False),
    }
    for i in range(SIZES["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        plan |= {f"{layer}.self_attn.{n}_proj": column() for n in "qkv"} | {f"{layer}.self_attn.o_proj": row()}
        plan |= {f"{layer}.mlp.{n}_proj": column() for n in ("gate", "up")} | {f"{layer}.mlp.down_proj": row()}
    parallelize_module(model, mesh, plan)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]  # the fused step takes no mixture
    rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": cut}, {"params": rest}], fused=True, **HYPER)
    return loop(model, optimizer, contextlib.nullcontext if gathered else loss_parallel)


def with_deepc(kind: str, world: int) -> Callable[[Any], float]:
    deepc = require_deepc()
    tensor: dict[str, Any] = {} if kind == "data-parallel" else {"autotp_size": world}
    if kind == "deepc-gathered":
        tensor["vocab_parallel_lm_head"] = False
    engine, *_ = deepc.initialize(
        model=make_model(),
        config={
            "train_batch_size": SAMPLES,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "tensor_parallel": tensor,
            "optimizer": {"type": "AdamW", "params": HYPER},
        },
    )

    def step(ids: Any) -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


def alone() -> Callable[[Any], float]:
    import torch

    model = make_model()
    return loop(model, torch.optim.AdamW(model.parameters(), fused=True, **HYPER))


class Rank(train.Rank):
    def prepare(self, args: argparse.Namespace) -> tuple[list[Any], Callable[[Any], float]]:
        import torch

        if args.contender.allocator == "keep" and not require_deepc().memory.keep_heap():
            raise RuntimeError("deepc.memory.keep_heap() has no effect here")
        draw = torch.Generator().manual_seed(1234)
        ids = [torch.randint(0, VOCAB, (SAMPLES, args.tokens), generator=draw) for _ in range(4)]
        base = args.contender.base
        if base in ("independent", "data-parallel"):  # as many tokens as a rank's share of the work
            ids = [x.chunk(args.ranks)[self.rank].contiguous() for x in ids]
        if base == "independent":
            return ids, alone()
        kind, _, how = base.partition("-")
        return ids, with_torch(how) if kind == "torch" else with_deepc(base, args.ranks)


class Pair(train.Pair):
    program = __file__

    def options(self, args: argparse.Namespace) -> list[str]:
        return ["--tokens", str(args.tokens), "--ranks", str(args.ranks)]


# ---- the driver ------------------------------------------------------------------------------------------------------
def tell(args: argparse.Namespace, bursts: dict[Contender, list[dict]], memory: dict[Contender, float]) -> None:
    figure = f"Llama of {SIZES['num_hidden_layers']} x {SIZES['hidden_size']}, {SAMPLES} x {args.tokens} tokens, fp32"
    tokens = args.steps * SAMPLES * args.tokens
    speed = {c: [tokens / b["seconds"] for b in rounds] for c, rounds in bursts.items()}
    for c, values in speed.items():
        emit("tensor", figure, c.title, "tokens/s", values, loss=round(bursts[c][-1]["loss"], 5))
        emit("tensor", figure, c.title, "MiB, sum over ranks", [memory[c]])
    for c in (c for c in speed if c.mine):
        for other in (o for o in speed if not o.mine):
            emit(
                "tensor",
                figure,
                c.title,
                "tokens/s",
                speed[c],
                ratio=paired(speed[c], speed[other]),
                peer=other.title,
                memory=round(memory[other] / memory[c], 3),
            )
    pipelines.check_losses(
        {c: b for c, b in bursts.items() if c.base != "data-parallel"}
    )  # whose ranks tell that of their half


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", type=Contender.parse, default=[Contender.parse(c) for c in DEFAULT])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per burst, after one to warm up")
    parser.add_argument("--ranks", type=int, default=2, choices=[2], help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=256, help="length of a sequence")
    parser.set_defaults(warmup=1, sampled=1)
    parser.add_argument("--contender", type=Contender.parse, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        Rank(args).loop()
    else:
        tell(args, *train.take_turns("tensor", Pair, args.contenders, lambda c: c.title, args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
