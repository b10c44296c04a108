"""What the name `deepspeed` stands for: one row per module, one word per name.

MODULES gives for each module (without the leading "deepspeed") lines of the form `source: name name theirs=ours`: where
a name comes from, and, after `=`, what it is called there. REAL_MODULES are modules that are one of ours as a whole.
LACKING has what DeepSpeed has and deepc has not, with what to use instead. docs/compat.md is made of these tables
(`python -m deepc.compat.names`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache, lru_cache  # noqa: F401
from typing import Any, NamedTuple

VERSION = "0.19.8"
"""The release of DeepSpeed whose behaviour and names deepc follows; what `deepspeed.__version__` and the metadata say."""

_OPTIMIZERS = "deepc.compat.runtime.optimizers: DeepSpeedCPUAdam FusedAdam"

_FLOPS = """
    deepc.observe.profile.flops: FlopsProfiler get_model_profile get_module_flops get_module_macs get_module_duration
    deepc.observe.profile.flops.text: number_to_string macs_to_string flops_to_string bytes_to_string params_to_string duration_to_string
    """

_SPARSE = (
    "deepc.nn.attention: SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig"
    " BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig SparseSelfAttention BertSparseSelfAttention SparseAttentionUtils"
)

_UNIVERSAL = (
    "deepc.compat.helpers.values: UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY"
    " UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS"
    " TP_REPLICATED_PARAMETER_PATTERNS PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_ROW_PARALLELISM_PATTERNS"
    " PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0"
)

_TP_LAYERS = (
    "LinearLayer LinearAllreduce SubParamLinearLayer SubParamLinearAllreduce GateUpPack_LinearLayer"
    " GatherReplacedLayerParams set_autotp_mode is_autotp_training_mode"
)

MODULES: dict[str, str] = {
    "": (
        """
        deepc.compat.runtime.engine: initialize DeepSpeedEngine PipelineEngine
        deepc.pipe: PipelineModule
        deepc: add_config_arguments
        deepc.compat.helpers.parallel.layers: tp_model_init set_autotp_mode
        deepc.compat.helpers.comm: init_distributed
        deepc.compat.runtime.inference: init_inference InferenceEngine default_inference_config DeepSpeedInferenceConfig
        deepc.zero.step.update: DeepSpeedOptimizer=ShardedOptimizer
        deepc.compat.runtime.settings.config: DeepSpeedConfig DeepSpeedConfigError
        deepc.compat.helpers.utils: OnDevice log_dist logger
        deepc.compat.helpers.devices.accelerator: get_accelerator
        deepc.compat.helpers.values: __version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ __git_branch__ version git_hash git_branch
            HAS_TRITON TORCH_DISTRIBUTED_DEFAULT_PORT DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable ADAM_OPTIMIZER LAMB_OPTIMIZER
        deepspeed.runtime.dataloader: DeepSpeedDataLoader
        deepspeed.comm: dist=
        deepspeed.runtime.zero: zero=
        deepspeed.runtime.activation_checkpointing.checkpointing: checkpointing=
        """
    ),
    "accelerator": (
        "deepc.compat.helpers.devices.accelerator: get_accelerator set_accelerator is_current_accelerator_supported"
        " DeepSpeedAccelerator"
    ),
    "accelerator.real_accelerator": (
        "deepc.compat.helpers.devices.accelerator: get_accelerator set_accelerator is_current_accelerator_supported"
    ),
    "accelerator.abstract_accelerator": "deepc.compat.helpers.devices.accelerator: DeepSpeedAccelerator",
    "accelerator.cpu_accelerator": "deepc.compat.helpers.devices.accelerator: CPU_Accelerator",
    "accelerator.cuda_accelerator": "deepc.compat.helpers.devices.accelerator: CUDA_Accelerator",
    "checkpoint": _UNIVERSAL,
    "checkpoint.constants": _UNIVERSAL,
    "checkpoint.utils": "deepc.compat.helpers.utils: clone_tensors_for_torch_save",
    "comm.config": "deepc.compat.runtime.settings.config: CommsConfig CommsLoggerConfig",
    "constants": "deepc.compat.helpers.values: TORCH_DISTRIBUTED_DEFAULT_PORT",
    "git_version_info": "deepc.compat.helpers.values: version git_hash git_branch installed_ops compatible_ops torch_info",
    "inference": "deepc.compat.runtime.inference: InferenceEngine DeepSpeedInferenceConfig",
    "inference.config": "deepc.compat.runtime.inference: DeepSpeedInferenceConfig",
    "inference.engine": "deepc.compat.runtime.inference: InferenceEngine",
    "launcher": "",
    "launcher.runner": (
        "deepc.compat.helpers.values: DEEPSPEED_ENVIRONMENT_NAME DEEPSPEED_ENVIRONMENT_PATHS DLTS_HOSTFILE EXPORT_ENVS"
        " PDSH_MAX_FAN_OUT"
    ),
    "launcher.constants": "deepc.compat.helpers.values: PDSH_LAUNCHER OPENMPI_LAUNCHER SLURM_LAUNCHER",
    "linear": "",
    "moe": "",
    "moe.experts": "deepc.parallel.expert: Experts",
    "moe.layer": "deepc.parallel.expert: Experts MoE MOELayer TopKGate",
    "moe.mappings": "",
    "moe.sharded_moe": """
        deepc.parallel.expert: MOELayer TopKGate
        deepc.compat.helpers.parallel.gating: top1gating top2gating topkgating TUTEL_INSTALLED
    """,
    "moe.utils": (
        "deepc.parallel.expert: MoE has_moe_layers is_moe_param is_moe_param_group configure_moe_param_groups"
        " split_params_into_different_moe_groups_for_optimizer split_params_into_shared_and_expert_params"
    ),
    "module_inject": f"deepc.compat.helpers.parallel.layers: {_TP_LAYERS}",
    "module_inject.layers": f"deepc.compat.helpers.parallel.layers: {_TP_LAYERS}",
    "module_inject.tp_shard": "deepc.compat.helpers.parallel.layers: get_shard_size get_shard_size_list",
    "monitor": "",
    "monitor.config": (
        "deepc.compat.runtime.settings.sections: DeepSpeedMonitorConfig get_monitor_config TensorBoardConfig WandbConfig CSVConfig"
        " CometConfig"
    ),
    "monitor.monitor": "deepc.observe.monitor.experiments: Monitor MonitorMaster",
    "monitor.tensorboard": "deepc.observe.monitor.experiments: TensorBoardMonitor",
    "monitor.wandb": "deepc.observe.monitor.experiments: WandbMonitor",
    "monitor.comet": "deepc.observe.monitor.experiments: CometMonitor",
    "monitor.csv_monitor": "deepc.observe.monitor.experiments: csvMonitor",
    "ops": "deepc.compat.helpers.values: __compatible_ops__=compatible_ops",
    "ops.aio": "deepc.compat.helpers.devices.aio: AsyncIOBuilder",
    "ops.adagrad": "deepc.compat.runtime.optimizers: DeepSpeedCPUAdagrad",
    "ops.adagrad.cpu_adagrad": "deepc.compat.runtime.optimizers: DeepSpeedCPUAdagrad",
    "ops.adam": _OPTIMIZERS,
    "ops.sparse_attention": _SPARSE,
    "ops.sparse_attention.sparsity_config": _SPARSE,
    "ops.sparse_attention.sparse_self_attention": _SPARSE,
    "ops.sparse_attention.bert_sparse_self_attention": _SPARSE,
    "ops.sparse_attention.sparse_attention_utils": _SPARSE,
    "ops.sparse_attention.matmul": "",
    "ops.sparse_attention.softmax": "",
    "ops.adam.cpu_adam": _OPTIMIZERS,
    "ops.adam.fused_adam": _OPTIMIZERS,
    "ops.lamb": "deepc.compat.runtime.optimizers: FusedLamb",
    "ops.lamb.fused_lamb": "deepc.compat.runtime.optimizers: FusedLamb",
    "ops.lion": "deepc.compat.runtime.optimizers: DeepSpeedCPULion FusedLion",
    "ops.lion.cpu_lion": "deepc.compat.runtime.optimizers: DeepSpeedCPULion",
    "ops.lion.fused_lion": "deepc.compat.runtime.optimizers: FusedLion",
    "ops.op_builder": """
        deepc.compat.helpers.devices.aio: AsyncIOBuilder
        deepc.compat.helpers.devices.builder: OpBuilder
    """,
    "ops.op_builder.builder": "deepc.compat.helpers.devices.builder: OpBuilder",
    "ops.op_builder.async_io": "deepc.compat.helpers.devices.aio: AsyncIOBuilder",
    "ops.transformer": "",
    "pipe": """
        deepc.compat.runtime.pipe.topology: ProcessTopology
        deepc.pipe: LayerSpec PipelineModule TiedLayerSpec
        """,
    "profiling": "",
    "profiling.flops_profiler": _FLOPS,
    "profiling.flops_profiler.profiler": _FLOPS,
    "runtime": "deepc.zero.step.update: ZeROOptimizer=ShardedOptimizer DeepSpeedOptimizer=ShardedOptimizer",
    "runtime.activation_checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing: checkpointing=",
    "runtime.base_optimizer": "deepc.zero.step.update: ZeROOptimizer=ShardedOptimizer DeepSpeedOptimizer=ShardedOptimizer",
    "runtime.bf16_optimizer": "deepc.zero.step.update: BF16_Optimizer=ShardedOptimizer",
    "runtime.checkpoint_engine": "",
    "runtime.config": (
        """
        deepc.compat.runtime.settings.config: DeepSpeedConfig DeepSpeedConfigError
        deepc.compat.runtime.settings.sections: DeepSpeedZeroConfig
        deepc.compat.helpers.values: ADAM_OPTIMIZER ADAMW_OPTIMIZER ADAGRAD_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER DEEPSPEED_OPTIMIZERS
            ADAM_W_MODE ADAM_W_MODE_DEFAULT TORCH_ADAM_PARAM ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER ZERO_ONE_ADAM_OPTIMIZER
        """
    ),
    "runtime.constants": (
        """
        deepc.compat.helpers.values: TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING OPTIMIZER SCHEDULER TYPE
            MAX_GRAD_NORM FP16 BFLOAT16 STEPS_PER_PRINT ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT ROUTE_ENCODE
        """
    ),
    "runtime.data_pipeline": "",
    "runtime.data_pipeline.curriculum_scheduler": "deepc.config.curriculum: CurriculumScheduler",
    "runtime.dataloader": "deepc.compat.helpers.utils: RepeatingLoader DeepSpeedDataLoader",
    "runtime.engine": (
        """
        deepc.compat.runtime.engine: DeepSpeedEngine
        deepc.compat.helpers.values: DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER
            MUON_OPTIMIZER MEMORY_OPT_ALLREDUCE_SIZE
        """
    ),
    "runtime.fp16": "",
    "runtime.fp16.fused_optimizer": "deepc.zero.step.update: FP16_Optimizer=ShardedOptimizer",
    "runtime.fp16.onebit": "deepc.compat.runtime.optimizers: OnebitAdam OnebitLamb ZeroOneAdam",
    "runtime.fp16.onebit.adam": "deepc.compat.runtime.optimizers: OnebitAdam",
    "runtime.fp16.onebit.lamb": "deepc.compat.runtime.optimizers: OnebitLamb",
    "runtime.fp16.onebit.zoadam": "deepc.compat.runtime.optimizers: ZeroOneAdam",
    "runtime.fp16.unfused_optimizer": "deepc.zero.step.update: FP16_UnfusedOptimizer=ShardedOptimizer",
    "runtime.torch_autocast": (
        """
        deepc.compat.runtime.settings.autocast: LOWER_PRECISION_SAFE_MODULES PARAM_COMM_DTYPE_ATTR_NAME autocast_if_enabled get_all_comm_dtypes
            get_comm_dtype get_default_autocast_lower_precision_modules has_comm_dtype init_autocast_params
        """
    ),
    "runtime.fp16.loss_scaler": "deepc.engine.policy.precision: DynamicLossScaler LossScaler=StaticLossScaler",
    "runtime.lr_schedules": (
        """
        deepc.optim.schedules: LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR
        deepc.compat.helpers.values: VALID_LR_SCHEDULES LR_SCHEDULE LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR
            WARMUP_LOG_RATE WARMUP_LINEAR_RATE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE TOTAL_NUM_STEPS
            LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE EDGE_VALUE MID_VALUE
            CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE
            CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_RATIO COS_MIN_RATIO
        deepc.compat.helpers.tuning: add_tuning_arguments
        """
    ),
    "runtime.pipe": """
        deepc.compat.runtime.pipe.topology: ProcessTopology
        deepc.pipe: LayerSpec PipelineModule TiedLayerSpec
        """,
    "runtime.pipe.engine": "deepc.compat.runtime.engine: PipelineEngine",
    "runtime.pipe.module": "deepc.pipe: LayerSpec PipelineModule TiedLayerSpec",
    "runtime.sequence_parallel": "",
    "runtime.sequence_parallel.ulysses_sp": """
        deepc.compat.helpers.parallel.ulysses: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter
        deepc.compat.helpers.parallel.tiled: TiledMLP TiledFusedLogitsLoss sequence_tiled_compute
    """,
    "sequence": "",
    "sequence.layer": """
        deepc.parallel.sequence: DistributedAttention
        deepc.compat.helpers.parallel.ulysses: _SeqAllToAll=SeqAllToAll
    """,
    "runtime.utils": (
        """
        deepc.compat.helpers.utils: see_memory_usage memory_status empty_cache move_to_device copy_to_device set_random_seed clip_grad_norm_
            ensure_directory_exists partition_uniform partition_balanced call_to_str get_inactive_params is_model_parallel_parameter
            noop_decorator noop_context
        """
    ),
    "runtime.zero": (
        """
        deepc.zero.init: Init
        deepc.zero.parameters.gathered: register_external_parameter unregister_external_parameter
        deepc.compat.runtime.parameters: ZeroParamStatus
        deepc.compat.runtime.zero: GatheredParameters ZeroParamType DeepSpeedTensorOverride unwrap_model_for_generation
        """
    ),
    "runtime.zero.config": (
        "deepc.compat.runtime.settings.sections: DeepSpeedZeroConfig DeepSpeedZeroOffloadOptimizerConfig"
        " DeepSpeedZeroOffloadParamConfig DeepSpeedZeroLeafModuleConfig OffloadDeviceEnum ZeroStageEnum"
    ),
    "runtime.zero.leaf_module_config": (
        "deepc.compat.runtime.settings.sections: DeepSpeedZeroLeafModuleConfig DEFAULT_LEAF_MODULE_CLASSES"
        " DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES"
    ),
    "runtime.zero.offload_config": (
        "deepc.compat.runtime.settings.sections: DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig"
        " OffloadDeviceEnum OffloadStateTypeEnum"
    ),
    "runtime.zero.partition_parameters": (
        """
        deepc.zero.init: Init
        deepc.zero.parameters.gathered: register_external_parameter unregister_external_parameter
        deepc.compat.runtime.parameters: ZeroParamStatus
        deepc.compat.runtime.zero: GatheredParameters ZeroParamType DeepSpeedTensorOverride zero_wrapper_for_fp_tensor_constructor shutdown_init_context restore_init_context
            _orig_torch_tensor _orig_torch_empty _orig_torch_zeros _orig_torch_ones _orig_torch_full _orig_torch_arange _orig_torch_eye _orig_torch_randn
        deepc.compat.helpers.devices.accelerator: get_accelerator
        deepc.compat.helpers.utils: see_memory_usage
        """
    ),
    "runtime.zero.stage3": (
        """
        deepc.zero.step.update: DeepSpeedZeroOptimizer_Stage3=ShardedOptimizer
        deepc.compat.runtime.zero: unwrap_model_for_generation estimate_zero3_model_states_mem_needs
        deepc.plan.predict.estimate: estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold
        """
    ),
    "runtime.zero.stage_1_and_2": (
        """
        deepc.zero.step.update: DeepSpeedZeroOptimizer=ShardedOptimizer
        deepc.plan.predict.estimate: estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold
        deepc.compat.runtime.zero: estimate_zero2_model_states_mem_needs
        """
    ),
    "runtime.zero.utils": (
        "deepc.zero.parameters.gathered: is_zero_param\n deepc.compat.runtime.zero: is_zero_supported_optimizer"
        " ZeRORuntimeException"
    ),
    "utils": (
        """
        deepc.compat.helpers.safe: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad
            safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param
            safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized
        deepc.compat.helpers.utils: logger log_dist log_dist_once set_log_level_from_string OnDevice RepeatingLoader instrument_w_nvtx recursive_getattr
            recursive_setattr set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter set_z3_leaf_module
            set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix
        """
    ),
    "utils.init_on_device": "deepc.compat.helpers.utils: OnDevice",
    "compression": "",
    "compression.helper": (
        """
        deepc.compat.helpers.utils: recursive_getattr recursive_setattr
    """
    ),
    "utils.logging": (
        """
        deepc.compat.helpers.utils: logger log_dist log_dist_once print_dist print_json_dist warning_once set_log_level_from_string get_log_level_from_string
            should_log_le get_current_level
        """
    ),
    "utils.nvtx": "deepc.compat.helpers.utils: instrument_w_nvtx",
    "utils.tensor_fragment": (
        """
        deepc.compat.helpers.safe: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad
            safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param
            safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized
        """
    ),
    "utils.torch": (
        "deepc.compat.helpers.values: required_torch_version is_functorch_transforming register_grad_hook"
        " jit_script_compat"
    ),
    "utils.z3_leaf_module": (
        """
        deepc.compat.helpers.utils: set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter set_z3_leaf_module
            set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix
        """
    ),
}

REAL_MODULES: dict[str, str] = {
    "deepspeed.comm": "deepc.compat.helpers.comm",
    "deepspeed.comm.comm": "deepc.compat.helpers.comm",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "deepc.compat.runtime.checkpointing",
    "deepspeed.runtime.pipe.schedule": "deepc.compat.runtime.pipe.schedule",
    "deepspeed.runtime.pipe.topology": "deepc.compat.runtime.pipe.topology",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": "deepc.compat.helpers.parallel.sequence_state",
    "deepspeed.utils.groups": "deepc.compat.helpers.groups",
    "deepspeed.utils.timer": "deepc.compat.helpers.timer",
    "deepspeed.utils.zero_to_fp32": "deepc.compat.runtime.zero_to_fp32",
}

ALIASES: dict[str, str] = {"zero": "runtime.zero"}
"""Attributes of DeepSpeed's package that are modules elsewhere in its tree; importable by either name here."""

