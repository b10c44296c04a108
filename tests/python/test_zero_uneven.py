"""zero.Init where ranks share no memory (nodes with different numbers of ranks): each keeps its part of what is
built."""

from __future__ import annotations

import pytest
import tiny
import torch
from ranks import for_this_job
from ranks import run_quietly as run_ranks
from test_engine import same_bits
from test_nodes import on_node
from test_zero import MIB, Experts, Odd, check_copied, copied, llama, watched
from torch import nn


def uneven(rank: int):
    return on_node("a" if rank < 2 else "b")


def keep(nbytes: int) -> None:
    """Of parameters that stay whole while a model is built, besides the last one."""
    from deepc.zero import shards as init_shards

    for_this_job(init_shards, "KEEP", nbytes)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    import deepc

    with deepc.zero.GatheredParameters(model):
        return {n: t.detach().clone() for n, t in model.state_dict().items()}


# ---- what constructors do --------------------------------------------------------------------------------------------
def _odd(rank, world, room):
    import deepc
    from deepc.errors import ReleasedParameterError, StrayWriteError

    keep(room)
    with uneven(rank):
        torch.manual_seed(5 + rank)
        with deepc.zero.Init():
            model = Odd()
            with deepc.zero.Init(dtype=torch.bfloat16):
                inner = nn.Linear(4, 4)
            with deepc.zero.GatheredParameters([inner.bias, model.free], modifier_rank=1), torch.no_grad():
                inner.bias.fill_(rank)
        drawn = float(torch.rand(1))
        model.lazy = None
        p = model.emb.weight
        assert (
            deepc.zero.is_zero_param(p)
            and p.ds_status is deepc.zero.ZeroParamStatus.NOT_AVAILABLE
            and p.ds_shape == p.shape == (17, 8)
        )
        assert model.tied is model.lin.weight and inner.weight.dtype == torch.bfloat16 and "released" in repr(p)
        with pytest.raises(ReleasedParameterError, match="GatheredParameters"):
            p + 1
        built = whole(model)
        with deepc.zero.GatheredParameters([p], modifier_rank=2), torch.no_grad():
            p.fill_(rank)
        with pytest.raises(StrayWriteError), deepc.zero.GatheredParameters([p]), torch.no_grad():
            p.add_(1)
        with deepc.zero.GatheredParameters([inner.bias]):
            assert inner.bias.tolist() == [1.0] * 4
            with deepc.zero.GatheredParameters([inner.bias], modifier_rank=2), torch.no_grad():
                inner.bias.fill_(rank)
            assert inner.bias.tolist() == [2.0] * 4
        return built, drawn, whole(model)["emb.weight"]


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_init_follows_whatever_constructors_do(room):
    torch.manual_seed(5)
    model = Odd()
    nn.Linear(4, 4)
    drawn = float(torch.rand(1))
    model.lazy = None
    want = model.state_dict()
    ranks = run_ranks(_odd, 3, room)
    assert ranks[0][1] == drawn
    for state, _, written in ranks:
        assert torch.equal(written, torch.full_like(written, 2.0))
        assert state.keys() == want.keys()
        for n, t in state.items():
            if n != "running":  # a buffer: each rank's own until initialize
                assert torch.equal(t, want[n]), n


def _copied(rank, world, room):
    keep(room)
    with uneven(rank):
        return copied(rank, world)


@pytest.mark.parametrize("room", [0, pytest.param(1 << 30, marks=pytest.mark.full)])
def test_copies_and_second_objects_over_one_memory(room):
    check_copied(run_ranks(_copied, 3, room))


def _alone(rank, world):
    import deepc
    from deepc.errors import MismatchError

    keep(0)
    with uneven(rank), pytest.raises(MismatchError, match="rank 1 touches parameter 1") as caught:
        with deepc.zero.Init():
            first, second = nn.Linear(8, 8), nn.Linear(8, 8)  # noqa: F841
            if rank == 1:
                first.weight.sum()
            nn.Linear(8, 8)
    return str(caught.value)


def test_a_rank_that_does_something_else_is_an_error_on_all():
    said = run_ranks(_alone, 3)
    assert len(set(said)) == 1


