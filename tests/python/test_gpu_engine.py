"""The engine on a GPU against the CPU. Needs a CUDA device; counted as skipped without one."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on(device: str, stage: int, precision: str, offload: bool = False, steps: int = 6, gas: int = 1, optimizer=None):
    import deepc

    cfg = tiny.config(stage, micro=8 // gas, gas=gas, precision=precision)
    if isinstance(optimizer, dict):
        cfg["optimizer"] = optimizer
    if offload:
        cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    model, own = tiny.make_model(), None
    if isinstance(optimizer, type):
        del cfg["optimizer"]
        own = optimizer(model.parameters(), lr=1e-3)
    engine = deepc.initialize(model=model, optimizer=own, config=cfg, device=device)[0]
    losses = []
    for step in range(steps):
        whole = [t.to(engine.device) for t in tiny.make_batch(step)]
        for x, y in zip(*(t.chunk(gas) for t in whole)):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    weights = {n: p.detach().float().cpu() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_equals_the_cpu(stage, precision, offload):
    want, got = on("cpu", stage, precision), on("cuda", stage, precision, offload)
    tolerance = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}[precision]
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=tolerance)


KINDS = ({"type": "Lion", "params": {"lr": 1e-3}}, {"type": "Adagrad", "params": {"lr": 1e-3}})
KINDS += ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, {"type": "Muon", "params": {"lr": 1e-3}})
KINDS += ({"type": "Lamb", "params": {"lr": 1e-3}},)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "optimizer", [*KINDS, torch.optim.Adamax], ids=["lion", "adagrad", "sgd", "muon", "lamb", "torchs"]
)
def test_every_kind_of_update_equals_the_cpus(optimizer, offload, precision, stage):
    want = on("cpu", stage, precision, optimizer=optimizer)
    got = on("cuda", stage, precision, offload, optimizer=optimizer)
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
    got = on("cuda", stage, precision, offload, optimizer=formed(kind, form))
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("kind, form", FORMED)
def test_states_in_a_format_lie_on_the_device_and_take_their_memory(kind, form):
    import deepc

    cfg = tiny.config(2, micro=8, precision="bf16")
    cfg["optimizer"] = formed(kind, form)
    engine = deepc.initialize(model=tiny.make_model(), config=cfg, device="cuda")[0]
    x, y = (t.cuda() for t in tiny.make_batch(0))
    engine.backward(engine(x, y))
    engine.step()
    for _, _, window in engine.optimizer.owned_states():
        if form == "bf16":
            assert window.view.is_cuda and window.view.dtype == torch.bfloat16
        else:
            piece = window.array.pieces[window.begin]
            assert piece.codes.is_cuda and piece.scale.is_cuda
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
    want, got = on("cpu", 2, precision, gas=4), on("cuda", 2, precision, offload, gas=4)
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=1e-4 if precision == "fp32" else 3e-2)


def test_offloaded_gradients_and_parameters_are_in_locked_memory():
    import deepc

    cfg = tiny.config(2, micro=8, precision="bf16")
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    engine = deepc.initialize(model=tiny.make_model(), config=cfg, device="cuda")[0]
    assert engine.state.acc.is_pinned() and engine.state.flat_host.is_pinned()
    engine.destroy()


def test_checkpoint_between_cpu_and_gpu(tmp_path):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=tiny.config(2, micro=8, precision="bf16"), device="cuda")[
        0
    ]
    x, y = (t.cuda() for t in tiny.make_batch(0))
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

    engine = engine_of("cuda", 2, form)
    x, y = (t.cuda() for t in tiny.make_batch(0))
    engine.backward(engine(x, y))
    engine.step()
    engine.save_checkpoint(tmp_path)
    want = states(engine)
    engine.destroy()
    for device, stage, other in (("cuda", 3, form), ("cpu", 1, form), ("cuda", 0, "fp32"), ("cuda", 1, "int8")):
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
