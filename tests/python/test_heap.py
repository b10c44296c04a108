"""A training step pays no page faults after the first ones: malloc keeps what it frees (ops/base/heap.c)."""

from __future__ import annotations

import resource

import pytest

from ranks import run_ranks

SETTLE, STEPS = 6, 5


def faults_per_step(rank: int, world: int, stage: int, bf16: bool) -> list[int]:
    """Minor faults of this process in each of STEPS steps, after SETTLE others."""
    import torch

    import deepc
    from tiny import TinyGPT

    torch.manual_seed(0)
    model = TinyGPT(width=128, layers=2, vocab=8192, context=128)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage},
              "bf16": {"enabled": bf16}, "gradient_clipping": 1.0}
    engine = deepc.initialize(model=model, config=config)[0]
    x = torch.randint(8192, (4, 129), generator=torch.Generator().manual_seed(rank))
    out = []
    for _ in range(SETTLE + STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(engine(x[:, :-1], x[:, 1:]))
        engine.step()
        out.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    engine.destroy()
    return out[SETTLE:]


# Python's own objects may take a fresh arena (256 pages) now and then: the median step has none of that.
@pytest.mark.parametrize("stage, bf16, world", [(3, False, 2), (3, True, 2), (0, False, 1)])
def test_a_step_touches_no_fresh_memory(stage: int, bf16: bool, world: int) -> None:
    for faults in run_ranks(faults_per_step, world, args=(stage, bf16), fresh=True):
        assert sorted(faults)[len(faults) // 2] <= 4, faults


@pytest.mark.parametrize("env", [{"DEEPC_KEEP_HEAP": "0"}, {"MALLOC_MMAP_THRESHOLD_": "131072"}])
def test_who_wants_it_returned_gets_it_returned(env: dict[str, str]) -> None:
    (faults,) = run_ranks(faults_per_step, 1, args=(0, False), fresh=True, env=env)
    assert sorted(faults)[len(faults) // 2] > 100, faults


def trimmed(rank: int, world: int) -> tuple[int, int]:
    import torch

    from deepc import memory

    memory.keep_heap()
    tensor = torch.ones(16 << 20)
    del tensor
    kept = memory.process_bytes()["rss_bytes"]
    memory.trim_heap()
    return kept, memory.process_bytes()["rss_bytes"]


def test_trim_gives_back() -> None:
    ((kept, after),) = run_ranks(trimmed, 1, fresh=True)
    assert kept - after > 50 << 20
