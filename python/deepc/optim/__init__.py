"""Optimizers over the C core: drop-ins for torch's `AdamW`, `Adam`, `Adafactor`, `Adagrad` and `SGD`, `Lion`, `Lamb`,
`Muon`, and those that exchange momentum in 1 bit: `OneBitAdam`, `OneBitLamb`, `ZeroOneAdam`."""

from .adamw import Adam, AdamW
from .kinds.adafactor import Adafactor
from .kinds.adagrad import Adagrad
from .kinds.lamb import Lamb
from .kinds.lion import Lion
from .kinds.muon import Muon
from .kinds.sgd import SGD
from .onebit.dropin import OneBitAdam, OneBitLamb, ZeroOneAdam

__all__ = [
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "ZeroOneAdam",
]
