"""The configuration: every key against DeepSpeed 0.19.8, real-world files, and every way to be wrong."""

from __future__ import annotations

import base64
import copy
import dataclasses
import itertools
import json
import re
import string

import pytest
from deepc.config import Config, explain, schema
from deepc.config import rules as c
from deepc.config.keys import ANY, KEYS, OPTIMIZER_PARAMS, TABLE, State
from deepc.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st


def load(raw=None, world_size=1, **kw) -> Config:
    raw = {} if raw is None else raw
    if isinstance(raw, dict) and not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(raw):
        raw = {"train_batch_size": world_size, **raw}
    return Config.load(raw, world_size=world_size, **kw)


def refused(raw, world_size=1, **kw) -> str:
    with pytest.raises(ConfigError) as error:
        load(raw, world_size, **kw)
    return str(error.value)


def nested(path: str, value) -> dict:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


# ---- the table -------------------------------------------------------------------------------------------------------


def test_rows_are_whole():
    assert len(TABLE) == len(KEYS)
    for row in KEYS:
        kinds = ("bool", "int", "number", "str", "strings", "ints", "numbers", "object", "gated", "pick", "any")
        assert row.kind in kinds, row.path
        assert row.help, row.path
        if row.state is not State.ACTIVE:
            assert row.why, row.path
        if row.default is not None and row.kind != "gated":
            assert c.check_value(row, row.default) == row.default, row.path
        if row.state is State.LATER and row.ok is not ANY and row.kind != "gated":
            assert any(c._same(row.default, o) for o in row.ok), f"{row.path}: its own default is refused"


def test_every_active_row_has_a_field_and_every_field_a_row():
    tree = load({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}})
    ours = {"world_size", "device_type", "source", "raw", "inert", "auto", "given", "defaults"}
    fields: set[str] = set()

    def walk(node, prefix):
        for f in dataclasses.fields(node):
            value = getattr(node, f.name)
            path = f"{prefix}{'zero_optimization' if f.name == 'zero' else f.name}"
            if dataclasses.is_dataclass(value):
                walk(value, path + ".")
            else:
                fields.add(path)

    walk(tree, "")
    fields -= ours | {"optimizer.backend", "optimizer.decoupled"}
    assert fields <= set(TABLE), fields - set(TABLE)
    legacy = {"zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"}
    active = {k.path for k in KEYS if k.state is State.ACTIVE} - legacy
    assert active <= fields, active - fields


def deepspeed_models():
    """(prefix, pydantic model) of DeepSpeed's sections."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: defaults are not compared with it")
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    return [
        ("zero_optimization", DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
        ("fp16", DeepSpeedFP16Config),
        ("bf16", DeepSpeedBF16Config),
        ("compile", CompileConfig),
        ("tensorboard", TensorBoardConfig),
        ("wandb", WandbConfig),
        ("csv_monitor", CSVConfig),
        ("comet", CometConfig),
    ]


def test_keys_and_defaults_are_deepspeeds():
    nested_sections = {"offload_param", "offload_optimizer", "leaf_module"}
    for prefix, model in deepspeed_models():
        for name, info in model.model_fields.items():
            if name in nested_sections:
                continue
            path = f"{prefix}.{info.alias or name}"
            row = TABLE.get(path)
            assert row is not None, f"DeepSpeed has {path}, the table does not"
            default = info.get_default(call_default_factory=True)
            default = getattr(default, "value", default)
            assert row.default == default, path


def test_top_level_defaults_are_deepspeeds():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: defaults are not compared with it")
    from deepspeed.runtime import constants as d

    names = [
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "gradient_clipping",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "communication_data_type",
        "dataloader_drop_last",
        "disable_allgather",
        "disable_python_gc",
        "vocabulary_size",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "log_level",
        "managed_gradient_accumulation",
        "seq_parallel_communication_data_type",
    ]
    for name in names:
        assert TABLE[name].default == getattr(d, f"{name.upper()}_DEFAULT"), name


def test_removed_keys_of_deepspeed_are_refused_by_name():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: its list of removed keys is not compared")
    from deepspeed.runtime import config as d

    ours = {"sparse_attention", "curriculum_learning"}  # what DeepSpeed had, deepc has
    assert ours < set(d._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    for key in set(d._REMOVED_TOP_LEVEL_CONFIG_KEYS) - ours:
        assert key in refused({key: True if TABLE[key].kind == "bool" else {"enabled": True, "x": 1}}), key
    for key in d._REMOVED_ZERO_CONFIG_KEYS:
        assert f"zero_optimization.{key}" in refused(
            {"zero_optimization": {key: {"x": 1} if "loco" in key else True if "hier" in key else 4}}
        ), key


# ---- the batch triangle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "world", "want"),
    [
        ((32, None, None), 4, (32, 8, 1)),
        ((None, 8, None), 4, (32, 8, 1)),
        ((32, 4, None), 4, (32, 4, 2)),
        ((32, None, 2), 4, (32, 4, 2)),
        ((None, 4, 2), 4, (32, 4, 2)),
        ((32, 4, 2), 4, (32, 4, 2)),
        ((1, None, None), 1, (1, 1, 1)),
    ],
)
def test_triangle(given_, world, want):
    raw = {k: v for k, v in zip(c.TRIANGLE, given_, strict=True) if v is not None}
    cfg = Config.load(raw, world_size=world)
    assert (cfg.train_batch_size, cfg.train_micro_batch_size_per_gpu, cfg.gradient_accumulation_steps) == want


@pytest.mark.parametrize(
    ("given_", "world", "text"),
    [
        (
            (10, 4, None),
            2,
            (
                "train_batch_size 10 is not train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 1 (derived)"
                " * 2 rank(s) = 8"
            ),
        ),
        ((32, 4, 3), 4, "train_batch_size 32 is not"),
        ((3, None, None), 4, "train_micro_batch_size_per_gpu 0 (derived)"),
        ((8, 16, None), 1, "gradient_accumulation_steps 0 (derived)"),
        ((None, None, 4), 1, "give train_batch_size or"),
        ((0, None, None), 1, "> 0"),
    ],
)
def test_triangle_errors(given_, world, text):
    raw = {k: v for k, v in zip(c.TRIANGLE, given_, strict=True) if v is not None}
    with pytest.raises(ConfigError) as error:
        Config.load(raw, world_size=world)
    assert text in str(error.value)


def test_a_batch_that_counts_tensor_parallel_ranks_is_read_as_deepspeed_reads_it():
    given = {**dict(zip(c.TRIANGLE, (16, 2, 2), strict=True)), "tensor_parallel": {"autotp_size": 2}}
    cfg = Config.load(given, world_size=4)
    assert (cfg.train_batch_size, cfg.train_micro_batch_size_per_gpu, cfg.gradient_accumulation_steps) == (8, 2, 2)
    assert "train_batch_size = 16: it counts the 2 tensor-parallel ranks" in cfg.describe_inert()
    assert "a step has 8 samples" in cfg.describe_inert()
    plain = Config.load({**given, "train_batch_size": 8}, world_size=4)
    assert plain.train_batch_size == 8 and not plain.inert
    with pytest.raises(ConfigError, match="train_batch_size 32 is not"):
        Config.load({**given, "train_batch_size": 32}, world_size=4)


def test_triangle_is_deepspeeds():
    """All small triangles: the same values, and the same ones refused."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: triangles are not compared with it")
    from deepspeed.runtime.config import DeepSpeedConfig

    theirs = DeepSpeedConfig.__new__(DeepSpeedConfig)
    values = [None, 1, 2, 3, 4, 6, 8, 12, 24]
    for train, micro, accum, world in itertools.product(values, values[:6], values[:5], (1, 2, 3)):
        theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps = (
            train,
            micro,
            accum,
        )
        theirs.world_size = world
        try:
            theirs._configure_train_batch_size()
            want = (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps)
        except AssertionError:
            want = None
        try:
            cfg = Config.load(
                {k: v for k, v in zip(c.TRIANGLE, (train, micro, accum), strict=True) if v is not None},
                world_size=world,
            )
            got = (cfg.train_batch_size, cfg.train_micro_batch_size_per_gpu, cfg.gradient_accumulation_steps)
        except ConfigError:
            got = None
        assert got == want, (train, micro, accum, world)


