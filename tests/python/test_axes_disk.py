"""Tensor parallelism and spread experts with parameters, states and gradients on disk: the bits of the same layout in
memory, checkpoints of either go on in the other, and a disk that fails on one rank is an error on all."""

from __future__ import annotations

import itertools
import math

import pytest
import test_moe_axes as moe
import torch
from failing_disk import FailingDisk
from plainly import batch_loss, in_stages
from ranks import run_quietly as run_ranks
from test_axes_matrix import RULES, Own

FULL = pytest.mark.full
LIMITS = {
    "stage3_param_persistence_threshold": 20,
    "stage3_prefetch_bucket_size": 400,
    "stage3_max_live_parameters": 1200,
    "sub_group_size": 500,
}
MICRO, SAMPLES, STEPS = 2, 2, 3
BF16 = {"bf16": {"enabled": True}}


def on_disk(folder, states=True):
    """states: and optimizer states, and so gradients."""
    place = {"device": "nvme", "nvme_path": str(folder)}
    return {"offload_param": place, **({"offload_optimizer": place} if states else {})}


def optimizer(kind, form=None):
    return {"optimizer": {"type": kind, "params": {"lr": 1e-2, **({"state_dtype": form} if form else {})}}}


class Frozen(Own):
    """Its head is not trained, and no rule cuts it."""

    def __init__(self, heads):
        super().__init__(heads)
        self.head.weight.requires_grad_(False)


def tensors(rank, mesh, config, kind=Own):
    """(engine, its data) of a model whose tensors are cut."""
    import deepc

    def draw():
        source = torch.Generator().manual_seed(5)
        while True:
            ids = torch.randint(0, 61, (MICRO * SAMPLES * mesh.dp, 9), generator=source)
            for part in ids.chunk(mesh.dp)[mesh.coordinates(rank).dp].chunk(MICRO):
                yield {"input_ids": part, "labels": part}

    torch.manual_seed(1)
    rules = {"partition_config": {"use_default_specs": False, "layer_specs": RULES}}
    engine = deepc.initialize(
        model=kind(8),
        sample_batch=next(draw()) if mesh.pp > 1 else None,
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": MICRO,
            "gradient_clipping": 0.5,
            "tensor_parallel": {"autotp_size": mesh.tp, **rules},
            **in_stages(mesh.pp),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},
            **config,
        },
    )[0]
    return engine, draw()


def experts(rank, mesh, config, kind=None):
    """The same with experts spread over ranks, some of whose tokens find no place."""
    import deepc

    def draw():
        yield from moe.samples(mesh.coordinates(rank).dp, mesh.dp)

    engine = deepc.initialize(
        model=moe.model_of(rank, mesh, moe.CUT if mesh.tp > 1 else moe.FEW_PLACES, None),
        sample_batch=next(draw()) if mesh.pp > 1 else None,
        config={
            "train_micro_batch_size_per_gpu": moe.SAMPLES,
            "gradient_accumulation_steps": moe.MICRO // mesh.dp,
            "gradient_clipping": 0.5,
            **({"tensor_parallel": {"autotp_size": mesh.tp}} if mesh.tp > 1 else {}),
            **in_stages(mesh.pp),
            "optimizer": moe.ADAMW,
            **config,
        },
    )[0]
    return engine, draw()


def step(engine, data):
    """The loss and the norm of a step."""

    def loss():
        batch = next(data)
        return engine(**batch) if isinstance(batch, dict) else engine(*(t.to(engine.dtype) for t in batch))

    mean = batch_loss(engine, engine.gradient_accumulation_steps(), loss, data, engine.everyone)
    return mean, engine.get_global_grad_norm()


def evaluated(engine, data):
    if engine.part is not None:
        return float(engine.eval_batch(data))
    batch = next(data)
    with torch.no_grad():
        return float(engine(**batch) if isinstance(batch, dict) else engine(*(t.to(engine.dtype) for t in batch)))


