"""offload_param.device = "nvme": stage 3's parameters on disk. The same bits as in memory, whatever is done with them;
the model is never whole in memory; and what happens when the disk fails."""

from __future__ import annotations

import copy
import gc
import os

import pytest
import tiny
import torch
from ranks import for_this_job, on_nodes
from ranks import run_ranks as _run_ranks
from test_engine import same_bits
from test_streamed import LIMITS, NO_LIMITS, ODD, TINY, _odd_training, _tiny_training, same


def run_ranks(fn, world, *args, **kw):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **kw)


def on_disk(cfg: dict, folder, *, states: bool = False, **zero) -> dict:
    """The configuration with parameters on disk; states: and optimizer states, and so gradients."""
    cfg = copy.deepcopy(cfg)
    place = {"device": "nvme", "nvme_path": str(folder)}
    cfg["zero_optimization"].update({**zero, "offload_param": place})
    if states:
        cfg["zero_optimization"].update({"offload_optimizer": place, "sub_group_size": 5000})
    return cfg


# Their step of an element depends on more than the element: passes over cells, or windows (zero/step/across).
ACROSS = {
    "Lamb": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "Muon": {"type": "Muon", "params": {"lr": 2e-2, "ns_dtype": "float32"}},
    "Adafactor": {"type": "Adafactor", "params": {"lr": 1e-2, "weight_decay": 0.01}},
}


# ---- the same bits ---------------------------------------------------------------------------------------------------
def _on_two_nodes(rank, world, fn, *args):
    with on_nodes(rank, world, 2):
        return fn(rank, world, *args)


def _alone(rank, world, fn, *args):
    return fn(rank, world, *args)


def _against_memory(rank, world, train, cases, base, folder, zero):
    """In memory; parameters on disk; all on disk."""
    out = {}
    configs = (base, on_disk(base, folder, **zero), on_disk(base, folder, states=True, **zero))
    for name, case in cases.items():
        out[name] = [train(rank, world, cfg, case) for cfg in configs]
    return out


def check(ranks, folder, persistent=False):
    for by_name in ranks:
        for name, (memory, *disk) in by_name.items():
            for what, run in zip(("parameters", "all"), disk, strict=True):
                try:
                    same(memory, run)
                except AssertionError as exc:
                    raise AssertionError(f"{name}, {what} on disk: {exc}") from exc
                stats = run[3]
                assert stats["gathers"] > 0 and stats["live_elems"] == stats["persistent_elems"], (name, stats)
                assert (stats["persistent_elems"] > 0) == persistent
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "world, zero, kinds",
    [
        pytest.param(1, NO_LIMITS, list(TINY), marks=pytest.mark.full),
        (2, LIMITS, ["plain", "unused", "all-reentrant"]),
    ],
    ids=["1", "2-limits"],
)
def test_the_same_bits_as_in_memory(world, zero, kinds, tmp_path):
    base = tiny.config(3, micro=2, deepc={"bucket_elems": 8192})
    ranks = run_ranks(_against_memory, world, _tiny_training, {n: TINY[n] for n in kinds}, base, str(tmp_path), zero)
    check(ranks, tmp_path, persistent=zero is LIMITS)
    if zero is LIMITS:
        for _, (_, _, _, stats), _ in ranks[0].values():
            assert stats["live_elems_max"] <= zero["stage3_max_live_parameters"] and stats["prefetched"] > 0


@pytest.mark.parametrize(
    "world, precision, gas",
    [
        (1, "bf16", 1),
        pytest.param(2, "bf16", 2, marks=pytest.mark.full),
        pytest.param(1, "fp16", 2, marks=pytest.mark.full),
    ],
)
def test_16_bit_and_accumulation(world, precision, gas, tmp_path):
    base = tiny.config(3, micro=2, gas=gas, precision=precision, deepc={"bucket_elems": 8192})
    cases = {n: TINY[n] for n in ("plain", "all")}
    check(run_ranks(_against_memory, world, _tiny_training, cases, base, str(tmp_path), LIMITS), tmp_path, True)


@pytest.mark.parametrize(
    "kind, world, precision, gas",
    [
        ("Lamb", 1, "fp32", 1),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("Muon", 2, "bf16", 1),
                ("Adafactor", 2, "fp32", 1),
                ("Lamb", 2, "bf16", 2),
                ("Lamb", 2, "fp32", 1),
                ("Muon", 1, "fp32", 1),
                ("Muon", 2, "fp32", 2),
                ("Muon", 1, "fp16", 1),
                ("Adafactor", 1, "bf16", 2),
                ("Adafactor", 2, "bf16", 1),
            )
        ),
    ],
)
def test_optimizers_that_look_at_more_than_an_element(kind, world, precision, gas, tmp_path):
    base = tiny.config(3, micro=2, gas=gas, precision=precision, deepc={"bucket_elems": 8192})
    base["optimizer"] = ACROSS[kind]
    cases = {n: TINY[n] for n in ("tied+frozen", "unused")}
    check(run_ranks(_against_memory, world, _tiny_training, cases, base, str(tmp_path), LIMITS), tmp_path, True)


