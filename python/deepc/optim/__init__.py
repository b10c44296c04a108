"""Optimizers over the C core: drop-ins for torch's `AdamW`, `Adam`, `Adagrad` and `SGD`, and `Lion`."""

from .adagrad import Adagrad
from .adamw import Adam, AdamW
from .lion import Lion
from .sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]
