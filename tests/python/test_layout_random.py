"""Trainings drawn from a seed give equal bits in every layout that is drawn for them, with `"deterministic": "layout"`:
the optimizer, the format of its states, the precision and what the script does between steps make the result; ranks,
nodes, stages, tiers, where activations lie, how the model is built and where a checkpoint interrupts it must not."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile

import pytest
import tiny
import torch
from ranks import on_nodes, run_ranks
from test_layout import Dropping

MICRO_BATCHES, STEPS = 4, 4
OPTIMIZERS = {
    "AdamW": {"lr": 2e-3, "weight_decay": 0.1},
    "Adam": {"lr": 2e-3, "weight_decay": 0.01},
    "Lion": {"lr": 5e-4, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Lamb": {"lr": 1e-2},
    "Muon": {"lr": 1e-2},
    "Adafactor": {"lr": 1e-2},
}


def drawn(seed: int) -> dict:
    """What decides the result of a training."""
    d = random.Random(seed)
    kind = d.choice([*OPTIMIZERS, "AdamW", "AdamW"])
    params = dict(OPTIMIZERS[kind])
    if kind != "Adafactor" and d.random() < 0.3:
        params["state_dtype"] = d.choice(["bf16", "int8", *(["int4"] if kind != "Muon" else [])])
    case = {
        "optimizer": {"type": kind, "params": params},
        "precision": d.choice(["fp32", "fp32", "bf16", "fp16"]),
        "clip": d.choice([0, 0.05, 1.0]),
        "model": {
            "width": d.choice([32, 48]),
            "frozen": d.random() < 0.3,
            "unused": d.random() < 0.3,
            "reuse": d.random() < 0.3,
        },
        "dropout": d.random() < 0.5,
        "warmup": d.random() < 0.3,
        "wire": d.choice([None, None, "bf16"]),
        "acts": {},
    }
    for step in range(STEPS):
        if d.random() < 0.4:
            case["acts"][step] = (
                d.choice(["weights", "gradient", "state", "gathered", "lr", "freeze"]),
                d.randrange(1000),
            )
    case["way"] = d.choice(["one", "one", "one", "no_sync", "bare", "holes"])
    if case["precision"] == "fp16" and case["way"] == "bare":
        case["way"] = "one"
    if case["way"] == "holes":  # a rank without a loss would be elsewhere than the others
        case["acts"] = {}
    case["ema"] = d.random() < 0.2
    return case


def layout_of(d: random.Random) -> dict:
    """How it is carried out."""
    world = d.choice([1, 2, 2, 4])
    stage = d.choice((0, 1, 2, 3))
    zero: dict = {"stage": stage}
    if stage and d.random() < 0.4:
        zero["offload_optimizer"] = {"device": d.choice(["cpu", "nvme", "nvme"])}
    if stage == 3 and d.random() < 0.3:
        zero["offload_param"] = {"device": "nvme"}
        if d.random() < 0.7:
            zero["offload_optimizer"] = {"device": "nvme"}
    if d.random() < 0.3:
        zero["overlap_comm"] = d.random() < 0.5
    activations = d.choice([None, None, None, "disk", "all", "budget"])
    return {
        "world": world,
        "nodes": d.choice([1, 1, 2]) if world > 1 else 1,
        "zero": zero,
        "streamed": int(stage == 3 and d.random() < 0.4),
        "init": d.random() < 0.4,
        "bucket": d.choice([1024, 8192, 1 << 20]),
        "recompute": d.choice([None, None, "plain"]) if activations != "budget" else None,
        "activations": activations,
        "looks": [d.choice(["nothing", "eval", "state_dict", "masters", "park", "draw", "view"]) for _ in range(STEPS)],
    }


def _config(case: dict, layout: dict, folder: str) -> dict:
    cfg = tiny.config(
        layout["zero"]["stage"],
        micro=1,
        gas=MICRO_BATCHES // layout["world"],
        precision=case["precision"],
        clip=case["clip"],
        deepc={"deterministic": "layout", "bucket_elems": layout["bucket"]},
        optimizer=case["optimizer"],
    )
    cfg["zero_optimization"] = {
        k: {**v, "nvme_path": folder} if isinstance(v, dict) and v["device"] == "nvme" else v
        for k, v in layout["zero"].items()
    }
    if case["precision"] == "fp16":
        cfg["fp16"] = {"enabled": True, "initial_scale_power": 15, "loss_scale_window": 2, "hysteresis": 1}
    how = layout["activations"]
    if how == "budget":
        cfg["activation_checkpointing"] = {"budget": "220KB"}
    elif how:
        cfg["activation_checkpointing"] = {"cpu_checkpointing": True}
        cfg["deepc"]["activations"] = {"nvme_path": folder, "min_bytes": 256, "all": how == "all"}
    if case["wire"]:
        cfg["communication_data_type"] = case["wire"]
    if case["warmup"]:
        cfg["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 3},
        }
    return cfg


def _backward(engine, way: str, x, y, number: int) -> None:
    """One micro-batch."""
    halves = (x[:, :8], y[:, :8]), (x[:, 8:], y[:, 8:])
    if way == "no_sync":
        with engine.no_sync():
            engine.backward(engine(*halves[0]))
        engine.backward(engine(*halves[1]))
    elif way == "bare":
        engine(x, y).backward()
    elif way == "one" or number % 3:
        engine.backward(engine(x, y))


def _act(engine, what: str, number: int, deepc) -> None:
    """What a script does to the training, after the backward of a step's last micro-batch."""
    ps = [p for n, p in engine.module.named_parameters() if p.requires_grad and "spare" not in n]
    p = ps[number % len(ps)]
    view = deepc.view(p)
    if what == "weights":
        view.fp32 = view.fp32 * 0.9
    elif what == "gradient":
        view.grad = view.grad * 0.5
    elif what == "state" and engine.global_steps:
        for name in list(view.state):
            if view.state[name].dim():
                view.state[name] = view.state[name] * 0.5
                break
    elif what == "gathered":
        with deepc.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            if torch.distributed.get_rank() == 0 or engine.zero_optimization_stage() < 3:
                p.mul_(0.95)
    elif what == "freeze":
        p.requires_grad_(False)
    elif what == "lr":
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.7


