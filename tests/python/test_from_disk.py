"""Weights on disk at work (ZeRO-Inference): the same tokens and logits as in memory, whatever the room, on ranks that
generate each for themselves; what comes ahead and what stays; and models larger than the memory."""

from __future__ import annotations

import os

import deepc
import pytest
import tiny
import torch
from benches import rows_of_limited
from deepc.errors import ArgumentError, CheckpointError, ConfigError, UnsupportedError
from ranks import placed
from ranks import run_ranks as _run_ranks
from test_export import make
from test_precision import Added, buffers_of


def run_ranks(fn, world, *args, **kw):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **kw)


def on_disk(folder, elements: int = 0, **keys) -> dict:
    """A zero_optimization section; elements: that may be in memory."""
    where = {"device": "nvme", "nvme_path": str(folder)}
    return {"offload_param": {**where, "max_in_cpu": elements} if elements else where, **keys}


BIG = dict(width=64, layers=8)
BLOCK = 12 * 64 * 64 + 64 * 9  # elements of a block of it


# ---- the same as in memory -------------------------------------------------------------------------------------------
def _generate(rank, world, folder, checkpoint, dtype):
    probe, begin, more = tiny.make_batch(rank)[0], 3 + rank, 4 + 3 * (rank % 2)
    plain = deepc.inference(make(**BIG), checkpoint=checkpoint, dtype=dtype)
    want = plain(probe), plain.generate(probe[:1, :begin], more)
    rows = []
    small = {"stage3_param_persistence_threshold": 100}
    for elements in (1, 4 * BLOCK, 6 * BLOCK, 0):
        with torch.device("meta") if elements == 1 else torch.device("cpu"):
            model = make(seed=9, **BIG)
        served = deepc.inference(model, checkpoint=checkpoint, dtype=dtype, zero=on_disk(folder, elements, **small))
        assert torch.equal(served(probe), want[0])
        before = served.trainer.state.streamed.stats()
        for _ in range(2):
            assert torch.equal(served.generate(probe[:1, :begin], more), want[1])
        after = served.trainer.state.streamed.stats()
        rows.append({k: after[k] - before[k] for k in ("gathers", "prefetched", "order_misses")})
        rows[-1] |= {k: after[k] for k in ("live_elems_max", "persistent_elems", "total_elems", "units")}
        assert not served.module.training and all(p.dtype == served.dtype for p in served.module.parameters())
        assert served.weight_bytes() == plain.weight_bytes()
        served.destroy()
    assert os.listdir(folder) == [] or world > 1
    return rows


@pytest.mark.parametrize("world, dtype", [pytest.param(1, "fp32", marks=pytest.mark.full), (2, "bf16")])
def test_the_same_tokens_with_any_room(world, dtype, tmp_path):
    (tmp_path / "disk").mkdir()
    deepc.export(make(seed=2, **BIG), tmp_path / "model")
    ranks = run_ranks(_generate, world, str(tmp_path / "disk"), str(tmp_path / "model"), dtype)
    for rank, (bare, few, some, roomy) in enumerate(ranks):
        passes = 2 * (4 + 3 * rank)
        assert bare["gathers"] >= passes * 8 and bare["prefetched"] == 0, "room for what is needed alone"
        assert few["prefetched"] >= 0.8 * few["gathers"], "pass after pass is read ahead"
        assert few["gathers"] > 7 * passes and few["live_elems_max"] <= 4 * BLOCK and few["order_misses"] == 0
        assert bare["persistent_elems"] == few["persistent_elems"] < BLOCK
        assert BLOCK < some["persistent_elems"] < some["live_elems_max"] <= 6 * BLOCK and some["prefetched"] > 0
        assert few["gathers"] > some["gathers"] > 0
        assert roomy["gathers"] == 0 and roomy["persistent_elems"] == roomy["total_elems"], "all of it stays"


def test_a_buffer_that_meets_other_parameters_is_told_wherever_the_weights_are(tmp_path):
    def added():
        return torch.nn.Sequential(Added(), torch.nn.Conv1d(2, 4, 1))

    for served, cure in (
        (deepc.inference(added(), dtype="bf16"), "model.to(...) before deepc.inference"),
        (deepc.inference(added(), dtype="bf16", zero=on_disk(tmp_path)), "model.to(...) before deepc.inference"),
        (deepc.inference(buffers_of("bf16", 2, added())), '"data_types": {"buffer_dtype": "bf16"}'),
    ):
        with pytest.raises(RuntimeError) as told:
            served(torch.ones(2, 2, 5))
        assert "'0.pos' is float32" in told.value.__notes__[0] and cure in told.value.__notes__[0]
        served.destroy()
        if served.trainer is not None:
            served.trainer.destroy()


