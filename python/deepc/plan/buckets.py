"""The states of the flat space's buckets while a backward makes gradients, and the order in which they are reduced:
OPEN (gradients are missing) -> COMPLETE -> BEGUN (the reduction is under way) -> REDUCED. Data only: no tensors, no
other ranks; what reduces is zero/step/reducers/collective.py."""

from __future__ import annotations

from collections.abc import Sequence

OPEN, COMPLETE, BEGUN, REDUCED = range(4)


class BucketStates:
    """The states of one pass's buckets, and their order. Knows nothing of tensors and of other ranks."""

    def __init__(self, offsets: Sequence[int], numels: Sequence[int], bucket_elems: int, nbuckets: int) -> None:
        self._buckets_of = [
            range(o // bucket_elems, (o + n - 1) // bucket_elems + 1) if n else range(0)
            for o, n in zip(offsets, numels)
        ]
        self.params_of: list[list[int]] = [[] for _ in range(nbuckets)]
        for i, buckets in enumerate(self._buckets_of):
            for b in buckets:
                self.params_of[b].append(i)
        self.order = list(range(nbuckets))
        self.begin()

    def begin(self) -> None:
        """A new pass: all are OPEN but those without a parameter."""
        self.state = [OPEN if params else COMPLETE for params in self.params_of]
        self._missing = [len(params) for params in self.params_of]
        self._left = [len(buckets) for buckets in self._buckets_of]
        self._completed = [b for b, s in enumerate(self.state) if s == COMPLETE]
        self._ready = self.begun = 0  # buckets from the front of the order that are not OPEN any more; that have begun

    def arrived(self, param: int) -> bool:
        """The gradient of `param` is there. False if no bucket needs it: it has no elements."""
        for b in self._buckets_of[param]:
            self._missing[b] -= 1
            if self._missing[b] == 0:
                self.state[b] = COMPLETE
                self._completed.append(b)
        return len(self._buckets_of[param]) > 0

    def close(self) -> None:
        """No more gradients come: what is OPEN is COMPLETE, with zeros for the missing."""
        self.state = [COMPLETE if s == OPEN else s for s in self.state]

    @property
    def ready(self) -> int:
        """How many buckets from the front of the order are not OPEN any more."""
        while self._ready < len(self.order) and self.state[self.order[self._ready]] != OPEN:
            self._ready += 1
        return self._ready

    def take(self, limit: int) -> int | None:
        """The next bucket in order if it is COMPLETE, now BEGUN; only the first `limit` in the order."""
        if self.begun >= min(limit, self.ready):
            return None
        b = self.order[self.begun]
        self.begun += 1
        self.state[b] = BEGUN
        return b

    def reduced(self, b: int) -> list[int]:
        """Bucket b is REDUCED. The parameters whose gradients nothing needs any more."""
        self.state[b] = REDUCED
        for i in self.params_of[b]:
            self._left[i] -= 1
        return [i for i in self.params_of[b] if self._left[i] == 0]

    def seen_order(self) -> list[int]:
        """Buckets in the order in which they became complete in this pass, behind them those that did not."""
        seen = set(self._completed)
        return [*self._completed, *(b for b in range(len(self.order)) if b not in seen)]
