"""What DeepSpeed's own unit tests (tests/peer/deepspeed_tests.py) ask for beyond the scripts of the other compat tests:
names, sections of the configuration, coalesced reductions, models that an engine has or that are 16-bit already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from deepc.errors import ArgumentError, ConfigError, DeepcError, MisuseError, UnsupportedError
from deepc.optim import Lion
from plainly import adam_config as config
from ranks import run_ranks
from torch import nn


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def engine_of(stage: int = 0, model: nn.Module | None = None, **more):
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed

    model = model or net()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage, **more))[0]


# ---- names -----------------------------------------------------------------------------------------------------------
def test_names_that_the_suite_imports(deepspeed, monkeypatch):
    from deepspeed.accelerator import get_accelerator, is_current_accelerator_supported
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from deepspeed.runtime.lr_schedules import CYCLE_MIN_LR, DECAY_LR_RATE, LR_RANGE_TEST_MIN_LR
    from deepspeed.runtime.zero.utils import ZeRORuntimeException
    from deepspeed.utils.torch import is_functorch_transforming, register_grad_hook, required_torch_version

    assert is_current_accelerator_supported() and issubclass(ZeRORuntimeException, Exception)
    assert (CYCLE_MIN_LR, DECAY_LR_RATE, LR_RANGE_TEST_MIN_LR) == (
        "cycle_min_lr",
        "decay_lr_rate",
        "lr_range_test_min_lr",
    )
    one, other = {"params": [], "a": 1}, {"params": [], "b": 2}
    assert split({"params": []}) == [{"params": []}] and split((one, other)) == [one, other]
    with pytest.raises(ValueError):
        split(3)
    assert required_torch_version(2.1) and not required_torch_version(min_version="99.0")
    assert required_torch_version(max_version="99.0") and not required_torch_version(max_version=1.0)
    with pytest.raises(AssertionError):
        required_torch_version()
    from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
    from deepspeed.checkpoint.constants import VOCABULARY_PARAMETER_PATTERNS

    assert (UNIVERSAL_CHECKPOINT_INFO, VOCABULARY_PARAMETER_PATTERNS) == (
        "universal_checkpoint_info",
        "vocabulary_parameter_patterns",
    )
    inside = []
    torch.func.grad(lambda x: inside.append(is_functorch_transforming()) or x)(torch.tensor(1.0))
    assert inside == [True] and not is_functorch_transforming()
    p, seen = nn.Parameter(torch.ones(2)), []
    register_grad_hook(p, lambda q: seen.append(q.grad.clone()))
    (p * 3).sum().backward()
    assert torch.equal(seen[0], torch.full((2,), 3.0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert get_accelerator().device_count() == 2
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert get_accelerator().device_count() == 3


def test_a_checkpoint_of_lion_loads_under_its_other_name(deepspeed, tmp_path):
    import deepc

    cfg = config(1, optimizer={"type": "Lion", "params": {"lr": 0.1}})
    engine = deepc.initialize(model=net(), config=cfg)[0]
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    want = [p.detach().clone() for p in engine.module.parameters()]
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    engine = engine_of(1, optimizer={"type": "Lion", "params": {"lr": 0.1}})
    assert engine.load_checkpoint(str(tmp_path))[0] is not None and type(engine.optimizer.optimizer) is not Lion
    assert all(torch.equal(a, b) for a, b in zip(want, engine.module.parameters()))
    engine.destroy()


def test_the_engine_tells_its_log_level_and_flops_profiler(deepspeed, caplog):
    caplog.set_level("INFO", logger="deepc")  # which is as it was when the test is over
    profile = {"enabled": True, "profile_step": 1, "output_file": os.devnull}
    engine = engine_of(log_level="error", flops_profiler=profile)
    assert engine.log_level() == "ERROR" and engine.flops_profiler.flops is None
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    assert engine.flops_profiler.params == 144 and engine.flops_profiler.macs == 2 * 2 * 8 * 8
    assert engine.flops_profiler.flops >= 2 * engine.flops_profiler.macs
    engine.destroy()
    engine = engine_of()
    assert engine.log_level() is None and not hasattr(engine, "flops_profiler")
    engine.destroy()


def test_param_groups_of_a_configured_muon_have_names(deepspeed, tmp_path):
    rates = {"muon_lr": 0.02, "adam_lr": 1e-5}
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.02, 1e-5], "warmup_num_steps": 2}}
    engine = engine_of(1, optimizer={"type": "Muon", "params": rates}, scheduler=schedule)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path))
    assert {g["name"]: g["lr"] for g in engine.optimizer.param_groups} == {"muon-params": 0.02, "adam-params": 1e-5}
    engine.destroy()


def test_classes_that_deepc_has_not_can_be_subclassed(deepspeed):
    from deepspeed.linear import QuantizationConfig

    class Mixture(QuantizationConfig):
        kind = "mixture"

    class Other(QuantizationConfig, nn.Module):
        pass

    assert Mixture.kind == "mixture" and not isinstance(net(), Mixture)
    for make in (lambda: Mixture(8), Other):
        with pytest.raises(UnsupportedError, match="QuantizationConfig does not exist in deepc: .*not built yet"):
            make()


def test_an_engine_name_that_nobody_has_is_told_of_the_layer(deepspeed):
    class Model(nn.Linear):
        @property
        def broken(self):
            return self.no_such_part

    engine = engine_of(model=Model(4, 4))
    with pytest.raises(AttributeError, match="deepc's DeepSpeedEngine has no attribute.*docs/compat.md"):
        engine.no_such_method
    assert not hasattr(engine, "no_such_method") and engine.in_features == 4
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'broken'"):  # torch's words, of the model
        engine.broken


# ---- sections --------------------------------------------------------------------------------------------------------
def test_zero_config_by_keywords(deepspeed, caplog):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    plain = DeepSpeedZeroConfig()
    assert plain.stage == 0 and plain.offload_optimizer is None and plain.overlap_comm is False
    assert plain.reduce_bucket_size == 500_000_000 and plain == DeepSpeedZeroConfig(stage="auto")
    full = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=12345.0, offload_param={}, elastic_checkpoint=True)
    assert "elastic checkpointing is deprecated" in caplog.text
    assert full.overlap_comm is True and full.prefetch_bucket_size == full.stage3_prefetch_bucket_size == 12345
    assert isinstance(full.offload_param, DeepSpeedZeroOffloadParamConfig) and full.offload_param.device == "none"
    old = DeepSpeedZeroConfig(cpu_offload=True, stage3_gather_fp16_weights_on_model_save=True)
    assert isinstance(old.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert old.offload_optimizer.device == "cpu" and old.gather_16bit_weights_on_model_save is True
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline is True
    assert DeepSpeedZeroConfig(leaf_module={"classes": "nn.Linear"}).leaf_module.classes == ["nn.Linear"]
    old.stage = 2
    assert old.stage == 2 and old.model_dump()["stage"] == 2
    for wrong, says in (
        ({"stag": 1}, 'no field .stag.. Did you mean "stage"'),
        ({"stage": 4}, "stage = 4"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size = 0 must be int from 1"),
        ({"contiguous_gradients": "yes"}, "must be bool"),
        ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}, "both are given"),
    ):
        with pytest.raises(ValueError, match=says):
            DeepSpeedZeroConfig(**wrong)
    with pytest.raises(ConfigError):
        plain.stage = "three"


def test_monitor_sections_of_a_config(deepspeed, tmp_path):
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.monitor.csv_monitor import csvMonitor
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.monitor.wandb import WandbMonitor
    from deepspeed.runtime.config import DeepSpeedConfig

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "mine"}
    made = DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": section, "zero_optimization": {"stage": 2}})
    assert made.monitor_config.enabled and made.zero_config.stage == 2
    bare = DeepSpeedConfig({"train_batch_size": 1, "optimizer": None, "zero_optimization": True, "csv_monitor": None})
    assert (bare.zero_config.stage, bare.optimizer_name, bare.scheduler_params) == (1, None, None)
    assert not bare.monitor_config.enabled
    master = MonitorMaster(made.monitor_config)
    master.write_events([("Eval/accuracy", 0.5, 7)])
    master.close()
    assert (tmp_path / "mine" / "Eval_accuracy.csv").read_text().split() == ["step,accuracy", "7,0.5"]
    wandb = WandbMonitor(made.monitor_config.wandb)  # not enabled: needs no package, writes nothing
    wandb.write_events([("a", 1.0, 1)])
    assert wandb.enabled is False and wandb.project == DeepSpeedMonitorConfig().wandb.project == "deepspeed"
    off = csvMonitor(DeepSpeedMonitorConfig(csv_monitor={"output_path": str(tmp_path / "off")}).csv_monitor)
    off.write_events([("a", 1.0, 1)])
    assert not (tmp_path / "off").exists()


def test_gradient_allreduce_op_of_the_config(deepspeed):
    from deepspeed.runtime.config import DeepSpeedConfig

    assert DeepSpeedConfig({"train_batch_size": 1}).gradient_allreduce_op == "mean"
    assert DeepSpeedConfig({"train_batch_size": 1, "gradient_allreduce_op": "SUM"}).gradient_allreduce_op == "sum"
    for more, says in (
        ({"gradient_allreduce_op": "max"}, "Invalid gradient_allreduce_op"),
        ({"zero_optimization": {"stage": 3}}, "not supported with ZeRO stage 3"),
        ({"deepc": {"deterministic": "layout"}}, "not supported with deepc.deterministic"),
    ):
        with pytest.raises(ValueError, match=says):
            DeepSpeedConfig({"train_batch_size": 1, "gradient_allreduce_op": "sum", **more})


def _gradient(rank, world, op):
    engine = engine_of(2, gradient_allreduce_op=op)
    engine.backward(engine(torch.full((1, 8), rank + 1.0)).square().mean())
    return engine.full_grad(next(engine.module.parameters()))


def test_the_sum_of_gradients_is_ranks_times_their_mean():
    mean, total = (run_ranks(_gradient, 2, args=(op,))[0] for op in ("mean", "sum"))
    assert mean.abs().max() > 0 and torch.equal(total, 2 * mean)


def test_a_leaf_module_section_marks_modules(deepspeed):
    from deepspeed.utils import z3_leaf_module

    leaf = {"classes": ["torch.nn.modules.linear.Linear"], "names": ["1"], "name_suffixes": ["nowhere"]}
    engine = engine_of(3, zero_optimization={"stage": 3, "leaf_module": leaf})
    assert [z3_leaf_module(m) for m in engine.module] == [True, True, True] and not z3_leaf_module(engine.module)
    assert not any(z3_leaf_module(m) for m in engine_of(3).module)


def test_hjson_and_the_old_argument(deepspeed, tmp_path, monkeypatch):
    path = tmp_path / "ds.hjson"
    path.write_text(
        "{\n  # without quotes\n  train_batch_size: 1\n  optimizer: {\n    type: Adam\n    params: {lr: 0.01}\n  }\n}\n"
    )
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match="line 3, column 3: not JSON.*pip install hjson"):
        deepspeed.initialize(model=net(), config=str(path))

    class Error(ValueError):
        pass

    def loads(text, object_pairs_hook):
        assert "train_batch_size: 1" in text
        return object_pairs_hook([("train_batch_size", 1)])

    monkeypatch.setitem(sys.modules, "hjson", SimpleNamespace(loads=loads, HjsonDecodeError=Error))
    assert deepspeed.DeepSpeedConfig(str(path)).train_batch_size == 1
    path.write_text(json.dumps(config()))
    engine, *_ = deepspeed.initialize(args=SimpleNamespace(deepscale_config=str(path)), model=net())
    assert engine.train_micro_batch_size_per_gpu() == 1


# ---- engines ---------------------------------------------------------------------------------------------------------
def _coalesced(rank, world, stage, together, dtype):
    import contextlib

    more = {dtype: {"enabled": True, **({"initial_scale_power": 4} if dtype == "fp16" else {})}} if dtype else {}
    engine = engine_of(stage, gradient_accumulation_steps=3, gradient_clipping=0.05, **more)
    out = []
    for step in range(3):
        with engine.coalesce_grad_reduction() if together else contextlib.nullcontext():
            for i in range(3):
                torch.manual_seed(100 * step + 10 * i + rank)
                engine.set_gradient_accumulation_boundary(i == 2)
                loss = engine(torch.randn(4, 8).to(engine.dtype)).float().square().mean()
                engine.backward(loss)
        grads = [engine.full_grad(p) for p in engine.module.parameters()]
        engine.step()
        out.append((grads, engine.get_global_grad_norm()))
    return out, [engine.full_fp32_param(p) for p in engine.module.parameters()]


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2)), 3])
def test_coalesced_reductions_train_the_same(stage):
    (alone, want), (together, got) = (run_ranks(_coalesced, 2, args=(stage, on, None))[0] for on in (False, True))
    for (a, norm), (b, other) in zip(alone, together):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
        assert other == pytest.approx(norm, rel=1e-5) and norm > 0.05
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_coalesced_reductions_in_fp16_train_the_same():
    (alone, _), (together, _) = (run_ranks(_coalesced, 2, args=(2, on, "fp16"))[0] for on in (False, True))
    torch.testing.assert_close(together[0][0], alone[0][0], rtol=2e-2, atol=1e-4)


def test_coalesced_reductions_sum_in_fp32(deepspeed):
    """What a 16-bit `.grad` would lose: 1 and eight times 2^-10."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8))

        def forward(self, factor):
            return self.w.sum() * factor

    engine = engine_of(2, Scaled(), bf16={"enabled": True})
    with engine.coalesce_grad_reduction():
        for factor in (1.0, *[2.0**-10] * 8):
            engine.backward(engine(factor))
    assert engine.full_grad(engine.module.w).eq(1 + 2.0**-7).all()
    engine.step()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_bare_backwards_in_coalesced_reductions(deepspeed, dtype):
    """They are divided by the accumulation steps as outside, whoever runs the others; in fp16 the loss must be
    scaled."""
    from deepc.errors import DeepcError

    more = {dtype: {"enabled": True, "initial_scale_power": 4}} if dtype == "fp16" else {}
    found = []
    for bare in (set(), {0, 1, 2}, {0, 2}, {1}):
        engine = engine_of(2, gradient_accumulation_steps=3, **more)
        with engine.coalesce_grad_reduction():
            for i in range(3):
                torch.manual_seed(i)
                engine.set_gradient_accumulation_boundary(i == 2)
                loss = engine(torch.randn(4, 8).to(engine.dtype)).float().square().mean()
                engine.scale(loss).backward() if i in bare else engine.backward(loss)
        found.append([engine.full_grad(p) for p in engine.module.parameters()])
        engine.step()
    for grads in found[1:]:
        torch.testing.assert_close(grads, found[0], rtol=1e-5 if dtype == "fp32" else 1e-2, atol=1e-5)
    if dtype == "fp16":
        with engine.coalesce_grad_reduction(), pytest.raises(DeepcError, match=r"engine\.scale\(loss\)"):
            engine(torch.ones(4, 8).half()).float().square().mean().backward()


