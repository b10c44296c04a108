"""Short scripts in the style of the public example collections, written for `deepspeed`, run on deepc with
one import changed (2 CPU ranks)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path  # noqa: F401

import pytest
import tiny
import torch
from programs import run_python
from ranks import run_ranks

WORLD, MICRO = 2, 2


# ---- loops written for deepspeed -------------------------------------------------------------------------------------
def _classifier(rank: int, world: int, stage: int) -> list[float]:
    """A cifar-like script: training_data, WarmupLR, accessors of the engine, an evaluation without gradients."""
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 10)
    )
    g = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(32, 3, 8, 8, generator=g), torch.randint(0, 10, (32,), generator=g)
    )
    engine, _, loader, _ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        training_data=data,
        config={
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
            "zero_optimization": {"stage": stage},
        },
    )
    device = get_accelerator().device_name(engine.local_rank)
    assert not engine.bfloat16_enabled() and not engine.fp16_enabled() and engine.zero_optimization_stage() == stage
    losses = []
    for _ in range(3):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(engine(x.to(device)), y.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        assert engine(data.tensors[0]).shape == (32, 10)
    engine.destroy()
    return losses


def test_a_classifier_trains_the_same_at_stages_0_and_3():
    zero, three = run_ranks(_classifier, WORLD, args=(0,)), run_ranks(_classifier, WORLD, args=(3,))
    assert zero == three and len(zero[0]) == 12 and zero[0][-1] < zero[0][0]


def _gan(rank: int, world: int, stage: int) -> list[tuple[float, float]]:
    """A GAN script: two engines, the models called without their engine, `module.zero_grad()` between the two
    losses."""
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed

    deepspeed.init_distributed()
    g, d = _gan_models()
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": {"stage": stage}}
    engine_d, *_ = deepspeed.initialize(model=d, config=config, optimizer=torch.optim.SGD(d.parameters(), lr=0.1))
    engine_g, *_ = deepspeed.initialize(model=g, config=config, optimizer=torch.optim.SGD(g.parameters(), lr=0.1))
    out = _gan_loop(g, d, engine_g.backward, engine_d.backward, engine_g.step, engine_d.step, 4 * rank, 4)
    engine_d.destroy(), engine_g.destroy()
    return out


def _gan_models() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    return (
        torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6)),
        torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Sigmoid()),
    )


def _gan_loop(g, d, backward_g, backward_d, step_g, step_d, start: int, n: int) -> list[tuple[float, float]]:
    random, out, bce = torch.Generator().manual_seed(2), [], torch.nn.functional.binary_cross_entropy
    for _ in range(6):
        real, noise = (
            torch.randn(8, 6, generator=random)[start : start + n] + 1,
            torch.randn(8, 4, generator=random)[start : start + n],
        )
        d.zero_grad()
        on_real = bce(d(real), torch.ones(n, 1))
        backward_d(on_real)
        fake = g(noise)
        on_fake = bce(d(fake.detach()), torch.zeros(n, 1))
        backward_d(on_fake)
        step_d()
        g.zero_grad()
        fooled = bce(d(fake), torch.ones(n, 1))
        backward_g(fooled)  # leaves gradients in d, which the d.zero_grad() of the next iteration drops
        step_g()
        out.append((on_real.item() + on_fake.item(), fooled.item()))
    return out


@pytest.mark.parametrize("stage", (pytest.param(0, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)))
def test_a_gan_that_calls_zero_grad_on_the_modules_trains_as_in_plain_torch(stage):
    g, d = _gan_models()
    opt_g, opt_d = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
    expected = _gan_loop(g, d, lambda loss: loss.backward(), lambda loss: loss.backward(), opt_g.step, opt_d.step, 0, 8)
    ranks = run_ranks(_gan, WORLD, args=(stage,))
    mean = torch.tensor(ranks).mean(0)
    assert torch.allclose(mean, torch.tensor(expected), rtol=1e-5, atol=1e-6), (mean, expected)


def _accumulating(rank: int, world: int, stage: int, of: str) -> list[float]:
    """`module.zero_grad()` or `engine.zero_grad()` after every micro-batch, as some scripts do: at stages 1 to 3 it
    must not lose an accumulation."""
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed

    deepspeed.init_distributed()
    model = tiny.make_model()
    before = [p.detach().clone() for p in model.parameters()]
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_optimization": {"stage": stage},
        },
    )
    x, y = tiny.make_batch(0, MICRO)
    norms = []
    for _ in range(2):
        engine.backward(engine(x, y))
        engine.step()
        (model if of == "model" else engine).zero_grad()
    norms.append(sum((a - b.detach()).norm().item() ** 2 for a, b in zip(before, model.parameters())) ** 0.5)
    engine.destroy()
    return norms


@pytest.mark.parametrize("of", ["model", "engine"])
def test_zero_grad_inside_an_accumulation_keeps_it_as_deepspeed_does(of):
    whole, half = (run_ranks(_accumulating, WORLD, args=(stage, of))[0][0] for stage in (2, 0))
    assert whole == pytest.approx(
        2 * half, rel=1e-4
    )  # at stage 0 the first micro-batch's gradient was in .grad, and went


def _clip_by_hand_and_evaluate(rank: int, world: int, folder: str) -> tuple[list[str], bool, bool]:
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("deepc").addHandler(handler)
    deepspeed.init_distributed()
    x, y = tiny.make_batch(rank, MICRO)
    plain = tiny.make_model()
    plain(x, y).backward()
    clip_grad_norm_(plain.parameters(), 1e-3)
    clipped = all(p.grad.norm() <= 1.001e-3 for p in plain.parameters())
    model, batch = tiny.make_model(), {"train_micro_batch_size_per_gpu": MICRO}
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, config={**batch, **adam})
    for _ in range(2):
        engine.backward(engine(x, y))
        clip_grad_norm_(model.parameters(), 1e-3)
        with contextlib.suppress(RuntimeError):  # torch's, of no gradients
            clip_grad_value_(parameters=model.parameters(), clip_value=1e-3)
        engine.step()
    engine.save_checkpoint(folder)
    reader, *_ = deepspeed.initialize(model=tiny.make_model(seed=9), config=batch)
    path, _ = reader.load_checkpoint(folder)
    with torch.no_grad():
        same = torch.equal(reader(x, y), model(x, y))
    logging.getLogger("deepc").removeHandler(handler)
    for e in (reader, engine):
        e.destroy()
    return [line for line in lines if "clips nothing" in line], clipped, path is not None and same


def test_clipping_by_hand_is_told_and_an_engine_for_evaluation_loads_what_a_training_saved(tmp_path):
    first, second = run_ranks(_clip_by_hand_and_evaluate, WORLD, args=(str(tmp_path),))
    assert ["clip_grad_norm_" in first[0][0], "clip_grad_value_" in first[0][1], len(first[0])] == [True, True, 2]
    assert all("gradient_clipping" in line for line in first[0])
    assert second[0] == []  # rank 0 says it
    assert all(clipped and same for _, clipped, same in (first, second))


def _clip_by_hand(rank: int, world: int) -> tuple[list[str], bool]:
    """As most scripts do, by a name that was imported before there is an engine."""
    import deepc
    from torch.nn.utils import clip_grad, clip_grad_norm_

    before = vars(clip_grad).copy()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("deepc").addHandler(handler)
    model, (x, y) = tiny.make_model(), tiny.make_batch(rank, MICRO)
    engine, *_ = deepc.initialize(model=model, config=tiny.config(2, micro=MICRO))
    for _ in range(2):
        engine.backward(engine(x, y))
        clip_grad_norm_(model.parameters(), 1e-3)
        engine.step()
    logging.getLogger("deepc").removeHandler(handler)
    engine.destroy()
    return [n for n in lines if "clips nothing" in n], vars(clip_grad) != before


def test_clipping_by_hand_is_told_under_deepcs_own_name():
    (first, watched), (second, _) = run_ranks(_clip_by_hand, WORLD)
    assert len(first) == 1 and "gradient_clipping" in first[0] and second == []
    assert not watched  # no longer, without an engine


def _import_paths(rank: int, world: int) -> bool:
    import deepc.compat.deepspeed  # noqa: F401
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    recursive_setattr(model, "0.0", torch.nn.Linear(2, 3))
    return recursive_getattr(model, "0.0").out_features == 3


def test_the_helpers_that_chat_scripts_import_exist():
    assert run_ranks(_import_paths, 1) == [True]


def _preference_training(rank: int, world: int) -> tuple[list[str], bool]:
    """What TRL's trainers do at stage 3: a reference model beside the trained one (prepare_deepspeed), and generation
    with DeepSpeed's hooks taken off (unwrap_model_for_generation)."""
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed

    deepspeed.init_distributed()
    model, reference = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    hidden = 8
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"},
    }
    sizes = {
        "zero_optimization.reduce_bucket_size": hidden * hidden,
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * hidden * hidden,
    }
    fixed, *_ = deepspeed.initialize(model=reference, config={**config, **sizes})
    trained, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config={**config, **sizes}
    )
    inert = [i.key for i in fixed._config.inert]
    with deepspeed.zero.GatheredParameters(trained.parameters()):
        offload = trained.optimizer.parameter_offload
        for _, p in (*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()):
            p.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks = []
        offload.backward_hooks = []
        with torch.no_grad():
            model(torch.ones(2, 8))
        offload._register_deepspeed_module(offload.module)
    before = trained.full_fp32_param(model.weight).clone()
    x = torch.full((2, 8), 1.0 + rank)
    trained.backward((trained(x) - fixed(x).detach()).square().mean())
    trained.step()
    moved = not torch.equal(before, trained.full_fp32_param(model.weight))
    fixed.destroy(), trained.destroy()
    return inert, moved


