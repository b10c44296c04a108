"""`deepc ckpt`: on checkpoints of engines of one and two ranks, damaged ones, leftovers, and exports."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import deepc
import pytest
import torch
from deepc.checkpoint import tool
from deepc.checkpoint.files import SafetensorsFile
from deepc.cli import main
from deepc.core.ops import torch_dtype
from deepc.errors import ArgumentError, CheckpointError
from ranks import run_ranks
from tiny import config, make_batch, make_model


def train_and_save(
    rank: int, world: int, folder: str, stage: int, precision: str, steps: int, tag: str
) -> dict[str, torch.Tensor]:
    """Trains a tiny GPT, saves it, and returns its fp32 weights by name."""
    import deepc

    engine, _, _, _ = deepc.initialize(
        model=make_model(frozen=True), config=config(stage, micro=8 // world, precision=precision)
    )
    for step in range(steps):
        x, y = make_batch(step)
        at = slice(rank * 8 // world, (rank + 1) * 8 // world)
        engine.backward(engine(x[at], y[at]))
        engine.step()
    engine.save_checkpoint(folder, tag=tag, client_state={"epoch": 3})
    return {
        n: engine.full_fp32_param(p).clone() if p.requires_grad else p.detach().float().clone()
        for n, p in engine.module.named_parameters()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder with one.rank and two, weights of each): bf16 of 2 ranks at stage 3, and the same training at stage 0."""
    folder = tmp_path_factory.mktemp("saved")
    a = run_ranks(train_and_save, 2, args=(str(folder / "a"), 3, "bf16", 2, "step2"))[0]
    b = run_ranks(train_and_save, 2, args=(str(folder / "a"), 0, "bf16", 3, "step3"))[0]
    return folder / "a", a, b


def test_listing(saved, capsys):
    folder, *_ = saved
    found = tool.listing(folder)
    assert [(r["tag"], r["ranks"], r["step"], r["stage"], r["dtype"]) for r in found["checkpoints"]] == [
        ("step2", 2, 2, 3, "bfloat16"),
        ("step3", 2, 3, 0, "bfloat16"),
    ]
    assert found["latest"] == "step3" and found["left"] == []
    assert main(["ckpt", "ls", str(folder)]) == 0
    assert "* step3" in capsys.readouterr().out