def _trainer(rank, world, folder):
    cfg = tiny.config(3, micro=2)
    cfg["zero_optimization"].update(on_disk(folder, stage3_param_persistence_threshold=100))
    engine = deepc.initialize(model=make(**BIG), config=cfg)[0]
    plain = deepc.initialize(model=make(**BIG), config=tiny.config(3, micro=2))[0]
    told = []
    for step in range(2):
        x, y = tiny.make_batch(step, 2)
        texts = [deepc.inference(e).generate(x[:1, : 4 + rank], 3 + rank) for e in (engine, plain)]
        assert torch.equal(*texts)
        told.append(engine.state.streamed.stats())
        for e in (engine, plain):
            e.backward(e(x, y))
            e.step()
    a, b = (deepc.inference(e)(x) for e in (engine, plain))
    assert torch.equal(a, b)
    for e in (engine, plain):
        e.destroy()
    return told


def test_an_engine_that_trains_generates_between_its_steps(tmp_path):
    """What fits stays for the next token, and is read again after a step."""
    for rank, (first, second) in enumerate(run_ranks(_trainer, 2, str(tmp_path))):
        assert first["gathers"] <= 2 * first["units"] < (3 + rank) * first["units"]
        assert second["gathers"] > first["gathers"]


def _placed(rank, world, nodes, run, *args):
    with placed(rank, nodes):
        return run(rank, world, *args)


@pytest.mark.full
@pytest.mark.parametrize("nodes", ["01", "0011"])
def test_each_node_has_the_weights(nodes, tmp_path):
    (tmp_path / "disk").mkdir()
    deepc.export(make(seed=2, **BIG), tmp_path / "model")
    run_ranks(_checkpoint, 1, str(tmp_path / "checkpoint"))
    world = len(nodes)
    run_ranks(_placed, world, nodes, _loads, str(tmp_path / "disk"), str(tmp_path / "checkpoint"))
    run_ranks(_placed, world, nodes, _generate, str(tmp_path / "disk"), str(tmp_path / "model"), "bf16")
    run_ranks(_placed, world, nodes, _trainer, str(tmp_path / "disk"))


# ---- int8 ------------------------------------------------------------------------------------------------------------
def _int8(rank, world, folder, exported, dtype):
    """int8 weights from an int8 file, from a file of another dtype, from memory and from zero.Init's disk: the logits
    and tokens of int8 in memory, and its bytes."""
    made = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    probe, zero = tiny.make_batch(rank)[0], on_disk(folder, 1, stage3_param_persistence_threshold=100)
    kept = dict(keep=["blocks.3.up.weight"])
    want = {
        name: deepc.inference(make(seed=9, **BIG).to(made), checkpoint=f"{exported}/{name}", dtype="int8", **options)
        for name, options in (("int8", {}), ("fp32", kept))
    }
    want["built"] = deepc.inference(make(seed=2, **BIG), dtype="int8", **kept)  # first values are drawn in fp32
    with torch.device("meta"):
        bare = make(**BIG).to(made)
    with deepc.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3, **zero}}):
        built = make(seed=2, **BIG)
    runs = [
        ("int8", deepc.inference(bare, checkpoint=f"{exported}/int8", zero=zero)),
        (
            "fp32",
            deepc.inference(
                make(seed=3, **BIG).to(made), checkpoint=f"{exported}/fp32", dtype="int8", zero=zero, **kept
            ),
        ),
        ("fp32", deepc.inference(make(seed=2, **BIG).to(made), dtype="int8", zero=zero, **kept)),
        ("built", deepc.inference(built, dtype="int8", zero=zero, **kept)),
    ]
    for at, (name, served) in enumerate(runs):
        plain = want[name]
        assert torch.equal(served(probe), plain(probe)), at
        assert torch.equal(served.generate(probe[:1, :3], 4 + rank), plain.generate(probe[:1, :3], 4 + rank)), at
        assert served.weight_bytes() == plain.weight_bytes()
        weights = [
            (p.dtype, q.dtype, p.shape == q.shape)
            for p, q in zip(served.module.parameters(), plain.module.parameters())
        ]
        assert all(a == b and same for a, b, same in weights) and {torch.int8, torch.float32, served.dtype} == {
            a for a, _, _ in weights
        }
        state = served.module.state_dict()
        assert all(torch.equal(state[n], t) for n, t in plain.module.state_dict().items()), at
        stats = served.trainer.state.streamed.stats()
        assert stats["gathers"] > 8 and stats["persistent_elems"] < BLOCK
        size = served.trainer.state.disk.array.nbytes
        assert size < 1.1 * plain.weight_bytes() + 4096 * 4 * len(weights)
    deepc.export(runs[1][1], f"{exported}/again", dtype="int8", **kept)
    deepc.export(runs[1][1], f"{exported}/wide", dtype="fp32")
    again = deepc.inference(make(**BIG).to(made), checkpoint=f"{exported}/again")
    wide = deepc.inference(make(**BIG), checkpoint=f"{exported}/wide")
    assert torch.equal(again(probe), want["fp32"](probe))
    q = want["fp32"].module.blocks[2].up
    assert torch.equal(wide.module.blocks[2].up.weight, q.weight.float() * q.weight_scale)
    for _, served in runs:
        served.destroy()