def test_a_reference_model_and_generation_without_hooks_at_stage_3():
    for inert, moved in run_ranks(_preference_training, 2):
        assert "zero_optimization.stage3_prefetch_bucket_size" in inert and moved


def _merged_for_a_while(rank: int, world: int, streamed: str) -> list[str]:
    """As peft merges adapters into the weights and takes them out again around a generation (TRL's GRPO): each rank
    writes `.data` of parameters that are gathered to be read. Last, merge_and_unload. Lines of the log."""
    os.environ["DEEPC_STREAMED"] = streamed
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("deepc").addHandler(handler)
    model = tiny.make_model()
    model.pos.weight.requires_grad_(False)
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "train_micro_batch_size_per_gpu": MICRO}
    engine, *_ = deepspeed.initialize(model=model, config={**adam, "zero_optimization": {"stage": 3}})
    params, (x, y) = list(model.parameters()), tiny.make_batch(rank, MICRO)
    for merged in (0.5, 0.5, 3.0):
        with deepspeed.zero.GatheredParameters(params):
            before = [p.detach().clone() for p in params]
            for p in params:
                p.data += merged
            with deepspeed.zero.GatheredParameters(params[:1]):
                assert params[0].data.eq(before[0] + merged).all()
            assert all(torch.equal(p, b + merged) for p, b in zip(params, before))
            with torch.no_grad():
                model(x, y)
            for p in params if merged < 1 else ():
                p.data = p.data - merged
        with deepspeed.zero.GatheredParameters(params):
            model.cpu()  # sets `.data` to what it is
            for p in params:
                p.data.mul_(1.0)
                p.data += 0.0 if merged < 1 else 1.0
        with deepspeed.zero.GatheredParameters(params):
            assert all(torch.equal(p, b) for p, b in zip(params, before))
        with deepspeed.zero.GatheredParameters(params):
            with deepspeed.zero.GatheredParameters(params[:1], modifier_rank=0):
                params[0].data.mul_(0.5)  # counts
        with deepspeed.zero.GatheredParameters(params):
            assert torch.equal(params[0], before[0] * 0.5)
        engine.backward(engine(x, y))
        engine.step()
    with contextlib.suppress(KeyError):
        with deepspeed.zero.GatheredParameters(params):
            params[1].data.mul_(2)
            raise KeyError
    engine.backward(engine(x, y))
    engine.step()
    engine.destroy()
    logging.getLogger("deepc").removeHandler(handler)
    return [line for line in lines if "GatheredParameters" in line]