# ---- several nodes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "world, precision, gas, kind",
    [
        (2, "fp32", 1, ""),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                (4, "bf16", 2, ""),
                (4, "fp32", 2, ""),
                (4, "fp32", 1, "Lamb"),
                (4, "bf16", 1, "Muon"),
                (4, "bf16", 1, "Adafactor"),
            )
        ),
    ],
)
def test_several_nodes_have_the_bits_of_memory(world, precision, gas, kind, tmp_path):
    base = tiny.config(3, micro=2, gas=gas, precision=precision, deepc={"bucket_elems": 32768})
    base["optimizer"] = ACROSS.get(kind, base["optimizer"])
    cases = {"tied+frozen": TINY["tied+frozen"]}
    ranks = run_ranks(_on_two_nodes, world, _against_memory, _tiny_training, cases, base, str(tmp_path), LIMITS)
    check(ranks, tmp_path, True)


def _most_writes(rank, world, cfg):
    """The most gradients' writes that waited at a time, in each micro-batch; buckets."""
    import deepc
    from deepc.zero.streamed.nodes import DiskNodesReducer

    most, take = [0], DiskNodesReducer._take_oldest

    def taken(self):
        take(self)
        most[-1] = max(most[-1], len(self._writes))

    for_this_job(DiskNodesReducer, "_take_oldest", taken)
    engine = deepc.initialize(model=tiny.make_model(layers=8), config=cfg)[0]
    for micro in range(2):
        x, y = tiny.make_batch(micro, 2 * world)
        engine.backward(engine(x[2 * rank :][:2], y[2 * rank :][:2]))
        engine.step()
        most.append(0)
    buckets = engine.plan.layout.nbuckets
    engine.destroy()
    return most[:2], buckets


def test_few_sums_wait_in_memory_for_the_disk(tmp_path):
    """Also in a later micro-batch, whose sums are added to what was read back."""
    from deepc.plan.plan import RING

    cfg = on_disk(tiny.config(3, micro=2, gas=2, deepc={"bucket_elems": 8192}), tmp_path, states=True, **LIMITS)
    for most, buckets in run_ranks(_on_two_nodes, 2, _most_writes, cfg):
        assert buckets > 2 * RING and 0 < max(most) <= RING, (most, buckets)


def _crossed(rank, world, cfgs):
    """Bytes that this rank sends to the other node, with parameters in memory and on disk; different first values on
    each rank; the losses."""
    import deepc

    out = []
    for cfg in cfgs:
        engine = deepc.initialize(model=tiny.make_model(seed=rank, frozen=True), config=cfg)[0]
        losses, first = _steps(engine, 1, rank, world), engine.comm_bytes
        losses += _steps(engine, 2, rank, world, 1)
        sent = {k: v - first[k] for k, v in engine.comm_bytes.items() if k in ("gradients", "parameters")}
        mine = sum(s.length for s in engine.plan.slices) * engine.plan.dtype.itemsize
        out.append((losses, sent, mine))
        engine.destroy()
    return out


@pytest.mark.full
def test_a_shard_crosses_once_per_node_and_step(tmp_path):
    base = tiny.config(3, micro=2, precision="bf16", deepc={"bucket_elems": 32768})
    disk = on_disk(base, tmp_path, states=True, **LIMITS)
    for memory, found in run_ranks(_on_two_nodes, 4, _crossed, [base, disk]):
        assert memory == found and found[1]["parameters"] == 2 * found[2]


def test_an_optimizer_of_torchs_is_refused_before_anything_moves(tmp_path):
    import deepc
    from deepc.errors import UnsupportedError

    model, want = tiny.make_model(), tiny.make_model().state_dict()
    cfg = on_disk(tiny.config(3, micro=2), tmp_path)
    with pytest.raises(UnsupportedError, match="offload_param.device = nvme with SGD"):
        deepc.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=cfg)
    same_bits(model.state_dict(), want)


def _other_gradients(rank, world, cfgs, folder):
    import deepc
    from deepc.errors import UnsupportedError

    out = {}
    for name, cfg in cfgs.items():
        disk = on_disk(cfg, folder, **LIMITS)
        out[name] = [_tiny_training(rank, world, c, TINY["plain"]) for c in (cfg, disk)]
        with pytest.raises(UnsupportedError, match="on NVMe does not exist"):
            deepc.initialize(model=tiny.make_model(), config=on_disk(cfg, folder, states=True))
    return out


def test_gradients_of_other_kinds_stay_in_memory(tmp_path):
    tree = tiny.config(3, micro=2, gas=2, deepc={"bucket_elems": 8192, "deterministic": "layout"})
    short = tiny.config(3, micro=2, gas=2, data_types={"grad_accum_dtype": "bf16"})
    for by_name in run_ranks(_other_gradients, 1, {"tree": tree, "bf16": short}, str(tmp_path)):
        for memory, disk in by_name.values():
            same(memory, disk)


