"""A budget of recomputation with mixtures of experts: ranks that share experts take one choice, what their gates may
choose another time is within the budget, and no bit differs from no recomputation."""

from __future__ import annotations

import itertools

import pytest
import test_moe_axes as axes
import test_moe_parallel as parallel
import torch
from deepc.engine.states.recompute import rounds
from deepc.errors import ConfigError
from deepc.parallel.expert import MoE
from deepc.plan.mesh import Mesh
from deepc.plan.predict.recompute.choice import Rates
from ranks import for_this_job
from ranks import run_ranks as _run_ranks
from test_recompute import KEY, Held
from test_recompute_pipeline import alike
from torch import nn

WIDTH, TOKENS = 16, 24
FULL = pytest.mark.full


def run_ranks(fn, world, *args, **env):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING", **env})


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


class Block(nn.Module):
    """kept: the loss of its gate is an attribute, else it is handed on."""

    def __init__(self, kept, ep, options):
        super().__init__()
        self.norm, self.kept = nn.LayerNorm(WIDTH), kept
        self.before = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH))
        self.moe = MoE(WIDTH, expert(), num_experts=4, ep_size=ep, **options)

    def forward(self, x, aux):
        x = x + self.before(x)
        out, balance, _ = self.moe(self.norm(x))
        self.balance = balance if self.kept else None
        return x + torch.dropout(out, 0.1, self.training), aux + (0 if self.kept else balance)


class Net(nn.Module):
    """One block for each of `layers`, options of MoE."""

    def __init__(self, layers, kept=False, ep=1):
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(kept, ep, options) for options in layers)

    def forward(self, x, skipped=()):
        x, aux = self.first(x), 0
        for i, block in enumerate(self.blocks):
            if i not in skipped:
                x, aux = block(x, aux)
        aux = aux + sum(block.balance for block in self.blocks if block.kept)
        return self.last(x).square().mean() + 0.1 * aux


GATES = (
    {"k": 1, "noisy_gate_policy": "Jitter"},  # and places drawn by lot
    {"k": 2, "capacity_factor": 1.25},  # and second choices drawn
    {"k": 3, "noisy_gate_policy": "RSample", "use_residual": True},
    {"k": 2, "drop_tokens": False},
)


def config(budget, stage=0, **more):
    asked = {} if budget is None else {KEY: {"budget": budget}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **asked,
        **more,
    }


def batch(step, rank=0, rows=2):
    torch.manual_seed(100 * step + rank)
    return torch.randn(rows, TOKENS, 8)


def trained(rank, world, budgets, stage=0, ep=1, layers=GATES, kept=False, rows=((2,),)):
    """Of each budget: (losses, weights after, the layers' load-balance losses, choices, stats, bytes that lived at most
    in the last step above those before, and those left behind its backward). rows: samples of each step's batch
    (the last for all further ones), of each rank."""
    import deepc

    mine, out = rows[rank % len(rows)], []
    for budget in budgets:
        torch.manual_seed(rank)
        engine = deepc.initialize(model=Net(layers, kept, ep), config=config(budget, stage))[0]
        own = engine.recomputation.clock
        engine.recomputation.clock = lambda args, own=own: own(args) * (1 + rank)
        losses = []
        for step in range(4):
            x = batch(step, rank, mine[min(step, len(mine) - 1)])
            with Held(engine.module) as held:
                loss = engine(x)
                engine.backward(loss)
                left = held.now
            engine.step()
            losses.append(loss.item())
        balances = [float(b.moe.deepspeed_moe.l_aux.detach()) for b in engine.module.blocks]
        plans = {key: plan.choice.recomputed for key, plan in engine.recomputation._plans.items()}
        state = {n: t.clone() for n, t in engine.module_state_dict().items()}
        out.append((losses, state, balances, plans, engine.recomputation.stats(), held.most, left))
        engine.destroy()
    return out


def same_bits(found, wanted):
    assert found[0] == wanted[0] and found[2] == wanted[2]
    assert found[1].keys() == wanted[1].keys()
    for name, t in wanted[1].items():
        assert torch.equal(found[1][name], t), name


def between(stats, part):
    return int(stats["least_bytes"] + part * (stats["whole_bytes"] - stats["least_bytes"]))


