"""The benches still run on what the package is today: toy sizes, figures of every contender that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


def rows_of(*command: str) -> list[dict]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=BENCH, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.full
@pytest.mark.parametrize("bench", [pytest.param("adamw", marks=pytest.mark.full), "update"])  # adamw: also below
def test_optimizer_benches_run(bench: str) -> None:
    rows = rows_of(f"{bench}.py", "--case", "smoke", "--threads", "1", "--rounds", "2")
    ours = {r["what"] for r in rows if "skipped" not in r and r["what"].startswith("deepc")}
    assert len(ours) >= 3, ours
    assert all(r["median"] > 0 for r in rows if "skipped" not in r)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_training_bench_runs(precision: str) -> None:
    pytest.importorskip("transformers")
    toy = ["--model", "tiny", "--tokens", "32", "--rounds", "2", "--steps", "1", "--precision", precision]
    rows = rows_of(
        "train.py", *toy, "--contenders", "independent+keep", "ddp", "ddp+keep", "fsdp2-kept+glibc", "deepc-3"
    )
    told = {(r["what"], r["peer"]) for r in rows if r["what"] == "deepc ZeRO-3"}
    cast = ", autocast" if precision == "bf16" else ""
    assert ("deepc ZeRO-3", "limit: processes that never talk, keep_heap()") in told
    assert any(peer and peer.startswith(f"DDP{cast}") and peer.endswith("(best)") for _, peer in told), told


def test_the_page_is_made_of_rows() -> None:
    """make bench ran for a quarter of an hour and then could not write what one of its programs had printed."""
    script = (
        "import run; rows, code = run.run_ops('smoke'); assert code == 0, code; print(run.page(rows, 'make', 0.0, 1.0))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=BENCH, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "## ops" in done.stdout or '"skipped"' in done.stdout
    assert all(row.count("|") == 5 for row in done.stdout.splitlines() if row.startswith("| adamw")), done.stdout


def test_a_contender_that_is_none_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "train.py", "--contenders", "deepc-3+keep"], cwd=BENCH, capture_output=True, text=True
    )
    assert done.returncode == 2 and "deepc-3+keep" in done.stderr and "tcmalloc" in done.stderr
