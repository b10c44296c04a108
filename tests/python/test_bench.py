"""The benches still run on what the package is today: toy sizes, figures of every contender that is installed."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A module of tests/bench by its name; they are forgotten after the test."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


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
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_the_bench_of_recomputation_runs(model: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: recompute.py has no model")
    sizes = ("--layers", "2", "--width", "128", "--tokens", "16", "--batch", "1", "--rounds", "1", "--budgets", "2")
    rows = rows_of("recompute.py", "--model", model, *sizes)
    assert [r["recomputed"] for r in rows[-2:]] == [2, 0]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_training_bench_runs(precision: str) -> None:
    pytest.importorskip("transformers")
    toy = ["--model", "tiny", "--tokens", "32", "--rounds", "4", "--steps", "1", "--precision", precision, "--fork"]
    first, second = ["independent+keep", "ddp", "ddp+best", "deepc-3"], ["fsdp2-kept+glibc", "deepc-3"]
    rows = rows_of("train.py", *toy, "--budget", "0.1", "--contenders", *first, "--contenders", *second)
    cast = ", autocast" if precision == "bf16" else ""
    told = {(r["group"], r["peer"]) for r in rows if r["what"] == "deepc ZeRO-3" and r["unit"] == "tokens/s"}
    assert {(0, "limit: processes that never talk, keep_heap()"), (0, f"DDP{cast}")} < told, told
    assert (1, "FSDP2 without resharding, glibc's tunables") in told
    tried = {r["what"]: r["chosen"] for r in rows if r["unit"] == "s, screening"}
    assert {f"DDP{cast}, glibc's tunables", f"DDP{cast}, keep_heap()"} <= set(tried) and sum(tried.values()) == 1
    (chosen,) = (what for what, yes in tried.items() if yes)
    assert (0, chosen) in told and len(tried) % (2 if precision == "bf16" else 1) == 0
    # the budget is spent before the first round: three are made
    assert {r["n"] for r in rows if r["unit"] == "tokens/s"} == {3}
    unit = "largest relative difference of losses"
    assert [(r["group"], r["n"]) for r in rows if r["unit"] == unit] == [(0, 3)] * 2 + [(1, 3)] * 2
    assert all(r["median"] > 0 for r in rows if r["unit"].startswith("MiB"))


@pytest.mark.full
def test_forked_ranks_are_what_programs_of_their_own_are() -> None:
    """Equal bits, and memory that counts what they share with the process that they were forked from."""
    pytest.importorskip("transformers")
    toy = ["--model", "tiny", "--tokens", "32", "--rounds", "2", "--steps", "1", "--contenders", "ddp", "deepc-3"]
    found = {}
    for how in ([], ["--fork"]):
        rows = [r for r in rows_of("train.py", *toy, *how) if r.get("ratio") is None]
        found[bool(how)] = {(r["what"], r["unit"]): r for r in rows}
    for (what, unit), forked in found[True].items():
        alone = found[False][what, unit]
        if unit == "tokens/s":
            assert forked["loss"] == alone["loss"], what
        elif unit.startswith("MiB"):
            assert math.isclose(forked["median"], alone["median"], rel_tol=0.15), (what, forked, alone)


def test_the_page_is_made_of_rows() -> None:
    """make bench ran for a quarter of an hour and then could not write what one of its programs had printed."""
    script = (
        "import run; rows, code = run.run_ops('smoke'); assert code == 0, code; print(run.page(rows, 'make', 0.0, 1.0))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=BENCH, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "## ops" in done.stdout or '"skipped"' in done.stdout
    assert all(row.count("|") == 5 for row in done.stdout.splitlines() if row.startswith("| adamw")), done.stdout


def _ratio(peer: str, ratio: float, **more: Any) -> dict[str, Any]:
    usual = {"bench": "train", "figure": "f", "what": "deepc ZeRO-3", "unit": "tokens/s", "median": 3.0, "n": 3}
    flags = {"peer_allocator": "keep", "peer_fused": False, "peer_is_best": False, "group": 0}
    quartiles = {"ratio_q1": ratio - 0.01, "ratio_q3": ratio + 0.01}
    return {**usual, **quartiles, **flags, "peer": peer, "ratio": ratio, **more}


def test_the_headline_is_against_the_best_peer_with_what_a_user_can_give_it(module) -> None:
    rows = [
        _ratio("DDP", 1.5, peer_allocator=""),
        _ratio("DDP, glibc's tunables", 1.2),
        _ratio("DDP, keep_heap()", 1.1),
        _ratio("DDP, deepc.fuse, keep_heap()", 0.9, peer_fused=True),
        _ratio("FSDP2, tcmalloc", 1.05, group=1),
        _ratio("FSDP2, tcmalloc", 1.25, unit="MiB, sum over ranks", group=1),
        _ratio("FSDP2, tcmalloc", 2.0, unit="MiB, sum of VmHWM", group=1),
        _ratio("limit: processes that never talk, keep_heap()", 0.97),
    ]
    del rows[-1]["peer_allocator"]
    (line,) = module("training").headlines(rows)
    assert (
        "1.05x (1.04 to 1.06) the best peer with what a user can give it, FSDP2, tcmalloc, in 0.80 (PSS) and 0.50"
        in line
    )
    assert "0.90x (0.89 to 0.91) the best with operators of deepc's too, DDP, deepc.fuse, keep_heap()" in line
    assert "1.50x (1.49 to 1.51) the best as it comes, DDP" in line and "0.97 of the limit" in line


def test_where_it_is_slower_names_every_peer_that_wins(module) -> None:
    run = module("run")
    rows = [
        _ratio("DDP", 0.94),
        _ratio("FSDP2", 0.96),
        _ratio("limit: processes that never talk", 0.5),
        _ratio("0.094 of deepc, dense", 0.5, bench="sparse_attention"),
        _ratio("OpenMPI", 0.61, bench="collectives", what="deepc C core", figure="gather 8 B"),
        _ratio("OpenMPI", 0.60, bench="collectives", what="deepc C core", figure="reduce 8 B"),
    ]
    assert run.slower(rows) == [
        "- train, deepc ZeRO-3: 1 of 2 ratios. f, tokens/s: 0.94 to DDP",
        "- collectives, deepc C core: 2 of 2 ratios. reduce 8 B: 0.60 to OpenMPI; gather 8 B: 0.61 to OpenMPI",
    ]
    assert run.slower(rows[1:4]) == ["- nowhere"]


def test_losses_may_part_as_far_as_three_peers_do(module) -> None:
    allowed_gap = module("train").allowed_gap
    middle, allowed = allowed_gap([9.0, 9.001, 9.003], "fp32")
    assert middle == 9.001 and math.isclose(allowed, 0.009)
    assert math.isclose(allowed_gap([9.0, 9.0, 9.0], "fp32")[1], 9e-5)
    assert math.isclose(allowed_gap([9.0, 9.0, 9.0], "bf16")[1], 0.009)
    assert math.isclose(allowed_gap([9.0, 9.0], "fp32")[1], 9e-4)
    assert math.isclose(allowed_gap([9.0], "bf16")[1], 0.09)


@pytest.mark.parametrize("gap, passes", [(2e-5, True), (2e-3, False)])
def test_a_loss_that_parts_in_a_later_burst_ends_the_bench(module, capsys, gap: float, passes: bool) -> None:
    """It was compared at the end of the first alone."""
    train = module("train")
    parse = module("contenders").Contender.parse
    base = {"seconds": 1.0, "faults": 0, "resident": 1.0, "counters": {"gather_bytes": 0}}

    def bursts(last: float) -> list[dict[str, Any]]:
        return [{**base, "loss": loss} for loss in (10.0, 9.5, last)]

    args = argparse.Namespace(model="25M", precision="fp32", ranks=2, steps=1, tokens=256)
    told = {parse(c): bursts(9.0) for c in ("ddp", "fsdp2")} | {parse("deepspeed-3"): bursts(9.00002)}
    told[parse("deepc-3")] = bursts(9.0 + gap)
    rows = train.Told(args, told, dict.fromkeys(told, 1.0))
    if not passes:
        with pytest.raises(RuntimeError, match="burst 3: losses differ"):
            rows.all()
        return
    rows.all()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    apart = {r["what"]: r["max"] for r in printed if r["unit"] == "largest relative difference of losses"}
    assert math.isclose(apart["the peers from each other"], 2e-5 / 9, rel_tol=1e-3)
    assert math.isclose(apart["deepc from the peers' middle"], gap / 9, rel_tol=1e-3)


def test_make_bench_shows_each_peer_as_it_comes_and_at_its_best(module) -> None:
    run, contenders = module("run"), module("contenders")
    ((threads, arguments),) = run.plan("quick", True)["train"]
    named = {c for c in arguments if c.partition("+")[0] in contenders.BASES}
    for base in ("ddp", "fsdp2", "fsdp2-kept", "deepspeed-3"):
        assert {base, f"{base}+best"} <= named, base
    assert threads == 1 and arguments.count("--contenders") == 2
    forms = contenders.Contender.parse("ddp+best").forms("bf16")
    assert {f.base for f in forms} == {"ddp", "ddp-bf16-weights"} and len(forms) == 6
    assert [f.allocator for f in contenders.Contender.parse("fsdp2+best").forms("bf16")] == list(contenders.SCREENED)
    full = {c for _, a in run.plan("full", True)["train"] for c in a}
    assert {
        f"{base}+{a}" for base in ("ddp", "fsdp2", "fsdp2-kept", "deepspeed-3") for a in contenders.ALLOCATORS
    } < full


def test_ratios_have_the_quartiles_of_the_rounds(module) -> None:
    common = module("common")
    told = common.paired_row([2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert told == {"ratio": 4.0, "ratio_q1": 3.0, "ratio_q3": 5.0}
    times = {"limit a": [3.0, 1.0, 2.0], "limit b": [1.5, 1.6, 9.0], "other": [0.1, 0.1, 0.1]}
    assert common.fastest(times, "limit") == "limit b" and common.fastest(times, "none") is None


def test_every_form_of_the_limit_moves_what_it_says_and_changes_nothing(module) -> None:
    import torch
    from deepc.core.lib import C

    common = module("common")
    try:
        walk = common.Limit(C)
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    n = 8 * 4096
    arrays = [torch.arange(n, dtype=torch.float32) + i for i in range(4)]
    before = [a.clone() for a in arrays]
    for way in common.Limit.WAYS:
        low = torch.zeros(n, dtype=torch.int16)
        walk(*(a.data_ptr() for a in arrays), n, low.data_ptr(), way)
        assert all(torch.equal(a, b) for a, b in zip(arrays, before, strict=True)), way
        assert bool((low == 1).all()), way
        walk(*(a.data_ptr() for a in arrays), n, None, way)


def test_a_contender_that_is_none_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "train.py", "--contenders", "deepc-3+keep"], cwd=BENCH, capture_output=True, text=True
    )
    assert done.returncode == 2 and "deepc-3+keep" in done.stderr and "tcmalloc" in done.stderr
