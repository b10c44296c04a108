"""The types that users see: public modules pass mypy --strict, and so does a program that uses them, which mypy also
reads right."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USER = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import deepc
from deepc.engine import Engine, StepResult
from deepc.lr_schedules import WarmupDecayLR

model = nn.Linear(4, 2)
data = TensorDataset(torch.ones(8, 4), torch.ones(8, 2))
engine, optimizer, loader, scheduler = deepc.initialize(model=model, config={"train_batch_size": 2}, training_data=data)
reveal_type(engine)
reveal_type(optimizer)
reveal_type(loader)
reveal_type(scheduler)
for x, y in loader:
    loss: torch.Tensor = (engine(x) - y).pow(2).sum()
    reveal_type(engine.backward(loss))
    with engine.no_sync():
        engine.backward(loss)
    result: StepResult = engine.step()
    reveal_type(result.applied)
    reveal_type(result.grad_norm)
if scheduler is not None:
    rates = scheduler.get_last_lr()
norm: float | None = engine.get_global_grad_norm()
path, client_state = engine.load_checkpoint("checkpoints")
reveal_type(path)
engine.save_checkpoint("checkpoints", client_state={"epoch": 1})
reveal_type(engine.module)
reveal_type(engine.comm_bytes)

without = deepc.initialize(model=model, config="ds_config.json", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
                           lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
reveal_type(without[2])

view = deepc.view(model.weight)
view.fp32 = view.fp32 * 2
reveal_type(view.state["exp_avg"])
reveal_type(deepc.utils.safe_get_full_grad(model.weight))
with deepc.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}), deepc.zero.GatheredParameters(model.parameters(), modifier_rank=0):
    nn.init.zeros_(model.weight)
average = deepc.EMA(engine, decay=0.99)
with average.applied():
    deepc.export(average, "model", dtype="bf16")
reveal_type(deepc.estimate(model, "ds_config.json", torch.ones(2, 4)).node_peak)
reveal_type(deepc.fuse(model).replaced)
served = deepc.inference(model, checkpoint="model", dtype="int8")
reveal_type(served.weight_bytes())
hidden, weight, labels = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.long)
reveal_type(deepc.linear_cross_entropy(hidden, weight, labels))


def use(e: Engine) -> int:
    try:
        return e.train_batch_size()
    except deepc.DeepcError as error:
        raise SystemExit(str(error))


adamw = deepc.optim.AdamW(model.parameters(), lr=1e-3)
adamw.step()
WarmupDecayLR(adamw, total_num_steps=10).step()
deepc.init_distributed()
"""  # noqa: E501
SHOWN = [  # deepc's own without the folders and the file that they lie in
    "deepc.Engine",
    "deepc.ShardedOptimizer",
    "deepc.TimedLoader",
    "deepc.Scheduler | None",
    "torch._tensor.Tensor",
    "bool",
    "float | None",
    "str | None",
    "torch.nn.modules.module.Module",
    "dict[str, int]",
    "None",
    "torch._tensor.Tensor",
    "torch._tensor.Tensor | None",
    "int",
    "dict[str, list[str]]",
    "int",
    "torch._tensor.Tensor",
]

WRONG = """
from torch import nn

import deepc

deepc.initialize(model="a string", config={"train_batch_size": 2})
engine, optimizer, loader, scheduler = deepc.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 2})
deepc.comm.empty_registered("8")
engine.step().grad_norm + 1.0
for batch in loader:
    pass
deepc.view("weight")
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed"),
]


def mypy(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """mypy with the project's configuration (strict), on the sources."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "--cache-dir",
            str(tmp_path / "cache"),
            *map(str, arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "MYPYPATH": "python"},
    )


def test_public_modules_and_a_users_program_are_strictly_typed(tmp_path):
    done = mypy(tmp_path, "python/deepc")
    assert done.returncode == 0, done.stdout + done.stderr

    (tmp_path / "user.py").write_text(USER)
    done = mypy(tmp_path, tmp_path / "user.py")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [
        line.rpartition("Revealed type is ")[2].strip('"')
        for line in done.stdout.splitlines()
        if "Revealed type" in line
    ]
    assert [re.sub(r"\bdeepc\.[a-z_.]+\.", "deepc.", s.replace("builtins.", "")) for s in shown] == SHOWN

    (tmp_path / "wrong.py").write_text(WRONG)
    done = mypy(tmp_path, tmp_path / "wrong.py")
    assert done.returncode == 1 and done.stdout.count(": error:") == 5, done.stdout