@pytest.mark.parametrize("streamed", "01")
def test_weights_that_are_merged_for_a_while_are_each_ranks_own(streamed):
    for lines in run_ranks(_merged_for_a_while, WORLD, args=(streamed,), fresh=True):
        assert len(lines) == 1 and "is dropped at the end, as in DeepSpeed" in lines[0]


class _Head(torch.autograd.Function):
    """As TRL's chunked log-probabilities: the head's weight is read without a call of the head, and in backward from
    what was saved of it, both in a context that gathers what is not there."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        assert not hasattr(hidden, "ds_status") and not hasattr(grad, "ds_numel")
        with _gathered(weight):
            return grad @ weight, grad.t() @ hidden


def _gathered(*params):
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for p in params:  # what TRL, PEFT and accelerate ask for
        assert p.ds_shape == p.shape == (3, 8) and p.ds_numel == 24 and isinstance(p.ds_id, int)
    missing = [p for p in params if p.ds_status != ZeroParamStatus.AVAILABLE]
    return deepspeed.zero.GatheredParameters(missing) if missing else contextlib.nullcontext()


class _Chunked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3, bias=False)

    def forward(self, x):
        hidden = self.body(x).tanh()
        with _gathered(self.head.weight):
            return _Head.apply(hidden, self.head.weight).square().mean()


def _read_into_gathered(rank: int, world: int, stage: int, folder: str) -> list[bool]:
    """As DeepSpeed's own tests read a checkpoint into the model that an engine holds."""
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

    model, (x, y) = tiny.make_model(), tiny.make_batch(rank, MICRO)
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "train_micro_batch_size_per_gpu": MICRO}
    engine, *_ = deepspeed.initialize(model=model, config={**adam, "zero_optimization": {"stage": stage}})
    params = list(model.parameters())
    engine.save_checkpoint(folder)
    saved = [p.detach().clone() for p in params]
    engine.backward(engine(x, y))
    engine.step()
    moved = [p.detach().clone() for p in params]
    with deepspeed.zero.GatheredParameters(engine.parameters(), modifier_rank=None):
        read = list(load_state_dict_from_zero_checkpoint(model, folder).state_dict().values())
        found = [all(torch.equal(a, b) for a, b in zip(saved, read)), torch.equal(saved[0], moved[0])]
    found.append(all(torch.equal(a, b) for a, b in zip(moved, params)))
    engine.destroy()
    return found