def test_world_size_and_device_are_checked():
    for bad in (0, -1, 1.0, True, None):
        with pytest.raises(ConfigError, match="world_size"):
            Config.load({"train_batch_size": 1}, world_size=bad)
    assert "device_type" in refused({}, device_type="tpu")


# ---- values ----------------------------------------------------------------------------------------------------------


def test_defaults():
    cfg = load()
    assert cfg.gradient_clipping == 1.0 and cfg.steps_per_print is None and cfg.communication_data_type is None
    assert cfg.zero.stage == 0 and cfg.zero.reduce_bucket_size == 500_000_000 and cfg.zero.overlap_comm is False
    assert cfg.optimizer is None and cfg.scheduler is None and cfg.dtype == "fp32"
    assert cfg.zero.offload_optimizer.device == "none" and cfg.data_types.grad_accum_dtype == "fp32"
    assert cfg.inert == () and cfg.auto == () and cfg.deepc.bucket_elems is None
    assert c.default_optimizer().params == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
    }


@pytest.mark.parametrize(
    ("raw", "keys"),
    [
        ({}, ["gradient_clipping", "optimizer.type"]),
        ({"gradient_clipping": 0, "optimizer": {"type": "AdamW"}}, ["optimizer.params.weight_decay"]),
        ({"gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.0}}}, []),
        ({"gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {}}}, []),
        (
            {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}},
            ["gradient_clipping", "optimizer.params.adam_w_mode"],
        ),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}}, ["gradient_clipping"]),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, ["gradient_clipping"]),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, ["gradient_clipping"]),
    ],
)
def test_defaults_that_change_results_are_known(raw, keys):
    cfg = load(raw)
    assert [d.key for d in cfg.defaults] == keys
    found = explain.check({"train_batch_size": 1, **raw}, ranks=1)
    assert found.to_dict()["defaults"] == [d._asdict() for d in cfg.defaults]
    assert all(d.key in str(found) and d.says.split()[0] in str(found) for d in cfg.defaults)
    assert ("default changes results" in str(found)) == bool(keys)


def test_default_optimizer_is_deepspeeds_adam():
    import inspect

    adam = pytest.importorskip(
        "deepspeed.ops.adam", reason="deepspeed is not installed: its Adam's defaults are not compared"
    )
    defaults = {p.name: p.default for p in inspect.signature(adam.DeepSpeedCPUAdam.__init__).parameters.values()}
    for name, value in c.default_optimizer().params.items():
        assert defaults[name] == value, name


