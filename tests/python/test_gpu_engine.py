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
