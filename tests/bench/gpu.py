"""One GPU: optimizer kernels, fused operators, whole training steps and ZeRO-Offload beside their peers, on one
machine in one run, in turn.

    python tests/bench/gpu.py [--parts adamw formats adafactor loss ops attention train offload activations moving]
    [--rounds 7] [--size 125M] [--batch 16] [--length 1024] [--offload-size 774M]

adamw    AdamW on GPT-2's tensors: torch's fused and foreach ones; the limit is what the bytes take at a copy's rate.
formats  AdamW with states in bf16 with stochastic rounding, 8 and 4 bits, beside torch's fused one with its own states:
         a whole step, and the kernels alone, whose limit is that of their own bytes.
adafactor  Adafactor on the same tensors: torch's, with foreach and without.
loss     linear + cross-entropy of a GPT-2 head: torch's on 16-bit logits and on fp32 ones; time, and peak memory.
ops      fused operators (fused.py's) forward and forward with backward: torch's functions, eager.
attention  10 % of the blocks of 128, causal, and all: torch's scaled_dot_product_attention, causal and all, and
         FlexAttention of the same blocks, compiled.
train    GPT-2 in bf16, with torch's attention: plain torch with autocast, or with fp32 masters by hand; DeepSpeed ZeRO.
offload  the same with masters, states and update on the host: DeepSpeed's ZeRO-Offload; of a half of the states; with
         the parameters in host memory too; with states, and with parameters, on disk (--folder).
activations  inputs of recomputed blocks on the GPU, in host memory and on disk (--folder); torch's save_on_cpu.
moving   engine.offload_states and reload_states, seconds of both: DeepSpeed's.

Times are by CUDA events around work that is queued whole (adamw, loss, ops), or of the wall clock between
synchronizations (train, offload)."""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29517")
os.environ.setdefault("DEEPC_LOG_LEVEL", "WARNING")
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)  # DeepSpeed wants them

import torch
from common import emit, gpt2_shapes, paired, require_deepc, skip, version
from contenders import CLIP, HYPER, MODELS, engine_config, engine_step

MODELS |= {
    "355M": dict(vocab_size=50257, n_positions=1024, n_embd=1024, n_layer=24, n_head=16),
    "774M": dict(vocab_size=50257, n_positions=1024, n_embd=1280, n_layer=36, n_head=20),
    "1.5B": dict(vocab_size=50257, n_positions=1024, n_embd=1600, n_layer=48, n_head=25),
}
PARTS = ("adamw", "formats", "adafactor", "loss", "ops", "attention", "train", "offload", "activations", "moving")
OPS_ROWS = 1 << 16  # so that Python's part of a call is hidden
HERE = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "torch": torch.__version__}