def test_values_reach_the_tree():
    cfg = load(
        {
            "gradient_clipping": 0,
            "steps_per_print": 10,
            "prescale_gradients": True,
            "gradient_predivide_factor": 2,
            "communication_data_type": "BF16",
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e6},
            "bf16": {"enabled": True},
            "deepc": {"bucket_elems": 1000},
            "checkpoint": {"tag_validation": "FAIL"},
            "log_level": "DEBUG",
        }
    )
    assert (
        cfg.gradient_clipping == 0.0
        and cfg.steps_per_print == 10
        and cfg.prescale_gradients
        and cfg.gradient_predivide_factor == 2.0
    )
    assert cfg.communication_data_type == "bf16" and cfg.dtype == "bf16" and cfg.log_level == "debug"
    assert (
        cfg.zero.stage == 3
        and cfg.zero.reduce_bucket_size == 5_000_000
        and isinstance(cfg.zero.reduce_bucket_size, int)
    )
    assert cfg.zero.overlap_comm is True and cfg.deepc.bucket_elems == 1000 and cfg.checkpoint.tag_validation == "Fail"


def test_pre_scale_is_deepspeeds():
    """allreduce_bucket of its engine: prescale divides by the ranks first; the predivide factor belongs to the other
    way."""
    assert load({}, 4).pre_scale == 1.0
    assert load({"gradient_predivide_factor": 8}, 4).pre_scale == 0.125
    assert load({"gradient_predivide_factor": 8, "prescale_gradients": True}, 4).pre_scale == 0.25


def test_the_tree_is_frozen_and_raw_is_a_copy():
    raw = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"betas": (0.8, 0.9)}},
    }
    before = copy.deepcopy(raw)
    cfg = load(raw)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.zero.stage = 2
    cfg.raw["zero_optimization"]["stage"] = 3
    assert raw == before
    assert Config.load(load(raw), world_size=2).train_micro_batch_size_per_gpu == 2


BAD_VALUES = [
    ("gradient_clipping", "1.0", "write it without quotes"),
    ("gradient_clipping", -1, ">= 0"),
    ("gradient_clipping", True, "a number"),
    ("gradient_clipping", float("inf"), "finite"),
    ("steps_per_print", 0, "> 0"),
    ("steps_per_print", 1.5, "an integer"),
    ("wall_clock_breakdown", 1, "true or false"),
    ("wall_clock_breakdown", "true", "without quotes"),
    ("zero_optimization.stage", 4, "<= 3"),
    ("zero_optimization.stage", [3], "an integer"),
    ("zero_optimization", 3, "must be an object"),
    ("zero_optimization", "auto", "must be an object"),
    ("fp16.loss_scale", -1, ">= 0"),
    ("fp16.hysteresis", 0, ">= 1"),
    ("fp16.min_loss_scale", 0, "> 0"),
    ("fp16.enabled", None, "true or false"),
    ("communication_data_type", "fp8", "one of fp32, bf16, fp16"),
    ("communication_data_type", 16, "a string"),
    ("zero_optimization.offload_optimizer.device", "disk", "one of none, cpu, nvme"),
    ("zero_optimization.leaf_module.names", [1], "a list of strings"),
    ("optimizer.params", [], "an object"),
    ("checkpoint.tag_validation", "maybe", "one of Ignore, Warn, Fail"),
    ("dataloader_drop_last", "auto", "no integration fills this key"),
    ("train_batch_size", 2.5, "an integer"),
]


@pytest.mark.parametrize(("path", "value", "text"), BAD_VALUES)
def test_bad_values_name_key_value_file_and_fix(path, value, text, tmp_path):
    raw = {"train_micro_batch_size_per_gpu": 1, **nested(path, value)}
    message = refused(raw)
    assert text in message and f"{path} = " in message and json.dumps(value, default=str) in message
    if value != float("inf"):
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(raw))
        assert str(file) in refused(str(file)) and text in refused(file)


LATER = [
    ("elasticity.enabled", True, "elastic"),
    ("autotuning.enabled", True, "autotuning"),
    ("data_efficiency.data_routing.enabled", True, "random-LTD"),
    ("data_efficiency.data_sampling.dynamic_batching.enabled", True, "dynamic batching"),
    ("hybrid_engine.enabled", True, "hybrid engine"),
    ("bf16.bf16_optimizer_states", True, "bf16 optimizer states"),
    ("fp16.fp16_master_weights_and_grads", True, "fp16 master weights"),
    ("compile.deepcompile", True, "DeepCompile"),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, "ZenFlow"),
    ("expert_parallel.enabled", True, "expert parallelism"),
]


@pytest.mark.parametrize(("path", "value", "capability"), LATER)
def test_later_capabilities_are_refused_by_name(path, value, capability):
    message = refused(nested(path, value))
    assert path in message and capability in message and "does not have yet" in message


@pytest.mark.parametrize("name", ["MuSGD", "MuAdam"])
def test_later_optimizers_are_refused_by_name(name):
    message = refused({"optimizer": {"type": name, "params": {"lr": 1e-3}}})
    assert "optimizer.type" in message and "does not have yet" in message


@pytest.mark.parametrize(
    "section",
    [
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "flops_profiler",
        "comms_logger",
        "elasticity",
        "autotuning",
        "curriculum_learning",
        "data_efficiency",
        "hybrid_engine",
        "torch_autocast",
        "amp",
        "progressive_layer_drop",
        "expert_parallel",
        "eigenvalue",
    ],
)
def test_disabled_sections_are_fine(section):
    assert load({section: {"enabled": False}}).inert == ()


