"""The flops profiler's output: DeepSpeed's sections, labels and units, which people and their scripts know."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any, TextIO

from torch import nn

from .costs import counted, get_module_duration, get_module_flops, get_module_macs

PRECISION = 2
_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6))


def number_to_string(num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """ "1.5 G": in `units`, or in the largest that fits."""
    if units is None:
        units = "" if num == 0 else next((u for u, size in _UNITS if num >= size), "u")
    return f"{round(num / dict(_UNITS).get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = PRECISION) -> str:
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Operations per second."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = PRECISION) -> str:
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Billions are B here."""
    return (
        number_to_string(params_num, units.replace("B", "G") if units else units, precision).replace("G", "B").strip()
    )


def duration_to_string(duration: float, units: str | None = None, precision: int = PRECISION) -> str:
    return f"{number_to_string(duration, units, precision)}s"


def _percent(part: float, whole: float) -> float:
    return round(100.0 * part / whole, PRECISION) if whole else 0


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


# ---- the whole -------------------------------------------------------------------------------------------------------
def print_profile(
    profiler: Any, profile_step: int, module_depth: int, top_modules: int, detailed: bool, output_file: str | None
) -> None:
    """See FlopsProfiler.print_model_profile."""
    if output_file:
        os.makedirs(os.path.dirname(os.path.abspath(output_file)), exist_ok=True)
    with open(output_file, "w", encoding="utf-8") if output_file else nullcontext(sys.stdout) as out:
        _write(profiler, profile_step, module_depth, top_modules, detailed, out)
        out.flush()


def _write(profiler: Any, step: int, depth: int, top: int, detailed: bool, out: TextIO) -> None:
    def say(text: str) -> None:
        print(text, file=out)

    say("\n-------------------------- deepc Flops Profiler --------------------------")
    say(f"Profile Summary at step {step}:")
    say(
        "Notations:\n"
        "data parallel size (dp_size), model parallel size(mp_size),\n"
        "number of parameters (params), number of multiply-accumulate operations(MACs),\n"
        "number of floating-point operations (flops), floating-point operations per second (FLOPS),\n"
        "fwd latency (forward propagation latency), bwd latency (backward propagation latency),\n"
        "step (weights update latency), iter latency (sum of fwd, bwd and step latency)\n"
    )
    for label, value in _summary(profiler):
        say(f"{label:<70}  {value!s:<8}")
    say("\n----------------------------- Aggregated Profile per GPU -----------------------------")
    print_aggregated(profiler.model, depth, top, out)
    if detailed:
        say("\n------------------------------ Detailed Profile per GPU ------------------------------")
        say(
            "Each module profile is listed after its name in the following order: \nparams, percentage of total params,"
            " MACs, percentage of total MACs, fwd latency, percentage of total fwd latency, fwd FLOPS"
        )
        say(
            "\nNote: 1. Operators that a module calls itself (torch.nn.functional, `@`, +) are part of its figures, no"
            " entries of their\nown: they are what a parent has beyond the sum of its submodules. 2. Flops are those of"
            " the algorithm (a causal mask is not\ntaken off), so FLOPS may exceed what the machine does. 3. The"
            " latency of the top module is that of its forward function; the\nfwd latency above may include what the"
            " engine does around it.\n"
        )
        say(_tree(profiler, profiler.model))
    say("------------------------------------------------------------------------------")


def _summary(profiler: Any) -> list[tuple[str, Any]]:
    engine = profiler.ds_engine
    flops, macs, params = profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()
    timers = engine.get_wall_clock_timers() if engine is not None else {}
    rows: list[tuple[str, Any]] = []
    micro_batches = shards = 1
    if engine is not None:
        micro_batches, shards = engine.gradient_accumulation_steps(), engine.mesh.tp
        rows += [
            ("world size: ", engine.everyone.world),
            ("data parallel size: ", engine.mesh.dp),
            ("model parallel size: ", shards),
            ("batch size per GPU: ", engine.train_micro_batch_size_per_gpu()),
        ]
    forward = timers["fwd"] / 1000 / micro_batches if timers else profiler.get_total_duration()
    rows += [
        ("params per GPU: ", params_to_string(params)),
        ("params of model = params per GPU * mp_size: ", params_to_string(params * shards)),
        ("fwd MACs per GPU: ", macs_to_string(macs)),
        ("fwd flops per GPU: ", number_to_string(flops)),
        ("fwd flops of model = fwd flops per GPU * mp_size: ", number_to_string(flops * shards)),
        ("fwd latency: ", duration_to_string(forward)),
        ("fwd FLOPS per GPU = fwd flops per GPU / fwd latency: ", flops_to_string(_rate(flops, forward))),
    ]
    return rows + (_step_rows(profiler, flops, forward, timers, micro_batches) if timers else [])


