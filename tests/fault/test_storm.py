"""Storms of faults against the collectives: ranks that die at any moment, ranks that make other calls than the
rest, and threads that free, fork, poll and abort during calls.

The cases are made and judged by comm_fault.c, which has no torch in it and forks its ranks: tens of milliseconds a
case. A failing case prints the seed that repeats it alone. Quick: 30 cases of each kind; full: 1000 (races 10,000)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from deepc.core.lib import library_dir

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def comm_fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built against the library that deepc uses here."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    out = tmp_path_factory.mktemp("storm") / "comm_fault"
    folder = library_dir().resolve()
    subprocess.run(
        [
            compiler,
            "-std=c17",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{ROOT}",
            "-o",
            str(out),
            str(ROOT / "tests/fault/comm_fault.c"),
            f"-L{folder}",
            f"-Wl,-rpath,{folder}",
            "-ldeepc",
            "-lpthread",
        ],
        check=True,
    )
    return out


def storm(program: Path, mode: str, seed: int, cases: int) -> dict:
    """Runs the cases and gives the summary; fails with the texts of the failing cases."""
    done = subprocess.run(
        [str(program), mode, str(seed), str(cases)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=max(560, cases // 4),
    )
    assert done.returncode == 0, done.stdout
    summary = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(summary))
    assert (summary["mode"], summary["cases"], summary["failed"]) == (mode, cases, 0)
    return summary


SIZES = [pytest.param(1, 30, id="quick"), pytest.param(1000, 1000, id="full", marks=pytest.mark.full)]


@pytest.mark.parametrize("seed, cases", SIZES)
def test_every_survivor_names_the_dead_rank(comm_fault: Path, seed: int, cases: int) -> None:
    summary = storm(comm_fault, "kills", seed, cases)
    assert summary["errors"] >= cases  # one for every survivor, and every case has at least one
    assert all(summary[death] > 0 for death in ("SIGKILL", "SIGSEGV", "_exit(3)"))
    # They hear of it within 100 ms. The median, since on a loaded machine any one process may have to wait for a core.
    assert 0 < summary["median_ms"] < 100


@pytest.mark.parametrize("seed, cases", SIZES)
def test_every_rank_gets_both_calls_of_a_desync(comm_fault: Path, seed: int, cases: int) -> None:
    summary = storm(comm_fault, "desyncs", seed, cases)
    kinds = ("op", "count", "dtype", "root", "reduction", "tag", "left_out", "swapped", "send_recv")
    assert sum(summary[kind] for kind in kinds) == cases
    assert all(summary[kind] > 0 for kind in kinds)


@pytest.mark.parametrize(
    "seed, cases", [pytest.param(1, 30, id="quick"), pytest.param(1000, 10_000, id="full", marks=pytest.mark.full)]
)
def test_nothing_is_written_after_a_failed_call(comm_fault: Path, seed: int, cases: int) -> None:
    """Segments are freed, requests polled, children forked and groups aborted in other threads during calls."""
    summary = storm(comm_fault, "races", seed, cases)
    assert summary["calls"] >= cases
    assert all(summary[kind] > 0 for kind in ("frees", "forks", "polls"))
