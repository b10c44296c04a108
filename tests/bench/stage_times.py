"""How equal the stages of a pipeline are when a model is cut by itself: GPT-2, Llama and BERT, 12 blocks.

    python tests/bench/stage_times.py --rounds 7

One process: the costs of the units as "pipeline.stages" measures them, the cut of whole blocks and the cut with parts
made of them, and then the time of the stages of both cuts, measured anew in other rounds, as the sum of their units'
medians. A line is one model and number of stages: the dearest stage against the mean of all, which is what a pipeline
loses (1.0: nothing), and the dearest against the cheapest."""

from __future__ import annotations

import argparse
import statistics

import torch
from common import emit, require_deepc, version


def models(width: int, vocab: int):
    import transformers as t

    sizes = dict(num_hidden_layers=12, hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width)
    yield "gpt2", t.GPT2LMHeadModel(t.GPT2Config(n_layer=12, n_embd=width, n_head=width // 64, vocab_size=vocab))
    yield (
        "llama",
        t.LlamaForCausalLM(t.LlamaConfig(**sizes | {"intermediate_size": 8 * width // 3 // 64 * 64}, vocab_size=vocab)),
    )
    yield "bert", t.BertForMaskedLM(t.BertConfig(**sizes, vocab_size=vocab))


def places_of(chain, chosen, block: int) -> list[int]:
    """The numbers among the places inside of a block of those that a cut may use."""
    return [k for k, point in enumerate(chain.points.get(block, ())) if point in chosen.points.get(block, ())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    require_deepc()
    from deepc import memory
    from deepc.parallel.pipeline import balance
    from deepc.parallel.pipeline.cutting.chain import trace
    from deepc.parallel.pipeline.cutting.choose import best, costs_of, joined
    from deepc.parallel.pipeline.cutting.clock import clock

    memory.keep_heap()  # as initialize does before it measures: pages that come and go are no stage's time
    torch.set_num_threads(1)
    for name, model in models(options.width, options.vocab):
        ids = torch.randint(0, options.vocab, (2, 256))
        batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        if name != "bert":
            batch["use_cache"] = False
        chain, _ = trace(model.train(), lambda m=model, b=batch: m(**b))
        units = chain.units()

        def measured(chain=chain, units=units, model=model, batch=batch):
            rounds = []
            for _ in range(1 + options.rounds):
                rounds.append(clock(chain, units, lambda: model(**batch).loss)[0])
                model.zero_grad(set_to_none=True)
            return costs_of(chain, units, rounds[1:])

        costs = measured()
        again = dict(zip(units, measured()))
        for stages in options.stages:
            _, sums = joined(units, costs, lambda _: ())
            finest = best(chain, units, costs, stages)
            chosen = {
                "blocks": (lambda _: (), balance.cut(sums, stages)),
                "chosen": (lambda i, c=finest.chain, of=chain: places_of(of, c, i), finest.cuts),
            }
            for cut, (places, cuts) in chosen.items():
                _, sums = joined(units, list(map(again.__getitem__, units)), places)
                times = [1e3 * sum(sums[a:b]) for a, b in zip(cuts, cuts[1:])]
                emit(
                    "stage_times",
                    f"{name}, {stages} stages",
                    f"stages' times, cut at {cut}" if cut == "blocks" else "stages' times, as chosen",
                    "ms",
                    times,
                    dearest_to_mean=round(max(times) / statistics.mean(times), 3),
                    dearest_to_cheapest=round(max(times) / min(times), 3),
                    width=options.width,
                    vocab=options.vocab,
                    torch=version("torch"),
                )


if __name__ == "__main__":
    main()