def _step_rows(
    profiler: Any, flops: int, forward: float, timers: dict[str, float], micro_batches: int
) -> list[tuple[str, Any]]:
    """With wall_clock_breakdown: of backward and the whole step. Forward and backward latency are those of one
    micro-batch; an iteration has all."""
    engine, factor = profiler.ds_engine, 2 + profiler.recompute_fwd_factor
    backward, step = timers["bwd"] / 1000 / micro_batches, timers["step"] / 1000
    whole = micro_batches * (forward + backward) + step
    times = "" if micro_batches == 1 else f"{micro_batches} micro-batches * "
    samples = engine.train_batch_size()
    return [
        ("bwd latency: ", duration_to_string(backward)),
        (
            f"bwd FLOPS per GPU = {factor:g} * fwd flops per GPU / bwd latency: ",
            flops_to_string(_rate(factor * flops, backward)),
        ),
        (
            f"fwd+bwd FLOPS per GPU = {factor + 1:g} * fwd flops per GPU / (fwd+bwd latency): ",
            flops_to_string(_rate((factor + 1) * flops, forward + backward)),
        ),
        ("step latency: ", duration_to_string(step)),
        ("iter latency: ", duration_to_string(whole)),
        (
            f"FLOPS per GPU = {times}{factor + 1:g} * fwd flops per GPU / iter latency: ",
            flops_to_string(_rate(micro_batches * (factor + 1) * flops, whole)),
        ),
        ("samples/second: ", round(_rate(samples, whole), PRECISION)),
    ]


# ---- tables ----------------------------------------------------------------------------------------------------------
def print_aggregated(model: nn.Module, module_depth: int, top_modules: int, out: TextIO) -> None:
    """Per depth the classes with most parameters, MACs and time."""
    depths: list[dict[str, list[float]]] = []
    _collect(model, 0, depths)
    print(f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:", file=out)
    for d, classes in enumerate(depths[: len(depths) if module_depth == -1 else module_depth]):
        print(f"depth {d}:", file=out)
        for label, place, text in (
            ("params      ", 1, params_to_string),
            ("MACs        ", 0, macs_to_string),
            ("fwd latency ", 2, duration_to_string),
        ):
            best = sorted(classes.items(), key=lambda item: item[1][place], reverse=True)[:top_modules]
            print(f"    {label}- { {name: text(values[place]) for name, values in best} }", file=out)


def _params(module: nn.Module) -> int:
    return counted(module).__params__ + counted(module).__expert_params__


def _collect(module: nn.Module, depth: int, depths: list[dict[str, list[float]]]) -> None:
    if depth == len(depths):
        depths.append({})
    row = depths[depth].setdefault(type(module).__name__, [0, 0, 0])
    row[0] += get_module_macs(module)
    row[1] += _params(module)
    row[2] += get_module_duration(module)
    for child in module.children():
        _collect(child, depth + 1, depths)


def _figures(profiler: Any, module: nn.Module) -> str:
    params, macs, seconds = _params(module), get_module_macs(module), get_module_duration(module)
    items = [
        f"{params_to_string(params)} = {_percent(params, profiler.get_total_params()):g}% Params",
        f"{macs_to_string(macs)} = {_percent(macs, profiler.get_total_macs()):g}% MACs",
        f"{duration_to_string(seconds)} = {_percent(seconds, profiler.get_total_duration()):g}% latency",
        flops_to_string(round(_rate(get_module_flops(module), seconds), PRECISION)),
    ]
    return ", ".join(items + ([own] if (own := module.extra_repr()) else []))


def _tree(profiler: Any, module: nn.Module) -> str:
    """The module as torch prints it, every entry with its figures."""
    lines = [f"({name}): {_tree(profiler, child)}" for name, child in module._modules.items() if child is not None]
    figures = _figures(profiler, module)
    if not lines:
        return f"{module._get_name()}({figures})"
    inside = "\n".join(lines).replace("\n", "\n  ")
    return f"{module._get_name()}(\n  {figures}\n  {inside}\n)"
