"""Which variables of this environment the ranks on other hosts get: those that programs of this kind read, by prefix,
and what .deepspeed_env says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ...errors import ArgumentError

_PREFIXES = (
    "PYTHON",
    "PATH",
    "LD_LIBRARY",
    "VIRTUAL_ENV",
    "CONDA",
    "DEEPC_",
    "DS_",
    "DEEPSPEED_",
    "NCCL",
    "GLOO_",
    "UCX",
    "MV2",
    "OMP_",
    "KMP_",
    "MKL_",
    "TORCH",
    "PYTORCH",
    "CUDA_",
    "CUBLAS",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "ACCELERATE_",
    "DATASETS_",
    "WANDB_",
    "MLFLOW",
    "COMET_",
    "TENSORBOARD",
    "XDG_CACHE",
    "LANG",
    "LC_",
    "TZ",
    "THP_MEM_ALLOC",
    "MALLOC_",
    "LD_PRELOAD",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
# What belongs to one host or one process.
_NEVER = {"CUDA_VISIBLE_DEVICES", "DEEPC_LAUNCHER_PID", "DEEPC_NODE_ID", "DEEPC_TRACER_PID", "TORCHELASTIC_ERROR_FILE"}


def file_name() -> str:
    return os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def read_file(path: Path) -> dict[str, str]:
    """NAME=VALUE a line, as DeepSpeed has it; empty lines and comments are left out. Raises ArgumentError with the line
    that is wrong."""
    found = {}
    for number, line in enumerate(path.read_text("utf-8-sig", "surrogateescape").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        if not equals or not name.strip().isidentifier():
            raise ArgumentError(f"{path}, line {number}: {text!r} is not of the form NAME=VALUE")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":  # the shell took them off
            value = value[1:-1]
        found[name.strip()] = value
    return found


def from_files() -> dict[str, str]:
    """Of ~/.deepspeed_env and ./.deepspeed_env; the second wins. DS_ENV_FILE names another file."""
    found: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()):
        path = folder / file_name()
        if path.is_file():
            found.update(read_file(path))
    return found


def exported(env: Mapping[str, str]) -> dict[str, str]:
    """What ranks on other hosts get of `env`, with the files' on top."""
    return {**{k: v for k, v in env.items() if k.startswith(_PREFIXES) and k not in _NEVER}, **from_files()}
