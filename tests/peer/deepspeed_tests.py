"""Runs DeepSpeed's own unit tests with deepc as `deepspeed`, where a checkout of DeepSpeed is at hand. Fetches nothing.

    python tests/peer/deepspeed_tests.py --deepspeed ~/DeepSpeed [unit/runtime/test_data.py ...]

The checkout's tests/ is copied to a scratch folder, and run from there file by file; the checkout is not touched. Its
packages (pytest, and hjson, py-cpuinfo, tensorboard, transformers for some files) are the user's to install. Without
files: FILES below. --json FILE keeps every test's result.

A failure is one of: "private" (the test uses a name that deepc has not: NotInDeepc, or a row of KNOWN), "not built"
(docs/compat.md lists it), "limitation" (all that the test asserts is that DeepSpeed refuses something, which works
here), "on purpose" (deepc differs, and the row says why), "gone" (DeepSpeed's present release has removed it as well),
"machine" (a package, or what DeepSpeed itself skips or fails on a CPU); all others count against deepc."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

FILES = """
    runtime/test_ds_initialize runtime/test_lr_schedulers runtime/zero/test_zero_tensor_fragment comm/test_dist
    checkpoint/test_zero_optimizer runtime/test_ds_config_dict runtime/test_ds_config_model runtime/test_no_sync_ctxt
    v1/zero/test_zero_torch_func checkpoint/test_tag_validation checkpoint/test_latest_checkpoint runtime/test_data
    runtime/test_multi_output_model runtime/zero/test_zero_context runtime/zero/test_zero_config monitor/test_monitor
    runtime/zero/test_zero_leaf_module ops/adam/test_cpu_adam v1/zero/test_zero_coalesce_grad_reduction
    runtime/pipe/test_topology runtime/pipe/test_pipe_schedule
    """.split()


class Known(NamedTuple):
    """Failures that are no fault: `test` is looked for in the node's id, `error` in the failure's text."""

    test: str
    error: str
    kind: str  # one of KINDS
    reason: str


KINDS = ("private", "not built", "limitation", "on purpose", "gone", "machine")
_NO_ERROR = "DID NOT RAISE"
KNOWN = [
    Known(
        r"test_pipe\.py|FP16Pipeline",
        "has no attribute 'get_rng_state'",
        "machine",
        "the test forks the generator of a GPU",
    ),
    Known(
        r"test_ulysses_sp_hf\[",
        r"Scalars are not equal.*Relative difference: \S+e-0[78]\b",
        "machine",
        "a mean over two halves and the whole's to the last bit, which is torch's and the values'",
    ),
    # DeepSpeed refuses, deepc does it
    Known(r"test_zero_stage\[[23]-", _NO_ERROR, "limitation", "no_sync works at stages 2 and 3"),
    Known("test_existing_no_sync_still_blocked_for_zero2", _NO_ERROR, "limitation", "no_sync works at stages 2 and 3"),
    Known("TestNoSyncCtxt::test_reentry", _NO_ERROR, "limitation", "no_sync may be nested"),
    Known("test_zero1_no_offload_uses_bf16_optimizer", _NO_ERROR, "limitation", "coalesced reductions work there too"),
    Known(
        r"TestOptimizerImplementation::test\[(fp16|bf16|fp32)-(fp16|bf16|fp32)-None\]",
        _NO_ERROR,
        "limitation",
        "stage 0 accumulates in any dtype",
    ),
    Known("test_no_grad_input_error", "Expected RuntimeError", "limitation", "a leaf module takes inputs without grad"),
    Known("test_elastic_checkpoint_change_dp", _NO_ERROR, "limitation", "checkpoints load into any number of ranks"),
    Known("TestMuonRejectsReduceScatter", _NO_ERROR, "limitation", "Muon works with reduce_scatter and offload"),
    Known("test_direct_backward_raises_without_functorch", _NO_ERROR, "limitation", "loss.backward() may be bare"),
    Known("test_scale_validates_scalar_loss", _NO_ERROR, "limitation", "engine.scale takes a tensor of any shape"),
    Known(
        "test_unmanaged_rejects_(overlap_comm|coalesce)", _NO_ERROR, "limitation", "both go with a caller's boundaries"
    ),
    Known("TestIncorectAllgatherBucketSize", _NO_ERROR, "limitation", "a bucket has any size"),
    Known("TestZeroOffloadOptim", _NO_ERROR, "limitation", "every optimizer goes with offload_optimizer"),
    # different on purpose
    Known(
        "test_zero_context.*(ParametersFree|test_subclass_param|ScatterGather|GatherUpdate)",
        "AssertionError",
        "on purpose",
        "parameters of stage 3 in shared memory stay readable outside of GatheredParameters",
    ),
    Known(
        "test_shutdown_in_nesting_init",
        "AssertionError",
        "on purpose",
        "parameters have stage 3's attributes from the end of the outermost zero.Init on",
    ),
    Known("test_lr_schedulers", "warmup_type", "on purpose", "an unknown warmup_type is an error"),
    Known(
        "TestOneBitLambCheckpointing::test$",
        "Incorrect worker error",
        "on purpose",
        "what the compression owes is part of a checkpoint",
    ),
    Known(
        "test_tp_model_init_(row|column)_parallel",
        r"initialize\(mpu=.*-parallel with the ranks",
        "on purpose",
        "an mpu whose groups are not of the sizes that it tells is an error",
    ),
    Known(
        "test_qwen2_(tp_plan_with_uneven_vocab|tied_lm_head)",
        r"weight.shape ==",
        "on purpose",
        "embeddings and tied heads are cut too",
    ),
    Known(
        "test_autotp_size_above_kv_head_count_leaves_trailing_ranks_empty",
        "AssertionError",
        "on purpose",
        "ranks beyond the heads of keys and values have queries too",
    ),
    Known(
        "test_custom_module_replacement_with_patterns",
        "would be cut, of which|no module's name matches",
        "on purpose",
        "a module with a forward of its own is not replaced by a Linear",
    ),
    Known("test_tp_plan_basic_training", "None mismatch", "on purpose", "`.grad` is empty after a backward"),
    Known(
        "test_multiple_models",
        r"fp16 training scales the loss, and loss.backward\(\) was called without",
        "on purpose",
        "in fp16 a bare loss.backward() needs engine.scale(loss)",
    ),
    Known(
        "test_zero_user_backward.*(test_non_scalar_backward|TestZeroUserBackward)",
        r"(Gradients differ|mismatch at).*(bfloat16|after non-scalar backward)",
        "on purpose",
        "masters and sums are fp32, the masters from the model's own values; the suite's DDP rounds both to 16 bits",
    ),
    Known("test_error_when_backward_without_scale", "fp16 training scales the loss", "on purpose", "the error's words"),
    Known("TestZeroAllowUntestedOptimizer", "ConfigError", "on purpose", "the refusal is no AssertionError"),
    Known("TestZeroToFP32", "= 1 must be true or false", "on purpose", "a number for true or false is an error"),
    Known(r"TestFlopsProfiler::test$", "AssertionError", "on purpose", "the operators of the loss are counted too"),
    Known("test_unmanaged_rejects_pipeline", "managed_gradient_accumulation", "on purpose", "the error's words"),
    Known("TestFP16AdamTypes", "unknown key", "on purpose", "a key at a place where DeepSpeed reads none is an error"),
    # what the tests reach into
    Known(
        "", r"_configure_train_batch_size|_flush_coalesced_reduction|ds_tensor|step_ratio", "private", "an attribute"
    ),
    Known("", r"no attribute '(loss_scale_config|unscale_and_clip_grads)'", "private", "an attribute"),
    Known(
        "",
        r"no attribute '(fp32_groups_gradients_flat|fp16_groups|averaged_gradients|leaf_parameters)'",
        "private",
        "an attribute",
    ),
    Known("", r"ds_persist|nccl_start_alignment_factor|_backward_epilogue", "private", "an attribute"),
    Known("", "ds_active_sub_modules|F.linear is zero3_linear_wrap", "private", "insides of stage 3"),
    Known("", "bit16_groups_flat|Flattening param group", "private", "an attribute of the optimizer, and its log"),
    Known("test_zeropp", "property of 'Parameter' object has no setter", "private", "attributes of a parameter"),
    Known("test_mixed_precision_dtype", "AttributeError", "private", "methods of the engine that cast the module"),
    Known("TestZeroAdamOptimizerStepCount", "KeyError: 'step'", "private", "the inner optimizer's state"),
    Known("", "_is_gradient_accumulation_boundary|_change_recovery_script", "private", "an attribute of the engine"),
    Known("", "accumulated_grads_in_cpu", "private", "an attribute of the optimizer"),
    Known("test_muon", "bit16_groups", "private", "an attribute of the optimizer"),
    Known(
        "test_offload_states",
        r"averaged_gradients|single_partition_of_fp32_groups|grad_partitions_flat_buffer",
        "private",
        "an attribute of the optimizer",
    ),
    Known("test_throughput_calculation", "initialized", "private", "an attribute of the timer"),
    Known("test_pipeline_parallelism_rejected", "pipeline_parallelism", "private", "an attribute that the test sets"),
    Known("test_cpu_adam", "step_subgroup|rollback_subgroup", "private", "of SuperOffload"),
    Known(
        "test_coalesce_issues_fewer_collectives",
        "issued no collectives",
        "private",
        "counts calls of torch.distributed, which deepc's reduction does not make",
    ),
    Known("test_ds_config_model", "pydantic", "private", "DeepSpeed's base class of sections, which is pydantic's"),
    Known(
        "test_autotp_custom_patterns",
        r"attribute '(partition_dim|_subparam_sizes|_slice_embedding)'",
        "private",
        "attributes of DeepSpeed's layers",
    ),
    Known("test_init_tp_mesh_device", "initialize_mesh_device", "private", "insides of deepspeed.utils.groups"),
    Known("test_pipe_module", "_precompute_checkpointable_values|_reentrant_activation", "private", "an attribute"),
    Known("test_pipe_module.*honors_non_reentrant", "AssertionError", "private", "which function recomputes"),
    Known("test_unwrap_model.*TestUnwrapModel::test$", "AssertionError", "private", "the hooks of the optimizer"),
    Known("", r"no attribute '(_external_params|_get_norm_groups|all_gather_coalesced)'", "private", "an attribute"),
    Known("test_zero_hook_attribute_delegation", "pre_bwd_fn", "private", "attributes of modules"),
    Known("test_zero_late_module_attach", "ZeROOrderedDict", "private", "the class of a module's parameters"),
    Known("v1/accelerator", "__path__", "private", "the folder of DeepSpeed's accelerators"),
    Known("test_autocast", "autocast_custom_fwd", "private", "insides of stage 3"),
    Known("test_moe_backward_compat_bool", "AssertionError", "private", "the class of a section"),
    Known("test_nvtx", "No module named 'accelerator", "private", "DeepSpeed's module of a GPU"),
    # features
    Known("test_autoep|test_fused_expert_layout", "", "not built", "AutoEP, which replaces a model's own experts"),
    Known("test_autosp", "", "not built", "AutoSP, for models of vision and language"),
    Known(
        "test_autotp_universal_checkpoint|universal_checkpoint_info",
        "",
        "not built",
        "DeepSpeed's universal checkpoints",
    ),
    Known("test_universal_checkpoint", "", "not built", "DeepSpeed's universal checkpoints"),
    Known("test_zero_tiled", "", "not built", "tiled linear layers"),
    Known("", "(master_weights_and_grads|bf16_optimizer_states) = true", "not built", "masters and states in 16 bits"),
    Known("FPDT", "", "not built", "FPDT, attention with its keys and values in host memory"),
    Known("test_data_efficiency", "mpu=", "not built", "a Megatron mpu"),
    Known("test_gpt2_checkpointable_layers", "topology has the axes", "not built", "a topology with an axis of models"),
    Known("", "ZenFlow", "not built", "ZenFlow"),
    Known("test_zf_torch_adam", "has no setter", "not built", "ZenFlow"),
    Known("", "eigenvalue|compression_training|MiCS_Init", "gone", "removed from DeepSpeed 0.19.8"),
    Known("", "asks for a feature that DeepSpeed removed", "gone", "a key that DeepSpeed 0.19.8 has removed"),
    # the machine
    Known("FlexAttention", "exited with code", "machine", "torch's flex_attention has no backward on a CPU"),
    Known("TestUlyssesSPHFDisableInEval", "cuda|CUDA", "machine", "the test's tensors are on a GPU"),
    Known(
        "test_cpu_(adam|adagrad|lion)_gpu_error",
        _NO_ERROR,
        "machine",
        "the GPU of the test is the CPU: DeepSpeed's raises nothing",
    ),
    Known("test_zero_autocast", "HW support for BFloat16", "machine", "the suite's check of a GPU"),
    Known("", "No module named 'comet_ml'", "machine", "comet_ml is not installed"),
    Known("", "No module named 'mup'", "machine", "mup is not installed"),
    Known("", "Cannot access accelerator device when none is available", "machine", "torch on a machine without a GPU"),
]


class Row(NamedTuple):
    """The counts of one file."""

    file: str
    passed: int
    run: int
    skipped: int
    kinds: dict[str, int]
    failed: int
    seconds: float
    note: str


# How the suite leaves a test out where DeepSpeed's accelerator is the CPU.
_CPU_SKIP = re.compile(r"^( +)if get_accelerator\(\)\.device_name\(\) == [\"']cpu[\"']:\n +pytest\.skip\(.*\)\n", re.M)


# Misspelt in the suite's configurations: a key that DeepSpeed passes over, with the value that it takes without it.
_MISSPELT = re.compile(r'^ +"(grandient_accumulation_steps|step)": 1,\n', re.M)

# The devices that the suite names by a number, which are none on a CPU: to torch's DDP, and of tensors.
_DDP_DEVICE = re.compile(r", device_ids=\[\w+\], output_device=\w+\)")
_DEVICE = re.compile(r"(\bdevice ?= ?|\.to\()(get_accelerator\(\)\.current_device)\(\)")

# torch's own loss scaler, which is a GPU's unless told: on a CPU it scales nothing.
_SCALER = re.compile(r"torch\.amp\.GradScaler\(\)")

# Small models with random weights under the names that the suite asks Hugging Face's hub for.
_MODELS = """
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
BertModel(BertConfig(**sizes)).save_pretrained("bert-base-uncased")
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("hf-internal-testing/tiny-random-LlamaForCausalLM")
"""


def make_models(tests: Path, python: str) -> None:
    """Where transformers is at hand. The suite is run in `tests`, and finds them there."""
    subprocess.run([python, "-c", _MODELS], cwd=tests, capture_output=True, check=False)


def copy_of(checkout: Path, scratch: Path, cpu_skips: bool = True) -> Path:
    """The suite, with the adaptor's changes of its helper, and without a misspelt key and devices by number.
    cpu_skips=False: without "CPU accelerator does not support this test yet" and its need of NCCL for bf16, which are
    about DeepSpeed."""
    tests = scratch / "tests"
    shutil.copytree(checkout / "tests", tests, ignore=shutil.ignore_patterns("__pycache__", "*.pt", "*.bin"))
    for file in (tests / "unit").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        shorter = _DEVICE.sub(r"\1\2_name()", _DDP_DEVICE.sub(")", _MISSPELT.sub("", text)))
        shorter = _SCALER.sub("torch.amp.GradScaler(get_accelerator().device_name())", shorter)
        if (shorter := shorter if cpu_skips else _CPU_SKIP.sub("", shorter)) != text:
            file.write_text(shorter, encoding="utf-8")
    if not cpu_skips and (util := tests / "unit" / "util.py").exists():  # it asks for NCCL
        with util.open("a", encoding="utf-8") as file:
            file.write("\n\nbf16_required_version_check = lambda accelerator_check=True: True\n")
    common = tests / "unit" / "common.py"
    with common.open("a", encoding="utf-8") as file:
        file.write("\n\nimport sitecustomize as _adaptor\n\n_adaptor.mend(globals())\n")
    return tests


def make_command(folder: Path, python: str) -> str:
    """A folder with the command `deepspeed`, which is deepc's launcher, for PATH."""
    folder.mkdir()
    command = folder / "deepspeed"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} -m deepc run --as-deepspeed "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return str(folder)


