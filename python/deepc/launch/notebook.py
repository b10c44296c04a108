"""Ranks from a notebook or a Python prompt:

    def train(steps):                                   # a cell; may use what other cells imported, defined or assigned
        engine, *_ = deepc.initialize(model=Net(), config=CONFIG)
        ...
        return losses

    losses = deepc.notebook.launch(train, (100,), ranks=2)     # what each rank returned, in rank order

Each rank is a fresh process (no fork: torch's thread pools, autograd and CUDA do not survive one), so what the function
needs is sent along: functions and classes of the notebook by their source, in dependency order; other functions by
their code; modules by name; values by pickle. It travels in memory that the ranks inherit, never in a file. The ranks
are watched and ended as by `deepc run` (launch/)."""

from __future__ import annotations
import __future__

import ast
import contextlib
import dis
import importlib
import inspect
import io
import linecache
import marshal
import os
import pickle
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, LaunchError

__all__ = ["launch"]


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    ranks: int = 2,
    *,
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    bind_cores: bool = False,
) -> list[Any]:
    """Calls function(*args, **kwargs) in `ranks` fresh processes of this machine and returns their results in rank
    order. Their output appears here, each line after its rank. Inside, deepc.initialize and deepc.init_distributed find
    the ranks as under `deepc run`; each rank's device is its own GPU if there are GPUs.

    function, args and results are copied: what a rank changes is changed there only. env: further variables of the
    ranks. bind_cores: each rank on its own cores.

    Raises LaunchError with the traceback of the rank that failed first (the others are ended then), ArgumentError if
    something can't be sent to the ranks. An interrupt (the stop button, ^C) ends all ranks. In no case is a process
    left."""
    if not callable(function):
        raise ArgumentError(f"launch needs a function, got {type(function).__name__}")
    if not isinstance(ranks, int) or ranks < 1:
        raise ArgumentError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    payload = _pack(function, tuple(args), dict(kwargs or {}))
    results = [os.memfd_create(f"deepc-result-{r}", 0) for r in range(ranks)]
    shipped = os.memfd_create("deepc-call", 0)
    try:
        _write(shipped, pickle.dumps({**payload, "results": results}))
        _run(shipped, results, ranks, dict(env or {}), bind_cores)
        found = [_read(fd) for fd in results]
        if silent := [str(r) for r, data in enumerate(found) if not data]:
            raise LaunchError(
                f"rank {', '.join(silent)} ended with exit code 0 before the function returned (sys.exit?), so there is"
                " no result"
            )
        return [pickle.loads(data) for data in found]
    finally:
        for fd in (*results, shipped):
            os.close(fd)


def _run(shipped: int, results: list[int], ranks: int, env: dict[str, str], bind_cores: bool) -> None:
    """The ranks' life. Raises LaunchError."""
    from .driver import Driver, Printer
    from .failure import first_failure
    from .options import Launch, cores, threads
    from .remote.hosts import Host

    path = os.pathsep.join(
        dict.fromkeys(
            [
                str(Path(__file__).absolute().parents[2]),
                *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
            ]
        )
    )
    bound = "all" if bind_cores else ""
    launch = Launch(
        (Host("localhost", tuple(range(ranks)), True),),
        "call",
        (str(shipped),),
        bind=bound,
        env={**threads(ranks, cores(), bound), "PYTHONPATH": path, **env},
    )
    printers: dict[tuple[int | str, int], Printer] = {}

    def show(rank: int | str, fd: int, data: bytes) -> None:
        printers.setdefault((rank, fd), Printer(f"[{rank}] ", fd)).write(data)

    try:
        with Driver(launch, sink=show, pass_fds=[shipped, *results]) as driver:
            try:
                driver.connect()
                driver.start()
                failures = driver.wait()
            except KeyboardInterrupt:
                driver.stop(2.0)
                driver.wait()
                raise
    finally:
        for printer in printers.values():
            printer.finish()
    if failures:
        first = first_failure(failures)
        raise LaunchError(f"{first.headline()}; the others were ended\n\n{first.traceback.rstrip()}".rstrip())


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int) -> bytes:
    """All of a memfd; its offset, which every holder shares, stays."""
    parts, at = [], 0
    while got := os.pread(fd, 1 << 24, at):
        parts.append(got)
        at += len(got)
    return b"".join(parts)


# ---- packing: here ---------------------------------------------------------------------------------------------------
def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    packer = _Packer(sys.modules["__main__"].__dict__)
    call = packer.pickled((function, args, kwargs), "the function or its arguments")
    return {"path": list(sys.path), "items": packer.items, "call": call}


