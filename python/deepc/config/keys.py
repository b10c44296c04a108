"""Every key of the configuration: one row each. Owns the table; knows nothing of how a config is read (config.py).

A key is named by its path in the DeepSpeed JSON, "zero_optimization.reduce_bucket_size". Types, defaults and ranges are
those of DeepSpeed 0.19.8. Reader, JSON Schema, "did you mean" and documentation all expand from this table, so a new
key is a new row (and a field of config.py's dataclasses if the engine reads it)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..core.dtypes import BFLOAT16, FLOAT16, TRAINED_NAMES, names_of


class State(Enum):
    """What deepc does with a key."""

    ACTIVE = "active"  # it has its meaning
    INERT = "inert"  # a performance hint without meaning here: accepted, and reported with the reason
    LATER = "later"  # a capability that is not built yet: only the values in `ok` are accepted
    REMOVED = "removed"  # gone from DeepSpeed as well, and not planned: only the values in `ok` are accepted


class _Any:
    def __repr__(self) -> str:
        return "ANY"


ANY = _Any()
"""For `Key.ok`: every value of the right type is accepted, because another key (`enabled`) is the one that decides."""


@dataclass(frozen=True)
class Key:
    """One row. `why` is the reason of an INERT key, the capability of a LATER one, the advice of a REMOVED one."""

    path: str
    kind: str  # bool | int | number | str | strings | ints | numbers | object | gated | pick | any
    default: Any = None
    help: str = ""
    state: State = State.ACTIVE
    why: str = ""
    # of str: compared without case, the spelling of the table is kept; of pick: what its list may hold
    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    ok: Any = ()  # LATER, REMOVED: the values that ask for nothing
    auto: bool = False  # an integration (Hugging Face Trainer, Accelerate) may leave "auto" here until it fills it
    null: bool = False  # null is a value (always true where the default is null)
    alias: str = ""  # an older name of the same key, last part of the path only
    inert_on: str = ""  # INERT only on this device type ("cpu"); "" = everywhere

    @property
    def leaf(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]


def _active(path: str, kind: str, default: Any, help: str, **kw: Any) -> Key:
    return Key(path, kind, default, help, State.ACTIVE, **kw)


def _inert(path: str, kind: str, default: Any, help: str, why: str, **kw: Any) -> Key:
    return Key(path, kind, default, help, State.INERT, why, **kw)


def _later(path: str, kind: str, default: Any, capability: str, ok: Any = None, **kw: Any) -> Key:
    accepted = (default,) if ok is None else ok
    return Key(path, kind, default, f"Capability: {capability}.", State.LATER, capability, ok=accepted, **kw)


def _removed(path: str, kind: str, advice: str, ok: Any = (None,), **kw: Any) -> Key:
    return Key(path, kind, None, "Removed from DeepSpeed in 0.19.7.", State.REMOVED, advice, ok=ok, **kw)


_RESIDENT = (
    "on a CPU, stage-3 parameters live once per node in shared memory: nothing is gathered, prefetched or released"
)
IN_NODE = (
    "a node's ranks read stage-3 parameters where its memory holds them, once; it acts where they do not"
    " (docs/streamed.md, offload_param nvme)"
)
_IN_PLACE = (
    "deepc always reduces gradients where they lie, each rank reading its peers' buckets and writing only its own shard"
)
_AIO = "blocks go to io_uring, many at a time, from one thread (or to threads of their own where there is none)"
_OVERLAPS = "with device nvme, reads, arithmetic and writes always overlap"
_NO_BUFFERS = "parameters are read from the disk straight into the memory that the model computes with"
_OWN_WRITER = "deepc has one checkpoint writer, which streams tensors straight from memory"
_WITH_THE_CORE = "sums over tensor-parallel ranks run on the cores that compute"
_WHOLE = "each tensor-parallel rank hands all of an activation to the rank of its place in the next stage"
_PARTITION = 'PipelineModule(partition_method=) decides; pipeline.stages measures, as its "time" does'
_COMPILE = "DeepCompile (torch.compile on the module works)"
_HYBRID = "the hybrid engine"

KEYS: tuple[Key, ...] = (
    # ---- batch triangle ----------------------------------------------------------------------------------------------
    _active(
        "train_batch_size",
        "int",
        None,
        "Samples of one optimizer step over all ranks; = micro * accumulation * ranks.",
        gt=0,
        auto=True,
    ),
    _active(
        "train_micro_batch_size_per_gpu",
        "int",
        None,
        "Samples of one forward and backward on one rank.",
        gt=0,
        auto=True,
    ),
    _active(
        "gradient_accumulation_steps",
        "int",
        None,
        "Micro-batches that are summed before one optimizer step.",
        gt=0,
        auto=True,
    ),
    _active(
        "managed_gradient_accumulation",
        "bool",
        True,
        "engine.step() counts micro-batches, and updates at every gradient_accumulation_steps-th; false: every"
        " engine.step() updates, with what the backwards since the last one have added up.",
    ),
    # ---- printing and logging ----------------------------------------------------------------------------------------
    _active(
        "steps_per_print",
        "int",
        None,
        "Print a line every so many optimizer steps; null: never; absent: every deepc.log.seconds (docs/logging.md).",
        gt=0,
    ),
    _active("wall_clock_breakdown", "bool", False, "Time forward, backward, reduction and step, and print them."),
    _active("memory_breakdown", "bool", False, "Print the memory in use after forward, backward and step."),
    _active("dump_state", "bool", False, "Print every key with its value, and where that is from, at initialization."),
    _active(
        "log_level",
        "str",
        None,
        "Level of the deepc logger.",
        choices=("debug", "info", "warning", "error", "critical"),
    ),
    _inert(
        "timers.throughput.enabled",
        "bool",
        True,
        "Throughput timer.",
        "steps are timed by steps_per_print and wall_clock_breakdown",
    ),
    _inert(
        "timers.throughput.synchronized",
        "bool",
        True,
        "Synchronize the device for timing.",
        "steps are timed by wall_clock_breakdown",
    ),
    _inert(
        "disable_python_gc",
        "bool",
        False,
        "Turn off Python's cyclic collector.",
        "deepc leaves the interpreter's collector alone",
    ),
    _inert(
        "vocabulary_size",
        "int",
        None,
        "Only a hint to pad the vocabulary to a multiple of 8.",
        "it changes no computation",
        ge=0,
    ),
    # ---- data --------------------------------------------------------------------------------------------------------
    _active("dataloader_drop_last", "bool", False, "Leave out the samples at an epoch's end that don't fill a step."),
    # ---- optimizer ---------------------------------------------------------------------------------------------------
    _active(
        "optimizer.type",
        "str",
        None,
        "Adam, AdamW, Lion, Lamb, Adafactor, Adagrad, SGD, Muon, OneBitAdam, OneBitLamb or ZeroOneAdam (deepc's), or"
        " the name of a torch.optim class.",
    ),
    _active(
        "optimizer.params", "object", None, 'Arguments of the optimizer; lr, betas, eps, weight_decay may be "auto".'
    ),
    _inert("optimizer.legacy_fusion", "bool", False, "Old fused CUDA optimizer.", "there is one optimizer kernel"),
    _active(
        "zero_allow_untested_optimizer",
        "bool",
        False,
        "Allow ZeRO with an optimizer that does not work element by element (its result then depends on the"
        " partition).",
    ),
    _inert(
        "zero_force_ds_cpu_optimizer",
        "bool",
        True,
        "With offload, refuse a client optimizer that is not DeepSpeedCPUAdam.",
        "any optimizer works with offload; torch's is only slower",
    ),
    # ---- schedule ----------------------------------------------------------------------------------------------------
    _active(
        "scheduler.type",
        "str",
        None,
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a torch scheduler class.",
    ),
    _active(
        "scheduler.params", "object", None, 'Arguments of the schedule; warmup_* and total_num_steps may be "auto".'
    ),
    # ---- precision ---------------------------------------------------------------------------------------------------
    _active(
        "precision",
        "str",
        None,
        '"auto": bf16 where the machine computes in it, fp32 while that goes wrong (docs/precision.md).',
        choices=("auto",),
    ),
    _active(
        "fp16.enabled",
        "bool",
        False,
        "Parameters and activations in fp16, fp32 master weights, loss scaling.",
        auto=True,
    ),
    _active("fp16.auto_cast", "bool", False, "Cast the floating-point inputs of forward to fp16.", auto=True),
    _active("fp16.loss_scale", "number", 0.0, "Fixed loss scale; 0: dynamic.", ge=0),
    _active("fp16.initial_scale_power", "int", 16, "The dynamic loss scale begins at 2 ** this.", ge=0, le=64),
    _active("fp16.loss_scale_window", "int", 1000, "Steps without overflow before the scale doubles.", gt=0),
    _active("fp16.hysteresis", "int", 2, "Overflows that are tolerated before the scale halves.", ge=1),
    _active("fp16.consecutive_hysteresis", "bool", False, "Refill the hysteresis at every step without overflow."),
    _active(
        "fp16.min_loss_scale",
        "number",
        1,
        "The dynamic loss scale never goes below; an overflow there is an error.",
        gt=0,
    ),
    _later("fp16.fp16_master_weights_and_grads", "bool", False, "fp16 master weights"),
    _active("bf16.enabled", "bool", False, "Parameters and activations in bf16, fp32 master weights.", auto=True),
    _active(
        "bf16.check_grad_overflow",
        "bool",
        True,
        "Skip the step when a gradient is not finite; false: it is applied, with a warning.",
    ),
    _inert("bf16.immediate_grad_update", "bool", False, "Add gradients in hooks.", "deepc's hooks always do"),
    _later("bf16.bf16_master_weights_and_grads", "bool", False, "bf16 master weights"),
    _later(
        "bf16.bf16_optimizer_states",
        "bool",
        False,
        'bf16 optimizer states that are rounded to nearest (optimizer.params.state_dtype "bf16": stochastically)',
    ),
    _active(
        "torch_autocast.enabled",
        "bool",
        False,
        "Forwards run under torch.autocast; parameters, gradients and states keep their dtype (docs/precision.md).",
    ),
    _active(
        "torch_autocast.dtype",
        "str",
        "bf16",
        "What autocast computes in; fp16 scales the loss, as torch.amp.GradScaler does.",
        choices=tuple(n for d in (BFLOAT16, FLOAT16) for n in names_of(d)),
    ),
    _inert(
        "torch_autocast.lower_precision_safe_modules",
        "strings",
        None,
        "Classes of modules whose parameters and gradients are sent in torch_autocast.dtype.",
        "inside a node nothing is sent, and between nodes everything goes in the parameters' dtype, which loses"
        " nothing (communication_data_type sends all gradients in another one)",
    ),
    _active(
        "data_types.grad_accum_dtype",
        "str",
        None,
        "Dtype in which gradients of micro-batches are accumulated; null: fp32. 16 bits take half the memory: every"
        " micro-batch is added in fp32 and rounded once. With deepc's optimizers.",
        choices=TRAINED_NAMES,
    ),
    _later(
        "data_types.param_dtype",
        "str",
        None,
        "a parameter dtype apart from fp16.enabled and bf16.enabled",
        choices=TRAINED_NAMES,
    ),
    _active(
        "data_types.buffer_dtype",
        "str",
        None,
        "Dtype that floating-point buffers are cast to; null: they keep theirs (rotary frequencies and routers' biases"
        " lose what they are for in 16 bits). Statistics of batch norms and vectors of spectral norms have their"
        " weights' dtype, and buffers that a transformers model lists to be kept in fp32 are fp32.",
        choices=TRAINED_NAMES,
    ),
    _later("data_types.keep_in_fp32_modules", "any", "auto", "a list of modules kept in fp32", ok=("auto", None)),
    # ---- gradients ---------------------------------------------------------------------------------------------------
    _active("gradient_clipping", "number", 1.0, "Largest global gradient norm; 0: no clipping.", ge=0, auto=True),
    _active(
        "prescale_gradients",
        "bool",
        False,
        "Divide gradients by the number of ranks before the reduction, not after it.",
    ),
    _active(
        "gradient_predivide_factor",
        "number",
        1.0,
        "Without prescale_gradients: divide by this before the sum and by ranks / this after it.",
        gt=0,
    ),
    _active(
        "gradient_allreduce_op",
        "str",
        "mean",
        "Over ranks: the mean of the gradients, or their sum (not at stage 3, as in DeepSpeed).",
    ),
    _active(
        "communication_data_type",
        "str",
        None,
        "Type of gradients on the wire; null: that of the parameters.",
        choices=TRAINED_NAMES,
    ),
    _inert(
        "seq_parallel_communication_data_type",
        "str",
        "fp32",
        "Wire type of sequence parallelism.",
        "what sequence-parallel ranks exchange has the dtype of the computation",
        choices=TRAINED_NAMES,
        null=True,
    ),
    _inert(
        "disable_allgather",
        "bool",
        False,
        "Broadcast updated parameters instead of gathering them.",
        "updated parameters are gathered",
    ),
    # ---- ZeRO --------------------------------------------------------------------------------------------------------
    _active(
        "zero_optimization.stage",
        "int",
        0,
        "0: replicas; 1: optimizer states, 2: + gradients, 3: + parameters are partitioned.",
        ge=0,
        le=3,
        auto=True,
    ),
    _active(
        "zero_optimization.reduce_bucket_size",
        "int",
        500_000_000,
        "Elements that are reduced at a time.",
        gt=0,
        auto=True,
    ),
    _inert(
        "zero_optimization.allgather_bucket_size",
        "int",
        500_000_000,
        "Elements that are gathered at a time.",
        "updated parameters are gathered by the same buckets as gradients (zero_optimization.reduce_bucket_size)",
        ge=0,
        auto=True,
    ),
    _inert(
        "zero_optimization.contiguous_gradients",
        "bool",
        True,
        "Copy gradients to one buffer as they are produced.",
        _IN_PLACE,
    ),
    _inert("zero_optimization.reduce_scatter", "bool", True, "Reduce-scatter instead of all-reduce.", _IN_PLACE),
    _inert(
        "zero_optimization.overlap_comm",
        "bool",
        None,
        "Reduce during backward; null: at stage 3 only.",
        "buckets are always released to the reduction as backward fills them",
    ),
    _inert("zero_optimization.round_robin_gradients", "bool", False, "Spread gradient copies over ranks.", _IN_PLACE),
    _inert(
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "bool",
        True,
        "All-reduce buckets that span ranks.",
        _IN_PLACE,
    ),
    _inert(
        "zero_optimization.allgather_partitions",
        "bool",
        True,
        "Gather instead of broadcasts.",
        "updated parameters are gathered",
    ),
    _inert(
        "zero_optimization.compute_grad_norm",
        "bool",
        True,
        "Compute the gradient norm.",
        "the norm comes with the reduction for free",
    ),
    _inert(
        "zero_optimization.load_from_fp32_weights",
        "bool",
        True,
        "Restore masters from fp32.",
        "fp32 masters are always saved and restored",
    ),
    _inert(
        "zero_optimization.elastic_checkpoint",
        "bool",
        False,
        "Legacy elastic checkpoint.",
        "every deepc checkpoint loads into any number of ranks and any stage",
    ),
    _active(
        "zero_optimization.ignore_unused_parameters",
        "bool",
        True,
        "false: at stage 2, as in DeepSpeed, a step is an error on all ranks if some parameter got no gradient on some"
        " rank; else such a parameter has a zero gradient, as at every other stage.",
    ),
    _inert("zero_optimization.legacy_stage1", "bool", False, "Old ZeRO-1.", "there is one implementation"),
    _inert(
        "zero_optimization.parameter_alignment",
        "bool",
        False,
        "Align parameters in flat buffers.",
        "deepc's layout is always aligned",
    ),
    _active(
        "zero_optimization.sub_group_size",
        "int",
        1_000_000_000,
        "With optimizer states on disk: the most elements of a cell, which is read, updated and written at once (at"
        " most 131072). Elsewhere the step streams over memory once and needs no sub-groups.",
        ge=0,
        auto=True,
    ),
    _inert(
        "zero_optimization.stage3_prefetch_bucket_size",
        "int",
        50_000_000,
        "Elements fetched ahead of use.",
        IN_NODE,
        ge=0,
        auto=True,
        alias="prefetch_bucket_size",
        inert_on="cpu",
    ),
    _inert(
        "zero_optimization.stage3_param_persistence_threshold",
        "int",
        100_000,
        "Smaller parameters are not partitioned.",
        IN_NODE,
        ge=0,
        auto=True,
        alias="param_persistence_threshold",
        inert_on="cpu",
    ),
    _inert(
        "zero_optimization.stage3_model_persistence_threshold",
        "int",
        sys.maxsize,
        "Bound on unpartitioned elements.",
        IN_NODE,
        ge=0,
        auto=True,
        alias="model_persistence_threshold",
        inert_on="cpu",
    ),
    _inert(
        "zero_optimization.stage3_max_live_parameters",
        "int",
        1_000_000_000,
        "Elements gathered at a time.",
        IN_NODE,
        ge=0,
        auto=True,
        alias="max_live_parameters",
        inert_on="cpu",
    ),
    _inert(
        "zero_optimization.stage3_max_reuse_distance",
        "int",
        1_000_000_000,
        "Keep what is used again within this.",
        IN_NODE,
        ge=0,
        auto=True,
        alias="max_reuse_distance",
        inert_on="cpu",
    ),
    _inert(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "bool",
        False,
        "Let save_16bit_model() write whole weights at stage 3.",
        "save_16bit_model() always writes whole weights, at every stage",
        auto=True,
        alias="gather_16bit_weights_on_model_save",
    ),
    _inert(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "bool",
        False,
        "Old name.",
        "it is read as stage3_gather_16bit_weights_on_model_save",
    ),
    _inert(
        "zero_optimization.stage3_module_granularity_threshold",
        "int",
        0,
        "Fetch small modules as one.",
        _RESIDENT,
        alias="module_granularity_threshold",
    ),
    _inert(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "bool",
        False,
        "Fetch by all-reduce.",
        _RESIDENT,
        alias="use_all_reduce_for_fetch_params",
    ),
    _inert(
        "zero_optimization.stage3_allgather_sequential",
        "bool",
        False,
        "Fetch one by one.",
        _RESIDENT,
        alias="allgather_sequential",
    ),
    _inert(
        "zero_optimization.memory_efficient_linear",
        "bool",
        True,
        "Linear that saves no weight for backward.",
        "stage-3 parameters stay in place, so autograd saves no copy of them",
    ),
    _inert(
        "zero_optimization.pipeline_loading_checkpoint",
        "bool",
        False,
        "Pipelined load.",
        "a rank reads only the ranges that it owns",
    ),
    _inert(
        "zero_optimization.override_module_apply",
        "bool",
        True,
        "Gather in Module.apply.",
        "GatheredParameters is explicit",
    ),
    _inert("zero_optimization.log_trace_cache_warnings", "bool", False, "Log prefetch misses.", _RESIDENT),
    _inert("zero_optimization.enable_sanity_checks", "bool", False, "Internal checks.", "deepc's checks are always on"),
    _inert(
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        "bool",
        False,
        "Muon and NVMe.",
        "Muon's momentum lies where offload_optimizer.device says",
    ),
    _inert("zero_optimization.leaf_module.classes", "strings", None, "Modules treated as one unit.", _RESIDENT),
    _inert("zero_optimization.leaf_module.names", "strings", None, "Modules treated as one unit.", _RESIDENT),
    _inert("zero_optimization.leaf_module.name_suffixes", "strings", None, "Modules treated as one unit.", _RESIDENT),
    _active(
        "zero_optimization.offload_optimizer.device",
        "str",
        "none",
        "Where optimizer states live and the step runs.",
        choices=("none", "cpu", "nvme"),
        auto=True,
    ),
    _active(
        "zero_optimization.offload_optimizer.nvme_path",
        "str",
        None,
        "Folder of the optimizer states' scratch files, with device nvme.",
    ),
    _active(
        "zero_optimization.offload_optimizer.buffer_count",
        "int",
        4,
        "With device nvme: at least so many cells of the states are in memory at a time, read ahead, worked on or being"
        " written (default: 24 MiB of them, 4 to 32).",
        ge=0,
    ),
    _inert(
        "zero_optimization.offload_optimizer.pin_memory",
        "bool",
        True,
        "Page-locked host memory for the states.",
        "deepc does not lock the states' pages, on a GPU's host either",
    ),
    _inert(
        "zero_optimization.offload_optimizer.pipeline_read",
        "bool",
        False,
        "Read ahead of the update.",
        _OVERLAPS,
    ),
    _inert(
        "zero_optimization.offload_optimizer.pipeline_write",
        "bool",
        False,
        "Write behind the update.",
        _OVERLAPS,
    ),
    _inert(
        "zero_optimization.offload_optimizer.fast_init",
        "bool",
        False,
        "Start without writing the states.",
        "states begin as zeros, which nobody writes",
    ),
    _active(
        "zero_optimization.offload_optimizer.ratio",
        "number",
        1.0,
        "The part of the optimizer states that is offloaded (one GPU; offload_optimizer.device cpu); the device keeps"
        " the rest, and updates it. Without effect on CPUs, where all of them lie in host memory.",
        ge=0,
        le=1,
    ),
    _later("zero_optimization.offload_optimizer.super_offload", "bool", False, "SuperOffload"),
    _inert(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        "number",
        0.8,
        "Cores of SuperOffload.",
        "there is no SuperOffload yet",
        ge=0,
        le=1,
    ),
    _active(
        "zero_optimization.offload_param.device",
        "str",
        "none",
        "Where stage-3 parameters live.",
        choices=("none", "cpu", "nvme"),
        auto=True,
    ),
    _active(
        "zero_optimization.offload_param.nvme_path",
        "str",
        None,
        "Folder on the disk for stage-3 parameters with device nvme (docs/beyond-memory.md); nothing stays there.",
    ),
    _inert(
        "zero_optimization.offload_param.buffer_count",
        "int",
        5,
        "Buffers of NVMe offload.",
        _NO_BUFFERS,
        ge=0,
    ),
    _inert(
        "zero_optimization.offload_param.buffer_size",
        "int",
        100_000_000,
        "Buffers of NVMe offload.",
        _NO_BUFFERS,
        ge=0,
    ),
    _active(
        "zero_optimization.offload_param.max_in_cpu",
        "int",
        1_000_000_000,
        "Elements of parameters on disk that are in memory at a time, beside stage3_max_live_parameters.",
        ge=0,
    ),
    _inert(
        "zero_optimization.offload_param.pin_memory",
        "bool",
        True,
        "Page-locked host memory.",
        "parameters of a CPU run are in host memory",
    ),
    _active("zero_optimization.cpu_offload", "bool", None, "Old form of offload_optimizer {device: cpu}."),
    _active("zero_optimization.cpu_offload_param", "bool", None, "Old form of offload_param {device: cpu}."),
    _inert(
        "zero_optimization.cpu_offload_use_pin_memory",
        "bool",
        None,
        "Old form of pin_memory.",
        "use offload_optimizer.pin_memory",
    ),
    _later("zero_optimization.zenflow", "object", None, "ZenFlow"),
    _active(
        "zero_optimization.zero_hpz_partition_size",
        "int",
        1,
        "Ranks of ZeRO++'s secondary partition: 1, or a divisor of the ranks of a node. The node always is it: it holds"
        " the parameters once.",
        ge=0,
    ),
    _active(
        "zero_optimization.zero_quantized_weights",
        "bool",
        False,
        "ZeRO++'s qwZ: updated parameters cross between nodes as 8-bit blocks (stages 1 to 3).",
    ),
    _inert(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "bool",
        False,
        "Frozen parameters quantised.",
        "frozen parameters lie in every node's memory from the start: they never travel",
    ),
    _active(
        "zero_optimization.zero_quantized_gradients",
        "bool",
        False,
        "ZeRO++'s qgZ: gradients, reduced inside the node, cross between nodes as 4-bit blocks.",
    ),
    _removed("zero_optimization.mics_shard_size", "int", "use ZeRO-3", ok=(None, -1)),
    _removed("zero_optimization.mics_hierarchical_params_gather", "bool", "use ZeRO-3", ok=(None, False)),
    _removed("zero_optimization.zeropp_loco_param", "object", "use ZeRO-3"),
    # ---- checkpoints -------------------------------------------------------------------------------------------------
    _active(
        "checkpoint.tag_validation",
        "str",
        "Warn",
        "When ranks come to save_checkpoint with different tags: all save under rank 0's, silently (Ignore) or with a"
        " warning (Warn), or it is an error (Fail).",
        choices=("Ignore", "Warn", "Fail"),
    ),
    _inert(
        "checkpoint.load_universal",
        "bool",
        False,
        "Load a universal checkpoint.",
        "every deepc checkpoint loads into any number of ranks and any stage",
    ),
    _inert("checkpoint.use_node_local_storage", "bool", False, "One checkpoint per node.", "one node has one storage"),
    _inert(
        "checkpoint.parallel_write.pipeline_stage", "bool", False, "Pipeline stages write in parallel.", _OWN_WRITER
    ),
    _inert("checkpoint.checkpoint_serialization", "bool", True, "Serialize tensors.", _OWN_WRITER),
    _inert("checkpoint.writer", "object", None, "Fast writer.", _OWN_WRITER),
    _later("datastates_ckpt", "gated", None, "DataStates checkpoints"),
    # ---- later capabilities ------------------------------------------------------------------------------------------
    _active(
        "activation_checkpointing.partition_activations",
        "bool",
        False,
        "With tensor-parallel ranks: of the inputs of checkpointed blocks each rank keeps a part until backward"
        " (docs/activations.md).",
    ),
    _active(
        "activation_checkpointing.cpu_checkpointing",
        "bool",
        False,
        "Inputs of torch.utils.checkpoint's blocks lie in host memory until backward (a GPU run), or on disk"
        " (deepc.activations.nvme_path).",
    ),
    _active(
        "activation_checkpointing.budget",
        "any",
        None,
        'Bytes that autograd may hold between forward and backward: a number, or text such as "8GB" or "8 GiB". Blocks'
        " are recomputed in backward so that it is kept, those that cost the least time (docs/recomputation.md).",
    ),
    _active(
        "activation_checkpointing.contiguous_memory_optimization",
        "bool",
        False,
        "Inputs of checkpointed blocks lie in one piece of memory, which stays from step to step. CPUs.",
    ),
    _active(
        "activation_checkpointing.number_checkpoints",
        "any",
        None,
        "With contiguous_memory_optimization: how many checkpoints a forward has; memory for as many is taken at once."
        " A number; null and false: not said.",
    ),
    _inert(
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "bool",
        False,
        "Waits for the device where a call of deepspeed.checkpointing.checkpoint begins and ends, in backward too.",
        "a CPU computes when it is asked",
        inert_on="cpu",
    ),
    _active(
        "activation_checkpointing.profile",
        "bool",
        False,
        "Logs what each call of deepspeed.checkpointing.checkpoint takes in forward and backward.",
    ),
    _active("aio.block_size", "int", 1048576, "Bytes of a transfer, with device nvme; a multiple of 4096.", gt=0),
    _active("aio.queue_depth", "int", 8, "Transfers on their way at a time, with device nvme; absent: 64.", gt=0),
    _inert("aio.intra_op_parallelism", "int", 1, "Threads of a transfer.", _AIO, gt=0),
    _inert("aio.thread_count", "int", 1, "Threads of a transfer (old name).", _AIO, gt=0),
    _inert("aio.single_submit", "bool", False, "One system call per block.", _AIO),
    _inert("aio.overlap_events", "bool", True, "Submit while others complete.", _AIO),
    _inert("aio.use_gds", "bool", False, "GPUDirect storage.", "optimizer states go through host memory"),
    _active("tensorboard.enabled", "bool", False, "Write TensorBoard event files (package tensorboard)."),
    _active("tensorboard.output_path", "str", "", "Folder of the event files.", null=True),
    _active("tensorboard.job_name", "str", "DeepSpeedJobName", "Folder inside it.", null=True),
    _active("csv_monitor.enabled", "bool", False, "Write a CSV file per scalar."),
    _active("csv_monitor.output_path", "str", "", "Folder of the CSV files.", null=True),
    _active("csv_monitor.job_name", "str", "DeepSpeedJobName", "Folder inside it.", null=True),
    _active("wandb.enabled", "bool", False, "Log to Weights & Biases (package wandb)."),
    _active("wandb.group", "str", None, "Group of the run."),
    _active("wandb.team", "str", None, "Team (entity)."),
    _active("wandb.project", "str", "deepspeed", "Project.", null=True),
    _active("comet.enabled", "bool", False, "Log to Comet (package comet_ml)."),
    _active("comet.samples_log_interval", "int", 100, "A scalar is sent once in so many samples.", ge=0),
    _active("comet.project", "str", None, "Project."),
    _active("comet.workspace", "str", None, "Workspace."),
    _active("comet.api_key", "str", None, "Key of the account; better in the environment (COMET_API_KEY)."),
    _active("comet.experiment_name", "str", None, "Name of the experiment."),
    _active("comet.experiment_key", "str", None, "Key of the experiment, 32 to 50 characters."),
    _active("comet.online", "bool", None, "false: an offline experiment, written to a file."),
    _active("comet.mode", "str", None, "get, create or get_or_create."),
    _active(
        "flops_profiler.enabled",
        "bool",
        False,
        "Profile one step: parameters, MACs, FLOPs and time of every module (docs/profiling.md).",
    ),
    _active(
        "flops_profiler.recompute_fwd_factor",
        "number",
        0.0,
        "How much of the forward runs again in backward (checkpointing of everything: 1.0).",
        ge=0,
    ),
    _active(
        "flops_profiler.profile_step",
        "int",
        1,
        "Profile after so many optimizer steps; the first ones only warm up.",
        ge=0,
    ),
    _active("flops_profiler.module_depth", "int", -1, "Depths of modules in the table of top modules; -1: all.", ge=-1),
    _active("flops_profiler.top_modules", "int", 1, "Modules per depth in that table.", ge=0),
    _active("flops_profiler.detailed", "bool", True, "Also the model's tree with every module's figures."),
    _active("flops_profiler.output_file", "str", None, "Write the profile there; null: print it."),
    _active(
        "comms_logger.enabled",
        "bool",
        False,
        "Log every collective's size, latency and bandwidth; print them with deepc.comm.log_summary().",
    ),
    _active("comms_logger.verbose", "bool", False, "A line per call."),
    _active("comms_logger.prof_all", "bool", True, "All operations; false: those of prof_ops."),
    _active("comms_logger.debug", "bool", False, "The caller's line becomes part of an operation's name."),
    _active(
        "comms_logger.prof_ops",
        "strings",
        None,
        "Operations to log: all_reduce, reduce_scatter, all_gather, broadcast, ...",
    ),
    _later(
        "autotuning",
        "gated",
        None,
        "autotuning inside of a run (`deepc tune` does it before one, and reads this section)",
    ),
    _active(
        "pipeline.stages",
        "int",
        None,
        'Cuts the model into pipelines of so many ranks (docs/pipeline.md); null, "auto", 0, 1: what the model says.',
        ge=0,
    ),
    _active(
        "pipeline.activation_checkpoint_interval",
        "int",
        0,
        "A PipelineModule computes so many layers at a time again in backward; 0: what the module says.",
        ge=0,
    ),
    _inert("pipeline.partition", "str", "best", "How layers are cut.", _PARTITION),
    _inert("pipeline.seed_layers", "bool", False, "Seeds of layers.", "PipelineModule(seed_layers=) decides"),
    _inert("pipeline.pipe_partitioned", "bool", True, "Activations in parts over tensor-parallel ranks.", _WHOLE),
    _inert("pipeline.grad_partitioned", "bool", True, "The same of gradients.", _WHOLE),
    _inert("pipeline.use_reentrant", "bool", True, "Kind of recomputation.", "recomputation is never reentrant here"),
    _active(
        "tensor_parallel.autotp_size",
        "int",
        0,
        "Ranks that share every layer, next to each other (docs/tensor-parallel.md); 0, 1: none do.",
        ge=0,
    ),
    _active(
        "tensor_parallel.partition_config",
        "object",
        None,
        "Which modules are cut, by patterns of their names: {layer_specs: [{patterns, partition_type, ...}]}.",
    ),
    _active(
        "tensor_parallel.preset_model",
        "str",
        None,
        "Rules of a family of models: gpt2, llama, mistral, qwen2, bert, ...",
    ),
    _active(
        "tensor_parallel.vocab_parallel_lm_head",
        "bool",
        None,
        "A language model's loss is computed from each rank's part of the logits; false: they are gathered.",
    ),
    _inert("tensor_parallel.dtype", "any", None, "Type of the model.", "bf16.enabled and fp16.enabled decide"),
    _inert("tensor_parallel.tp_overlap_comm", "bool", False, "Overlaps communication.", _WITH_THE_CORE),
    _inert("tensor_parallel.vocab_parallel_ce_backend", "str", "torch", "Kind of cross-entropy.", "deepc has its own"),
    _inert("tensor_parallel.tensor_parallel", "object", None, "Of inference.", "autotp_size decides", alias="tp"),
    _later("tensor_parallel.injection_policy_tuple", "any", None, "injection policies"),
    _inert("tensor_parallel.keep_module_on_host", "bool", False, "Where the whole model is cut.", "it is where it is"),
    _later("tensor_parallel.replace_with_kernel_inject", "bool", False, "kernel injection", alias="kernel_inject"),
    _active(
        "sequence_parallel_size",
        "int",
        1,
        "Ranks that share every sequence: they get equal samples, and their losses count as a mean.",
        gt=0,
    ),
    _later(
        "use_data_before_expert_parallelism",
        "bool",
        False,
        "expert parallelism by the configuration (MoE takes ep_size)",
    ),
    _later("expert_parallel", "gated", None, "expert parallelism by the configuration (MoE takes ep_size)"),
    _later("weight_quantization", "gated", None, "weight quantization"),
    _later("hybrid_engine.enabled", "bool", False, _HYBRID),
    _later("hybrid_engine.max_out_tokens", "int", 512, _HYBRID, ok=ANY),
    _later("hybrid_engine.inference_tp_size", "int", 1, _HYBRID, ok=ANY),
    _later("hybrid_engine.release_inference_cache", "bool", False, _HYBRID, ok=ANY),
    _later("hybrid_engine.pin_parameters", "bool", True, _HYBRID, ok=ANY),
    _later("hybrid_engine.tp_gather_partition_size", "int", 8, _HYBRID, ok=ANY),
    _later("hybrid_engine.enable_cuda_graph", "bool", False, _HYBRID, ok=ANY),
    _later("compile.enabled", "bool", False, _COMPILE),
    _later("compile.deepcompile", "bool", False, _COMPILE),
    _later("compile.autoep_non_moe", "bool", False, _COMPILE),
    _later("compile.free_activation", "bool", False, _COMPILE, ok=ANY),
    _later("compile.free_activation_threshold", "int", 10 * 1024 * 1024, _COMPILE, ok=ANY),
    _later("compile.offload_activation", "bool", False, _COMPILE),
    _later("compile.offload_activation_pin_memory", "bool", True, _COMPILE, ok=ANY),
    _later("compile.offload_opt_states", "bool", False, _COMPILE),
    _later("compile.double_buffer", "bool", True, _COMPILE, ok=ANY),
    _later("compile.symmetric_memory", "bool", False, _COMPILE, ok=ANY),
    _later("compile.debug_log", "bool", False, _COMPILE, ok=ANY),
    _later("compile.offload_parameters", "bool", False, _COMPILE),
    _later("compile.sync_before_reduce", "bool", False, _COMPILE, ok=ANY),
    _later("compile.sync_after_reduce", "bool", False, _COMPILE, ok=ANY),
    _later("compile.sync_before_allgather", "bool", False, _COMPILE, ok=ANY),
    _later("compile.sync_after_allgather", "bool", False, _COMPILE, ok=ANY),
    _later("compile.keep_int_input_tensors", "bool", True, _COMPILE, ok=ANY),
    _later("compile.keep_all_input_tensors", "bool", False, _COMPILE, ok=ANY),
    _later("compile.passes", "strings", None, _COMPILE),
    _active("data_efficiency.enabled", "bool", False, "Curriculum over metrics of the samples (docs/curriculum.md)."),
    _inert(
        "data_efficiency.seed", "int", 1234, "Seed of the draw.", "the loader of training_data draws as it always does"
    ),
    _active("data_efficiency.data_sampling.enabled", "bool", False, "The part of data_efficiency that deepc has."),
    _inert(
        "data_efficiency.data_sampling.num_epochs", "int", 1000, "Length of the data.", "loops say when they end", ge=1
    ),
    _inert(
        "data_efficiency.data_sampling.num_workers",
        "int",
        0,
        "Workers of the loader.",
        "the loader of training_data reads in this process",
        ge=0,
    ),
    _inert(
        "data_efficiency.data_sampling.pin_memory", "bool", False, "Page-locked batches.", "batches stay where they are"
    ),
    _active("data_efficiency.data_sampling.curriculum_learning.enabled", "bool", False, "Follow the schedules below."),
    _inert(
        "data_efficiency.data_sampling.curriculum_learning.data_cluster_path",
        "str",
        None,
        "Folder for lists of samples.",
        "without sampling by difficulty there are none",
    ),
    _active(
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
        "object",
        None,
        "{name: {min_difficulty, max_difficulty, schedule_type, schedule_config, ...}}, as of curriculum_learning;"
        " seqlen_truncate cuts what the loader gives, others are for engine.set_data_post_process_func.",
    ),
    _later("data_efficiency.data_sampling.dynamic_batching", "gated", None, "dynamic batching"),
    _later("data_efficiency.data_routing", "gated", None, "random-LTD (token dropping)"),
    _active(
        "curriculum_learning.enabled",
        "bool",
        False,
        "Sequences begin short and become longer (docs/curriculum.md).",
    ),
    _active(
        "curriculum_learning.curriculum_type",
        "str",
        "seqlen",
        "seqlen: the difficulty is the length of sequences; another name: engine.curriculum.scheduler has it.",
    ),
    _active("curriculum_learning.min_difficulty", "int", None, "The length at the beginning.", ge=0),
    _active("curriculum_learning.max_difficulty", "int", None, "The length at the end.", ge=0),
    _active(
        "curriculum_learning.schedule_type",
        "str",
        None,
        "How the one becomes the other; custom: engine.set_custom_curriculum_learning_schedule.",
        choices=("fixed_linear", "fixed_root", "fixed_discrete", "custom"),
    ),
    _active(
        "curriculum_learning.schedule_config",
        "object",
        None,
        "fixed_linear: total_curriculum_step, difficulty_step; fixed_root: root_degree also; fixed_discrete: lists"
        " difficulty, max_step.",
    ),
    _later("elasticity", "gated", None, "elastic training"),
    _active(
        "sparse_attention",
        "object",
        None,
        "Layout of block-sparse attention, for the attention of a model of transformers: {mode: fixed, block: 64, ...}"
        " (docs/sparse-attention.md).",
    ),
    # ---- removed from DeepSpeed, not planned -------------------------------------------------------------------------
    _removed("amp", "gated", "use fp16 or bf16"),
    _removed("nebula", "gated", "checkpoints are written by deepc itself"),
    _removed("compression_training", "object", "quantize after training", ok=(None, {})),
    _removed("quantize_training", "gated", "quantize after training"),
    _removed("eigenvalue", "gated", "quantize after training"),
    _removed("progressive_layer_drop", "gated", "drop layers in the model"),
    _removed("sparse_gradients", "bool", "gradients of an embedding with sparse=True need no flag", ok=(None, False)),
    _removed("graph_harvesting", "bool", "use torch.compile", ok=(None, False)),
    # ---- our own -----------------------------------------------------------------------------------------------------
    _active(
        "deepc.activations.nvme_path",
        "str",
        None,
        "With activation_checkpointing.cpu_checkpointing, the folder on a local disk that activations go to.",
    ),
    _active(
        "deepc.activations.all",
        "bool",
        False,
        "Everything that autograd saves goes there, not only the inputs of checkpointed blocks.",
    ),
    _active("deepc.activations.min_bytes", "int", 1 << 16, "Smaller saved tensors stay where they are.", ge=1),
    _active(
        "deepc.bucket_elems",
        "int",
        None,
        "Elements of one gradient bucket; null: from zero_optimization.reduce_bucket_size and the model.",
        gt=0,
    ),
    _active(
        "deepc.curriculum",
        "str",
        "auto",
        "With a curriculum by length: forward: the model's forward gets curriculum_seqlen; truncate: batches are cut;"
        " auto: forward where it takes that argument, or any (but transformers' models).",
        choices=("auto", "forward", "truncate"),
    ),
    _active(
        "deepc.deterministic",
        "str",
        None,
        '"layout": bit-identical weights for any number of ranks, ZeRO stage and split into ranks and accumulation'
        " (docs/determinism.md).",
        choices=("layout",),
    ),
    _active(
        "deepc.fuse",
        "pick",
        False,
        '"auto": the model runs on deepc\'s fused operators where it can (deepc.fuse); true: the same, and an error if'
        " nothing can; a list: these kinds, each an error if the model has none (docs/fused.md).",
        choices=("norm", "mlp", "rotary", "attention", "loss"),
    ),
    _active(
        "deepc.max_lost_steps",
        "int",
        10,
        "So many skipped steps in a row with weights that are not finite, which no step can mend, end the run with"
        " NonFiniteError; 0: never.",
        ge=0,
    ),
    _active(
        "deepc.memory_plan",
        "str",
        "peak",
        "peak: initialize(sample_batch=...) predicts the highest memory of a step by a dry run, which takes seconds for"
        " deep models in many micro-batches; states: that of model states alone.",
        choices=("peak", "states"),
    ),
    _active(
        "deepc.pipeline.schedule",
        "str",
        "1f1b",
        "How micro-batches go through the stages of pipeline.stages (docs/pipeline.md).",
        choices=("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"),
    ),
    _active(
        "deepc.pipeline.chunks",
        "int",
        None,
        "Stages on each rank of pipeline.stages; null: as few as the schedule has.",
        ge=1,
    ),
    _active(
        "deepc.run_dir",
        "str",
        None,
        "Folder for run.json and metrics.jsonl (docs/logging.md); null: nothing is written. DEEPC_RUN_DIR replaces it.",
    ),
    _active(
        "deepc.log.format",
        "str",
        "auto",
        "auto: a live line on a terminal, plain lines elsewhere; plain; rich: the live line; json: JSON lines; none."
        " DEEPC_LOG replaces it.",
        choices=("auto", "plain", "rich", "json", "none"),
    ),
    _active(
        "deepc.log.ranks",
        "str",
        "first",
        "Which ranks print: first, or all. DEEPC_LOG_RANKS replaces it.",
        choices=("first", "all"),
    ),
    _active(
        "deepc.log.seconds",
        "number",
        10.0,
        "Without steps_per_print: a line every so many seconds (at the first step also).",
        gt=0,
    ),
    _active(
        "deepc.log.total_steps",
        "int",
        None,
        "Optimizer steps of the whole run, for the ETA; null: from the LR schedule.",
        gt=0,
    ),
    _active(
        "deepc.timeline.steps",
        "ints",
        (0, 0),
        "Record a timeline of these optimizer steps, [first, last], the first step is 1 (docs/profiling.md).",
        ge=0,
    ),
    _active("deepc.timeline.modules", "bool", False, "Also every module's forward and backward."),
    _active(
        "deepc.timeline.memory_ms",
        "number",
        5.0,
        "Milliseconds between samples of memory; 0: only at the borders of forward, backward and step.",
        ge=0,
    ),
    _active("deepc.timeline.folder", "str", None, 'Folder of the trace files; null: the run folder, or "timeline".'),
    _active(
        "deepc.precision.overflow_steps",
        "int",
        2,
        'precision "auto": so many steps in a row with gradients or a loss that are not finite: fp32.',
        ge=1,
    ),
    _active(
        "deepc.precision.divergence_factor",
        "number",
        2.0,
        'precision "auto": a loss this many times the median of the last ones counts as diverging; 0: never.',
        ge=0,
    ),
    _active(
        "deepc.precision.divergence_steps", "int", 10, 'precision "auto": so many such losses in a row: fp32.', ge=1
    ),
    _active(
        "deepc.precision.fp32_steps",
        "int",
        100,
        'precision "auto": steps in fp32 before 16 bits are tried again; doubles each time.',
        ge=1,
    ),
)

TABLE: dict[str, Key] = {k.path: k for k in KEYS}
"""All rows by path. The `gated` kind is a section whose content is not looked at unless its `enabled` is true."""

RENAMED_SECTIONS = {"bfloat16": "bf16"}
"""Old names of whole sections."""

OLD_NAMES = {
    f"{section}.{old}": f"{section}.{new}"
    for section, old, new in (
        ("zero_optimization", "cpu_offload", "offload_optimizer.device"),
        ("zero_optimization", "cpu_offload_param", "offload_param.device"),
        ("zero_optimization", "cpu_offload_use_pin_memory", "offload_optimizer.pin_memory"),
        (
            "zero_optimization",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_gather_16bit_weights_on_model_save",
        ),
        ("aio", "thread_count", "intra_op_parallelism"),
    )
}
"""Keys of the table that have another form now."""

OPTIMIZER_PARAMS: dict[str, Key] = {
    k.path: k
    for k in (
        _active("lr", "number", 1e-3, "Learning rate.", ge=0, auto=True),
        _active("betas", "numbers", (0.9, 0.999), "Decay rates of the moments.", ge=0, lt=1, auto=True),
        _active("eps", "number", 1e-8, "Added to the root of the second moment.", ge=0, auto=True),
        _active(
            "weight_decay", "number", 0.0, "Decoupled for AdamW, L2 for Adam with adam_w_mode false.", ge=0, auto=True
        ),
        _active("amsgrad", "bool", False, "Use the largest second moment so far."),
        _active("adam_w_mode", "bool", True, "Type Adam: decoupled decay (DeepSpeed's default) or L2."),
        _active("torch_adam", "bool", False, "Use torch.optim's class instead of deepc's."),
        _later("bias_correction", "bool", True, "Adam without bias correction"),
        _active("fp32_optimizer_states", "bool", True, "false: as state_dtype bf16."),
        _active(
            "state_dtype",
            "str",
            None,
            "How moments are stored: fp32, bf16 with stochastic rounding, int8 or int4 codes with a scale for each"
            " block (docs/optimizers.md).",
            choices=("fp32", "bf16", "int8", "int4"),
        ),
        _inert("set_grad_none", "bool", True, "Free gradients.", "gradients are always freed after their reduction"),
        _inert("foreach", "bool", None, "torch's multi-tensor loop.", "deepc's step is one call for all tensors"),
        _inert("fused", "bool", None, "torch's fused kernel.", "deepc's step is always fused"),
    )
}
"""Arguments of Adam and AdamW (path = argument name)."""

LATER_OPTIMIZERS = {
    "muadam": "muP's MuAdam",
    "muadamw": "muP's MuAdamW",
    "musgd": "muP's MuSGD",
}
"""DeepSpeed's optimizers that deepc does not have yet, by lower-case name."""

