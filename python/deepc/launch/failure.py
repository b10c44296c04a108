"""How a run failed: what is known of each rank that ended badly, which of them was the cause, and the report that comes
last."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from dataclasses import dataclass

from ..core.telemetry.speak import tell

# Raised on the survivors because a peer failed: never the first cause if there is another.
_CONSEQUENCES = {"RankDiedError", "AbortedError", "CommTimeoutError", "DistNetworkError", "DistBackendError"}


@dataclass(frozen=True)
class Failure:
    """How one rank ended. rank: its number, or the name of what else failed. exit: its exit code, negative = signal,
    None = it was still running when the report was written. time: by this host's clock. host: where, if the run has
    several. what: the whole headline, for what is no process. killed: by the launcher, since it did not end when it was
    told to."""

    rank: int | str
    pid: int
    exit: int | None
    time: float
    type: str = ""
    traceback: str = ""
    host: str = ""
    what: str = ""
    killed: bool = False

    def headline(self) -> str:
        if self.what:
            return self.what
        place = f" on {self.host}" if self.host else ""
        who = f"rank {self.rank} (pid {self.pid}{place})" if isinstance(self.rank, int) else str(self.rank)
        if self.exit is not None and self.exit < 0:
            name = signal.Signals(-self.exit).name if -self.exit in set(signal.Signals) else f"signal {-self.exit}"
            hint = ". If nobody sent it, the kernel was out of memory: see `dmesg`" if name == "SIGKILL" else ""
            return f"{who} was killed by {name}{hint}"
        if self.traceback:
            return f"{who} raised {self.type}"
        return f"{who} ended with exit code {self.exit}"

    @property
    def is_ours(self) -> bool:
        """The launcher ended it, because of another rank."""
        killed = self.killed and self.exit == -signal.SIGKILL
        return (self.exit == -signal.SIGTERM or killed) and not self.traceback

    @property
    def is_consequence(self) -> bool:
        return (
            self.is_ours
            or self.type in _CONSEQUENCES
            or (self.type == "RuntimeError" and "Connection closed by peer" in self.traceback)
        )


# What Python, Accelerate and transformers say where it is not installed.
_WANTS_DEEPSPEED = re.compile(
    r"No module named 'deepspeed['.]|DeepSpeed is not installed|'deepspeed\S*' distribution was not found"
)


def first_failure(failures: list[Failure]) -> Failure:
    """The cause: the earliest that is not the consequence of another rank's failure."""
    return min(failures, key=lambda f: (f.is_consequence, f.time))


def report(failures: list[Failure], exit_code: int | None = None) -> int:
    """Prints why the run ended and returns its exit code: that of the rank that failed first, 128 + n for signal n.
    exit_code: what it is in any case."""
    first = first_failure(failures)
    others = sorted((f.rank for f in failures if f is not first and not f.is_ours and isinstance(f.rank, int)), key=int)
    text = ["", "=" * 100, f"deepc run: {first.headline()}. It ended the run."]
    if others:
        text.append(f"Also failed, after it: rank {', '.join(map(str, others))}.")
    if first.traceback:
        text += ["", first.traceback.rstrip()]
    if _WANTS_DEEPSPEED.search(first.traceback):
        text += [
            "",
            (
                "The script asks for DeepSpeed. `deepc run --as-deepspeed ...` runs it on deepc as it is; so does"
                " `import deepc.compat.deepspeed` as"
            ),
            "its first line.",
        ]
    with contextlib.suppress(OSError, ValueError):  # as tell does
        if sys.stdout is not None:
            sys.stdout.flush()
    tell("\n".join([*text, "=" * 100]))
    if exit_code is not None:
        return exit_code
    if first.exit is None:
        return 1
    return 128 - first.exit if first.exit < 0 else first.exit or 1
