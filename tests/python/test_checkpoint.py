"""engine.save_checkpoint and load_checkpoint: bit-exact resume, any ranks and stage into any other, and errors that
name what is wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import tiny
import torch
from ranks import RankFailure
from ranks import run_ranks as _run_ranks


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


SCHEDULE = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4}}}


def make_engine(stage, world, precision="fp32", optimizer=None, **extra):
    import deepc

    cfg = tiny.config(stage, micro=8 // world, precision=precision, **SCHEDULE, **extra)
    if precision == "fp16":
        cfg["fp16"].update(initial_scale_power=8, loss_scale_window=2)
    model = tiny.make_model(frozen=True)
    model.register_buffer("seen", torch.zeros(3))
    if optimizer is not None:
        del cfg["optimizer"]
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    return deepc.initialize(model=model, config=cfg, optimizer=optimizer)[0]


def train(engine, rank, world, steps):
    n = 8 // world
    losses = []
    for step in steps:
        x, y = tiny.make_batch(step)
        loss = engine(x[rank * n :][:n], y[rank * n :][:n])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine):
    out = {
        n: engine.full_fp32_param(p).clone() if p.requires_grad else p.detach().float().clone()
        for n, p in engine.module.named_parameters()
    }
    out |= {
        f"moment {n}": engine.full_optimizer_state(p, "exp_avg")
        for n, p in engine.module.named_parameters()
        if p.requires_grad
    }
    return out


def _resume(rank, world, folder, precision):
    straight = make_engine(2, world, precision)
    train(straight, rank, world, range(6))
    want = weights(straight), straight.get_lr(), straight.loss_scale, straight.global_steps
    straight.destroy()
    first = make_engine(2, world, precision)
    train(first, rank, world, range(3))
    first.module.seen.fill_(7.0)
    torch.manual_seed(123 + rank)
    assert first.save_checkpoint(folder, client_state={"epoch": 3, "note": ["a", 1.5, None], "x": torch.arange(4)})
    after_save = torch.rand(3).tolist(), random.random()
    first.destroy()
    second = make_engine(2, world, precision)
    train(second, rank, world, [9])  # other values, to be overwritten
    path, client = second.load_checkpoint(folder)
    assert (
        path.endswith("global_step3")
        and client["epoch"] == 3
        and client["note"] == ["a", 1.5, None]
        and torch.equal(client["x"], torch.arange(4))
    )
    assert (torch.rand(3).tolist(), random.random()) == after_save
    assert torch.all(second.module.seen == 7.0)
    train(second, rank, world, range(3, 6))
    got = weights(second), second.get_lr(), second.loss_scale, second.global_steps
    second.destroy()
    assert want[1:] == got[1:]
    for n in want[0]:
        assert torch.equal(want[0][n], got[0][n]), n
    return True


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16", "fp16"])
def test_resume_is_bit_exact(tmp_path, precision):
    assert all(run_ranks(_resume, 2, str(tmp_path), precision))


def _save(rank, world, folder, stage):
    engine = make_engine(stage, world, "bf16")
    train(engine, rank, world, range(3))
    engine.save_checkpoint(folder, tag="here")
    engine.save_checkpoint(folder, tag="here")  # the same tag again
    out = weights(engine)
    engine.destroy()
    return out


def _load(rank, world, folder):
    out = {}
    for stage in range(4):
        engine = make_engine(stage, world, "bf16")
        path, _ = engine.load_checkpoint(folder, tag="here")
        assert path and engine.global_steps == 3
        out[stage] = weights(engine)
        for n, p in engine.module.named_parameters():
            if p.requires_grad:
                assert torch.equal(p.detach().float(), out[stage][n].bfloat16().float()), n
        train(engine, rank, world, [3])
        engine.destroy()
    return out


@pytest.mark.parametrize("stage, world, other", [(3, 2, 1), (0, 1, 2), pytest.param(2, 4, 2, marks=pytest.mark.full)])
def test_any_layout_loads_into_any_other(tmp_path, stage, world, other):
    saved = run_ranks(_save, world, str(tmp_path), stage)[0]
    for loaded in run_ranks(_load, other, str(tmp_path)):
        for into in range(4):
            for n in saved:
                assert torch.equal(saved[n], loaded[into][n]), (into, n)


def _torch_optimizer(rank, world, folder):
    def sgd(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    engine = make_engine(2, world, optimizer=sgd)
    train(engine, rank, world, range(3))
    engine.save_checkpoint(folder)
    train(engine, rank, world, range(3, 5))
    want = {n: engine.full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    engine.destroy()
    other = make_engine(3, world, optimizer=sgd)
    other.load_checkpoint(folder)
    train(other, rank, world, range(3, 5))
    for n, p in other.module.named_parameters():
        if p.requires_grad:
            assert torch.equal(want[n], other.full_fp32_param(p)), n
    other.destroy()
    return True


def test_a_torch_optimizers_states_are_saved_and_loaded(tmp_path):
    assert all(run_ranks(_torch_optimizer, 2, str(tmp_path)))


def test_no_pickle_and_the_files_are_safetensors(tmp_path):
    import deepc

    engine = make_engine(2, 1)
    train(engine, 0, 1, range(1))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    assert (tmp_path / "latest").read_text().split()[0] == "global_step1"
    names = sorted(os.listdir(tmp_path / "global_step1"))
    assert all(n.endswith((".safetensors", ".json")) for n in names), names
    safetensors = pytest.importorskip("safetensors.torch")
    for n in names:
        if n.endswith(".safetensors"):
            assert safetensors.load_file(tmp_path / "global_step1" / n)
    for file in (Path(deepc.__file__).parent).rglob("*.py"):
        if (
            file.name == "notebook.py"
        ):  # sends a function to its own child processes through anonymous memory; it reads no file
            continue
        assert "import pickle" not in file.read_text(), file


def _export(rank, world, folder, stage):
    engine = make_engine(stage, world, "bf16")
    train(engine, rank, world, range(1))
    assert engine.save_16bit_model(folder)
    out = {n: t.clone() for n, t in engine.module.state_dict().items()}
    engine.destroy()
    return out


@pytest.mark.parametrize("stage", [0, 3])
def test_export_is_a_plain_safetensors_model(tmp_path, stage):
    want = run_ranks(_export, 2, str(tmp_path), stage)[0]
    got = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
    assert "head.weight" in want and set(want) - set(got) <= {"tok.weight", "head.weight"}  # the tie is stored once
    for n in got:
        assert torch.equal(got[n], want[n]) and got[n].dtype == want[n].dtype


# ---- what is wrong is said -------------------------------------------------------------------------------------------


def test_missing_checkpoints(tmp_path):
    from deepc.errors import CheckpointError

    engine = make_engine(2, 1)
    assert engine.load_checkpoint(tmp_path) == (
        None,
        {},
    )  # as DeepSpeed: nothing there, nothing loaded, said in a warning
    with pytest.raises(CheckpointError, match="step7"):
        engine.load_checkpoint(tmp_path, tag="step7")
    engine.save_checkpoint(tmp_path, tag="step7")
    # One itself is no folder without any, from which training would begin anew.
    with pytest.raises(CheckpointError, match=f"checkpoint itself: give {tmp_path} and the tag 'step7'"):
        engine.load_checkpoint(tmp_path / "step7")
    engine.destroy()


def test_client_state_without_pickle(tmp_path):
    from deepc.errors import CheckpointTypeError

    engine = make_engine(2, 1)
    with pytest.raises(CheckpointTypeError, match="fn"):
        engine.save_checkpoint(tmp_path, client_state={"a": {"fn": print}})
    assert not any(tmp_path.iterdir())
    engine.destroy()


def _save_what_one_rank_cannot(rank, world, folder):
    from deepc.errors import CheckpointError, CheckpointTypeError

    engine = make_engine(2, world)
    for bad in ({"fn": print}, [1]):
        error, told = (CheckpointTypeError, "fn|got list") if rank else (CheckpointError, "failed on rank 1")
        with pytest.raises(error, match=told):
            engine.save_checkpoint(folder, client_state=bad if rank else {})
    assert not os.listdir(folder)
    assert train(engine, rank, world, range(1)) and engine.save_checkpoint(folder)  # the ranks are together
    engine.destroy()


def test_client_state_that_one_rank_cannot_save_is_told_on_all(tmp_path):
    run_ranks(_save_what_one_rank_cannot, 2, str(tmp_path))


def test_another_model_is_refused_by_name(tmp_path):
    import deepc
    from deepc.errors import CheckpointError

    engine = make_engine(2, 1)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    other = deepc.initialize(model=tiny.make_model(width=64), config=tiny.config(2, micro=8))[0]
    with pytest.raises(CheckpointError, match="shape"):
        other.load_checkpoint(tmp_path)
    other.destroy()
    third = deepc.initialize(model=tiny.make_model(layers=3), config=tiny.config(2, micro=8))[0]
    with pytest.raises(CheckpointError, match="blocks.2"):
        third.load_checkpoint(tmp_path)
    third.destroy()


def _corrupt(rank, world, folder):
    from deepc.errors import CheckpointError

    engine = make_engine(2, world)
    engine.save_checkpoint(folder)
    if rank == 0:
        shard = next(Path(folder, "global_step0").glob("rank_00001*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-5] ^= 16
        shard.write_bytes(bytes(data))
    engine.group.barrier()
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(error.value)


def test_a_flipped_bit_is_an_error_on_every_rank(tmp_path):
    said = run_ranks(_corrupt, 2, str(tmp_path))
    assert any("rank_00001" in s and "CRC" in s.upper() for s in said), said
    assert all("rank" in s for s in said)


def _full_disk(rank, world, folder):
    from deepc.errors import CheckpointError

    engine = make_engine(2, world)
    target = folder if rank == 0 else "/proc/nowhere"  # rank 1 can't write
    with pytest.raises(CheckpointError) as error:
        engine.save_checkpoint(target)
    engine.destroy()
    return str(error.value)


def test_a_rank_that_cannot_write_fails_the_save_everywhere_and_leaves_nothing(tmp_path):
    said = run_ranks(_full_disk, 2, str(tmp_path))
    assert "rank 1" in said[0] and "/proc" in said[1]
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith(".tmp")]


def test_a_save_that_is_interrupted_leaves_nothing_and_the_next_is_whole(tmp_path, monkeypatch):
    from deepc.checkpoint import store

    def interrupted(path, *args, **kwargs):
        Path(path).write_bytes(b"a part")
        raise KeyboardInterrupt

    engine = make_engine(0, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "write_safetensors", interrupted)
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path)[0] is not None
    engine.destroy()


def _die(rank, world, folder):
    import signal

    engine = make_engine(3, world)
    train(engine, rank, world, range(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(engine, rank, world, range(2))


def test_a_killed_rank_raises_on_the_survivor_and_names_it(tmp_path):
    with pytest.raises(RankFailure) as failure:
        _run_ranks(_die, 2, args=(str(tmp_path),), env={"DEEPC_LOG_LEVEL": "WARNING"})
    assert "RankDiedError" in failure.value.text[0] and "rank 1" in failure.value.text[0]


def _scattered(rank, world, folder):
    from deepc.errors import CheckpointError

    engine = make_engine(2, world)
    with pytest.raises(CheckpointError) as error:
        engine.save_checkpoint(f"{folder}/{rank}", tag="t")
    engine.save_checkpoint(f"{folder}/0")
    with pytest.raises(CheckpointError) as loading:  # rank 1 went on without it, and rank 0 waited
        engine.load_checkpoint(f"{folder}/{rank}")
    assert engine.load_checkpoint(f"{folder}/0")[0] is not None
    engine.destroy()
    return str(error.value), str(loading.value)


def test_ranks_that_save_to_different_folders_are_told_so(tmp_path):
    said, loading = zip(*run_ranks(_scattered, 2, str(tmp_path)))
    assert all("rank 0 sees a checkpoint there and rank 1 sees none" in text for text in loading)
    assert f"rank 0 with '{tmp_path}/0/t', rank 1 with '{tmp_path}/1/t'" in said[0]
    assert "rank 0" in said[1]


def _of_two_ages(rank, world, folder):
    from deepc.errors import CheckpointError

    engine = make_engine(2, world)
    for age in (0, 1):  # as where a node's copy is older than another's
        train(engine, rank, world, [age])
        engine.save_checkpoint(f"{folder}/{age}", tag="here")
    train(engine, rank, world, [2])
    before = weights(engine)
    with pytest.raises(CheckpointError, match="rank 0 has found 'here' .* and rank 1 'here' .* nothing was loaded"):
        engine.load_checkpoint(f"{folder}/{rank}")
    assert engine.global_steps == 3 and all(torch.equal(t, before[n]) for n, t in weights(engine).items())
    engine.load_checkpoint(f"{folder}/1")
    steps = engine.global_steps
    engine.destroy()
    return steps


def test_ranks_that_find_different_saves_load_none(tmp_path):
    assert run_ranks(_of_two_ages, 2, str(tmp_path)) == [2, 2]


def _tags(rank, world, folder, wanted):
    import logging

    from deepc.errors import CheckpointError

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("deepc").addHandler(handler)
    engine = make_engine(2, world, checkpoint={"tag_validation": wanted})
    try:
        engine.save_checkpoint(folder, tag=f"at{rank}")
        found = Path(engine.load_checkpoint(folder)[0]).name
    except CheckpointError as exc:
        assert isinstance(exc, AssertionError)  # what DeepSpeed raises
        found = str(exc)
    logging.getLogger("deepc").removeHandler(handler)
    engine.destroy()
    return found, [text for text in said if "different tags" in text]


@pytest.mark.parametrize("wanted", ["Ignore", "WARN", "fail"])
def test_ranks_that_save_under_different_tags(tmp_path, wanted):
    found = _run_ranks(_tags, 2, args=(str(tmp_path), wanted), env={"DEEPC_LOG_LEVEL": "WARNING"})
    different = "different tags: rank 0 with 'at0', rank 1 with 'at1'"
    if wanted == "fail":
        assert all(different in text for text, _ in found) and not list(tmp_path.iterdir())
        return
    assert [name for name, _ in found] == ["at0", "at0"]
    assert [len(said) for _, said in found] == [wanted == "WARN", 0]
    assert all(different in text for _, said in found for text in said)


# ---- a rank that is still reading ------------------------------------------------------------------------------------
def _load_beside_a_forward(rank, world, folder, on_disk):
    """Losses: where the checkpoint was saved, later, of a forward in whose middle the other rank wants to load it, and
    behind that."""
    import time

    zero = {"offload_param": {"device": "nvme", "nvme_path": folder}, "stage3_param_persistence_threshold": 0}
    limits = {"stage3_prefetch_bucket_size": 1, "stage3_max_live_parameters": 10_000}
    import deepc

    cfg = tiny.config(3, micro=4)
    cfg["zero_optimization"].update({**zero, **limits} if on_disk else {})
    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    train(engine, rank, world, range(1))
    engine.save_checkpoint(f"{folder}/saved")
    x, y = tiny.make_batch(0)
    told = []
    with torch.no_grad():
        told.append(engine(x, y).item())
    train(engine, rank, world, range(1, 4))
    with torch.no_grad():
        told.append(engine(x, y).item())
        other = Path(folder, "loads")
        if rank == 0:

            def wait(*_):
                end = time.monotonic() + 100
                while not other.exists() and time.monotonic() < end:
                    time.sleep(0.01)
                time.sleep(1)  # in which it would have loaded

            hook = engine.module.blocks[0].register_forward_hook(wait)
            told.append(engine(x, y).item())
            hook.remove()
        else:
            told.append(engine(x, y).item())
            other.touch()
        engine.load_checkpoint(f"{folder}/saved")
        told.append(engine(x, y).item())
    engine.destroy()
    return told


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_loading_waits_for_ranks_that_still_read(tmp_path, on_disk):
    ranks = run_ranks(_load_beside_a_forward, 2, str(tmp_path), on_disk)
    assert ranks[0] == ranks[1]
    saved, before, beside, behind = ranks[0]
    assert beside == before != saved == behind
