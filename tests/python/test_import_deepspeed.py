"""`deepc ckpt import`: files in DeepSpeed's layout, written here (quick), and by DeepSpeed itself (full)."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from deepc.checkpoint import CheckpointReader
from deepc.checkpoint import deepspeed as importing
from deepc.checkpoint.deepspeed import import_checkpoint
from deepc.cli import main
from deepc.errors import CheckpointError
from ranks import run_ranks
from torch import nn

TAG, LR, STEPS = "global_step2", 1e-2, 2


class Model(nn.Module):
    """Sizes that no number of ranks divides; tied, frozen, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.mid, self.cold = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.tok.weight
        self.cold.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("same", self.scale)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        h = torch.relu(self.mid(self.tok(x)))
        return F.cross_entropy(self.head(h * self.scale[0]), x.roll(1)) + self.cold(h).square().mean()


def _batch(step: int) -> torch.Tensor:
    return torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))


def _optimizer(model: nn.Module, **options) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2]}]
    groups[1]["weight_decay"] = 0.0
    return torch.optim.AdamW(groups, lr=LR, **options)


def _torch(steps: int = STEPS, **options) -> tuple[Model, torch.optim.Optimizer, list[float]]:
    """Plain PyTorch's training."""
    torch.manual_seed(0)
    model = Model()
    optimizer, losses = _optimizer(model, **options), []
    for step in range(steps):
        loss = model(_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


# ---- DeepSpeed's layout ----------------------------------------------------------------------------------------------
@pytest.fixture
def theirs(monkeypatch):
    """Classes of the names that DeepSpeed's files have, pickled as its own are."""
    found = types.SimpleNamespace()
    for path in (
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
        "checkpoint.universal_checkpoint.SubparamShape",
    ):
        module, _, name = f"deepspeed.{path}".rpartition(".")
        parts = module.split(".")
        for n in range(1, len(parts) + 1):
            room = ".".join(parts[:n])
            if getattr(sys.modules.get(room), "stand_in", False) is False:
                made = types.ModuleType(room)
                made.stand_in = True
                monkeypatch.setitem(sys.modules, room, made)
        kind = type(name, (int,) if name == "ZeroStageEnum" else (), {"__module__": module})
        if name == "ZeroStageEnum":
            kind.__reduce_ex__ = lambda self, protocol: (type(self), (int(self),))
        setattr(sys.modules[module], name, kind)
        setattr(found, name, kind)
    return found


def _scaler(theirs):
    scaler = theirs.DynamicLossScaler()
    vars(scaler).update(cur_scale=1024.0, cur_iter=2, last_overflow_iter=0, cur_hysteresis=1, dynamic=True)
    return scaler


def _parts(tensors: list[torch.Tensor], ranks: int, between: list[int]) -> list[torch.Tensor]:
    """Stages 1 and 2: one line, padded to a multiple of 2 * ranks, cut in equal parts."""
    pieces = [F.pad(t.reshape(-1), (0, n)) for t, n in zip(tensors, between, strict=True)]
    line = torch.cat(pieces)
    return list(F.pad(line, (0, -line.numel() % (2 * ranks))).chunk(ranks))


def _cut(tensors: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """Stage 3: each tensor in `ranks` equal parts."""
    cut = [F.pad(t.reshape(-1), (0, -t.numel() % ranks)).chunk(ranks) for t in tensors]
    return [torch.cat([c[r] for c in cut]) for r in range(ranks)]


def _write(
    folder: Path,
    theirs,
    stage: int,
    ranks: int,
    *,
    dtype=torch.float32,
    spaced=False,
    client=None,
    steps=STEPS,
    **options,
) -> dict[str, torch.Tensor]:
    """A checkpoint as DeepSpeed writes one; returns what deepc's is to hold, by logical name."""
    model, optimizer, _ = _torch(steps, **options)
    names = {id(p): n for n, p in model.named_parameters()}
    kinds = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])]
    groups = [[(names[id(p)], p) for p in g["params"]] for g in optimizer.param_groups]
    wanted = {f"fp32/{n}": p.detach().clone() for g in groups for n, p in g}
    wanted |= {f"{k}/{n}": optimizer.state[p][k] for g in groups for n, p in g for k in kinds}
    wanted |= {f"frozen/{n}": p.detach().to(dtype) for n, p in model.named_parameters() if not p.requires_grad}
    whole = optimizer.state_dict()

    if stage == 3:  # a sub-group of each parameter of the first group, and one of the second
        lines = [[(n, p)] for n, p in groups[0]] + [groups[1]]
        of_group = [list(range(len(groups[0]))), [len(groups[0])]]
    else:
        lines, of_group = groups, [[0], [1]]
    between = [[3 if spaced and i + 1 < len(g) else 0 for i, _ in enumerate(g)] for g in lines]

    def by_rank(value) -> list[list[torch.Tensor]]:
        """[rank][line]"""
        rows = [[value(n, p).detach() for n, p in g] for g in lines]
        cut = [_cut(r, ranks) if stage == 3 else _parts(r, ranks, b) for r, b in zip(rows, between)]
        return [[c[r].clone() for c in cut] for r in range(ranks)]

    masters = by_rank(lambda n, p: p)
    moments = {k: by_rank(lambda n, p, k=k: optimizer.state[p][k]) for k in kinds}
    path = folder / TAG
    path.mkdir(parents=True)
    for r in range(ranks) if stage else ():
        state = {
            i: {"step": torch.tensor(float(steps)), **{k: m[r][i] for k, m in moments.items()}}
            for i in range(len(lines))
        }
        base = {"state": state, "param_groups": [{**g, "params": of} for g, of in zip(whole["param_groups"], of_group)]}
        sd = {"loss_scaler": _scaler(theirs), "zero_stage": theirs.ZeroStageEnum(stage)}
        if stage == 3:
            sd |= {"partition_count": ranks, "optimizer_state_dict": base, "fp32_flat_groups": masters[r]}
        else:  # masters without the padding at the end
            lean = [
                sum(p.numel() for _, p in g) + sum(b) - r * m.numel() for g, b, m in zip(lines, between, masters[r])
            ]
            sd |= {"partition_count": [ranks] * 2, "base_optimizer_state": base, "param_alignment_paddings": between}
            sd |= {"single_partition_of_fp32_groups": [m[: max(0, n)] for m, n in zip(masters[r], lean)]}
            sd |= {"param_slice_mappings": [collections.OrderedDict(x=theirs.fragment_address())]}
        prefix = "bf16_" if dtype == torch.bfloat16 else ""
        file = path / f"{prefix}zero_pp_rank_{r}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": sd | {"ds_version": "0.19.8"}, "ds_version": "0.19.8"}, file)
    model.to(dtype)
    model.same = model.scale
    wanted |= {"buffer/scale": model.scale, "buffer/count": model.count}
    module = model.state_dict()
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    common = {
        "buffer_names": ["scale", "same", "count"],
        "optimizer": None if stage else whole,
        "param_shapes": [collections.OrderedDict((n, p.shape) for n, p in g) for g in lines] if stage else None,
        "shared_params": {"head.weight": "tok.weight"} if stage else None,
        "frozen_param_shapes": {n: p.shape for n, p in frozen.items()} if stage > 1 else None,
        "lr_scheduler": {"last_batch_iteration": 1},
        "skipped_steps": 1,
        "global_steps": steps + 1,
        "global_samples": 24,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
        **(client or {}),
    }
    for r in range(ranks if stage == 3 else 1):
        mine = {n: _cut([p.detach()], ranks)[r].clone() if stage == 3 else p for n, p in frozen.items()}
        held = (
            module
            if stage < 3
            else {n: v if n in common["buffer_names"] else v.new_empty(0) for n, v in module.items()}
        )
        name = f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save({"module": held, "frozen_param_fragments": mine if stage > 1 else None, **common}, path / name)
    (folder / "latest").write_text(TAG)
    return wanted