@pytest.mark.parametrize("world, dtype", [(2, "bf16"), pytest.param(1, "fp32", marks=pytest.mark.full)])
def test_int8_weights_on_disk_are_those_in_memory(world, dtype, tmp_path):
    (tmp_path / "disk").mkdir()
    for kind in ("fp32", "int8"):
        deepc.export(make(seed=2, **BIG), tmp_path / "model" / kind, dtype=kind)
    run_ranks(_int8, world, str(tmp_path / "disk"), str(tmp_path / "model"), dtype)


# ---- DeepSpeed's forms, Hugging Face ---------------------------------------------------------------------------------
def _as_deepspeed(rank, world, folder, source):
    import deepc.compat.deepspeed as deepspeed
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    ids = torch.arange(6).view(1, 6) + rank
    options = dict(max_new_tokens=4 + rank, do_sample=False, pad_token_id=0)
    kind = transformers.AutoModelForCausalLM
    want = kind.from_pretrained(source, dtype=torch.bfloat16).generate(ids, **options)
    out = []

    cfg = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **on_disk(folder, 1, stage3_param_persistence_threshold=0)},
    }
    living = HfDeepSpeedConfig(cfg)
    model = kind.from_pretrained(source, dtype=torch.bfloat16)
    engine = deepspeed.initialize(model=model, config=cfg)[0]
    engine.module.eval()
    out.append(engine.module.generate(ids, **options, synced_gpus=world > 1))
    parameters = {type(p).__name__ for p in model.parameters()}
    frequencies = model.model.rotary_emb.inv_freq.dtype
    engine.destroy()
    del living

    model = kind.from_pretrained(source, dtype=torch.bfloat16)
    frequencies_of_plain = model.model.rotary_emb.inv_freq.dtype
    plain = deepspeed.init_inference(kind.from_pretrained(source), dtype=torch.bfloat16)
    served = deepspeed.init_inference(model.float(), dtype=torch.bfloat16, zero={"stage": 3, **on_disk(folder, 1)})
    out.append(served.generate(ids, **options))
    assert torch.equal(served(ids).logits, plain(ids).logits)
    served.destroy()
    return want, out, parameters, frequencies == frequencies_of_plain


def test_deepspeeds_forms_with_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    from test_zero import llama

    torch.manual_seed(0)
    small = llama(num_hidden_layers=3, vocab_size=64, hidden_size=64, intermediate_size=128)
    transformers.AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "model")
    (tmp_path / "disk").mkdir()
    for want, (streamed, served), kinds, same_buffers in run_ranks(
        _as_deepspeed, 2, str(tmp_path / "disk"), str(tmp_path / "model")
    ):
        assert torch.equal(streamed, want), "as plain transformers in bf16"
        assert served.shape == want.shape and same_buffers
        assert any("Released" in k for k in kinds)


# ---- what is read, and what is refused -------------------------------------------------------------------------------
def _loads(rank, world, folder, checkpoint):
    """From a checkpoint of training, from a module in memory, from one that zero.Init has built on disk; another
    dtype than the model's."""
    probe = tiny.make_batch(3)[0]
    zero = {"stage": 3, **on_disk(folder, 1)}
    want = deepc.inference(make(seed=9), checkpoint=checkpoint, dtype="fp16")(probe)
    found = [deepc.inference(make(seed=9), checkpoint=checkpoint, dtype="fp16", zero=zero)]
    plain = deepc.inference(make(seed=4), checkpoint=checkpoint)
    found.append(deepc.inference(plain.module, dtype="fp16", zero=zero))
    with deepc.zero.Init(config_dict_or_path={"zero_optimization": zero}):
        built = make(seed=5)
    found.append(deepc.inference(built, checkpoint=checkpoint, dtype="fp16", zero=zero))
    for served in found:
        assert torch.equal(served(probe), want)
    names = deepc.export(found[0], f"{folder}-again", dtype="fp16")
    assert torch.equal(deepc.inference(make(seed=6), checkpoint=f"{folder}-again", dtype="fp16")(probe), want)
    for served in found:
        served.destroy()
    return names