def _trained(rank, world, make, sizes, config, places, folder, kind):
    """[(losses, norms and an evaluation, whole weights)], a training for each place. folder: the first one saves there
    behind a step, and each one goes on from that in the end."""
    from deepc.plan.mesh import Mesh

    mesh, runs = Mesh.of(sizes), []
    for number, place in enumerate(places):
        zero = {"zero_optimization": {"stage": 3, **LIMITS, **place}}
        engine, data = make(rank, mesh, {**config, **zero}, kind)
        streamed = "offload_param" in place
        assert bool(engine.plan.parameters_on) == streamed
        assert (engine.plan.mode == "streamed") == streamed
        few = config.get("optimizer", {}).get("type") == "Adafactor"  # states, which lie in memory: masters alone move
        has_states = not few or "bf16" in config
        assert (engine.plan.disk is not None) == ("offload_optimizer" in place and has_states)
        assert bool(engine.plan.gradients_on) == (streamed and "offload_optimizer" in place)
        told = [step(engine, data)]
        if folder:
            engine.save_checkpoint(f"{folder}/{number}")
        told += [step(engine, data) for _ in range(STEPS - 1)]
        told.append(evaluated(engine, data))
        weights = {n: t.clone() for n, t in engine.module_state_dict().items()}
        engine.destroy()
        runs.append((told, weights))
    if folder:
        for place, of in zip(places, reversed(range(len(places)))):  # of memory on disk, and the other way round
            zero = {"zero_optimization": {"stage": 3, **LIMITS, **place}}
            engine, data = make(rank, mesh, {**config, **zero}, kind)
            engine.load_checkpoint(f"{folder}/{of}")
            step_of = engine.gradient_accumulation_steps()
            for _ in range(step_of):
                next(data)
            told = [runs[0][0][0], *(step(engine, data) for _ in range(STEPS - 1)), evaluated(engine, data)]
            runs.append((told, {n: t.clone() for n, t in engine.module_state_dict().items()}))
            engine.destroy()
    return runs


def same_bits(ranks, told=True):
    """All runs of each rank."""
    for first, *others in ranks:
        assert len({str(x) for x in first[0]}) == len(first[0]) and all(
            map(math.isfinite, itertools.chain(*first[0][:-1]))
        )
        for run in others:
            assert run[0] == first[0]
            assert run[1].keys() == first[1].keys()
            for name, value in first[1].items():
                assert torch.equal(run[1][name], value), name


@pytest.mark.parametrize(
    ("make", "sizes", "config", "kind"),
    [
        (tensors, {"tp": 2}, {}, Frozen),
        pytest.param(tensors, {"tp": 2}, BF16, Own, marks=FULL),
        pytest.param(tensors, {"dp": 2, "tp": 2}, {}, Own, marks=FULL),
        pytest.param(tensors, {"dp": 2, "tp": 2}, BF16, Frozen, marks=FULL),
        pytest.param(tensors, {"pp": 2, "tp": 2}, {}, Own, marks=FULL),
        pytest.param(tensors, {"pp": 2, "dp": 2, "tp": 2}, BF16, Own, marks=FULL),
        (tensors, {"tp": 2}, optimizer("Muon", "int8"), Own),
        pytest.param(tensors, {"tp": 2}, optimizer("Lamb"), Frozen, marks=FULL),
        pytest.param(tensors, {"tp": 2}, optimizer("Adafactor"), Own, marks=FULL),
        pytest.param(tensors, {"dp": 2, "tp": 2}, optimizer("Muon"), Frozen, marks=FULL),
        pytest.param(tensors, {"dp": 2, "tp": 2}, optimizer("Lamb", "int4"), Own, marks=FULL),
        pytest.param(tensors, {"dp": 2, "tp": 2}, {**optimizer("Adafactor"), **BF16}, Own, marks=FULL),
        pytest.param(tensors, {"pp": 2, "tp": 2}, optimizer("Muon"), Own, marks=FULL),
        pytest.param(tensors, {"pp": 2, "tp": 2}, optimizer("Lamb"), Own, marks=FULL),
        pytest.param(tensors, {"pp": 2, "tp": 2}, optimizer("Adafactor"), Own, marks=FULL),
        (experts, {"dp": 2, "ep": 2}, {}, None),
        pytest.param(experts, {"dp": 4, "ep": 2}, BF16, None, marks=FULL),
        pytest.param(experts, {"dp": 2, "ep": 2}, optimizer("Muon"), None, marks=FULL),
        pytest.param(experts, {"dp": 2, "ep": 2}, optimizer("Lamb"), None, marks=FULL),
        pytest.param(experts, {"dp": 4, "ep": 2}, optimizer("Adafactor"), None, marks=FULL),
        pytest.param(experts, {"pp": 2, "dp": 2, "ep": 2}, {}, None, marks=FULL),
        pytest.param(experts, {"dp": 2, "tp": 2, "ep": 2}, {}, None, marks=FULL),
    ],
    ids=lambda v: "x".join(f"{a}{n}" for a, n in v.items()) if isinstance(v, dict) and "optimizer" not in v else None,
)
def test_the_bits_of_memory_and_checkpoints_of_either(make, sizes, config, kind, tmp_path):
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    places = [{}, on_disk(disk)]
    if config or moe.ranks_of(sizes) > 2:  # the others are to be quick
        places.insert(1, on_disk(disk, False))
    same_bits(run_ranks(_trained, moe.ranks_of(sizes), make, sizes, config, places, str(saved), kind))
    assert list(disk.iterdir()) == []


