"""How optimizer states are stored (dc_state_format, ops/ops.h): fp32 or the parameter's dtype, bf16 with stochastic
rounding, codes of 8 or 4 bits with a scale for each block."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...core.dtypes import STATE_FORMATS, UNIT
from ...core.lib import StepArgs, call
from ...core.ops import code, run_on, torch_dtype
from ...errors import ArgumentError, UnsupportedError

FORMATS = {name: number for number, name in enumerate(STATE_FORMATS)}
BYTES_OF_256 = {name: form.bytes_of_256 for name, form in STATE_FORMATS.items()}
_KINDS = {"exp_avg_sq": 1, "sum": 1, "momentum_buffer": 2}  # of states: dc_state_kind, where not 0
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"  # what a state's scales are called: exp_avg_scale
ADAMW, LION, ADAGRAD, SGD_RULE = 0, 1, 2, 3  # dc_step_rule
DECOUPLED, NESTEROV = 1, 2  # DC_STEP_*
APART = 1 << 40  # between the numbers of two tensors' elements, so that each has random bits of its own


def check_state_dtype(name: str, value: str | None, amsgrad: bool = False) -> str | None:
    """`value`, or ArgumentError, UnsupportedError; name: the optimizer's."""
    if value is not None and value not in FORMATS:
        raise ArgumentError(f"{name}: state_dtype is {value!r}; there are {', '.join(map(repr, FORMATS))} and None")
    if amsgrad and value not in (None, "fp32"):
        raise UnsupportedError(
            f"{name}: state_dtype={value!r} with amsgrad: a maximum of rounded squares would only grow. Leave one out"
        )
    return value


def is_coded(state_dtype: str | None) -> bool:
    """Whether a state is codes and scales."""
    return state_dtype in ("int8", "int4")


def arrays_of(name: str, form: str) -> dict[str, tuple[torch.dtype, int]]:
    """The arrays of state `name` where it lies on disk: dtype of an item, elements that share it. A scale is that of a
    block which begins in its unit, or goes on there from another parameter's elements."""
    arrays = STATE_FORMATS[form or "fp32"].arrays
    return {n: (torch_dtype(dtype), per) for n, (dtype, per) in zip((name, name + SCALE), arrays)}


def scale_units(first: int, numel: int, form: str) -> torch.Tensor:
    """For each block of `numel` elements, whose first has the number `first`, the unit that it begins in."""
    units, most = -(-numel // UNIT), (256 if form == "int8" else 128) // UNIT
    begin = most - first // UNIT % most
    rest = torch.arange(begin, max(begin, units), most, device="cpu")
    return torch.cat([torch.zeros(1, dtype=rest.dtype, device="cpu"), rest])


def number_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> int:
    """The number of p's first element: its place among the optimizer's parameters, times APART."""
    places: dict[int, int] = optimizer.__dict__.setdefault("_places", {})
    if id(p) not in places:
        places.clear()
        places.update({id(q): i for i, q in enumerate(q for g in optimizer.param_groups for q in g["params"])})
    return places[id(p)] * APART


@functools.lru_cache(maxsize=4096)
def state_sizes(numel: int, state_dtype: str, first: int) -> tuple[int, int]:
    """(bytes of codes, scales) of `numel` elements, whose first has the number `first`."""
    size, scales = ctypes.c_int64(), ctypes.c_int64()
    call("dc_state_sizes", FORMATS[state_dtype], first, numel, ctypes.byref(size), ctypes.byref(scales))
    return size.value, scales.value


def make_state(
    numel: int, state_dtype: str, first: int = 0, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of `numel` zeros, whose first has the number `first`; device: None for the CPU."""
    size, scales = state_sizes(numel, state_dtype, first)
    where = device or torch.device("cpu")
    return torch.zeros(size, dtype=torch.uint8, device=where), torch.zeros(scales, device=where, dtype=torch.float32)


def check_sizes(
    name: str, codes: torch.Tensor, scale: torch.Tensor, numel: int, state_dtype: str, first: int = 0
) -> None:
    """ArgumentError unless codes and scales are those of `numel` elements: C sees addresses alone."""
    if (codes.numel(), scale.numel()) != (sizes := state_sizes(numel, state_dtype, first)):
        raise ArgumentError(
            f"state '{name}' in {state_dtype} has {codes.numel()} bytes of codes and {scale.numel()} scales; of the"
            f" {numel} elements of its parameter there are {sizes[0]} and {sizes[1]}. Was it another parameter's (a"
            " vocabulary of another size), or p.data replaced by one of another size?"
        )


def unpack(codes: torch.Tensor, scale: torch.Tensor, numel: int, state_dtype: str, name: str, first: int) -> Any:
    """The numbers of state `name`, exactly, in fp32 [numel] on the CPU, wherever its codes are."""
    check_sizes(name, codes, scale, numel, state_dtype, first)
    out = torch.empty(numel, dtype=torch.float32, device="cpu")
    codes, scale = codes.cpu(), scale.cpu()
    kind, form = _KINDS.get(name, 0), FORMATS[state_dtype]
    call("dc_state_unpack", out.data_ptr(), codes.data_ptr(), scale.data_ptr(), form, kind, first, numel)
    return out


def pack(
    codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor, state_dtype: str, name: str, first: int
) -> None:
    """Puts fp32 numbers into a state, to nearest; what `unpack` gave comes back as it was. Made on the CPU."""
    check_sizes(name, codes, scale, values.numel(), state_dtype, first)
    if codes.device.type != "cpu":
        made = torch.empty_like(codes, device="cpu"), torch.empty_like(scale, device="cpu")
        pack(*made, values, state_dtype, name, first)
        codes.copy_(made[0])
        scale.copy_(made[1])
        return
    values = values.reshape(-1).to(device="cpu", dtype=torch.float32).contiguous()
    kind, form = _KINDS.get(name, 0), FORMATS[state_dtype]
    call("dc_state_pack", codes.data_ptr(), scale.data_ptr(), values.data_ptr(), form, kind, first, values.numel())


def check_place(p: torch.Tensor, state_dtype: str) -> None:
    """UnsupportedError where a parameter can't have such states; "" can be anywhere."""
    if not state_dtype:
        return
    if p.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"state_dtype={state_dtype!r} has kernels for CPU and CUDA, and a parameter is on {p.device}; leave it out"
            " there"
        )
    if is_coded(state_dtype) and not p.is_contiguous():
        raise UnsupportedError(
            f"state_dtype={state_dtype!r} needs parameters in the standard memory format; one of shape"
            f" {tuple(p.shape)} has strides {p.stride()}. Use p.data = p.data.contiguous(), or state_dtype='bf16'"
        )


# (parameter, gradient, states, scales, number of its first element), all dense and in one order, on one device.
Packed = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor], int]


