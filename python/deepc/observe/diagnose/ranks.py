"""Ranks that measure this machine: processes of their own, which print JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DeepcError

_OF_A_RUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def measure_in_ranks(
    program: str, world: int, budget_s: float, *, limit_s: float, env: Mapping[str, str], groups: int = 1
) -> list[Any]:
    """Runs the Python text `program` with the arguments rank, world, a folder that its group shares, and budget_s, in
    `groups` groups of `world` ranks at the same time, on the CPU, one thread each unless `env` says otherwise. Returns
    what each rank's last line has, as JSON. DeepcError, with all ranks ended, if one fails or after limit_s."""
    ranks = world * groups
    with tempfile.TemporaryDirectory(prefix="deepc-bench-") as top:
        path = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        around = {k: v for k, v in os.environ.items() if k not in _OF_A_RUN}
        around |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), **env}
        started: list[tuple[subprocess.Popen[bytes], Any]] = []
        said = []
        try:
            for i in range(ranks):
                out = open(os.path.join(top, f"out{i}"), "w+b")
                folder = os.path.join(top, f"group{i // world}")
                os.makedirs(folder, exist_ok=True)
                command = [sys.executable, "-c", program, str(i % world), str(world), folder, str(budget_s)]
                started.append((subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=around), out))
            end = time.monotonic() + limit_s
            for p, _ in started:
                p.wait(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired as exc:
            raise DeepcError(f"{ranks} ranks did not finish in time. `deepc doctor` tells why.") from exc
        finally:
            for p, out in started:
                p.kill()
                p.wait()
                out.seek(0)
                said.append(out.read().decode(errors="replace"))
                out.close()
    for i, (p, _) in enumerate(started):
        if p.returncode:
            raise DeepcError(f"rank {i} failed: {said[i].strip()[-800:]}")
    return [json.loads(text.strip().splitlines()[-1]) for text in said]