class _Packer:
    """Collects what the ranks' __main__ must have: items are ("import", name, module), ("submodule", its name, which no
    global has), ("source", name, text, filename, first line, compile flags, all lines of the file), ("value", name,
    pickle), ("absent", name, why it can't be sent: an error only for who uses it)."""

    def __init__(self, main: dict[str, Any]) -> None:
        self.main = main
        self.items: list[tuple[Any, ...]] = []
        self._seen: set[str] = set()

    def pickled(self, value: Any, what: str) -> bytes:
        out = io.BytesIO()
        try:
            _Pickler(out, self).dump(value)
        except ArgumentError:
            raise
        except Exception as exc:  # pickle raises whatever the object's own methods raise
            raise ArgumentError(
                f"{what} can't be sent to the ranks: {type(exc).__name__}: {exc}. Make it inside the function, on each"
                " rank"
            ) from exc
        return out.getvalue()

    def need_all(self, code: types.CodeType) -> None:
        """Adds what `code` looks up globally. Of modules also the submodules that it may read: after `import a.b` the
        global is `a`, whose own import need not bring `b`."""
        names = _names(code)
        for name in _globals(code):
            self.need(name)
            if isinstance(module := self.main.get(name), types.ModuleType):
                prefix = module.__name__ + "."
                loaded = [n for n in list(sys.modules) if n.startswith(prefix) and n not in self._seen]
                found = [n for n in loaded if names.issuperset(n.removeprefix(prefix).split("."))]
                self.items += [("submodule", n) for n in sorted(found)]
                self._seen.update(found)

    def need(self, name: str) -> None:
        """Adds the global `name` and all it needs, once."""
        if name in self._seen or name not in self.main:
            return
        self._seen.add(name)
        value = self.main[name]
        if isinstance(value, types.ModuleType):
            self.items.append(("import", name, value.__name__))
        elif (definition := _definition(name, value)) is not None:
            self.need_all(_compiled(*definition[2:6]))
            self.items.append(definition)
        else:
            try:
                self.items.append(
                    ("value", name, self.pickled(value, f"the variable {name!r} ({type(value).__name__})"))
                )
            except ArgumentError as exc:
                self.items.append(("absent", name, str(exc)))


