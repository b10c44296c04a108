"""Constants of DeepSpeed that scripts and integrations read, and its questions about the torch of this process
(deepspeed.utils.torch)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ...core.foreign import private
from ...errors import MisuseError
from ..names import VERSION

__version__ = version = VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in VERSION.split("."))
__git_hash__ = git_hash = "deepc"
__git_branch__ = git_branch = "deepc"
installed_ops: dict[str, bool] = {"async_io": True}
compatible_ops: dict[str, bool] = {"async_io": True}
torch_info = {
    "version": torch.__version__,
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}
HAS_TRITON = False
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000
DeepSpeedOptimizerCallable = Callable[[object], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], object]

# launcher
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
PDSH_MAX_FAN_OUT = 1024
PDSH_LAUNCHER, OPENMPI_LAUNCHER, SLURM_LAUNCHER = "pdsh", "openmpi", "slurm"

# checkpoints: keys of what Megatron's scripts write into client_state for universal ones; deepc needs none of it
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"

# optimizers
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "adagrad", "lamb"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "onebitlamb", "zerooneadam"
LION_OPTIMIZER, MUON_OPTIMIZER = "lion", "muon"
DEEPSPEED_OPTIMIZERS = [ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER]
ADAM_W_MODE, ADAM_W_MODE_DEFAULT, TORCH_ADAM_PARAM = "adam_w_mode", True, "torch_adam"

# keys of the configuration
TRAIN_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_batch_size", "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS, GRADIENT_CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
OPTIMIZER, SCHEDULER, TYPE, MAX_GRAD_NORM = "optimizer", "scheduler", "type", "max_grad_norm"
FP16, BFLOAT16, STEPS_PER_PRINT = "fp16", "bf16", "steps_per_print"
ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"

# schedules
LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = (
    "LRRangeTest",
    "OneCycle",
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
)
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE = (
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "warmup_type",
)
TOTAL_NUM_STEPS = "total_num_steps"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
EDGE_VALUE, MID_VALUE = "edge_value", "mid_value"
CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT = "cycle_first_step_size", "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT = "cycle_second_step_size", "cycle_second_stair_count"
CYCLE_MIN_LR, CYCLE_MAX_LR, CYCLE_MIN_MOM, CYCLE_MAX_MOM = (
    "cycle_min_lr",
    "cycle_max_lr",
    "cycle_min_mom",
    "cycle_max_mom",
)
DECAY_STEP_SIZE, DECAY_LR_RATE, DECAY_MOM_RATE = "decay_step_size", "decay_lr_rate", "decay_mom_rate"


# ---- deepspeed.utils.torch -------------------------------------------------------------------------------------------
def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """True if torch's version is at least `min_version` and at most `max_version` (numbers or text)."""
    if not min_version and not max_version:
        raise MisuseError("required_torch_version needs min_version or max_version")
    here = TorchVersion(torch.__version__)
    return (not min_version or here >= str(min_version)) and (not max_version or here <= str(max_version))


def is_functorch_transforming() -> bool:
    """True inside torch.func's transforms (grad, vmap, ...)."""
    return private.functorch_is_active()


def register_grad_hook(param: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """`hook(param)` is called when a backward has added to `param.grad`."""
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as it is: a small function gains nothing here from being compiled on first use."""
    return fn