def test_settings_of_a_disabled_section_are_fine():
    load(
        {
            "wandb": {"enabled": False, "project": "x"},
            "amp": {"enabled": False, "opt_level": "O1"},
            "aio": None,
            "compression_training": {},
            "flops_profiler": {"enabled": False, "profile_step": 5},
            "zero_optimization": {"offload_param": None, "zenflow": None},
            "optimizer": None,
            "scheduler": None,
            "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
        }
    )


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "meant"),
    [
        ({"train_batch_sise": 4}, "train_batch_size"),
        ({"zero_optimization": {"stagee": 1}}, "zero_optimization.stage"),
        ({"stage": 2}, "zero_optimization.stage"),
        ({"gradient_acumulation_steps": 4}, "gradient_accumulation_steps"),
        ({"fp16": {"loss_scale_windows": 5}}, "fp16.loss_scale_window"),
        ({"zero": {"stage": 1}}, ""),
        ({"Optimizer": {"type": "Adam"}}, "optimizer"),
        ({"reduce_bucket_size": 5}, "zero_optimization.reduce_bucket_size"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rat": 1, "weight_decays": 0}}}, "weight_decay"),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, "momentum"),
        ({"optimizer": {"type": "AdamWW"}}, "AdamW"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, "warmup_num_steps"),
        ({"scheduler": {"type": "WarmUpLR"}}, "WarmupLR"),
    ],
)
def test_unknown_keys_get_a_did_you_mean(raw, meant):
    message = refused(raw)
    assert (f'"{meant}"' in message.partition("Did you mean")[2]) if meant else "unknown key" in message


@pytest.mark.parametrize(
    "given, meant",
    [
        ("stage3_prefetch_bucket_siz", "stage3_prefetch_bucket_size"),
        ("prefetch_bucket_siz", "stage3_prefetch_bucket_size"),
        ("stage3_gather_fp16_weights_on_model_saves", "stage3_gather_16bit_weights_on_model_save"),
        ("gather_16bit_weights_on_model_saves", "stage3_gather_16bit_weights_on_model_save"),
    ],
)
def test_a_second_name_is_not_offered(given, meant):
    """Aliases and deprecated names were, as if they were other keys."""
    assert refused({"zero_optimization": {given: 1}}).endswith(f'Did you mean "zero_optimization.{meant}"?')


def test_what_is_offered_is_documented():
    second = ("cpu_ofload", "cpu_ofload_param", "cpu_offload_use_pin_memori")
    said = " ".join(refused({"zero_optimization": {key: True}}).partition("Did you mean")[2] for key in second)
    for new in ("offload_optimizer.device", "offload_param.device", "offload_optimizer.pin_memory"):
        assert f'"zero_optimization.{new}"' in said
    assert "cpu_offload" not in said
    assert refused({"bfloat17": {"enabled": True}}).endswith('Did you mean "bf16"?')
    assert refused({"aio": {"thread_counts": 1}}).endswith('Did you mean "aio.intra_op_parallelism"?')


def test_a_keys_own_section_is_meant_before_others():
    assert refused({"zero_optimization": {"stag": 2}}).endswith('Did you mean "zero_optimization.stage"?')
    # a long section's name alone is no likeness: this offered zeropp_loco_param as well
    said = refused({"zero_optimization": {"overlap_com": True}})
    assert said.endswith('Did you mean "zero_optimization.overlap_comm"?')
    assert '"pipeline.stages"' in refused({"stag": 2})


@given(
    st.dictionaries(
        st.text(string.ascii_lowercase + "_.", min_size=1, max_size=12),
        st.one_of(st.integers(), st.booleans(), st.none()),
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_key_is_ignored(raw):
    """A dict of random keys is refused as a whole unless all of them are known."""
    unknown = [k for k in raw if k not in TABLE and k not in c._SECTIONS and k not in c._ALIASES]
    try:
        load(raw)
    except ConfigError as exc:
        assert all(json.dumps(k) in str(exc) for k in unknown)
    else:
        assert not unknown


def test_all_errors_at_once():
    message = refused({"a_key": 1, "gradient_clipping": -1, "zero_optimization": {"stage": 9}})
    assert message.startswith("3 things are wrong") and message.count("\n- ") == 3


def test_old_names():
    assert load({"bfloat16": {"enabled": True}}).bf16.enabled
    assert load({"zero_optimization": {"cpu_offload": True, "stage": 2}}).zero.offload_optimizer.device == "cpu"
    assert load({"zero_optimization": {"cpu_offload_param": True, "stage": 3}}).zero.offload_param.device == "cpu"
    assert load(
        {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}}
    ).zero.stage3_gather_16bit_weights_on_model_save
    assert load({"zero_optimization": {"param_persistence_threshold": 7}}).zero.stage3_param_persistence_threshold == 7
    assert load({"zero_optimization": True}).zero.stage == 1
    assert "given twice" in refused(
        {"zero_optimization": {"param_persistence_threshold": 7, "stage3_param_persistence_threshold": 8}}
    )
    assert "both given" in refused(
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}}
    )


# ---- optimizer and scheduler -----------------------------------------------------------------------------------------