# ---- clocks ----------------------------------------------------------------------------------------------------------
def queued(contenders: Mapping[str, Callable[[], object]], rounds: int, repeat: int = 10) -> dict[str, list[float]]:
    """Milliseconds a call, by events around `repeat` of them; in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, rounds):
        for name, run in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(repeat):
                run()
            end.record()
            torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(begin.elapsed_time(end) / repeat)
    return times


def tell(figure: str, times: Mapping[str, list[float]], peers: list[str], unit: str = "ms", **more) -> None:
    """One row each, then deepc against each peer (above 1: deepc takes less)."""
    for name, values in times.items():
        emit("gpu", figure, name, unit, values, **HERE, **more)
    for peer in peers:
        mine = times["deepc"]
        emit("gpu", figure, "deepc", unit, mine, ratio=paired(times[peer], mine), peer=peer, **HERE, **more)


# ---- kernels ---------------------------------------------------------------------------------------------------------
SHAPES = {"124 M": gpt2_shapes(), "774 M": gpt2_shapes(width=1280, layers=36)}


def parameters_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """With gradients."""
    torch.manual_seed(0)
    out = [torch.nn.Parameter(torch.randn(s, device="cuda", dtype=dtype) * 0.02) for s in shapes]
    for p in out:
        p.grad = torch.randn_like(p)
    return out


def copy_of(count: int) -> Callable[[], object]:
    """A copy of so many fp32 numbers, whose rate is the limit of what bytes can do."""
    source = torch.empty(count, device="cuda")
    return functools.partial(torch.empty_like(source).copy_, source)


def copied_GB_s(count: int, ms: list[float]) -> float:
    return 8 * count / statistics.median(ms) / 1e6


def adamw(args: argparse.Namespace) -> None:
    deepc = require_deepc()
    for (size, shapes), dtype in itertools.product(SHAPES.items(), (torch.float32, torch.bfloat16)):
        parameters = functools.partial(parameters_of, shapes, dtype)
        peers = {
            "torch AdamW(fused=True)": torch.optim.AdamW(parameters(), fused=True, **HYPER),
            "torch AdamW(foreach=True)": torch.optim.AdamW(parameters(), foreach=True, **HYPER),
        }
        made = peers | {"deepc": deepc.optim.AdamW(parameters(), **HYPER)}
        count = sum(map(math.prod, shapes))
        copy = copy_of(count)
        times = queued({n: o.step for n, o in made.items()} | {"copy": copy}, args.rounds)
        rate = copied_GB_s(count, times.pop("copy"))
        more: dict[str, float] = {"copy_GB_s": round(rate)}
        if dtype == torch.float32:  # parameters and moments are read and written, gradients read
            more["of_limit"] = round(28 * count / rate / 1e6 / statistics.median(times["deepc"]), 3)
        tell(f"AdamW, {size} parameters in {len(shapes)} tensors, {str(dtype)[6:]}", times, list(peers), **more)
        del peers, made, copy
        free()


def formats(args: argparse.Namespace) -> None:
    deepc = require_deepc()
    from deepc.core.ops import run_on
    from deepc.optim.states.dense import packed_item
    from deepc.optim.states.formats import ADAMW, BYTES_OF_256, DECOUPLED, MOMENTS, PackedStep, packed_args

    for (size, shapes), dtype in itertools.product(SHAPES.items(), (torch.float32, torch.bfloat16)):
        parameters = functools.partial(parameters_of, shapes, dtype)

        def kernels(optimizer, form):
            """The launches of a step, without Python's part."""
            optimizer.step()  # makes the states
            given = [p for g in optimizer.param_groups for p in g["params"]]
            items = [packed_item(optimizer, p, p, p.grad, MOMENTS) for p in given]
            scalars = (1e-4, 0.9, 0.999, 1e-8, 0.01)
            args = packed_args(items, PackedStep(ADAMW, form, scalars, 1.0, 2, DECOUPLED))
            return functools.partial(run_on, given[0].device, "step", args, len(items))

        count = sum(map(math.prod, shapes))
        copy = copy_of(count)
        fused = torch.optim.AdamW(parameters(), fused=True, **HYPER)
        for form in ("bf16", "int8", "int4"):
            mine = deepc.optim.AdamW(parameters(), state_dtype=form, **HYPER)
            made = {"torch AdamW(fused=True)": fused.step, "deepc": mine.step, "deepc, kernels": kernels(mine, form)}
            times = queued(made | {"copy": copy}, args.rounds)
            rate = copied_GB_s(count, times.pop("copy"))
            each = 3 * dtype.itemsize + 4 * BYTES_OF_256[form] / 256  # both states are read and written
            limit = each * count / rate / 1e6
            figure = f"AdamW, {size} parameters in {len(shapes)} tensors, {str(dtype)[6:]}, states in {form}"
            tell(
                figure,
                times,
                ["torch AdamW(fused=True)"],
                copy_GB_s=round(rate),
                bytes_each=round(each, 2),
                of_limit=round(limit / statistics.median(times["deepc"]), 3),
                kernels_of_limit=round(limit / statistics.median(times["deepc, kernels"]), 3),
            )
            del mine, made
            free()
        del fused, copy
        free()


def adafactor(args: argparse.Namespace) -> None:
    deepc = require_deepc()
    for (size, shapes), dtype in itertools.product(SHAPES.items(), (torch.float32, torch.bfloat16)):
        parameters = functools.partial(parameters_of, shapes, dtype)
        peers = {
            f"torch Adafactor(foreach={each})": torch.optim.Adafactor(parameters(), foreach=each)
            for each in (True, False)
        }
        made = peers | {"deepc": deepc.optim.Adafactor(parameters())}
        count = sum(map(math.prod, shapes))
        copy = copy_of(count)
        times = queued({n: o.step for n, o in made.items()} | {"copy": copy}, args.rounds)
        more: dict[str, float] = {"copy_GB_s": round(copied_GB_s(count, times.pop("copy")))}
        tell(f"Adafactor, {size} parameters in {len(shapes)} tensors, {str(dtype)[6:]}", times, list(peers), **more)
        del peers, made, copy
        free()


