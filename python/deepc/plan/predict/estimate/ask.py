"""deepc.estimate, and the plan in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....config.tree import Config
from ....core import memory
from ....errors import ArgumentError, OutOfMemoryError, numeric
from .case import Case
from .figures import MemoryEstimate, changed, from_dict
from .options import options_of, refusal

if TYPE_CHECKING:
    from .case import ConfigSource, Cutter, Divide, Model, OptimizerLike


@numeric
def estimate(
    model: Model,
    config: ConfigSource,
    sample_batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    *,
    ranks_per_node: int = 1,
    nodes: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str = "cpu",
    steps: int = 3,
    suggest: bool = False,
    check: bool = False,
    divide: Divide | None = None,
    cut: Cutter | None = None,
) -> MemoryEstimate:
    """Predicts the peak memory of training `model` with `config` through `steps` steps, before anything of it is
    allocated.

    model: a torch.nn.Module, or a function that makes one (it is then made of fake tensors: a model that does not fit
    can be asked for). config: as for deepc.initialize. sample_batch: one rank's micro-batch: a mapping is passed as
    keywords, a tuple or list as arguments; only shapes and dtypes count (tensors of device "meta" will do). None: model
    states only. loss_fn(output, batch): makes the scalar loss; default: the output, or its `.loss`. optimizer: as for
    deepc.initialize (an object needs a model that is an object). suggest: also predict what would make it smaller (each
    a dry run). check: raise OutOfMemoryError, with suggestions, if the node has not enough left.

    The dry run happens in a forked child: the caller's model is as before. Raises UnsupportedError if the model can't
    run without values.
    """
    import torch

    from .. import dryrun

    if not callable(model):
        raise ArgumentError(
            f"estimate takes a torch.nn.Module or a function that makes one, got {type(model).__name__}"
        )
    if ranks_per_node < 1 or nodes < 1:
        raise ArgumentError(f"ranks_per_node {ranks_per_node} and nodes {nodes} must be at least 1")
    if steps < 1:
        raise ArgumentError(f"steps {steps}: a dry run has at least 1")
    world = ranks_per_node * nodes
    parsed = Config.load(config, world_size=world, device_type=torch.device(device).type, allow_auto=True)
    case = Case(
        model, parsed, sample_batch, loss_fn, ranks_per_node, nodes, optimizer, device, steps, divide=divide, cut=cut
    )
    result = from_dict(dryrun.forked(case.work))
    if check or suggest:
        have = memory.available()
        result = changed(result, available=have)
        if suggest or not result.fits:
            result = changed(result, options=tuple(options_of(case, result, have)))
    if check and not result.fits:
        raise OutOfMemoryError(refusal(result))
    return result


def plan_text(
    model: Model,
    config: ConfigSource,
    *,
    ranks_per_node: int = 1,
    nodes: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str = "cpu",
    divide: Divide | None = None,
    cut: Cutter | None = None,
) -> str:
    """The plan that deepc.initialize would make for these ranks, in words. Arguments as for estimate."""
    import torch

    from .. import dryrun

    parsed = Config.load(
        config, world_size=ranks_per_node * nodes, device_type=torch.device(device).type, allow_auto=True
    )
    case = Case(model, parsed, None, None, ranks_per_node, nodes, optimizer, device, 1, divide=divide, cut=cut)
    text: str = dryrun.forked(case.describe)["text"]
    return text
