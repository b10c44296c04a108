"""Every name of torch with a leading underscore that deepc uses, and where: a torch that renames one is mended here.

Other files take them from here under names of their own; a test holds that none reaches past this file. What is needed
rarely is imported when it is asked for. Attributes of objects (`_version`, `_parameters`, ...) can't be wrapped without
cost in hot loops: they are used where they stand and are listed in ATTRIBUTES, so that a test can say which is gone.
`deepc doctor` tells of each name that the installed torch lacks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch._C import _distributed_c10d as c10d
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.optim._adafactor import adafactor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
    from torch.utils._pytree import tree_leaves, tree_map_only

    # A checker sees types of c10d and FSDP only behind their own names.
    __all__ = [
        "AllGather",
        "FakeTensor",
        "FakeTensorMode",
        "ReduceScatter",
        "StridedShard",
        "TorchDispatchMode",
        "adafactor",
        "c10d",
        "tree_leaves",
        "tree_map_only",
        "without_modes",
    ]


class Private(NamedTuple):
    """A name of torch's that has no public form."""

    name: str  # its full path
    used: str  # where and for what
    since: str  # the first torch that has it in this form
    without: str  # what deepc loses if it goes


NAMES = (
    Private(
        "torch._foreach_add_",
        "optim/adamw: the counts of steps of many parameters in one call",
        "1.9",
        "nothing but time: they are counted one by one",
    ),
    Private(
        "torch._C._current_graph_task_id",
        "comm/c10d, zero/streamed, zero/step/hooks, engine/states, observe/profile: whether this thread is inside a"
        " backward",
        "2.0",
        "gradients of a backward that deepc did not start are not reduced at its end; streamed mode can't tell forward"
        " from recomputation",
    ),
    Private(
        "torch._C._are_functorch_transforms_active",
        "zero/step/hooks, observe/profile: no hooks on the outputs of vmap, grad, jvp",
        "2.0",
        "torch.func over a model that deepc trains fails",
    ),
    Private(
        "torch.autograd.forward_ad._current_level",
        "core/ops: whether there are forward-mode derivatives, which the fused operators refuse",
        "1.8",
        "nothing but time: every input of a fused operator is asked for its tangent",
    ),
    Private(
        "torch.autograd.Variable._execution_engine",
        "zero/step/hooks, zero/streamed: a call at the end of the running backward",
        "1.0",
        "a bare loss.backward() can't be ended",
    ),
    Private(
        "torch._C._autograd._push_saved_tensors_default_hooks",
        "zero/streamed: saved parameters are kept as recipes, not as memory (with _top_ and _is_enabled beside it)",
        "2.4",
        "streamed mode keeps every parameter until backward",
    ),
    Private(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "nn/loss, nn/aten: whether saved gradients, and logits, may be overwritten",
        "2.0",
        "linear_cross_entropy's backward needs a copy of its gradients",
    ),
    Private(
        "torch.nn.utils.clip_grad._clip_grads_with_norm_",
        "zero/parameters/clipping: clip_grad_norm_ calls it with its parameters",
        "2.6",
        "a script that clips by hand is not told that this clips nothing",
    ),
    Private(
        "torch._C._storage_Use_Count",
        "zero/parameters, nn/aten: whether somebody else refers to a unit's memory, or to logits",
        "2.1",
        "streamed mode could free memory that is still read",
    ),
    Private(
        "torch._C.DisableTorchFunctionSubclass",
        "zero/parameters, zero/streamed: access to a released parameter without its own checks",
        "1.13",
        "released parameters can't be handled at all",
    ),
    Private(
        "torch._C.TensorBase",
        "zero/parameters: the setter of .data below the class of shared parameters",
        "2.0",
        "writes through .data of a shared parameter are not seen",
    ),
    Private(
        "torch._has_compatible_shallow_copy_type",
        "zero/parameters: module.to() may ask it of a released parameter",
        "1.5",
        "module.to() gathers every released parameter",
    ),
    Private(
        "torch.distributed.tensor.placement_types._StridedShard",
        "parallel/tensor: the placement of a fused weight, each part of which is cut",
        "2.5",
        "dtensors() has no placement for GPT-2's fused q, k, v",
    ),
    Private(
        "torch.optim._adafactor.adafactor",
        "optim/kinds/adafactor: the step of float64 parameters",
        "2.5",
        "Adafactor can't step float64 parameters",
    ),
    Private(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "nn/loss, nn/aten: whether a tensor has a value",
        "2.0",
        "linear_cross_entropy fails under torch.func",
    ),
    Private(
        "torch._is_functional_tensor",
        "nn/loss, nn/aten: the same while the compiler traces",
        "1.12",
        "linear_cross_entropy fails under torch.compile",
    ),
    Private(
        "torch._dynamo.disable",
        "zero/streamed: with a reason that the compiler's report shows",
        "2.7",
        "torch.compile of a whole streamed model fails without saying why",
    ),
    Private(
        "torch._compile._disable_dynamo",
        "plan/predict: whether a dry run has called torch's checkpoint, whose wrapper imports the compiler",
        "2.3",
        "estimates of models with activation checkpoints lack the compiler's 65 MB",
    ),
    Private(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "comm/c10d: the compiler leaves the methods of the process group alone",
        "2.7",
        "DDP under torch.compile compiles our Python; before 2.7 it is skipped without harm",
    ),
    Private(
        "torch._C._dynamo.eval_frame.get_eval_frame_callback",
        "engine/policy: whether torch.compile of the engine looks at the frames that run",
        "2.6",
        "torch.compile(engine) compiles nothing where the model is a module of torch's own, such as nn.Sequential",
    ),
    Private(
        "torch.nn.modules.batchnorm._BatchNorm",
        "core/foreign/buffers: batch norms of any number of dimensions, synchronized ones too",
        "1.0",
        "batch norms in 16 bits fail over their fp32 statistics",
    ),
    Private(
        "torch.nn.utils.parametrizations._SpectralNorm",
        "core/foreign/buffers: whose vectors have the dtype of the weight",
        "1.9",
        "spectral norms in 16 bits fail over their fp32 vectors",
    ),
    Private(
        "torch._dynamo.trace_rules.check",
        "engine/policy: whether the compiler passes over a model's forward",
        "2.1",
        "torch.compile(engine) fails",
    ),
    Private(
        "torch._dynamo.external_utils.wrap_inline",
        "engine/policy: a frame before such a model's, as torch.compile of the model itself makes one",
        "2.1",
        "torch.compile(engine) fails where the model is a module of torch's own",
    ),
    Private(
        "torch._C._distributed_c10d",
        "comm/c10d: option classes of collectives, as torch passes them",
        "1.8",
        "the backend can't be written",
    ),
    Private(
        "torch._C.DispatchKey",
        "observe/profile/flops/costs: which operators are made of others",
        "1.8",
        "the flops profiler counts some operators twice under inference_mode",
    ),
    Private(
        "torch._C._disabled_torch_dispatch_impl",
        "comm/c10d: which tensor classes are their own memory",
        "1.13",
        "a slower test for subclasses",
    ),
    Private(
        "torch.distributed.distributed_c10d._get_default_store",
        "comm, zero, doctor: the store that all ranks have already",
        "1.9",
        "a store of our own, with a port of its own",
    ),
    Private(
        "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather",
        "comm/c10d/fsdp: base of the compressed collectives that FSDP2 takes (with ReduceScatter)",
        "2.10",
        "FSDP2 can't be given compressed collectives",
    ),
    Private(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "plan/predict, comm/c10d: a model's forward without memory; which tensors have no values (with FakeTensor)",
        "2.0",
        "deepc.estimate can't run a model dry",
    ),
    Private(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "plan/predict, observe/profile/flops: sees every operator",
        "2.0",
        "no memory plan of activations, no flops profiler",
    ),
    Private(
        "torch.utils._python_dispatch._disable_current_modes",
        "parallel/simulate: values for one block of a model without values",
        "2.1",
        "deepc.estimate can't cut the blocks of a pipeline inside",
    ),
    Private(
        "torch.utils._pytree.tree_map_only",
        "plan/predict: tensors inside nested arguments (with tree_leaves)",
        "1.13",
        "a walk of our own",
    ),
    Private(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "observe/profile/recording: waits for data (patches.py: data-loader)",
        "1.2",
        "the timeline has no data lane for plain DataLoaders",
    ),
    Private(
        "torch.cuda._lazy_call", "compat/helpers/devices/accelerator: get_accelerator().lazy_call", "1.0", "that method"
    ),
)