@pytest.mark.full
def test_parameters_in_odd_places(tmp_path):
    base = tiny.config(3, micro=4, deepc={"bucket_elems": 8192})
    ranks = run_ranks(_against_memory, 2, _odd_training, {k: k for k in ODD}, base, str(tmp_path), NO_LIMITS)
    check(ranks, tmp_path)


def _bounced(rank, world, cfg):
    import deepc
    from deepc.core import memory

    engine = deepc.initialize(model=tiny.make_model(width=256, layers=3), config=cfg)[0]
    _steps(engine, 1, rank, world)
    before = deepc.counters()
    _steps(engine, 1, rank, world, 1)
    after = deepc.counters()
    engine.destroy()
    return memory.heap_kept(), {k: after[k] - before[k] for k in ("disk_bytes_read", "disk_bytes_bounced")}


def test_values_come_to_their_place_without_a_copy(tmp_path):
    cfg = on_disk(tiny.config(3, micro=2, deepc={"bucket_elems": 1 << 18}), tmp_path, **NO_LIMITS)
    cfg["zero_optimization"]["stage3_param_persistence_threshold"] = 5000
    kept, moved = run_ranks(_bounced, 1, cfg)[0]
    assert moved["disk_bytes_read"] > 1 << 23
    assert not kept or moved["disk_bytes_bounced"] <= 1 << 16, "but for the odd bytes of small ones"


def test_units_begin_in_memory_as_on_the_disk():
    from deepc.zero.parameters.param import _offsets

    assert _offsets([10, 5000, 3000], None, 1024) == ([0, 64, 5120], 5120 + 3008)
    assert _offsets([10, 5000, 3000], [7, 1000, 6056], 1024) == ([0, 1000, 6056], 6056 + 3008)
    assert _offsets([5000, 5000], [100, 9000], 1024) == ([100, 5928], 5928 + 5056)


def test_a_gather_that_can_not_begin_leaves_no_read_under_way(tmp_path, monkeypatch):
    """The unit's memory is freed then, and its other reads would write into what is no longer theirs."""
    from deepc.errors import DiskError
    from deepc.offload.array import DiskArray
    from deepc.zero.parameters.param import FlatUnit
    from deepc.zero.streamed.disk import DiskSource

    params = [torch.nn.Parameter(torch.empty(4096)) for _ in range(2)]
    array = DiskArray(str(tmp_path), 4 * 4096, torch.float32, "the parameters")
    array.put(0, torch.arange(4 * 4096))
    at = {id(params[0]): 0, id(params[1]): 2 * 4096}
    source = DiskSource(array, lambda p: at[id(p)], lambda: "")
    like = torch.empty(0)
    unit = FlatUnit(0, "u", params, [p.shape for p in params], like, frozenset(), False, source.places(params))
    source.add(unit, [[], []])
    begun, real = [], array.read_async

    def second_fails(begin, out):
        if len(begun) == 1:
            raise DiskError("no memory for a request")
        begun.append(real(begin, out))
        return begun[-1]

    monkeypatch.setattr(array, "read_async", second_fails)
    with pytest.raises(DiskError, match="no memory"):
        source.begin([unit])
    assert begun[0]._handle._io is None, "it is over, and not under way"
    monkeypatch.undo()
    source.begin([unit])
    source.complete(unit)
    for p, o in zip(params, unit.offsets, strict=True):
        assert torch.equal(unit.flat[o : o + 4096], torch.arange(4 * 4096.0)[at[id(p)] :][:4096])
    source.close()
    array.close()


# ---- what is done with parameters between steps ----------------------------------------------------------------------
def _steps(engine, steps, rank, world, start=0):
    losses = []
    for step in range(start, start + steps):
        x, y = tiny.make_batch(step, 2 * world)
        loss = engine(x[2 * rank :][:2], y[2 * rank :][:2])
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    return losses