def _make_universal(path: Path, theirs, wanted: dict[str, torch.Tensor], stage: int) -> None:
    """What ds_to_universal.py makes of a checkpoint that `_write` has written, in its place."""
    groups = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR).state_dict()["param_groups"]
    common = {"loss_scaler": _scaler(theirs), "zero_stage": theirs.ZeroStageEnum(stage), "partition_count": [2, 2]}
    common["param_groups"] = [groups[0], {**groups[0], "weight_decay": 0.0}]
    if stage == 3:
        common["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(float(STEPS))}}}
    for file in path.glob("*_optim_states.pt"):
        file.unlink()
    for full, value in wanted.items():
        kind, _, name = full.partition("/")
        if stage == 3 and kind in ("frozen", "buffer"):
            continue
        at, kind = path / "zero" / name, "fp32" if kind in ("frozen", "buffer") else kind
        at.mkdir(parents=True, exist_ok=True)
        whole = value.detach().float().clone()
        torch.save(whole.view(-1) if stage == 3 else {"param": whole, "cat_dim": 0}, at / f"{kind}.pt")
        if stage < 3 and full.startswith("fp32/"):
            torch.save(torch.tensor(float(STEPS)), at / "step.pt")
    torch.save(common, path / "zero" / "optimizer_state.pt")


# ---- what becomes of them --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "stage, ranks, options",
    [
        (1, 1, {}),
        (1, 3, {"spaced": True}),
        (2, 2, {"dtype": torch.bfloat16}),
        (2, 3, {"amsgrad": True}),
        (3, 1, {}),
        (3, 2, {"dtype": torch.float16}),
        (3, 4, {"amsgrad": True}),
        (0, 2, {}),
    ],
)
def test_every_value_is_that_of_the_files(tmp_path, theirs, stage, ranks, options):
    wanted = _write(tmp_path / "ds", theirs, stage, ranks, client={"epoch": 4, "seen": {1, 2}}, **options)
    done = import_checkpoint(tmp_path / "ds", tmp_path / "new")
    assert (done.stage, done.ranks, done.step) == (stage, ranks, STEPS) and list(done.left_out) == ["seen"]
    with CheckpointReader(tmp_path / "new") as reader:
        reader.verify()
        assert set(reader.tensors) == set(wanted)
        for name, value in wanted.items():
            assert torch.equal(reader.tensor(name), value), name
        state = reader.client_state()
    engine = state["engine"]
    assert reader.tag == TAG and state["client"] == {"epoch": 4}
    assert (engine["global_steps"], engine["global_samples"], engine["skipped_steps"]) == (STEPS + 1, 24, 1)
    assert engine["ties"] == {"head.weight": "tok.weight", "same": "scale"}
    assert engine["lr_scheduler"] == {"last_batch_iteration": 1}
    assert [g["weight_decay"] for g in engine["optimizer"]["param_groups"]] == [0.01, 0.0]
    half = options.get("dtype") == torch.float16
    scaler = {"loss_scale": 1024.0, "hysteresis_left": 1, "step_count": 2, "last_overflow_step": 0}
    assert engine["scaler"] == (scaler if half else None)