def test_a_checkpoint_is_read_into_gathered_parameters(tmp_path):
    for found in run_ranks(_read_into_gathered, WORLD, args=(3, str(tmp_path)), fresh=True):
        assert found == [True, False, True]


def _chunked_training(rank: int, world: int) -> list[list[float]]:
    """Losses with parameters that stay and with parameters that come and go, all of them or but the small ones."""
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed

    out = []
    for streamed, threshold in (("0", 0), ("1", 0), ("1", 10**5)):
        os.environ["DEEPC_STREAMED"] = streamed
        torch.manual_seed(0)
        model = _Chunked()
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        assert (engine.plan.mode == "streamed") == (streamed == "1")
        losses = []
        for step in range(3):
            loss = engine(torch.full((4, 8), 0.1 * (1 + step + rank)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        out.append(losses)
        engine.destroy()
    del os.environ["DEEPC_STREAMED"]
    return out


def test_a_head_that_is_read_in_backward_at_stage_3():
    for resident, streamed, persistent in run_ranks(_chunked_training, 2):
        assert resident == streamed == persistent


# ---- Accelerate ------------------------------------------------------------------------------------------------------
_CPU = """
import deepc.compat.deepspeed, sys
from accelerate import Accelerator, DeepSpeedPlugin
plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}})
print(Accelerator(deepspeed_plugin=plugin, **({"cpu": True} if sys.argv[1] == "cpu" else {})).distributed_type)
"""


@pytest.mark.parametrize("how", ["cpu", pytest.param("plain", marks=pytest.mark.full)])
def test_accelerate_that_drops_the_plugin_is_told(how, tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "script.py").write_text(_CPU)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_python("-m", "deepc", "run", "--num_gpus", "2", "script.py", how, cwd=tmp_path, env=env)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert text.count("leaves out its deepspeed_plugin") == (how == "cpu"), text
    assert ("DistributedType.DEEPSPEED" in text) == (how == "plain"), text


# ---- Lightning -------------------------------------------------------------------------------------------------------
_LIGHTNING = """
import deepc.compat.deepspeed
import json, sys, torch
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import DeepSpeedStrategy

stage, rank = int(sys.argv[1]), int(__import__("os").environ["RANK"])
class Net(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)), []
    def training_step(self, batch, index):
        loss = self.layer(batch).pow(2).sum()
        self.seen.append(loss.item())
        return loss
    def test_step(self, batch, index):
        self.log("test_loss", self.layer(batch).pow(2).sum(), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
def trainer(epochs):
    return L.Trainer(max_epochs=epochs, accelerator="cpu", devices=2, logger=False,
                     strategy=DeepSpeedStrategy(stage=stage, offload_optimizer=False), enable_progress_bar=False, limit_val_batches=1,
                     gradient_clip_val=1.0, accumulate_grad_batches=2, enable_checkpointing=False)
def run(epochs, checkpoint=None):
    L.seed_everything(3)
    t, net = trainer(epochs), Net()
    t.fit(net, *(torch.utils.data.DataLoader(RandomDataset(32, 32), batch_size=4) for _ in range(2)), ckpt_path=checkpoint)
    return t, net
whole = run(2)[1].seen
first, net = run(1)
first.save_checkpoint("ck")
last, again = run(2, "ck")
data = RandomDataset(32, 32)
with torch.no_grad():
    expected = again.layer(data.data).pow(2).sum().item() / 8  # 8 batches of 4 on both ranks
tested = last.test(again, torch.utils.data.DataLoader(data, batch_size=4), verbose=False)[0]["test_loss"]
if rank == 0:
    json.dump({"whole": whole, "first": net.seen, "again": again.seen, "steps": last.global_step, "tested": tested, "expected": expected}, open("result.json", "w"))
"""  # noqa: E501


@pytest.mark.full
@pytest.mark.parametrize("stage", (2, 3))
def test_lightnings_deepspeed_strategy_trains_saves_and_resumes(stage, tmp_path):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning")
    import socket

    (tmp_path / "train.py").write_text(_LIGHTNING)
    with socket.socket() as s:
        s.bind(("", 0))
        port = str(s.getsockname()[1])
    path = os.pathsep.join(p for p in sys.path if p)
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", str(stage)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
        )
        for r in range(2)
    ]
    try:
        texts = [p.communicate(timeout=240)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert [p.returncode for p in ranks] == [0, 0], "\n".join(t[-3000:] for t in texts)
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["whole"]) == 8 and result["steps"] == 4
    assert result["first"] + result["again"] == result["whole"]
    assert result["whole"][-1] < result["whole"][0]
    assert result["tested"] == pytest.approx(result["expected"], rel=1e-5)


