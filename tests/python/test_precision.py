"""Loss scaling against DeepSpeed's class, and what the processor is said to have."""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable, Mapping

import deepc
import pytest
import torch
from deepc import precision
from deepc.config import Config
from deepc.core import cpu
from deepc.engine.data import cast_floats
from deepc.errors import ArgumentError, CheckpointError
from deepc.precision import DynamicLossScaler, LossScaleError, StaticLossScaler


def config(**sections) -> Config:
    return Config.load({"train_batch_size": 1, **sections}, world_size=1)


class Reads(torch.nn.Module):
    """Of a batch in one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, batch):
        self.seen.append(batch)
        values = batch["values"] if isinstance(batch, Mapping) else batch.values
        return self.linear(values).float().square().mean()


@dataclasses.dataclass(frozen=True)
class Batch:
    values: torch.Tensor
    ids: torch.Tensor
    name: str = "first"


@dataclasses.dataclass(slots=True)
class Slotted:
    values: torch.Tensor
    ids: torch.Tensor


def batches() -> list[object]:
    fields = {"values": torch.randn(2, 4), "ids": torch.arange(2)}
    transformers = pytest.importorskip("transformers")
    names = [(n, torch.Tensor | None, None) for n in fields]
    output = dataclasses.make_dataclass("Output", names, bases=(transformers.utils.ModelOutput,))
    read_only = types.MappingProxyType(dict(fields))
    made = [collections.OrderedDict(fields), collections.UserDict(fields), Batch(**fields), Slotted(**fields)]
    return [transformers.BatchEncoding(fields), output(**fields), *made, read_only]


def test_auto_cast_goes_into_any_mapping_and_dataclass() -> None:
    """A BatchEncoding was passed on as it is, and a model's output became a dict."""
    raw = {"train_batch_size": 2, "fp16": {"enabled": True, "auto_cast": True, "loss_scale": 1.0}}
    model = Reads()
    engine = deepc.initialize(model=model, config=raw)[0]
    try:
        for batch in batches():
            engine(batch)
            seen = model.seen[-1]
            got = {k: seen[k] if isinstance(seen, Mapping) else getattr(seen, k) for k in ("values", "ids")}
            was = {k: batch[k] if isinstance(batch, Mapping) else getattr(batch, k) for k in ("values", "ids")}
            assert got["values"].dtype == torch.float16 and torch.equal(got["values"], was["values"].half())
            assert got["ids"] is was["ids"] and was["values"].dtype == torch.float32
            assert type(seen) is (dict if isinstance(batch, types.MappingProxyType) else type(batch))
    finally:
        engine.destroy()


def test_auto_cast_leaves_alone_what_has_nothing_to_cast() -> None:
    """A cache that the model changes is the caller's."""
    cache = collections.UserDict(length=torch.arange(2))
    kept = Batch(torch.arange(2), torch.arange(2))
    assert all(a is b for a, b in zip(cast_floats((cache, kept), torch.float16), (cache, kept)))


# (arguments, sequence of overflows as 0 and 1, scale after each update), worked out by hand from the rules
BY_HAND = [
    ({"initial_scale": 16.0, "window": 2, "hysteresis": 1}, "1000000", [8, 8, 8, 16, 16, 32, 32]),
    ({"initial_scale": 16.0, "window": 1000, "hysteresis": 2}, "1101", [16, 8, 8, 4]),
    ({"initial_scale": 16.0, "window": 1000, "hysteresis": 2, "consecutive_hysteresis": True}, "1011", [16, 16, 16, 8]),
    ({"initial_scale": 4.0, "window": 1, "hysteresis": 2, "min_scale": 3.0}, "11001", [4, 3, 3, 6, 6]),
]


@pytest.mark.parametrize(("arguments", "overflows", "scales"), BY_HAND)
def test_by_hand(arguments, overflows, scales):
    scaler = DynamicLossScaler(**arguments)
    got = []
    for o in overflows:
        scaler.update_scale(o == "1")
        got.append(scaler.loss_scale)
    assert got == scales


def test_overflow_at_the_minimum_raises_and_names_the_key():
    scaler = DynamicLossScaler(2.0, min_scale=1.0, hysteresis=1)
    scaler.update_scale(True)
    assert scaler.loss_scale == 1.0
    with pytest.raises(LossScaleError, match="fp16.min_loss_scale = 1"):
        scaler.update_scale(True)
    scaler.raises = False  # DeepSpeed's stage 0
    scaler.update_scale(True)
    assert scaler.loss_scale == 1.0 and scaler.last_overflow_step == 1


