"""The `deepspeed` import name: the finder, the table of names, what is not there, and the small modules behind it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types

import pytest
import torch
from deepc.compat import names
from deepc.errors import ArgumentError, CheckpointError, ConfigError, UnsupportedError
from programs import run_python
from ranks import run_ranks


def test_every_name_of_the_table_resolves(deepspeed):
    count = 0
    for module in ["deepspeed", *("deepspeed." + m for m in names.MODULES if m), *names.REAL_MODULES]:
        for name in names.table(module):
            getattr(importlib.import_module(module), name)
            count += 1
    assert count > 200


def test_metadata_says_version(deepspeed):
    assert deepspeed.__version__ == importlib.metadata.version("deepspeed") == names.VERSION
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"


def test_one_module_under_two_names(deepspeed):
    import deepspeed.runtime.zero
    import deepspeed.zero

    assert deepspeed.zero is deepspeed.runtime.zero
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    assert comm.get_rank() == 0 and GatheredParameters is deepspeed.zero.GatheredParameters
    deepspeed.zero.something = 3  # scripts may patch modules
    assert importlib.import_module("deepspeed.runtime.zero").something == 3
    del deepspeed.zero.something


def test_what_a_script_sets_in_a_module_is_what_it_does(deepspeed, monkeypatch):
    """deepspeed.checkpointing is another object than the module whose functions read its names."""
    from deepc.compat.runtime import checkpointing

    mpu = types.ModuleType("mpu")
    monkeypatch.setattr(deepspeed.checkpointing, "mpu", mpu)
    monkeypatch.setattr(deepspeed.checkpointing, "num_layers", 7)
    assert checkpointing.mpu is deepspeed.checkpointing.mpu is mpu and checkpointing.num_layers == 7
    deepspeed.checkpointing.set_num_layers(8)
    assert deepspeed.checkpointing.num_layers == 8
    deepspeed.comm.something = 3
    assert deepspeed.comm.something == 3 and not hasattr(deepspeed.utils.groups, "something")
    del deepspeed.comm.something


def test_what_deepc_has_not_imports_and_raises_on_use(deepspeed):
    from deepspeed.linear import QuantizationConfig

    assert not isinstance(3, QuantizationConfig) and not issubclass(int, QuantizationConfig)
    for use in (
        lambda: QuantizationConfig(8),
        lambda: QuantizationConfig.something,
        lambda: type("Mine", (QuantizationConfig,), {})(),
        lambda: deepspeed.autotuning(True),
    ):
        with pytest.raises(UnsupportedError, match="does not exist in deepc: .*(not built yet|see docs/)"):
            use()


def test_unknown_names_look_absent_to_python(deepspeed):
    assert not hasattr(deepspeed, "no_such_name") and getattr(deepspeed, "no_such_name", 7) == 7
    with pytest.raises(UnsupportedError, match="deepspeed.no_such_name"):
        deepspeed.no_such_name
    with pytest.raises(ImportError, match="deepspeed.no_such_module does not exist in deepc"):
        import deepspeed.no_such_module
    with pytest.raises(ImportError, match="deepspeed.compression.*removed"):
        from deepspeed.compression.compress import init_compression  # noqa: F401
    with pytest.raises(UnsupportedError, match="deepspeed.no_such_name does not exist"):
        from deepspeed import no_such_name  # noqa: F401
    for module in ("deepspeed.no_such_module", "deepspeed.ops.no_such_module", "deepspeed.compression.compress"):
        assert importlib.util.find_spec(module) is None
    assert importlib.util.find_spec("deepspeed.ops.adam") is not None
    with pytest.raises(ModuleNotFoundError, match="deepspeed.no_such_module does not exist in deepc"):
        importlib.util.find_spec("deepspeed.no_such_module.below")


def test_lacking_names_are_not_also_there():
    for path in names.LACKING:
        module, _, name = path.rpartition(".")
        full = f"deepspeed.{module}" if module else "deepspeed"
        assert name not in names.table(full), path


def test_a_real_deepspeed_is_not_shadowed_silently():
    script = (
        "import sys, types; sys.modules['deepspeed'] = types.ModuleType('deepspeed')\n"
        "try:\n import deepc.compat.deepspeed\nexcept ImportError as e:\n print('refused:', e)"
    )
    out = run_python("-c", script)
    assert "refused: deepspeed was imported before deepc.compat.deepspeed" in out.stdout


def _ends(rank, world, how):
    """This process and whether the name was free, before a job that leaves it as `how`."""
    free = "deepspeed" not in sys.modules and "transformers.integrations.deepspeed" not in sys.modules
    if how == "looked":  # as transformers without a DeepSpeed
        module = sys.modules["transformers.integrations.deepspeed"] = types.ModuleType("deepspeed")
        module.DeepSpeedConfig = object
    elif how == "ours":
        from deepc.compat import deepspeed  # noqa: F401  ShadowedError where the job before has looked
    return os.getpid(), free


@pytest.mark.full  # it is ranks.py that is tested
def test_a_job_of_ranks_that_takes_the_name_begins_where_it_is_free():
    own = {"TEST_OF": "names"}  # processes that no other test has left a name in
    ran = [run_ranks(_ends, 1, args=(how,), env=own)[0] for how in ("", "looked", "", "ours", "", "")]
    pids = [pid for pid, _ in ran]
    assert pids[0] == pids[1] == pids[2] and pids[4] == pids[5] and len(set(pids)) == 3, pids
    assert [free for _, free in ran] == [True, True, False, True, True, True]


def test_uninstall_forgets():
    script = (
        "import deepc.compat.deepspeed as ours\nimport deepspeed, sys\nassert ours.initialize is"
        " deepspeed.initialize\nours.uninstall()\nassert not any(n.split('.')[0] == 'deepspeed' for n in"
        " sys.modules)\nprint('gone')"
    )
    out = run_python("-c", script)
    assert out.stdout == "gone\n"


def test_accelerates_swap_to_cpu_adam_keeps_betas_and_eps(deepspeed):
    """With offload to the CPU Accelerate puts DeepSpeedCPUAdam in the place of the script's optimizer, of whose
    arguments it passes two."""
    swap = pytest.importorskip("accelerate.utils.deepspeed").map_pytorch_optim_to_deepspeed
    torch.manual_seed(0)
    start, grads = torch.randn(1000), [torch.randn(1000) for _ in range(3)]
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        options = {"lr": 1e-2, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.2}
        a, b = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        ours, theirs = swap(kind([a], **options)), kind([b], **options)
        assert type(ours) is deepspeed.ops.adam.DeepSpeedCPUAdam
        assert {k: ours.param_groups[0][k] for k in options} == options
        for g in grads:
            a.grad, b.grad = g.clone(), g.clone()
            ours.step()
            theirs.step()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_optimizers_step_as_torchs(deepspeed):
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    torch.manual_seed(0)
    start, grads = torch.randn(1000), [torch.randn(1000) for _ in range(3)]
    for make, reference in (
        (
            lambda p: DeepSpeedCPUAdam([p], lr=1e-2, weight_decay=0.1),
            lambda p: torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1),
        ),
        (
            lambda p: DeepSpeedCPUAdam([p], lr=1e-2, weight_decay=0.1, adamw_mode=False),
            lambda p: torch.optim.Adam([p], lr=1e-2, weight_decay=0.1),
        ),
        (
            lambda p: FusedAdam([{"params": [p], "betas": (0.8, 0.9)}], lr=1e-2),
            lambda p: torch.optim.AdamW([p], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.0),
        ),
    ):
        a, b = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        ours, theirs = make(a), reference(b)
        for g in grads:
            a.grad, b.grad = g.clone(), g.clone()
            ours.step()
            theirs.step()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    with pytest.raises(UnsupportedError, match="bias_correction"):
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], bias_correction=False)


def test_small_helpers(deepspeed):
    from deepspeed.runtime.utils import call_to_str, partition_balanced, partition_uniform
    from deepspeed.utils import OnDevice, RepeatingLoader, set_z3_leaf_modules

    assert partition_uniform(10, 3) == [0, 4, 7, 10] and partition_balanced([1, 1, 1, 9, 1, 1], 3) in (
        [0, 3, 4, 6],
        [0, 1, 4, 6],
    )
    bounds = partition_balanced([3, 1, 4, 1, 5, 9, 2, 6], 3)
    assert max(sum([3, 1, 4, 1, 5, 9, 2, 6][a:b]) for a, b in zip(bounds, bounds[1:])) == 14
    assert partition_balanced([0.3, 0.1, 0.1, 0.1], 2) == [0, 1, 4]  # halving went on for ever
    assert partition_balanced([1] * 5, 4) == partition_balanced([0, 0, 0, 0, 5], 4) == [0, 1, 2, 3, 5]  # none is empty
    assert partition_balanced([1e-8] * 4, 2) == partition_balanced(torch.ones(4).numpy(), 2) == [0, 2, 4]
    assert call_to_str("f", 1, a="b") == "f(1, a='b')"
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(3, 4)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert set_z3_leaf_modules(model, [torch.nn.Linear]) == [model[0]]
    with pytest.raises(ArgumentError, match="no modules of type"):
        set_z3_leaf_modules(model, ["Conv2d"])


def test_accelerator_and_groups(deepspeed):
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    device = get_accelerator()
    state = device.get_rng_state()
    a = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(a, torch.rand(3)) and device.memory_allocated() > 0 and device.device_name() in ("cpu", "cuda")
    assert groups._get_sequence_parallel_world_size() == 1 and groups._get_data_parallel_rank() == 0
    with pytest.raises(UnsupportedError, match="ep_size=2"):
        groups.initialize(ep_size=2)


def test_tensors_of_an_accelerator_are_on_it(deepspeed):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    for name, dtype in (("Float", torch.float32), ("BFloat16", torch.bfloat16), ("Byte", torch.uint8)):
        assert getattr(CPU_Accelerator(), f"{name}Tensor")([1, 2]).dtype == dtype
        made = getattr(CUDA_Accelerator(), f"{name}Tensor")
        assert made.func is torch.tensor and made.keywords == {"dtype": dtype, "device": "cuda"}


def test_the_throughput_timer_counts_all_micro_batches_of_a_step(deepspeed, monkeypatch):
    from deepspeed.utils import timer

    clock = iter(range(100))
    monkeypatch.setattr(timer.time, "perf_counter", lambda: float(next(clock)))
    of = timer.ThroughputTimer(batch_size=8, start_step=2)
    for micro_batch in range(1, 13):  # steps of 4
        of.start()
        of.stop(global_step=micro_batch % 4 == 0)
    assert of.avg_samples_per_sec() == 8 / 4


@pytest.mark.parametrize("minutes", ["soon", "0", "nan", "1e99"])
def test_a_timeout_that_is_none_is_named(deepspeed, monkeypatch, minutes):
    from deepc.compat.helpers import comm

    for good, seconds in (("0.5", 30), ("", comm._own.DEFAULT_TIMEOUT.total_seconds())):
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", good)
        assert comm._timeout().total_seconds() == seconds
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    with pytest.raises(ConfigError, match=f"DEEPSPEED_TIMEOUT='{minutes}' must be a number of minutes"):
        comm._timeout()


def test_activation_checkpointing(deepspeed):
    deepspeed.checkpointing.configure(None, num_checkpoints=2)
    x = torch.randn(4, 4, requires_grad=True)
    deepspeed.checkpointing.checkpoint(lambda t: (t * t).sum(), x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    assert deepspeed.checkpointing.is_configured() and deepspeed.checkpointing.num_layers == 2


def test_init_inference_fuses_what_can_be(deepspeed, caplog):
    x, plain = torch.randn(3, 4), torch.nn.Linear(4, 4)
    engine = deepspeed.init_inference(plain, replace_with_kernel_inject=True)
    assert torch.equal(engine(x), plain(x)) and "nothing in Linear can be fused" in caplog.text
    normed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    deepspeed.init_inference(normed, replace_with_kernel_inject=True)
    assert type(normed[1]) is not torch.nn.LayerNorm and caplog.text.count("changes nothing") == 1


def test_init_inference(deepspeed, tmp_path):
    model = torch.nn.Linear(4, 2)
    engine = deepspeed.init_inference(model, dtype=torch.bfloat16, tensor_parallel={"tp_size": 1})
    assert (
        engine(torch.randn(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
        and not engine.module.training
        and engine.in_features == 4
    )
    with pytest.raises(UnsupportedError, match="tensor parallelism"):
        deepspeed.init_inference(model, mp_size=2)
    with pytest.raises(ArgumentError, match="does not know no_such"):
        deepspeed.init_inference(model, no_such=1)
    (tmp_path / "torn.json").write_text('{"dtype": ')
    (tmp_path / "good.json").write_text('{"dtype": "bf16"}  // as a configuration of training')
    assert deepspeed.init_inference(model, str(tmp_path / "good.json"))._config.dtype == "bf16"
    for wrong, text in (
        (str(tmp_path / "none.json"), "can't read the configuration file .*none.json"),
        (str(tmp_path / "torn.json"), "torn.json, line 1, column"),
        (deepspeed.DeepSpeedInferenceConfig(), "not DeepSpeedInferenceConfig"),
    ):
        with pytest.raises(ConfigError, match=text):
            deepspeed.init_inference(model, wrong)


def test_default_inference_config_is_the_callers_to_change(deepspeed):
    deepspeed.default_inference_config()["tensor_parallel"]["tp_size"] = 2
    assert deepspeed.default_inference_config()["tensor_parallel"] == {}
    deepspeed.init_inference(torch.nn.Linear(4, 2), dtype=torch.bfloat16)


def test_a_plain_deepspeed_script(deepspeed, tmp_path):
    """The loop of DeepSpeed's own tutorials, with its accessors, checkpoints and zero_to_fp32."""
    import argparse

    import tiny

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args([])
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
    }
    deepspeed.init_distributed()
    model = tiny.make_model()
    engine, optimizer, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=config
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    for step in range(3):
        x, y = tiny.make_batch(step, 4)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
    assert (
        engine.get_batch_info() == (4, 4, 1)
        and engine.zero_optimization_partition_gradients()
        and engine.dp_world_size == 1
    )
    assert engine.zero_reduce_bucket_size() > 0 and engine.optimizer_name() == "adam" and engine.global_steps == 3
    with pytest.raises(UnsupportedError, match="train_batch"):
        engine.train_batch()
    assert not hasattr(engine, "no_such_thing")
    engine.set_train_batch_size(8)
    assert engine.gradient_accumulation_steps() == 2
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    from deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
    )

    whole = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    expected = {k: v.clone() for k, v in engine.module.state_dict().items()}
    assert whole.keys() == expected.keys() and all(torch.equal(whole[k], expected[k]) for k in whole)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "safe", safe_serialization=True)
    subprocess.run(
        [sys.executable, tmp_path / "zero_to_fp32.py", tmp_path, tmp_path / "pickled", "--dtype", "bf16"], check=True
    )
    pickled = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    assert pickled.keys() == expected.keys() and all(
        torch.equal(pickled[k], expected[k].to(pickled[k].dtype)) for k in pickled
    )
    from safetensors.torch import load_file

    safe = load_file(tmp_path / "safe" / "model.safetensors")
    assert all(torch.equal(v, expected[k]) for k, v in safe.items())
    engine.save_16bit_model(tmp_path / "bin")
    assert torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True).keys() == expected.keys()
    for folder, name in (
        ("bin/pytorch_model.bin", "a.bin"),
        ("bin", "no/a.bin"),
    ):  # mkdir's error, and torch.save's own
        with pytest.raises(CheckpointError, match=f"can't write .*/{folder}/{name}: "):
            engine.save_16bit_model(tmp_path / folder, name)
    engine.destroy()


