"""The engine on a GPU against the CPU. Needs a CUDA device, counted as skipped without one; test_simgpu.py runs it on a
device without hardware (tests/simgpu)."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import mmap

import pytest
import tiny
import torch
from gpus import GPU, gpu, is_locked

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu.is_available(), reason="no CUDA device")]


def train(cfg: dict, steps: int = 4, model=None, device: str = GPU, optimizer=None):
    """(losses, fp32 weights, the engine). optimizer: a class of torch's instead of the configuration's."""
    import deepc

    model = tiny.make_model() if model is None else model
    own = None if optimizer is None else optimizer(model.parameters(), lr=1e-3)
    engine = deepc.initialize(model=model, optimizer=own, config=cfg, device=device)[0]
    losses = []
    for step in range(steps):
        whole = [t.to(engine.device) for t in tiny.make_batch(step)]
        for x, y in zip(*(t.chunk(cfg["gradient_accumulation_steps"]) for t in whole)):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    trained = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    return losses, {n: engine.full_fp32_param(p).cpu() for n, p in trained}, engine


def on(device: str, stage: int, precision: str, offload: bool = False, steps: int = 6, gas: int = 1, optimizer=None):
    """(losses, fp32 weights)."""
    cfg = tiny.config(stage, micro=8 // gas, gas=gas, precision=precision)
    if isinstance(optimizer, dict):
        cfg["optimizer"] = optimizer
    if offload:
        cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    own = optimizer if isinstance(optimizer, type) else None
    if own is not None:
        del cfg["optimizer"]
    losses, weights, engine = train(cfg, steps, device=device, optimizer=own)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_equals_the_cpu(stage, precision, offload):
    want, got = on("cpu", stage, precision), on(GPU, stage, precision, offload)
    tolerance = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}[precision]
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=tolerance)


KINDS = ({"type": "Lion", "params": {"lr": 1e-3}}, {"type": "Adagrad", "params": {"lr": 1e-3}})
KINDS += ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, {"type": "Muon", "params": {"lr": 1e-3}})
KINDS += ({"type": "Lamb", "params": {"lr": 1e-3}}, {"type": "Adafactor", "params": {"lr": 1e-2}})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "optimizer", [*KINDS, torch.optim.Adamax], ids=["lion", "adagrad", "sgd", "muon", "lamb", "adafactor", "torchs"]
)
def test_every_kind_of_update_equals_the_cpus(optimizer, offload, precision, stage):
    want = on("cpu", stage, precision, optimizer=optimizer)
    got = on(GPU, stage, precision, offload, optimizer=optimizer)
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=1e-4 if precision == "fp32" else 3e-2)


FORMED = [("AdamW", "bf16"), ("AdamW", "int8"), ("AdamW", "int4"), ("Lion", "int8"), ("Adagrad", "int4")]
FORMED += [("SGD", "int8"), ("Lamb", "bf16"), ("Lamb", "int8"), ("Muon", "bf16"), ("Muon", "int8")]


def formed(kind: str, form: str) -> dict:
    more = {"momentum": 0.9} if kind == "SGD" else {}
    return {"type": kind, "params": {"lr": 1e-3, "state_dtype": form, **more}}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind, form", FORMED)
def test_states_in_a_format_equal_the_cpus(kind, form, offload, precision, stage):
    """Random bits are those of an element's place, so that only what gradients differ by is left."""
    want = on("cpu", stage, precision, optimizer=formed(kind, form))
    got = on(GPU, stage, precision, offload, optimizer=formed(kind, form))
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("kind, form", FORMED)
def test_states_in_a_format_lie_on_the_device_and_take_their_memory(kind, form):
    import deepc

    cfg = tiny.config(2, micro=8, precision="bf16")
    cfg["optimizer"] = formed(kind, form)
    engine = deepc.initialize(model=tiny.make_model(), config=cfg, device=GPU)[0]
    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    engine.backward(engine(x, y))
    engine.step()
    for _, _, window in engine.optimizer.owned_states():
        if form == "bf16":
            assert window.view.device.type == GPU and window.view.dtype == torch.bfloat16
        else:
            piece = window.array.pieces[window.begin]
            assert piece.codes.device.type == piece.scale.device.type == GPU
            assert piece.codes.numel() == (window.length if form == "int8" else (window.length + 1) // 2)
    p = engine.module.ln.weight
    name = next(iter(deepc.view(p).state))
    value = torch.full_like(p, 0.5, dtype=torch.float32)
    deepc.view(p).state[name] = value
    assert torch.equal(deepc.view(p).state[name].to(value.device), value)
    engine.destroy()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_equals_the_cpus(precision, offload):
    want, got = on("cpu", 2, precision, gas=4), on(GPU, 2, precision, offload, gas=4)
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=1e-4 if precision == "fp32" else 3e-2)


