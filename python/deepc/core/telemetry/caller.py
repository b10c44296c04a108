"""Whose line called: what messages and the flight record name. The first frame that is neither torch's nor deepc's."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from types import CodeType, FrameType

from ..lib import C


def _folders(package: str) -> list[str]:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    return [os.path.abspath(where) for where in (spec.submodule_search_locations or ())] if spec is not None else []


_OWN_FILES: dict[str, bool] = {}  # file -> belongs to torch or deepc
_OWN_DIRS = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep,
    *(os.path.join(where, "") for where in _folders("torch")),
)
_PYTHON_DIR = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep


def _is_own(filename: str) -> bool:
    own = (
        filename.startswith(_OWN_DIRS) or filename.startswith("<") or os.path.dirname(filename) + os.sep == _PYTHON_DIR
    )
    own = own or os.path.basename(filename) == "typing_extensions.py"  # its wrapper of what torch calls deprecated
    _OWN_FILES[filename] = own
    return own


_speaker = threading.local()  # .where: in whose name this thread calls, see speak_for()
_lines: dict[tuple[CodeType, int], bytes] = {}  # (code, instruction) -> "dir/file.py:31"


def speak_for(where: bytes) -> None:
    """Until the next call, collectives of this thread that no Python frame of a user is behind are told as made by
    `where`: for a thread that runs calls in the name of others."""
    _speaker.where = where


def caller_line(depth: int = 1) -> bytes:
    """ "dir/file.py:31" of the first frame that is neither torch's nor deepc's, from `depth` frames above the caller
    on; b"" if there is none (called by C++ alone, as DDP's reducer does)."""
    return _find_caller(sys._getframe(depth))[3]


def _find_caller(frame: FrameType | None) -> tuple[CodeType | None, int, int, bytes]:
    """(code, instruction, how many frames further up, text) of the first foreign frame from `frame` on."""
    steps = 0
    while frame is not None:
        name = frame.f_code.co_filename
        own = _OWN_FILES.get(name)
        if not (_is_own(name) if own is None else own):
            break
        frame, steps = frame.f_back, steps + 1
    if frame is None:
        return None, 0, 1 << 20, getattr(_speaker, "where", b"")
    code, at = frame.f_code, frame.f_lasti
    text = _lines.get((code, at))
    if text is None:  # f_lineno walks the line table: 2.4 us
        if len(_lines) > 4096:
            _lines.clear()
        text = _lines[code, at] = ("/".join(code.co_filename.rsplit("/", 2)[-2:]) + f":{frame.f_lineno}").encode(
            errors="replace"
        )
    return code, at, steps, text


class Caller:
    """Tells a communicator who calls. When the same instruction calls again from the same depth, as in a training loop,
    that is one look at one frame: 0.15 us instead of 0.5 us for the walk and 0.5 us for telling C."""

    __slots__ = ("_code", "_at", "_depth", "_told")

    def __init__(self) -> None:
        self._code: CodeType | None = None
        self._at, self._depth, self._told = 0, 1 << 20, b""

    def tell(self, handle: int | None, note: str = "") -> None:
        """note: goes behind the line in messages."""
        if not note:
            try:
                frame = sys._getframe(self._depth)
                if frame.f_code is self._code and frame.f_lasti == self._at:
                    return
            except ValueError:  # the stack is not that deep
                pass
        self._code, self._at, steps, text = _find_caller(sys._getframe(1))
        self._depth = steps + 1
        if note:
            self._code, text = None, (text + note.encode(errors="replace"))[-63:]
        if text != self._told:
            self._told = text
            C.dc_comm_set_caller(handle, text[-63:])
