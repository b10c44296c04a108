"""The ds_config.json that `deepc plan --cluster --write` gives trains: with it, on as many CPU ranks as were described,
a tiny model has the losses of torch in one process."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from deepc.cli import main
from plainly import batch_loss
from ranks import run_ranks as _run_ranks

STEPS, BATCH, LAYERS, HEADS, VOCABULARY, TOKENS = 2, 16, 8, 8, 61, 8


def run_ranks(fn, world, *args, nodes=""):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, nodes=nodes)


def model_of():
    import transformers as t

    torch.manual_seed(1)
    sizes = dict(hidden_size=2 * HEADS, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=2)
    shape = dict(vocab_size=VOCABULARY, intermediate_size=44, num_hidden_layers=LAYERS, max_position_embeddings=TOKENS)
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, **shape)).train()


def micro_batches(micro, replica=0, replicas=1):
    """Endless: those of a replica. The samples of a step are the same for any number of them."""
    draw = torch.Generator().manual_seed(5)
    while True:
        ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=draw)
        for part in ids.chunk(replicas)[replica].split(micro):
            yield {"input_ids": part, "labels": part}


def _by_torch(rank, world):
    model, data, losses = model_of(), micro_batches(BATCH), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        loss = model(**next(data)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def by_torch():
    return run_ranks(_by_torch, 1)[0]


def _by_plans(rank, world, plans):
    """Losses of each (layout, config) in turn."""
    import deepc
    from deepc.plan.mesh import Mesh

    found = []
    for layout, config in plans:
        mesh = Mesh(**{axis: layout[axis] for axis in ("dp", "tp", "pp")})
        model = model_of()
        if layout["recompute"]:  # as the note of the plan says
            model.gradient_checkpointing_enable()
        sample = next(micro_batches(layout["micro"])) if mesh.pp > 1 else None
        if sample is not None:  # it is for the cut alone
            config = {**config, "deepc": {**config.get("deepc", {}), "memory_plan": "states"}}
        engine, *_ = deepc.initialize(model=model, config=config, sample_batch=sample)
        assert (engine.mesh.dp, engine.mesh.tp, engine.mesh.pp) == (mesh.dp, mesh.tp, mesh.pp)
        data = micro_batches(layout["micro"], mesh.coordinates(rank).dp, mesh.dp)
        loss = functools.partial(lambda e, d: e(**next(d)).loss, engine, data)
        found.append([batch_loss(engine, layout["accumulation"], loss, data, engine.group) for _ in range(STEPS)])
        engine.destroy()
    return found


def planned(tmp_path, capsys, nodes, options):
    """(layout, ds_config.json) of a cluster of nodes with so many ranks, as the command writes it."""
    cpu = {
        "flops": {"fp32": "60 GFLOP/s"}, "memory": {"host": "16 GiB"}, "bandwidth": {"device": "8 GB/s"},
        "link": {"bandwidth": "4 GB/s"},
    }  # fmt: skip
    file, ds = tmp_path / "cluster.json", tmp_path / "ds_config.json"
    file.write_text(json.dumps({"network": {"bandwidth": "1 GB/s"}, "nodes": [{**cpu, "ranks": n} for n in nodes]}))
    sizes = f"layers={LAYERS},hidden={2 * HEADS},heads={HEADS},vocab={VOCABULARY},seq={TOKENS},inner=44,gated=1"
    command = ["plan", "--cluster", str(file), "--model", sizes, "--batch", str(BATCH), "--write", str(ds), "--json"]
    capsys.readouterr()
    assert main([*command, "--sp", "1", *options.split()]) == 0
    shown = json.loads(capsys.readouterr().out)
    config = json.loads(ds.read_text())
    assert config == shown["config"]
    assert not [n for n in shown["notes"] if "does not run this" in n or "do not exist" in n], shown["notes"]
    return shown["layout"], config


CASES = {  # nodes, by their ranks -> options
    (2, 2): ["--dp 2 --pp 2 --stage 1 --micro 2 --recompute yes --pipeline-schedule 1f1b"]
}
MORE = {
    (2,): [
        "",  # the fastest
        "--dp 2 --stage 0 --micro 8",
        "--dp 2 --stage 1 --micro 1 --recompute yes",
        "--dp 2 --stage 2 --micro 4",
        "--tp 2 --stage 0 --micro 16",
        "--pp 2 --micro 2 --pipeline-schedule gpipe",
        "--pp 2 --micro 2 --pipeline-schedule interleaved",
        "--pp 2 --micro 2 --pipeline-schedule zb-h1",
        "--pp 2 --micro 2 --pipeline-schedule zb-v --stage 1",
    ],
    (2, 2): [
        "",
        "--dp 2 --tp 2 --stage 3 --micro 2",
        "--dp 4 --stage 3 --micro 1",
        "--pp 4 --micro 4 --pipeline-schedule 1f1b",
        "--pp 2 --dp 2 --stage 3 --micro 1 --pipeline-schedule interleaved",
        "--pp 2 --tp 2 --stage 0 --micro 2 --pipeline-schedule zb-h1",
    ],
    (3, 1): ["--dp 4 --stage 1 --micro 2 --even", "--dp 2 --pp 2 --stage 3 --micro 2 --even"],
    (4, 4): ["", "--dp 2 --tp 2 --pp 2 --stage 1 --micro 2 --recompute yes --pipeline-schedule 1f1b"],
}


@pytest.mark.parametrize(
    "nodes, options",
    [
        *(pytest.param(n, o, id=f"{n}") for n, o in CASES.items()),
        *(pytest.param(n, o, id=f"{n}, more", marks=pytest.mark.full) for n, o in MORE.items()),
    ],
)
def test_a_plan_trains_as_one_process(tmp_path, capsys, nodes, options):
    pytest.importorskip("transformers")
    plans = [planned(tmp_path, capsys, nodes, o) for o in options]
    letters = "".join("ABCD"[i] * n for i, n in enumerate(nodes)) if len(nodes) > 1 else ""
    for rank, losses in enumerate(run_ranks(_by_plans, sum(nodes), plans, nodes=letters)):
        for option, mine in zip(options, losses, strict=True):
            assert mine == pytest.approx(by_torch(), rel=1e-6), f"rank {rank} of nodes {nodes}: {option or 'any'}"