AUTO_SCHEDULER_PARAMS = frozenset({"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"})
"""Schedule arguments that an integration may leave "auto"."""

DIFFERS: dict[str, str] = {
    "zero_optimization.stage": (
        "all stages give equal bits; stage 1 keeps whole gradients no longer than stage 2; on a CPU node stage 3's"
        " parameters exist once for all ranks."
    ),
    "zero_optimization.reduce_bucket_size": (
        "buckets hold at most 1 Mi elements, which is as fast in shared memory and takes less of it; smaller values are"
        " kept."
    ),
    "zero_optimization.zero_hpz_partition_size": "the secondary partition always is the node.",
    "zero_optimization.zero_quantized_weights": "acts between nodes only: inside a node no parameter moves.",
    "zero_optimization.zero_quantized_gradients": (
        "acts between nodes only: inside a node gradients are reduced where they lie, in fp32."
    ),
    "fp16.enabled": "fp32 masters start from the values that the model had, not from their 16-bit rounding.",
    "bf16.enabled": (
        "fp32 masters start from the values that the model had, not from their 16-bit rounding; a step whose gradients"
        " are not finite is skipped."
    ),
    "checkpoint.tag_validation": "with Ignore and Warn DeepSpeed writes each rank's part under its own tag.",
    "gradient_accumulation_steps": (
        "sums are fp32 unless data_types.grad_accum_dtype says otherwise; no_sync() works at every stage."
    ),
    "data_types.grad_accum_dtype": "null is fp32 here, and the model's dtype in DeepSpeed.",
    "gradient_clipping": "the norm is summed in fp64 over blocks in one order: equal bits for any number of ranks.",
    "optimizer.type": (
        "Adam, AdamW, Lion, Lamb, Adafactor, Adagrad, SGD and Muon are deepc's kernels; any class of torch.optim works,"
        " the elementwise ones under every ZeRO stage."
    ),
}
"""Where a key that is used does something else than in DeepSpeed, in a sentence."""