def _everything(rank, world, cfg, out):
    """Access, writes, freezing, evaluation, checkpoints: what came of it."""
    import deepc
    from deepc.zero import GatheredParameters

    torch.manual_seed(0)
    engine = deepc.initialize(model=tiny.make_model(frozen=True, layers=3), config=cfg)[0]
    found: dict = {"losses": _steps(engine, 2, rank, world)}
    p = engine.module.blocks[1].up.weight
    found["fp32"], found["moments"] = deepc.view(p).fp32, {n: t.clone() for n, t in deepc.view(p).state.items()}
    with GatheredParameters([p], modifier_rank=0):
        if rank == 0:
            with torch.no_grad():
                p.mul_(1.5)
    deepc.view(engine.module.ln.weight).fp32 = torch.full((32,), 0.75)
    frozen = engine.module.pos.weight
    with GatheredParameters([frozen], modifier_rank=0):
        if rank == 0:
            with torch.no_grad():
                frozen.add_(0.25)
    with torch.no_grad():
        x, y = tiny.make_batch(99, 2 * world)
        found["evaluation"] = engine(x[:2], y[:2]).item()
        with engine.keep_gathered():
            found["kept"] = [engine(x[:2], y[:2]).item() for _ in range(3)]
    average = deepc.EMA(engine, 0.5)
    found["losses"] += _steps(engine, 1, rank, world, 7)
    with average.applied(), torch.no_grad():
        found["averaged"] = engine(x[:2], y[:2]).item()
    found["average"] = average.value(p)
    average.close() if hasattr(average, "close") else None
    engine.module.blocks[0].down.weight.requires_grad_(False)
    found["losses"] += _steps(engine, 2, rank, world, 2)
    engine.module.blocks[0].down.weight.requires_grad_(True)
    engine.save_checkpoint(out, "a")
    found["state"] = {n: t.clone() for n, t in engine.module_state_dict().items()}
    found["after"] = _steps(engine, 1, rank, world, 4)
    engine.load_checkpoint(out, "a")
    found["again"] = _steps(engine, 1, rank, world, 4)
    state = {n: t + 0.125 for n, t in found["state"].items()}
    engine.load_module_state_dict(state)
    found["loaded"] = {n: t.clone() for n, t in engine.module_state_dict().items()}
    found["last"] = _steps(engine, 1, rank, world, 5)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    "world, precision, kind",
    [
        (2, "bf16", ""),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                (4, "bf16", ""),
                (4, "fp32", "Lamb"),
                (1, "fp32", ""),
                (1, "bf16", "Lamb"),
                (2, "fp32", "Lamb"),
                (2, "fp32", "Muon"),
                (1, "bf16", "Muon"),
                (2, "bf16", "Adafactor"),
                (1, "fp32", "Adafactor"),
            )
        ),
    ],
)
def test_access_writes_freezing_and_checkpoints(world, precision, kind, tmp_path):
    base = tiny.config(3, micro=2, precision=precision, deepc={"bucket_elems": 8192})
    base["optimizer"] = ACROSS.get(kind, base["optimizer"])
    folder = tmp_path / "disk"
    folder.mkdir()
    runs = [
        run_ranks(_on_two_nodes if world == 4 else _alone, world, _everything, cfg, str(tmp_path / str(i)))
        for i, cfg in enumerate((base, on_disk(base, folder, **LIMITS), on_disk(base, folder, states=True, **LIMITS)))
    ]
    for memory, disk in [*zip(runs[0], runs[1]), *zip(runs[0], runs[2])]:
        for key in memory:
            if isinstance(memory[key], dict):
                same_bits(memory[key], disk[key])
            elif isinstance(memory[key], torch.Tensor):
                assert torch.equal(memory[key], disk[key]), key
            else:
                assert memory[key] == disk[key], key
        assert disk["after"] == disk["again"], "the checkpoint has all of it"
        same_bits({n: t + 0.125 for n, t in disk["state"].items()}, disk["loaded"])
    assert os.listdir(folder) == []


def _evaluated(rank, world, cfg):
    import deepc.compat.deepspeed as deepspeed

    x, y = tiny.make_batch(0, 2)
    with torch.no_grad():
        engine = deepspeed.initialize(model=tiny.make_model(), config=cfg)[0]
        wanted = tiny.make_model().bfloat16()(x, y).item()  # by the same kernels: an engine replaces some of torch's
        found = [engine(x, y).item() for _ in range(2)]
    on, total = engine.plan.parameters_on, engine.plan.layout.total
    engine.destroy()
    return wanted, found, on, total


def test_an_engine_for_evaluation(tmp_path):
    """Without an optimizer all parameters are frozen, and on disk."""
    cfg = on_disk(tiny.config(3, micro=2, precision="bf16"), tmp_path, **NO_LIMITS)
    del cfg["optimizer"]
    for wanted, found, on, total in run_ranks(_evaluated, 2, cfg):
        assert found == [wanted] * 2 and on == str(tmp_path) and total == 0


# ---- zero.Init -------------------------------------------------------------------------------------------------------
def _built(rank, world, cfg, init):
    import deepc
    from deepc.zero import shards

    most, cut = [], shards.Shards.settle

    def settle(self):
        cut(self)
        most.append(sum(p.nbytes for p in self._whole.values()))

    shards.Shards.settle, shards.KEEP = settle, 1 << 14
    try:
        torch.manual_seed(3 + rank * (init is not None))  # values are rank 0's
        with deepc.zero.Init(enabled=init is not None, config_dict_or_path=cfg, **(init or {})):
            model = tiny.TinyGPT(frozen=True)
            for block in model.blocks:  # a parent's own weight init
                torch.nn.init.normal_(block.up.weight, std=0.02)
        engine = deepc.initialize(model=model, config=cfg)[0]
        out = _steps(engine, 2, rank, world), {n: t.clone() for n, t in engine.module.state_dict().items()}
        engine.destroy()
    finally:
        shards.Shards.settle, shards.KEEP = cut, 64 << 20
    return (*out, max(most, default=0))


