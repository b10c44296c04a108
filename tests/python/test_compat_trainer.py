"""Hugging Face's Trainer on deepc under the name `deepspeed`: unmodified scripts, 2 CPU ranks; against real DeepSpeed
where it is installed."""

from __future__ import annotations

import importlib.util
import math

import hf_runs
import pytest
import torch
from ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

QUIET = {"DEEPC_LOG_LEVEL": "WARNING"}


def _run(library, folder, cases, **options):
    return run_ranks(hf_runs.train, 2, args=(library, str(folder), cases), fresh=True, **options)


def _check_shape(run):
    """6 steps, 2 evaluations, and after resuming steps 4 to 6 with the same numbers."""
    first, again, files = run
    assert [e["step"] for e in first if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in first if "eval_loss" in e] == [3, 6]
    assert {"model.safetensors", "global_step6", "trainer_state.json", "zero_to_fp32.py"} <= set(files)
    tail = [e for e in first if e["step"] > 3 and "train_loss" not in e]
    assert tail == [e for e in again if e["step"] > 3 and "train_loss" not in e]


def test_trains_evaluates_saves_and_resumes(tmp_path):
    cases = [(str(stage), hf_runs.ds_config(stage), {}) for stage in (0, 3)]
    ours = _run("deepc", tmp_path, cases, env=QUIET)
    for name, _, _ in cases:
        assert ours[0][name] == ours[1][name]
        _check_shape(ours[0][name])
        losses = [e["loss"] for e in ours[0][name][0] if "loss" in e]
        assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("world", "tensor", "sequence", "stage", "adapters"),
    [
        (2, 2, 1, 1, False),
        *(
            pytest.param(*c, marks=pytest.mark.full)
            for c in ((2, 1, 2, 3, False), (2, 2, 1, 2, True), (4, 2, 1, 2, False))
        ),
    ],
)
def test_ranks_that_share_a_model_or_sequences_train_as_one_process(world, tensor, sequence, stage, adapters, tmp_path):
    """tensor_parallel.autotp_size: accelerate gives ranks that share a model the same samples, Trainer counts them in
    train_batch_size, and hands its whole configuration to deepspeed.tp_model_init. sp_backend "deepspeed" of
    accelerate's ParallelismConfig: DeepSpeed's adapters of the loader and of attention."""
    if adapters:
        pytest.importorskip("peft")

    def run(world, *shares):
        folder = str(tmp_path / f"{world}")
        return run_ranks(hf_runs.shared, world, args=(folder, *shares), fresh=True, env=QUIET)

    ((want, _, saved),) = run(1, 1, stage, 1, adapters)
    (found, again, whole), *others = run(world, tensor, stage, sequence, adapters)
    assert all(o[0] == found and o[1] == again for o in others)
    assert len(found) == len(want) and [e["step"] for e in again[-3:]] == [4, 4, 4]
    for mine, theirs in zip(found, want):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert again[-3:-1] == found[-3:-1]
    assert whole.keys() == saved.keys()
    for name, t in whole.items():
        torch.testing.assert_close(t, saved[name], rtol=0, atol=1e-5 * float(saved[name].abs().max()))


CASES = {
    "0": hf_runs.ds_config(0),
    "2": hf_runs.ds_config(2),
    "3": hf_runs.ds_config(3),
    "log": hf_runs.ds_config(2, "log", scheduler="WarmupLR"),
}