ATTRIBUTES = {
    "torch.Tensor": ("_backward_hooks", "_version"),
    "torch.UntypedStorage": ("_cdata",),
    "torch.nn.Module": ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
}
"""Attributes of torch's objects with a leading underscore that other files use directly."""

graph_task_id = torch._C._current_graph_task_id
functorch_is_active = torch._C._are_functorch_transforms_active
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
tensor_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _: 0)
without_torch_function = torch._C.DisableTorchFunctionSubclass
has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type
data_of_tensor: Any = torch._C.TensorBase.data  # the C getset descriptor; torch's stub says that it is a Tensor
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
SpectralNorm: Any = torch.nn.utils.parametrizations._SpectralNorm
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
no_dispatch: Any = torch._C._disabled_torch_dispatch_impl
backward_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
saved_hooks_are_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
top_saved_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
push_saved_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_hooks: Callable[[], Any] = torch._C._autograd._pop_saved_tensors_default_hooks


def forward_mode() -> bool:
    """Whether tensors may have forward-mode derivatives."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def at_end_of_backward(function: Callable[[], Any]) -> None:
    """Calls `function` when the backward that runs in this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def add_to_each(tensors: list[torch.Tensor], value: float) -> None:
    """Adds `value` to each of `tensors`."""
    if (together := getattr(torch, "_foreach_add_", None)) is not None:
        together(tensors, value)
        return
    for t in tensors:
        t += value


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer` has made a step, though not by its step(): torch's LR schedules ask for that once, and would warn
    that theirs came first."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def references(t: torch.Tensor) -> tuple[int, ...]:
    """How many references there are to a tensor and to its memory, from C++ (autograd's to what it keeps) and from
    Python. To be compared with what such a call, made from the same place, finds of a tensor that is nobody's."""
    storage = t.untyped_storage()
    return tensor_use_count(t), storage_use_count(storage._cdata), sys.getrefcount(t), sys.getrefcount(storage)


def has_value(t: torch.Tensor) -> bool:
    """Neither a wrapper of torch.func nor a functional tensor of the compiler."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(t) and not torch._is_functional_tensor(t)


def outside_of_graphs(function: Any, reason: str) -> Any:
    """The function, which the compiler does not follow; `reason` is what its report says."""
    return torch._dynamo.disable(function, reason=reason)


def load_compiler() -> bool:
    """Imports the compiler as torch's first optimizer does. False if that has been done."""
    if "torch._dynamo" in sys.modules:
        return False
    importlib.import_module("torch._dynamo")
    return True


def load_symbolic_shapes() -> bool:
    """Imports what torch does for its first backward from given gradients, and its first operator on meta tensors
    (sympy). False if that has been done."""
    name = "torch.fx.experimental.symbolic_shapes"
    if name in sys.modules:
        return False
    importlib.import_module(name)
    return True


def has_checkpointed() -> bool:
    """Whether torch.utils.checkpoint has been called in this process, which imports the compiler."""
    module = sys.modules.get("torch.utils.checkpoint")
    checkpoint = getattr(getattr(module, "checkpoint", None), "__wrapped__", None)
    return hasattr(checkpoint, "__dynamo_disable")  # set by the first call through torch._compile._disable_dynamo


def skip_in_compiler(codes: list[Any], inside: bool = True) -> None:
    """The compiler compiles Python frames that it comes across, also those that C++ calls back: not these code objects,
    nor, with `inside`, what they call."""
    compiler = torch._C._dynamo.eval_frame
    if not hasattr(compiler, "set_code_exec_strategy"):  # torch before 2.7
        return
    skip, go_on = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
    for code in codes:
        compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip if inside else go_on))


F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """A decorator: the compiler follows neither this function nor what it calls. Costs nothing where nobody compiles,
    and does not import the compiler, as torch.compiler.disable would."""
    skip_in_compiler([function.__code__])
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # inside of a function that is compiled
    return function


def uncompiled_itself(function: F) -> F:
    """The same, but what it calls may be compiled: the user's model, from torch.compile(engine)."""
    skip_in_compiler([function.__code__], inside=False)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


# What the compiler does with the frames that run now; None: it does not look at them.
frame_callback: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


@uncompiled
def in_a_frame(module: torch.nn.Module) -> Callable[..., Any]:
    """What to call for `module` while the compiler looks at frames. It passes over modules whose forward is torch's own
    (nn.Sequential): a function of torch's that calls the module, which it takes, as torch.compile of the module itself
    makes one."""
    from torch._dynamo import external_utils, trace_rules

    return external_utils.wrap_inline(module) if trace_rules.check(module.forward) else module


def default_store() -> Any:
    """The store of torch.distributed's default group."""
    return torch.distributed.distributed_c10d._get_default_store()


def norm_clipper() -> list[tuple[Any, str]]:
    """(module, name there) of what torch.nn.utils.clip_grad_norm_ calls with its parameters, to scale their gradients;
    nothing if this torch has no such thing."""
    module, name = importlib.import_module("torch.nn.utils.clip_grad"), "_clip_grads_with_norm_"
    return [(module, name)] if hasattr(module, name) else []


def loader_iterator() -> Any:
    """The base class of DataLoader's iterators."""
    return torch.utils.data.dataloader._BaseDataLoaderIter


def cuda_lazy_call(function: Callable[[], Any]) -> Any:
    """Calls `function` when CUDA is up."""
    return torch.cuda._lazy_call(function)


_LATER = {
    "c10d": ("torch._C", "_distributed_c10d"),
    "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "adafactor": ("torch.optim._adafactor", "adafactor"),
    "AllGather": ("torch.distributed.fsdp._fully_shard._fsdp_api", "AllGather"),
    "ReduceScatter": ("torch.distributed.fsdp._fully_shard._fsdp_api", "ReduceScatter"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "without_modes": ("torch.utils._python_dispatch", "_disable_current_modes"),
    "StridedShard": ("torch.distributed.tensor.placement_types", "_StridedShard"),
    "tree_leaves": ("torch.utils._pytree", "tree_leaves"),
    "tree_map_only": ("torch.utils._pytree", "tree_map_only"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where, what = _LATER[name]
    found = globals()[name] = getattr(importlib.import_module(where), what)
    return found


def missing() -> list[Private]:
    """The names that the installed torch lacks."""
    return [row for row in NAMES if not _exists(row.name)]


def _exists(path: str) -> bool:
    found: Any = torch
    walked = "torch"
    for part in path.split(".")[1:]:
        walked += "." + part
        if not hasattr(found, part):
            try:
                importlib.import_module(walked)
            except ImportError:
                return False
        found = getattr(found, part, None)
    return found is not None