@pytest.mark.parametrize(
    "world, precision", [pytest.param(1, "fp32", marks=pytest.mark.full), (2, "fp32"), (1, "bf16")]
)
def test_init_builds_the_model_on_disk(world, precision, tmp_path):
    base = tiny.config(3, micro=2, precision=precision)
    cfg = on_disk(base, tmp_path, **NO_LIMITS)
    plain, built = (run_ranks(_built, world, cfg, init) for init in (None, {}))
    if precision == "fp32":  # in bf16 masters begin with the rounded values
        assert plain[0][0] == built[0][0]
        same_bits(plain[0][1], built[0][1])
    elements = sum(p.numel() for p in tiny.TinyGPT().parameters())
    for _, _, most in built:
        assert 0 < most <= (1 << 14) + 4 * 61 * 32 < 4 * elements / 2, "at most KEEP and one parameter"
    assert os.listdir(tmp_path) == []


def test_remote_device(tmp_path):
    import deepc
    from deepc.errors import ArgumentError

    with pytest.raises(ArgumentError, match="nvme_path"):
        deepc.zero.Init(remote_device="nvme")
    with pytest.raises(ArgumentError, match="'disk'"):
        deepc.zero.Init(remote_device="disk")


# ---- the configuration -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, says",
    [
        ({"stage": 2}, "stage 3"),
        ({"offload_param": {"device": "nvme"}}, "nvme_path"),
        ({"offload_param": {"device": "nvme", "nvme_path": "/x", "max_in_cpu": -1}}, "max_in_cpu"),
    ],
)
def test_what_does_not_go(change, says, tmp_path):
    from deepc.config.tree import Config
    from deepc.errors import ConfigError

    cfg = on_disk(tiny.config(3, micro=2), tmp_path)
    cfg["zero_optimization"].update(change)
    with pytest.raises(ConfigError, match=says):
        Config.load(cfg, world_size=1, device_type="cpu")


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_the_host_updates_what_lies_off_a_gpu(device, tmp_path):
    import deepc
    from deepc.errors import DeepcError

    cfg = tiny.config(3, micro=2)
    cfg["zero_optimization"]["offload_param"] = {"device": device, "nvme_path": str(tmp_path)}
    with pytest.raises(DeepcError, match="offload_optimizer.device is .none.: set that"):
        deepc.estimate(tiny.make_model(), cfg, device="cuda")
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    rows = {r.name: r for r in deepc.estimate(tiny.make_model(), cfg, device="cuda").rows}
    assert rows["fp32 masters" if "fp32 masters" in rows else "optimizer states"].host > 0
    assert not any(r.device for r in rows.values()), "nothing lies on the device between steps"


def _plan(rank, world, cfg):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    plan, live = engine.plan, engine.state.streamed._max_live
    engine.destroy()
    return plan.describe(), dict(plan.bytes), live


def test_the_plan_says_what_lies_where(tmp_path):
    cfg = on_disk(tiny.config(3, micro=2), tmp_path)
    cfg["zero_optimization"]["offload_param"]["max_in_cpu"] = 12345
    text, sizes, live = run_ranks(_plan, 1, cfg)[0]
    assert "parameters on disk" in text and str(tmp_path) in text
    assert sizes["params_disk"] > 0 and sizes["params_shared"] == sizes["params_private"] == 0
    assert live == 12345, "max_in_cpu is honoured"


# ---- evaluation reads ahead ------------------------------------------------------------------------------------------
def _read_ahead(engine, disk):
    """Passes without gradients that repeat, behind which the next one's first units are on their way."""
    from deepc.zero.parameters.param import UnitState

    x, y = tiny.make_batch(7, 2)
    with torch.no_grad():
        losses = [engine(x, y).item() for _ in range(4)]
    assert len(set(losses)) == 1
    assert not disk or any(u.state is UnitState.ARRIVING for u in engine.state.units._units)
    return losses[0]