def _fabric(rank: int, world: int, folder: str) -> tuple[list[float], int, bool]:
    """A loop of Fabric, whose optimizers step by themselves: losses, the saved count, and whether the weights came
    back."""
    import deepc.compat.deepspeed  # noqa: F401
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DeepSpeedStrategy

    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}
    strategy = DeepSpeedStrategy(config=config)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision="32-true")
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = tiny.make_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(3):
        for part in range(2):  # accumulated as Fabric has it: by backwards before a step
            loss = model(*tiny.make_batch(2 * (2 * step + part) + rank))
            fabric.backward(loss / 2)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "step": 3}
    fabric.save(f"{folder}/ck", state)
    kept = [p.detach().clone() for p in model.parameters()]
    fabric.backward(model(*tiny.make_batch(0)))
    optimizer.step()
    state["step"] = 0
    fabric.load(f"{folder}/ck", state)
    back = all(torch.equal(p, k) for p, k in zip(model.parameters(), kept))
    model._forward_module.destroy()
    return losses, state["step"], back


@pytest.mark.full
def test_lightnings_fabric_trains_as_plain_pytorch(tmp_path):
    env = {"DEEPC_LOG_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": ""}
    ranks = run_ranks(_fabric, WORLD, args=(str(tmp_path),), env=env, fresh=True)
    model = tiny.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    want: list[list[float]] = [[], []]
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            for rank in range(WORLD):
                loss = model(*tiny.make_batch(2 * (2 * step + part) + rank))
                (loss / 2 / WORLD).backward()
                want[rank].append(loss.item())
        optimizer.step()
    for rank, (losses, step, back) in enumerate(ranks):
        assert losses == pytest.approx(want[rank], rel=1e-5) and (step, back) == (3, True)