def test_offloaded_gradients_and_parameters_are_in_locked_memory():
    import deepc

    cfg = tiny.config(2, micro=8, precision="bf16")
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    engine = deepc.initialize(model=tiny.make_model(), config=cfg, device=GPU)[0]
    assert is_locked(engine.state.acc) and is_locked(engine.state.flat_host)
    assert all(
        t.data_ptr() % mmap.PAGESIZE == 0 for t in (engine.state.acc, engine.state.flat_host)
    )  # pages of its own
    engine.destroy()


def test_locked_memory_that_nobody_holds_goes_when_the_copies_from_it_are_through():
    """tests/simgpu tells of memory that goes while a copy uses it."""
    from deepc.core import memory

    n, stream = 1 << 20, gpu.Stream()
    copy = torch.zeros(n, device=GPU)
    gpu.synchronize()
    with gpu.stream(stream):
        host = memory.zeros(n, torch.float32, locked=copy.device).fill_(3.0)
        assert is_locked(host)
        copy.copy_(host, non_blocking=True)
        del host
    stream.synchronize()
    assert (copy == 3.0).all()


@pytest.mark.parametrize("place", ["parameters in host memory", "parameters on disk"])
def test_locked_memory_waits_for_the_engines_device_whichever_is_the_current_one(place, tmp_path, monkeypatch):
    import deepc

    waited: list = []
    wait = gpu.synchronize
    engine = deepc.initialize(model=tiny.make_model(), config=away(place, tmp_path), device=GPU)[0]
    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    engine.backward(engine(x, y))
    engine.step()
    device = engine.device
    engine.destroy()
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "synchronize", lambda device=None: (waited.append(device), wait(device)))
        del engine
        gc.collect()
    assert waited and set(waited) == {device}


def test_checkpoint_between_cpu_and_gpu(tmp_path):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=tiny.config(2, micro=8, precision="bf16"), device=GPU)[0]
    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    engine.backward(engine(x, y))
    engine.step()
    engine.save_checkpoint(tmp_path)
    want = {n: engine.full_fp32_param(p).cpu() for n, p in engine.module.named_parameters()}
    engine.destroy()
    other = deepc.initialize(model=tiny.make_model(1), config=tiny.config(3, micro=8, precision="bf16"), device="cpu")[
        0
    ]
    other.load_checkpoint(tmp_path)
    for n, p in other.module.named_parameters():
        assert torch.equal(other.full_fp32_param(p), want[n])
    other.destroy()


# ---- states and parameters off the device ----------------------------------------------------------------------------
PLACES = {  # (optimizer states, parameters)
    "states on disk": ("nvme", "none"),
    "parameters in host memory": ("cpu", "cpu"),
    "states on disk, parameters in host memory": ("nvme", "cpu"),
    "parameters on disk": ("cpu", "nvme"),
    "all on disk": ("nvme", "nvme"),
}