def test_an_engine_runs_its_throughput_timer(deepspeed):
    engine, *_ = deepspeed.initialize(
        model=tiny.make_model(), config=tiny.config(1, micro=4, gradient_accumulation_steps=2)
    )
    with torch.no_grad():
        engine.eval()(*tiny.make_batch(0))  # an evaluation is no part of it
    assert not engine.tput_timer.started and engine.tput_timer.avg_samples_per_sec() == float("-inf")
    engine.train()
    for number in range(6):
        engine.backward(engine(*tiny.make_batch(number)))
        engine.step()
    assert (engine.tput_timer.micro_step_count, engine.tput_timer.global_step_count) == (6, 3)
    assert 0 < engine.tput_timer.avg_samples_per_sec() < float("inf")
    engine.destroy()


def test_step_and_nesting_in_no_sync(deepspeed):
    engine = engine_of(2)
    x = torch.ones(2, 8)
    with engine.no_sync():
        engine.backward(engine(x).square().mean())
        with pytest.raises(AssertionError, match=r"It is illegal to call Engine.step\(\) inside no_sync"):
            engine.step()
        with engine.no_sync():
            engine.backward(engine(x).square().mean())
        with pytest.raises(AssertionError, match="illegal"):
            engine.step()
    engine.backward(engine(x).square().mean())
    assert engine.step().applied and engine.global_steps == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide", [True, False])
