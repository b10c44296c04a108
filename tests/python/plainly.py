"""Training by plain PyTorch and by deepc of the same model on the same data, and their comparison.

A case is (make, batch, loss): make() -> a module with seeded values; batch(step) -> the whole batch, a dict of tensors;
loss(model, part, rank, step) -> a scalar loss, or a list of them, each with a backward of its own. Ranks take equal
parts of the batch in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

OPTIMIZERS = {
    # eps: a gradient that is truly zero (a key's bias) is rounding noise, which Adam with a small eps turns into steps
    # of size lr.
    "AdamW": {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    # What users have: torch's default eps. See `check` for what can be asked of it.
    "AdamW eps=1e-8": {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8},
}


def in_stages(stages: int) -> dict[str, Any]:
    """Of a configuration: a pipeline of so many stages. Its sample batch is for the cut alone: predicting memory takes
    longer than a tiny model trains."""
    return {"pipeline": {"stages": stages}, "deepc": {"memory_plan": "states"}} if stages > 1 else {}


def part_of(batch: dict[str, torch.Tensor], index: int, parts: int) -> dict[str, torch.Tensor]:
    """Part `index` of `parts` equal ones."""
    return {k: v.chunk(parts)[index] for k, v in batch.items()}


def as_list(loss: Any) -> list[torch.Tensor]:
    return list(loss) if isinstance(loss, (list, tuple)) else [loss]


def plain(
    make: Callable,
    batch: Callable,
    loss: Callable,
    steps: int,
    optimizer: str,
    parts: int = 1,
    prepare: Callable | None = None,
):
    """(losses, first gradients by name, weights by name). parts: how many parts the batch has (their losses are
    averaged); 1: the whole batch at once. A parameter without a gradient gets zeros, as in deepc. prepare(model, step):
    before each step."""
    model = make()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    opt = getattr(torch.optim, optimizer.split()[0])(trained.values(), **OPTIMIZERS[optimizer])
    losses, first = [], {}
    for step in range(steps):
        if prepare is not None:
            prepare(model, step)
        total = 0.0
        for r in range(parts):
            pieces = as_list(loss(model, part_of(batch(step), r, parts), r, step))
            (sum(pieces) / parts).backward()
            total += sum(x.item() for x in pieces) / parts
        for p in trained.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if step == 0:
            first = {n: p.grad.clone() for n, p in trained.items()}
        opt.step()
        opt.zero_grad()
        losses.append(total)
    return losses, first, {n: p.detach().clone() for n, p in model.named_parameters()}


def clipped(model: Any, optimizer: Any, next_loss: Callable[[], torch.Tensor], micro: int, steps: int, clip: float):
    """(losses, norms before clipping, {name: gradient of the first step before clipping}) of steps of `micro` losses
    each, of which the mean is trained."""
    losses, norms, grads = [], [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(micro):
            loss = next_loss() / micro
            loss.backward()
            total += float(loss.detach())
        grads = grads or {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(total)
    return losses, norms, grads


def config(stage: int, optimizer: str = "AdamW", gas: int = 1, **extra) -> dict:
    params = dict(OPTIMIZERS[optimizer])
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer.split()[0], "params": params},
        "zero_optimization": {"stage": stage},
        **extra,
    }


def engine(
    make: Callable, batch: Callable, loss: Callable, steps: int, cfg: dict, rank: int, world: int, way: str = "engine"
):
    """As `plain`, on an engine of deepc; and the engine. With accumulation, micro-batch m of rank r is part m * world +
    r. way: "engine" (engine.backward), "bare" (loss.backward()), "no_sync" (all but the last backward of a step inside
    no_sync())."""
    import contextlib

    import deepc
    import torch.distributed as dist

    e, _, _, _ = deepc.initialize(model=make(), config=cfg)
    gas = cfg["gradient_accumulation_steps"]
    losses, first = [], {}
    for step in range(steps):
        total = 0.0
        for m in range(gas):
            index = m * world + rank
            pieces = as_list(loss(e, part_of(batch(step), index, gas * world), index, step))
            for k, piece in enumerate(pieces):
                total += piece.item() / gas
                last = k == len(pieces) - 1
                with e.no_sync() if way == "no_sync" and not (last and m == gas - 1) else contextlib.nullcontext():
                    if way == "bare":
                        piece.backward(retain_graph=not last)
                    else:
                        e.backward(piece, retain_graph=not last)
            if step == 0 and m == gas - 1:
                first = {n: e.full_grad(p) for n, p in e.module.named_parameters() if p.requires_grad}
            result = e.step()
        assert result.applied, result
        mean = torch.tensor([total], dtype=torch.float64)
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    weights = {n: p.detach().clone() for n, p in e.module.named_parameters()}
    return losses, first, weights, e


def first_gradients(engine: Any, named: Callable[[str], str] = lambda name: name) -> dict[str, torch.Tensor]:
    """{named(name): gradient of the first step, whole, averaged and not clipped} of what this rank has; filled when
    that step is made."""
    away, grads, update = engine.elsewhere(), {}, engine.optimizer.update

    def seen(scale: Any) -> None:
        if not grads:
            here = ((n, p) for n, p in engine.module.named_parameters() if id(p) not in away)
            grads.update((named(n), engine.full_grad(p).float().clone()) for n, p in here)
        update(scale)

    engine.optimizer.update = seen
    return grads


def batch_loss(engine: Any, micro_batches: int, loss: Callable[[], torch.Tensor], data: Any, ranks: Any) -> float:
    """Trains on a batch: its mean loss over micro-batches and `ranks`. loss(): of the next micro-batch, where the
    engine is no pipeline's; data: an iterator of them, where it is."""
    if engine.mesh.pp > 1:
        return float(engine.train_batch(data))
    total = torch.zeros(1, dtype=torch.float64)
    for _ in range(micro_batches):
        mine = loss()
        engine.backward(mine)
        engine.step()
        total += mine.detach()
    return float(ranks.gather_all(total).mean() / micro_batches)


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check(got, want, optimizer: str, where: str = "") -> None:
    """Losses to 1e-6 relative, first gradients elementwise to 1e-5 of the tensor's largest; weights to 1e-5 in norm
    after AdamW, elementwise after SGD. At eps=1e-8 elements whose first gradient is not above rounding noise (zero in
    truth) may be anywhere that their steps can take them."""
    losses, first, weights = got[:3]
    want_losses, want_first, want_weights = want[:3]
    for step, (a, b) in enumerate(zip(losses, want_losses, strict=True)):
        assert math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-7), f"{where}: loss of step {step}: {a} and {b}"
    assert first.keys() == want_first.keys(), where
    # One rounding of the model's largest gradient: a scalar's is a sum that may cancel.
    noise = 1.2e-7 * max((largest(g) for g in want_first.values()), default=0.0)
    for name, g in want_first.items():
        torch.testing.assert_close(
            first[name], g, rtol=0, atol=1e-5 * largest(g) + noise, msg=lambda m: f"{where}: gradient {name}: {m}"
        )
    assert weights.keys() == want_weights.keys(), where
    if optimizer == "SGD":
        for name, w in want_weights.items():
            bound = 1e-5 * largest(w) + 1e-8
            torch.testing.assert_close(
                weights[name], w, rtol=0, atol=bound, msg=lambda m: f"{where}: weight {name}: {m}"
            )
        return
    apart = {n: (weights[n] - w).double().abs() for n, w in want_weights.items()}
    if optimizer == "AdamW eps=1e-8":
        reach = 2.2 * OPTIMIZERS[optimizer]["lr"] * len(losses)
        for name, g in want_first.items():
            lost = g.abs() <= 1e-4 * largest(g) + 10 * noise
            assert largest(apart[name]) <= reach, f"{where}: weight {name}: {largest(apart[name])} apart"
            apart[name] = apart[name].masked_fill(lost, 0.0)
    difference = math.sqrt(sum(float(d.square().sum()) for d in apart.values()))
    total = math.sqrt(sum(float(w.double().square().sum()) for w in want_weights.values()))
    assert difference <= 1e-5 * total, f"{where}: weights differ by {difference / total} in norm"


def adam_config(stage: int = 0, **more: Any) -> dict[str, Any]:
    """A small ds_config.json for one sample at a time."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
        **more,
    }
