"""The engine over several CPU nodes: shared memory inside each, Gloo between them; and ZeRO++'s compression of what
crosses.

Nodes are simulated by DEEPC_NODE_ID: ranks of another name can't share memory, whatever the machine. test_nodes_net.py
has hosts with a network."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from typing import NamedTuple

import pytest
import tiny
import torch
from ranks import run_ranks as _run_ranks
from test_engine import close_to_plain, same_bits

STEPS = 8
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def run_ranks(fn, world, *args, **kw):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **kw)


@contextlib.contextmanager
def on_node(name: str):
    os.environ["DEEPC_NODE_ID"] = name
    try:
        yield
    finally:
        del os.environ["DEEPC_NODE_ID"]  # the process goes on to other tests


def place(rank: int, world: int, nodes: int, how: str = "blocks") -> str:
    """Ranks of a node one after the other (as launchers do), or dealt out."""
    return f"host{rank // (world // nodes) if how == 'blocks' else rank % nodes}"


class Run(NamedTuple):
    losses: list
    first: dict
    weights: dict  # fp32 masters
    params: dict
    counted: dict
    sent: dict  # engine.comm_bytes
    crossing: dict  # Plan.crossing
    skipped: int
    plan: str


def _train(rank, world, nodes, how, stages, micro, gas, precision, steps, zero, options):
    import deepc

    out = {}
    with on_node(place(rank, world, nodes, how)):
        for stage in stages:
            before = deepc.counters()
            cfg = tiny.config(
                stage, micro=micro, gas=gas, precision=precision, deepc={"bucket_elems": 1}
            )  # the smallest: several buckets
            cfg["zero_optimization"].update(zero)
            losses, first, weights, engine = tiny.engine_training(cfg, steps, rank, world, **options)
            counted = {k: v - before[k] for k, v in deepc.counters().items()}
            plan = engine.plan
            assert (plan.transport, plan.nodes, plan.ranks_per_node) == (
                "nodes" if nodes > 1 else "node",
                nodes,
                world // nodes,
            )
            params = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
            out[stage] = Run(
                losses,
                first,
                weights,
                params,
                counted,
                engine.comm_bytes,
                plan.crossing(),
                engine.skipped_steps,
                plan.describe(),
            )
            engine.destroy()
    return out


def crossed_as_planned(run: Run, steps: int, gas: int, per_node: int) -> None:
    assert run.sent["gradients"] * per_node == steps * (gas * run.crossing["gradients"] + run.crossing["sums"])
    assert run.sent["total"] == run.sent["gradients"] + run.sent["parameters"] + run.sent["control"]


@pytest.mark.parametrize(
    "world, nodes, how, gas",
    [
        (4, 2, "dealt", 2),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((3, 3, "blocks", 1), (4, 2, "blocks", 1), (2, 2, "blocks", 2))
        ),
    ],
)
def test_stages_over_nodes_equal_plain_pytorch_and_each_other(world, nodes, how, gas):
    samples = 8 if world != 3 else 6
    want = tiny.plain_training(STEPS, samples=samples)
    ranks = run_ranks(
        _train, world, nodes, how, (0, 1, 2, 3), samples // world // gas, gas, "fp32", STEPS, {}, {"samples": samples}
    )
    for rank in range(world):
        for stage in range(4):
            run = ranks[rank][stage]
            close_to_plain(run.losses, run.first, run.weights, *want)
            same_bits(run.weights, ranks[0][0].weights)
            same_bits(run.params, run.weights)
            assert run.losses == ranks[0][0].losses
            # The C path ran inside the node; each gradient and each new parameter crossed once per node; nothing was
            # gathered at stage 3.
            assert (
                run.counted["buckets_reduced"] > 0
                and run.counted["bucket_bytes_in"] > 0
                and run.counted["adamw_calls"] == STEPS
            )
            crossed_as_planned(run, STEPS, gas, world // nodes)
            assert run.sent["parameters"] * (world // nodes) == STEPS * run.crossing["parameters"]
            if stage == 3:
                assert run.counted["gather_bytes"] == 0 and f"the node, {world // nodes} rank" in run.plan


def test_kinds_of_parameters_over_nodes():
    options = {"frozen": True, "unused": True, "reuse": True, "recompute": "plain"}
    want = tiny.plain_training(4, weight_decay=0.0, **options)
    for rank in run_ranks(_train_variant, 4, options):
        for run in rank:
            close_to_plain(run[0], {n: run[1][n] for n in want[1]}, run[2], *want)


def _train_variant(rank, world, options):
    out = []
    with on_node(place(rank, world, 2)):
        for stage in (0, 2, 3):
            cfg = tiny.config(stage, micro=2, weight_decay=0.0, deepc={"bucket_elems": 1})
            *result, engine = tiny.engine_training(cfg, 4, rank, world, **options)
            out.append(result)
            engine.destroy()
    return out


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.full), "fp16"])
def test_16_bit_over_nodes_is_bit_equal_and_learns_as_on_one_node(precision):
    ranks = run_ranks(_train, 4, 2, "blocks", (0, 2, 3), 1, 2, precision, STEPS, {}, {})
    one_node = run_ranks(_train, 4, 1, "blocks", (2,), 1, 2, precision, STEPS, {}, {})[0][2]
    for rank in ranks:
        for stage in (0, 2, 3):
            same_bits(rank[stage].weights, ranks[0][0].weights)
            assert rank[stage].losses == ranks[0][0].losses
            assert rank[stage].counted["adamw_calls"] == STEPS - rank[stage].skipped
    assert (
        ranks[0][0].skipped == one_node.skipped < STEPS / 2
    )  # fp16: as many steps skipped, the sum over nodes overflows no earlier
    assert max(abs(a - b) for a, b in zip(ranks[0][0].losses, one_node.losses)) < (
        0.05 if precision == "bf16" else 0.02
    )


# ---- ZeRO++ ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "precision, world, gas",
    [
        ("fp32", 4, 1),
        pytest.param("bf16", 4, 2, marks=pytest.mark.full),
        pytest.param("fp32", 2, 1, marks=pytest.mark.full),
    ],
)
def test_quantized_stages_agree_and_cross_less(precision, world, gas):
    steps, micro = 12, 8 // world // gas
    zero = {**QUANTIZED, "zero_hpz_partition_size": world // 2}
    plain = run_ranks(_train, world, 2, "blocks", (3,), micro, gas, precision, steps, {}, {})
    ranks = run_ranks(_train, world, 2, "blocks", (1, 2, 3), micro, gas, precision, steps, zero, {})
    for rank in range(world):
        for stage in (1, 2, 3):
            run = ranks[rank][stage]
            same_bits(run.params, ranks[0][3].params)  # all nodes and stages hold the same dequantised values
            same_bits(run.weights, ranks[0][3].weights)
            assert run.losses == ranks[0][3].losses
            crossed_as_planned(run, steps, gas, world // 2)
            # Per bucket and step one encoding of parameters and one of gradients (and the parameters' at the start):
            # C's, not a fallback.
            assert run.counted["quantize_calls"] >= steps * (1 + gas) and run.counted["dequantize_calls"] >= steps * (
                2 + gas
            )
            assert "int4 blocks, qgZ" in run.plan and "int8 blocks, qwZ" in run.plan
    run, reference = ranks[0][3], plain[0][3]
    for (
        name,
        master,
    ) in run.weights.items():  # half a step of 8 bits of the largest of 64 neighbours, at most the tensor's largest
        assert (
            not torch.equal(run.params[name], master.to(run.params[name].dtype))
            or master.abs().max() == 0
            or master.dim() == 1
        )
        bound = float(master.abs().max()) * (0.5 / 127 + (2**-8 if precision == "bf16" else 1e-6))
        torch.testing.assert_close(run.params[name].float(), master, rtol=0, atol=bound)
    if precision == "fp32":
        moved = sum(run.sent[k] for k in ("gradients", "parameters"))
        assert moved <= 0.22 * sum(reference.sent[k] for k in ("gradients", "parameters"))
    assert run.losses[0] == pytest.approx(reference.losses[0], rel=2e-2)
    assert max(abs(a - b) for a, b in zip(run.losses, reference.losses)) < 0.02 * reference.losses[0]


def _plan_bytes(rank, world, zero):
    import deepc

    out = []
    with on_node(place(rank, world, 2)):
        for stage, precision in ((0, "fp32"), (3, "fp32"), (3, "bf16")):
            cfg = tiny.config(stage, micro=2, precision=precision)
            cfg["zero_optimization"].update(zero)
            engine, _, _, _ = deepc.initialize(model=tiny.make_model(width=64), config=cfg)
            plan, reducer, state = engine.plan, engine.reducer, engine.state
            have = sum(
                t.numel() * t.element_size() for t in (reducer._slots, reducer._in, reducer._out) if t is not None
            )
            assert plan.bytes["exchange_private"] == have
            assert plan.bytes["master_private"] == (4 * state.master.numel() if state.master is not None else 0)
            shared = plan.bytes["params_shared"] + plan.bytes["staging_shared"]
            assert plan.bytes["node_total"] == 2 * plan.bytes["rank_total"] + shared and plan.ranks_per_node == 2
            assert plan.bytes["params_shared"] == (plan.layout.total * plan.dtype.itemsize if stage == 3 else 0)
            assert plan.bytes["grads_private"] == 4 * plan.layout.total // (4 if stage == 3 else 1)
            assert "on the way between nodes" in plan.describe() and "between 2 nodes" in plan.describe()
            out.append(plan.bytes["node_total"])
            engine.destroy()
    return out


@pytest.mark.parametrize("zero", [{}, QUANTIZED])
def test_the_plan_counts_what_a_node_holds(zero):
    ranks = run_ranks(_plan_bytes, 4, zero)
    assert all(r == ranks[0] for r in ranks)


def _debug(rank, world):
    """DEEPC_DEBUG=1: a write through NumPy is seen on the node where it happened, and all nodes are told."""
    import deepc
    from deepc.errors import StrayWriteError

    os.environ["DEEPC_DEBUG"] = "1"
    try:
        with on_node(place(rank, world, 2)):
            engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=2))
            x, y = tiny.make_batch(0)
            for step in range(2):
                engine.backward(engine(x[rank * 2 :][:2], y[rank * 2 :][:2]))
                assert engine.step().applied
            engine.backward(engine(x[rank * 2 :][:2], y[rank * 2 :][:2]))
            if rank == 3:
                engine.module.ln.weight.detach().numpy()[0] += 1
            with pytest.raises(StrayWriteError, match="ln.weight"):
                engine.step()
            engine.destroy()
    finally:
        del os.environ["DEEPC_DEBUG"]


def test_page_checksums_over_nodes():
    run_ranks(_debug, 4)


@pytest.mark.full
def test_each_quantization_alone():
    only_w = run_ranks(_train, 2, 2, "blocks", (0, 3), 4, 1, "fp32", 3, {"zero_quantized_weights": True}, {})[0]
    only_g = run_ranks(_train, 2, 2, "blocks", (0, 3), 4, 1, "fp32", 3, {"zero_quantized_gradients": True}, {})[0]
    # Once more, at the start: parameters always are the quantised masters.
    assert only_w[3].sent["parameters"] < 0.27 * only_g[3].sent["parameters"] * 4 / 3
    assert only_g[3].sent["gradients"] < 0.2 * only_w[3].sent["gradients"]
    assert only_w[0].sent["parameters"] == 0  # stage 0 sends none
    same_bits(only_g[0].weights, only_g[3].weights)
    same_bits(only_g[3].params, only_g[3].weights)


def _refused(rank, world):
    import deepc
    from deepc.errors import ConfigError, UnsupportedError

    said = []

    def attempt(node, error, **zero):
        cfg = tiny.config(3, micro=4)
        cfg["zero_optimization"].update(zero)
        with on_node(node), pytest.raises(error) as caught:
            deepc.initialize(model=tiny.make_model(), config=cfg)
        said.append(str(caught.value))

    attempt(place(rank, world, 2), ConfigError, zero_hpz_partition_size=4)  # over the nodes
    attempt(f"host{max(0, rank - 2)}", UnsupportedError, stage=2, zero_quantized_gradients=True)  # 3 and 1
    with on_node(f"host{max(0, rank - 2)}"):  # stages 0 to 2 work there
        losses, _, _, engine = tiny.engine_training(tiny.config(2, micro=2), 2, rank, world)
        engine.destroy()
    return said, losses


def test_what_places_rule_out_is_a_clear_error():
    want = tiny.plain_training(2)[0]
    for (hpz, quantized), losses in run_ranks(_refused, 4):
        assert "zero_hpz_partition_size = 4" in hpz and "2 ranks of a node" in hpz
        assert (
            "zero_quantized_gradients" in quantized
            and "node host0 has ranks 0, 1, 2; node host1 has rank 3" in quantized
        )
        assert losses == pytest.approx(want, rel=1e-6)


# ---- what users do ---------------------------------------------------------------------------------------------------


def _poison(rank, world, zero):
    import deepc

    out = []
    with on_node(place(rank, world, 2)):
        for stage in (2, 3):
            cfg = tiny.config(stage, micro=2, deepc={"bucket_elems": 1})
            cfg["zero_optimization"].update(zero)
            engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=cfg)
            x, y = tiny.make_batch(0)
            x, y = x[rank * 2 :][:2], y[rank * 2 :][:2]
            before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
            for bad in (float("inf"), float("nan")):
                engine.backward(engine(x, y) * (bad if rank == 3 else 1.0))
                result = engine.step()
                assert not result.applied and "finite" in result.reason
                out.append(result.bad_parameter)
                same_bits({n: p.detach() for n, p in engine.module.named_parameters()}, before)
            engine.backward(engine(x, y))
            assert engine.step().applied
            engine.destroy()
    return out


@pytest.mark.parametrize("zero", [{}, QUANTIZED])
def test_gradients_that_are_not_finite_skip_the_step_on_every_node(zero):
    ranks = run_ranks(_poison, 4, zero)
    assert all(r == ranks[0] and None not in r for r in ranks)


def _user(rank, world, precision, zero):
    """GatheredParameters with a modifier on the second node, load_module_state_dict, no_sync, stray writes, and full
    tensors between micro-batches."""
    import deepc
    from deepc.errors import StrayWriteError

    with on_node(place(rank, world, 2)):
        cfg = tiny.config(3, micro=2, precision=precision, deepc={"bucket_elems": 1})
        cfg["zero_optimization"].update(zero)
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(frozen=True), config=cfg)
        weight, frozen = engine.module.blocks[0].up.weight, engine.module.pos.weight
        untouched = engine.full_fp32_param(engine.module.blocks[1].up.weight).clone()
        with deepc.zero.GatheredParameters([weight, frozen], modifier_rank=3):
            with torch.no_grad():
                weight.fill_(0.25 if rank == 3 else 99.0)
                frozen.fill_(0.5 if rank == 3 else 99.0)
        # Quantised, an element that had the value before by chance keeps its master, half a step of the old scale away
        # at most.
        near = 0.015 if zero else 0.0
        assert float((weight.float() - 0.25).abs().max()) <= near and torch.all(frozen == 0.5)
        assert float((engine.full_fp32_param(weight) - 0.25).abs().max()) <= near
        assert torch.equal(engine.full_fp32_param(engine.module.blocks[1].up.weight), untouched)
        x, y = tiny.make_batch(0)
        x, y = x[rank * 2 :][:2], y[rank * 2 :][:2]
        engine.backward(engine(x, y))
        assert engine.step().applied
        assert 0 < float((engine.full_fp32_param(weight) - 0.25).abs().max()) < 0.01 + near
        state = {n: torch.full_like(t, 0.125) for n, t in engine.module.state_dict().items()}
        engine.load_module_state_dict(state)
        assert all(float((p.float() - 0.125).abs().max()) <= near for p in engine.module.parameters())
        with engine.no_sync():
            engine.backward(engine(x, y))
        engine.backward(engine(x, y))
        assert engine.step().applied
        engine.backward(engine(x, y))
        if rank == 2:
            engine.module.blocks[1].up.weight.data.mul_(1.0)
        with pytest.raises(StrayWriteError, match=r"blocks.1.up.weight.*rank 2"):
            engine.step()
        params = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        engine.destroy()
    return params


@pytest.mark.parametrize("precision, zero", [("fp32", {}), ("bf16", QUANTIZED), ("fp32", QUANTIZED)])
def test_what_users_do_with_parameters_over_nodes(precision, zero):
    ranks = run_ranks(_user, 4, precision, zero)
    for params in ranks:
        same_bits(params, ranks[0])


def _stage_0_looks(rank, world):
    """Stage 0 completes its sums only when someone looks: full_grad between micro-batches, and a boundary that comes
    unannounced."""
    import deepc

    with on_node(place(rank, world, 2)):
        grads = []
        for stage in (0, 2):
            cfg = tiny.config(stage, micro=1, gas=2, deepc={"bucket_elems": 1})
            engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=cfg)
            x, y = tiny.make_batch(0)
            for m in range(2):
                at = m * world + rank
                engine.set_gradient_accumulation_boundary(False)
                engine.backward(engine(x[at : at + 1], y[at : at + 1]))
                if m == 0:
                    grads.append({n: engine.full_grad(p) for n, p in engine.module.named_parameters()})
                    engine.step()
            engine.set_gradient_accumulation_boundary(True)
            assert engine.step().applied
            grads.append({n: p.detach().clone() for n, p in engine.module.named_parameters()})
            engine.destroy()
    return grads


def test_stage_0_over_nodes_completes_its_sums_when_someone_looks():
    for first_0, last_0, first_2, last_2 in run_ranks(_stage_0_looks, 4):
        same_bits(first_0, first_2)
        same_bits(last_0, last_2)


def _zero_init(rank, world):
    import deepc

    with on_node(place(rank, world, 2)):
        with deepc.zero.Init():
            torch.manual_seed(rank)  # rank 0's values count, on the other node too
            model = tiny.TinyGPT(frozen=True)
        built = {n: p.detach().clone() for n, p in model.named_parameters()}
        engine, _, _, _ = deepc.initialize(model=model, config=tiny.config(3, micro=2))
        for n, p in model.named_parameters():
            assert torch.equal(p, built[n]), n
        x, y = tiny.make_batch(0)
        engine.backward(engine(x[rank * 2 :][:2], y[rank * 2 :][:2]))
        assert engine.step().applied
        engine.destroy()
    return built


def test_zero_init_over_nodes_builds_rank_0s_values_on_each():
    want = {n: p.detach() for n, p in tiny.make_model(0, frozen=True).named_parameters()}
    for built in run_ranks(_zero_init, 4):
        same_bits(built, want)


def _checkpoint(rank, world, folder, nodes, zero, resume):
    import deepc

    with on_node(place(rank, world, nodes)):
        cfg = tiny.config(3, micro=8 // world, precision="bf16", deepc={"bucket_elems": 1})
        cfg["zero_optimization"].update(zero)
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(seed=1 if resume else 0, frozen=True), config=cfg)
        if resume:
            assert engine.load_checkpoint(folder)[1] == {"at": 2}
        out = []
        for step in range(2 if resume else 0, 5):
            if step == 2 and not resume:
                engine.save_checkpoint(folder, client_state={"at": 2})
            x, y = tiny.make_batch(step)
            n = 8 // world
            loss = engine(x[rank * n :][:n], y[rank * n :][:n])
            engine.backward(loss)
            engine.step()
            out.append(loss.item())
        params = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        masters = {n: engine.full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad}
        engine.destroy()
    return out[-3:], params, masters


@pytest.mark.parametrize("zero", [pytest.param({}, marks=pytest.mark.full), QUANTIZED])
def test_checkpoints_over_nodes_resume_bit_exactly_and_load_on_one_node(tmp_path, zero):
    went_on = run_ranks(_checkpoint, 4, str(tmp_path), 2, zero, False)
    resumed = run_ranks(_checkpoint, 4, str(tmp_path), 2, zero, True)
    for a, b in zip(went_on, resumed):
        assert a[0] == b[0]
        same_bits(a[1], b[1])
        same_bits(a[2], b[2])
    for rank in run_ranks(
        _checkpoint, 2, str(tmp_path), 1, {}, True
    ):  # another number of ranks and nodes: close, not equal
        for n, p in rank[2].items():
            torch.testing.assert_close(p, went_on[0][2][n], rtol=0, atol=5e-3)


def test_a_rank_that_dies_is_an_error_on_every_node():
    results = _run_ranks(_dies, 4, env={"DEEPC_LOG_LEVEL": "WARNING"}, may_die=(1,), timeout_s=60.0)
    assert results[1] is None
    for rank in (0, 2, 3):
        assert (
            "rank 1" in results[rank] and "killed by signal 9" in results[rank]
        )  # the reason reaches the other node too


def _dies(rank, world):
    import deepc
    from deepc.errors import CommError

    os.environ["DEEPC_NODE_ID"] = place(rank, world, 2)  # of a process of its own
    engine, _, _, _ = deepc.initialize(
        model=tiny.make_model(), config=tiny.config(3, micro=2, deepc={"bucket_elems": 1})
    )
    x, y = tiny.make_batch(0)
    engine.backward(engine(x[:2], y[:2]))
    engine.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        for _ in range(3):
            engine.backward(engine(x[:2], y[:2]))
            engine.step()
    return str(caught.value)


# ---- a transport that fails ------------------------------------------------------------------------------------------


def _cut_connections() -> int:
    """What a broken network does to this process: its connections end (the store is a file). How many."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        if not os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:"):
            continue
        found = socket.socket(fileno=os.dup(int(name)))
        with found, contextlib.suppress(OSError):  # not connected
            if found.family in (socket.AF_INET, socket.AF_INET6):
                found.getpeername()  # raises for one that listens
                found.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def _cut_in_the_middle(rank, world, what):
    """(name, text) of the error of a call and of one after it, when a rank was cut off from the other node."""
    import deepc
    import torch.distributed as dist
    from deepc.errors import CommError

    odd = 3 if what == "uneven" else 2  # the first rank of the second node
    with on_node("host0" if rank < odd else "host1"):
        if what == "backend":
            group, ones = dist.new_group(), torch.ones(200_000)
        else:
            cfg = tiny.config(2, micro=2, deepc={"bucket_elems": 1})
            engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=cfg)
            assert engine.plan.transport == ("c10d" if what == "uneven" else "nodes")
    x, y = tiny.make_batch(0)

    def call() -> None:
        if what == "backend":
            dist.all_reduce(ones, group=group)
        else:
            engine.backward(engine(x[rank * 2 :][:2], y[rank * 2 :][:2]))
            assert engine.step().applied

    for _ in range(2):
        call()
    dist.barrier()
    if rank == odd:
        assert _cut_connections() > 0
    again = {
        "backend": lambda: call(),
        "engine": lambda: engine.group.barrier(),
        "uneven": lambda: engine.reducer.begin(True, False),
    }
    said = []
    for act in (call, again[what]):
        with pytest.raises(CommError) as caught:
            for _ in range(3):
                act()
        said.append((type(caught.value).__name__, str(caught.value)))
    return said