def environment(results: Path, python_path: list[str], test_limit: int, commands: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    # the sources find the core by this variable only; without it the deepc that is installed is tried
    sources = [str(ROOT / "python")] if env.get("DEEPC_LIBRARY_DIR") else []
    path = [str(HERE / "deepspeed_adaptor"), *sources, *python_path]
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [env.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([commands, env.get("PATH", os.defpath)]),
        "DEEPC_PEER_RESULTS": str(results),
        "DS_UNITTEST_TIMEOUT": str(test_limit),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "DS_DISABLE_REUSE_DIST_ENV": "1",
    }


def run_file(python: str, tests: Path, file: str, env: dict[str, str], limit: float, extra: list[str]) -> float | None:
    """Runs one file of the suite. Seconds, or None if it was cut off. What it starts ends with it."""
    command = [python, "-m", "pytest", file, "-p", "deepspeed_results", "-p", "no:cacheprovider", "-q", "--tb=short"]
    begin = time.monotonic()
    log = Path(env["DEEPC_PEER_RESULTS"]).with_suffix(".log")
    with log.open("wb") as out:
        child = subprocess.Popen(
            [*command, *extra], cwd=tests, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(limit)
            cut = False
        except subprocess.TimeoutExpired:
            cut = True
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
    return None if cut else time.monotonic() - begin


def kind_of(test: str, text: str) -> tuple[str, str] | None:
    """(kind, reason) of a failure that is known."""
    for known in KNOWN:
        if re.search(known.test, test) and re.search(known.error, text, re.S):
            return known.kind, known.reason
    if (name := re.search(r"NotInDeepc: ([\w.]+)", text)) is not None:
        return "private", f"uses {name.group(1)}"
    return None


def counted(file: str, rows: list[dict[str, Any]], missing: int, seconds: float, note: str) -> Row:
    """The counts of a file's results; each failure gets its kind."""
    kinds: dict[str, int] = {}
    for row in rows:
        if row["outcome"] == "failed":
            row["kind"], row["reason"] = kind_of(row["test"], row["text"]) or ("failed", "")
            kinds[row["kind"]] = kinds.get(row["kind"], 0) + 1
    passed, skipped = (sum(r["outcome"] == o for r in rows) for o in ("passed", "skipped"))
    run, failed = len(rows) - skipped + missing, kinds.pop("failed", 0) + missing
    return Row(file, passed, run, skipped, kinds, failed, seconds, note if rows else "nothing was collected")


def read(file: str, results: Path, seconds: float | None, limit: float) -> tuple[Row, list[dict[str, Any]]]:
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []
    by_test: dict[str, dict[str, Any]] = {}
    collected: list[str] = []
    for line in lines:
        if "collected" in line:
            collected = line["collected"]
        elif by_test.get(line["test"], {}).get("outcome") != "failed":
            by_test[line["test"]] = line
    missing = len([t for t in collected if t not in by_test])
    note = f"{missing} not run" if missing else ""
    if seconds is None:
        note = f"cut off after {limit:g} s, {note}"
    rows = list(by_test.values())
    return counted(file, rows, missing, seconds or limit, note), rows


def again(files: list[Path]) -> list[Row]:
    """The rows of earlier runs (--json); a test that a later one has counts as there. What no run has come to is noted
    and not counted."""
    rows: dict[str, dict[str, Any]] = {}
    tests: dict[str, dict[str, Any]] = {}
    for path in files:
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data["rows"]:
            rows.setdefault(row["file"], row)
        tests.update({t["test"]: t for t in data["tests"]})
    out = []
    for file, row in rows.items():
        mine = [t for name, t in tests.items() if name.split("::")[0] == file]
        missing = max(0, row["run"] + row["skipped"] - len(mine))
        out.append(counted(file, mine, 0, row["seconds"], f"{missing} not run" if missing else ""))
    return out


def table(rows: list[Row]) -> str:
    out = [f"| file | passed / run | skipped | {' | '.join(KINDS)} | failed |  |", "|---|" + "---|" * (4 + len(KINDS))]
    kinds = KINDS
    for r in rows:
        counts = " | ".join(str(r.kinds.get(k, 0)) for k in kinds)
        name = r.file.removeprefix("unit/")
        out.append(f"| {name} | {r.passed} / {r.run} | {r.skipped} | {counts} | {r.failed} | {r.note} |")
    total = {k: sum(r.kinds.get(k, 0) for r in rows) for k in kinds}
    passed, run, skipped = (sum(getattr(r, n) for r in rows) for n in ("passed", "run", "skipped"))
    counts = " | ".join(str(total[k]) for k in kinds)
    left = sum(int(n) for r in rows for n in re.findall(r"(\d+) not run", r.note))
    note = f"{left} not run" if left else ""
    out.append(f"| all | {passed} / {run} | {skipped} | {counts} | {sum(r.failed for r in rows)} | {note} |")
    fair = run - sum(total[k] for k in KINDS if k != "on purpose")
    if fair - total["on purpose"] > 0:
        out += [
            "",
            f"of the fair ones ({run} less private, not built, limitation, gone and machine): {passed} / {fair},"
            f" {100 * passed / fair:.1f} %; less those that differ on purpose: {passed} / {fair - total['on purpose']},"
            f" {100 * passed / (fair - total['on purpose']):.1f} %",
        ]
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", type=Path, help="a checkout of DeepSpeed (with tests/unit)")
    parser.add_argument("--again", type=Path, nargs="+", help="run nothing: the table of what --json has written")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with torch and pytest")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for a file (default 1200)")
    parser.add_argument("--test-limit", type=int, default=60, help="seconds for a test of several ranks (default 60)")
    parser.add_argument("--json", type=Path, help="write every test's result there")
    parser.add_argument(
        "--no-cpu-skips", action="store_true", help="run what the suite skips because DeepSpeed can't do it on a CPU"
    )
    parser.add_argument("-k", default=None, help="as pytest's -k")
    parser.add_argument("-m", default=None, help="as pytest's -m; the suite leaves out those marked sequential")
    parser.add_argument("files", nargs="*", help="files below tests/, or below tests/unit/ without .py")
    args = parser.parse_args()
    if args.again:
        rows = again(args.again)
        print(table(rows))
        return 1 if any(r.failed for r in rows) else 0
    if args.deepspeed is None:
        parser.error("--deepspeed: where is the checkout?")
    if not (args.deepspeed / "tests" / "unit" / "common.py").is_file():
        parser.error(f"{args.deepspeed} has no tests/unit/common.py: it is not a checkout of DeepSpeed")
    rows, everything = [], []
    with tempfile.TemporaryDirectory(prefix="deepc-deepspeed-tests-") as folder:
        tests = copy_of(args.deepspeed.resolve(), Path(folder), not args.no_cpu_skips)
        make_models(tests, args.python)
        commands = make_command(Path(folder) / "bin", args.python)
        for number, name in enumerate(args.files or FILES):
            file = name if name.endswith(".py") else f"unit/{name.removeprefix('unit/')}.py"
            if not (tests / file).is_file():
                parser.error(f"{file}: no such file below {args.deepspeed}/tests")
            results = Path(folder) / f"results-{number}.jsonl"
            env = environment(results, [str(tests)], args.test_limit, commands)
            extra = [*(["-k", args.k] if args.k else []), *(["-m", args.m] if args.m else [])]
            seconds = run_file(args.python, tests, file, env, args.limit, extra)
            row, found = read(file, results, seconds, args.limit)
            if row.note == "nothing was collected":
                print(results.with_suffix(".log").read_text(errors="replace")[-3000:], file=sys.stderr)
            rows.append(row)
            everything += found
            for r in found:
                if r["outcome"] == "failed":
                    last = [ln for ln in r["text"].splitlines() if ln.startswith("E ")] or r["text"].splitlines()[-1:]
                    print(f"{r['kind']}: {r['test']}: {r['reason'] or ' '.join(last[-1].split())[:240]}", flush=True)
            print(f"{file}: {row.passed} / {row.run} in {row.seconds:.0f} s {row.note}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": [r._asdict() for r in rows], "tests": everything}, indent=1))
    print("\n" + table(rows))
    return 1 if any(r.failed for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