def loss(args: argparse.Namespace) -> None:
    import torch.nn.functional as F

    deepc = require_deepc()
    tokens, width, vocab = 16 * 1024, 768, 50257
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
        weight = (torch.randn(vocab, width, device="cuda") * 0.02).to(dtype).requires_grad_()
        labels = torch.randint(0, vocab, (tokens,), device="cuda")

        def run(make, hidden=hidden, weight=weight):
            hidden.grad = weight.grad = None
            make().backward()

        made = {
            "F.linear, F.cross_entropy": lambda h=hidden, w=weight: F.cross_entropy(F.linear(h, w), labels),
            "deepc": lambda h=hidden, w=weight: deepc.linear_cross_entropy(h, w, labels),
        }
        if dtype != torch.float32:
            made["F.linear(...).float(), F.cross_entropy"] = lambda h=hidden, w=weight: F.cross_entropy(
                F.linear(h, w).float(), labels
            )
        peaks = {}
        for name, make in made.items():
            run(make)
            free()
            begin = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run(make)
            peaks[name] = [(torch.cuda.max_memory_allocated() - begin) / 2**20]
        figure = f"linear + cross-entropy, {tokens} x {width} x {vocab}, {str(dtype)[6:]}"
        others = [n for n in made if n != "deepc"]
        tell(figure, queued({n: lambda m=m: run(m) for n, m in made.items()}, args.rounds, 3), others)
        tell(figure, peaks, others, "MiB")


def ops(args: argparse.Namespace) -> None:
    from fused import FUNCTIONS, calls, functions, operands, shapes

    torch.set_default_device("cuda")
    try:
        for name in FUNCTIONS:
            if name == "attention":
                continue  # a part of its own
            mine, peers = functions(name)
            for cols, heads in shapes(name)[-1:]:
                for dtype in (torch.bfloat16, torch.float32):
                    tensors = operands(name, OPS_ROWS, cols, dtype, heads)
                    both = {"deepc": calls(mine, tensors), **{p: calls(f, tensors) for p, f in peers.items()}}
                    for i, what in enumerate(("forward", "forward and backward")):
                        times = queued({n: c[i] for n, c in both.items()}, args.rounds, 20)
                        tell(
                            f"{name}, {OPS_ROWS} x {cols * max(1, heads)}, {str(dtype)[6:]}, {what}", times, list(peers)
                        )
    finally:
        torch.set_default_device(None)