@pytest.mark.parametrize("what", ["engine", "backend", "uneven"])
def test_a_transport_that_fails_is_the_same_error_on_every_rank(what):
    """It names both ends, and stays."""
    results = _run_ranks(_cut_in_the_middle, 4, args=(what,), env={"DEEPC_LOG_LEVEL": "WARNING"}, timeout_s=60.0)
    said = {x for r in results for x in r}
    assert len(said) == 1, said
    name, text = said.pop()
    assert name == "RankDiedError" and "connection closed" in text
    ends = re.findall(r"rank \d \(pid \d+ on \S+, node (\d)\)", text)
    assert sorted(ends) == ["0", "1"], text


def _steps_of_torchs_optimizer(rank, world):
    import deepc

    torch.manual_seed(3)
    model = torch.nn.Linear(8, 4)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": {"stage": 3}}
    engine = deepc.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), config=config
    )[0]
    for step in range(3):
        engine.backward(engine(torch.full((2, 8), 0.1 * (step + rank))).square().mean())
        engine.step()
    weights = [engine.full_fp32_param(p).view(s) for p, s in zip(model.parameters(), ((4, 8), (4,)), strict=True)]
    engine.destroy()
    return weights


def test_torchs_optimizers_step_whole_parameters_of_unequal_nodes():
    """Those that are no longer than a rank's share: it has all of one, whose shape was gone."""
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(3):
            (model(torch.full((2, 8), 0.1 * (step + rank))).square().mean() / 3).backward()
        optimizer.step()
    for weights in run_ranks(_steps_of_torchs_optimizer, 3, nodes="aab"):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(weights, model.parameters(), strict=True))


def _sizes_of_gpu_ranks(rank, world):
    from deepc.comm import start
    from deepc.comm.groups import open_group

    found = []
    for nodes in ("0000", "0011"):
        with on_node(f"host{nodes[rank]}"):
            group = open_group(torch.device("cuda", 0), start.DEFAULT_TIMEOUT)
        found.append((group.transport, group.node, group.node_sizes, group.ranks_per_node))
        group.close()
    return found


def test_ranks_with_gpus_know_which_of_them_share_a_host():
    """Each has memory of its own; a host's disk and memory are for all of its ranks."""
    for rank, found in enumerate(run_ranks(_sizes_of_gpu_ranks, 4)):
        assert found == [("c10d", 0, (4,), 1), ("c10d", rank // 2, (2, 2), 1)]
