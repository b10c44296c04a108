"""The engine on a GPU where there is none: test_gpu_engine.py on a device without hardware, whose copies are as late as
a GPU's may be (tests/simgpu). Arithmetic is the CPU's; what lies where, and which copy waits for what, is tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


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


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None or shutil.which("ninja") is None, reason="no compiler, no ninja")
def test_the_engine_of_a_gpu_without_one():
    ran = run("-m", "gpu", "test_gpu_engine.py")
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout[-500:]
