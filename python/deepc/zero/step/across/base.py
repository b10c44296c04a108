"""What the updates that go across shards share: those whose step of an element depends on more of its parameter than a
shard has."""

from __future__ import annotations


class AcrossUpdate:
    """The answers of an update whose states are in memory."""

    def finish(self) -> None:
        """The rest of an update that a disk has broken off: there is none in memory."""

    def forget(self) -> None:
        """All states are written anew: there is no rest of an update."""