def test_moments_of_cpu_adam(deepspeed, dtype, wide):
    """fp32_optimizer_states: elementwise against the formula in torch, with what is kept rounded to its dtype."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(1000).to(dtype))
    kept = torch.float32 if wide else dtype
    want, m, v = p.detach().clone(), torch.zeros(1000, dtype=kept), torch.zeros(1000, dtype=kept)
    optimizer = DeepSpeedCPUAdam([p], lr=1e-2, weight_decay=0.1, fp32_optimizer_states=wide)
    for step in range(1, 6):
        if step == 4:  # as a checkpoint does; torch alone would cast the moments to the parameter's dtype
            saved = optimizer.state_dict()
            optimizer = DeepSpeedCPUAdam([p], lr=1e-2, weight_decay=0.1, fp32_optimizer_states=wide)
            optimizer.load_state_dict(saved)
        p.grad = torch.randn(1000).to(dtype)
        g, w = p.grad.double(), want.double() * (1 - 1e-2 * 0.1)
        m64, v64 = m.double() + 0.1 * (g - m.double()), 0.999 * v.double() + 0.001 * g * g
        w -= 1e-2 / (1 - 0.9**step) * m64 / ((v64 / (1 - 0.999**step)).sqrt() + 1e-8)
        want, m, v = w.to(dtype), m64.to(kept), v64.to(kept)
        optimizer.step()
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == kept
        one = 2 * torch.finfo(kept).eps  # a double between two fp32 results may round to either side
        torch.testing.assert_close(state["exp_avg"], m, rtol=one, atol=1e-7)
        torch.testing.assert_close(state["exp_avg_sq"], v, rtol=one, atol=1e-7)
        torch.testing.assert_close(p.detach(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        want, m, v = p.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()


def test_misuse_of_coalesced_reductions(deepspeed):
    engine = engine_of(2)

    def backward():
        engine.backward(engine(torch.ones(2, 8)).square().mean())

    with engine.coalesce_grad_reduction():
        backward()
        for wrong in (engine.step, engine.no_sync().__enter__, engine.coalesce_grad_reduction().__enter__):
            with pytest.raises(AssertionError, match="no_sync|coalesce"):
                wrong()
    engine.step()
    with engine.no_sync(), pytest.raises(AssertionError, match="nested"):
        engine.coalesce_grad_reduction().__enter__()
    before = engine.global_steps
    with pytest.raises(KeyError), engine.coalesce_grad_reduction():
        backward()
        raise KeyError("of the script")
    engine.zero_grad()
    backward()
    engine.step()
    assert engine.global_steps == before + 1


def test_exceptions_that_scripts_catch(deepspeed, tmp_path):
    with pytest.raises(AssertionError, match="needs model="):
        deepspeed.initialize(model=None, config=config())
    with pytest.raises(AssertionError, match="no configuration"):
        deepspeed.initialize(model=net())
    with pytest.raises(AssertionError, match="twice"):
        deepspeed.initialize(args=SimpleNamespace(deepspeed_config="a.json"), model=net(), config=config())
    with pytest.raises(AssertionError, match="needs an optimizer"):
        deepspeed.initialize(model=net(), config={"train_batch_size": 1})[0].step()
    assert issubclass(MisuseError, ConfigError) and issubclass(MisuseError, ArgumentError)
    engine = engine_of()
    for nowhere in ("", None):
        with pytest.raises(ValueError, match="save_dir"):
            engine.save_checkpoint(nowhere)


def _without_a_group(rank, world):
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    import torch.distributed as dist

    dist.destroy_process_group()
    out = []
    for call in (
        lambda: deepspeed.init_distributed(dist_init_required=False),
        lambda: deepspeed.initialize(model=net(), config=config(), dist_init_required=False),
    ):
        try:
            call()
        except AssertionError as exc:
            out.append(str(exc))
    return out, dist.is_initialized()


def test_dist_init_required_false_makes_no_group():
    (said, made), *_ = run_ranks(_without_a_group, 1, fresh=True)
    assert len(said) == 2 and all("no process group yet" in s for s in said) and not made


def test_the_optimizer_that_initialize_returns(deepspeed):
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    model = net()
    client = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=client, config=config())
    assert optimizer == client and optimizer is engine.optimizer and isinstance(optimizer, torch.optim.AdamW)
    assert engine.optimizer.optimizer is client and not isinstance(optimizer, FusedAdam)
    assert len({optimizer, client}) == 1
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    schedule.step()
    assert client.param_groups[0]["lr"] == 5e-3
    assert isinstance(engine_of().optimizer, FusedAdam)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    adam = {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}
    plain, offloaded = engine_of(optimizer=adam).optimizer, engine_of(optimizer=adam, zero_optimization=zero).optimizer
    assert type(plain.optimizer) is FusedAdam and not plain.optimizer.adam_w_mode
    assert type(offloaded.optimizer) is DeepSpeedCPUAdam and not offloaded.optimizer.adam_w_mode
    lion, lamb = {"type": "Lion", "params": {"lr": 0.1}}, {"type": "Lamb"}
    found = [engine_of(optimizer=o, zero_optimization=z).optimizer.optimizer for o in (lion, lamb) for z in ({}, zero)]
    assert [type(o).__name__ for o in found] == ["FusedLion", "DeepSpeedCPULion", "FusedLamb", "FusedLamb"]
    other = net()
    client = torch.optim.AdamW(other.parameters(), lr=1e-2)
    sharded = deepspeed.initialize(model=other, optimizer=client, config=config(1))[1]
    assert sharded != client and not isinstance(sharded, torch.optim.AdamW) and sharded.optimizer is client


@pytest.mark.parametrize(
    ("kind", "params", "name", "momentum"),
    [
        ("SGD", {"momentum": 0.9}, "SGD", [0.9]),
        ("RMSprop", {"momentum": 0.5}, "RMSprop", [0.5]),
        ("ADAM", {"betas": [0.8, 0.9]}, "adam", [(0.8, 0.9)]),
        ("Lion", {"betas": [0.8, 0.9]}, "lion", [(0.8, 0.9)]),
        ("Adagrad", {}, "adagrad", [0.0]),
        ("NAdam", {}, "NAdam", [(0.9, 0.999)]),
        ("OneBitAdam", {"betas": [0.8, 0.9]}, "OneBitAdam", [(0.8, 0.9)]),
    ],
)
def test_names_and_momentum_of_configured_optimizers(deepspeed, kind, params, name, momentum):
    """DeepSpeed gives the names of its own optimizers in small letters, and others' as the configuration has them."""
    engine = engine_of(optimizer={"type": kind, "params": {"lr": 0.1, **params}})
    assert engine.optimizer_name() == name
    assert [tuple(m) if isinstance(m, (list, tuple)) else m for m in engine.get_mom()] == momentum