@pytest.mark.parametrize("stage, ranks, dtype", [(1, 2, torch.float16), (2, 3, torch.bfloat16), (3, 2, torch.float32)])
def test_every_value_is_that_of_a_universal_checkpoint(tmp_path, theirs, stage, ranks, dtype):
    wanted = _write(tmp_path / "ds", theirs, stage, ranks, dtype=dtype)
    _make_universal(tmp_path / "ds" / TAG, theirs, wanted, stage)
    (tmp_path / "ds" / "latest").rename(tmp_path / "ds" / "latest_universal")
    shutil.copytree(tmp_path / "ds", tmp_path / "copy")
    done = import_checkpoint(tmp_path / "ds", tmp_path / "new")
    assert (done.stage, done.ranks, done.step, done.kinds) == (stage, ranks, STEPS, ("exp_avg", "exp_avg_sq"))
    import_checkpoint(tmp_path / "copy", tmp_path / "again")
    with CheckpointReader(tmp_path / "new") as reader, CheckpointReader(tmp_path / "again") as again:
        reader.verify()
        assert reader.token == again.token
        assert set(reader.tensors) == set(wanted)
        for name, value in wanted.items():
            found = reader.tensor(name)
            assert found.shape == value.shape and torch.equal(found, value), name
        engine = reader.client_state()["engine"]
    assert (engine["optimizer"]["step"], engine["ties"]) == (STEPS, {"head.weight": "tok.weight", "same": "scale"})
    assert [g["weight_decay"] for g in engine["optimizer"]["param_groups"]] == [0.01, 0.0]
    assert (engine["scaler"] or {}).get("loss_scale") == (1024.0 if dtype == torch.float16 else None)
    import_checkpoint(tmp_path / "ds", tmp_path / "weights", optimizer=False)
    with CheckpointReader(tmp_path / "weights") as reader:
        assert {n.partition("/")[0] for n in reader.tensors} == {"fp32", "frozen", "buffer"}