def test_optimizers():
    adam = load(
        {"optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "torch_adam": False}}}
    ).optimizer
    assert (adam.type, adam.backend, adam.decoupled) == ("AdamW", "deepc", True)
    assert adam.params == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    l2 = load({"optimizer": {"type": "adam", "params": {"adam_w_mode": False}}}).optimizer
    assert (l2.type, l2.decoupled) == ("Adam", False)
    assert load(
        {"optimizer": {"type": "ADAMW", "params": {"adam_w_mode": False}}}
    ).optimizer.decoupled  # AdamW forces it, as in DeepSpeed
    theirs = load({"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1, "foreach": False}}}).optimizer
    assert (theirs.backend, theirs.params) == ("torch", {"lr": 1.0, "foreach": False})
    sgd = load(
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "zero_optimization": {"stage": 3}}
    ).optimizer
    assert (sgd.type, sgd.backend, sgd.params) == ("SGD", "deepc", {"lr": 0.1, "momentum": 0.9})
    assert load({"optimizer": {"type": "adagrad"}}).optimizer.type == "Adagrad"
    assert [i.key for i in load({"optimizer": {"type": "Adam", "params": {"fused": True}}}).inert] == [
        "optimizer.params.fused"
    ]


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, "Use gradient_clipping"),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, "a list of 2 numbers"),
        ({"type": "AdamW", "params": {"betas": [0.9, 1.0]}}, "< 1"),
        ({"type": "AdamW", "params": {"lr": -1}}, ">= 0"),
        ({"type": "LBFGS"}, "closure"),
        ({"type": "AdamW", "params": {"bias_correction": False}}, "without bias correction"),
        ({"params": {"lr": 1}}, "without optimizer.type"),
        ({"type": "SGD", "params": {"lr": 1, "betas": [0, 0]}}, "SGD has no such argument"),
        ({"type": "Lion", "params": {"betas": [0.9]}}, "is not what Lion takes: betas must be two numbers"),
        ({"type": "Lamb", "params": {"lr": "1e-3"}}, 'optimizer.params.lr = "1e-3" must be a number, without quotes'),
        ({"type": "Muon", "params": {"ns_coefficients": 3}}, "is not what Muon takes: ns_steps must be"),
        ({"type": "OneBitAdam", "params": {"betas": 0.9, "freeze_step": "auto"}}, "two numbers in [0, 1), got 0.9"),
        ({"type": "Optimizer"}, "neither Adam"),
        ({"type": 3}, "a string"),
        (
            {"type": "SGD", "params": {"lr": "1e-3"}},
            'optimizer.params.lr = "1e-3" must be a number, without quotes',
        ),
        ({"type": "Lion", "params": {"weight_decay": None}}, "optimizer.params.weight_decay = null must be a number"),
        ({"type": "NAdam", "params": {"momentum_decay": [1]}}, "params.momentum_decay = [1] must be a number"),
        ({"type": "SGD", "params": {"nesterov": "true"}}, 'nesterov = "true" must be true or false, without quotes'),
        ({"type": "RMSprop", "params": {"lr": -1}}, "is not what RMSprop takes: Invalid learning rate: -1"),
        ({"type": "SGD", "params": {"nesterov": True}}, "is not what SGD takes: nesterov needs a momentum"),
    ],
)
def test_wrong_optimizers(section, text):
    assert text in refused({"optimizer": section})


def test_an_optimizer_that_is_not_elementwise_needs_leave():
    raw = {"optimizer": {"type": "SparseAdam"}, "zero_optimization": {"stage": 1}}
    assert "zero_allow_untested_optimizer" in refused(raw)
    assert load({**raw, "zero_allow_untested_optimizer": True}).optimizer.type == "SparseAdam"
    assert load({"optimizer": {"type": "SparseAdam"}}).optimizer.type == "SparseAdam"


def test_schedulers():
    cfg = load(
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 100, "warmup_num_steps": 10, "last_batch_iteration": -1},
            }
        }
    )
    assert cfg.scheduler.type == "WarmupDecayLR" and cfg.scheduler.params["total_num_steps"] == 100
    assert load({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}).scheduler.type == "StepLR"


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"type": "WarmupDecayLR", "params": {}}, "scheduler.params.total_num_steps is missing"),
        ({"type": "OneCycle"}, "cycle_min_lr is missing"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}, "scheduler.params.warmup_num_steps = '10'"),
        ({"params": {"a": 1}}, "without scheduler.type"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cosine"}}, "one of log, linear"),
        ({"type": "StepLR"}, "step_size is missing"),
    ],
)
def test_wrong_schedulers(section, text):
    assert text in refused({"scheduler": section})


# ---- rules between keys ----------------------------------------------------------------------------------------------


def test_fp16_and_bf16_exclude_each_other():
    assert "both true" in refused({"fp16": {"enabled": True}, "bf16": {"enabled": True}})


def test_offload():
    raw = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    cpu = load(raw)
    assert {i.key.rsplit(".", 1)[-1] for i in cpu.inert} == {"device", "pin_memory"}
    assert cpu.zero.offload_optimizer.device == "cpu"
    part = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}
    assert "ratio = 0.3: on a CPU run the part" in load(part).describe_inert()
    assert "ratio" not in load(part, device_type="cuda").describe_inert()
    assert [i.key.rsplit(".", 1)[-1] for i in load(raw, device_type="cuda").inert] == ["pin_memory"]
    assert (
        "needs ZeRO stage 1"
        in load({"zero_optimization": raw["zero_optimization"] | {"stage": 0}}, device_type="cuda").describe_inert()
    )
    param = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert load(param).zero.offload_param.device == "cpu"
    assert load(param, device_type="cuda").inert == ()


