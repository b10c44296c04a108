"""The first code of every rank: ties its life to the launcher's, finds out which rank it is, binds it to its cores,
runs the user's program as `python script` would, and hands the traceback of what ends it to the launcher (torch
elastic's error file, or over a socket under mpirun and srun).

Run by path, with no import of torch or deepc: a program that uses neither pays 20 ms for it.
Usage: rank.py script|module|exec|call|launcher NAME [ARGUMENT...]

Reads of the launcher (and removes from the environment): DEEPC_LAUNCHER_PID, the parent's pid; DEEPC_BIND, "all" or a
list of cores; DEEPC_AS_DEEPSPEED; DEEPC_LOCAL_RANK_ARGUMENT, append --local_rank=N; DEEPC_REPORT_TO, where to send a
traceback."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types

_PR_SET_PDEATHSIG = 1


def die_with_launcher(by: signal.Signals = signal.SIGKILL) -> None:
    """A launcher that is killed with SIGKILL can't end its ranks: the kernel does it. Survives exec, not fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    launcher = os.environ.pop("DEEPC_LAUNCHER_PID", None)  # what we start has another parent
    if launcher and os.getppid() != int(launcher):  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def sibling(name: str) -> types.ModuleType:
    """A file beside this one; the name `deepc` stays free for the program."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location("_deepc_launch_" + name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_place() -> None:
    """Under mpirun and srun: torchrun's variables from theirs."""
    if "RANK" in os.environ:
        return
    places = sibling("places")
    try:
        found = places.discover(os.environ)
    except places.PlaceError as exc:
        sys.exit(f"deepc run: error: {exc}")
    if found is not None:
        os.environ.update(found[1])


def take_cores() -> None:
    """Binds this rank if that was asked for; threads: one for each of its cores, or its share of what this process may
    use."""
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    allowed = os.sched_getaffinity(0)
    threads = max(1, len(allowed) // ranks)
    if per_task := os.environ.get("SLURM_CPUS_PER_TASK"):  # Slurm may have bound each task to its own
        threads = int(per_task)
    if core_list := os.environ.pop("DEEPC_BIND", ""):
        binding = sibling("bind")
        try:
            cores = binding.cores_of(rank, ranks, core_list, allowed)
        except ValueError as exc:
            sys.exit(f"deepc run: error: --bind_cores_to_rank on {os.uname().nodename}: {exc}")
        binding.bind(cores)
        threads = len(cores)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def record(exc: BaseException) -> None:
    """Hands how this rank ended to the launcher: the format of torch elastic's ErrorHandler, with the exception's type
    added."""
    lines = traceback.format_exception(exc)  # of any exception, also one whose text can't be had
    data = described(lines[-1].strip(), "".join(lines), type(exc).__name__)
    write_record(data)
    if REPORT_TO:
        send_record(data)


def record_exit(code: int) -> None:
    """sys.exit(code): who started us sees it; the launcher behind mpirun or srun does not. As the system has it: -1 is
    255, and 256 is 0."""
    code &= 0xFF
    if REPORT_TO and code:
        send_record(described(f"exit code {code}", "", "", exit=code))


def described(message: str, text: str, kind: str, **more: object) -> dict[str, object]:
    now = time.time()
    return {
        "message": {
            "message": message,
            "extraInfo": {
                "py_callstack": text,
                "timestamp": str(int(now)),
                "time": now,
                "type": kind,
                "rank": os.environ.get("RANK", "0"),
                "pid": os.getpid(),
                **more,
            },
        }
    }


def write_record(data: dict[str, object]) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "w") as f:
            json.dump(data, f)
        os.replace(path + ".part", path)
    except OSError as error:
        print(f"deepc run: can't write {path}: {error}", file=sys.stderr)


def send_record(data: dict[str, object]) -> None:
    """To the launcher that waits at one of these addresses: "TOKEN PORT ADDRESS...". If none answers the traceback is
    on stderr all the same."""
    import socket

    token, port, *addresses = REPORT_TO.split()
    for address in addresses:
        try:
            with socket.create_connection((address, int(port)), timeout=1.0) as connection:
                connection.sendall(token.encode() + b"\n" + json.dumps(data).encode())
                connection.shutdown(socket.SHUT_WR)
                if connection.recv(2) == b"ok":
                    return
        except OSError:
            continue


def own_frames_cut(exc: BaseException) -> types.TracebackType | None:
    """The traceback without its first frames, those of this file and of runpy."""
    tb = exc.__traceback__
    notebook = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "notebook.py")
    own = (__file__, notebook, runpy.run_module.__code__.co_filename)
    while tb is not None and tb.tb_frame.f_code.co_filename in own:
        tb = tb.tb_next
    return tb


def run_script(path: str) -> None:
    """As `python path`: its module is `__main__` until the process ends. Its file is absolute, as there: a script may
    change the folder and then look beside itself."""
    path = os.path.abspath(path)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    with open(path, "rb") as f:
        code = compile(f.read(), path, "exec", dont_inherit=True)  # else this file's own __future__ is the script's too
    exec(code, main.__dict__)


def run_module(name: str) -> None:
    """As `python -m name`."""
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_call(fd: str) -> None:
    """A function that deepc.notebook sent over descriptor `fd`."""
    from deepc.launch.notebook import run_payload

    run_payload(int(fd))


REPORT_TO = ""


def main() -> None:
    global REPORT_TO
    kind, sys.argv = sys.argv[1], sys.argv[2:]
    if kind == "launcher":  # mpirun or srun: what follows is for its ranks
        die_with_launcher(signal.SIGTERM)  # time to end them
        os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
        execute(sys.argv)
    die_with_launcher()
    find_place()
    take_cores()
    REPORT_TO = os.environ.pop("DEEPC_REPORT_TO", "")
    if os.environ.pop("DEEPC_LOCAL_RANK_ARGUMENT", ""):
        sys.argv.insert(1, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}")
    as_deepspeed = os.environ.pop("DEEPC_AS_DEEPSPEED", "")
    if kind == "exec":
        execute(sys.argv)
    whole_lines()
    faulthandler.enable()
    if not getattr(sys.flags, "safe_path", False):  # as python does: of a link, the folder that the script lies in
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0])) if kind == "script" else os.getcwd()
    try:
        if as_deepspeed:
            importlib.import_module(as_deepspeed)  # from here on `import deepspeed` gives deepc
        {"script": run_script, "module": run_module, "call": run_call}[kind](sys.argv[0])
    except SystemExit as exc:
        if exc.code is not None and not isinstance(exc.code, int):  # sys.exit("text")
            exc.__traceback__ = own_frames_cut(exc)
            record(exc)
        else:
            record_exit(exc.code or 0)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as exc:
        exc.__traceback__ = own_frames_cut(exc)
        record(exc)
        if kind != "call":  # the notebook raises it
            sys.excepthook(type(exc), exc, exc.__traceback__)
        sys.exit(1)


def whole_lines() -> None:
    """Ranks share one pipe or terminal: a line goes there at its end, in one piece. (python -u writes each part of a
    print by itself, and those of two ranks mix.)"""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def execute(argv: list[str]) -> None:
    """Becomes the program."""
    try:
        os.execvp(argv[0], argv)
    except OSError as exc:
        print(f"deepc run: error: {argv[0]!r} can't be executed: {exc.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(exc, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
