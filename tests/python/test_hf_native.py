"""deepc.integrations.hf: Trainer on deepc's engine without the name `deepspeed`; Accelerate beside deepc's engine."""

from __future__ import annotations

import math
import re

import hf_runs
import pytest
from ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


QUIET = {"DEEPC_LOG_LEVEL": "WARNING"}


def test_engine_trainer_trains_saves_and_resumes(tmp_path):
    first, again, saved = run_ranks(hf_runs.native, 2, args=(str(tmp_path / "out"), 3), fresh=True, env=QUIET)[0]
    steps = [e for e in first if "loss" in e]
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5, 6] and steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert [e["step"] for e in first if "eval_loss" in e] == [3, 6] and saved == 28
    assert all(math.isfinite(e["grad_norm"]) and e["grad_norm"] > 0 for e in steps)
    assert [e for e in first if e["step"] > 3 and "train_loss" not in e] == [
        e for e in again if e["step"] > 3 and "train_loss" not in e
    ]


def test_accelerate_beside_the_engine(tmp_path):
    """examples/huggingface/accelerate_native.py: trains, evaluates, saves, and goes on where it was saved, to the
    bit."""
    ranks = run_ranks(
        hf_runs.accelerate_native,
        2,
        args=(str(tmp_path / "out"), ["--stage", "3", "--bf16"]),
        fresh=True,
        env=QUIET,
    )
    first, again, saved = ranks[0]
    assert ranks[1] == ranks[0] and len(first) == 6 and first[5][0] < first[0][0] - 0.1 and saved == 28
    assert again == first[3:]
    assert [f"{lr:.6g}" for _, _, lr in first] == [f"{3e-3 * (1 - step / 6):.6g}" for step in range(1, 7)]


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_engine_trainer_in_16_bits(tmp_path, precision, stage):
    """TrainingArguments(bf16=True) or (fp16=True) set the engine's precision. fp16 starts with a loss scale that
    overflows: skipped steps have the norm inf, and the schedule waits. Resumed from step 3 with the same numbers."""
    config = {"fp16": {"enabled": "auto", "initial_scale_power": 21, "hysteresis": 1}} if precision == "fp16" else {}
    ranks = run_ranks(
        hf_runs.native,
        2,
        args=(str(tmp_path / "out"), stage, config, {precision: True}),
        fresh=True,
        env=QUIET,
    )
    first, again, _ = ranks[0]
    steps = [e for e in first if "loss" in e]
    skipped = [math.isinf(e["grad_norm"]) for e in steps]
    assert skipped[0] == (precision == "fp16") and not all(skipped)
    taken = [sum(not s for s in skipped[:i]) for i in range(6)]  # before step i
    assert [f"{e['learning_rate']:.6g}" for e in steps] == [
        f"{3e-3 * (t / 3 if t < 3 else (6 - t) / 3):.6g}" for t in taken
    ]
    assert precision == "fp16" or steps[-1]["loss"] < steps[0]["loss"]  # with skipped steps little is learned in 6
    assert [e for e in first if e["step"] > 3 and "train_loss" not in e] == [
        e for e in again if e["step"] > 3 and "train_loss" not in e
    ]


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_engine_trainer_in_odd_uses(tmp_path, stage):
    """evaluate() before train(), train() twice, a second trainer on the same model, the best model at the end, early
    stopping, label smoothing, torch_compile, auto_find_batch_size."""
    ranks = run_ranks(hf_runs.native_odd, 2, args=(str(tmp_path), stage), fresh=True, env=QUIET)
    out = ranks[0]
    assert ranks[1] == out
    assert out["twice"] < out["once"] < out["evaluated first"] and out["other"] == out["twice"]
    assert "already trained by another engine" in out["trained by two"] and "destroy" in out["trained by two"]
    best, now, steps = out["best"]
    assert best == now and steps < 8
    plain, smoothed = out["plain"][0], out["smoothed"][0]
    assert out["compiled"] == out["plain"] and out["smaller"][1] == 2
    assert all(
        a != b and abs(a - b) < 0.05 for a, b in zip(plain, smoothed, strict=True)
    )  # shifted labels, or it would be as high as chance