def _evaluated_between(rank, world, cfg, folder, disk):
    """Evaluates before all that writes parameters."""
    import deepc

    engine = deepc.initialize(model=tiny.make_model(layers=4), config=cfg)[0]
    average = deepc.EMA(engine, 0.5)
    losses = _steps(engine, 1, rank, world)
    engine.save_checkpoint(folder)
    for step in range(1, 3):
        x, y = tiny.make_batch(step, 2 * world)
        loss = engine(x[2 * rank :][:2], y[2 * rank :][:2])
        engine.backward(loss)
        losses += [loss.item(), _read_ahead(engine, disk)]
        assert engine.step().applied
    losses.append(_read_ahead(engine, disk))
    average.update()
    with average.applied():
        losses.append(_read_ahead(engine, disk))
    losses.append(_read_ahead(engine, disk))
    up, ln = engine.module.blocks[0].up.weight, engine.module.blocks[1].ln1.weight
    deepc.view(up).fp32 = engine.full_fp32_param(up) / 2
    losses.append(_read_ahead(engine, disk))
    with deepc.zero.GatheredParameters([ln], modifier_rank=0):
        ln.data.mul_(2)  # whose block on disk others share
    losses.append(_read_ahead(engine, disk))
    engine.load_checkpoint(folder)
    losses.append(_read_ahead(engine, disk))
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    "world, states",
    [(2, False), pytest.param(1, True, marks=pytest.mark.full), pytest.param(2, True, marks=pytest.mark.full)],
)
def test_what_evaluation_has_read_ahead_is_no_damage_when_it_is_written(world, states, tmp_path):
    base = tiny.config(3, micro=2, deepc={"bucket_elems": 8192})
    cfg = on_disk(base, tmp_path, states=states, **LIMITS)
    memory, disk = (
        run_ranks(_evaluated_between, world, c, str(tmp_path / name), c is cfg)
        for c, name in ((base, "memory"), (cfg, "disk"))
    )
    assert disk == memory


# ---- failures --------------------------------------------------------------------------------------------------------
def _damaged(rank, world, cfg):
    """A byte of a block's values is changed on disk: the forward names it; written again, all goes on."""
    import deepc
    from deepc.errors import DamagedError

    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    losses = _steps(engine, 1, rank, world)
    array, p = engine.state.disk.array, engine.module.blocks[1].up.weight
    at = engine.state.disk.begin_of(p) * 4
    with open(array.path, "r+b", buffering=0) as f:
        f.seek(at)
        kept = f.read(1)
        f.seek(at)
        f.write(bytes([kept[0] ^ 1]))
    x, y = tiny.make_batch(1, 2)
    said = ""
    try:
        engine(x, y)
    except DamagedError as exc:
        said = str(exc)
    with open(array.path, "r+b", buffering=0) as f:
        f.seek(at)
        f.write(kept)
    losses += _steps(engine, 2, rank, world, 1)
    engine.destroy()
    return said, losses


def test_damage_is_an_error_and_nothing_is_lost_by_it(tmp_path):
    cfg = tiny.config(3, micro=2)
    said, losses = run_ranks(_damaged, 1, on_disk(cfg, tmp_path, **NO_LIMITS))[0]
    assert "the parameters on disk" in said and "elements [" in said
    (memory,) = run_ranks(_in_memory, 1, cfg)
    assert losses == memory


def _failing(rank, world, cfg, steps):
    """The disk of the last rank fails once in the forward, in the backward and in the step, each time at another
    transfer; what was refused is asked for again."""
    import deepc
    from deepc.errors import DeepcError, DiskError, DiskFullError
    from deepc.offload import array

    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    assert engine.plan.gradients_on
    count, at, whole, losses, said = 0, -1, array.DiskArray._finish, [], []

    def finish(self, handle):
        nonlocal count
        whole(self, handle)
        count += 1
        if count == at and rank == world - 1:
            raise DiskFullError("[made by the test]")

    def run(n, what):
        """`what`, whose n-th transfer fails; it may have fewer."""
        nonlocal count, at
        count, at = 0, n
        try:
            return what()
        finally:
            at = -1

    array.DiskArray._finish = finish
    try:
        for step in range(steps):
            x, y = tiny.make_batch(step, 2 * world)
            x, y = x[2 * rank :][:2], y[2 * rank :][:2]
            try:
                loss = run(step + 1, lambda x=x, y=y: engine(x, y))
            except DiskError:
                said.append("forward")
                loss = engine(x, y)
            try:
                run(step + 1, lambda loss=loss: engine.backward(loss))
            except DiskError as exc:  # on all ranks
                assert f"rank {world - 1}: " in str(exc) and "[made by the test]" in str(exc)
                said.append("backward")
                with pytest.raises(DeepcError, match="zero_grad"):
                    engine.step()
                engine.zero_grad()
                loss = engine(x, y)
                engine.backward(loss)
            losses.append(loss.item())
            try:
                run(step + 1, engine.step)
            except DiskError as exc:
                assert "[made by the test]" in str(exc)
                said.append("step")
                engine.step()
    finally:
        array.DiskArray._finish = whole
    state = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.destroy()
    return losses, state, said