def _checkpoint(rank, world, folder):
    engine = deepc.initialize(model=make(seed=1), config=tiny.config(2, micro=4))[0]
    engine.save_checkpoint(folder)
    engine.destroy()


def test_where_weights_come_from(tmp_path):
    (tmp_path / "disk").mkdir()
    run_ranks(_checkpoint, 1, str(tmp_path / "checkpoint"))
    assert run_ranks(_loads, 2, str(tmp_path / "disk"), str(tmp_path / "checkpoint"))[0] == ["model.safetensors"]


def _refused(rank, world, folder, checkpoint):
    zero = on_disk(folder)
    said = []
    for error, given in (
        (ConfigError, dict(zero={"stage": 2, **zero})),
        (ConfigError, dict(zero={"offload_param": {"device": "nvme"}})),
        (CheckpointError, dict(zero=zero, checkpoint=checkpoint)),
    ):
        with pytest.raises(error) as caught:
            deepc.inference(make(layers=3), **given)
        said.append(str(caught.value))
    with pytest.raises(UnsupportedError, match="float64"):
        deepc.inference(make().double(), zero=zero)
    with pytest.raises(ArgumentError, match="meta device"), torch.device("meta"):
        deepc.inference(make(), zero=zero)
    return said


def test_what_is_refused(tmp_path):
    deepc.export(make(), tmp_path / "model")
    said = run_ranks(_refused, 1, str(tmp_path), str(tmp_path / "model"))[0]
    for text, wanted in zip(said, ("stage", "nvme_path", "missing"), strict=True):
        assert wanted in text


def _damaged(rank, world, folder):
    from deepc.errors import DamagedError

    served = deepc.inference(make(**BIG), zero=on_disk(folder, 4 * BLOCK, stage3_param_persistence_threshold=100))
    probe = tiny.make_batch(3)[0]
    want = served.generate(probe[:1, :3], 4)
    disk = served.trainer.state.disk
    at = disk.begin_of(served.module.blocks[3].up.weight) * 4
    with open(disk.array.path, "r+b", buffering=0) as f:
        f.seek(at)
        kept = f.read(1)
        f.seek(at)
        f.write(bytes([kept[0] ^ 1]))
        with pytest.raises(DamagedError, match="elements"):
            served.generate(probe[:1, :3], 4)
        f.seek(at)
        f.write(kept)
    assert torch.equal(served.generate(probe[:1, :3], 4), want)
    served.destroy()


def test_damage_is_an_error_and_the_next_call_goes_on(tmp_path):
    run_ranks(_damaged, 1, str(tmp_path))


def test_the_order_of_passes_that_repeat():
    from deepc.plan.order import order_of

    once = order_of([0, 1, 2], [10, 10, 10], 10, 20, 100)
    again = order_of([0, 1, 2], [10, 10, 10], 10, 20, 100, repeats=True)
    assert once.ahead == ((1,), (2,), ()) and again.ahead == ((1,), (2,), (0,)) and again.repeats
    assert again.keep == (False,) * 3, "kept units would leave no room for those ahead"
    fits = order_of([0, 1, 2], [10, 10, 10], 10, 30, 100, repeats=True)
    assert fits.keep == (True,) * 3


# ---- more than the memory --------------------------------------------------------------------------------------------
@pytest.mark.full
def test_a_model_larger_than_the_memory_generates(tmp_path):
    """In a cgroup whose limit is less than half of the weights: the same tokens as without a limit; in memory it is
    killed."""
    pytest.importorskip("transformers")
    arguments = ["--folder", str(tmp_path), "--hidden", "1536", "--layers", "40", "--tokens", "3", "--ratio", "3"]
    arguments += ["--only", "disk,memory,limited"]
    disk, memory, limited = rows_of_limited("generate_beyond_memory.py", tmp_path / "out", *arguments)
    assert disk["ended"] == memory["ended"] == "fine" and limited["ended"] == "killed"
    assert disk["texts"] == memory["texts"] and disk["peak"] <= disk["limit"] < disk["weights"] / 2
