"""What a parameter of ZeRO-3 says of itself under DeepSpeed's names: `ds_id`, `ds_shape`, `ds_numel`, `ds_status`, and
`partition_numel()` (Lightning's model summary asks for it). Set on the class of such parameters when deepc is imported;
AttributeError for any other parameter, so that hasattr tells them apart."""

from __future__ import annotations

import enum
from typing import Any

import torch

from ... import zero
from ...core.foreign import patches
from ...zero.parameters import owners
from ...zero.parameters.gathered import holder_of, number
from ...zero.parameters.param import NodeParameter


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's states of a stage-3 parameter. In resident mode always AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_NAMES = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_status",
    "ds_tensor",
    "ds_secondary_tensor",
    "ds_process_group",
    "ds_persist",
    "ds_active_sub_modules",
)


def describe(p: torch.nn.Parameter, what: str) -> Any:
    """The value of one of `_NAMES` of a stage-3 parameter; AttributeError for any other, and for what deepc has in
    another form."""
    holder = holder_of(p)
    if holder is None:
        raise AttributeError(
            f"parameter of shape {tuple(p.shape)} has no {what}: it is not held by a ZeRO-3 engine and was not built "
            "under zero.Init"
        )
    if what == "ds_id":
        return number(p)
    if what == "ds_shape":
        return p.shape
    if what == "ds_numel":
        return p.numel()
    if what == "ds_status":
        return ZeroParamStatus.AVAILABLE if holder.is_available(p) else ZeroParamStatus.NOT_AVAILABLE
    raise AttributeError(
        f"a deepc parameter has no {what}: a rank's partition is a part of deepc's flat space, not a tensor of the "
        "parameter. Read and write it through deepc.view(p).local or deepc.utils.safe_get_local_*"
    )


def _described(name: str) -> property:
    def get(self: torch.nn.Parameter) -> Any:
        return describe(self, name)

    return property(get, doc=f"DeepSpeed's {name} of a ZeRO-3 parameter; AttributeError for others.")


def _partition_numel(self: torch.nn.Parameter) -> int:
    """A rank's share of the elements as DeepSpeed counts it, rounded up; AttributeError as for ds_numel."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    numel: int = describe(self, "ds_numel")
    return -(-numel // ranks)


# ---- tensors that were parameters ------------------------------------------------------------------------------------
_SAVED = ("ds_id", "ds_shape", "ds_numel", "ds_status")


def _described_tensor(name: str) -> property:
    def get(self: torch.Tensor) -> Any:
        p = None
        for engine in owners.alive() if type(self) is torch.Tensor else ():
            p = p if p is not None or engine.plan.mode != "streamed" else engine.state.units.viewed(self)
        if p is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return ZeroParamStatus.AVAILABLE if name == "ds_status" else describe(p, name)

    return property(get, doc=f"DeepSpeed's {name} of what a node of backward saved of a ZeRO-3 parameter.")


def describe_tensors(on: bool) -> None:
    """While scripts for DeepSpeed run: in streamed mode a node of backward gets a tensor, where DeepSpeed's gets the
    parameter that it saved, and asks it whether it has to be gathered (TRL's chunked log-probabilities). It has not.
    Any other tensor has no such attribute, as without this."""
    if on == ("ds_status" in vars(torch.Tensor)):
        return
    for name in _SAVED:
        if on:
            setattr(torch.Tensor, name, _described_tensor(name))
        else:
            delattr(torch.Tensor, name)
    (patches.applied if on else patches.undone)("tensor-names")


class NoHooks:
    """`engine.optimizer.parameter_offload` of stage 3, for those who take DeepSpeed's hooks off a model and put them
    back on around `generate` (TRL's unwrap_model_for_generation): deepc's parameters see to themselves, so there are no
    hooks to take, and no module under them."""

    def __init__(self) -> None:
        self.module = self
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def named_parameters(self, *args: Any, **kwargs: Any) -> tuple[()]:
        return ()

    ds_external_parameters = named_parameters

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing: see the class."""


def install() -> None:
    """Gives parameters of stage 3 these names, and `deepc.zero` ZeroParamStatus."""
    for name in _NAMES:
        setattr(NodeParameter, name, _described(name))
    NodeParameter.partition_numel = _partition_numel  # type: ignore[attr-defined]  # not a name of deepc's own
    zero.add_name("ZeroParamStatus", lambda: ZeroParamStatus)
