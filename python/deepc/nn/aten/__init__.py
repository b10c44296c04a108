"""Kernels of torch's own operators that deepc replaces on CPUs, below the model: nothing in it has to change."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def without_notice() -> Iterator[None]:
    """Where kernels are replaced: torch says once in a process that a kernel is another one, on every rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        yield
