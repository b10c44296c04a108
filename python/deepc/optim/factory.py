"""Optimizers by name: which there are, how one is made, and what may be done with it under ZeRO."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, ConfigError, UnsupportedError
from .adamw import Adam, AdamW
from .kinds.adafactor import Adafactor, matrices_of
from .kinds.adagrad import Adagrad
from .kinds.lamb import Lamb
from .kinds.lion import Lion
from .kinds.muon import Muon
from .kinds.sgd import SGD
from .onebit.dropin import OneBitAdam, OneBitLamb, ZeroOneAdam
from .rules import ADAFACTOR, LAMB, MUON, ONEBIT, CoreRule, core_rule
from .states.formats import BYTES_OF_256

# deepc's own, by the name that a configuration gives them (in any case).
OURS: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": Adam,
    "AdamW": AdamW,
    "Lion": Lion,
    "Lamb": Lamb,
    "Muon": Muon,
    "Adafactor": Adafactor,
    "Adagrad": Adagrad,
    "SGD": SGD,
    "OneBitAdam": OneBitAdam,
    "OneBitLamb": OneBitLamb,
    "ZeroOneAdam": ZeroOneAdam,
}

# Classes whose update of an element depends on that element only: ZeRO may cut their tensors anywhere.
ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Lion",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)

# Not so, but with sums over whole parameters, rows and columns that shards put together, or with matrices that are made
# whole.
ACROSS_SHARDS = frozenset({"Adafactor", "Lamb", "Muon"})

# They exchange momentum, of which every rank, or the ranks of every node together (stages 1 and 2), have all.
WHOLE_STATES = frozenset({"OneBitAdam", "OneBitLamb", "ZeroOneAdam"})

WHY_WHOLE = "does not exist. Use zero_optimization.stage 1, where the ranks of a node share masters and states, or 0"


def torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """torch.optim's optimizers by name."""
    return {
        n: c
        for n, c in vars(torch.optim).items()
        if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
    }


def make_optimizer(
    kind: str, params: Mapping[str, Any], parameters: Iterable[Any], *, backend: str = "deepc"
) -> torch.optim.Optimizer:
    """The optimizer of class `kind`, of deepc.optim (`backend` "deepc") or torch.optim ("torch"), over `parameters`
    with the arguments `params`. ArgumentError for a class that is not there."""
    classes = OURS if backend == "deepc" else torch_classes()
    if kind not in classes:
        raise ArgumentError(f"optimizer {kind!r}: {backend}.optim has {', '.join(sorted(classes))}")
    return classes[kind](parameters, **params)


def why_refused(cls: type[torch.optim.Optimizer], params: Mapping[str, Any]) -> str | None:
    """What an optimizer's class says of these arguments, None if it takes them. Of what depends on the device, nothing:
    it is asked with a parameter on the CPU."""
    probe = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
    try:
        cls([probe], **params)
    except (TypeError, ValueError) as exc:
        return str(exc)
    except Exception:
        return None
    return None


def takes_core_path(optimizer: torch.optim.Optimizer) -> bool:
    """True if the core steps `optimizer` (optim/rules.py)."""
    return core_rule(optimizer) is not None


def moments_of(optimizer: torch.optim.Optimizer) -> int:
    """fp32 state tensors per element (for the plan; torch's optimizers other than Adam: their own, counted as 2)."""
    rule = core_rule(optimizer)
    if rule is not None and rule.kind in (MUON, ADAFACTOR):
        return 1  # the mean of it is in state_bytes_of
    if rule is not None and rule.kind == ONEBIT:
        return len(rule.names) + 1  # the worker's error; the server's is one part of many
    return 2 if rule is None else len(rule.names)


def state_bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of 256 elements of one of these states, with its scales. Of Muon and Adafactor the mean over all
    parameters, which have more and fewer."""
    rule = core_rule(optimizer)
    if rule is None:
        return BYTES_OF_256["fp32"]
    size = BYTES_OF_256[rule.form or "fp32"]
    if rule.kind not in (MUON, ADAFACTOR):
        return size
    sizes: list[tuple[int, int]] = [
        (p.numel(), _states_of(rule, g, p)) for g in optimizer.param_groups for p in g["params"]
    ]
    return -(-size * sum(states for _, states in sizes) // max(1, sum(n for n, _ in sizes)))


def _states_of(rule: CoreRule, group: Mapping[str, Any], p: torch.Tensor) -> int:
    """Elements of all states of `p`, of Muon and Adafactor."""
    if rule.kind == MUON:
        return p.numel() * rule.keeps(group)
    matrices = matrices_of(p.shape)
    return p.numel() if matrices is None else matrices.factors


def steps_whole_blocks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its states on disk must be cut at edges of blocks: it sums over them."""
    rule = core_rule(optimizer)
    return rule is not None and rule.kind in (LAMB, ADAFACTOR)