def away(place: str, folder, stage: int = 3, precision: str = "bf16", gas: int = 1, cfg=None, **more) -> dict:
    cfg = {**tiny.config(stage, micro=8 // gas, gas=gas, precision=precision), **(cfg or {})}
    states, parameters = PLACES[place]
    zero = cfg["zero_optimization"]
    zero["offload_optimizer"] = {"device": states, "nvme_path": str(folder)}
    if parameters != "none":
        zero["offload_param"] = {"device": parameters, "nvme_path": str(folder)}
        zero.update({"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 20000})
    if states == "nvme":
        zero["sub_group_size"] = 5000
    zero.update(more)
    return cfg


def close(a, b, rel: float = 1e-4) -> None:
    """Equal but for the order of a GPU's atomic additions."""
    assert a[0] == pytest.approx(b[0], rel=rel)
    for n in a[1]:
        torch.testing.assert_close(a[1][n], b[1][n], rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("place", list(PLACES))
def test_states_and_parameters_off_the_device(place, precision, tmp_path):
    cfg = tiny.config(3, micro=8, precision=precision)
    want = train(cfg)
    want[2].destroy()
    got = train(away(place, tmp_path, precision=precision))
    state = got[2].state
    assert (got[2].plan.mode == "streamed") == (PLACES[place][1] != "none")
    if PLACES[place][1] != "none":
        stats = state.units.stats()
        assert stats["prefetched"] > 0 and stats["live_elems"] == stats["persistent_elems"] == 0
        assert all(p.device.type == GPU for p in got[2].module.parameters())
    got[2].destroy()
    close(got, want)


def written(cfg: dict, device: str) -> tuple[list[float], dict]:
    """A training in whose steps a script writes weights: in place, by a state_dict, of a parameter that it froze and
    thaws."""
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=cfg, device=device)[0]
    named, losses = dict(engine.module.named_parameters()), []
    up, norm = named["blocks.0.up.weight"], named["ln.weight"]

    def write(p, change):
        with deepc.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            change(p)

    def step(number):
        x, y = (t.to(engine.device) for t in tiny.make_batch(number))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    step(0)
    write(up, lambda p: p.mul_(0.5))
    step(1)
    weights = {n: t.clone() for n, t in engine.module_state_dict().items()}
    weights["blocks.1.up.weight"] *= 1.5
    engine.load_module_state_dict(weights)
    step(2)
    norm.requires_grad_(False)
    write(norm, lambda p: p.fill_(0.75))
    step(3)
    step(4)
    assert (engine.full_fp32_param(norm) == 0.75).all()
    norm.requires_grad_(True)  # its first steps are the second and third of its own
    step(5)
    step(6)
    found = {n: engine.full_fp32_param(p).cpu() for n, p in named.items()}
    engine.destroy()
    return losses, found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "kind, stage, place",
    [
        *(("AdamW", 2, place) for place in (None, "cpu", "states on disk")),
        *(("AdamW", 3, place) for place in PLACES),
        *((kind, *where) for kind in ("Lamb", "Muon") for where in ((2, "cpu"), (3, "parameters in host memory"))),
    ],
)
def test_what_a_script_writes_counts_wherever_states_lie(kind, stage, place, precision, tmp_path):
    cfg = tiny.config(stage, micro=8, precision=precision)
    cfg["optimizer"] = {"type": kind, "params": {"lr": 1e-4}}
    want = written(cfg, "cpu")
    if place == "cpu":
        cfg["zero_optimization"] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    elif place is not None:
        cfg = away(place, tmp_path, stage, precision, cfg={"optimizer": cfg["optimizer"]})
    close(written(cfg, GPU), want, 1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("kind, form", FORMED)
@pytest.mark.parametrize("place", list(PLACES))
def test_states_in_a_format_off_the_device(place, kind, form, tmp_path):
    cfg = {"optimizer": formed(kind, form)}
    want = train(tiny.config(3, micro=8, precision="bf16", **cfg))
    want[2].destroy()
    got = train(away(place, tmp_path, cfg=cfg))
    got[2].destroy()
    close(got, want, 3e-2)  # random bits are those of an element's place


def test_times_are_those_of_the_engines_device_whichever_is_the_current_one(monkeypatch):
    """wall_clock_breakdown, the profile of operations, and what a recomputation measures."""
    import deepc
    from deepc.engine.states.recompute import Recomputation
    from deepc.observe.profile.flops import FlopsProfiler

    asked = []

    class Event(gpu.Event):
        def record(self, stream=None):
            asked.append(stream is not None and stream.device)
            super().record(stream)

    cfg = {**tiny.config(2, micro=8), "wall_clock_breakdown": True}
    engine = deepc.initialize(model=tiny.make_model(), config=cfg, device=GPU)[0]
    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "Event", Event)
        engine.backward(engine(x, y))
        engine.step()
    assert asked and set(asked) == {engine.device}
    asked.clear()
    profiler = FlopsProfiler(engine.module)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "synchronize", asked.append)
        profiler.start_profile()
        engine(x, y)
        profiler.end_profile()
        measured = len(asked)
        Recomputation.clock(None, (x, 1))
    assert 0 < measured < len(asked) and set(asked) == {engine.device}
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_states_on_disk_at_stages_1_and_2(stage, tmp_path):
    want = train(tiny.config(stage, micro=8, precision="bf16"))
    want[2].destroy()
    got = train(away("states on disk", tmp_path, stage))
    got[2].destroy()
    close(got, want)


# States in a format are in memory where parameters are, or on disk with them.
UPDATES = [(o, p) for o in (*KINDS, formed("AdamW", "int8")) for p in PLACES]
UPDATES.remove((formed("AdamW", "int8"), "parameters on disk"))


@pytest.mark.parametrize("optimizer, place", UPDATES, ids=lambda v: v["type"] if isinstance(v, dict) else v)
def test_every_kind_of_update_off_the_device(optimizer, place, tmp_path):
    offloaded = tiny.config(3, micro=8, precision="bf16")
    offloaded["optimizer"] = optimizer
    offloaded["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    want = train(offloaded)
    want[2].destroy()
    got = train(away(place, tmp_path, cfg={"optimizer": optimizer}))
    got[2].destroy()
    close(got, want, rel=5e-3)


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize(
    "options", [{"frozen": True}, {"unused": True}, {"reuse": True}, {"recompute": "reentrant"}], ids=str
)
def test_models_off_the_device(options, place, tmp_path):
    want = train(tiny.config(3, micro=4, gas=2, precision="bf16"), model=tiny.make_model(**options))
    want[2].destroy()
    got = train(away(place, tmp_path, gas=2), model=tiny.make_model(**options))
    got[2].destroy()
    close(got, want)


@pytest.mark.parametrize("place", list(PLACES))
def test_evaluation_checkpoints_and_writes_off_the_device(place, tmp_path):
    import deepc

    cfg = away(place, tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    _, weights, engine = train(cfg)
    x, y = (t.to(GPU) for t in tiny.make_batch(9))
    with torch.no_grad():
        want = engine(x, y).item()
    engine.save_checkpoint(tmp_path / "saved")
    whole = {n: t.detach().float().cpu() for n, t in engine.module_state_dict().items()}
    other = copy.deepcopy(engine.module)
    assert all(p.device.type == GPU for p in other.parameters())
    with torch.no_grad():
        assert other(x, y).item() == pytest.approx(want, rel=1e-5)
    name, p = next((n, p) for n, p in engine.module.named_parameters() if n.endswith("up.weight"))
    with torch.no_grad(), deepc.zero.GatheredParameters([p], modifier_rank=0):
        assert torch.equal(p.detach().float().cpu(), whole[name])
        p.mul_(2.0)
    with torch.no_grad():
        changed = engine(x, y).item()
    assert changed != want
    torch.testing.assert_close(engine.full_fp32_param(p).cpu(), 2 * weights[name], rtol=1e-2, atol=1e-3)
    engine.load_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        assert engine(x, y).item() == pytest.approx(want, rel=1e-5)
    engine.backward(engine(x, y))
    engine.step()
    engine.destroy()
    if PLACES[place][1] == "cpu":  # there is no disk that is gone, and there may be no room on the device
        assert all(p.device.type == "cpu" for p in engine.module.parameters())
        assert engine.module.cpu().float()(x.cpu(), y.cpu()).isfinite()
    for stage, device in ((2, GPU), (3, "cpu")):
        other = deepc.initialize(
            model=tiny.make_model(1), config=tiny.config(stage, micro=8, precision="bf16"), device=device
        )[0]
        other.load_checkpoint(tmp_path / "saved")
        for n, p in other.module.named_parameters():
            assert torch.equal(other.full_fp32_param(p).cpu(), weights[n])
        other.destroy()


class Wide(torch.nn.Module):
    def __init__(self, width: int = 1024, layers: int = 24) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.relu(layer(x))
        return x.float().square().mean()


@pytest.mark.parametrize("place", ["parameters in host memory", "parameters on disk"])
def test_memory_is_nobody_elses_while_a_forward_that_was_broken_off_still_fills_it(place, tmp_path):
    """tests/simgpu tells of memory that goes while a copy uses it."""
    import deepc

    model = tiny.make_model()
    engine = deepc.initialize(model=model, config=away(place, tmp_path), device=GPU)[0]
    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    for _ in range(2):  # the second knows what comes, and gathers it ahead
        engine.backward(engine(x, y))
        engine.step()
    handle = engine.module.blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        engine(x, y)
    handle.remove()
    units = engine.state.units._units
    assert any(unit.state.name == "ARRIVING" for unit in units)
    sizes = [unit.flat.numel() for unit in units]
    engine.destroy()
    del engine, units
    gc.collect()
    others = [torch.full((n,), 7.0, dtype=torch.bfloat16, device=GPU) for n in sizes for _ in range(4)]
    gpu.synchronize()
    assert all((t == 7).all() for t in others)


@pytest.mark.parametrize("place", [p for p, (_, params) in PLACES.items() if params != "none"])
def test_the_device_has_only_what_is_in_use(place, tmp_path):
    """24 layers of 2 MiB, of which a third is the limit."""
    import deepc

    cfg = away(place, tmp_path, stage3_max_live_parameters=8 << 20, stage3_prefetch_bucket_size=2 << 20)
    engine = deepc.initialize(model=Wide(), config=cfg, device=GPU)[0]
    x = torch.randn(8, 1024, device=GPU, dtype=torch.bfloat16)
    gpu.synchronize()
    gpu.reset_peak_memory_stats()
    before = gpu.memory_allocated()
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    most = gpu.max_memory_allocated() - before
    assert engine.state.units.stats()["live_elems_max"] <= 8 << 20
    assert most < 30 << 20, f"{most / 2**20:.1f} MiB"  # 16 of parameters, a gradient or two, inputs, a workspace
    engine.destroy()


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_inference_with_weights_off_the_device(dtype, place, tmp_path):
    import deepc

    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    want = deepc.inference(tiny.make_model(), dtype=dtype, device=GPU)(x, y).item()
    zero = {"stage": 3, "offload_param": {"device": place, "nvme_path": str(tmp_path)}}
    zero.update({"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 30000})
    engine = deepc.inference(tiny.make_model(), dtype=dtype, device=GPU, zero=zero)
    for _ in range(3):
        assert engine(x, y).item() == pytest.approx(want, rel=1e-3)
    engine.destroy()


# ---- states divided between host and device --------------------------------------------------------------------------
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_part_of_the_states_offloaded(precision, stage, ratio):
    """The device's kernels give the bits of the host's, so nothing but where they lie changes."""
    import deepc

    cfg = tiny.config(stage, micro=4, gas=2, precision=precision)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    want = train(cfg, model=tiny.make_model(unused=True))
    want[2].destroy()
    cfg["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
    got = train(cfg, model=tiny.make_model(unused=True))
    state, plan = got[2].state, got[2].plan
    assert plan.host_elems == round(ratio * plan.owned_elems / 4096) * 4096
    assert state.acc.host.numel() == plan.host_elems and state.acc.on_device.device.type == GPU
    cut = next((s.param for s in plan.segments if s.shard_begin == plan.host_elems and s.param_begin), None)
    assert (cut is not None) == (ratio > 0)
    if cut is not None:  # a parameter of which both parts are somewhere
        view = deepc.view(state.trained[cut])
        value = view.fp32.clone()
        view.fp32 = value * 2
        assert torch.equal(view.fp32, value * 2)
        view.fp32 = value
    got[2].destroy()
    close(got, want)


@pytest.mark.parametrize("optimizer", KINDS[:3], ids=lambda o: o["type"])
def test_every_kind_of_update_of_a_part(optimizer):
    cfg = tiny.config(2, micro=8, precision="bf16")
    cfg["optimizer"] = optimizer
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    want = train(cfg)
    want[2].destroy()
    cfg["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    got = train(cfg)
    got[2].destroy()
    close(got, want)


def test_checkpoints_of_a_part(tmp_path):
    cfg = tiny.config(2, micro=8, precision="bf16")
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}
    _, weights, engine = train(cfg)
    engine.save_checkpoint(tmp_path)
    x, y = (t.to(GPU) for t in tiny.make_batch(7))
    after = []
    for e in (engine, None, None):
        if e is None:
            cfg["zero_optimization"]["offload_optimizer"]["ratio"] = 1.0 if after[1:] else 0.25
            import deepc

            e = deepc.initialize(model=tiny.make_model(1), config=cfg, device=GPU)[0]
            e.load_checkpoint(tmp_path)
            for n, p in e.module.named_parameters():
                assert torch.equal(e.full_fp32_param(p).cpu(), weights[n])
        losses = []
        for _ in range(3):
            loss = e(x, y)
            e.backward(loss)
            e.step()
            losses.append(loss.item())
        after.append(losses)
        e.destroy()
    assert after[1] == pytest.approx(after[0], rel=1e-4) and after[2] == pytest.approx(after[0], rel=1e-4)


def test_what_cannot_be_divided_says_so(tmp_path):
    import deepc
    from deepc.errors import UnsupportedError

    cfg = tiny.config(2, micro=8, precision="bf16")
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}
    for optimizer in ("Lamb", "Muon", "Adafactor"):
        with pytest.raises(UnsupportedError, match="ratio below 1"):
            deepc.initialize(model=tiny.make_model(), config={**cfg, "optimizer": {"type": optimizer}}, device=GPU)
    cfg["zero_optimization"]["offload_optimizer"].update({"device": "nvme", "nvme_path": str(tmp_path)})
    with pytest.raises(UnsupportedError, match="with states on disk"):
        deepc.initialize(model=tiny.make_model(), config=cfg, device=GPU)


@pytest.mark.parametrize("offload", [False, True])
def test_adafactors_checkpoint_between_cpu_and_gpu(tmp_path, offload):
    """Its states of rows and columns lie where the other states do."""
    import deepc

    def engine_of(device: str, stage: int):
        cfg = tiny.config(stage, micro=8, precision="bf16", optimizer={"type": "Adafactor", "params": {"lr": 0.05}})
        if offload and device == GPU:
            cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        return deepc.initialize(model=tiny.make_model(), config=cfg, device=device)[0]

    def states(engine) -> dict[str, torch.Tensor]:
        named = {n: deepc.view(p) for n, p in engine.module.named_parameters()}
        return {f"{n}/{s}": view.state[s].cpu().clone() for n, view in named.items() for s in view.state}

    engine = engine_of(GPU, 2)
    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    engine.backward(engine(x, y))
    engine.step()
    (whole, _, factors), *_ = [s for s in engine.optimizer.whole_states() if s[0] == "row_var"]
    assert whole == "row_var" and factors.device.type == ("cpu" if offload else GPU) and bool((factors > 0).all())
    engine.save_checkpoint(tmp_path)
    want = states(engine)
    assert {n.rpartition("/")[2] for n in want} == {"row_var", "col_var", "variance"}
    engine.destroy()
    after = []
    for device, stage in ((GPU, 3), ("cpu", 1), (GPU, 0)):
        loaded = engine_of(device, stage)
        loaded.load_checkpoint(tmp_path)
        found = states(loaded)
        assert found.keys() == want.keys()
        assert all(torch.equal(value, want[name]) for name, value in found.items()), (device, stage)
        x, y = (t.to(device) for t in tiny.make_batch(1))
        loaded.backward(loaded(x, y))
        loaded.step()
        after.append(loaded(x, y).item())
        loaded.destroy()
    assert after[1] == pytest.approx(after[0], rel=3e-2) and after[2] == pytest.approx(after[0], rel=3e-2)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_checkpoint_of_a_format_between_cpu_and_gpu(tmp_path, form):
    import deepc

    def engine_of(device: str, stage: int, state_dtype: str):
        cfg = tiny.config(stage, micro=8, precision="bf16")
        cfg["optimizer"] = formed("AdamW", state_dtype)
        return deepc.initialize(model=tiny.make_model(), config=cfg, device=device)[0]

    def states(engine) -> dict[str, torch.Tensor]:
        named = list(engine.module.named_parameters())
        return {f"{n}/{s}": deepc.view(p).state[s].cpu() for n, p in named for s in ("exp_avg", "exp_avg_sq")}

    engine = engine_of(GPU, 2, form)
    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    engine.backward(engine(x, y))
    engine.step()
    engine.save_checkpoint(tmp_path)
    want = states(engine)
    engine.destroy()
    for device, stage, other in ((GPU, 3, form), ("cpu", 1, form), (GPU, 0, "fp32"), (GPU, 1, "int8")):
        loaded = engine_of(device, stage, other)
        loaded.load_checkpoint(tmp_path)
        for name, value in states(loaded).items():
            if other in (form, "fp32"):  # exactly, as there is room
                assert torch.equal(value, want[name]), (device, stage, name)
            else:
                assert torch.allclose(value, want[name], rtol=0.07, atol=float(want[name].abs().max()) * 2e-3), name
        x, y = (t.to(device) for t in tiny.make_batch(1))
        loaded.backward(loaded(x, y))
        loaded.step()
        loaded.destroy()


# ---- states in host memory for a while -------------------------------------------------------------------------------
MOVED = [*KINDS, {"type": "AdamW", "params": {"lr": 1e-3}}, formed("AdamW", "int8"), formed("Lamb", "bf16")]
MOVED += [formed("Muon", "int8"), torch.optim.Adamax]


def pair_of(cfg: dict, optimizer) -> list:
    import deepc

    cfg = dict(cfg)
    own = optimizer if isinstance(optimizer, type) else None
    cfg["optimizer"] = None if own else optimizer
    made = []
    for _ in range(2):
        model = tiny.make_model()
        given = None if own is None else own(model.parameters(), lr=1e-3)
        made.append(deepc.initialize(model=model, optimizer=given, config=cfg, device=GPU)[0])
    return made


def micro_batch(engine, step: int) -> None:
    x, y = (t.to(engine.device) for t in tiny.make_batch(step))
    engine.backward(engine(x, y))
    engine.step()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "optimizer",
    MOVED,
    ids=lambda o: o if not isinstance(o, dict) else "-".join(map(str, [o["type"], o["params"].get("state_dtype", "")])),
)
def test_states_that_are_moved_to_host_memory_come_back_with_the_same_bits(optimizer, precision, stage):
    """In the middle of an accumulation, where gradients go too, and between steps."""
    stayed, moved = pair_of(tiny.config(stage, micro=4, gas=2, precision=precision), optimizer)
    for step in range(6):
        for engine in (stayed, moved):
            micro_batch(engine, step)
        gc.collect()
        before = gpu.memory_allocated()
        moved.offload_states()
        moved.offload_states()  # they are there
        assert before - gpu.memory_allocated() >= moved.parked.nbytes > 0
        x, y = (t.to(moved.device) for t in tiny.make_batch(9))
        with torch.no_grad():
            assert torch.equal(moved(x, y), stayed(x, y))  # a forward goes on
        moved.reload_states()
        moved.reload_states()
        assert moved.parked is None
        full = [{n: e.full_fp32_param(p).cpu() for n, p in e.module.named_parameters()} for e in (stayed, moved)]
        assert all(torch.equal(full[1][n], t) for n, t in full[0].items()), step
    stayed.destroy()
    moved.offload_states()
    moved.destroy()


def test_what_is_refused_while_states_are_in_host_memory(tmp_path):
    import deepc
    from deepc.errors import ArgumentError, DeepcError, UnsupportedError

    for optimizer in ({"type": "AdamW"}, {"type": "Muon"}):
        stayed, engine = pair_of(tiny.config(2, micro=8, precision="bf16"), optimizer)
        micro_batch(engine, 0)
        x, y = (t.to(GPU) for t in tiny.make_batch(1))
        loss = engine(x, y)
        engine.offload_states()
        first = "in host memory since engine.offload_states.*reload_states"
        calls = [lambda: engine.backward(loss), engine.step, engine.zero_grad]
        calls += [lambda: engine.save_checkpoint(tmp_path), lambda: engine.load_checkpoint(tmp_path)]
        calls += [lambda: engine.load_module_state_dict(stayed.module_state_dict())]
        for call in calls:
            with pytest.raises(DeepcError, match=first):
                call()
        view = deepc.view(engine.module.ln.weight)
        for read in (lambda: view.fp32, lambda: view.grad, lambda: view.state["exp_avg"]):
            with pytest.raises(DeepcError, match="reload_states"):
                read()
        with pytest.raises(UnsupportedError, match="of 'master', which engine.offload_states.. has moved"):
            engine.state.master.sum()
        with deepc.profile.timeline(tmp_path / "timeline"):  # which counts what is on the device
            engine(x, y)
        engine.reload_states()
        micro_batch(stayed, 0)
        for e in (engine, stayed):
            micro_batch(e, 1)
        assert torch.equal(engine.state.master.cpu(), stayed.state.master.cpu())
        with pytest.raises(ArgumentError, match="include has 'moments'; there are optim_states, hp_params"):
            engine.offload_states(include=["moments"])
        with pytest.raises(UnsupportedError, match="lp_params. stay on the GPU"):
            engine.offload_states(include=["optim_states", "lp_params"])
        with pytest.raises(UnsupportedError, match="optimizer states of a GPU run"):
            engine.offload_states(str(tmp_path))
        assert engine.parked is None
        for e in (engine, stayed):
            e.destroy()


def test_a_part_of_the_states_moves_and_deepspeeds_names():
    from deepc.compat.runtime.settings.sections import OffloadStateTypeEnum as Kind

    stayed, engine = pair_of(tiny.config(1, micro=8, precision="bf16"), {"type": "AdamW"})
    owned = engine.plan.owned_elems
    for step, (include, nbytes) in enumerate([(["hp_params"], 4), (["lp_grads"], 4), ([Kind.optim_states], 8)]):
        for e in (engine, stayed):
            micro_batch(e, step)
        engine.offload_states(include=include)
        assert engine.parked.nbytes == nbytes * owned
        engine.reload_states()
    for e in (engine, stayed):
        micro_batch(e, 7)
    assert torch.equal(engine.state.master.cpu(), stayed.state.master.cpu())
    engine.destroy()
    stayed.destroy()


def test_states_that_are_offloaded_already_stay_where_they_are():
    cfg = tiny.config(2, micro=8, precision="bf16")
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    for ratio in (1.0, 0.5):
        cfg["zero_optimization"]["offload_optimizer"]["ratio"] = ratio
        stayed, engine = pair_of(cfg, {"type": "AdamW"})
        for step in range(3):
            for e in (engine, stayed):
                micro_batch(e, step)
            engine.offload_states()
            assert (engine.parked is None) == (ratio == 1.0)  # else the device's part is moved
            engine.reload_states()
        full = [{n: e.full_fp32_param(p).cpu() for n, p in e.module.named_parameters()} for e in (stayed, engine)]
        assert all(torch.equal(full[1][n], t) for n, t in full[0].items())
        engine.destroy()
        stayed.destroy()


def test_offload_states_under_deepspeeds_name(deepspeed):
    """As OpenRLHF calls it: on the optimizer, with DeepSpeed's enumerations."""
    from deepc.errors import UnsupportedError
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    cfg = {**tiny.config(3, micro=8, precision="bf16"), "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = deepspeed.initialize(model=tiny.make_model().to(GPU), config=cfg)[0]
    losses = []
    for _ in range(3):
        x, y = (t.to(engine.device) for t in tiny.make_batch(0))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        kinds = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.contiguous_grad_buffer]
        engine.optimizer.offload_states(
            include=[*kinds, OffloadStateTypeEnum.hp_params],
            device=OffloadDeviceEnum.cpu,
            pin_memory=True,
            non_blocking=True,
        )
        engine.empty_partition_cache()
        assert engine.parked.nbytes == 16 * engine.plan.owned_elems
        engine.reload_states(non_blocking=True)
    assert losses[2] < losses[0]
    with pytest.raises(UnsupportedError, match="goes to host memory"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    engine.destroy()


@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_a_forward_behind_loading_has_the_loaded_weights(place, tmp_path):
    """What was brought to the device ahead of its use, before the checkpoint was loaded, is brought again."""
    import deepc

    cfg = tiny.config(3, micro=8, precision="bf16")
    cfg["zero_optimization"] |= {"stage3_prefetch_bucket_size": 20_000, "stage3_param_persistence_threshold": 0}
    if place != "none":
        given = {"device": place, "nvme_path": str(tmp_path)}
        cfg["zero_optimization"] |= {"offload_param": given, "offload_optimizer": {**given, "device": "cpu"}}
    engine = deepc.initialize(model=tiny.make_model(), config=cfg, device=GPU)[0]
    x, y = (t.to(GPU) for t in tiny.make_batch(0))

    def evaluated():
        with torch.no_grad():
            return engine(x, y).item()

    micro_batch(engine, 0)
    engine.save_checkpoint(tmp_path / "saved")
    want = evaluated()
    for step in range(1, 4):
        micro_batch(engine, step)
    assert evaluated() != want
    evaluated()
    engine.load_checkpoint(tmp_path / "saved")
    assert evaluated() == want
    engine.destroy()


# ---- saved activations -----------------------------------------------------------------------------------------------
def activations_to(place: str, folder, **keys) -> dict:
    on_disk = {"nvme_path": str(folder)} if place == "disk" else {}
    return {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "deepc": {"activations": {"min_bytes": 1024, **on_disk, **keys}},
    }


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (3, "bf16")])
@pytest.mark.parametrize("recompute, everything", [("nonreentrant", False), ("reentrant", False), ("", True)])
def test_saved_activations_leave_the_gpu_and_come_back_with_the_same_bits(
    recompute, everything, stage, precision, place, tmp_path
):
    cfg, runs = tiny.config(stage, micro=8, precision=precision), []
    for more in ({}, activations_to(place, tmp_path, all=everything)):
        model = tiny.make_model(layers=10, **({"recompute": recompute} if recompute else {}))
        losses, weights, engine = train({**cfg, **more}, 3, model)
        stats = engine.activations.stats()
        engine.destroy()
        runs.append((losses, weights))
    assert runs[1][0] == runs[0][0]
    assert all(torch.equal(runs[1][1][n], t) for n, t in runs[0][1].items())
    assert stats["bytes_to_host"] > 0 and (stats["bytes_written"] > 0) == (place == "disk")
    if place == "disk":
        assert 0 < stats["bytes_read"] <= stats["bytes_written"] <= stats["bytes_to_host"]


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_deep_model_holds_few_of_its_activations_on_the_gpu(place, tmp_path):
    """Of 48 inputs of blocks, with what is on its way: less than a quarter."""
    import deepc
    from torch.utils.checkpoint import checkpoint

    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(64)) for _ in range(48)])

        def forward(self, x):
            for w in self.weights:
                x = checkpoint(lambda x, w: torch.tanh(x * w), x, w, use_reentrant=False)
            return x.square().mean()

    most = []
    cfg = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for more in ({}, activations_to(place, tmp_path)):
        engine = deepc.initialize(model=Deep(), config={**cfg, **more}, device=GPU)[0]
        x = torch.ones(1024, 64, device=GPU)
        gc.collect()  # what other tests have left goes now, and not between two looks
        gpu.synchronize()
        gpu.reset_peak_memory_stats()
        before = gpu.memory_allocated()
        loss = engine(x)
        held = gpu.memory_allocated() - before
        engine.backward(loss)
        most.append((held, gpu.max_memory_allocated() - before))
        engine.step()
        engine.destroy()
    assert most[0][0] >= 45 * x.nbytes
    assert most[1][0] < 6 * x.nbytes and most[1][1] < 12 * x.nbytes, most


@pytest.mark.parametrize("place", ["host", "disk"])
def test_activations_that_are_changed_or_asked_for_twice(place, tmp_path):
    from deepc.offload.away import BEHIND, DeviceSpill
    from deepc.offload.spill import Spill

    away = DeviceSpill(Spill(tmp_path, "activations", locked=True) if place == "disk" else None)
    drawn = [torch.randint(0, 255, (5000 + 7 * k,), dtype=torch.uint8) for k in range(12)]
    values = [away.put(d.to(GPU)) for d in drawn]
    for order in (range(11, -1, -1), (3, 9, 0, 1, 2, 11)):
        for k in order:
            assert torch.equal(values[k].get().cpu(), drawn[k]), k
    del values
    changed = torch.zeros(5000, dtype=torch.uint8, device=GPU)
    kept = away.put(changed)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.get()
    later = [away.put(d.to(GPU)) for d in drawn[: BEHIND + 1]]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.get()
    assert torch.equal(later[0].get().cpu(), drawn[0])


def test_memory_that_is_let_go_in_another_stream_waits_for_its_copy(monkeypatch):
    """It goes back to the stream that it was made in, which may write to it at once: that one waits."""
    from deepc.offload.away import BEHIND, DeviceSpill

    waited = []
    whole = gpu.Stream.wait_event
    monkeypatch.setattr(gpu.Stream, "wait_event", lambda self, e: (waited.append((self, e)), whole(self, e))[1])
    away, side = DeviceSpill(), gpu.Stream()
    with gpu.stream(side):
        first = away.put(torch.full((5000,), 7, dtype=torch.uint8, device=GPU))
    others = [away.put(torch.zeros(5000, dtype=torch.uint8, device=GPU)) for _ in range(BEHIND)]
    assert [s for s, event in waited if event is first._left] == [side]
    with gpu.stream(side):
        first.bring()
    there = first._coming[1]
    del first, others
    assert [s for s, event in waited if event is there] == [side]


def test_a_disk_that_refuses_an_activation_loses_nothing(tmp_path, monkeypatch):
    from deepc.errors import DiskFullError
    from deepc.offload.spill import Spill

    cfg = {**tiny.config(2, micro=8), **activations_to("disk", tmp_path)}
    stayed, engine = (made(cfg) for _ in range(2))
    whole, failing = Spill.put, []

    def put(self, values):
        if failing and failing.pop():
            raise DiskFullError("[made by the test]")
        return whole(self, values)

    monkeypatch.setattr(Spill, "put", put)
    x, y = (t.to(GPU) for t in tiny.make_batch(0))
    failing += [True, False]
    with pytest.raises(DiskFullError, match="made by the test"):
        engine(x, y)
    failing.clear()
    for e in (engine, stayed):
        micro_batch(e, 0)
    full = [{n: e.full_fp32_param(p).cpu() for n, p in e.module.named_parameters()} for e in (stayed, engine)]
    assert all(torch.equal(full[1][n], t) for n, t in full[0].items())
    for e in (engine, stayed):
        e.destroy()


def made(cfg: dict):
    import deepc

    return deepc.initialize(model=tiny.make_model(layers=6, recompute="nonreentrant"), config=cfg, device=GPU)[0]
