"""The engine on a GPU where there is none: test_gpu_engine.py on a device without hardware, whose copies are as late as
a GPU's may be (tests/simgpu). Arithmetic is the CPU's; what lies where, and which copy waits for what, is tested."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import tiny
from ranks import run_ranks

HERE = Path(__file__).parent
CAN_BUILD = all(map(shutil.which, ("c++", "ninja"))) and Path(sysconfig.get_path("include"), "Python.h").exists()


def run(*args: str) -> subprocess.CompletedProcess:
    paths = [str(HERE.parent / "simgpu"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "-p", "no:xdist", *args],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTEST_ADDOPTS": "--tb=short"},
        capture_output=True,
        text=True,
        timeout=1500,
    )


# Each place that something can lie in, once.
FEW = "off_the_device and states_and_parameters and bf16 or part_of_the_states and 0.3 and bf16 or locked_memory"
FEW += " or deepspeeds_name or few_of_its_activations or script_writes and AdamW-2-cpu-fp32"
FEW += " or broken_off_still_fills and host or let_go_in_another_stream"


@pytest.mark.parametrize("which", [["-k", FEW], pytest.param([], marks=pytest.mark.full)], ids=["few", "all"])
@pytest.mark.skipif(not CAN_BUILD, reason="no C++ compiler, no ninja or no Python.h")
def test_the_engine_of_a_gpu_without_one(which):
    ran = run("-m", "gpu", *which, "test_gpu_engine.py")
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout[-500:]


def _written(rank, world, folder):
    """Of two kinds of updates on the host: (the loss with weights that were written, the weights a step later)."""
    import deepc
    import plugin
    import several
    import torch

    several.install()
    deepc.init_distributed(init_method=f"file://{folder}/store", rank=rank, world_size=world)
    out = []
    for precision, optimizer in (("fp32", "AdamW"), ("bf16", "Lamb")):
        cfg = tiny.config(3, micro=4, precision=precision)
        cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        cfg["optimizer"] = {"type": optimizer, "params": {"lr": 1e-3}}
        model = tiny.make_model()
        engine = deepc.initialize(model=model, config=cfg, device=plugin.NAME)[0]
        x, y = (t.to(engine.device) for t in tiny.make_batch(rank, samples=4))
        engine.backward(engine(x, y))
        engine.step()
        deepc.view(model.head.weight).fp32 = torch.zeros(61, 32)
        model.head.weight.requires_grad_(False)  # no step makes it from here on
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        out.append((loss.item(), deepc.view(model.head.weight).value.float().cpu()))
        engine.destroy()
    assert not plugin.core.races()
    return out


@pytest.mark.skipif(not CAN_BUILD, reason="no C++ compiler, no ninja or no Python.h")
def test_what_is_written_counts_at_once_where_the_states_of_several_gpus_lie_on_the_host(tmp_path):
    ranks = run_ranks(_written, 2, args=(str(tmp_path),), backend=None, fresh=True, env={"RANKS_SIMGPU": "1"})
    for of_rank in ranks:
        for loss, weights in of_rank:
            assert math.isclose(loss, math.log(61), rel_tol=1e-6)
            assert not weights.any()