def test_zeropp_keys():
    def zero(stage, world=4, device="cpu", **keys):
        return Config.load(
            {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **keys}},
            world_size=world,
            device_type=device,
        )

    every = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
    cfg = zero(3, **every)
    assert (
        cfg.zero.zero_quantized_weights,
        cfg.zero.zero_quantized_gradients,
        cfg.zero.zero_hpz_partition_size,
        cfg.inert,
    ) == (True, True, 2, ())
    assert zero(3).zero.zero_hpz_partition_size == 1 and zero(3, zero_hpz_partition_size=0).inert == ()
    assert [i.key.split(".")[1] for i in zero(2, **every).inert] == ["zero_hpz_partition_size"]
    assert [i.key.split(".")[1] for i in zero(0, **every).inert] == [
        "zero_quantized_weights",
        "zero_hpz_partition_size",
    ]
    assert [i.key.split(".")[1] for i in zero(3, zero_quantized_nontrainable_weights=True).inert] == [
        "zero_quantized_nontrainable_weights"
    ]
    with pytest.raises(ConfigError, match="zero_hpz_partition_size = 3 does not divide the 4 rank"):
        zero(3, zero_hpz_partition_size=3)
    for key, value in every.items():
        with pytest.raises(ConfigError, match=f"{key}.*ZeRO\\+\\+ on GPUs.*does not have yet"):
            zero(3, device="cuda", **{key: value})


def test_a_schedule_with_one_rate_says_that_muons_two_have_no_effect():
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-4, "muon_lr": 0.02, "adam_lr": 1e-5}}}

    def told(kind, **params):
        return [i.key for i in load({**muon, "scheduler": {"type": kind, "params": params}}).inert]

    rates, steps = ["optimizer.params.muon_lr", "optimizer.params.adam_lr"], {"total_num_steps": 9}
    assert told("WarmupLR", warmup_max_lr=1e-3) == told("LRRangeTest") == told("WarmupDecayLR", **steps) == rates
    assert told("WarmupLR") == told("WarmupLR", warmup_max_lr=[0.02, 1e-5]) == told("WarmupCosineLR", **steps) == []
    assert told("ConstantLR") == [] and load(muon).inert == ()


def test_hints_are_reported_as_inert_with_the_reason():
    cfg = load(
        {
            "zero_optimization": {
                "stage": 3,
                "contiguous_gradients": True,
                "stage3_prefetch_bucket_size": 5,
                "sub_group_size": 1e9,
            }
        }
    )
    assert [(i.key.split(".")[1], i.value) for i in cfg.inert] == [
        ("contiguous_gradients", True),
        ("stage3_prefetch_bucket_size", 5),
        ("sub_group_size", 1e9),
    ]
    assert all(i.reason for i in cfg.inert) and cfg.describe_inert().count("\n") == 2
    gpu = load(cfg.raw, device_type="cuda")
    assert "stage3_prefetch_bucket_size" not in gpu.describe_inert()


def test_explain_has_every_active_key():
    text = load(
        {
            "steps_per_print": 7,
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "optimizer": {"type": "Adam"},
            "scheduler": {"type": "WarmupLR"},
        },
        2,
    ).explain()
    for row in KEYS:
        if row.state is State.ACTIVE and "cpu_offload" not in row.path:
            assert f"  {row.path} = " in text, row.path
    assert (
        "steps_per_print = 7 (given)" in text
        and "train_micro_batch_size_per_gpu = 1 (derived)" in text
        and "gradient_clipping = 1.0 (default)" in text
    )
    assert "inert: zero_optimization.overlap_comm = true" in text


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_sources(tmp_path):
    raw = {"train_batch_size": 4, "zero_optimization": {"stage": 2}}
    text = json.dumps(raw)
    file = tmp_path / "ds.json"
    file.write_text("\ufeff" + text, encoding="utf-8")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (raw, text, "  \n" + text, "\ufeff// a comment\n# and\n" + text, str(file), file, encoded):
        cfg = Config.load(source, world_size=2)
        assert cfg.zero.stage == 2 and cfg.raw == raw
    assert Config.load(file, world_size=1).source == str(file)


def test_comments_and_trailing_commas_as_in_deepspeeds_files(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{ // a comment\n "train_batch_size": 4, # another, with "quotes" {\n'
        ' /* and\n one more */ "tensorboard": {"job_name": "a//b#c,]"},\n}\n'
    )
    cfg = Config.load(file, world_size=1)
    assert cfg.raw == {"train_batch_size": 4, "tensorboard": {"job_name": "a//b#c,]"}}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"train_batch_size": 1, "train_batch_size": 2}', "'train_batch_size' stands twice"),
        ('{"train_batch_size": 1, "fp16": {"enabled": true, "enabled": true}}', "'enabled' stands twice"),
        ('{"train_batch_size": 1,\n "fp16": {"enabled": tru}}', "line 2, column"),
        ('{"gradient_clipping": NaN}', "NaN"),
        ('{"train_batch_size": 1', "not JSON"),
        ('{"a":' * 100000, "nested too deeply"),
    ],
)
def test_bad_json(text, want, tmp_path):
    assert want in refused(text)
    file = tmp_path / "ds.json"
    file.write_text(text)
    assert want in refused(file) and str(file) in refused(file)


def test_bad_sources(tmp_path):
    assert "No such file" in refused(str(tmp_path / "none.json"))
    assert "not list" in refused([1])
    assert "keys are strings" in refused({"train_batch_size": 1, 3: 4})
    (tmp_path / "list.json").write_text("[1]")
    assert "must be a JSON object" in refused(tmp_path / "list.json")
    assert "the configuration text: the configuration must be a JSON object" in refused("[1]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "can't read" in refused(tmp_path / "binary.json")
    assert "can't read" in refused(str(tmp_path))
    assert "can't read" in refused("bm90IGpzb24=")


# ---- "auto" and real-world files -------------------------------------------------------------------------------------

HF_ZERO3 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}

