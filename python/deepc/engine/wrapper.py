"""What is wrapped around a user's model and still looks like it."""

from __future__ import annotations

from typing import Any

import torch


class ModelWrapper(torch.nn.Module):
    """A module around `self.module`: attributes that it has not are the model's (`engine.config`,
    `engine.generate`)."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)