def _scales(engine, overflows):
    found = []
    for overflow in overflows:
        x = torch.full((2, 8), float("inf") if overflow else 0.5, dtype=torch.float16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
        found.append(engine.loss_scale)
    return found


def test_the_loss_scale_does_not_wait_for_the_hysteresis_at_stage_0(deepspeed, tmp_path):
    """DeepSpeed's FP16_Optimizer halves it at each overflow and knows no hysteresis; its ZeRO stages do."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 3, "min_loss_scale": 4}
    engine = engine_of(0, fp16=fp16)
    assert _scales(engine, [True, False, True, True]) == [8, 8, 4, 4]
    engine.save_checkpoint(tmp_path)
    again = engine_of(0, fp16=fp16)
    again.load_checkpoint(tmp_path)
    assert _scales(again, [True]) == [4]
    assert _scales(engine_of(1, fp16=fp16), [True, True, True]) == [16, 16, 8]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_an_earlier_engine_trains(deepspeed, stage):
    model = net()
    first = engine_of(stage, model)
    first.backward(first(torch.ones(2, 8)).square().mean())
    with pytest.raises(ConfigError, match="gradient_cliping"):  # which leaves the first one and its states
        engine_of(stage, model, gradient_cliping=1.0)
    assert first.step().applied
    weights = [first.full_fp32_param(p).clone() for p in model.parameters()]
    second = engine_of(stage, model)
    torch.testing.assert_close([second.full_fp32_param(p) for p in model.parameters()], weights, rtol=0, atol=0)
    second.backward(second(torch.ones(2, 8)).square().mean())
    assert second.step().applied
    assert not torch.equal(second.full_fp32_param(next(model.parameters())), weights[0])


def test_engines_are_told_in_the_order_of_their_making():
    """Ranks end the earlier engines of a model one after the other, which is collective."""
    from deepc.zero.parameters import owners

    class Engine:
        state = SimpleNamespace(trained=[], let_go=lambda trainers: None)

    made = [Engine() for _ in range(40)]
    for engine in made:
        owners.enter(engine)
    owners.leave(made.pop(7))
    assert [e for e in owners.alive() if isinstance(e, Engine)] == made


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_an_engine_for_evaluation_leaves_the_one_that_trains(deepspeed, stage, tmp_path):
    """Trainer makes one where another Trainer evaluates the model. An engine that was destroyed says so."""
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    engine = engine_of(stage)
    watcher = deepspeed.initialize(
        model=engine.module, config={k: v for k, v in config(stage).items() if k != "optimizer"}
    )[0]
    with torch.no_grad():
        seen = watcher(x)
    assert torch.equal(seen, engine.module(x))
    engine.backward((engine(x) - y).square().mean())
    engine.module.zero_grad()  # means the one that trains
    with pytest.raises(DeepcError, match="without a backward"):
        engine.step()
    watcher.destroy()
    engine.module.zero_grad()
    engine.backward((engine(x) - y).square().mean())
    assert engine.step().applied and not torch.equal(seen, engine.module(x))
    loss = (engine(x) - y).square().mean()
    engine.destroy()
    engine.module.zero_grad()
    with pytest.raises(MisuseError, match=r"engine\.backward\(\) of an engine that was destroyed"):
        engine.backward(loss)
    for call in (
        engine.step,
        engine.zero_grad,
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.load_checkpoint(tmp_path),
        lambda: engine.offload_states(device="nvme"),
        engine.reload_states,
    ):
        with pytest.raises(MisuseError, match="destroyed"):
            call()


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_model_without_a_section_trains_in_its_dtype(deepspeed, dtype, stage):
    model = net().to(dtype)
    engine = engine_of(stage, model, fp16={"enabled": False})
    assert engine.dtype == dtype and engine.loss_scale == 1
    before = engine.full_fp32_param(next(model.parameters())).clone()
    engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().square().mean())
    assert engine.step().applied and not torch.equal(before, engine.full_fp32_param(next(model.parameters())))


# ---- the runner of DeepSpeed's own tests -----------------------------------------------------------------------------
RUNNER = Path(__file__).parents[1] / "peer" / "deepspeed_tests.py"


def test_the_runner_says_what_is_no_checkout(tmp_path):
    done = subprocess.run([sys.executable, RUNNER, "--deepspeed", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "not a checkout of DeepSpeed" in done.stderr


SUITE = """
import deepspeed
from deepspeed.runtime.no_such_file import helper, Base
from unit.common import DistributedExec

class Mine(Base):
    pass

def test_passes():
    assert deepspeed.__git_hash__ == "deepc" and DistributedExec.reuse_dist_env is False

def test_uses_a_private_name():
    helper(3)

def test_fails():
    assert deepspeed.zero is None
"""
COMMON = """
import pytest
import torch.multiprocessing as mp

class DistributedExec:
    def _dist_run(self):
        pass
"""


@pytest.mark.full
def test_the_runner_counts_a_suite(tmp_path):
    unit = tmp_path / "tests" / "unit"
    unit.mkdir(parents=True)
    for name, text in (("common.py", COMMON), ("__init__.py", ""), ("test_mine.py", SUITE)):
        (unit / name).write_text(text)
    (tmp_path / "tests" / "conftest.py").write_text("")
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, RUNNER, "--deepspeed", tmp_path, "--json", out, "test_mine"], capture_output=True, text=True
    )
    found = {t["test"].split("::")[1]: t.get("kind", t["outcome"]) for t in json.loads(out.read_text())["tests"]}
    assert found == {"test_passes": "passed", "test_uses_a_private_name": "private", "test_fails": "failed"}, done
    assert done.returncode == 1 and "| test_mine.py | 1 / 3 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 1 |" in done.stdout
    assert "deepspeed.runtime.no_such_file.helper" in done.stdout and "1 / 2, 50.0 %" in done.stdout
    table = subprocess.run([sys.executable, RUNNER, "--again", out], capture_output=True, text=True).stdout
    assert table and table in done.stdout
