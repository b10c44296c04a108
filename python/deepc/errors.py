"""Every exception that deepc raises on purpose. Each message names the value, the place and the fix."""

from __future__ import annotations


class DeepcError(RuntimeError):
    """Base of all errors of deepc."""


class ConfigError(DeepcError, ValueError):
    """The configuration contradicts itself, has an unknown key, or asks for what does not exist yet."""


class UnsupportedError(DeepcError, NotImplementedError):
    """Asked for a capability that deepc, this machine or this build does not have; the message says what to do instead."""


class ArgumentError(DeepcError, ValueError):
    """A function was called with a wrong dtype, shape, device, layout or value."""


class OutOfMemoryError(DeepcError, MemoryError):
    """An allocation would exceed what the machine or the memory cgroup has left; nothing was allocated."""


class CommError(DeepcError):
    """A collective failed; the communicator can't be used any more."""


class MismatchError(CommError):
    """Ranks called different collectives."""


class RankDiedError(CommError):
    """A peer process died or left the group."""


class CommTimeoutError(CommError, TimeoutError):
    """A peer did not arrive in time; the message tells where every rank is."""


class AbortedError(CommError):
    """The communicator was aborted by some rank."""


class StrayWriteError(DeepcError):
    """A node-shared (ZeRO-3) parameter was written outside GatheredParameters."""


class CheckpointError(DeepcError):
    """A checkpoint is missing, incomplete, corrupt or does not fit the model."""


class CheckpointTypeError(CheckpointError, TypeError):
    """Client state holds a value that a checkpoint without pickle can't hold; the message names the key."""


class ReleasedParameterError(DeepcError):
    """A ZeRO-3 parameter was touched while its values are not on this rank (streamed mode)."""