@FULL
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_alone_of_spread_experts(stage, tmp_path):
    disk, saved = tmp_path / "disk", str(tmp_path / "saved")
    disk.mkdir()
    states = on_disk(disk)["offload_optimizer"]
    places = [{"stage": stage}, {"stage": stage, "offload_optimizer": states}]
    same_bits(run_ranks(_trained, 4, experts, {"dp": 4, "ep": 2}, {}, places, saved, None))


# ---- another layout --------------------------------------------------------------------------------------------------
def _saves(rank, world, make, sizes, folder, disk):
    """(what the step behind a checkpoint told, and the weights then)"""
    from deepc.plan.mesh import Mesh

    zero = {"zero_optimization": {"stage": 3, **LIMITS, **on_disk(disk)}}
    engine, data = make(rank, Mesh.of(sizes), zero)
    step(engine, data)
    engine.save_checkpoint(folder)
    told = step(engine, data)
    engine.destroy()
    return told


def _resumes(rank, world, make, sizes, folder, place):
    from deepc.plan.mesh import Mesh

    engine, data = make(rank, Mesh.of(sizes), {"zero_optimization": {"stage": 3, **LIMITS, **place}})
    engine.load_checkpoint(folder)
    for _ in range(engine.gradient_accumulation_steps()):
        next(data)
    told = step(engine, data)
    engine.destroy()
    return told


@FULL
@pytest.mark.parametrize(
    ("make", "sizes", "other"),
    [
        (tensors, {"tp": 2}, {}),
        (tensors, {"tp": 2}, {"tp": 4}),
        (experts, {"dp": 2, "ep": 2}, {"dp": 2}),
        (experts, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}),
    ],
)
def test_a_checkpoint_of_the_disk_goes_on_in_another_layout(make, sizes, other, tmp_path):
    disk, saved = tmp_path / "disk", str(tmp_path / "saved")
    disk.mkdir()
    want = run_ranks(_saves, moe.ranks_of(sizes), make, sizes, saved, str(disk))[0]
    for place in ({}, on_disk(disk)):
        for told in run_ranks(_resumes, moe.ranks_of(other), make, other, saved, place):
            assert told == pytest.approx(want, rel=1e-5)


