"""Python programs of tests: what `python ARGUMENTS` does, in a process that is forked from one that has imported torch.

    done = run_python("-c", "import deepc; deepc.init_distributed()", env=env)      # as subprocess.run(..., text=True)
    launcher = Program(("-m", "deepc", "run", "train.py"), cwd=tmp_path)            # as subprocess.Popen

An import of torch is most of what a small program costs. RANKS_EXECUTE=1 starts every program from its file; so must a
test that looks at the process itself: its memory, its descriptors, its command line or environment in /proc."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import ranks


class Program:
    """A running program with the methods of subprocess.Popen that tests use. Its standard input is empty."""

    def __init__(
        self, arguments: Sequence[str], *, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        arguments, env = [str(a) for a in arguments], dict(os.environ if env is None else env)
        self.args, self.returncode = [sys.executable, *arguments], None
        self._out, self._err = tempfile.TemporaryFile("w+b"), tempfile.TemporaryFile("w+b")
        with open(os.devnull, "rb") as nothing:
            files = nothing.fileno(), self._out.fileno(), self._err.fileno()
            if ranks.EXECUTES:
                self._process = subprocess.Popen(
                    self.args,
                    stdin=files[0],
                    stdout=files[1],
                    stderr=files[2],
                    cwd=cwd,
                    env=env,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` ignores it
                )
            else:
                passed = ranks.Descriptors(*files)
                self._process = ranks.start_fork(_run, (passed, arguments, os.fspath(cwd or os.getcwd()), env))
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        executed = isinstance(self._process, subprocess.Popen)
        self.returncode = self._process.poll() if executed else self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""
        if isinstance(self._process, subprocess.Popen):
            self._process.wait(timeout)
        else:
            self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it printed and what it said to standard error, when it has ended."""
        self.wait(timeout)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode())
        return texts[0], texts[1]

    def said(self) -> str:
        """What it has said to standard error so far."""
        return os.pread(self._err.fileno(), 1 << 24, 0).decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_python(
    *arguments: str, cwd: Path | str | None = None, env: Mapping[str, str] | None = None, timeout: float = 200.0
) -> subprocess.CompletedProcess:
    """The program's exit code and output; one that is still running after `timeout` is killed, and that is an error."""
    program = Program(arguments, cwd=cwd, env=env)
    try:
        out, err = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


def _run(passed: ranks.Descriptors, arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    """In the fork: what the interpreter does with its command line."""
    ranks.become(passed.fds, env)
    os.chdir(cwd)
    code = 0
    try:
        _main(arguments)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if exc.code is not None and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)
    except BaseException as exc:
        code, tb = 1, exc.__traceback__
        while tb and tb.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            tb = tb.tb_next
        sys.excepthook(type(exc), exc, tb)
        if isinstance(exc, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


def _main(arguments: list[str]) -> None:
    kind, *rest = arguments
    if kind == "-c":
        sys.argv[:], sys.path[:0] = ["-c", *rest[1:]], [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv[:], sys.path[:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[:0] = arguments, [os.path.dirname(os.path.abspath(kind))]
        runpy.run_path(kind, run_name="__main__")
