"""Recomputation by budget beside the best of all choices.

    python tests/bench/recompute.py [--model gpt2|llama] [--budgets 10] [--rounds 5] [--layers 5]

A small model of transformers with --layers blocks is trained by deepc with --budgets budgets, from the least that works
to what it takes to keep everything. Every choice of blocks is timed, in turn. Figures per budget: seconds of a forward
and backward as deepc chooses, the ratio to the fastest choice that fits (by the same model of memory),
and the bytes of what the forward made that live at its end over the budget (1 or less)."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

from common import emit, machine, paired, require_deepc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))


def make_model(a):
    import torch
    import transformers

    torch.manual_seed(0)
    if a.model == "gpt2":
        cfg = transformers.GPT2Config(n_embd=a.width, n_layer=a.layers, n_head=a.width // 64, vocab_size=4096)
        return transformers.GPT2LMHeadModel(cfg)
    cfg = transformers.LlamaConfig(
        hidden_size=a.width,
        intermediate_size=a.width * 8 // 3,
        num_hidden_layers=a.layers,
        num_attention_heads=a.width // 64,
        num_key_value_heads=a.width // 64,
        vocab_size=4096,
    )
    return transformers.LlamaForCausalLM(cfg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    for name, default in (("budgets", 10), ("rounds", 5), ("layers", 5), ("width", 256), ("tokens", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    require_deepc()
    import deepc
    import torch
    from deepc.plan.predict.recompute import choice as recompute
    from test_recompute import Held

    print(json.dumps(machine()), flush=True)
    config = {"train_micro_batch_size_per_gpu": a.batch, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    config |= {"activation_checkpointing": {"budget": "1TB"}, "deepc": {"log": {"format": "none"}}}
    engine = deepc.initialize(model=make_model(a), config=config)[0]
    ids = torch.randint(4096, (a.batch, a.tokens))

    def step() -> float:
        begin = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        seconds = time.perf_counter() - begin
        engine.step()
        return seconds

    step()
    plans = engine.recomputation._plans
    (shapes, plan), whole = next(iter(plans.items())), engine.recomputation.stats()["whole_bytes"]
    calls, outside = plan.forward
    least = recompute.least(calls, outside)

    def use(way: tuple[bool, ...]) -> None:
        found = recompute.Choice(way, recompute.peak(calls, outside, way), 0.0)
        plans[shapes] = plan._replace(choice=found)

    ways = list(itertools.product([False, True], repeat=len(calls)))
    times: dict[tuple[bool, ...], list[float]] = {w: [] for w in ways}
    for way in ways * a.rounds:
        use(way)
        times[way].append(step())
    for i in range(a.budgets):
        budget = least + i * (whole - least) // max(1, a.budgets - 1)
        mine = recompute.choose(calls, outside, budget)
        fitting = [w for w in ways if recompute.peak(calls, outside, w) <= budget]
        best = min(fitting, key=lambda w: sorted(times[w])[a.rounds // 2])
        use(mine.recomputed)
        with Held(engine.module) as held:
            loss = engine(input_ids=ids, labels=ids).loss
            at_end = held.now
            engine.backward(loss)
        engine.step()
        emit(
            "recompute",
            "forward and backward within a budget",
            a.model,
            "s",
            times[mine.recomputed],
            ratio=paired(times[best], times[mine.recomputed]),
            peer=f"the fastest of {len(fitting)} choices that fit",
            budget_mib=round(budget / 2**20, 1),
            recomputed=sum(mine.recomputed),
            held_over_budget=round(at_end / budget, 3),
            over_keeping_all=round(paired(times[mine.recomputed], times[ways[0]]), 3),
        )
    engine.destroy()


if __name__ == "__main__":
    main()
