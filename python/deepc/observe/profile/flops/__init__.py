"""Floating-point operations: what operators cost (costs.py), the profiler of a model's modules (profiler.py), and its
output (text.py)."""

from .costs import get_module_duration, get_module_flops, get_module_macs
from .profiler import FlopsProfiler, get_model_profile
from .text import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "get_module_duration",
    "get_module_flops",
    "get_module_macs",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