def test_checkpoints_as_models_again_and_again(deepspeed, tmp_path, caplog):
    """A folder that has another model's files, a script that can't be left, names that only one side has."""
    import tiny
    from deepspeed.utils import zero_to_fp32

    (tmp_path / "zero_to_fp32.py").mkdir()
    engine, *_ = deepspeed.initialize(
        model=tiny.make_model(), config={"train_batch_size": 4, "optimizer": {"type": "Adam"}}
    )
    engine.save_checkpoint(tmp_path)
    assert "zero_to_fp32.py: Is a directory; the checkpoint is saved" in caplog.text
    out = tmp_path / "out"
    for size in ("5GB", 1, "5 GiB"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, max_shard_size=size)
        names = {p.name for p in out.iterdir()}
        assert ("pytorch_model.bin" in names) == ("pytorch_model.bin.index.json" not in names) == (size != 1)
        assert size == 1 or names == {"pytorch_model.bin"}
    with pytest.raises(ArgumentError, match="'1.2.3GB' is not a size"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, max_shard_size="1.2.3GB")
    caplog.clear()
    zero_to_fp32.load_state_dict_from_zero_checkpoint(tiny.make_model(), tmp_path)
    assert "checkpoint" not in caplog.text
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    zero_to_fp32.load_state_dict_from_zero_checkpoint(other, tmp_path)
    assert "2 of the model's tensors are not in checkpoint" in caplog.text and "0.weight, 0.bias" in caplog.text
    assert "are not in the model: " in caplog.text
    engine.destroy()


