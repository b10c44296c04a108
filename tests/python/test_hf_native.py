"""deepc.integrations.hf: Trainer on deepc's engine without the name `deepspeed`."""

from __future__ import annotations

import math

import pytest

import hf_runs
from ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_engine_trainer_trains_saves_and_resumes(tmp_path):
    first, again, saved = run_ranks(hf_runs.native, 2, args=(str(tmp_path / "out"), 3), fresh=True, limit_s=170, env={"DEEPC_LOG_LEVEL": "WARNING"})[0]
    steps = [e for e in first if "loss" in e]
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5, 6] and steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert [e["step"] for e in first if "eval_loss" in e] == [3, 6] and saved == 28
    assert all(math.isfinite(e["grad_norm"]) and e["grad_norm"] > 0 for e in steps)
    assert [e for e in first if e["step"] > 3 and "train_loss" not in e] == [e for e in again if e["step"] > 3 and "train_loss" not in e]
