"""deepspeed.init_inference over plain PyTorch: the model in its dtype, on its device, ready for forward and generate;
or, with a `zero` section that asks for it, its weights on disk (ZeRO-Inference)."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from ...comm.start import default_device
from ...config.source import read
from ...core import dtypes
from ...core.ops import casts, torch_dtype
from ...engine.base import ModelWrapper
from ...engine.serve.inference import inference
from ...errors import ArgumentError, UnsupportedError

_log = logging.getLogger("deepc")


class DeepSpeedInferenceConfig:
    """The keys of init_inference. What asks for a capability that deepc has not raises; performance hints are
    accepted."""

    _DEFAULTS: dict[str, Any] = {
        "dtype": None,
        "replace_with_kernel_inject": False,
        "tensor_parallel": {},
        "mp_size": 1,
        "max_out_tokens": 1024,
        "min_out_tokens": 1,
        "enable_cuda_graph": False,
        "checkpoint": None,
        "quant": {},
        "moe": {},
        "return_tuple": True,
        "set_empty_params": False,
        "save_mp_checkpoint_path": None,
        "max_batch_size": None,
        "injection_policy": None,
        "injection_policy_tuple": None,
        "triangular_masking": True,
        "use_triton": False,
        "zero": {},
        "config": None,
        "transposed_mode": False,
        "keep_module_on_host": False,
        "training_mp_size": 1,
        "base_dir": "",
        "ep_size": 1,
        "replace_method": "auto",
        "ckpt_config": None,
    }

    dtype: Any  # the keys that are looked at here; all of _DEFAULTS are attributes
    tensor_parallel: Any
    mp_size: int
    quant: Any
    zero: Any
    keep_module_on_host: bool
    replace_with_kernel_inject: bool

    def __init__(self, **given: Any) -> None:
        alias = {"kernel_inject": "replace_with_kernel_inject", "tp": "tensor_parallel", "max_tokens": "max_out_tokens"}
        given = {alias.get(k, k): v for k, v in given.items()}
        if unknown := sorted(set(given) - set(self._DEFAULTS)):
            raise ArgumentError(
                f"init_inference does not know {', '.join(unknown)}; it takes {', '.join(sorted(self._DEFAULTS))}"
            )
        self.__dict__.update(copy.deepcopy(self._DEFAULTS), **given)  # its sections are the caller's to change
        self._check()

    def _check(self) -> None:
        tp = self.tensor_parallel if isinstance(self.tensor_parallel, dict) else {}
        if max(int(tp.get("tp_size", 1)), int(self.mp_size)) > 1:
            raise UnsupportedError(
                "init_inference with tensor parallelism does not exist in deepc yet; run the trained engine under"
                " ZeRO-3 instead"
            )
        asked = {
            "checkpoint": "use deepc.inference(model, checkpoint=...), or load the model's weights before",
            "injection_policy": "there is no kernel injection; deepc.fuse(model) fuses what it can",
            "save_mp_checkpoint_path": "save the model as safetensors",
        }
        for key, instead in asked.items():
            if getattr(self, key) is not None:
                raise UnsupportedError(f"init_inference({key}=...) does not exist in deepc: {instead}")
        if isinstance(self.quant, dict) and self.quant.get("enabled"):
            raise UnsupportedError(
                'init_inference(quant=...) does not exist in deepc; deepc.inference(model, dtype="int8") has'
                " weight-only int8"
            )

    def torch_dtype(self) -> torch.dtype | None:
        """The dtype to compute in; None: the model's own."""
        if self.dtype is None or isinstance(self.dtype, torch.dtype):
            if self.dtype is torch.int8:
                raise UnsupportedError(
                    'init_inference(dtype=torch.int8): use deepc.inference(model, dtype="int8") for weight-only int8,'
                    " or torch.bfloat16"
                )
            return self.dtype
        found = dtypes.find(str(self.dtype).lower())
        if found not in dtypes.TRAINED:
            raise ArgumentError(
                f"init_inference(dtype={self.dtype!r}): one of torch.float32, torch.bfloat16, torch.float16"
            )
        return torch_dtype(found)

    @property
    def on_disk(self) -> bool:
        """Whether the weights are to lie on disk."""
        asked = self.zero.get("offload_param") if isinstance(self.zero, dict) else None
        return isinstance(asked, dict) and asked.get("device") == "nvme"

    def dict(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in self._DEFAULTS}


class InferenceEngine(ModelWrapper):
    """Runs `module` without gradients; attributes that it has not are the model's (generate, config, ...)."""

    def __init__(self, model: torch.nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        self._config = config
        dtype = config.torch_dtype()
        if dtype is not None and not config.on_disk:
            model.to(dtype)
        elif dtype is not None:  # parameters are cast on their way there
            for b in filter(casts, model.buffers()):
                b.data = b.data.to(dtype)
        if not config.keep_module_on_host and not config.on_disk:
            model.to(default_device())
        if config.replace_with_kernel_inject:
            from ...nn.fuse import fuse_as_asked

            summary = fuse_as_asked(model, "auto")
            if summary is not None and (why := summary.skipped.get("")):
                _log.warning(f"init_inference(replace_with_kernel_inject=True) changes nothing: {why}")
        self.module = model.eval()
        self._served = inference(model, dtype=dtype, zero=config.zero) if config.on_disk else None

    def destroy(self) -> None:
        """The end: what lies on disk goes."""
        if self._served is not None:
            self._served.destroy()

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


def default_inference_config() -> dict[str, Any]:
    return DeepSpeedInferenceConfig().dict()


def init_inference(
    model: torch.nn.Module, config: dict[str, Any] | str | None = None, **kwargs: Any
) -> InferenceEngine:
    """A model ready for inference, in config["dtype"] and on this rank's device. replace_with_kernel_inject=True fuses
    what can be (deepc.fuse). zero: a zero_optimization section; with offload_param.device "nvme" the weights lie on
    disk and are read layer by layer (deepc.inference). Tensor parallelism, quantisation and checkpoint loading raise
    UnsupportedError."""
    given = read(config)[0] if config is not None else {}
    for key, value in kwargs.items():
        if key in given and given[key] != value:
            raise ArgumentError(f"init_inference: {key} is {given[key]!r} in config and {value!r} as an argument")
        given[key] = value
    return InferenceEngine(model, DeepSpeedInferenceConfig(**given))