INTRODUCTION = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}

CIFAR = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {
        "enabled": True,
        "fp16_master_weights_and_grads": False,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}

MEGATRON = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 100,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"last_batch_iteration": -1, "warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10000},
    },
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": False,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "zero_optimization": {
        "stage": 3,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "sub_group_size": 1e12,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e6,
    },
}

REAL = {"hf": HF_ZERO3, "introduction": INTRODUCTION, "cifar": CIFAR, "megatron": MEGATRON}


@pytest.mark.parametrize("name", ["introduction", "cifar", "megatron"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_real_configurations_load(name, world):
    cfg = Config.load(REAL[name], world_size=world)
    assert cfg.train_batch_size == cfg.train_micro_batch_size_per_gpu * cfg.gradient_accumulation_steps * world
    if name == "cifar":
        assert (
            cfg.optimizer.params["betas"] == (0.8, 0.999)
            and cfg.fp16.loss_scale_window == 500
            and cfg.zero.reduce_bucket_size == 50_000_000
        )
    if name == "introduction":
        assert cfg.optimizer is None and cfg.fp16.dynamic and cfg.zero.stage == 2


def test_a_real_configuration_that_asks_for_more_gets_the_precise_error():
    message = refused(
        {
            **CIFAR,
            "autotuning": {"enabled": True, "results_dir": "logs/"},
            "zero_optimization": {
                **CIFAR["zero_optimization"],
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
                "cpu_offload": None,
            },
        }
    )
    assert (
        "autotuning.enabled = true asks for autotuning" in message
        and "parameters of ZeRO stage 3 on disk (NVMe)" in message
    )


def test_auto_is_an_error_that_lists_the_keys():
    message = refused(HF_ZERO3)
    for key in (
        "train_batch_size",
        "optimizer.params.betas",
        "scheduler.params.total_num_steps",
        "fp16.enabled",
        "gradient_clipping",
        "zero_optimization.reduce_bucket_size",
    ):
        assert key in message
    assert 'still "auto"' in message and "things are wrong" not in message


def test_fractions_of_hints_are_rounded_and_reported():
    """TRL's prepare_deepspeed adds 0.9 * hidden * hidden at the top level, under a key with dots."""
    flat = {"zero_optimization.stage3_prefetch_bucket_size": 0.9 * 64 * 64}
    within = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 3686.6}}
    for raw in ({"zero_optimization": {"stage": 3}, **flat}, within):
        cfg = load(raw)
        assert cfg.zero.stage3_prefetch_bucket_size in (3686, 3687)
        assert [(i.key, i.value % 1 != 0) for i in cfg.inert] == [
            ("zero_optimization.stage3_prefetch_bucket_size", True)
        ]
        on_gpu = load(raw, device_type="cuda")
        assert on_gpu.zero.stage3_prefetch_bucket_size == cfg.zero.stage3_prefetch_bucket_size
        assert f"read as {cfg.zero.stage3_prefetch_bucket_size}" in on_gpu.inert[0].reason
        assert problems(SCHEMA, {**within, "train_batch_size": 1}) == []
    for bad in (float("nan"), float("inf"), -0.9):
        refused({"zero_optimization.stage3_prefetch_bucket_size": bad})
    assert "an integer" in refused({"zero_optimization.reduce_bucket_size": 0.5})  # used, so no guess


@pytest.mark.parametrize("flat_first", [False, True])
def test_a_section_counts_before_a_key_with_dots(flat_first):
    section = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 500}}
    flat = {"zero_optimization.reduce_bucket_size": 4096, "zero_optimization.stage3_param_persistence_threshold": 640}
    cfg = load({**flat, **section} if flat_first else {**section, **flat})
    assert cfg.zero.reduce_bucket_size == 500 and cfg.zero.stage3_param_persistence_threshold == 640
    told = {i.key: i.reason for i in cfg.inert}
    assert "section zero_optimization" in told["zero_optimization.reduce_bucket_size"]


def test_sizes_that_nothing_has_filled_are_the_defaults_and_say_so():
    """TRL initializes its reference model with the Trainer's configuration before the Trainer's model has filled it."""
    section = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    cfg = load({"zero_optimization": section, "zero_optimization.reduce_bucket_size": 4096})
    assert cfg.auto == () and cfg.zero.reduce_bucket_size == 4096  # the key with dots is what fills it
    assert [(i.key, i.value) for i in cfg.inert] == [("zero_optimization.stage3_prefetch_bucket_size", "auto")]
    assert "default, 50000000" in cfg.inert[0].reason
    for needed in ({"gradient_clipping": "auto"}, {"zero_optimization": {**section, "stage": "auto"}}):
        assert "zero_optimization.reduce_bucket_size" in refused({"zero_optimization": section, **needed})


def test_auto_may_be_kept_and_is_then_listed():
    cfg = Config.load(HF_ZERO3, world_size=2, allow_auto=True)
    assert (
        len(cfg.auto) == 18 and cfg.train_batch_size is None and cfg.zero.stage == 3 and 'still "auto"' in cfg.explain()
    )
    with pytest.raises(ConfigError, match="reduce_bucket_size"):
        cfg.require_resolved()
    Config.load(INTRODUCTION, world_size=1).require_resolved()