@pytest.mark.parametrize("kept", [pytest.param(False, marks=FULL), True])
def test_no_bit_differs_and_budgets_are_kept(kept):
    """Noise, lots, dropout and what is left out are drawn again alike. A gate's loss that the block keeps does not keep
    what was computed again for it."""
    plain, whole = trained(0, 1, (None, "1TB"), kept=kept)
    same_bits(whole, plain)
    assert whole[4]["recomputed"] == 0 and whole[4]["peak_bytes"] == whole[4]["whole_bytes"]
    budgets = [between(whole[4], part) for part in (0, 0.3, 0.6, 0.9)]
    some = trained(0, 1, budgets, kept=kept)
    workspace = some[0][5] - budgets[0]  # of a block's backward, and gradients: beside the budget
    assert workspace < whole[4]["whole_bytes"] / 10
    for budget, found in zip(budgets, some, strict=True):
        same_bits(found, plain)
        assert found[4]["peak_bytes"] <= budget
        assert found[5] <= budget + workspace and found[6] < 4096
    counts = [found[4]["recomputed"] for found in some]
    assert counts[0] >= 3 and counts == sorted(counts, reverse=True) and 0 < counts[-1] < 4
    assert some[0][5] < whole[5] - (budgets[-1] - budgets[0]) / 2, "it does save memory"


