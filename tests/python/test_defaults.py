"""torch.set_default_dtype and torch.set_default_device are the user's: a tensor whose memory deepc's C code or a peer
gets says itself which dtype it has and where it lies."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import for_this_job, placed, run_ranks

PACKAGE = Path(__file__).resolve().parents[2] / "python/deepc"
OF_FLOATS = {"empty", "zeros", "ones", "full", "eye", "linspace", "rand", "randn"}  # take the default dtype
PLACED = OF_FLOATS | {"tensor", "as_tensor", "arange", "randint", "randperm"}  # and these the default device alone


def maker(call: ast.Call) -> str:
    """empty of torch.empty(...) and of functools.partial(torch.empty, ...); "" of anything else."""
    is_partial = call.args and ast.unparse(call.func) in ("partial", "functools.partial")
    package, _, name = ast.unparse(call.args[0] if is_partial else call.func).rpartition(".")
    return name if package == "torch" else ""


def leaves_out(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, given = maker(node), {k.arg for k in node.keywords}
        for keyword, those in (("dtype", OF_FLOATS), ("device", PLACED)):
            if name in those and keyword not in given:
                found.append(f"{node.lineno}: {ast.unparse(node)} has no {keyword}=")
    return found


def test_every_tensor_says_its_dtype_and_its_device():
    assert len(leaves_out("torch.empty(3); functools.partial(torch.zeros, dtype=d); torch.arange(n, dtype=i)")) == 4
    found = [f"{path.relative_to(PACKAGE)}:{x}" for path in PACKAGE.rglob("*.py") for x in leaves_out(path.read_text())]
    assert not found, "\n".join(found)


class Small(torch.nn.Module):
    """Two matrices, one of them with factors of several lines, in fp32 on the CPU whatever the defaults are."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator(device="cpu").manual_seed(0)
        make = {"generator": draw, "dtype": torch.float32, "device": "cpu"}
        self.up = torch.nn.Parameter(torch.randn(300, 40, **make) * 0.1)
        self.down = torch.nn.Parameter(torch.randn(40, 300, **make) * 0.1)

    def forward(self, x):
        return (torch.relu(x @ self.down) @ self.up).square().mean()


OPTIMIZERS = {
    "Adafactor": {"type": "Adafactor", "params": {"lr": 1e-2}},
    "AdamW int8": {"type": "AdamW", "params": {"lr": 1e-2, "state_dtype": "int8"}},
}


def collectives(rank: int) -> dict[str, torch.Tensor]:
    made = {"dtype": torch.bfloat16, "device": "cpu"}
    found = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG)):
        x = torch.arange(70001, **made) * (rank + 1)
        dist.all_reduce(x, op)
        found[name] = x
    rows = [torch.zeros(4097, **made) for _ in range(2)]
    dist.all_gather(rows, torch.full((4097,), float(rank), **made))
    found["rows"] = torch.stack(rows)
    texts = [None, None]
    dist.all_gather_object(texts, rank)
    assert texts == [0, 1]
    return found


def trained(rank: int, optimizer: dict, stage: int) -> dict[str, torch.Tensor]:
    import deepc

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer,
    }
    engine = deepc.initialize(model=Small(), config=config)[0]
    draw = torch.Generator(device="cpu").manual_seed(rank)
    for _ in range(3):
        x = torch.randn(5, 40, generator=draw, dtype=torch.float32, device="cpu")
        engine.backward(engine(x @ torch.eye(40, dtype=torch.float32, device="cpu")))
        engine.step()
    return {n: p.clone() for n, p in engine.module_state_dict().items()}


def under(rank, world, folder, nodes, optimizers, stage):
    """What collectives and engines give with torch's defaults and with the worst ones: the same bits."""
    real = os.sched_getaffinity
    # as if there were cores to spare: then opening a group measures
    for_this_job(os, "sched_getaffinity", lambda pid: {*real(pid), *range(100, 110)})
    said = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta")):
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            with placed(rank, nodes):
                dist.init_process_group("deepc", init_method=f"file://{folder}/{device}", rank=rank, world_size=world)
                found = collectives(rank)
                for name in optimizers:
                    for n, p in trained(rank, OPTIMIZERS[name], stage).items():
                        found[f"{name}: {n}"] = p
                dist.destroy_process_group()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        said.append(found)
    for name, value in said[0].items():
        assert torch.equal(value, said[1][name]), name


@pytest.mark.parametrize("nodes", ["", "01"])
def test_groups_and_engines_under_other_defaults(nodes, tmp_path):
    run_ranks(under, 2, backend=None, args=(str(tmp_path), nodes, list(OPTIMIZERS), 2))


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_engines_of_every_stage_under_other_defaults(stage, tmp_path):
    run_ranks(under, 2, backend=None, args=(str(tmp_path), "", list(OPTIMIZERS), stage))


def test_a_step_counter_counts_beyond_256():
    """bf16 has no 257."""
    import deepc

    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    try:
        opt = deepc.optim.AdamW([p], lr=1e-3)
        for _ in range(260):
            p.grad = torch.ones_like(p)
            opt.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert opt.state[p]["step"].item() == 260