def _definition(name: str, value: Any) -> tuple[Any, ...] | None:
    """The item of a function or class that the notebook defines under this name, decorators included; None for anything
    else, and where no source is kept."""
    if getattr(value, "__module__", None) != "__main__" or getattr(value, "__name__", None) != name:
        return None
    if not isinstance(value, (types.FunctionType, type)) and not hasattr(value, "__wrapped__"):
        return None
    try:
        if isinstance(value, type):
            text, filename, first = _class_source(value)
        else:
            lines, first = inspect.getsourcelines(value)
            text, filename = (
                textwrap.dedent("".join(lines)),
                inspect.getsourcefile(inspect.unwrap(value)) or "<notebook>",
            )
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree.body[0], (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or tree.body[0].name != name:
        return None
    return "source", name, text, filename, max(first, 1), _flags(value), linecache.getlines(filename)


def _class_source(kind: type) -> tuple[str, str, int]:
    """Text, file and first line of a class; inspect knows only those of modules with a file. The cell is that of one of
    its methods, else the last one with a class of this name. Raises OSError if there is none."""
    methods = [inspect.unwrap(v) for v in vars(kind).values() if callable(v)]
    files = [
        m.__code__.co_filename
        for m in methods
        if isinstance(m, types.FunctionType) and m.__qualname__.startswith(kind.__qualname__ + ".")
    ]
    for filename in dict.fromkeys([*files, *_cells()]):
        lines = linecache.getlines(filename)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
        if found:
            first = min([found[-1].lineno, *(d.lineno for d in found[-1].decorator_list)])
            return textwrap.dedent("".join(lines[first - 1 : found[-1].end_lineno])), filename, first
    raise OSError(f"no source of {kind.__name__}")


def _cells() -> list[str]:
    """Names under which linecache has what was typed, the last first: "<ipython-input-...>", "/tmp/ipykernel_1/2.py",
    and the script if there is one."""
    names = [str(name) for name in linecache.cache if str(name).startswith("<") or "ipykernel" in str(name)]
    script = getattr(sys.modules["__main__"], "__file__", None)
    return [*reversed(names), *([script] if script else [])]


def _flags(value: Any) -> int:
    """Of `from __future__ import annotations`, if the definition was compiled under it."""
    flag = __future__.annotations.compiler_flag
    functions = vars(value).values() if isinstance(value, type) else [inspect.unwrap(value)]
    return flag if any(isinstance(f, types.FunctionType) and f.__code__.co_flags & flag for f in functions) else 0


def _compiled(text: str, filename: str, first: int, flags: int) -> types.CodeType:
    """Code of a definition, at its own lines of its cell."""
    tree = ast.increment_lineno(ast.parse(text), first - 1)
    code: types.CodeType = compile(tree, filename, "exec", flags=flags, dont_inherit=True)
    return code


def _globals(code: types.CodeType) -> list[str]:
    """Names that a code object looks up globally, its nested functions included."""
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return list(
        dict.fromkeys([*own, *(n for c in code.co_consts if isinstance(c, types.CodeType) for n in _globals(c))])
    )


def _names(code: types.CodeType) -> set[str]:
    """All names of globals and attributes in a code object, its nested functions included."""
    return {*code.co_names, *(n for c in code.co_consts if isinstance(c, types.CodeType) for n in _names(c))}


def _attribute(main: Mapping[str, Any], path: str) -> Any:
    """main["Net"].Inner of "Net.Inner"; None if there is none."""
    first, *rest = path.split(".")
    value = main.get(first)
    for name in rest:
        value = getattr(value, name, None)
    return value


class _Pickler(pickle.Pickler):
    """As pickle, but what __main__ defines goes along, and modules go by name."""

    def __init__(self, out: io.BytesIO, packer: _Packer) -> None:
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self._packer = packer

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if not isinstance(obj, (types.FunctionType, type)) and not hasattr(obj, "__wrapped__"):
            return NotImplemented
        if getattr(obj, "__module__", None) != "__main__":
            # A lambda or nested function of a file: pickle can't.
            local = isinstance(obj, types.FunctionType) and "<" in obj.__qualname__
            return self._by_code(obj) if local else NotImplemented
        main, root = self._packer.main, obj.__qualname__.partition(".")[0]
        if _attribute(main, obj.__qualname__) is obj and _definition(root, main.get(root)) is not None:
            self._packer.need(root)
            return _from_main, (obj.__qualname__,)
        if isinstance(obj, types.FunctionType):
            return self._by_code(obj)
        raise ArgumentError(
            f"{obj.__qualname__!r} can't be sent to the ranks: it has no source (a plain prompt keeps none before"
            " Python 3.13), or is not defined at the top level of a cell. Put it into a file and import it, or use"
            " IPython or Jupyter"
        )

    def _by_code(self, obj: types.FunctionType) -> Any:
        """A lambda, a nested function, one typed at a prompt. Its globals are those of the ranks' __main__, or of its
        module."""
        module = obj.__module__
        if module == "__main__":
            self._packer.need_all(obj.__code__)
        cells = tuple(c.cell_contents for c in obj.__closure__ or ())
        return _make_function, (
            marshal.dumps(obj.__code__),
            module,
            obj.__name__,
            obj.__defaults__,
            obj.__kwdefaults__,
            cells,
        )


# ---- unpacking: on the ranks -----------------------------------------------------------------------------------------
def _from_main(path: str) -> Any:
    found = _attribute(sys.modules["__main__"].__dict__, path)
    if found is None:
        raise NameError(f"name {path!r} is not defined", name=path)
    return found


def _make_function(
    code: bytes,
    module: str,
    name: str,
    defaults: tuple[Any, ...] | None,
    kwdefaults: dict[str, Any] | None,
    cells: tuple[Any, ...],
) -> types.FunctionType:
    made = types.FunctionType(
        marshal.loads(code),
        importlib.import_module(module).__dict__,
        name,
        defaults,
        tuple(types.CellType(c) for c in cells),
    )
    made.__kwdefaults__ = kwdefaults
    return made


def _put(main: dict[str, Any], item: tuple[Any, ...]) -> None:
    """One item into the ranks' __main__."""
    kind, name, *rest = item
    if kind == "import":
        main[name] = importlib.import_module(rest[0])
    elif kind == "submodule":
        with contextlib.suppress(ImportError):  # one that is made, or that is not what is meant: who reads it tells
            importlib.import_module(name)
    elif kind == "value":
        main[name] = pickle.loads(rest[0])
    elif kind == "source":
        text, filename, first, flags, lines = rest
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)  # for tracebacks and inspect
        exec(_compiled(text, filename, first, flags), main)


def _unpack(main: dict[str, Any], items: list[tuple[Any, ...]]) -> None:
    """All items; one that needs a later one (a global that is made of a class that uses it) is tried again after it."""
    waiting = [item for item in items if item[0] != "absent"]
    while waiting:
        again, error = [], None
        for item in waiting:
            try:
                _put(main, item)
            except NameError as exc:
                again.append(item)
                error = exc
        if error is not None and len(again) == len(waiting):
            raise error
        waiting = again


def run_payload(fd: int) -> None:
    """What a rank does (launch/rank.py): calls the function and leaves its result."""
    payload = pickle.loads(_read(fd))
    sys.path[:] = payload["path"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    absent = {item[1]: item[2] for item in payload["items"] if item[0] == "absent"}
    try:
        _unpack(main.__dict__, payload["items"])
        function, args, kwargs = pickle.loads(payload["call"])
        result = function(*args, **kwargs)
    except NameError as exc:
        if exc.name in absent:
            raise ArgumentError(absent[exc.name]) from exc
        raise
    _leave(payload["results"][int(os.environ["RANK"])], result)


def _leave(fd: int, result: Any) -> None:
    import torch.distributed as dist

    try:
        data = pickle.dumps(result)
    except Exception as exc:  # as above
        raise ArgumentError(
            f"the result ({type(result).__name__}) can't be sent back to the notebook: {type(exc).__name__}: {exc}."
            " Return numbers, tensors or state_dict()s, or save it in a checkpoint"
        ) from exc
    _write(fd, data)
    if dist.is_initialized():
        dist.destroy_process_group()