def _look(engine, what: str, step: int, rank: int) -> None:
    """What changes nothing."""
    import deepc

    if what == "eval":
        engine.eval()
        with torch.no_grad():
            engine(*tiny.make_batch(100 + step, 1 + rank))
        engine.train()
    elif what == "state_dict":
        engine.module_state_dict()
    elif what == "masters":
        for p in engine.module.parameters():
            if p.requires_grad:
                engine.full_fp32_param(p)
    elif what == "park":
        try:
            engine.offload_states()
        except deepc.errors.DeepcError:
            return
        engine.reload_states()
    elif what == "draw":
        torch.rand(3 + rank)
    elif what == "view":
        with deepc.zero.GatheredParameters(list(engine.module.parameters())):
            sum(float(p.sum()) for p in engine.module.parameters())


def _digest(engine, said: list, ema) -> tuple:
    parts = {}
    averages = ema.state_dict() if ema else {}
    trained = {id(p) for p in engine.state.trained}
    for name, p in engine.module.named_parameters():
        if id(p) not in trained:
            continue
        mine = [engine.full_fp32_param(p)]
        mine += [engine.full_optimizer_state(p, s) for s in (engine.optimizer.states if engine.optimizer.core else ())]
        mine += [averages[name]] if ema else []
        parts[name] = [hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:8] for t in mine]
    return parts, said


