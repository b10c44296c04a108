"""What a step does, counted cheaply: tokens from the shapes of the inputs, model FLOPs from the number of parameters,
and the machine's peak.

Model FLOPs are those of the mathematics (PaLM's appendix B, Megatron): a token takes 2 per parameter that multiplies it
forward and 4 backward, 2 if the parameter is frozen; attention takes 12 x layers x width x length. Recomputed
activations do not count. Embeddings that are only looked up do not multiply. It is a count for dense token models:
experts are counted as if every token saw all of them, so give the figure (Meter.set_flops) there, or use the flops
profiler."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_IDS = ("input_ids", "decoder_input_ids", "labels")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


# ---- tokens ----------------------------------------------------------------------------------------------------------
def _is_tokens(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in _INTEGERS


def _search(value: Any, depth: int = 0) -> tuple[Any, ...] | None:
    """Path of keys and indices to the first (batch, length) tensor of integers; one that is called input_ids goes
    first."""
    if isinstance(value, Mapping):
        named = [k for k in _IDS if k in value]
        items: Any = [(k, value[k]) for k in [*named, *(k for k in value if k not in named)]]
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return None
    for key, v in items:
        if _is_tokens(v):
            return (key,)
        if depth < 2 and (found := _search(v, depth + 1)) is not None:
            return (key, *found)
    return None


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


class TokenCounter:
    """Counts the tokens of a model's inputs: the elements of the first (batch, length) integer tensor among them,
    padding included. Where it lies is found once and looked up from then on. A model that is encoder and decoder has
    two such tensors."""

    def __init__(self, encoder_decoder: bool = False) -> None:
        self._two = encoder_decoder
        self._path: tuple[Any, ...] | None = None
        self._in_kwargs = False
        self._misses = 0

    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        """(tokens, length); (0, 0) if the inputs have none."""
        if self._path is None:
            if self._misses > 8 or not self._find(inputs, kwargs):
                self._misses += 1
                return 0, 0
        try:
            t = _at(kwargs if self._in_kwargs else inputs, self._path)  # type: ignore[arg-type]
            batch, length = t.shape
        except (
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            ValueError,
        ):  # another form of call: look again next time
            self._path = None
            return 0, 0
        tokens = batch * length
        if self._two:
            target = kwargs.get("decoder_input_ids", kwargs.get("labels"))
            if isinstance(target, torch.Tensor):
                tokens += target.numel()
        return tokens, length

    def _find(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        for self._in_kwargs, where in (
            (True, {k: kwargs[k] for k in _IDS if k in kwargs}),
            (False, inputs),
            (True, kwargs),
        ):
            if (path := _search(where)) is not None:
                self._path = path
                return True
        return False


# ---- FLOPs -----------------------------------------------------------------------------------------------------------
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "width", "embed_dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "heads")
_HEAD_DIM = ("head_dim", "d_kv")


def _int_of(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def attention_size(module: torch.nn.Module) -> int:
    """Layers x width of the attention, from the model's `config` (Hugging Face's names, and common ones) or from its
    nn.MultiheadAttention; 0 if neither tells."""
    found = _attention_by_config(module)
    return sum(m.embed_dim for m in _attentions(module)) if found is None else found


def _attentions(module: torch.nn.Module) -> list[torch.nn.MultiheadAttention]:
    return [m for m in module.modules() if isinstance(m, torch.nn.MultiheadAttention)]


def _attention_by_config(module: torch.nn.Module) -> int | None:
    config = getattr(module, "config", None)
    if config is not None:
        config = getattr(config, "text_config", None) or config
        layers, width = _int_of(config, _LAYERS), _int_of(config, _WIDTH)
        heads, head_dim = _int_of(config, _HEADS), _int_of(config, _HEAD_DIM)
        if layers and (width or (heads and head_dim)):
            return layers * (heads * head_dim if heads and head_dim else width)  # type: ignore[return-value,operator]
    return None


def _only_looked_up(module: torch.nn.Module) -> set[int]:
    """Identities of embedding tables that no other module uses as well (a tied head multiplies with its table)."""
    tables: set[int] = set()
    others: set[int] = set()
    for m in module.modules():
        into = tables if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)) else others
        into.update(id(p) for p in m._parameters.values() if p is not None)
    return tables - others


class TokenFlops(NamedTuple):
    """Model FLOPs of one token, forward and backward: `constant` + `per_length` x the sequence's length."""

    constant: float
    per_length: float

    def of(self, tokens: int, length: int) -> float:
        return tokens * (self.constant + self.per_length * length)