def test_info(saved, capsys):
    folder, a, _ = saved
    found = tool.info(folder / "step2")
    trained = [n for n in a if n not in ("pos.weight", "blocks.0.ln1.weight")]
    assert found["kinds"]["fp32"]["tensors"] == len(trained) and found["kinds"]["frozen"]["tensors"] == 2
    assert (
        found["kinds"]["fp32"]["elements"]
        == found["kinds"]["exp_avg"]["elements"]
        == sum(a[n].numel() for n in trained)
    )
    assert found["client_state"] == ["epoch"] and found["engine"]["global_steps"] == 2 and found["ranks"] == 2
    assert main(["ckpt", "info", str(folder), "--tag", "step2", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "trained parameters (fp32)" in out and "fp32/blocks.0.up.weight" in out and "ZeRO stage 3" in out


def test_a_copy_says_when_it_was_saved(saved, tmp_path):
    folder, *_ = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    written = tool.info(folder / "step2")["written"]
    assert tool.info(copy / "step2")["written"] == written > time.time() - 3600 * 24
    assert [r["written"] for r in tool.listing(copy)["checkpoints"]] == [
        r["written"] for r in tool.listing(folder)["checkpoints"]
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_has_the_weights_under_their_names(saved, tmp_path, dtype):
    folder, a, _ = saved
    names = tool.export(folder, tmp_path / "out", tag="step2", dtype=dtype)
    assert names == ["model.safetensors"]
    with SafetensorsFile(tmp_path / "out" / "model.safetensors") as f:
        assert set(f.keys()) == set(a)
        for n, want in a.items():
            got = f.tensor(n)
            assert got.dtype == torch_dtype(dtype) and torch.equal(got, want.to(got.dtype)), n
    model = make_model(seed=5, frozen=True)
    with SafetensorsFile(tmp_path / "out" / "model.safetensors") as f:
        missing, unexpected = model.load_state_dict({n: f.tensor(n).float() for n in f.keys()}, strict=False)
    assert unexpected == [] and missing in ([], ["head.weight"])  # tied to tok.weight


def test_export_leaves_codes_of_8_bits(tmp_path):
    """As deepc.export does: a quantised base's weights have their scales elsewhere."""
    from deepc.checkpoint import CheckpointWriter
    from deepc.compat.runtime.zero_to_fp32 import convert_zero_checkpoint_to_state_dict

    writer, codes = CheckpointWriter(tmp_path, "t"), torch.randn(5).to(torch.float8_e4m3fn)
    writer.add("fp32/w", torch.randn(3))
    writer.add("frozen/codes", codes)
    writer.write()
    writer.publish({})
    tool.export(tmp_path, tmp_path / "a", dtype="bf16")
    deepc.export(tmp_path, tmp_path / "b", dtype="bf16")
    convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "c", "bf16", safe_serialization=True)
    for folder in "abc":
        with SafetensorsFile(tmp_path / folder / "model.safetensors") as f:
            assert f["w"].dtype == torch.bfloat16 and f["codes"].dtype == codes.dtype
            assert torch.equal(f.tensor("codes").view(torch.uint8), codes.view(torch.uint8))


def test_export_in_several_files_is_read_by_the_safetensors_library(saved, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    folder, _, b = saved
    assert main(["ckpt", "export", str(folder), str(tmp_path / "out"), "--max-shard-size", "20KB"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(b) and len(set(index["weight_map"].values())) > 2
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.load_file(tmp_path / "out" / file)[name], b[name]), name


def test_diff(saved, tmp_path, capsys):
    folder, a, _ = saved
    same, compared = tool.diff(folder / "step2", folder, tag_b="step2")
    assert same == [] and compared == len(tool.info(folder / "step2")["tensors"])
    found, _ = tool.diff(folder / "step2", folder / "step3")
    by = {d.name: d for d in found}
    assert (
        "frozen/pos.weight" not in by
        and by["fp32/tok.weight"].what == "values"
        and 0 < by["fp32/tok.weight"].relative < 0.1
    )
    assert main(["ckpt", "diff", str(folder / "step2"), str(folder / "step3")]) == 1
    assert main(["ckpt", "diff", str(folder / "step2"), str(folder / "step3"), "--tolerance", "1e9"]) == 0
    tool.export(folder, tmp_path / "fp32", tag="step2")
    tool.export(folder, tmp_path / "bf16", tag="step2", dtype="bf16")
    assert tool.diff(folder / "step2", tmp_path / "fp32")[0] == []
    rounded, compared = tool.diff(folder / "step2", tmp_path / "bf16")
    assert rounded and compared == len(a) and all(d.what == "values" and d.relative <= 2**-8 for d in rounded)
    assert [d.what for d in tool.diff(tmp_path / "fp32", tmp_path / "bf16")[0] if d.name == "pos.weight"] == [
        "dtype"
    ]  # trained in bf16: equal values
    assert tool.diff(tmp_path / "bf16", folder / "step2", tolerance=2**-8)[0] == []
    capsys.readouterr()


@pytest.mark.parametrize(
    "a, b",
    [
        (torch.tensor([1 << 60, 5]), torch.tensor([(1 << 60) + 1, 5])),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.tensor([1 + 2j, 0]), torch.tensor([1 + 3j, 0])),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e5m2), torch.tensor([1.5, 2.0]).to(torch.float8_e5m2)),
    ],
    ids=["large integers", "signs of zero", "complex", "8 bits"],
)
def test_diff_without_a_tolerance_is_of_bits(tmp_path, a, b):
    from deepc.checkpoint import CheckpointWriter

    nan = torch.tensor([float("nan"), float("inf")])
    for folder, value in (("a", a), ("b", b)):
        writer = CheckpointWriter(tmp_path / folder, "t")
        writer.add("fp32/nan", nan)
        writer.add("buffer/x", value)
        writer.write()
        writer.publish({})
    found, compared = tool.diff(tmp_path / "a", tmp_path / "b")
    assert [(d.name, d.what, d.elements, d.numel) for d in found] == [("buffer/x", "values", 1, 2)] and compared == 2
    assert tool.diff(tmp_path / "a", tmp_path / "a") == ([], 2)


def test_a_flipped_bit_is_found(saved, tmp_path, capsys):
    import shutil

    folder, *_ = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert main(["ckpt", "verify", str(copy), "--all"]) == 0
    shard = copy / "step2" / "rank_00001_of_00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    assert main(["ckpt", "verify", str(copy), "--all"]) == 1
    out = capsys.readouterr().out
    assert "WRONG step2" in out and "whole step3" in out and "rank_00001_of_00002" in out
    assert main(["ckpt", "verify", str(copy)]) == 0  # the latest alone
    shard.write_bytes(data[:-9])
    assert main(["ckpt", "ls", str(copy)]) == 1
    assert "truncated" in capsys.readouterr().out


def test_clean_keeps_what_it_must(saved, tmp_path):
    import shutil

    folder, *_ = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.copytree(folder / "step2", copy / "step1")
    (copy / "step1" / "index.json").unlink()  # not a checkpoint: never touched
    for name in (".tmp-step9-abc", ".old-step2-abc", ".old-lost-abc", ".tmp-new-abc"):
        (copy / name).mkdir()
    old = time.time() - 7200
    for name in (".tmp-step9-abc", ".old-step2-abc", ".old-lost-abc"):
        os.utime(copy / name, (old, old))
    os.utime(copy / "step2" / "index.json", (old, old))
    told = tool.clean(copy, keep=1)
    assert (
        sorted(Path(p).name for p, _, _ in told) == [".old-step2-abc", ".tmp-step9-abc", "step2"]
        and (copy / "step2").exists()
    )
    assert tool.clean(copy, keep=1, really=True) == told
    assert sorted(p.name for p in copy.iterdir()) == [".old-lost-abc", ".tmp-new-abc", "latest", "step1", "step3"]
    tool.verify(copy)
    with pytest.raises(ArgumentError, match="at least 1"):
        tool.clean(copy, keep=0)


def test_clean_leaves_a_save_that_still_writes(tmp_path):
    """A file of a large model grows for hours, in which the folder's own time stays."""
    (tmp_path / ".tmp-t-abc").mkdir()
    file, now = tmp_path / ".tmp-t-abc" / "rank_00000_of_00001.safetensors", time.time()
    for age, found in ((60.0, 0), (7200.0, 1)):
        file.write_bytes(b"x")
        os.utime(file, (now - age, now - age))
        os.utime(file.parent, (now - 7200, now - 7200))
        assert len(tool.clean(tmp_path, really=True)) == found
    assert not file.parent.exists()


def test_what_is_no_checkpoint_says_what_it_is(tmp_path, saved, capsys):
    (tmp_path / "ds" / "global_step2").mkdir(parents=True)
    (tmp_path / "ds" / "global_step2" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    assert main(["ckpt", "info", str(tmp_path / "ds")]) == 2
    assert f"It is DeepSpeed's: `deepc ckpt import {tmp_path / 'ds'} NEW_FOLDER`" in capsys.readouterr().err
    assert main(["ckpt", "ls", str(tmp_path / "none")]) == 2
    with pytest.raises(CheckpointError, match="It has: step2, step3"):
        tool.info(saved[0], "step7")
    with pytest.raises(CheckpointError, match="folder a does"):
        tool.locate(saved[0].parent)


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("500MiB", 500 * 2**20), ("1000", 1000), ("1.5kb", 1500)])
def test_sizes(text, size):
    assert tool.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "5 parsecs", "0"])
def test_wrong_sizes(text):
    with pytest.raises(ArgumentError, match="is not a size"):
        tool.parse_size(text)