def _spread(path: Path, theirs, wanted: dict[str, torch.Tensor], pipeline: bool) -> None:
    """A universal checkpoint of two tensor-parallel ranks, or of two stages."""
    _make_universal(path, theirs, wanted, 2)
    names = [n.removeprefix("fp32/") for n in wanted if n.startswith("fp32/")]

    def alone(saved: dict, rank: int) -> None:
        mine = names[rank::2] if pipeline else names
        sizes = {n: torch.Size(wanted[f"fp32/{n}"].shape) for n in mine}
        if not pipeline:  # cut in the first size; the vocabulary was padded
            sizes = {n: torch.Size([-(-s[0] // 2), *s[1:]]) for n, s in sizes.items()}
        saved |= {"buffer_names": [], "frozen_param_shapes": None, "shared_params": None, "param_shapes": [sizes]}
        saved |= {"module": None if pipeline else {n: torch.zeros(s) for n, s in sizes.items()}, "mp_world_size": 2}

    first = path / "mp_rank_00_model_states.pt"
    shutil.copy(first, path / "mp_rank_01_model_states.pt")
    for rank in range(2):
        _change(path / f"mp_rank_0{rank}_model_states.pt", lambda saved, rank=rank: alone(saved, rank))
    if pipeline:
        torch.save({"weight": torch.zeros(3)}, path / "layer_00-model_states.pt")
        return
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        _change(path / "zero" / "tok.weight" / f"{kind}.pt", lambda saved: saved.update(vocab_tensor=True))
    shape = theirs.SubparamShape()
    shape.partition_dim = 0
    _change(path / "zero" / "mid.weight" / "fp32.pt", lambda saved: saved.update(sub_param_shape=shape))


@pytest.mark.parametrize("pipeline", [False, True])
def test_tensor_parallel_ranks_and_stages_come_as_a_universal_checkpoint(tmp_path, theirs, pipeline):
    wanted = _write(tmp_path / "ds", theirs, 2, 2)
    _spread(tmp_path / "ds" / TAG, theirs, wanted, pipeline)
    done = import_checkpoint(tmp_path / "ds", tmp_path / "new")
    trained = {n: v for n, v in wanted.items() if n.partition("/")[0] in ("fp32", "exp_avg", "exp_avg_sq")}
    assert done.parameters * 3 == len(trained) and done.step == STEPS
    with CheckpointReader(tmp_path / "new") as reader:
        assert set(reader.tensors) == set(trained)
        for name, value in trained.items():
            assert torch.equal(reader.tensor(name), value), name


WRONG_UNIVERSAL = {
    "a weight missing": (
        lambda p: (p / "zero" / "mid.bias" / "fp32.pt").unlink(),
        r"zero/mid\.bias/fp32\.pt is not there: the weights have 'mid\.bias'",
    ),
    "a moment of another shape": (
        lambda p: torch.save({"param": torch.zeros(4)}, p / "zero" / "mid.bias" / "exp_avg.pt"),
        r"exp_avg\.pt: 'mid\.bias' has shape \(4,\), and \(5,\) in the weights",
    ),
    "a weight of another shape": (
        lambda p: torch.save({"param": torch.zeros(5, 4)}, p / "zero" / "mid.weight" / "fp32.pt"),
        r"fp32\.pt: 'mid\.weight' has shape \(5, 4\), and \(5, 5\) in the weights",
    ),
    "no model": (lambda p: (p / "mp_rank_00_model_states.pt").unlink(), r"holds no checkpoint of DeepSpeed's"),
    "amsgrad": (
        lambda p: _change(p / "zero" / "optimizer_state.pt", lambda s: s["param_groups"][0].update(amsgrad=True)),
        r"has no max_exp_avg_sq, .*amsgrad",
    ),
    "experts": (
        lambda p: _change(p / "zero" / "optimizer_state.pt", lambda s: s.update(partition_count=[2, 1])),
        r"optimizer_state\.pt: experts of MoE layers",
    ),
    "buffers of ranks": (
        lambda p: _change(p / "mp_rank_00_model_states.pt", lambda s: s.update(mp_world_size=2)),
        r"'cold\.bias' is a buffer or not trained, and of tensor-parallel ranks",
    ),
}


@pytest.mark.parametrize("what", WRONG_UNIVERSAL)
def test_what_a_universal_checkpoint_lacks_is_told(tmp_path, theirs, what):
    wanted = _write(tmp_path / "ds", theirs, 2, 2)
    _make_universal(tmp_path / "ds" / TAG, theirs, wanted, 2)
    change, match = WRONG_UNIVERSAL[what]
    change(tmp_path / "ds" / TAG)
    _refused(tmp_path, match)


def _go_on(rank: int, world: int, folder: str, stage: int, steps: int) -> tuple[list[float], dict, dict]:
    import deepc

    torch.manual_seed(1)
    model = Model()
    config = {"train_micro_batch_size_per_gpu": 8 // world, "zero_optimization": {"stage": stage}}
    engine, _, _, _ = deepc.initialize(model=model, optimizer=_optimizer(model), config=config)
    _, client = engine.load_checkpoint(folder)
    losses = []
    for step in range(STEPS, STEPS + steps):
        loss = engine(_batch(step))  # the whole batch on each rank: the mean of equal gradients
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {n: engine.full_fp32_param(p).clone() for n, p in model.named_parameters() if p.requires_grad}
    return losses, weights, {**client, "steps": engine.global_steps}


@pytest.mark.parametrize("stage, ranks, to_stage, world", [(3, 3, 1, 1), (2, 2, 3, 2), (0, 1, 2, 2)])
def test_training_goes_on_as_plain_pytorchs(tmp_path, theirs, stage, ranks, to_stage, world):
    _write(tmp_path / "ds", theirs, stage, ranks, client={"epoch": 4})
    import_checkpoint(tmp_path / "ds", tmp_path / "new")
    losses, weights, client = run_ranks(_go_on, world, args=(str(tmp_path / "new"), to_stage, 3))[0]
    model, _, expected = _torch(STEPS + 3)
    assert client == {"epoch": 4, "steps": STEPS + 1 + 3}
    assert losses == pytest.approx(expected[STEPS:], rel=1e-6)
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert torch.allclose(weights[name], p, rtol=1e-5, atol=1e-7), name


def test_masters_of_16_bit_training_at_stage_0_find_their_names(tmp_path, theirs):
    """Its optimizer keeps them without names, in order: lists of tensors, or one tensor a group."""
    wanted = _write(tmp_path / "list", theirs, 0, 2)
    file = tmp_path / "list" / TAG / "mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=True)
    inner = saved["optimizer"]
    masters = [[wanted["fp32/tok.weight"], wanted["fp32/mid.weight"]], [wanted["fp32/mid.bias"]]]
    counts = {"dynamic_loss_scale": True, "cur_scale": 256.0, "cur_iter": 3, "last_overflow_iter": 1}
    saved["module"] = {n: t.half() if t.is_floating_point() else t for n, t in saved["module"].items()}
    saved["optimizer"] = {"optimizer_state_dict": inner, "fp32_groups": masters, **counts}
    torch.save(saved, file)
    flat = {i: {"step": 2} for i in range(2)}
    for kind in ("exp_avg", "exp_avg_sq"):
        for i, numbers in enumerate(([0, 1], [2])):
            flat[i][kind] = torch.cat([inner["state"][n][kind].reshape(-1) for n in numbers])
    groups = [{**g, "params": [i]} for i, g in enumerate(inner["param_groups"])]
    saved["optimizer"] = {"optimizer_state_dict": {"state": flat, "param_groups": groups}, **counts}
    saved["optimizer"]["fp32_groups_flat"] = [torch.cat([t.reshape(-1) for t in m]) for m in masters]
    (tmp_path / "flat" / TAG).mkdir(parents=True)
    torch.save(saved, tmp_path / "flat" / TAG / file.name)
    for form in ("list", "flat"):
        import_checkpoint(tmp_path / form, tmp_path / f"new-{form}")
        with CheckpointReader(tmp_path / f"new-{form}") as reader:
            for name in ("tok.weight", "mid.weight", "mid.bias"):
                for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(reader.tensor(f"{kind}/{name}"), wanted[f"{kind}/{name}"]), (form, kind, name)
            engine = reader.client_state()["engine"]
        assert engine["scaler"]["loss_scale"] == 256.0 and engine["scaler"]["step_count"] == 3


def test_before_the_first_step_moments_are_zero(tmp_path, theirs):
    _write(tmp_path / "ds", theirs, 2, 2)
    for r in range(2):
        file = tmp_path / "ds" / TAG / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt"
        _change(file, lambda s: s["optimizer_state_dict"]["base_optimizer_state"].update(state={}))
    with pytest.raises(CheckpointError, match="no optimizer states of its 3 steps"):
        import_checkpoint(tmp_path / "ds", tmp_path / "new")
    _change(tmp_path / "ds" / TAG / "mp_rank_00_model_states.pt", lambda s: s.update(global_steps=1))
    assert import_checkpoint(tmp_path / "ds", tmp_path / "new").step == 0
    with CheckpointReader(tmp_path / "new") as reader:
        assert not reader.tensor("exp_avg/tok.weight").any() and reader.tensor("fp32/tok.weight").all()


# ---- what can't be imported ------------------------------------------------------------------------------------------
def _change(file: Path, change) -> None:
    with torch.serialization.safe_globals(_stand_ins()):
        saved = torch.load(file, weights_only=True)
    change(saved)
    torch.save(saved, file)


def _stand_ins() -> list:
    names = (
        "runtime.fp16.loss_scaler",
        "runtime.zero.config",
        "utils.tensor_fragment",
        "checkpoint.universal_checkpoint",
    )
    rooms = [sys.modules[f"deepspeed.{n}"] for n in names if f"deepspeed.{n}" in sys.modules]
    return [v for room in rooms for v in vars(room).values() if isinstance(v, type)]


def _refused(tmp_path: Path, match: str, source: str = "ds", **options) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as found:
        import_checkpoint(tmp_path / source, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
    return found.value


class _Runs:
    def __init__(self, what) -> None:
        self.what = what

    def __reduce__(self):
        return self.what


def test_nothing_of_a_pickle_is_called(tmp_path, theirs):
    mark = tmp_path / "mark"
    _write(tmp_path / "ds", theirs, 2, 2, client={"x": _Runs((os.mkdir, (str(mark),)))})
    said = str(_refused(tmp_path, r"posix\.mkdir"))
    assert "mp_rank_00_model_states.pt" in said and not mark.exists()
    shutil.rmtree(tmp_path / "ds")
    _write(tmp_path / "ds", theirs, 2, 2, client={"x": types.SimpleNamespace(a=1)})
    _refused(tmp_path, r"mp_rank_00_model_states\.pt holds objects of types\.SimpleNamespace")


def _second(path: Path) -> Path:
    return path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"


WRONG = {
    "missing": (2, lambda p: _second(p).unlink(), r"has no zero_pp_rank_1_mp_rank_00_optim_states\.pt: .* by 2 ranks"),
    "universal": (
        2,
        lambda p: [f.unlink() for f in p.glob("*_optim_states.pt")],
        r"has no zero_pp_rank_0_mp_rank_00_optim_states\.pt: .* files of 0 are there\. .*universal",
    ),
    "missing model": (
        3,
        lambda p: (p / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink(),
        r"has no zero_pp_rank_0_mp_rank_00_model_states\.pt",
    ),
    "too many": (
        2,
        lambda p: shutil.copy(_second(p), p / "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        r"rank_2_.* belongs to another save: this one is of 2 ranks",
    ),
    "truncated": (2, lambda p: os.truncate(_second(p), _second(p).stat().st_size // 2), r"rank_1_.* can't be read"),
    "another world": (
        2,
        lambda p: _change(_second(p), lambda s: s["optimizer_state_dict"].update(partition_count=[3, 3])),
        r"rank_1_.* belongs to another save .*: ranks 3 and 2",
    ),
    "another step": (
        3,
        lambda p: _change(
            _second(p), lambda s: s["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].update(step=9)
        ),
        r"rank_1_.* belongs to another save .*: optimizer steps \[9, 2, 2\] and \[2, 2, 2\]",
    ),
    "another tag's model": (
        3,
        lambda p: _change(p / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda s: s.update(global_steps=9)),
        r"rank_1_.*model_states.* belongs to another save .*: global_steps 9 and 3",
    ),
    "another tag's weights": (
        2,
        lambda p: _change(
            p / "mp_rank_00_model_states.pt",
            lambda s: s.update(global_steps=9, module={n: t + 1 for n, t in s["module"].items()}),
        ),
        r"model_states\.pt belongs to another save .*: it is of 8 updates, they are of 2",
    ),
    "weights of two stages": (
        3,
        lambda p: shutil.copy(p / "zero_pp_rank_0_mp_rank_00_model_states.pt", p / "mp_rank_00_model_states.pt"),
        "has weights of two saves",
    ),
    "states of two precisions": (
        2,
        lambda p: shutil.copy(_second(p), p / f"bf16_{_second(p).name}"),
        "has optimizer states of two saves",
    ),
    "short": (
        2,
        lambda p: _change(
            _second(p),
            lambda s: s["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(exp_avg=torch.zeros(0)),
        ),
        r"exp_avg of 'tok\.weight' ends at element 35 of 30",
    ),
    "short in the middle": (
        2,
        lambda p: _change(
            p / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            lambda s: s["optimizer_state_dict"]["single_partition_of_fp32_groups"].__setitem__(0, torch.zeros(7)),
        ),
        r"rank_1_\S+ has 30 elements of fp32 where \S+rank_0_\S+ has 7",
    ),
    "another model": (
        2,
        lambda p: _change(
            p / "mp_rank_00_model_states.pt", lambda s: s["param_shapes"][0].update({"tok.weight": torch.Size([2, 5])})
        ),
        "there are 60 masters for 35 elements",
    ),
    "pipeline": (1, lambda p: shutil.copy(_second(p), p / "layer_00-model_00-model_states.pt"), "stages of a pipeline"),
    "experts": (2, lambda p: (p / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(), "experts of MoE layers"),
    "tensor parallel": (2, lambda p: (p / "mp_rank_01_model_states.pt").touch(), "tensor-parallel ranks"),
    "swapped": (3, lambda p: (p / "offloaded_tensors").mkdir(), "swapped to NVMe"),
    "no data": (
        2,
        lambda p: _change(
            _second(p),
            lambda s: s["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(
                exp_avg=torch.zeros(30, device="meta")
            ),
        ),
        "is not laid out as DeepSpeed does it: ValueError: a torch.strided tensor on meta",
    ),
    "no fields": (
        2,
        lambda p: _change(p / "mp_rank_00_model_states.pt", lambda s: s.pop("buffer_names")),
        "is not laid out as DeepSpeed does it: KeyError: 'buffer_names'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_of_one_save_is_refused_before_anything_is_written(tmp_path, theirs, what):
    stage, damage, match = WRONG[what]
    _write(tmp_path / "ds", theirs, stage, 2)
    damage(tmp_path / "ds" / TAG)
    _refused(tmp_path, match)


def _load_weights(rank: int, world: int, folder: str) -> tuple[str, int, int]:
    import deepc

    model = Model()
    engine, _, _, _ = deepc.initialize(model=model, optimizer=_optimizer(model), config=tiny.config(2, micro=1))
    with pytest.raises(CheckpointError) as found:
        engine.load_checkpoint(folder)
    _, client = engine.load_checkpoint(folder, load_optimizer_states=False)
    return str(found.value), engine.global_steps, client["epoch"]


def test_other_optimizers_are_refused_and_their_weights_imported(tmp_path, theirs):
    _write(tmp_path / "ds", theirs, 2, 2, client={"epoch": 4})
    for r in range(2):
        file = tmp_path / "ds" / TAG / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt"
        _change(
            file,
            lambda s: [g.pop("amsgrad") for g in s["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]],
        )
    _refused(tmp_path, "is not Adam or AdamW, whose states alone are imported; .* --no-optimizer")
    assert main(["ckpt", "import", str(tmp_path / "ds"), str(tmp_path / "new"), "--no-optimizer"]) == 0
    with CheckpointReader(tmp_path / "new") as reader:
        assert not any(n.startswith("exp_avg") for n in reader.tensors) and "fp32/tok.weight" in reader.tensors
    said, steps, epoch = run_ranks(_load_weights, 1, args=(str(tmp_path / "new"),))[0]
    assert "pass load_optimizer_states=False" in said and (steps, epoch) == (STEPS + 1, 4)


def test_stage_0_says_where_names_can_not_be_told(tmp_path, theirs):
    _write(tmp_path / "ds", theirs, 0, 1)
    file = tmp_path / "ds" / TAG / "mp_rank_00_model_states.pt"
    _change(file, lambda s: s["module"].update({"more.weight": torch.zeros(5, 5)}))  # frozen, of a trained one's shape
    _refused(tmp_path, "has no names for the optimizer's states, and which are those of 'm.*weight'")


def test_an_optimizer_that_began_later_is_no_other_save(tmp_path, theirs):
    """As after load_checkpoint(load_optimizer_states=False): updates differ, and the weights are the masters."""
    _write(tmp_path / "ds", theirs, 2, 2)
    _change(tmp_path / "ds" / TAG / "mp_rank_00_model_states.pt", lambda s: s.update(global_steps=9))
    assert import_checkpoint(tmp_path / "ds", tmp_path / "new").step == STEPS


def test_a_write_that_fails_leaves_nothing(tmp_path, theirs, monkeypatch):
    _write(tmp_path / "ds", theirs, 2, 2)

    def fails(self, *args, **keywords):
        raise CheckpointError("no space")

    monkeypatch.setattr(importing.CheckpointWriter, "publish", fails)
    _refused(tmp_path, "no space")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is there already"):
        import_checkpoint(tmp_path / "ds", tmp_path / "ds")
    assert sorted(p.name for p in (tmp_path / "ds").iterdir()) == [TAG, "latest"]


def test_copies_that_nodes_import_are_one_save(tmp_path, theirs, monkeypatch):
    paths, publish = [], importing.CheckpointWriter.publish
    monkeypatch.setattr(
        importing.CheckpointWriter, "publish", lambda w, *args: (paths.append(Path(w.path).name), publish(w, *args))[1]
    )
    _write(tmp_path / "ds", theirs, 2, 2)
    shutil.copytree(tmp_path / "ds", tmp_path / "copy")
    file = tmp_path / "copy" / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def token(source: str, to: str, **options) -> str:
        import_checkpoint(tmp_path / source, tmp_path / to, **options)
        with CheckpointReader(tmp_path / to) as reader:
            return reader.token

    first = token("ds", "a")
    assert first == token("copy", "b") != token("ds", "c", optimizer=False)
    _change(file, lambda saved: saved["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].add_(1.0))
    assert token("copy", "d") != first
    assert len(set(paths)) == 4  # of imports at the same time none writes into another's files


def test_the_command_and_its_folders(tmp_path, theirs, capsys):
    best = np.float64(1.5)
    _write(tmp_path / "ds", theirs, 2, 2, client={"seen": {1}, "best": best, "all": np.arange(3)})
    assert main(["ckpt", "import", str(tmp_path / "ds" / TAG), str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "3 trained parameters (65 elements) of DeepSpeed's ZeRO stage 2, 2 ranks" in said
    assert "exp_avg, exp_avg_sq, after 2 updates" in said and "left out: client_state['seen'] is a builtins.set" in said
    assert main(["ckpt", "info", str(tmp_path / "new")]) == 0
    with CheckpointReader(tmp_path / "new") as reader:
        client = reader.client_state()["client"]
    assert client["best"] == best and type(client["best"]) is np.float64 and client["all"].tolist() == [0, 1, 2]
    assert main(["ckpt", "import", str(tmp_path / "ds"), str(tmp_path / "other"), "--tag", "none"]) == 2
    assert "It has: global_step2" in capsys.readouterr().err
    assert main(["ckpt", "import", str(tmp_path / "new"), str(tmp_path / "other")]) == 2
    assert "holds no checkpoint of DeepSpeed's" in capsys.readouterr().err
    assert main(["ckpt", "ls", str(tmp_path / "ds")]) == 2
    assert f"deepc ckpt import {tmp_path / 'ds'} NEW_FOLDER" in capsys.readouterr().err


def _load(rank: int, world: int, folder: str) -> list[str]:
    import deepc

    engine, _, _, _ = deepc.initialize(model=Model(), config=tiny.config(2, micro=1))
    said = []
    for tag in (None, TAG):
        try:
            engine.load_checkpoint(folder, tag)
        except CheckpointError as exc:
            said.append(str(exc))
    os.remove(os.path.join(folder, "latest"))
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as exc:
        said.append(str(exc))
    return said


def test_load_checkpoint_names_the_command(tmp_path, theirs):
    _write(tmp_path / "ds", theirs, 2, 2)
    said = run_ranks(_load, 1, args=(str(tmp_path / "ds"),))[0]
    assert len(said) == 3 and all(re.search(r"`deepc ckpt import \S+ NEW_FOLDER`", s) for s in said), said


# ---- DeepSpeed itself ------------------------------------------------------------------------------------------------
CASES = [(0, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16")]
MICRO, GAS, MORE, PEAK = 2, 2, 4, 3e-3


def _gpt_config(stage: int, precision: str, world: int, own: dict) -> dict:
    return tiny.config(
        stage,
        micro=MICRO,
        gas=2 * GAS // world,
        precision=precision,
        optimizer={"type": "AdamW", "params": {"lr": PEAK, "betas": [0.9, 0.95], "weight_decay": 0.1, **own}},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_max_lr": PEAK, "warmup_num_steps": 8, "warmup_type": "linear"},
        },
    )


def _gpt(stage: int) -> tuple[nn.Module, list[dict]]:
    model = tiny.make_model(frozen=True, unused=True)
    model.register_buffer("scale", torch.tensor([0.5]))
    model.odd = nn.Parameter(torch.ones(7))  # of a size that 2 ranks pad
    if stage == 0:  # where DeepSpeed's files have no names, one group of all tells them
        return model, list(model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2]}]
    groups[1]["weight_decay"] = 0.0
    return model, groups


def _train(engine, rank: int, world: int, begin: int, steps: int) -> list[float]:
    """Losses of the steps, of the whole batch."""
    import torch.distributed as dist

    losses = []
    for step in range(begin, begin + steps):
        x, y = tiny.make_batch(step, 2 * GAS * MICRO)
        total = torch.zeros(1)
        for m in range(2 * GAS // world):
            at = (m * world + rank) * MICRO
            loss = engine(x[at : at + MICRO], y[at : at + MICRO])
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / (2 * GAS))
    return losses


def _deepspeeds(rank: int, world: int, folder: str) -> dict:
    """By case: (states by name when it was saved, losses after that, fp32 weights at the end)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled here
    out = {}
    for stage, precision in CASES:
        model, groups = _gpt(stage)
        config = _gpt_config(stage, precision, world, {"torch_adam": True})
        if (stage, precision) == (3, "bf16"):
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 3000}
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=groups, config=config, dist_init_required=False
        )
        _train(engine, rank, world, 0, MORE)
        saved, info = os.path.join(folder, f"{stage}-{precision}"), {"universal_checkpoint_version": 0.2}
        engine.save_checkpoint(saved, client_state={"epoch": 3, "universal_checkpoint_info": info})
        if stage and rank == 0:
            from deepspeed.checkpoint import ds_to_universal

            tag = f"global_step{MORE}"
            options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
            made = os.path.join(folder, f"universal-{stage}-{precision}", tag)
            ds_to_universal.main(
                types.SimpleNamespace(
                    input_folder=os.path.join(saved, tag), output_folder=made, inject_missing_state=False, **options
                )
            )
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]

        def full(p, kind, stage=stage):
            if stage == 0:
                return p.detach().clone() if kind == "fp32" else engine.optimizer.state[p][kind].clone()
            return safe_get_full_fp32_param(p) if kind == "fp32" else safe_get_full_optimizer_state(p, kind)

        kinds = ("fp32",) if stage in (1, 2) else ("fp32", "exp_avg", "exp_avg_sq")  # it does not always find these
        states = {f"{k}/{n}": full(p, k).float().clone().view(-1) for n, p in trained for k in kinds}
        losses = _train(engine, rank, world, MORE, MORE)
        out[stage, precision] = states, losses, {n: full(p, "fp32").clone().view(-1) for n, p in trained}
        engine.destroy()
    return out


def _goes_on(rank: int, world: int, folder: str, cases: list) -> dict:
    import deepc

    out = {}
    for (stage, precision), to_stage in cases:
        model, groups = _gpt(stage)
        engine, _, _, _ = deepc.initialize(
            model=model, model_parameters=groups, config=_gpt_config(to_stage, precision, world, {})
        )
        _, client = engine.load_checkpoint(os.path.join(folder, f"new-{stage}-{precision}"))
        losses = _train(engine, rank, world, MORE, MORE)
        weights = {n: engine.full_fp32_param(p).clone() for n, p in model.named_parameters() if p.requires_grad}
        out[stage, precision] = client, engine.global_steps, losses, weights
    return out


def _are_those_of(reader: CheckpointReader, universal: Path, to: Path) -> None:
    """What DeepSpeed's ds_to_universal.py made of it imports as the same checkpoint."""
    import_checkpoint(universal, to)
    with CheckpointReader(to) as other:
        assert set(other.tensors) == set(reader.tensors)
        for name in reader.tensors:
            assert torch.equal(other.tensor(name), reader.tensor(name)), name
        assert other.client_state() == reader.client_state()


@pytest.mark.full
def test_training_goes_on_as_in_deepspeed(tmp_path):
    """DeepSpeed, 2 ranks: 4 steps, a checkpoint, 4 more. deepc, 1 rank, another stage: loads it, 4 more."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    theirs = run_ranks(
        _deepspeeds, 2, args=(str(tmp_path),), backend="gloo", fresh=True, env={"DS_ACCELERATOR": "cpu"}, limit_s=600
    )[0]
    for case in CASES:
        name = "-".join(map(str, case))
        import_checkpoint(tmp_path / name, tmp_path / f"new-{name}")
        with CheckpointReader(tmp_path / f"new-{name}") as reader:
            for full, value in theirs[case][0].items():
                assert torch.equal(reader.tensor(full).view(-1), value), (case, full)
            if case[0]:
                _are_those_of(reader, tmp_path / f"universal-{name}", tmp_path / f"also-{name}")
    ours = run_ranks(_goes_on, 1, args=(str(tmp_path), list(zip(CASES, (3, 3, 2, 2, 0)))), limit_s=600)[0]
    for case in CASES:
        client, steps, losses, weights = ours[case]
        assert client == {"epoch": 3} and steps == 2 * MORE
        worst = max(abs(a - b) for a, b in zip(losses, theirs[case][1], strict=True))
        apart = max((w.view(-1) - theirs[case][2][n]).abs().max().item() for n, w in weights.items())
        print(f"{case}: largest difference of {MORE} losses {worst:.2e}, of weights {apart:.2e}")
        if case[1] == "fp32":
            assert worst < 5e-6 and apart < 1e-4, case
        else:
            assert worst < 2e-2 and apart < 1e-3, case