class PackedStep(NamedTuple):
    """A step of states in the format `form`, but for its tensors. scalars: lr, beta1, beta2, eps, weight_decay."""

    rule: int
    form: str
    scalars: Sequence[float]
    grad_scale: float
    step: int
    flags: int = 0


def packed_args(items: Sequence[Packed], what: PackedStep, copies: Sequence[torch.Tensor] = ()) -> Any:
    """The arguments of dc_step that step_packed makes, of items on one device."""
    args = StepArgs.array(max(1, len(items)))
    for a, (p, g, states, scales, first) in zip(args, items):
        a.param, a.grad, a.n = p.data_ptr(), g.data_ptr(), p.numel()
        for k, state in enumerate(states):
            a.state[k] = state.data_ptr()
        for k, scale in enumerate(scales):
            a.scale[k] = scale.data_ptr()
        a.lr, a.beta1, a.beta2, a.eps, a.weight_decay = what.scalars
        a.grad_scale, a.step, a.flags, a.rule = what.grad_scale, what.step, what.flags, what.rule
        a.param_dtype, a.grad_dtype, a.state_dtype = code(p.dtype), code(g.dtype), code(torch.bfloat16)
        a.format, a.first = FORMATS[what.form], first
    for a, copy in zip(args, copies):
        a.lowp, a.lowp_dtype = copy.data_ptr(), code(copy.dtype)
    return args


def step_packed(items: Sequence[Packed], what: PackedStep, copies: Sequence[torch.Tensor] = ()) -> None:
    """The step of items, on one device or several; copies: get the parameters, rounded."""
    for device in dict.fromkeys(p.device for p, *_ in items):
        here = [i for i, (p, *_) in enumerate(items) if p.device == device]
        copied = [copies[i] for i in here] if copies else ()
        args = packed_args([items[i] for i in here], what, copied)
        run_on(device, "step", args, len(here))


def step_momentum(items: Sequence[Packed], state_dtype: str, momentum: float, grad_scale: float, step: int) -> None:
    """m = momentum * m + (1 - momentum) * grad_scale * gradient, of items of (fp32 zeros, gradient, [m], scales, number
    of its first element); the zeros become m before it is rounded. It is a step of SGD with the rate -1; its first step
    has no dampening, so that steps count from 2 here."""
    scalars = (-1.0, momentum, momentum, 0.0, 0.0)
    step_packed(items, PackedStep(SGD_RULE, state_dtype, scalars, grad_scale, step + 1))


def _form_of(codes: torch.Tensor, numel: int) -> str:
    """The format that codes of `numel` elements are in. One element, the largest of its block, is a byte in both; the
    byte of 4 bits has the code of a half that is not there."""
    if numel != 1 or codes.numel() != 1:
        return "int8" if codes.numel() == numel else "int4"
    return "int4" if int(codes) in _FOUR_BITS else "int8"


_FOUR_BITS = (0x07, 0x09, 0x87, 0x88)  # 1 and -1 of a signed state, 1 and 0 of squares (ops/ref/packed.h)


def has_codes(saved: dict[str, Any]) -> bool:
    """Whether a state of the state_dict `saved` is codes and scales."""
    return any(name.endswith(SCALE) for state in saved["state"].values() for name in state)


def take_states(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    names: Iterable[str],
    state_dtype: str | None,
    alike: bool = True,
) -> None:
    """After torch's load_state_dict, which casts states to the parameter's dtype: the states of `saved` in this
    optimizer's format, whatever theirs was. alike: they have the parameters' sizes; ArgumentError if one has not."""
    indices = [i for g in saved["param_groups"] for i in g["params"]]
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    for index, p in zip(indices, parameters):
        theirs = saved["state"].get(index, {})
        for name in names:
            value = theirs.get(name)
            scale = theirs.get(name + SCALE)
            if not torch.is_tensor(value) or (p.dtype == torch.float64 and scale is None):
                continue
            if scale is not None:
                value = unpack(value, scale, p.numel(), _form_of(value, p.numel()), name, 0).view(p.shape)
            elif alike and value.numel() != p.numel():
                raise ArgumentError(
                    f"state '{name}' of the state_dict has {value.numel()} elements, and parameter {index} has"
                    f" {p.numel()}: it is of a model with other shapes"
                )
            mine = optimizer.state[p]
            mine.pop(name + SCALE, None)
            form = state_dtype or "" if p.dtype != torch.float64 else ""  # float64 has no formats
            if is_coded(form):
                check_place(p, form)
                mine[name], mine[name + SCALE] = make_state(p.numel(), form, device=p.device)
                pack(mine[name], mine[name + SCALE], value, form, name, 0)
            else:
                dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(form, p.dtype)
                mine[name] = value.to(device=p.device, dtype=dtype, copy=True)