_DUAL = 'not built; PipelineModule(..., schedule="zb-v") has as small a bubble'
_TP = "deepc has its own: tensor_parallel.autotp_size, tp_model_init; see docs/tensor-parallel.md"
_SP = "deepc has its own: deepc.parallel.sequence (share, shard, cross_entropy); see docs/sequence-parallel.md"
_MOE = "it is inside of DeepSpeed's layer; deepspeed.moe.layer.MoE is there, and deepc.parallel.expert has its parts"
_KERNEL = (
    "kernel injection is not built; deepc.fuse(model) fuses norms, activations, rotary embeddings, attention and the loss of a"
    " model"
)
_GONE = "it was removed from DeepSpeed as well"
_NVME = "deepc has its own files on NVMe (deepc.offload); offload_optimizer {device: nvme} works"
_BUILD = "deepc compiles nothing on your machine, so there are no op builders; `deepc doctor` shows which kernels run"
_COMPRESSION = "it was removed from DeepSpeed as well; quantize after training"
_DATA = "random-LTD, sampling by difficulty and the analysis of data are not built yet"

LACKING: dict[str, str] = {
    "DualPipeVEngine": _DUAL,
    "DualPipeVModule": _DUAL,
    "DeepSpeedHybridEngine": (
        "the hybrid engine is not built; call generate on the trained engine's module (under stage 3 inside deepc's"
        " engine.keep_gathered())"
    ),
    "DeepSpeedTransformerLayer": _KERNEL,
    "DeepSpeedTransformerConfig": _KERNEL,
    "replace_transformer_layer": _KERNEL,
    "revert_transformer_layer": _KERNEL,
    "autotuning": "deepc tune finds the fastest configuration of a script by short trials; see docs/tuning.md",
    "checkpoint.ds_to_universal": (
        "every deepc checkpoint loads into any number of ranks and any stage: there is nothing to convert"
    ),
    "checkpoint.DeepSpeedCheckpoint": "read deepc's checkpoints with `deepc ckpt` or safetensors",
    "compression.compress": _COMPRESSION,
    "compression.scheduler": _COMPRESSION,
    "compression.init_compression": _COMPRESSION,
    "compression.redundancy_clean": _COMPRESSION,
    "compile": "use torch.compile, or engine.compile()",
    "linear.OptimizedLinear": "use peft's LoRA, which works at every stage",
    "linear.LoRAConfig": "use peft's LoRA, which works at every stage",
    "linear.QuantizationConfig": "quantized training is not built yet",
    "moe.sharded_moe": _MOE,
    "moe.mappings": _MOE,
    "moe.utils.split_params_grads_into_shared_and_expert_params": _MOE,
    "module_inject": _KERNEL,
    "model_implementations": _KERNEL,
    "nvme": _NVME,
    "io": _NVME,
    "ops.gds": _NVME,
    "ops.adam.ZenFlowCPUAdam": "ZenFlow is not built",
    "ops.adam.ZenFlowSelectiveAdamW": "ZenFlow is not built",
    "ops.deepspeed4science": "not built; use torch's scaled_dot_product_attention",
    "ops.fp_quantizer": "quantized training is not built yet",
    "ops.quantizer": "quantized training is not built yet",
    "ops.op_builder": _BUILD,
    "ops.random_ltd": _DATA,
    "ops.sparse_attention.matmul": "deepc has its own kernel: deepc.core.ops.block_sparse_attention",
    "ops.sparse_attention.softmax": "deepc has its own kernel: deepc.core.ops.block_sparse_attention",
    "ops.transformer": _KERNEL,
    "ops.triton_ops": _KERNEL,
    "runtime.compiler": "use torch.compile",
    "runtime.data_pipeline": _DATA,
    "runtime.domino": _TP,
    "runtime.eigenvalue": _GONE,
    "runtime.hybrid_engine": "the hybrid engine is not built; call generate on the trained engine's module",
    "runtime.progressive_layer_drop": _GONE,
    "runtime.quantize": _GONE,
    "runtime.rollout": "rollouts are not built; call generate on the engine's module",
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPFwdLossBwdWithLogits": _SP,
    "runtime.tensor_parallel": _TP,
    "runtime.superoffload": "SuperOffload is not built; use offload_optimizer",
    "runtime.swap_tensor": _NVME,
    "runtime.zero.tiling": "tiled linear layers are not built; stage 3 streams parameters without splitting modules",
    "runtime.zero.TiledLinear": (
        "tiled linear layers are not built; stage 3 streams parameters without splitting modules"
    ),
    "runtime.zero.DeepSpeedZeRoOffload": "stage 3's parameters are managed by the engine (deepc.initialize)",
    "runtime.zero.parameter_offload": "stage 3's parameters are managed by the engine (deepc.initialize)",
    "runtime.zero.mics": _GONE,
    "elasticity": "elastic training is not built yet; " + _GONE,
    "sequence.auto_sp": _SP,
    "sequence.cross_entropy": _SP,
    "sequence.fpdt_layer": _SP,
}


