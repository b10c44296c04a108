"""The types that users see: public modules pass mypy --strict, and so does a program that uses them, which mypy also reads right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ["__init__.py", "errors.py", "comm.py", "utils.py", "optim/__init__.py", "optim/adamw.py"]

USER = '''
import torch
from torch import nn

import deepc
from deepc.engine import Engine, StepResult

model = nn.Linear(4, 2)
engine, optimizer, loader, scheduler = deepc.initialize(model=model, config={"train_batch_size": 2})
reveal_type(engine)
loss: torch.Tensor = engine(torch.ones(1, 4)).sum()
engine.backward(loss)
with engine.no_sync():
    engine.backward(loss)
result: StepResult = engine.step()
reveal_type(result.applied)
norm: float | None = engine.get_global_grad_norm()
path, client_state = engine.load_checkpoint("checkpoints")
reveal_type(path)
engine.save_checkpoint("checkpoints", client_state={"epoch": 1})


def use(e: Engine) -> int:
    try:
        return e.train_batch_size()
    except deepc.DeepcError as error:
        raise SystemExit(str(error))


adamw = deepc.optim.AdamW(model.parameters(), lr=1e-3)
adamw.step()
deepc.init_distributed()
'''

WRONG = '''
import deepc

deepc.initialize(model="a string", config={"train_batch_size": 2})
deepc.comm.empty_registered("8")
'''

pytestmark = [pytest.mark.full, pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")]


def mypy(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """mypy with the project's configuration (strict), on the sources."""
    return subprocess.run([sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache"),
                           *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, "MYPYPATH": "python"})


def test_public_modules_and_a_users_program_are_strictly_typed(tmp_path):
    done = mypy(tmp_path, *(Path("python/deepc") / p for p in PUBLIC))
    assert done.returncode == 0, done.stdout + done.stderr

    (tmp_path / "user.py").write_text(USER)
    done = mypy(tmp_path, tmp_path / "user.py")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line.rpartition("Revealed type is ")[2].strip('"') for line in done.stdout.splitlines() if "Revealed type" in line]
    assert [s.replace("builtins.", "") for s in shown] == ["deepc.engine.Engine", "bool", "str | None"]

    (tmp_path / "wrong.py").write_text(WRONG)
    done = mypy(tmp_path, tmp_path / "wrong.py")
    assert done.returncode == 1 and done.stdout.count(": error:") == 2, done.stdout