def _unfailing(rank, world, cfg, steps):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    losses = _steps(engine, steps, rank, world)
    state = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize(
    "world, precision, kind",
    [
        (1, "fp32", ""),
        (2, "bf16", "Muon"),
        (2, "fp32", "Adafactor"),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                (2, "bf16", ""),
                (2, "fp32", "Lamb"),
                (4, "bf16", ""),
                (4, "fp32", "Muon"),
                (1, "bf16", "Lamb"),
                (1, "fp32", "Muon"),
                (2, "fp32", "Muon"),
                (2, "bf16", "Adafactor"),
            )
        ),
    ],
)
def test_a_transfer_that_fails_loses_nothing(world, precision, kind, tmp_path):
    base = tiny.config(3, micro=2, precision=precision, deepc={"bucket_elems": 8192})
    base["optimizer"] = ACROSS.get(kind, base["optimizer"])
    cfg = on_disk(base, tmp_path, states=True, **LIMITS)
    steps = 12
    how = _on_two_nodes if world == 4 else _alone
    failing, memory = (run_ranks(how, world, *run, steps) for run in ((_failing, cfg), (_unfailing, base)))
    for (losses, state, said), (wanted, wanted_state) in zip(failing, memory):
        assert losses == wanted
        same_bits(state, wanted_state)
        # A rank of four has two buckets of gradients, and so fewer transfers in backward.
        assert said.count("step") >= 4 and said.count("backward") >= (4 if world < 4 else 2)
        assert [s for s in said if s != "forward"] == [s for s in failing[0][2] if s != "forward"], "on all ranks alike"
    assert "forward" in failing[-1][2]


def _write_that_fails(rank, world, cfg):
    """Writes that the disk of the first rank refuses, then steps."""
    import deepc
    from deepc.errors import DiskError, DiskFullError
    from deepc.offload.array import DiskArray

    failing, put = False, DiskArray.put

    def refused(self, begin, values):
        if failing:
            raise DiskFullError("[made by the test]")
        put(self, begin, values)

    for_this_job(DiskArray, "put", refused)
    engine = deepc.initialize(model=tiny.make_model(frozen=True), config=cfg)[0]
    p, frozen = engine.module.blocks[1].up.weight, engine.module.pos.weight
    before = {n: t.clone() for n, t in engine.module_state_dict().items()}
    for written in (p, frozen):
        with pytest.raises(DiskError, match="rank 0: .*made by the test" if rank else "made by the test"):
            with deepc.zero.GatheredParameters([written], modifier_rank=0), torch.no_grad():
                written.add_(float(rank == 0))
                failing = rank == 0
        failing = False
    same_bits({n: t.clone() for n, t in engine.module_state_dict().items()}, before)
    _steps(engine, 2, rank, world)
    with deepc.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
        p.fill_(float(rank == 0))
    assert torch.equal(deepc.view(p).fp32, torch.ones(p.shape))
    gc.collect()  # the tensors that the tracebacks have kept
    _steps(engine, 1, rank, world)
    stats = engine.state.streamed.stats()
    assert stats["live_elems"] == stats["persistent_elems"], stats
    engine.destroy()


@pytest.mark.parametrize("states", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_write_that_the_disk_refuses_is_told_on_all_ranks(states, tmp_path):
    run_ranks(_write_that_fails, 2, on_disk(tiny.config(3, micro=2), tmp_path, states=states, **LIMITS))


def _read_in_between(rank, world, cfg, folder, fails):
    """A step that the disk of the last rank breaks off; before its rest, or a checkpoint, somebody reads."""
    import deepc
    from deepc.errors import DamagedError, DeepcError, DiskError, DiskFullError
    from deepc.offload.array import DiskArray

    failing, write = False, DiskArray.write_async

    def write_async(self, begin, values):
        handle = write(self, begin, values)
        if failing:
            handle.wait()
            with open(self.path, "r+b", buffering=0) as f:  # the disk took none of it
                f.seek(begin * values.itemsize)
                f.write(bytes(values.nbytes))
            raise DiskFullError("[made by the test]")
        return handle

    for_this_job(DiskArray, "write_async", write_async)
    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    losses = _steps(engine, 1, rank, world)
    engine.save_checkpoint(folder)
    p = engine.module.blocks[1].up.weight
    for way_out in (engine.step, lambda: engine.load_checkpoint(folder)):
        x, y = tiny.make_batch(1, 2 * world)
        x, y = x[2 * rank :][:2], y[2 * rank :][:2]
        loss = engine(x, y)
        engine.backward(loss)
        losses.append(loss.item())
        if fails:
            failing = rank == world - 1
            with pytest.raises(DiskError, match=f"rank {world - 1}: .*made by the test.*engine.step.. does the rest"):
                engine.step()
            failing = False
            for read in (
                lambda x=x, y=y: engine(x, y),
                lambda x=x, y=y: engine.module(x, y),
                lambda: engine.full_fp32_param(p),
                lambda: deepc.view(p).local.fp32,
                engine.module_state_dict,
                lambda: deepc.zero.GatheredParameters([p]).__enter__(),
            ):
                with pytest.raises(DeepcError, match=r"step \d is done in part.*engine.step.. does the rest") as told:
                    read()
                assert not isinstance(told.value, DamagedError)
        elif way_out == engine.step:
            engine.step()
        if fails or way_out != engine.step:
            way_out()
        with torch.no_grad():
            losses += [engine(x, y).item(), engine.full_fp32_param(p).sum().item()]
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    "world, states", [(2, False), *(pytest.param(*row, marks=pytest.mark.full) for row in ((1, False), (2, True)))]
)
def test_a_step_that_the_disk_broke_off_is_no_damage_to_who_reads(world, states, tmp_path):
    base = tiny.config(3, micro=2, deepc={"bucket_elems": 8192})
    cfg = on_disk(base, tmp_path, states=states, **LIMITS)
    memory, disk = (
        run_ranks(_read_in_between, world, c, str(tmp_path / name), c is cfg)
        for c, name in ((base, "memory"), (cfg, "disk"))
    )
    assert disk == memory


