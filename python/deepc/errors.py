"""Every exception that deepc raises on purpose. Each message names the value, the place and the fix."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., Any])


class DeepcError(RuntimeError):
    """Base of all errors of deepc.

    Fix: as the message says. Catch this class to catch all of them; each is also the builtin exception that fits
    (ValueError, MemoryError, ...)."""

    of_another_rank = False  # raised here because another rank, which the message names, has told this one


class ConfigError(DeepcError, ValueError):
    """The configuration contradicts itself, has an unknown key, or asks for what does not exist yet.

    Fix: change the key that the message names; it says which values are possible."""


class UnsupportedError(DeepcError, NotImplementedError):
    """Asked for a capability that deepc, this machine or this build does not have; the message says what to do instead.

    Fix: do what the message proposes instead; docs/status.md lists what exists where."""


class ArgumentError(DeepcError, ValueError):
    """A function was called with a wrong dtype, shape, device, layout or value.

    Fix: the call. The message has the value that came and what is expected."""


class MisuseError(ConfigError, ArgumentError, AssertionError):
    """A call that DeepSpeed answers with an AssertionError (initialize without a model, step() inside
    coalesce_grad_reduction), so that `except AssertionError` of scripts finds it.

    Fix: the call, as the message says."""


class OutOfMemoryError(DeepcError, MemoryError):
    """An allocation would exceed what the machine or the memory cgroup has left; nothing was allocated.

    Fix: one of the options that the message lists with their sizes (stage 3, a smaller micro-batch with accumulation,
    checkpointing, bf16)."""


class CommError(DeepcError):
    """A collective failed; the communicator can't be used any more.

    Fix: the cause is in the message; start the ranks again. Other groups of the process still work."""


class MismatchError(CommError):
    """Ranks called different collectives.

    Fix: the message has the Python line of both sides. Usually a branch on the rank, or data loaders of unequal length.
    """


class RankDiedError(CommError):
    """A peer process died or left the group.

    Fix: look at the output of the rank that the message names: it has the first error. SIGKILL without one is often the
    kernel out of memory (dmesg)."""


class CommTimeoutError(CommError, TimeoutError):
    """A peer did not arrive in time; the message tells where every rank is.

    Fix: the rank that is behind (`deepc doctor PID` shows it while it hangs), or a longer timeout= of
    init_process_group.
    """


class AbortedError(CommError):
    """The communicator was aborted by some rank.

    Fix: none here: some rank called abort(), and the message says which and why."""


class StrayWriteError(DeepcError):
    """A node-shared (ZeRO-3) parameter was written outside GatheredParameters.

    Fix: write under `with deepc.zero.GatheredParameters(params, modifier_rank=0)`, or train at stage 2."""


class NonFiniteError(DeepcError, FloatingPointError):
    """Weights are NaN or infinite, so that every step is skipped and no further one can mend them.

    Fix: load a checkpoint from before, and look for what made them so; the message names the parameter. The number of
    steps until then is `deepc.max_lost_steps`."""


class CheckpointError(DeepcError):
    """A checkpoint is missing, incomplete, corrupt or does not fit the model.

    Fix: load another tag (`deepc.checkpoint.list_tags`), or the model that the checkpoint was made of; the message
    names the file and the tensor."""


class CheckpointTypeError(CheckpointError, TypeError):
    """Client state holds a value that a checkpoint without pickle can't hold; the message names the key.

    Fix: put tensors, NumPy values, strings, numbers, lists and dicts into client_state, nothing else."""


class CheckpointTagError(CheckpointError, AssertionError):
    """Ranks save one checkpoint under different tags, and checkpoint.tag_validation is Fail. (An AssertionError in
    DeepSpeed.)

    Fix: make the tag on rank 0 and broadcast it, or set checkpoint.tag_validation to Warn or Ignore."""


class ReleasedParameterError(DeepcError):
    """A ZeRO-3 parameter was touched while its values are not on this rank (streamed mode).

    Fix: read it under `with deepc.zero.GatheredParameters(params)`, or during the forward of its module."""


class UnitStateError(DeepcError, RuntimeError):
    """Parameters that come and go (ZeRO-3) were asked for a step that their state does not allow.

    Fix: none in the script: this is a fault of deepc, please report it with the traceback."""


class LaunchError(DeepcError):
    """A rank that deepc.notebook.launch started has failed, or could not be started; the message ends with its
    traceback.

    Fix: what the traceback shows, in the function that was launched."""


class DiskError(DeepcError, OSError):
    """A file of offloaded tensors could not be read or written; the message names file, offset and errno. The file and
    its handles can still be used.

    Fix: what errno says: the permission, the path, or a device that fails (dmesg)."""


class DiskFullError(DiskError):
    """The file system, a quota or a limit on the size of files has no room for what is to be written.

    Fix: free space there, or another folder; the message has the numbers."""


class DamagedError(DiskError):
    """What a file of offloaded tensors holds is torn, stale or damaged; the message names the extent and its
    generation.

    Fix: go back to a checkpoint. If it comes again, the disk or its memory fails."""


class DiskTimeoutError(DiskError, TimeoutError):
    """A request to a file of offloaded tensors is not complete in the time that was given; it goes on.

    Fix: wait again, for longer; a disk that does not answer at all shows in dmesg."""


def did_you_mean(key: str, known: Iterable[str], second: Mapping[str, str] | None = None) -> str:
    """' Did you mean "..."?' with up to three of `known` that are spelled like `key`, or ''. A dotted name is also
    looked for by its last part, and what its own section has of that goes before other sections'. second: second names
    among `known`, each with the one to offer for it."""
    import difflib  # a message's need alone

    paths = list(known)
    lower = {p.lower(): p for p in reversed(paths)}
    found = [lower[m] for m in difflib.get_close_matches(key.lower(), lower, n=2, cutoff=0.75)]
    own, dot, last = key.lower().rpartition(".")  # what is alike in a long section's name alone is not meant
    found = [
        f
        for f in found
        if not (dot and f.lower().rpartition(".")[0] == own)
        or difflib.SequenceMatcher(None, last, f.lower().rpartition(".")[2]).ratio() >= 0.6
    ]
    leaves: dict[str, list[str]] = {}
    for path in paths:
        leaves.setdefault(path.rsplit(".", 1)[-1].lower(), []).append(path)
    for leaf in difflib.get_close_matches(key.rsplit(".", 1)[-1].lower(), leaves, n=2, cutoff=0.8):
        found += [p for p in leaves[leaf] if p not in found]
    section, dot, _ = key.rpartition(".")
    found = ([f for f in found if f.rpartition(".")[0] == section] if dot else []) or found
    found = list(dict.fromkeys((second or {}).get(f, f) for f in found))[:3]
    return f" Did you mean {' or '.join(json.dumps(f) for f in found)}?" if found else ""


_NUMBERS = {"int", "float"}


def numeric(function: _F) -> _F:
    """A decorator: what is given for an argument that is annotated as a number (int, float, perhaps None or a tensor
    beside) is one, or an ArgumentError names it; deep inside text would be a bare TypeError, or be taken and fail
    later. An int may be given as a float of its value."""
    kinds = {n: {kind.strip() for kind in str(text).split("|")} for n, text in function.__annotations__.items()}
    kinds = {n: of for n, of in kinds.items() if of & _NUMBERS and of <= {*_NUMBERS, "None", "torch.Tensor"}}
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :][: bool(code.co_flags & 4)]  # of *args

    def number(name: str, value: Any, first: Any) -> Any:
        of = kinds.get(name)
        if of is None or type(value) is int or (value is None and "None" in of):
            return value
        if hasattr(value, "__index__") or ("float" in of and hasattr(value, "__float__")):  # NumPy's and tensors too
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        where = type(first).__name__ if function.__name__ == "__init__" else function.__qualname__
        what = ("a number" if "float" in of else "a whole number") + " or None" * ("None" in of)
        raise ArgumentError(f"{where}({name}={value!r}): it must be {what}, and is a {type(value).__name__}")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        named = [*names, *rest * (len(args) - len(names))]
        given = [number(n, value, first) for n, value in zip(named, args)]
        return function(*given, *args[len(given) :], **{n: number(n, value, first) for n, value in kwargs.items()})

    return cast(_F, checked)