def test_what_an_engine_says_of_offload_and_takes_in_backward(deepspeed):
    import tiny

    def made(**zero):
        config = {"train_batch_size": 4, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2, **zero}}
        return deepspeed.initialize(model=tiny.make_model(), config=config)[0]

    engine = made()
    assert engine.zero_offload_optimizer() is engine.zero_offload_param() is None
    assert not engine.zero_cpu_offload() and not engine.zero_use_cpu_optimizer()
    loss = engine(*tiny.make_batch(0, 4))
    with pytest.raises(ArgumentError, match=r"engine.backward\(\) does not take create_graph: "):
        engine.backward(loss, create_graph=True)
    engine.backward(loss, allreduce_gradients=True, release_loss=False)
    assert engine.step().applied
    for wrong in (6.0, True, 0):
        with pytest.raises(ArgumentError, match="set_train_batch_size"):
            engine.set_train_batch_size(wrong)
    engine.set_train_batch_size(torch.tensor([8]).numpy()[0])
    assert type(engine.gradient_accumulation_steps()) is int
    offloaded = made(offload_optimizer={"device": "cpu"})
    assert offloaded.zero_offload_optimizer().device == "cpu" and offloaded.zero_use_cpu_optimizer()


def test_an_engine_without_optimizer_is_for_evaluation(deepspeed):
    import tiny

    model = tiny.make_model()
    x, y = tiny.make_batch(0, 4)
    expected = model(x, y).item()
    engine, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 4, "zero_optimization": {"stage": 3}})
    with torch.no_grad():
        assert engine(x, y).item() == expected
    with pytest.raises(ValueError, match="needs an optimizer"):
        engine.step()
    engine.destroy()


def test_the_documentation_lists_the_table():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
    assert text.endswith(names.listing()), "run: python -m deepc.compat.names, and put it at the end of docs/compat.md"
