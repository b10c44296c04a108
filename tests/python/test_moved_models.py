"""model.to(...), half(), share_memory() on the model of an engine: what changes nothing passes, the rest is an error
that names the fix."""

from __future__ import annotations

import copy
import os
from unittest.mock import patch

import deepc
import pytest
import torch
from deepc.engine import Engine
from deepc.errors import ArgumentError, ReleasedParameterError, StrayWriteError, UnsupportedError
from ranks import run_quietly


def _engine(stage: int, streamed: bool = False) -> Engine:
    zero = {
        "stage": stage,
        **({"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0} if streamed else {}),
    }
    with patch.dict(os.environ, {"DEEPC_STREAMED": str(int(streamed))}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        return deepc.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero})[0]


def _step(engine: Engine) -> bool:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    return engine.step().applied


def _told(engine: Engine, kind: type[Exception]) -> str:
    with pytest.raises(kind) as told:
        _step(engine)
    engine.destroy()
    return str(told.value)


def moved(rank: int, world: int) -> dict[str, str]:
    out = {}
    for stage, streamed in ((0, False), (2, False), (3, False), (3, True)):
        engine = _engine(stage, streamed)
        assert _step(engine)
        before = engine(torch.ones(2, 8)).detach()
        for same in (
            engine.module.to("cpu"),
            engine.module.to(torch.float32),
            engine.module.float().cpu(),
            engine.to("cpu").module,
        ):
            assert same is engine.module
        if streamed:
            with pytest.raises(ReleasedParameterError, match="GatheredParameters"):
                engine.module.half()
        assert torch.equal(engine(torch.ones(2, 8)).detach(), before)
        copy.deepcopy(engine.module).half()
        assert _step(engine)
        engine.destroy()
    engine = _engine(3)
    engine.module.half().float()  # private copies now
    out["cast"] = _told(engine, StrayWriteError)
    engine = _engine(2)
    engine.module.share_memory()
    out["shared"] = _told(engine, UnsupportedError)
    return out


def test_a_model_that_is_cast_to_float64_is_told_by_its_parameters_name():
    engine = _engine(0)
    engine.module.double()
    with pytest.raises(ArgumentError, match=r"gradient of parameter '2.bias' is torch.float64: .*\(model.double\(\)"):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.float64)).square().mean())
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "change, said",
    [
        (lambda m: m.double(), "'0.weight' is torch.float64 on cpu"),
        (lambda m: m[2].to("meta"), "'2.weight' is torch.float32 on meta"),
        (lambda m: m[1].double(), "'1.weight' is torch.float64 on cpu"),  # frozen
    ],
)
def test_a_forward_that_fails_for_a_cast_names_the_parameter(stage, change, said):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    model[1].requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine = deepc.initialize(model=model, config=config)[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # no cast: torch's own
        engine(torch.ones(2, 3))
    change(engine.module)
    with pytest.raises(ArgumentError, match=f"parameter {said}, which the engine has made torch.float32 on cpu"):
        engine(torch.ones(2, 8))
    engine.destroy()


def test_models_that_are_moved_cast_or_shared():
    for out in run_quietly(moved, 2):
        assert "cast of the model" in out["cast"] and "copy.deepcopy(model)" in out["cast"]
        assert "share_memory" in out["shared"] and "clone()" in out["shared"]