@pytest.mark.parametrize(
    ("world", "ep", "stage", "streamed"),
    [
        (2, 2, 2, False),
        *(
            pytest.param(*case, marks=FULL)
            for case in (
                (2, 1, 3, False),
                (2, 2, 0, False),
                (2, 2, 1, False),
                (2, 2, 3, False),
                (2, 1, 3, True),
                (2, 2, 3, True),
                (4, 2, 1, False),
                (4, 2, 3, False),
                (4, 4, 2, False),
            )
        ),
    ],
)
def test_ranks_that_share_experts_take_one_choice(world, ep, stage, streamed):
    """Which measure other times, get batches of other sizes, and are measured again in other forwards."""
    env = {"DEEPC_STREAMED": "1"} if streamed else {}
    rows = [(2, 2, 3, 1), (2, 3, 2, 1)] if ep > 1 else [(2,)]

    def run(*budgets):
        return run_ranks(trained, world, budgets, stage, ep, GATES, False, rows, **env)

    ranks = run(None, "1TB")
    budgets = [between(ranks[0][1][4], part) for part in (0.02, 0.5)]
    bound = run(*budgets)
    for rank, ((plain, whole), found) in enumerate(zip(ranks, bound, strict=True)):
        same_bits(whole, plain)
        for one, budget, of_first in zip(found, budgets, bound[rank // ep * ep], strict=True):
            same_bits(one, plain)
            assert one[3] == of_first[3], "choices of its group"
            assert one[4]["peak_bytes"] <= budget
        assert found[0][4]["recomputed"] >= 3 > found[1][4]["recomputed"] > 0
        assert len(found[1][3]) == (3 if ep > 1 else 1), "plans for 2, 3 and 1 rows"


class Waves(nn.Module):
    """An expert that saves 24 rows for each of its rows, and whose backward has next to no workspace."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for _ in range(12):
            x = torch.sin(x) * self.scale
        return x


class Alone(nn.Module):
    def __init__(self, ep, options):
        super().__init__()
        self.moe = MoE(256, Waves(), num_experts=4, ep_size=ep, **options)
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.zero_()[:, :4] = torch.eye(4)

    def forward(self, x):
        return x + self.moe(x)[0]


def lopsided(rank, world, ep, options, measured, then):
    """Bytes that lived at most in steps of tokens that want the experts `measured`, and those that want `then`, under a
    budget that was chosen for the former."""
    import deepc

    def run(budget):
        torch.manual_seed(0)
        sgd = {"type": "SGD", "params": {"lr": 0.0}}
        model = nn.Sequential(*(Alone(ep, options) for _ in range(6)))
        engine = deepc.initialize(model=model, config=config(budget, optimizer=sgd))[0]
        most = []
        for wanted in (measured, measured, then):
            x = 0.01 * torch.randn(64, 256, generator=torch.Generator().manual_seed(rank))
            x[:, :4] = 0
            x[range(64), [wanted[i % len(wanted)] for i in range(64)]] = 100
            with Held(engine.module) as held:
                engine.backward(engine(x).mean())
            engine.step()
            most.append(held.most)
        stats = engine.recomputation.stats()
        engine.destroy()
        return most, stats

    _, whole = run("1TB")
    budget = between(whole, 0.5)
    most, stats = run(budget)
    return most, budget, stats


@pytest.mark.parametrize(
    ("world", "ep", "options", "measured", "then"),
    [
        (1, 1, {"k": 1, "use_rts": False}, [0], [0, 1, 2, 3]),  # three quarters had no place
        # all come to the first rank
        pytest.param(2, 2, {"k": 1, "capacity_factor": 2.0, "use_rts": False}, [0, 1, 2, 3], [0, 1], marks=FULL),
        pytest.param(2, 2, {"k": 1, "drop_tokens": False}, [0, 1, 2, 3], [1], marks=FULL),
    ],
)
def test_what_gates_may_choose_another_time_is_within_the_budget(world, ep, options, measured, then):
    room = 8 * 64 * 256 * 4  # of a block's backward
    ranks = run_ranks(lopsided, world, ep, options, measured, then)
    for (first, before, after), budget, stats in ranks:
        assert 0 < stats["recomputed"] < 6 and stats["peak_bytes"] <= budget
        assert max(first, before, after) <= budget + room
    (_, before, after), *_ = ranks[0]
    assert after > 1.5 * before, "more than what was measured"


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def _calls_others(rank, world):
    import deepc

    class Depth(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2)
            self.blocks = nn.ModuleList(Plain() for _ in range(3))

        def forward(self, x, depth):
            x, balance, _ = self.moe(x)
            for block in self.blocks[:depth]:
                x = block(x)
            return x.mean() + balance

    engine = deepc.initialize(model=Depth(), config=config("1TB"))[0]
    with pytest.raises(ConfigError) as told:
        engine(torch.randn(2, 4, WIDTH), 3 - rank)
    engine.destroy()
    return str(told.value)


def test_ranks_that_call_other_blocks_are_told_so():
    for rank, text in enumerate(run_ranks(_calls_others, 2)):
        assert f"from 2 to 3 blocks in one forward (this one {3 - rank})" in text and KEY in text


def _gets_others(rank, world):
    import deepc

    out = []
    for budget in (None, "1TB"):
        torch.manual_seed(0)
        engine = deepc.initialize(model=Net([{"k": 1}] * 2, ep=2), config=config(budget))[0]
        for step in range(2):
            x = batch(step, rank)
            loss = engine(x.flatten(0, 1) if rank else x)
            engine.backward(loss)
            engine.step()
        out.append(loss.item())
        plans = list(engine.recomputation._plans)
        engine.destroy()
    return out, plans


def test_ranks_that_get_tensors_of_other_dimensions():
    (first, plans), (second, others) = run_ranks(_gets_others, 2)
    assert first[0] == first[1] and second[0] == second[1] and plans == others and len(plans) == 1


def _disk_fails(rank, world, folder, method):
    """What a rank says when the disk of the second one fails in a forward (put) or a backward (get)."""
    import deepc
    from deepc.engine.states.activations import Moves
    from deepc.errors import DeepcError, DiskError
    from deepc.offload import spill

    for_this_job(Moves, "measure", lambda self: Rates(0.0, 0.0, 1e-13))
    disk = {"nvme_path": folder, "min_bytes": 256}

    def begun(budget):
        engine = deepc.initialize(model=Net(GATES, ep=2), config=config(budget, deepc={"activations": disk}))[0]
        engine.backward(engine(batch(0, rank)))
        engine.step()
        return engine

    engine = begun("1TB")
    budget = between(engine.recomputation.stats(), 0.6)
    engine.destroy()
    engine = begun(budget)
    assert engine.recomputation.stats()["on_disk"] > 0

    def refuses(*args):
        raise DiskError("[made by the test]")

    if rank == 1:
        for_this_job(spill.Spill if method == "put" else spill.Spilled, method, refuses)
    with pytest.raises(DeepcError) as told:
        engine.backward(engine(batch(1, rank)))
    return f"{type(told.value).__name__}: {told.value}"


@pytest.mark.parametrize("method", ["get", pytest.param("put", marks=FULL)])
def test_a_disk_that_fails_inside_of_a_block_is_an_error_on_all_ranks(method, tmp_path):
    other, mine = _run_ranks(_disk_fails, 2, args=(str(tmp_path), method))
    assert mine == "DiskError: [made by the test]"
    assert other.startswith("AbortedError") and "rank 1 broke off a pass: DiskError: [made by the test]" in other


# ---- beside other ways to share a model ------------------------------------------------------------------------------
def _in_pipelines(rank, world, stages, ep, zero, pipe, budgets):
    out = []
    for budget in budgets:
        told = {}
        cfg = {"zero_optimization": {"stage": zero}, **({} if budget is None else {KEY: {"budget": budget}})}
        out.append((*parallel.train(rank, world, stages, ep, cfg, pipe, stats=told), told))
    return out


@pytest.mark.parametrize(
    ("world", "stages", "ep", "zero", "pipe"),
    [
        (4, 2, 2, 1, {}),
        *(
            pytest.param(*case, marks=FULL)
            for case in (
                (2, 2, 1, 1, {}),
                (4, 2, 2, 3, {}),
                (4, 2, 2, 2, {"schedule": "gpipe"}),
                (4, 2, 2, 0, {"schedule": "zb-h1"}),
                (4, 1, 4, 2, {}),
            )
        ),
    ],
)
def test_in_pipelines(world, stages, ep, zero, pipe):
    def run(*budgets):
        return run_ranks(_in_pipelines, world, stages, ep, zero, pipe, budgets)

    ranks = run(None, "1TB")
    least, whole = (max(r[1][3][k] for r in ranks) for k in ("least_bytes", "whole_bytes"))
    bound = run(least, (least + whole) // 2)
    for (plain, _), found in zip(ranks, bound, strict=True):
        for losses, norms, weights, stats in found:
            alike([*losses, *norms], [*plain[0], *plain[1]], weights, plain[2], pipe)
            assert 0 <= stats["recomputed"] <= stats["calls"]
    assert any(found[0][3]["recomputed"] for found in bound)


def _along_axes(rank, world, sizes, places, stage, budgets):
    out = []
    for budget in budgets:
        asked = {} if budget is None else {KEY: {"budget": budget}}
        told = {}
        out.append((*axes.train(rank, world, sizes, places, stage, asked, stats=told), told))
    return out


@FULL
@pytest.mark.parametrize(
    ("sizes", "stage", "places"),
    [
        ({"sp": 2, "ep": 2}, 1, axes.DRAWN),
        ({"dp": 2, "tp": 2, "ep": 2}, 2, axes.FEW_PLACES),
        ({"dp": 2, "sp": 2, "ep": 4}, 3, axes.DRAWN),
        ({"pp": 2, "dp": 2, "ep": 2}, 1, axes.FEW_PLACES),
        ({"pp": 2, "sp": 2, "ep": 2}, 2, axes.ALL_PLACES),
    ],
    ids=axes.name_of,
)
def test_beside_other_axes(sizes, stage, places):
    def run(*budgets):
        return run_ranks(_along_axes, axes.ranks_of(sizes), sizes, places, stage, budgets)

    ranks = run(None, "1TB")
    least, whole = (max(r[1][4][k] for r in ranks) for k in ("least_bytes", "whole_bytes"))
    bound = run(least, (least + whole) // 2)
    for (plain, _), found in zip(ranks, bound, strict=True):
        for losses, norms, grads, weights, _ in found:
            assert losses == plain[0] and norms == plain[1]
            assert all(torch.equal(t, plain[2][n]) for n, t in grads.items())
            assert all(torch.equal(t, plain[3][n]) for n, t in weights.items())
    assert any(found[0][4]["recomputed"] for found in bound)


def test_groups_that_overlap_like_bricks_come_to_one_value():
    """Ranks of a sequence and ranks that share experts, where neither lie in the other."""
    seen = set()
    for dp, sp, ep in itertools.product(range(1, 8), range(1, 5), range(1, 8)):
        if dp * sp % ep:
            continue
        mesh = Mesh(dp=dp, sp=sp, ep=ep)
        of = {axis: [mesh.group(axis, r) for r in range(mesh.size)] for axis in ("sp", "ep")}
        largest = list(range(mesh.size))
        for _ in range(mesh.size):  # as often as there are ranks is enough
            largest = [max(largest[m] for m in (*of["sp"][r], *of["ep"][r])) for r in range(mesh.size)]
        values = list(range(mesh.size))
        for _ in range(rounds(mesh)):
            for axis in ("sp", "ep"):
                values = [max(values[m] for m in of[axis][r]) for r in range(mesh.size)]
        assert values == largest, mesh
        seen.add(rounds(mesh))
    assert seen >= {1, 2, 3, 4}