def _work(rank, world, case, layout, folder, first, last):
    import deepc

    os.environ["DEEPC_STREAMED"] = str(layout["streamed"])
    with on_nodes(rank, world, layout["nodes"]):
        kind = Dropping if case["dropout"] else tiny.TinyGPT
        options = {**case["model"], "recompute": layout["recompute"]}
        torch.manual_seed(3)
        cfg = _config(case, layout, folder)
        try:
            if layout["init"]:
                with deepc.zero.Init(config_dict_or_path=cfg, dtype=torch.float32):  # 16 bits would be other weights
                    model = kind(**options)
            else:
                model = kind(**options)
            torch.manual_seed(77)
            engine, *_ = deepc.initialize(model=model, config=cfg)
        except (deepc.errors.ConfigError, deepc.errors.UnsupportedError) as exc:
            return f"{type(exc).__name__}: {exc}"
        if first:
            engine.load_checkpoint(folder)
            for step in range(first):
                if case["acts"].get(step, [""])[0] == "freeze":
                    _act(engine, *case["acts"][step], deepc)
        said = []
        ema = deepc.EMA(engine, 0.7) if case["ema"] and not first and last == STEPS else None
        for step in range(first, last):
            x, y = tiny.make_batch(step, MICRO_BATCHES)
            for m in range(MICRO_BATCHES // world):
                at = m * world + rank
                _backward(engine, case["way"], x[at : at + 1], y[at : at + 1], at)
                if (m + 1) * world == MICRO_BATCHES and step in case["acts"]:
                    _act(engine, *case["acts"][step], deepc)
                result = engine.step()
            if ema:
                ema.update()
            norm = None if result.reason else engine.get_global_grad_norm()  # skipped: the last one, if there was one
            said.append((step, result.reason or "", norm, engine.loss_scale))
            _look(engine, layout["looks"][step], step, rank)
        if last < STEPS:
            engine.save_checkpoint(folder)
        out = _digest(engine, said, ema)
        engine.destroy()
        return out


def carried_out(case: dict, layouts: list[dict], at: int | None = None) -> tuple | str:
    """The result, the same on all ranks: of one layout, or of two where a checkpoint lies between, after `at` steps. A
    text where a layout refuses."""
    env, said = {"DEEPC_LOG_LEVEL": "ERROR"}, []
    with tempfile.TemporaryDirectory() as folder:
        spans = [(0, STEPS)] if at is None else [(0, at), (at, STEPS)]
        for layout, (first, last) in zip(layouts, spans, strict=True):
            found = run_ranks(_work, layout["world"], args=(case, layout, folder, first, last), env=env)
            if isinstance(found[0], str):
                return found[0]
            for one in found:
                _same(one, found[0], f"ranks differ, {case}\nin {layout}")
            said += found[0][1]
        return found[0][0], said


def _same(found: tuple, want: tuple, where: str) -> None:
    if found == want:
        return
    parts = [(n, a, want[0][n]) for n, a in found[0].items() if a != want[0][n]]
    steps = [(a, b) for a, b in zip(found[1], want[1], strict=True) if a != b]
    pytest.fail(
        f"{where}:\n{len(parts)} of {len(want[0])} parameters differ: {parts[:3]}; steps {steps}", pytrace=False
    )


PLAIN = {
    "world": 1,
    "nodes": 1,
    "zero": {"stage": 0},
    "streamed": 0,
    "init": False,
    "bucket": 8192,
    "recompute": None,
    "activations": None,
    "looks": ["nothing"] * STEPS,
}
REFUSED = 'deepc.deterministic = "layout" with parameters and optimizer states on NVMe does not exist'


def compare(seed: int, count: int) -> None:
    case, d = drawn(seed), random.Random(seed + 5000)
    want = carried_out(case, [PLAIN])
    assert not isinstance(want, str), f"seed {seed}, {case}: {want}"
    for _ in range(count):
        at = d.randrange(1, STEPS) if d.random() < 0.4 and not case["ema"] else None
        layouts = [layout_of(d) for _ in range(1 if at is None else 2)]
        found = carried_out(case, layouts, at)
        if isinstance(found, str):
            assert REFUSED in found, found
        else:
            _same(found, want, f"seed {seed}, {case}\nin {layouts}, a checkpoint after {at}")


@pytest.mark.parametrize("seed", [22, *(pytest.param(s, marks=pytest.mark.full) for s in range(60) if s != 22)])
def test_random_trainings_have_the_same_bits_in_random_layouts(seed):
    compare(seed, 3)
