"""Finds `deepspeed` and its submodules (from the table in names.py) and the distribution of that name; no files are
involved.

A module made here resolves its names when they are first asked for. Three kinds of names are told apart: what deepc
has; what DeepSpeed has and deepc has not (a stand-in that imports, and raises UnsupportedError when it is used);
anything else (an error that is both an UnsupportedError and the AttributeError or ImportError that Python expects, so
that hasattr and `except ImportError` work).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.foreign import patches
from ..errors import DeepcError, UnsupportedError
from ..zero.parameters import clipping
from . import hf, names
from .runtime import parameters

logger = logging.getLogger("deepc")


class ShadowedError(DeepcError, ImportError):
    """The name `deepspeed` is taken in this process."""


class UnknownNameError(UnsupportedError, AttributeError):
    """A module of the compatibility layer has no such name."""


class UnknownModuleError(UnsupportedError, ModuleNotFoundError):
    """The compatibility layer has no such module."""


# ---- what deepc has not ----------------------------------------------------------------------------------------------
class _Lacking(type):
    """Class of stand-ins: they can be imported, compared, subclassed (a file may define a pipeline beside the model
    that is used) and used in isinstance (nothing is an instance); anything else raises, an instance of a subclass as
    well."""

    def _refuse(cls) -> None:
        raise UnsupportedError(type.__getattribute__(cls, "_deepc_why"))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls._refuse()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._refuse()

    def __repr__(cls) -> str:
        return f"<{cls.__module__}.{cls.__qualname__}: not in deepc>"


def lacking(module: str, name: str, why: str) -> type:
    """A stand-in for `module.name`; its use raises UnsupportedError with `why`."""
    return _Lacking(name, (), {"__module__": module, "_deepc_why": f"{module}.{name} does not exist in deepc: {why}"})


# ---- modules ---------------------------------------------------------------------------------------------------------
class CompatModule(types.ModuleType):
    """A module of the table. Values are resolved at first use and stay (they may be replaced, as in any module)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in names.table(self.__name__):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = self._resolve(name)
        self.__dict__[name] = value
        return value

    def _resolve(self, name: str) -> Any:
        row = names.table(self.__name__)
        if name in row:
            return row[name].load()
        full = f"{self.__name__}.{name}"
        if names.has_module(full):
            return importlib.import_module(full)
        why = names.why_lacking(full)
        if why is not None:
            return lacking(self.__name__, name, why)
        raise UnknownNameError(
            f"{full} is not a name that deepc knows of DeepSpeed's {names.VERSION}; docs/compat.md lists what there is."
            " If your script needs it, please report it"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names.table(self.__name__), *names.submodules(self.__name__)})


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        same = names.alias_of(spec.name)
        if same is not None:  # a second name of a module that is there
            module = importlib.import_module(same)
            self._spec = module.__spec__
            return module
        target = names.REAL_MODULES.get(spec.name)
        if target is not None:
            return _ReExport(spec.name, importlib.import_module(target))
        return CompatModule(spec.name, names.doc(spec.name))

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None and names.alias_of(module.__spec__.name) is not None:
            module.__spec__ = self._spec
        if isinstance(module, _ReExport):
            return
        module.__dict__["__all__"] = sorted(n for n in names.table(module.__name__) if not n.startswith("_"))

    def get_source(self, name: str) -> None:
        """There is no source: a line of a traceback does not come from here."""
        return None

    def get_code(self, name: str) -> types.CodeType | None:
        """For `python -m` and runpy: a program that calls the module's main()."""
        if "main" not in names.table(name) and name not in names.REAL_MODULES:
            return None
        return compile(
            f"import sys, importlib\nsys.exit(importlib.import_module({name!r}).main())", f"<{name}>", "exec"
        )