class Entry(NamedTuple):
    """Where a name comes from: attribute `attr` of module `source`; the module itself if attr is empty."""

    source: str
    attr: str

    def load(self) -> Any:
        module = importlib.import_module(self.source)
        return getattr(module, self.attr) if self.attr else module


def _relative(fullname: str) -> str | None:
    if fullname == "deepspeed":
        return ""
    return fullname.removeprefix("deepspeed.") if fullname.startswith("deepspeed.") else None


def _canonical(relative: str) -> str:
    for alias, target in ALIASES.items():
        if relative == alias or relative.startswith(alias + "."):
            return target + relative[len(alias) :]
    return relative


def alias_of(fullname: str) -> str | None:
    """The full name of the module that `fullname` is another name of, if it is."""
    relative = _relative(fullname)
    canonical = None if relative is None else _canonical(relative)
    return f"deepspeed.{canonical}" if canonical != relative and has_module(fullname) else None


def _parse(text: str) -> dict[str, Entry]:
    out: dict[str, Entry] = {}
    source = ""
    for word in text.split():
        if word.endswith(":"):
            source = word[:-1]
            continue
        name, has, attr = word.partition("=")
        out[name] = Entry(source, attr if has else name)
    return out


@cache
def table(fullname: str) -> Mapping[str, Entry]:
    """The names of a module of the compatibility layer; empty for one that is not in MODULES."""
    relative = _relative(fullname)
    return {} if relative is None else _parse(MODULES.get(_canonical(relative), ""))


