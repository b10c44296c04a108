"""Constants of DeepSpeed that scripts and integrations read."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ..names import VERSION

__version__ = version = VERSION
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in VERSION.split("."))
__git_hash__ = git_hash = "deepc"
__git_branch__ = git_branch = "deepc"
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
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

# optimizers
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER, LAMB_OPTIMIZER = "adam", "adamw", "adagrad", "lamb"
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
