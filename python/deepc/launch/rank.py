"""The first code of every rank: ties its life to the launcher's, runs the user's program as `python script` would, and writes the
traceback of what ends it where the launcher (torch elastic's error file) finds it.

Run by path, with no import of torch or deepc: a program that uses neither pays 20 ms for it.
Usage: rank.py script|module|exec NAME [ARGUMENT...]"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types

_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """A launcher that is killed with SIGKILL can't end its ranks: the kernel does it. Survives exec, not fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = os.environ.get("DEEPC_LAUNCHER_PID")
    if launcher and os.getppid() != int(launcher):  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def record(exc: BaseException) -> None:
    """Writes torch elastic's error file: the format of its ErrorHandler, with the exception's type added."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = "".join(traceback.format_exception(exc))
    data = {"message": {"message": f"{type(exc).__name__}: {exc}",
                        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time())), "time": time.time(),
                                      "type": type(exc).__name__, "rank": os.environ.get("RANK", "0"), "pid": os.getpid()}}}
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "w") as f:
            json.dump(data, f)
        os.replace(path + ".part", path)
    except OSError as error:
        print(f"deepc run: can't write {path}: {error}", file=sys.stderr)


def own_frames_cut(exc: BaseException) -> types.TracebackType | None:
    """The traceback without its first frames, those of this file and of runpy."""
    tb = exc.__traceback__
    while tb is not None and (tb.tb_frame.f_code.co_filename == __file__ or "runpy" in tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def run_script(path: str) -> None:
    """As `python path`: sys.path[0] is its folder, and its module is `__main__` until the process ends."""
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    with open(path, "rb") as f:
        code = compile(f.read(), path, "exec")
    exec(code, main.__dict__)


def run_module(name: str) -> None:
    """As `python -m name`."""
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main() -> None:
    kind, sys.argv = sys.argv[1], sys.argv[2:]
    die_with_launcher()
    if kind == "exec":
        os.execvp(sys.argv[0], sys.argv)
    faulthandler.enable()
    try:
        (run_module if kind == "module" else run_script)(sys.argv[0])
    except SystemExit as exc:
        if exc.code is not None and not isinstance(exc.code, int):  # sys.exit("text")
            exc.__traceback__ = own_frames_cut(exc)
            record(exc)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as exc:
        exc.__traceback__ = own_frames_cut(exc)
        record(exc)
        sys.excepthook(type(exc), exc, exc.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    main()