def test_a_model_that_is_made_anew_for_each_training(tmp_path):
    """model_init, as a search of hyperparameters has it: the second training was the first one's model's. In 16 bits,
    with floating-point inputs. A model that rank 0 can't write is an error of all ranks. Ranks that share sequences or
    the model are refused: each would have samples of its own."""
    ranks = run_ranks(hf_runs.trials, 2, args=(str(tmp_path),), fresh=True, env=QUIET)
    for told in ranks:
        assert told["own"] == [True, True] and told["losses"][0] == told["losses"][1]
        assert told["evaluated"][0] == told["evaluated"][1] < told["losses"][0][0]
        for key, text in (
            ("gradient_accumulation_steps", "gradient_accumulation_steps = 8, and TrainingArguments say .* = 1"),
            ("train_micro_batch_size_per_gpu", "= 2, and TrainingArguments say per_device_train_batch_size = 4"),
        ):
            assert re.search(text, told[key])
        for use in ("train", "evaluate"):
            assert (
                "sequence_parallel_size = 2, whose ranks need the same samples" in told[f"sequence_parallel_size {use}"]
            )
            assert "tensor_parallel.autotp_size = 2, whose" in told[f"tensor_parallel {use}"]
    one, other = (told["not written"] for told in ranks)
    assert re.search("the model can't be written to .*a file: .*File exists", one)
    assert re.search("save_model to .*a file failed on rank 0", other)


def test_null_sections_and_checkpoints_of_others(tmp_path):
    from types import SimpleNamespace

    from deepc.errors import CheckpointError
    from deepc.integrations.hf import EngineTrainerMixin

    config = {"bf16": None, "fp16": None}
    for key, asked in (("bf16", True), ("fp16", False)):
        EngineTrainerMixin._fill_precision(config, key, asked)
    assert config == {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
    (tmp_path / "latest").write_text("global_step3")
    trainer = SimpleNamespace(engine=SimpleNamespace(load_checkpoint=lambda folder: (folder, {})))
    with pytest.raises(CheckpointError, match="not saved by an EngineTrainer"):
        EngineTrainerMixin._load_optimizer_and_scheduler(trainer, str(tmp_path))


def _with_noise(rank, world):
    """(loss, norm) of steps with NEFTune: of DDP, and of engines, by how embeddings are tied."""
    import deepc
    import torch
    from test_zero import llama
    from transformers import LlamaForCausalLM
    from transformers.integrations.neftune import activate_neftune

    deepc.init_distributed()
    out = {}
    for tied in (False, True):
        for stage in (None, 2, 3):
            torch.manual_seed(0)
            small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=61)
            model = LlamaForCausalLM(llama(**small, tie_word_embeddings=tied)).train()
            torch.manual_seed(100 + rank)
            if stage is None:
                run, clip = torch.nn.parallel.DistributedDataParallel(model), torch.nn.utils.clip_grad_norm_
                steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
            else:
                adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
                config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
                run = deepc.initialize(model=model, config={**config, "optimizer": adamw})[0]
            activate_neftune(model, 5.0)
            for step in range(3):
                ids = (torch.arange(24).view(2, 12) * (step + 3) + rank) % 61
                loss = run(input_ids=ids, labels=ids).loss
                if stage is None:
                    loss.backward()
                    norm = clip(model.parameters(), 1.0)
                    steps.step()
                    steps.zero_grad()
                else:
                    run.backward(loss)
                    run.step()
                    norm = run.get_global_grad_norm()
                out.setdefault((tied, stage), []).extend((float(loss), float(norm)))
            if stage is not None:
                run.destroy()
    return out


def test_noise_of_embeddings_is_that_of_ddp():
    """NEFTune's hook on the input embeddings draws from each rank's generator."""
    for found in run_ranks(_with_noise, 2, env=QUIET):
        for (tied, stage), numbers in found.items():
            assert numbers == pytest.approx(found[tied, None], rel=1e-5), (tied, stage)
        assert found[True, None] != found[False, None]