def token_flops(
    module: torch.nn.Module, numels: Mapping[int, tuple[int, bool]], first_stage: bool = True
) -> TokenFlops:
    """numels: id(parameter) -> (elements, is it trained). Of a stage of a pipeline what its own parameters take: those
    in numels; what a `config` says is of the whole model, and counts in the first stage."""
    skipped = _only_looked_up(module)
    constant = sum(n * (6 if trained else 4) for i, (n, trained) in numels.items() if i not in skipped)
    share = 0.5 if is_encoder_decoder(module) else 1.0  # a token goes through one of the halves
    attention = _attention_by_config(module)
    if attention is None:
        attention = sum(m.embed_dim for m in _attentions(module) if any(id(p) in numels for p in m.parameters()))
    elif not first_stage:
        attention = 0
    return TokenFlops(share * constant, share * 12 * attention)


def is_encoder_decoder(module: torch.nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


# ---- the peak --------------------------------------------------------------------------------------------------------
# Dense TFLOP/s by the vendors' data sheets, without sparsity: (part of the device's name, 16-bit, fp32 without TF32).
_GPUS = (
    ("B200", 2250.0, 75.0),
    ("GB200", 2250.0, 75.0),
    ("H200", 989.0, 67.0),
    ("GH200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("H800", 989.0, 67.0),
    ("A40", 149.7, 37.4),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("A6000", 154.8, 38.7),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("MI300X", 1307.0, 163.4),
    ("MI250X", 383.0, 47.9),
)


def known_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU by its name; None if it is not in the table."""
    for part, half, single in _GPUS:
        if re.search(rf"\b{re.escape(part)}\b", device_name):  # an A4000 is no A40
            tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
            return (single if dtype == torch.float32 and not tf32 else half / 2 if tf32 else half) * 1e12
    return None


@torch.no_grad()
def measured_peak(dtype: torch.dtype, device: torch.device, seconds: float = 0.04) -> float:
    """FLOP/s of the best of a few matrix products on this rank's threads. Takes about `seconds`; draws no random
    numbers."""
    threads = torch.get_num_threads() if device.type == "cpu" else 64
    n = 768 if threads <= 4 else 1536 if threads <= 16 else 3072
    a, b = torch.ones(n, n, dtype=dtype, device=device), torch.ones(n, n, dtype=dtype, device=device)
    out = torch.empty_like(a)

    def once() -> float:
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    end = time.perf_counter() + seconds
    times = [once(), once(), once()]
    while time.perf_counter() < end:
        times.append(once())
    return 2.0 * n**3 / min(times[1:])


_measured: dict[tuple[torch.dtype, torch.device, int], float] = {}


def measured_once(dtype: torch.dtype, device: torch.device) -> float:
    """measured_peak of this process, for all engines that it makes."""
    key = dtype, device, torch.get_num_threads()
    if key not in _measured:
        _measured[key] = measured_peak(dtype, device)
    return _measured[key]


def measured_again(dtype: torch.dtype, device: torch.device) -> float:
    """The same after another measurement, if that is more: other work may have slowed the first."""
    before, key = measured_once(dtype, device), (dtype, device, torch.get_num_threads())
    _measured[key] = max(before, measured_peak(dtype, device))
    return _measured[key]


def is_measured(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether job_peak is a measurement, not a data sheet's."""
    return device.type != "cuda" or known_peak(torch.cuda.get_device_name(device), dtype) is None


def job_peak(
    dtype: torch.dtype,
    device: torch.device,
    node_sizes: Sequence[int],
    measure: Callable[..., float] = measured_once,
) -> float:
    """FLOP/s of all ranks together, of which there are so many on each node: a GPU by its name, else a measurement of
    this rank times the ranks that have cores of their own."""
    if device.type == "cuda":
        peak = known_peak(torch.cuda.get_device_name(device), dtype) or measure(dtype, device)
        return peak * sum(node_sizes)
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    bound = cores <= threads  # to cores of its own, as the other ranks are
    at_once = sum(n if bound else min(float(n), max(1.0, cores / threads)) for n in node_sizes)
    return measure(dtype, device) * at_once