def test_what_a_trainer_fills_in_loads():
    filled = copy.deepcopy(HF_ZERO3)
    filled |= {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
    }
    filled["fp16"]["enabled"], filled["bf16"]["enabled"] = False, True
    filled["optimizer"]["params"] = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    filled["scheduler"]["params"] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": 5e-5,
        "warmup_num_steps": 1,
        "total_num_steps": 100,
    }
    filled["zero_optimization"] |= {
        "reduce_bucket_size": 768 * 768,
        "stage3_prefetch_bucket_size": 530841,
        "stage3_param_persistence_threshold": 7680,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    cfg = Config.load(filled, world_size=2)
    assert cfg.auto == () and cfg.dtype == "bf16" and cfg.optimizer.params["lr"] == 5e-5


# ---- the schema ------------------------------------------------------------------------------------------------------


def problems(schema: dict, value, at: str = "$") -> list[str]:
    """A validator of the part of JSON Schema that json_schema() uses."""
    known = {
        "$schema",
        "title",
        "description",
        "default",
        "deprecated",
        "x-deepc-state",
        "type",
        "enum",
        "const",
        "pattern",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "anyOf",
        "allOf",
        "properties",
        "additionalProperties",
        "required",
        "items",
        "minItems",
        "maxItems",
    }
    assert set(schema) <= known, set(schema) - known
    out: list[str] = []
    for sub in schema.get("allOf", []):
        out += problems(sub, value, at)
    if "anyOf" in schema:
        every = [problems(sub, value, at) for sub in schema["anyOf"]]
        if all(every):
            out += min(every, key=len)
    kinds = {
        "object": dict,
        "array": (list, tuple),
        "string": str,
        "boolean": bool,
        "null": type(None),
        "number": (int, float),
        "integer": (int, float),
    }
    if "type" in schema:
        ok = isinstance(value, kinds[schema["type"]]) and (schema["type"] == "boolean" or not isinstance(value, bool))
        if schema["type"] == "integer":
            ok = ok and value == int(value)
        if not ok:
            return [*out, f"{at}: {value!r} is no {schema['type']}"]
    if (
        "enum" in schema
        and not any(c._same(value, e) for e in schema["enum"])
        or "const" in schema
        and not c._same(value, schema["const"])
    ):
        out.append(f"{at}: {value!r} is not allowed")
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        out.append(f"{at}: {value!r}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if (
            value < schema.get("minimum", value)
            or value > schema.get("maximum", value)
            or value <= schema.get("exclusiveMinimum", float("-inf"))
            or value >= schema.get("exclusiveMaximum", float("inf"))
        ):
            out.append(f"{at}: {value!r} is out of range")
    if isinstance(value, dict) and "properties" in schema:
        for key, v in value.items():
            if key in schema["properties"]:
                out += problems(schema["properties"][key], v, f"{at}.{key}")
            elif schema.get("additionalProperties") is False:
                out.append(f"{at}.{key} is unknown")
        out += [f"{at}.{k} is missing" for k in schema.get("required", []) if k not in value]
    if isinstance(value, (list, tuple)) and "items" in schema:
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            out.append(f"{at}: {len(value)} items")
        for i, v in enumerate(value):
            out += problems(schema["items"], v, f"{at}[{i}]")
    return out


SCHEMA = schema.json_schema()


@pytest.mark.parametrize("name", REAL)
def test_schema_accepts_real_configurations(name):
    assert problems(SCHEMA, REAL[name]) == []


def test_schema_accepts_every_default_and_disabled_section():
    for row in KEYS:
        if row.default is not None and row.state is not State.REMOVED:
            assert problems(SCHEMA, nested(row.path, row.default)) == [], row.path
        if row.kind == "gated":
            assert problems(SCHEMA, nested(row.path, {"enabled": False, "anything": 1})) == [], row.path
    assert problems(SCHEMA, {"bfloat16": {"enabled": True}, "zero_optimization": True}) == []


# rules that need more than one key, which a schema of keys can't know
BEYOND = {"zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"}


@pytest.mark.parametrize(
    ("path", "value"),
    [b[:2] for b in BAD_VALUES if b[1] != float("inf")] + [x[:2] for x in LATER if x[0] not in BEYOND],
)
def test_schema_refuses_what_the_reader_refuses(path, value):
    assert problems(SCHEMA, nested(path, value)) != []


def test_schema_knows_every_key_and_is_json(tmp_path):
    text = schema.write_schema(tmp_path / "schema.json")
    assert json.loads((tmp_path / "schema.json").read_text()) == json.loads(text) == SCHEMA
    for row in KEYS:
        node = SCHEMA
        for part in row.path.split("."):
            node = (node["anyOf"][0] if "anyOf" in node else node)["properties"][part]
        assert node["description"] and node["x-deepc-state"] == row.state.value
    node = SCHEMA["properties"]["optimizer"]["anyOf"][0]["properties"]["params"]["anyOf"][0]["properties"]
    assert {k for k, r in OPTIMIZER_PARAMS.items() if r.state is not State.LATER} == set(node)


def test_command_line(tmp_path, capsys):
    assert explain.main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert explain.main(["--schema", str(tmp_path / "s.json")]) == 0 and (tmp_path / "s.json").exists()
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(INTRODUCTION))
    assert (
        explain.main(["--explain", str(file), "--world-size", "2"]) == 0
        and "2 rank(s) on cpu, fp16" in capsys.readouterr().out
    )
    file.write_text('{"train_batch_size": 0}')
    assert explain.main(["--explain", str(file)]) == 1
    assert "train_batch_size = 0 is out of range" in capsys.readouterr().err