def _fails_at_the_end(rank, world, cfg, way, fails):
    """The disk of the last rank takes none of a pass's gradients, which that pass tells at its end."""
    import deepc
    from deepc.errors import DeepcError, DiskError
    from deepc.zero.streamed.gradients import GradientStore

    write = GradientStore.write
    failing = False

    def refused(self, begin, values):
        handle = write(self, begin, values)
        if failing:
            self._failure = DiskError("[made by the test]")
        return handle

    for_this_job(GradientStore, "write", refused)
    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    assert engine.plan.gradients_on or not fails

    def micro_batch(number):
        x, y = (t[2 * rank :][:2] for t in tiny.make_batch(number, 2 * world))
        loss = engine(x, y)
        if way == "bare":
            loss.backward()
        elif way == "engine":
            engine.backward(loss)
        else:
            with engine.no_sync():
                engine.backward(loss)
        return loss.item()

    def empty():  # the pass of a micro-batch in which this rank has made none
        engine.hooks.empty_pass(engine.is_gradient_accumulation_boundary())

    losses = []
    for step in range(3):
        if fails and step == 1:
            micro_batch(7)
            engine.step()
            failing = rank == world - 1
            # With no_sync the pass is the step's own, for gradients that no other has taken.
            with pytest.raises(DiskError, match=f"rank {world - 1}: .*made by the test.*first micro-batch"):
                if way == "no_sync":
                    micro_batch(8)
                    engine.step()
                elif way == "empty":
                    empty()
                else:
                    micro_batch(8)
            failing = False
            with pytest.raises(DeepcError, match="zero_grad"):
                engine.step()
            engine.zero_grad()
        for k in range(2):
            losses.append(micro_batch(10 * step + k))
            result = engine.step()
        assert result.applied
        losses.append(result.grad_norm)
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    "world, way",
    [
        (1, "bare"),
        (2, "bare"),
        (2, "no_sync"),
        *(pytest.param(*row, marks=pytest.mark.full) for row in ((1, "no_sync"), (2, "empty"), (2, "engine"))),
    ],
)
def test_gradients_that_the_disk_refuses_at_the_end_of_a_pass(world, way, tmp_path):
    base = tiny.config(3, micro=2, gas=2, deepc={"bucket_elems": 8192})
    cfg = on_disk(base, tmp_path, states=True, **LIMITS)
    memory, disk = (run_ranks(_fails_at_the_end, world, c, way, c is cfg) for c in (base, cfg))
    for found, wanted in zip(disk, memory, strict=True):
        assert found == wanted


def _in_memory(rank, world, cfg):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    losses = _steps(engine, 3, rank, world)
    engine.destroy()
    return losses


def _no_folder(rank, world, cfg):
    import deepc
    from deepc.errors import DeepcError

    try:
        deepc.initialize(model=tiny.make_model(), config=cfg)
    except DeepcError as exc:
        return type(exc).__name__, str(exc)
    return None


def test_what_does_not_fit_on_the_disk_is_said_before_it_is_made(tmp_path, monkeypatch):
    from deepc import offload
    from deepc.errors import DiskFullError
    from deepc.zero.tiers import disk

    class Plan:
        ranks_per_node, disk, device_type = 4, None, "cpu"
        parameters_on = gradients_on = str(tmp_path)

    free = offload.check(tmp_path).free_bytes
    Plan.bytes = {"params_disk": free // 8, "grads_disk": free // 8}
    assert len(disk.preflight(Plan)) == 1
    Plan.bytes = {"params_disk": free // 2, "grads_disk": free // 4}
    with pytest.raises(DiskFullError, match="ranks \\(4\\) need"):
        disk.preflight(Plan)
    Plan.device_type, Plan.ranks_per_node = "cuda", 1  # a group of GPUs does not know who shares its host
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(DiskFullError, match="ranks \\(4\\) need"):
        disk.preflight(Plan)


def test_a_folder_that_is_not_there(tmp_path):
    for name, said in run_ranks(_no_folder, 2, on_disk(tiny.config(3, micro=2), tmp_path / "missing" / "below")):
        assert name == "DiskError" and "missing" in said
