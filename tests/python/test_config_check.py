"""`deepc config`: what it says of configurations, and that docs/config.md is the table's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deepc.cli import main
from deepc.config import explain as config_check
from deepc.config.keys import DIFFERS, KEYS, OPTIMIZER_PARAMS, TABLE, State

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fused": True}},
    "autotuning": {"enabled": False},
}


def states(found: config_check.Check) -> dict[str, str]:
    return {k.key: k.state for k in found.keys}


def test_each_key_is_used_inert_or_off():
    found = config_check.check(GOOD, ranks=2)
    assert found.ok and found.precision == "bf16"
    assert states(found) == {
        "train_batch_size": "used",
        "train_micro_batch_size_per_gpu": "used",
        "optimizer.type": "used",
        "optimizer.params": "used",
        "optimizer.params.lr": "used",
        "optimizer.params.fused": "inert",
        "bf16.enabled": "used",
        "zero_optimization.stage": "used",
        "zero_optimization.overlap_comm": "inert",
        "autotuning": "off",
    }
    assert found.batch == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "ranks": 2,
        "derived": ["gradient_accumulation_steps"],
    }
    text = str(found)
    assert (
        "gradient_accumulation_steps 2 (derived) * 2 ranks" in text
        and DIFFERS["zero_optimization.stage"].split(";")[0] in text
    )


def test_errors_name_key_and_nearest_spelling():
    found = config_check.check(
        {**GOOD, "gradient_cliping": 1.0, "elasticity": {"enabled": True}, "steps_per_print": "10"}, ranks=2
    )
    assert (
        {e.key for e in found.errors} == {"gradient_cliping", "elasticity.enabled", "steps_per_print"}
        and not found.ok
        and found.precision is None
    )
    by = {e.key: e.message for e in found.errors}
    assert (
        'Did you mean "gradient_clipping"' in by["gradient_cliping"] and "does not have yet" in by["elasticity.enabled"]
    )
    assert "elasticity" not in states(found) and states(found)["zero_optimization.stage"] == "used"


def test_ranks_come_from_the_batch_sizes_if_they_are_not_given():
    found = config_check.check(
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    )
    assert found.ok and found.ranks == 4 and "4 ranks (from the batch sizes)" in str(found)
    bad = config_check.check(
        {"train_batch_size": 25, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    )
    assert bad.ranks == 1 and not bad.ok and bad.batch is None


def test_auto_is_listed_and_no_error():
    found = config_check.check(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        }
    )
    assert found.ok and found.batch is None
    assert {k for k, s in states(found).items() if s == "auto"} == {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "optimizer.params.lr",
    }
    assert any(k.key == "optimizer.params" for k in found.keys)


def test_every_key_of_the_table_can_be_explained():
    """With its default, or what it accepts; none is left out of the answer."""
    for row in KEYS:
        value = (
            row.default
            if row.default is not None or row.null
            else next((o for o in row.ok if o is not None), None)
            if isinstance(row.ok, tuple)
            else None
        )
        if value is None:
            continue
        node: dict = {"train_batch_size": 1} if row.path != "train_batch_size" else {}
        here = node
        for part in row.path.split(".")[:-1]:
            here = here.setdefault(part, {})
        here[row.leaf] = value
        found = config_check.check(node)
        assert row.path in states(found) or any(row.path in e.message or e.key == row.path for e in found.errors), (
            row.path
        )


def test_keys_of_services_are_not_shown():
    found = config_check.check({"train_batch_size": 1, "comet": {"enabled": True, "api_key": "secret"}})
    assert found.ok and "comet.api_key" in str(found) and "secret" not in str(found) + json.dumps(found.to_dict())


def test_command_line(tmp_path, capsys):
    good, bad, torn = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "torn.json"
    good.write_text(json.dumps(GOOD))
    bad.write_text('{"train_batch_size": 4, "fp17": {}}')
    torn.write_text('{"train_batch_size": ')
    assert main(["config", "check", str(good), "--ranks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["ok"]
        and found["batch"]["gradient_accumulation_steps"] == 2
        and {"key", "value", "state", "says", "differs"} == set(found["keys"][0])
    )
    assert main(["config", "check", str(bad)]) == 1
    assert "unknown key" in capsys.readouterr().out
    assert main(["config", "check", str(torn)]) == 1
    assert "line 1" in capsys.readouterr().out
    assert main(["config", "check", str(tmp_path / "none.json")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["config", "keys", "fp16.loss"]) == 0
    assert "fp16.loss_scale_window" in capsys.readouterr().out
    assert main(["config", "keys", "no_such_part"]) == 2
    assert (
        main(["config", "schema", "-o", str(tmp_path / "s.json")]) == 0
        and json.loads((tmp_path / "s.json").read_text())["type"] == "object"
    )


def test_the_list_of_keys_is_whole():
    rows = {r["key"]: r for r in config_check.key_rows()}
    assert set(rows) == set(TABLE) | {f"optimizer.params.{k}" for k in OPTIMIZER_PARAMS}
    for row in KEYS:
        assert rows[row.path]["state"] == ("used" if row.state is State.ACTIVE else "inert") or row.state in (
            State.LATER,
            State.REMOVED,
        ), row.path
        assert rows[row.path]["does"]


def test_differences_are_of_keys_that_exist_and_are_used():
    assert [k for k in DIFFERS if k not in TABLE or TABLE[k].state is not State.ACTIVE] == []


def test_the_documentation_is_current():
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == config_check.markdown(), "run: deepc config keys --markdown > docs/config.md"
    assert [row.path for row in KEYS if row.alias and f'Also called "{row.alias}".' not in page] == []


@pytest.mark.parametrize(
    "words", [["config", "check"], ["config", "nonsense"], ["config", "check", "x", "--rank", "1"]]
)
def test_wrong_words_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as exc:
        main(words)
    assert exc.value.code == 2 and "--help shows" in capsys.readouterr().err