@pytest.mark.full
def test_fused_by_configuration(tmp_path):
    """Trainer prints four digits of a loss."""
    pytest.importorskip("peft")
    (found, _) = run_ranks(hf_runs.fused, 2, args=(str(tmp_path),), fresh=True, env=QUIET)
    for name in ("whole", "lora"):
        (plain, none), (fused, kinds) = found[f"{name} False"], found[f"{name} auto"]
        assert not none and {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaForCausalLM"} <= set(kinds)
        assert len(plain) == 3 and all(abs(a - b) < 1e-3 for a, b in zip(plain, fused, strict=True)), (plain, fused)


@pytest.mark.full
def test_grpo_of_trl_in_both_modes(tmp_path):
    pytest.importorskip("trl")
    for resident, streamed in run_ranks(hf_runs.grpo, 2, args=(str(tmp_path),), fresh=True, env=QUIET):
        assert len(resident) == 3 and resident == streamed
        assert resident[0][2] == 0 < resident[1][2], "the reference stays, the model moves"


@pytest.mark.full
def test_features(tmp_path):
    """Weights out of from_pretrained under zero.Init, generate in evaluation, gradient checkpointing, LoRA, offload,
    bf16, other optimizers and schedules."""
    for rank, out in enumerate(run_ranks(hf_runs.features, 2, args=(str(tmp_path),), fresh=True, env=QUIET)):
        for name in ("seq2seq", "lora", "recompute", "offload", "own optimizer", "evaluate only"):
            assert out.get(name) is True, (rank, name, out.get(name))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_history_equals_deepspeeds(tmp_path, name):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    cases = [(name, CASES[name], {})]
    ours = _run("deepc", tmp_path, cases, env=QUIET)
    theirs = _run("deepspeed", tmp_path, cases, backend="gloo", env={"DS_ACCELERATOR": "cpu"})
    _check_shape(ours[0][name])
    for mine, real in zip(ours[0][name][:2], theirs[0][name][:2], strict=True):
        _compare(name, mine, real)


def _compare(name, mine, real):
    """Losses and rates as Trainer prints them (4 digits); gradient norms to 1e-5 relative."""
    assert len(mine) == len(real)
    for a, b in zip(mine, real, strict=True):
        assert a.keys() - b.keys() <= ({"grad_norm"} if name == "0" else set()) and b.keys() <= a.keys(), (
            name,
            a,
            b,
        )  # at stage 0 DeepSpeed has no norm
        for key in b:
            if key == "grad_norm":
                assert math.isclose(a[key], b[key], rel_tol=1e-5), (name, key, a, b)
            else:
                assert f"{a[key]:.4g}" == f"{b[key]:.4g}", (name, key, a, b)


PRECISIONS = [("bf16", 16), ("fp16", 16), ("fp16", 22)]


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision, power", PRECISIONS)
def test_16_bits_equal_deepspeed(tmp_path, precision, power, stage):
    """bf16, fp16, and fp16 from a loss scale that overflows: the losses up to the first update, all learning rates and
    the steps that are skipped are DeepSpeed's to every digit. Afterwards they differ by what deepc does on purpose:
    fp32 masters start from the model's values, gradients are accumulated in fp32."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    if precision == "fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("needs a processor with fp16 arithmetic: DeepSpeed refuses others")
    case = hf_runs.precision_case(precision, stage, power)
    ours = _run("deepc", tmp_path, [case], env=QUIET)
    theirs = _run("deepspeed", tmp_path, [case], backend="gloo", env={"DS_ACCELERATOR": "cpu"})
    _check_shape(ours[0][case[0]])
    for mine, real in zip(ours[0][case[0]][:2], theirs[0][case[0]][:2], strict=True):
        assert len(mine) == len(real)
        for a, b in zip(mine, real, strict=True):
            assert a.keys() == b.keys() and a["step"] == b["step"], (a, b)
            assert a.get("learning_rate") == b.get("learning_rate"), (a, b)
            if "loss" in a and a["step"] <= (6 if power == 22 else 3):  # the schedule's rate is 0 until then
                assert a["loss"] == b["loss"], (a, b)
            assert all(math.isclose(a[k], b[k], rel_tol=1e-4) for k in a if k.endswith("loss")), (a, b)
            assert math.isclose(a.get("grad_norm", 0), b.get("grad_norm", 0), rel_tol=1e-3), (a, b)
    norms = [e["grad_norm"] for e in ours[0][case[0]][0] if "loss" in e]
    assert [math.isinf(n) for n in norms] == [power == 22] * 4 + [False] * 2


@pytest.mark.full
@pytest.mark.parametrize("precision, power", PRECISIONS)
def test_16_bits_are_the_same_at_stages_0_to_2(tmp_path, precision, power):
    """DeepSpeed's stage 0 takes a step of zero gradients at its start in 16 bits, and so differs from its stage 2;
    deepc's does not. Where the loss scale overflows, stage 0 halves it at once, as there, and skips fewer steps."""
    cases = [hf_runs.precision_case(precision, stage, power) for stage in (0, 1, 2)]
    out = _run("deepc", tmp_path, cases, env=QUIET)
    runs = [out[0][name] for name, *_ in cases]
    for run in runs:
        _check_shape(run)
    assert runs[1][:2] == runs[2][:2] and (runs[0][:2] == runs[2][:2]) == (power != 22)


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_model_of_a_trained_engine(tmp_path, stage):
    """evaluate, predict, .to(device), .cpu(), .float(), unwrap_model, prepare_model, save_model and from_pretrained,
    another Trainer: the same loss; and the engine trains on."""
    for out in run_ranks(hf_runs.moves, 2, args=(str(tmp_path), stage), fresh=True, env=QUIET):
        assert out["at first"] == out["moved"] == out["predicted"] and out["step"]
        assert math.isclose(out["prepared"], out["saved"], rel_tol=1e-6)


ACCELERATE = [["--stage", "2", "--from_config"], ["--stage", "3"]]


@pytest.mark.full
@pytest.mark.parametrize("case", range(len(ACCELERATE)))
def test_accelerate_equals_deepspeed(tmp_path, case):
    """accumulate, clip_grad_norm_, save_state, load_state, get_state_dict, unwrap_model: losses and rates to 6 digits,
    norms to 1e-5 relative."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    ours = run_ranks(
        hf_runs.accelerate_loop,
        2,
        args=("deepc", str(tmp_path), ACCELERATE[case : case + 1]),
        fresh=True,
        env=QUIET,
    )
    theirs = run_ranks(
        hf_runs.accelerate_loop,
        2,
        args=("deepspeed", str(tmp_path), ACCELERATE[case : case + 1]),
        fresh=True,
        backend="gloo",
        env={"DS_ACCELERATOR": "cpu"},
    )
    for mine, real in zip(ours[0][0][:2], theirs[0][0][:2], strict=True):
        assert len(mine) == len(real) == 6
        for a, b in zip(mine, real, strict=True):
            assert f"{a[0]:.6g} {a[2]:.6g}" == f"{b[0]:.6g} {b[2]:.6g}" and math.isclose(a[1], b[1], rel_tol=1e-5), (
                mine,
                real,
            )
    assert math.isclose(ours[0][0][2], theirs[0][0][2], rel_tol=1e-6)


def test_accelerate_loop(tmp_path):
    out = run_ranks(hf_runs.accelerate_loop, 2, args=("deepc", str(tmp_path), ACCELERATE[1:]), fresh=True, env=QUIET)
    first, again, total = out[0][0]
    assert out[0] == out[1] and len(first) == 6 and math.isfinite(total) and first[5][0] < first[0][0]
    assert again[0][2] == first[3][2]  # the schedule went on where it was saved