# ---- a disk that fails -----------------------------------------------------------------------------------------------
def _failing(rank, world, make, sizes, config, inside, folder):
    """A transfer of a rank fails once in the judgement of a step, then in an update, then `inside` of a forward or
    backward."""
    from deepc.errors import DeepcError
    from deepc.plan.mesh import Mesh

    mesh, said, losses = Mesh.of(sizes), [], []
    zero = {"zero_optimization": {"stage": 3, **LIMITS, **on_disk(folder)}}
    with FailingDisk() as disk:
        engine, data = make(rank, mesh, {**config, **zero})
        losses.append(step(engine, data))
        for name, owner, culprit in (("squares_of", engine.state, 1), ("update", engine.optimizer, world - 1)):
            setattr(owner, name, disk.around(getattr(owner, name), rank == culprit))
            try:
                step(engine, data)
            except DeepcError as exc:
                said.append((name, type(exc).__name__, str(exc)))
            finally:
                delattr(owner, name)
            engine.step()
            losses.append(step(engine, data))
        weights = {n: t.clone() for n, t in engine.module_state_dict().items()}
        torch.distributed.barrier()  # who breaks a pass off breaks all groups, also for who still gathers weights
        batch = next(data)
        call = engine if isinstance(batch, tuple) else lambda *_: engine(**batch)
        try:
            loss = disk.around(call, rank == culprit)(*batch) if inside == "forward" else call(*batch)
            disk.around(engine.backward, rank == culprit)(loss)
        except DeepcError as exc:
            said.append((inside, type(exc).__name__, str(exc)))
    return losses, weights, said


def _asked(rank, world, make, sizes, folder):
    """What a rank was told by each thing that it asked for while a transfer of the last rank failed once, and whether
    that came right when it was asked for again."""
    import deepc
    from deepc.errors import DeepcError, DiskFullError
    from deepc.offload import array, stream
    from deepc.plan.mesh import Mesh

    zero = {"zero_optimization": {"stage": 3, **LIMITS, **on_disk(folder)}}
    engine, data = make(rank, Mesh.of(sizes), zero)
    step(engine, data)
    wholes, failing, said = (array.DiskArray._finish, stream.Stream._window), False, {}

    def moving(whole):
        def moved(*args):
            nonlocal failing
            whole(*args)
            if failing:
                failing = False
                raise DiskFullError("[made by the test]")

        return moved

    def asked(name, call):
        nonlocal failing
        failing = rank == world - 1
        try:
            said[name] = call()
        except DeepcError as exc:
            said[name] = f"{type(exc).__name__}: {exc}"
        finally:
            failing = False

    def passes():
        for micro in range(engine.gradient_accumulation_steps()):
            batch = next(data)
            if micro:
                engine.step()
            engine.backward(engine(**batch) if isinstance(batch, dict) else engine(*batch))

    def during(owner, method, call):
        """call(), where alone `method` of `owner` finds the disk failing."""
        nonlocal failing
        failing, inner = False, getattr(owner, method)

        def run():
            nonlocal failing
            failing = rank == world - 1
            try:
                return inner()
            finally:
                failing = False

        setattr(owner, method, run)
        try:
            return call()
        finally:
            delattr(owner, method)

    array.DiskArray._finish, stream.Stream._window = map(moving, wholes)
    try:
        asked("state_dict", engine.module_state_dict)
        first, second = engine.module_state_dict(), engine.module_state_dict()
        assert first and all(torch.equal(t, second[n]) for n, t in first.items())
        if cut := [p for p in engine.state.trained if id(p) in engine.cuts and engine.part is None]:
            view = deepc.view(cut[0])
            value, moment = view.fp32, view.state["exp_avg"]
            for name in ("value", "fp32", "grad"):
                if name == "grad":
                    passes()
                asked(name, lambda name=name: getattr(view, name))
                assert getattr(view, name).shape == value.shape
            asked("exp_avg", lambda: view.state["exp_avg"])
            assert torch.equal(view.state["exp_avg"], moment)
            asked("fp32=", lambda: setattr(view, "fp32", value + 1))
            view.fp32 = value
            assert torch.equal(view.fp32, value) and torch.equal(view.value, value.to(engine.dtype))
            engine.step()
        if engine.part is None:
            passes()
            engine.hooks.norm_ready = False  # as if somebody had set a gradient
            asked("norm", lambda: during(engine.state, "remake_norm", engine.step))
            assert engine.step().applied
            passes()
            p = engine.state.trained[0]
            deepc.view(p).grad = torch.full_like(deepc.view(p).fp32, math.nan)
            result = during(engine.state, "first_bad_gradient", engine.step)
            assert not result.applied, result
            if sizes != {"dp": world}:  # else the other rank may know, and tells
                assert ("unknown" in result.reason) == (rank == world - 1), result
        step(engine, data)
    finally:
        array.DiskArray._finish, stream.Stream._window = wholes
    engine.destroy()
    return said


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (tensors, {"tp": 2}),
        pytest.param(tensors, {"dp": 2}, marks=FULL),
        pytest.param(tensors, {"pp": 2, "tp": 2}, marks=FULL),
        pytest.param(experts, {"dp": 2, "ep": 2}, marks=FULL),
    ],
)
def test_what_is_asked_for_together_fails_together(make, sizes, tmp_path):
    ranks = run_ranks(_asked, moe.ranks_of(sizes), make, sizes, str(tmp_path))
    names = ["state_dict"]
    if "pp" not in sizes:
        names += [*(["value", "fp32", "grad", "exp_avg", "fp32="] if "tp" in sizes else []), "norm"]
    for said in ranks:
        assert list(said) == names
        for name, told in said.items():
            assert isinstance(told, str) and "DiskFullError" in told and "[made by the test]" in told, (name, told)