class _ReExport(CompatModule):
    """A module all of whose names are those of one of deepc's, and set there: who reads them is there."""

    def __init__(self, name: str, target: types.ModuleType) -> None:
        super().__init__(name, target.__doc__)
        self.__dict__.update(_target=target, _before={})  # what a name was before it was set here

    def __getattr__(self, name: str) -> Any:
        target = self.__dict__["_target"]
        if name == "__all__":
            return [n for n in vars(target) if not n.startswith("_")]
        if name in vars(target):
            return vars(target)[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        target = self.__dict__["_target"]
        submodule = sys.modules.get(f"{self.__name__}.{name}") is value
        if name in vars(target) and not name.startswith("__") and not submodule:
            self.__dict__["_before"].setdefault(name, vars(target)[name])
            setattr(target, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """What was set here goes (pytest's monkeypatch ends so), and the name is what it was."""
        if name in self.__dict__["_before"]:
            setattr(self.__dict__["_target"], name, self.__dict__["_before"].pop(name))
        else:
            super().__delattr__(name)


def _only_asks(finding: types.FrameType | None) -> bool:
    """Whether importlib.util.find_spec asks the finders, which wants to know whether a module is there, and not an
    import, which wants to know why it is not. finding: importlib's frame that asks them one by one."""
    asks = finding.f_back if finding is not None else None
    return asks is not None and asks.f_globals.get("__name__") == "importlib.util"


class _Finder(importlib.abc.MetaPathFinder):
    """On sys.meta_path while the compatibility layer is installed: modules and, for importlib.metadata, the
    distribution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "deepspeed" and not fullname.startswith("deepspeed."):
            return hf.find_spec(fullname, path)
        if not names.has_module(fullname):
            if _only_asks(sys._getframe(1)):
                return None
            why = names.why_lacking(fullname)
            # Without name=fullname: Python would replace the message in `from deepspeed import x` by its own.
            raise UnknownModuleError(
                f"{fullname} does not exist in deepc"
                + (
                    f": {why}"
                    if why
                    else (
                        " (the `deepspeed` of this process is deepc's; docs/compat.md lists what it has of DeepSpeed"
                        f" {names.VERSION})"
                    )
                )
            )
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)
        spec.origin = "deepc.compat"
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower() == "deepspeed":
            yield _Distribution()

    def invalidate_caches(self) -> None:
        pass


class _Distribution(importlib.metadata.Distribution):
    """Metadata of a distribution `deepspeed` of the version whose behaviour deepc matches."""

    _FILES = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {names.VERSION}\nSummary: deepc under the name of"
            " DeepSpeed (deepc.compat.deepspeed)\n"
        ),
        "top_level.txt": "deepspeed\n",
        "INSTALLER": "deepc\n",
        "RECORD": "",
    }

    def read_text(self, filename: str) -> str | None:
        return self._FILES.get(filename)

    def locate_file(self, path: Any) -> Any:
        from pathlib import Path

        return Path(__file__).parent / path


_finder = _Finder()


def is_installed() -> bool:
    return _finder in sys.meta_path


hf.ask(is_installed)


def install() -> None:
    """Makes `import deepspeed` give deepc in this process. Does nothing if it does already. Raises ShadowedError if a
    real DeepSpeed (or what detects one too early) has been imported."""
    if is_installed():
        return
    taken = sys.modules.get("deepspeed")
    if taken is not None and not isinstance(taken, CompatModule):
        raise ShadowedError(
            "deepspeed was imported before deepc.compat.deepspeed, from"
            f" {getattr(taken, '__file__', None) or 'an unknown place'}: two libraries can't share the name in one"
            " process. Import deepc.compat.deepspeed first, at the top of the script, or start it with `deepc run"
            " --as-deepspeed`"
        )
    early = sys.modules.get("transformers.integrations.deepspeed")
    if early is not None and getattr(early, "DeepSpeedConfig", None) is object:
        raise ShadowedError(
            "transformers.integrations.deepspeed was imported before deepc.compat.deepspeed and has found no DeepSpeed."
            " Import deepc.compat.deepspeed first, at the top of the script, or start it with `deepc run"
            " --as-deepspeed`"
        )
    other = importlib.machinery.PathFinder.find_spec("deepspeed")
    sys.meta_path.insert(0, _finder)
    patches.applied("import-deepspeed")
    parameters.describe_tensors(True)
    clipping.watch(True)
    importlib.invalidate_caches()
    hf.teach_loaded()
    if other is not None and os.environ.get("RANK", "0") == "0":
        logger.info(
            "`import deepspeed` gives deepc in this process; the DeepSpeed in %s is not used",
            os.path.dirname(other.origin or "") or other.origin,
        )


def uninstall() -> None:
    """Takes it back: the modules named deepspeed are forgotten, and a real DeepSpeed can be imported. What was imported
    from them keeps working."""
    if not is_installed():
        return
    sys.meta_path.remove(_finder)
    patches.undone("import-deepspeed")
    parameters.describe_tensors(False)
    clipping.watch(False)
    for name in [n for n in sys.modules if n == "deepspeed" or n.startswith("deepspeed.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