def has_module(fullname: str) -> bool:
    """True if `fullname` ("deepspeed.utils.groups") can be imported."""
    relative = _relative(fullname)
    if relative is None:
        return False
    canonical = _canonical(relative)
    return canonical in MODULES or "deepspeed." + canonical in REAL_MODULES


def submodules(fullname: str) -> list[str]:
    """The modules directly below `fullname`."""
    relative = _relative(fullname)
    if relative is None:
        return []
    prefix = _canonical(relative) + "." if relative else ""
    known = [*MODULES, *(n.removeprefix("deepspeed.") for n in REAL_MODULES), *(ALIASES if not prefix else ())]
    return sorted({n[len(prefix) :].split(".")[0] for n in known if n.startswith(prefix) and n != ""})


def why_lacking(fullname: str) -> str | None:
    """Why deepc has not this name or module of DeepSpeed, and what to use instead; None if nobody knows it. What lies
    below a lacking module lacks for the same reason."""
    relative = _relative(fullname)
    if not relative:
        return None
    parts = _canonical(relative).split(".")
    for n in range(len(parts), 0, -1):
        if (why := LACKING.get(".".join(parts[:n]))) is not None:
            return why
    return None


def doc(fullname: str) -> str:
    return f"{fullname} of deepc's compatibility layer; the names are listed in docs/compat.md."


# ---- the documentation -----------------------------------------------------------------------------------------------
def listing() -> str:
    """Markdown: every module with its names, then what is not there and what to use instead. docs/compat.md holds
    it."""
    lines = ["| module | names |", "|---|---|"]
    for module, text in MODULES.items():
        full = f"deepspeed.{module}" if module else "deepspeed"
        found = ", ".join(f"`{n}`" for n in _parse(text))
        if found:
            lines.append(f"| `{full}` | {found} |")
    for full, ours in REAL_MODULES.items():
        lines.append(f"| `{full}` | all of `{ours}` |")
    lines += [
        "",
        "| not there | instead |",
        "|---|---|",
        *(f"| `deepspeed.{name}` | {why} |" for name, why in LACKING.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing(), end="")