@pytest.fixture(scope="module")
def theirs():
    module = pytest.importorskip(
        "deepspeed.runtime.fp16.loss_scaler", reason="deepspeed is not installed: parity is not compared"
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(module.dist, "get_rank", lambda *a: 0)  # it logs on rank 0, and asks for a process group
    yield module
    patch.undo()


@pytest.mark.parametrize("seed", range(40))
def test_equal_to_deepspeed(theirs, seed):
    rng = random.Random(seed)
    initial, window, hysteresis = 2 ** rng.randint(0, 20), rng.randint(1, 9), rng.randint(1, 4)
    consecutive, least, rate = rng.random() < 0.5, rng.choice([0.25, 1, 3, 64]), rng.choice([0.05, 0.3, 0.6])
    ours = DynamicLossScaler(initial, window, least, hysteresis, consecutive)
    real = theirs.DynamicLossScaler(
        init_scale=initial,
        scale_window=window,
        min_scale=least,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive,
    )
    for step in range(500):
        overflow = rng.random() < rate
        failures = []
        for scaler in (ours, real):
            try:
                scaler.update_scale(overflow)
                failures.append(False)
            except Exception as exc:
                assert "minimum" in str(exc) or "smallest" in str(exc)
                failures.append(True)
        assert failures[0] == failures[1], f"step {step}"
        if failures[0]:
            return
        assert ours.loss_scale == real.loss_scale, f"step {step}"
        assert ours.hysteresis_left == real.cur_hysteresis, f"step {step}"


def test_state_round_trip_continues_exactly():
    rng = random.Random(3)
    overflows = [rng.random() < 0.1 for _ in range(400)]
    whole, first, second = (DynamicLossScaler(2.0**16, 7, hysteresis=3) for _ in range(3))
    want = []
    for o in overflows:
        whole.update_scale(o)
        want.append(whole.loss_scale)
    got = []
    for o in overflows[:150]:
        first.update_scale(o)
        got.append(first.loss_scale)
    second.load_state_dict(first.state_dict())
    for o in overflows[150:]:
        second.update_scale(o)
        got.append(second.loss_scale)
    assert got == want


def test_static_scaler():
    scaler = StaticLossScaler(128)
    scaler.update_scale(True), scaler.update_scale(False)
    assert scaler.loss_scale == 128.0 and not scaler.dynamic
    other = StaticLossScaler(1)
    other.load_state_dict(scaler.state_dict())
    assert other.loss_scale == 128.0
    with pytest.raises(CheckpointError, match="fp16.loss_scale"):
        other.load_state_dict(DynamicLossScaler().state_dict())
    with pytest.raises(CheckpointError, match="fp16.loss_scale"):
        DynamicLossScaler().load_state_dict(scaler.state_dict())


@pytest.mark.parametrize(
    "bad", [{"initial_scale": 0}, {"window": 0}, {"hysteresis": 0}, {"min_scale": 0}, {"initial_scale": float("nan")}]
)
def test_bad_arguments(bad):
    with pytest.raises(ArgumentError):
        DynamicLossScaler(**bad)
    with pytest.raises(ArgumentError):
        StaticLossScaler(0)


def test_scaler_of_a_config():
    assert precision.make_scaler(config()) is None
    assert precision.make_scaler(config(bf16={"enabled": True})) is None
    static = precision.make_scaler(config(fp16={"enabled": True, "loss_scale": 64}))
    assert isinstance(static, StaticLossScaler) and static.loss_scale == 64
    dynamic = precision.make_scaler(
        config(
            fp16={
                "enabled": True,
                "initial_scale_power": 5,
                "loss_scale_window": 3,
                "hysteresis": 4,
                "min_loss_scale": 2,
                "consecutive_hysteresis": True,
            }
        )
    )
    assert isinstance(dynamic, DynamicLossScaler)
    assert (
        dynamic.loss_scale,
        dynamic.window,
        dynamic.hysteresis,
        dynamic.min_scale,
        dynamic.consecutive_hysteresis,
    ) == (32, 3, 4, 2, True)
    assert precision.make_scaler(config(fp16={"enabled": True})).loss_scale == 65536


def test_choose_dtype():
    assert precision.choose_dtype(config()) is torch.float32
    assert precision.choose_dtype(config(fp16={"enabled": True})) is torch.float16
    assert precision.choose_dtype(config(bf16={"enabled": True})) is torch.bfloat16
    with pytest.raises(ArgumentError, match="fp8"):
        precision.torch_dtype("fp8")


@pytest.mark.parametrize(
    ("dtype", "flags", "machine", "limit", "has"),
    [
        ("bf16", "avx2 avx512f", "x86_64", "ALL", False),
        ("bf16", "avx512f avx512_bf16", "x86_64", "ALL", True),
        ("bf16", "avx512f avx512_bf16", "x86_64", "AVX512_CORE_BF16", True),
        ("bf16", "avx512f avx512_bf16", "x86_64", "AVX512_CORE", False),
        ("bf16", "avx512f avx512_bf16 amx_bf16", "x86_64", "avx2", False),
        ("bf16", "amx_bf16", "x86_64", "AVX512_CORE_FP16", False),
        ("bf16", "amx_bf16", "x86_64", "AVX512_CORE_AMX", True),
        ("bf16", "avx512_bf16", "x86_64", "no such level", True),
        ("fp16", "avx512_bf16 amx_bf16", "x86_64", "ALL", False),
        ("fp16", "avx512_fp16", "x86_64", "ALL", True),
        ("fp16", "avx512_fp16", "x86_64", "AVX512_CORE_BF16", False),
        ("fp16", "amx_fp16", "x86_64", "AVX512_CORE_AMX", False),
        ("bf16", "asimd bf16", "aarch64", "ALL", True),
        ("fp16", "asimd asimdhp", "aarch64", "ALL", True),
        ("bf16", "asimd", "aarch64", "ALL", False),
    ],
)
def test_arithmetic_rules(dtype, flags, machine, limit, has):
    got, why = cpu._arithmetic(dtype, frozenset(flags.split()), machine, limit)
    assert got is has
    assert why.startswith("the processor has")


@pytest.mark.parametrize(
    ("flags", "limit", "vendor", "pays"),
    [
        ("avx512f avx512_bf16", "ALL", "GenuineIntel", False),
        ("avx512f avx512_bf16", "ALL", "AuthenticAMD", True),
        ("avx512f avx512_bf16 amx_bf16", "ALL", "GenuineIntel", True),
        ("avx512f avx512_bf16 amx_bf16", "AVX512_CORE_FP16", "GenuineIntel", False),
        ("avx512f", "ALL", "GenuineIntel", False),
    ],
)
def test_intels_pairs_without_tiles_do_not_pay(flags, limit, vendor, pays):
    got, why = cpu._arithmetic("bf16", frozenset(flags.split()), "x86_64", limit, vendor)
    assert got is pays, why


def test_arithmetic_here_agrees_with_the_kernel_and_the_limit(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    flags = precision.cpu_flags()
    if not flags:
        pytest.skip("this machine shows no CPU flags")
    fast = {"amx_bf16", "bf16"} if cpu.cpu_vendor() == "GenuineIntel" else {"avx512_bf16", "amx_bf16", "bf16"}
    assert precision.bf16_arithmetic()[0] == bool(flags & fast)
    assert cpu.has_instructions("bf16") == bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    assert precision.fp16_arithmetic()[0] == bool(flags & {"avx512_fp16", "amx_fp16", "asimdhp"})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    if not flags & {"bf16", "asimdhp"}:
        assert precision.bf16_arithmetic()[0] is False
        assert precision.compute_path("bf16").name == "upcast"
    assert precision.compute_path("fp32").native
    assert "bf16" in str(precision.compute_path("bf16"))
    assert precision.recommended_dtype()[0] == ("bf16" if precision.compute_path("bf16").native else "fp32")


def test_cpu_flags_reads_both_spellings(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nflags\t\t: other\n")
    assert precision.cpu_flags(str(file)) == {"fpu", "avx2"}
    assert cpu.cpu_vendor(str(file)) == ""
    file.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\nFeatures\t: fp asimd bf16\n")
    assert precision.cpu_flags(str(file)) == {"fp", "asimd", "bf16"}
    assert cpu.cpu_vendor(str(file)) == "GenuineIntel" and cpu.cpu_vendor(str(tmp_path / "none")) == ""


# ---- buffers ---------------------------------------------------------------------------------------------------------
class Positions(torch.nn.Module):
    """Frequencies for every position, a batch norm, and a router's bias that a class of transformers would list."""

    _keep_in_fp32_modules_strict = ("routers.*.bias",)

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(2, 4, 1)
        self.norm = torch.nn.BatchNorm1d(4)
        self.routers = torch.nn.ModuleList([torch.nn.Module()])
        self.routers[0].register_buffer("bias", torch.tensor([10.001, 10.002]))
        self.register_buffer("inv_freq", 1.0 / 10000.0 ** (torch.arange(4) / 4.0), persistent=False)
        self.register_buffer("wide", torch.ones(1, dtype=torch.float64))
        self.register_buffer("ids", torch.arange(3))

    def forward(self, x):
        angles = torch.arange(x.shape[-1]) * self.inv_freq[:, None]
        return (self.norm(self.conv(x)) + angles.cos().to(x.dtype)).float().square().mean()


def buffers_of(precision: str, stage: int, model: torch.nn.Module, **data_types: str) -> deepc.Engine:
    enabled = {"enabled": True, **({"loss_scale": 64} if precision == "fp16" else {})}
    options = {"data_types": data_types, "zero_optimization": {"stage": stage}, precision: enabled}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    return deepc.initialize(model=model, config={"train_batch_size": 2, "optimizer": sgd, **options})[0]


@pytest.mark.parametrize("precision, stage", [("bf16", 0), ("bf16", 3), ("fp16", 2)])
def test_buffers_keep_their_dtype_and_values(precision, stage):
    model, dtype = Positions(), torch.bfloat16 if precision == "bf16" else torch.float16
    before = {n: b.clone() for n, b in model.named_buffers()}
    engine = buffers_of(precision, stage, model)
    engine.backward(engine(torch.randn(2, 2, 5).to(dtype)))
    assert engine.step().applied
    for name, b in model.named_buffers():
        if name.startswith("norm.running"):
            assert b.dtype == dtype  # torch computes with those of its weights' dtype only
        elif not name.startswith("norm."):
            assert b.dtype == before[name].dtype and torch.equal(b, before[name]), name
    engine.destroy()


def test_buffers_are_cast_where_the_configuration_asks():
    """But for those that transformers' classes list."""
    model = Positions()
    engine = buffers_of("bf16", 1, model, buffer_dtype="bf16")
    found = {n: b.dtype for n, b in model.named_buffers()}
    engine.destroy()
    assert found.pop("routers.0.bias") == torch.float32
    assert found.pop("ids") == found.pop("norm.num_batches_tracked") == torch.int64
    assert set(found.values()) == {torch.bfloat16}
    model.routers[0].bias = model.routers[0].bias.half()
    engine = buffers_of("bf16", 1, model.float())
    assert model.routers[0].bias.dtype == torch.float32
    engine.destroy()


def test_a_buffer_that_meets_other_parameters_is_told():
    model = torch.nn.Sequential(Added(), torch.nn.Conv1d(2, 4, 1))
    engine = buffers_of("bf16", 2, model)
    with pytest.raises(RuntimeError) as told:
        engine(torch.ones(2, 2, 5, dtype=torch.bfloat16))
    assert "'0.pos' is float32" in told.value.__notes__[0] and '{"buffer_dtype": "bf16"}' in told.value.__notes__[0]
    engine.destroy()
    engine = buffers_of("bf16", 2, model, buffer_dtype="bf16")
    assert engine(torch.ones(2, 2, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError) as told:
        engine(torch.ones(2, 2, 5))
    (note,) = told.value.__notes__  # of the input alone
    assert "an input of the model is float32 and its parameters are bfloat16" in note and "x.to(engine.dtype)" in note
    engine.destroy()


class Added(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos", torch.ones(5))

    def forward(self, x):
        return x + self.pos


@pytest.mark.parametrize("stage", [0, 2])
def test_the_optimizer_tells_the_loss_scale(stage):
    """From before the first step on, under DeepSpeed's names; and 1.0 where nothing is scaled."""
    engine = fp16_engine(stage, initial_scale_power=3, loss_scale_window=1, hysteresis=1)
    optimizer = engine.optimizer
    told = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        told.append((optimizer.loss_scale, optimizer.cur_scale, optimizer.loss_scaler.cur_scale, engine.loss_scale))
        engine.backward(engine(torch.ones(1, 4).half()).float().square().mean() * factor)
        engine.step()
    assert told == [(scale,) * 4 for scale in (8.0, 8.0, 4.0, 4.0)] and optimizer.loss_scale == 8.0
    assert (
        optimizer.dynamic_loss_scale and optimizer.loss_scaler.scale_window == 1 and optimizer.loss_scaler.cur_iter == 4
    )
    engine.destroy()
    engine = fp16_engine(stage, loss_scale=138.0)
    assert engine.optimizer.loss_scale == 138.0 and not engine.optimizer.dynamic_loss_scale
    assert engine.optimizer.needs_scaler()
    engine.destroy()
    engine = deepc.initialize(model=torch.nn.Linear(4, 4), config={"train_batch_size": 1})[0]
    assert engine.optimizer.cur_scale == engine.optimizer.loss_scaler.loss_scale == 1.0
    assert not engine.optimizer.needs_scaler()
    engine.destroy()


def fp16_engine(stage: int, **fp16: float) -> deepc.Engine:
    options = {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True, **fp16}}
    return deepc.initialize(model=torch.nn.Linear(4, 4), config={"train_batch_size": 1, **options})[0]


class Normed(torch.nn.Module):
    def __init__(self, norm: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
        super().__init__()
        self.inner = norm(torch.nn.Linear(5, 3))

    def forward(self, x):
        return self.inner(x).float().square().mean()


@pytest.mark.parametrize("norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_spectral_norms_compute_in_the_dtype_of_their_weights(norm):
    engine = buffers_of("bf16", 2, Normed(norm))
    engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16)))
    assert engine.step().applied
    engine.destroy()