def _undisturbed(rank, world, make, sizes, config):
    from deepc.plan.mesh import Mesh

    engine, data = make(rank, Mesh.of(sizes), {**config, "zero_optimization": {"stage": 3, **LIMITS}})
    losses = [step(engine, data) for _ in range(5)]
    weights = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(
    ("make", "sizes", "config", "inside"),
    [
        (tensors, {"tp": 2}, {}, "forward"),
        pytest.param(tensors, {"dp": 2, "tp": 2}, {}, "backward", marks=FULL),
        (tensors, {"tp": 2}, optimizer("Lamb", "int8"), "backward"),
        *(
            pytest.param(tensors, {"dp": dp, "tp": 2}, optimizer(kind), "backward", marks=FULL)
            for dp in (1, 2)
            for kind in ("Lamb", "Muon", "Adafactor")
        ),
        pytest.param(experts, {"dp": 2, "ep": 2}, {}, "backward", marks=FULL),
        pytest.param(experts, {"dp": 4, "ep": 2}, {}, "forward", marks=FULL),
    ],
)
def test_a_transfer_that_fails_on_one_rank_is_an_error_on_all(make, sizes, config, inside, tmp_path):
    """A step goes on where it was, with the weights of one that no disk has broken off."""
    world = moe.ranks_of(sizes)
    plain = run_ranks(_undisturbed, world, make, sizes, config)
    ranks = run_ranks(_failing, world, make, sizes, config, inside, str(tmp_path))
    for rank, ((losses, weights, said), (wanted, values)) in enumerate(zip(ranks, plain)):
        assert [name for name, *_ in said] == ["squares_of", "update", inside], said
        for (name, _, text), culprit in zip(said, (1, world - 1, world - 1)):
            assert text.count("[made by the test]") == 1, text
            # The culprit has its own words; inside of a pass another rank may be the first to break off.
            if name == "update" or (name != inside and rank != culprit):
                assert f"rank {culprit}: [made by the test]" in text, text
        assert all(kind == "DiskFullError" for _, kind, _ in said[:2]), said
        assert losses == [wanted[0], wanted[2], wanted[4]]
        for name, value in values.items():
            assert torch.equal(weights[name], value), name


# ---- to disk and back ------------------------------------------------------------------------------------------------
def _moved(rank, world, sizes, config, folder):
    from deepc.plan.mesh import Mesh

    mesh, runs = Mesh.of(sizes), []
    for moves in (False, True):
        engine, data = tensors(rank, mesh, {**config, "zero_optimization": {"stage": 2}})
        told = [step(engine, data)]
        if moves:
            engine.offload_states(folder)
            assert engine.plan.disk is not None
        told.append(step(engine, data))
        if moves:
            engine.reload_states()
        told += [step(engine, data), evaluated(engine, data)]
        runs.append((told, {n: t.clone() for n, t in engine.module_state_dict().items()}))
        engine.destroy()
    return runs


@FULL
@pytest.mark.parametrize("config", [optimizer("Muon", "bf16"), optimizer("Lamb"), {**optimizer("Adafactor"), **BF16}])
def test_states_of_cut_parameters_move_to_disk_and_back(config, tmp_path):
    same_bits(run_ranks(_moved, 4, {"dp": 2, "tp": 2}, config, str(tmp_path)))