# ---- accelerate launch -----------------------------------------------------------------------------------------------
_LAUNCH = ("launch", "--use_deepspeed", "--deepspeed_config_file", "ds.json", "--num_processes", "2")
_PREPARES = """
import sys
import accelerate, deepspeed, torch
accelerator = accelerate.Accelerator()
model = torch.nn.Linear(4, 1)
engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(engine(torch.ones(1, 4)).sum())
optimizer.step()
rank, size = accelerator.process_index, accelerator.num_processes
print("rank", rank, "of", size, type(engine).__module__, engine.zero_optimization_stage(), sys.argv)
"""


@pytest.mark.full
def test_accelerate_launch_starts_a_script_that_nobody_changed(tmp_path):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("needs accelerate")
    (tmp_path / "train.py").write_text(_PREPARES)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""}
    port = ("--main_process_port", "0")
    done = run_python(
        "-m", "deepc.integrations.accelerate", *_LAUNCH, *port, "train.py", "--x", "3", cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank} of 2 deepc.compat.runtime.engine 2 ['train.py', '--x', '3']" in done.stdout


_PARSES = """
import argparse, sys
from accelerate.commands.launch import launch_command_parser
from deepc.integrations.accelerate import under_the_name
from deepc.errors import UnsupportedError
start = under_the_name(lambda args: (args.training_script, args.training_script_args, args.module))
for words in (["train.py", "--x", "3"], ["--module", "pkg.train"], ["--no_python", "train"],
              ["--num_machines", "2", "train.py"],
              ["--num_machines", "2", "--deepspeed_multinode_launcher", "standard", "train.py"]):
    args = launch_command_parser().parse_args(["--num_machines", "1", *words])
    try:
        print(start(args))
    except UnsupportedError as exc:
        print("error:", exc)
"""


def test_accelerates_launcher_gets_what_starts_a_rank_under_the_name(tmp_path):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("needs accelerate")
    from deepc.launch.mpi import RANK

    done = run_python("-c", _PARSES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    script, module, bare, hosts, each = done.stdout.splitlines()
    assert script == str((RANK, ["script", "train.py", "--x", "3"], False))
    assert module == str((RANK, ["module", "pkg.train"], False))
    assert bare.startswith("error: --no_python") and "import deepc.compat.deepspeed" in bare
    assert "deepspeed_multinode_launcher pdsh" in hosts and "deepc run --hostfile HOSTS --as-deepspeed" in hosts
    assert each == str((RANK, ["script", "train.py"], False))