def names_on_disk(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The arrays of its states on disk, beside masters. Muon's first one has momentum and first moments; Adafactor's
    states stay in memory, being small."""
    rule = core_rule(optimizer)
    if rule is None or rule.kind == ADAFACTOR:
        return ()
    return ("first_moment", "second_moment") if rule.kind == MUON else rule.names


def form_on_disk(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """(how many such arrays there are, bytes of 256 elements of one), for the plan; of torch's optimizers as
    moments_of."""
    rule = core_rule(optimizer)
    if rule is not None and rule.kind in (MUON, ADAFACTOR):
        return len(names_on_disk(optimizer)), BYTES_OF_256[rule.form or "fp32"]
    return moments_of(optimizer), state_bytes_of(optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer, stage: int, allow_untested: bool) -> None:
    """Raises UnsupportedError or ConfigError if `optimizer` can't run under this ZeRO stage."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            "SparseAdam updates only the rows that a batch touched, and takes sparse gradients; the engine reduces "
            "gradients densely. Use Adagrad, or AdamW with weight_decay 0 (rows that were not touched then move by "
            "their momentum alone); nn.Embedding(sparse=True) may stay"
        )
    if (rule := core_rule(optimizer)) is not None and rule.kind == ONEBIT and stage == 3:
        raise UnsupportedError(f"{name} at ZeRO stage {stage} {WHY_WHOLE}")
    needs = [
        a.name
        for a in list(inspect.signature(type(optimizer).step).parameters.values())[1:]
        if a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)
    ]
    if needs and not takes_core_path(optimizer):
        raise UnsupportedError(
            f"{name}.step() needs {', '.join(needs)}, which an engine's step() has not (LBFGS's closure runs the model"
            " again). Use another optimizer"
        )
    if rule is None and (missing := _arguments_of(optimizer)[1]):
        raise UnsupportedError(
            f"optimizer {name}: deepc steps shards with another one of its class, and can't tell the argument"
            f" '{missing[0]}' that this one was made with: keep it as an attribute of that name"
            f" (self.{missing[0]} = {missing[0]} in {name}.__init__), or among the defaults"
        )
    if not takes_core_path(optimizer) and stage > 0 and name not in ELEMENTWISE and not allow_untested:
        raise ConfigError(
            f"optimizer {name} at ZeRO stage {stage}: deepc runs the update on shards and knows only that"
            f" {', '.join(sorted(ELEMENTWISE))} treat each element alone. Set zero_allow_untested_optimizer: true"
            " if yours does, or use stage 0."
        )


def copies_per_node(optimizer: torch.optim.Optimizer, stage: int) -> bool:
    """Whether masters and states are cut over the ranks of a node, and every node has all of them."""
    rule = core_rule(optimizer)
    return rule is not None and rule.kind == ONEBIT and stage > 0


def check_alone(optimizer: torch.optim.Optimizer, beside: Mapping[str, bool]) -> None:
    """UnsupportedError for a 1-bit optimizer with what it does not go with. beside: what that is, and whether it is
    there."""
    rule = core_rule(optimizer)
    if rule is None or rule.kind != ONEBIT:
        return
    if found := [what for what, here in beside.items() if here]:
        raise UnsupportedError(
            f"{type(optimizer).__name__} with {' and '.join(found)} does not exist; remove that, or use AdamW"
            " (docs/onebit.md)"
        )


def check_on_disk(optimizer: torch.optim.Optimizer) -> None:
    """UnsupportedError if nothing that `optimizer` steps can be on disk."""
    rule = core_rule(optimizer)
    if rule is not None and rule.kind == ONEBIT:
        raise UnsupportedError(
            f"{type(optimizer).__name__} with offload to nvme does not exist: momentum is exchanged from memory. Remove"
            " the offload, or use another optimizer"
        )


def twin_over(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """Another optimizer of the same class, arguments and settings over other parameters, one list for each of its
    groups. UnsupportedError if its class makes none of them."""
    own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    try:
        twin = type(optimizer)([{**g, "params": list(ps)} for g, ps in zip(own, groups)], **_arguments_of(optimizer)[0])
    except Exception as exc:  # of a class of a user's
        name = type(optimizer).__name__
        raise UnsupportedError(
            f"optimizer {name}: deepc steps shards with another one of its class, made as {name}(param groups, its"
            f" arguments), which raised {type(exc).__name__}: {exc}. One that is made of another optimizer (Lookahead)"
            " can't be made so: pass that one, or a class that takes param groups"
        ) from exc
    twin.defaults = dict(optimizer.defaults)
    for name, value in vars(optimizer).items():  # AdaBelief's `rectify` and the like are neither defaults nor in groups
        if name not in _TORCHS_OWN and _is_setting(value):
            setattr(twin, name, copy.deepcopy(value))
    return twin


_TORCHS_OWN = frozenset({"defaults", "state", "param_groups"})


def _arguments_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """(arguments that make another one like it, those of its class that must be given and are not known): an optimizer
    keeps what it was made with among its defaults, or as an attribute of that name."""
    known: dict[str, Any] = {}
    missing: list[str] = []
    arguments = inspect.signature(type(optimizer).__init__).parameters.items()
    for name, p in itertools.islice(arguments, 2, None):  # behind self and the parameters
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        needed = p.default is p.empty
        if name in optimizer.defaults:
            known[name] = optimizer.defaults[name]
        elif name in vars(optimizer) and (needed or _is_setting(vars(optimizer)[name])):
            known[name] = vars(optimizer)[name]
        elif needed:
            missing.append(name)
    return known, missing


def _is_setting(value: Any) -> bool:
    """Whether it is numbers, names and the like alone: nothing that has to do with parameters."""
    if isinstance(value, Mapping):
        return all(map(_is_setting, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device))