def attention(args: argparse.Namespace) -> None:
    import torch.nn.functional as F
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mine, flex, block, share = require_deepc().core.ops, torch.compile(flex_attention), 128, 0.1
    cases = [(torch.bfloat16, *sizes) for sizes in ((4, 4096, 64), (1, 16384, 64), (4, 4096, 128))]
    for dtype, batch, tokens, dim in [*cases, (torch.float32, 4, 4096, 64)]:
        torch.manual_seed(0)
        shape = (batch, 16, tokens, dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        layout = torch.rand(1, tokens // block, tokens // block, device="cuda") < share

        def seen(b, h, i, j, at=layout[0]):
            return at[i // block, j // block]

        def run(call, leaves=(q, k, v)):
            return lambda: call(*leaves)

        of_blocks = f"{share:.0%} of the blocks"
        made = {
            "torch SDPA, causal": run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
            "torch SDPA": run(F.scaled_dot_product_attention),
            "deepc, causal": run(lambda q, k, v: mine.attention(q, k, v, is_causal=True)),
            "deepc, all": run(mine.attention),
            "deepc": run(lambda q, k, v, at=layout: mine.block_sparse_attention(q, k, v, at, block)),
        }
        if dtype != torch.float32:
            mask = create_block_mask(seen, None, None, tokens, tokens, device="cuda", BLOCK_SIZE=block)
            made["FlexAttention"] = run(lambda q, k, v, m=mask: flex(q, k, v, block_mask=m))

        def both(call, leaves=(q, k, v)):
            for x in leaves:
                x.grad = None
            call().sum().backward()

        figure = f"attention, {batch} x 16 x {tokens} x {dim}, {str(dtype)[6:]}, deepc with {of_blocks}"
        if "FlexAttention" in made:
            figure += ", FlexAttention too"
        others = [n for n in made if n != "deepc"]
        tell(f"{figure}, forward", queued(made, args.rounds, 5), others)
        again = {n: functools.partial(both, call) for n, call in made.items()}
        tell(f"{figure}, forward and backward", queued(again, args.rounds, 5), others)
        del made, again
        free()


# ---- training --------------------------------------------------------------------------------------------------------
def gpt(size: str, length: int, recompute: bool):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = MODELS[size] | {"n_positions": length}
    drops = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False, loss_type="ForCausalLM")).train()
    if recompute:
        model.gradient_checkpointing_enable()
    return model


def by_hand(model, masters: bool):
    """Plain torch: autocast on fp32 weights, or bf16 weights with fp32 masters; clip; fused AdamW."""
    model = model.cuda()
    if masters:
        kept = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
        model = model.bfloat16()
        weights = list(model.parameters())
    else:
        kept = weights = list(model.parameters())
    optimizer = torch.optim.AdamW(kept, fused=True, **HYPER)

    def step(x):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not masters):
            result = model(input_ids=x, labels=x).loss
        result.backward()
        if masters:
            for w, m in zip(weights, kept):
                m.grad, w.grad = w.grad.float(), None
        torch.nn.utils.clip_grad_norm_(kept, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
        return result.detach()

    return step, lambda: None


def with_engine(*given: Any):
    """given: as engine_of's."""
    engine = engine_of(*given)
    return engine_step(engine), engine.destroy


def engine_of(
    package: str, model, stage: int, batch: int, offload: Mapping[str, Any], fuse: bool, more: Mapping[str, Any] = {}
):
    """offload: sections of zero_optimization; more: others."""
    config = engine_config("bf16", stage) | {"train_micro_batch_size_per_gpu": batch} | dict(more)
    if offload:
        config["zero_optimization"].update(offload)
        config["zero_force_ds_cpu_optimizer"] = True
    if package == "deepspeed":
        import deepspeed

        return deepspeed.initialize(model=model, config=config)[0]
    deepc = require_deepc()
    if fuse:
        deepc.fuse(model)
    return deepc.initialize(model=model, config=config, device="cuda")[0]


def training(figure: str, size: str, made: Mapping[str, Callable], args: argparse.Namespace, recompute=False) -> None:
    """Each contender in a turn of its own, `rounds` bursts of args.burst steps: they don't fit beside each other."""
    times: dict[str, list[float]] = {}
    memory: dict[str, float] = {}  # MiB
    losses: dict[str, list[float]] = {}
    batch = args.batch
    data = torch.randint(0, 50257, (8, batch, args.length), generator=torch.Generator().manual_seed(3)).cuda()
    for name, make in made.items():
        try:
            free()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()  # of contenders that did not give everything back
            step, close = make(gpt(size, args.length, recompute))
            losses[name] = [step(data[i % 8]).item() for i in range(3)]
            times[name] = []
            for _ in range(args.rounds):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for i in range(args.burst):
                    last = step(data[i % 8])
                torch.cuda.synchronize()
                times[name].append(args.burst * batch * args.length / (time.perf_counter() - begin))
            losses[name].append(last.item())
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            close()
            del step, close
        except Exception as exc:
            times.pop(name, None)
            skip("gpu", f"{figure}: {name}", f"{type(exc).__name__}: {str(exc)[:400]}")
            if args.debug:
                raise
    for mine in [n for n in times if n.startswith("deepc")]:
        others = [n for n in times if not n.startswith("deepc")]
        for peer in others:
            ratio = statistics.median(times[mine]) / statistics.median(times[peer])
            less = memory[peer] / memory[mine]
            emit(
                "gpu",
                figure,
                mine,
                "tokens/s",
                times[mine],
                ratio=ratio,
                peer=peer,
                memory_ratio=round(less, 3),
                **HERE,
            )
    for name in times:
        emit("gpu", figure, name, "tokens/s", times[name], **HERE, MiB=round(memory[name]), losses=losses[name])


def train(args: argparse.Namespace) -> None:
    made: dict[str, Callable] = {}
    for stage in (1, 2, 3) if version("deepspeed") else ():
        made[f"DeepSpeed ZeRO-{stage}"] = lambda m, s=stage: with_engine("deepspeed", m, s, args.batch, {}, False)
    made["torch, autocast"] = lambda m: by_hand(m, False)
    made["torch, bf16 weights, fp32 masters"] = lambda m: by_hand(m, True)
    for stage, fuse in ((0, False), (2, False), (3, False), (2, True)):
        made[f"deepc ZeRO-{stage}{', deepc.fuse' if fuse else ''}"] = lambda m, s=stage, f=fuse: with_engine(
            "deepc", m, s, args.batch, {}, f
        )
    training(f"GPT-2 {args.size}, bf16, {args.batch} x {args.length}", args.size, made, args)


def offload(args: argparse.Namespace) -> None:
    size = args.offload_size
    made: dict[str, Callable] = {}
    host = {"device": "cpu", "pin_memory": True}
    disk = {"device": "nvme", "nvme_path": args.folder or tempfile.gettempdir()}
    states, parameters = ({"offload_optimizer": host}, {"offload_param": host})
    cases = [
        ("deepspeed", 2, "offloaded", states),
        ("deepspeed", 3, "offloaded", states),
        ("deepspeed", 3, "parameters too", states | parameters),
        ("deepc", 2, "offloaded", states),
        ("deepc", 3, "offloaded", states),
        ("deepc", 2, "half of it offloaded", {"offload_optimizer": host | {"ratio": 0.5}}),
        ("deepc", 3, "parameters too", states | parameters),
        ("deepc", 3, "states on disk", {"offload_optimizer": disk}),
        ("deepc", 3, "all on disk", {"offload_optimizer": disk, "offload_param": disk}),
    ]
    for package, stage, what, section in cases:
        if package == "deepspeed" and not version("deepspeed"):
            continue
        name = f"{'DeepSpeed' if package == 'deepspeed' else package} ZeRO-{stage}, {what}"
        made[name] = lambda m, p=package, s=stage, z=section: with_engine(p, m, s, args.batch, z, False)
    args = argparse.Namespace(**vars(args) | {"rounds": args.offload_rounds, "burst": 1})
    training(
        f"GPT-2 {size}, bf16, {args.batch} x {args.length}, optimizer on the host", size, made, args, recompute=True
    )


def activations(args: argparse.Namespace) -> None:
    size = args.offload_size
    asked = {"activation_checkpointing": {"cpu_checkpointing": True}}
    disk = {"deepc": {"activations": {"nvme_path": args.folder or tempfile.gettempdir()}}}

    def saved_on_cpu(model):
        step, close = with_engine("deepc", model, 2, args.batch, {}, False)

        def on_cpu(x):
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return step(x)

        return on_cpu, close

    made: dict[str, Callable] = {"torch's save_on_cpu": saved_on_cpu}
    for what, more in (("on the GPU", {}), ("in host memory", asked), ("on disk", asked | disk)):
        made[f"deepc, {what}"] = lambda m, z=more: with_engine("deepc", m, 2, args.batch, {}, False, z)
    args = argparse.Namespace(**vars(args) | {"rounds": args.offload_rounds, "burst": 2})
    figure = f"GPT-2 {size}, bf16, {args.batch} x {args.length}, inputs of recomputed blocks"
    training(figure, size, made, args, recompute=True)


def moving(args: argparse.Namespace) -> None:
    """Of ZeRO-3, whose states DeepSpeed can move."""
    x = torch.randint(0, 50257, (1, 256), device="cuda")
    times: dict[str, list[float]] = {}
    for package in ("deepspeed", "deepc"):
        if package == "deepspeed" and not version("deepspeed"):
            continue
        engine = engine_of(package, gpt(args.offload_size, 256, False), 3, 1, {}, False)
        engine_step(engine)(x)
        name, spent = "deepc" if package == "deepc" else "DeepSpeed", []
        kinds = ["optim_states", "hp_params", "contiguous_grad_buffer"]
        if package == "deepspeed":
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

            kinds = [OffloadStateTypeEnum(k) for k in kinds]
        for _ in range(args.offload_rounds + 1):
            before = torch.cuda.memory_allocated()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            engine.offload_states(include=kinds)
            torch.cuda.synchronize()
            gone = before - torch.cuda.memory_allocated()
            engine.reload_states()
            torch.cuda.synchronize()
            spent.append(time.perf_counter() - begin)
        times[name] = spent[1:]
        emit("gpu", f"{args.offload_size}: states moved", name, "MiB", [gone / 2**20], **HERE)
        engine.destroy()
        del engine
        free()
    tell(f"{args.offload_size}: to host memory and back", times, [n for n in times if n != "deepc"], "s")


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--burst", type=int, default=4, help="steps a round of train")
    parser.add_argument("--size", choices=MODELS, default="125M")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--offload-size", choices=MODELS, default="774M")
    parser.add_argument("--offload-rounds", type=int, default=5)
    parser.add_argument("--folder", help="of what lies on disk (the one for temporary files)")
    parser.add_argument("--debug", action="store_true", help="raise what stops a contender")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        return skip("gpu", "all", "there is no CUDA device")
    for part in args.parts:
        globals()[part](args)


if __name__ == "__main__":
    main()
