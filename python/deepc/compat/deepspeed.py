"""Importing this module makes `import deepspeed` give deepc in this process, with distribution metadata of that name,
for scripts, Hugging Face's Trainer, Accelerate and Lightning. Import it before them:

    import deepc.compat.deepspeed
    import deepspeed                       # deepc

Nothing is written to disk and other processes are not changed. A real DeepSpeed that is installed is left alone and
found again after uninstall(); one that was imported already is an error. `import deepc.compat.deepspeed as deepspeed`
works as well."""

from __future__ import annotations

from typing import Any

from .finder import install, uninstall

__all__ = ["install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    import deepspeed  # type: ignore[import-untyped, import-not-found]  # ours: see finder.py

    return getattr(deepspeed, name)


install()
