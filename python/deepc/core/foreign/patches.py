"""Every change that deepc makes to torch, to another library or to the interpreter: what, why, how to turn it off.

The code of a change lies where it is needed; it asks for its row here by name when it acts (`applied`) and when it ends
(`undone`), so that the table can't fall behind. `deepc doctor` prints the table; `active()` says what is changed in
this process now."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import ArgumentError


class Patch(NamedTuple):
    """One change. Where it is for a while only, `off` says when it ends by itself."""

    name: str
    changes: str  # the thing that is changed
    why: str
    off: str  # how to turn it off


PATCHES = (
    Patch(
        "thp",
        "the environment variable THP_MEM_ALLOC_ENABLE, at `import deepc`",
        "torch then maps large CPU tensors on huge pages",
        "DEEPC_HUGEPAGES=0, or set THP_MEM_ALLOC_ENABLE yourself",
    ),
    Patch(
        "logging",
        "a handler of the logger `deepc`, at `import deepc`; silent where the root logger has handlers",
        "a run prints its line where the application configures no logging",
        'give the logger "deepc" a handler before `import deepc`',
    ),
    Patch(
        "heap",
        "torch's CPU allocator, from the first engine on a CPU",
        "a step finds the memory of the one before, without page faults",
        "DEEPC_KEEP_HEAP=0",
    ),
    Patch(
        "matmul",
        "aten's CPU kernels of mm, addmm, bmm and baddbmm (in place too) for 16 bits, or large ones of fp32 and bf16",
        "torch's leave a part of AMD's processors with AVX-512 unused; those without instructions for 16-bit products,"
        " and Intel's without AMX, are faster by the core or through fp32",
        "fp32, and bf16 where it has instructions: DEEPC_MATMUL=0. Other 16 bits: train in fp32 (no bf16, fp16 and"
        " torch_autocast section). Else it is never on",
    ),
    Patch(
        "attention",
        "aten's CPU kernel of scaled_dot_product_attention and its gradient for 16 bits",
        "the core is 3 to 20 times as fast where there are no instructions for 16-bit products, or slow ones",
        "train in fp32 (no bf16, fp16 and torch_autocast section); elsewhere it is never on",
    ),
    Patch(
        "cross-entropy",
        "aten's cross_entropy_loss for autograd on CPUs, of logits of 16 MiB and more, from the first engine on a CPU",
        "two or three arrays of the logits' size are left out of a step, with the same bits",
        "DEEPC_CHUNKED_LOSS=0",
    ),
    Patch(
        "transformers-loss",
        "PreTrainedModel.loss_function of transformers, from the first engine on a CPU",
        "a language model's 16-bit logits are cast to fp32 by chunks in its loss, with the same bits, not as a whole",
        "DEEPC_CHUNKED_LOSS=0",
    ),
    Patch(
        "threads",
        "torch's number of threads, set to 1 by deterministic layouts and in the dry run's forked children",
        "the order of additions depends on it; a forked child has no OpenMP threads to wait for",
        "set OMP_NUM_THREADS, or leave deepc.deterministic out",
    ),
    Patch(
        "module-zero-grad",
        "torch.nn.Module.zero_grad, from the first engine of deepspeed.initialize",
        "scripts for DeepSpeed call it on the module instead of the engine",
        "deepc.initialize instead of deepspeed.initialize",
    ),
    Patch(
        "import-deepspeed",
        "sys.meta_path, while deepc.compat.deepspeed is installed",
        "`import deepspeed` gives deepc",
        "deepc.compat.deepspeed.uninstall()",
    ),
    Patch(
        "tensor-names",
        "ds_id, ds_shape, ds_numel and ds_status of torch.Tensor, while deepc.compat.deepspeed is installed",
        "what a node of backward saved of a streamed parameter is asked for them; other tensors still have none",
        "deepc.compat.deepspeed.uninstall()",
    ),
    Patch(
        "clip-grad",
        "torch.nn.utils.clip_grad_value_, and what clip_grad_norm_ scales gradients with, while there is an engine, or"
        " deepc.compat.deepspeed is installed",
        "called on parameters that an engine trains they clip nothing, and a line of the log says so",
        "engine.destroy(); deepc.compat.deepspeed.uninstall()",
    ),
    Patch(
        "accelerate",
        "accelerate.state.PartialState._prepare_backend, DeepSpeedPlugin.fill_match and data_loader.skip_first_batches,"
        " while deepc.compat.deepspeed is installed",
        'Accelerate takes each CPU rank of a DeepSpeed run for a run of its own, refuses "auto" in deepc.fuse, and'
        " skips no batches whose sequences ranks share",
        "deepc.compat.deepspeed.uninstall()",
    ),
    Patch(
        "lightning",
        "CUDAAccelerator and the check of devices in Lightning's DeepSpeed strategy, and Fabric's optimizer_step there",
        "the strategy runs on CUDA only; Fabric calls the optimizer's step, which is the engine's to make",
        "do not import deepc.compat.deepspeed before Lightning",
    ),
    Patch(
        "transformers",
        "transformers' living DeepSpeed configuration and HF_DEACTIVATE_ASYNC_LOAD, inside zero.Init",
        "it would import deepspeed, and read the whole model ahead",
        "ends with the zero.Init block",
    ),
    Patch(
        "transformers-fake",
        "transformers.utils.import_utils.is_fake_tensor, in the dry run's forked children",
        "of tensors without values it makes masks that a training of full sequences leaves out",
        "give deepc.initialize no sample batch, or one with the padding that there is",
    ),
    Patch(
        "transformers-loading",
        "PreTrainedModel._load_pretrained_model of transformers, while deepc.compat.deepspeed is installed",
        "at ZeRO-3 it asks for a state_dict whose names alone it wants; of parameters on disk it gets no values",
        "deepc.compat.deepspeed.uninstall()",
    ),
    Patch(
        "transformers-initializing",
        "transformers.integrations.deepspeed.initialize_weights_zero3, while deepc.compat.deepspeed is installed",
        "it notes on rank 0 alone what it has initialized; the others would do so again in memory that all share",
        "deepc.compat.deepspeed.uninstall()",
    ),
    Patch(
        "parameter-class",
        "torch.nn.Parameter.__new__, inside zero.Init where ranks share no memory",
        "a parameter is sharded as it is made, before the whole model lies on one rank",
        "ends with the zero.Init block",
    ),
    Patch(
        "parameter-hook",
        "torch's hook of parameter registration, torch.nn.Parameter.__deepcopy__ and a torch function mode, inside"
        " zero.Init",
        "parameters move into the node's shared memory as modules get them",
        "ends with the zero.Init block",
    ),
    Patch(
        "data-loader",
        "__next__ of torch's DataLoader iterators, while a timeline is recorded",
        "the wait for a batch is a lane of the timeline",
        "ends with the timeline",
    ),
)

_ROWS = {p.name: p for p in PATCHES}
_count: Counter[str] = Counter()
_lock = threading.Lock()


def applied(name: str) -> None:
    """The change is on from now on. Changes that can be on several times are counted."""
    if name not in _ROWS:
        raise ArgumentError(f"{name!r} is no row of core/foreign/patches.py")
    with _lock:
        _count[name] += 1


def undone(name: str) -> None:
    """It is off again, once."""
    with _lock:
        _count[name] -= 1


@contextlib.contextmanager
def applied_inside(name: str) -> Iterator[None]:
    """On until the block ends."""
    applied(name)
    try:
        yield
    finally:
        undone(name)


def active() -> list[Patch]:
    """What is changed in this process now."""
    return [p for p in PATCHES if _count[p.name] > 0]
