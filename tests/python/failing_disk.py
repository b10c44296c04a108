"""A transfer of a rank's disk that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FailingDisk:
    """While it is entered, the next transfer of this process's arrays on disk fails once when `failing` is set."""

    def __init__(self) -> None:
        self.failing = False

    def __enter__(self) -> FailingDisk:
        from deepc.errors import DiskFullError
        from deepc.offload import array

        self._array, self._whole = array.DiskArray, array.DiskArray._finish

        def finish(of: Any, handle: Any) -> None:
            self._whole(of, handle)
            if self.failing:
                self.failing = False
                raise DiskFullError("[made by the test]")

        self._array._finish = finish
        return self

    def __exit__(self, *_: object) -> None:
        self._array._finish = self._whole

    def around(self, what: Callable[..., Any], here: bool) -> Callable[..., Any]:
        """`what`, during which a transfer of this rank fails if it is `here`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.failing = here
            try:
                return what(*args, **kwargs)
            finally:
                self.failing = False

        return run