# ---- memory, and the engine ------------------------------------------------------------------------------------------
def _memory(rank, world):
    import deepc

    keep(0)
    width, count = 1024, 20
    with uneven(rank), watched() as peak:
        with deepc.zero.Init():
            torch.manual_seed(rank)
            model = Experts(count, width)
        top = peak()
        cfg = tiny.config(3, micro=2)
        engine = deepc.initialize(model=model, config=cfg)[0]
        engine.backward(engine(torch.ones(2, width)))
        assert engine.step().applied
        engine.destroy()
    return top, count * width * width * 4, width * width * 4


@pytest.mark.full
def test_no_rank_holds_the_model():
    for top, total, largest in run_ranks(_memory, 3):
        assert top <= total / 3 + 3 * largest + 4 * MIB < total, (
            f"{top / MIB:.1f} MiB of private memory for a model of {total / MIB:.0f}"
        )


def _training(rank, world, stage, precision, init):
    import deepc

    keep(0)
    cfg = tiny.config(stage, micro=2, precision=precision, deepc={"bucket_elems": 12288})
    cfg["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with uneven(rank):
        with deepc.zero.Init(enabled=init, config_dict_or_path=cfg):
            model = tiny.make_model(seed=rank, layers=3, frozen=True)
        engine = deepc.initialize(model=model, config=cfg, sample_batch=tiny.make_batch(0, 2))[0]
        assert engine.plan.transport == "c10d"
    losses = []
    for step in range(2):
        x, y = tiny.make_batch(step, 2 * world)
        losses.append(engine(x[2 * rank :][:2], y[2 * rank :][:2]))
        engine.backward(losses[-1])
        engine.step()
    state = {n: t.clone() for n, t in engine.module.state_dict().items()}
    engine.destroy()
    return [v.item() for v in losses], state


def _with_and_without(rank, world, cases):
    return [[_training(rank, world, *case, init) for init in (False, True)] for case in cases]


@pytest.mark.full
def test_training_has_the_same_bits_as_without_init():
    for cases in run_ranks(_with_and_without, 3, [(3, "fp32"), (2, "fp32")]):
        for without, built in cases:
            assert without[0] == built[0]
            same_bits(without[1], built[1])


# ---- transformers ----------------------------------------------------------------------------------------------------
def _from_hub(rank, world, folder):
    import deepc
    import transformers

    keep(0)
    with uneven(rank):
        transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-small")  # all that is imported at the first use
        with watched() as peak:
            with deepc.zero.Init():
                model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            loaded = peak()
        values = whole(model)
        with watched() as peak:
            with deepc.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
                torch.manual_seed(3 + rank)
                built = transformers.AutoModelForCausalLM.from_config(model.config)
            made = peak()
        fresh = whole(built)
        total = sum(p.numel() for p in model.parameters()) * 4
        engine = deepc.initialize(model=model.train(), config=tiny.config(3, micro=2))[0]
        ids = torch.arange(2 * 7).view(2, 7) + rank
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        assert engine.step().applied
        engine.destroy()
    return loaded, made, total, values, fresh


@pytest.mark.full
def test_transformers_builds_and_loads_parts(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(llama(tie_word_embeddings=True))
    folder = str(tmp_path / "model")
    source.save_pretrained(folder, max_shard_size="8MB")
    small = llama(num_hidden_layers=1, vocab_size=50, hidden_size=64, intermediate_size=64)
    transformers.AutoModelForCausalLM.from_config(small).save_pretrained(f"{folder}-small")
    torch.manual_seed(3)
    made_here = transformers.AutoModelForCausalLM.from_config(llama(tie_word_embeddings=True)).state_dict()
    for rank, (loaded, made, total, values, fresh) in enumerate(run_ranks(_from_hub, 3, folder)):
        same_bits(values, source.state_dict())
        same_bits(fresh, {n: t.bfloat16() for n, t in made_here.items()})
        for what, top in (("load", loaded), ("build", made)):
            assert top < 0.6 * total, f"rank {rank}: {top / MIB:.1f} MiB private to {what} {total / MIB:.0f}"
