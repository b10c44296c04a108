"""What each kind of deepc.fuse saves of a training step: the 25 M GPT-2 (or a Llama of that size), 2 ranks of 1 thread,
ZeRO-3.

    python tests/bench/fuse.py --precision bf16 --rounds 9 [--model llama] [--tokens 1024]

The same pair of processes holds one engine per variant (nothing fused, each kind alone, all), and the variants take
turns in bursts of steps, so that drift of the machine hits all alike. "saves" is the median over rounds of 1 - (this
variant's time / the unfused one's of the same round); "CPU time" is rank 0's, which other work on the machine disturbs
less than the clock."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from common import die_with_parent, emit, free_port, paired, require_deepc
from peers import environment

GPT2 = dict(
    vocab_size=50257,
    n_positions=1024,
    n_embd=320,
    n_layer=7,
    n_head=5,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    use_cache=False,
    loss_type="ForCausalLM",
)  # 25.0 M parameters, as in train.py
LLAMA = dict(
    vocab_size=32000,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=7,
    num_attention_heads=6,
    num_key_value_heads=6,
    max_position_embeddings=1024,
    use_cache=False,
)  # 37 M with its two embeddings
SMALL = dict(
    gpt2=dict(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=2),
    llama=dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ),
)


def make_model(kind: str, tiny: bool):
    import torch
    import transformers

    torch.manual_seed(0)
    config = (
        transformers.GPT2Config(**{**GPT2, **(SMALL["gpt2"] if tiny else {})})
        if kind == "gpt2"
        else transformers.LlamaConfig(**{**LLAMA, **(SMALL["llama"] if tiny else {})})
    )
    return (transformers.GPT2LMHeadModel if kind == "gpt2" else transformers.LlamaForCausalLM)(config).train()


def variants(kind: str) -> dict[str, tuple[str, ...]]:
    """Name -> what is fused."""
    kinds = ("norm", "mlp", "loss") if kind == "gpt2" else ("norm", "mlp", "rotary", "loss")
    return {"unfused": (), **{f"only {k}": (k,) for k in kinds}, "all": kinds}


def make_engine(args, only):
    import deepc

    model = make_model(args.model, args.tiny)
    if only:
        deepc.fuse(model, only=only)
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    return deepc.initialize(model=model, config=config)[0]


def step(engine, batch) -> float:
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def rank_main(args) -> None:
    """Prints the rounds' seconds per step and the last losses of every variant as one JSON line (rank 0)."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    require_deepc()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    engines = {
        name: make_engine(args, only)
        for name, only in variants(args.model).items()
        if not args.variants or name in ("unfused", *args.variants)
    }
    vocab = engines["unfused"].module.config.vocab_size
    batches = [
        torch.randint(vocab, (args.batch, args.tokens), generator=torch.Generator().manual_seed(97 * s + rank))
        for s in range(4)
    ]
    times, busy, losses = {n: [] for n in engines}, {n: [] for n in engines}, {}
    for r in range(-1, args.rounds):
        for name, engine in engines.items():
            step(engine, batches[-1])
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            for s in range(args.steps):
                losses[name] = step(engine, batches[s % 4])
            used = time.process_time() - used
            dist.barrier()
            if r >= 0:
                times[name].append((time.perf_counter() - started) / args.steps)
                busy[name].append(used / args.steps)
    if rank == 0:
        print(json.dumps({"time": times, "CPU time": busy, "losses": losses}), flush=True)
    dist.destroy_process_group()


def run(args) -> dict:
    port = free_port()
    ranks = []
    for r in range(args.ranks):
        env = {
            **environment(1),
            "RANK": str(r),
            "LOCAL_RANK": str(r),
            "WORLD_SIZE": str(args.ranks),
            "LOCAL_WORLD_SIZE": str(args.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONWARNINGS": "ignore",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), "--rank", *sys.argv[1:]],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    out = [p.communicate()[0] for p in ranks]
    if any(p.returncode for p in ranks):
        sys.exit(f"a rank failed: exit statuses {[p.returncode for p in ranks]}")
    return json.loads(out[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="timed steps per burst, after one that warms the caches")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--variants", nargs="+", help="of the variants beside 'unfused' only these, such as: all 'only loss'"
    )
    parser.add_argument("--tiny", action="store_true", help="seconds: proves that it runs")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.tokens, args.rounds = 32, 2
    if args.rank:
        rank_main(args)
        return
    result = run(args)
    about = dict(model=args.model, precision=args.precision, tokens=args.tokens, batch=args.batch, ranks=args.ranks)
    for figure in ("time", "CPU time"):
        plain = result[figure]["unfused"]
        for name, seconds in result[figure].items():
            emit(
                "fuse",
                f"training step, {figure}",
                name,
                "ms",
                [1e3 * t for t in seconds],
                loss=result["losses"][name],
                **about,
            )
            if name != "unfused":
                saved = [1 - t / p for t, p in zip(seconds, plain)]
                emit(
                    "fuse",
                    f"training step, {figure} saved",
                    name,
                    "fraction",
                    saved,
                    ratio=paired(plain, seconds),
                    peer="unfused",
                    **about,
                )


if __name__ == "__main__":
    main()
