"""How a failure between ranks becomes an error of ours, on all ranks: what the words of torch's backends mean, the
reason that the ranks of a group leave for each other in their store, and the end of its connections.

Gloo can neither interrupt nor poll a receive, and its abort leaves connections open (torch 2.13). So a wait is broken
by a receive that times out on the same pair, which closes it, for both sides."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import errors
from ..errors import AbortedError, CommError, CommTimeoutError, DeepcError, RankDiedError

if TYPE_CHECKING:
    import torch.distributed as dist

Reason = tuple[type[DeepcError], str]  # what to raise
GRACE_S = 2.0  # that a rank waits for the reason from one that saw more of it
SHORT_GRACE_S = 0.05  # where nobody has
_ABORT_TAG = 0x7FFFFFF0  # no message of ours has it


def is_closed(said: str) -> bool:
    """Whether a backend speaks of a connection that the other side closed."""
    return re.search("closed|reset|refused|broken pipe|EOF", said, re.IGNORECASE) is not None


def meaning(said: str) -> type[CommError]:
    """The error that a backend's words stand for."""
    if "imed out" in said or "timeout" in said:
        return CommTimeoutError
    return RankDiedError if is_closed(said) else CommError


def shortened(said: str) -> str:
    """Without the source line and the advice that Gloo puts around it."""
    said = re.sub(r"^\[[^\]]*/([\w.]+:\d+)\]", r"Gloo, \1:", said)
    return said.split(" This is typically")[0].strip()


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """ask(), or None if it fails or takes longer: the store may have gone with its host."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def break_pairs(group: Any, me: int, count: int) -> None:
    """Closes the connections of a Gloo group of `count` ranks: every wait raises, here and at the peers. From any
    thread."""
    for peer in range(count):
        if peer != me:
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                group.recv([nothing], peer, _ABORT_TAG).wait(datetime.timedelta(milliseconds=1))


class Record:
    """Why a group broke, in its store: the first reason that one of its ranks left. Never blocks for long."""

    def __init__(self, store: dist.Store) -> None:
        """store: the group's own (a PrefixStore)."""
        self._store = store

    def write(self, kind: type[DeepcError], text: str) -> Reason:
        """The reason that counts: this one, or that of a rank that was there before."""
        found = within(1.0, lambda: self._store.compare_set("error", "", json.dumps([kind.__name__, text])))
        return reason(*json.loads(found)) if found else (kind, text)

    def read(self, grace_s: float = 0.0) -> Reason | None:
        """grace_s: to wait for it, the kernel closes a dead process' connections before its node has noticed."""

        def ask() -> bytes | None:
            end = time.monotonic() + grace_s
            while not self._store.check(["error"]):
                if time.monotonic() >= end:
                    return None
                time.sleep(0.005)
            return self._store.get("error")

        found = within(1.0 + grace_s, ask)
        return reason(*json.loads(found)) if found else None


def reason(name: str, text: str) -> Reason:
    """The reverse of (kind.__name__, text), for a kind of errors.py."""
    kind = getattr(errors, name, CommError)
    return (kind if isinstance(kind, type) and issubclass(kind, DeepcError) else CommError), text


# ---- groups of torch.distributed -------------------------------------------------------------------------------------
def break_group(group: Any, me: int, count: int) -> None:
    """Ends all waits in a torch.distributed group on the CPU, on all its ranks. From any thread."""
    import torch.distributed as dist

    backend = str(dist.get_backend(group))
    if "deepc" in backend:
        group.abort()
    elif "gloo" in backend:
        break_pairs(group, me, count)


def break_messages(group: Any) -> None:
    """Ends the waits for messages of torch's default group that Gloo carries, here and at the peers, which are told by
    nothing else. From any thread."""
    import torch.distributed as dist

    messages = getattr(group, "messages_of_gloo", group if group is not None and dist.get_backend() == "gloo" else None)
    if messages is not None:
        break_pairs(messages, dist.get_rank(), dist.get_world_size())


@contextlib.contextmanager
def translated(what: str, rank: int, world: int) -> Iterator[None]:
    """Around calls of a backend: turns its error into one of ours."""
    try:
        yield
    except DeepcError:
        raise
    except RuntimeError as exc:
        said = str(exc)
        raise meaning(said)(
            f"{what} over {world} ranks failed on rank {rank}: a rank died, left, raised an error, or can't be reached"
            f" ({shortened(said)})"
        ) from exc


class Breaker:
    """The state of a torch.distributed group of our own over all ranks: its first failure is kept, raised by every
    later call, and told to the other ranks, whose calls raise the same."""

    def __init__(
        self, what: str, rank: int, world: int, store: dist.Store, cut: Callable[[BaseException], None]
    ) -> None:
        """what: whose group it is, for messages. store: the group's own. cut: ends the waits of all ranks, in whichever
        thread."""
        self._what, self._rank, self._world, self._cut = what, rank, world, cut
        self._record = Record(store)
        self.failed: BaseException | None = None

    def check(self) -> None:
        if self.failed is not None:
            raise self.failed

    @contextlib.contextmanager
    def errors(self, what: str = "") -> Iterator[None]:
        """Around calls of the backend. what: more precisely."""
        self.check()
        try:
            with translated(what or self._what, self._rank, self._world):
                yield
        except BaseException as exc:
            if self.failed is None:
                self.fail(self._first(exc))
            if self.failed is exc:
                raise
            raise cast(BaseException, self.failed) from exc

    def _first(self, exc: BaseException) -> BaseException:
        """What another rank left as the reason, if `exc` only says that it ended the group."""
        if isinstance(exc, (RankDiedError, AbortedError)):
            found = self._record.read(SHORT_GRACE_S)
            if found is not None:
                return found[0](found[1])
        return exc

    def fail(self, error: BaseException) -> None:
        """Breaks the group on all ranks: none waits for this one any more. From any thread."""
        if self.failed is not None:
            return
        self.failed = error
        if isinstance(error, CommError):
            kind, text = self._record.write(type(error), str(error))
            if text != str(error):
                self.failed = kind(text)
        else:
            text = f"{self._what}: rank {self._rank} left it with {type(error).__name__}: {error}"
            self._record.write(CommError, text)
        self._cut(error)
