"""Optimizers over the C core: drop-ins for torch's `AdamW`, `Adam`, `Adafactor`, `Adagrad` and `SGD`, `Lion`, `Lamb`
and `Muon`."""

from .adamw import Adam, AdamW
from .kinds.adafactor import Adafactor
from .kinds.adagrad import Adagrad
from .kinds.lamb import Lamb
from .kinds.lion import Lion
from .kinds.muon import Muon
from .kinds.sgd import SGD

__all__ = ["SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "Lamb", "Lion", "Muon"]
