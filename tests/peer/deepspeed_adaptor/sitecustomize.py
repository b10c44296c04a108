"""Loaded by every Python process of a run of tests/peer/deepspeed_tests.py: `import deepspeed` is deepc there, and what
deepc has not of DeepSpeed imports as a stand-in.

A suite imports its helpers' names at the top of a file, the private ones with the public ones, so that one missing name
takes all of the file's tests. Here a missing name imports, and raises NotInDeepc when it is used: only the tests that
use it fail, and say of what."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import deepc.compat.deepspeed  # noqa: F401
from deepc.compat import finder


class NotInDeepc(NotImplementedError):
    """A test has used a name of DeepSpeed that deepc does not have."""


class _Stub(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_peer_stub" not in cls.__dict__:  # a subclass, of the suite
            raise NotInDeepc(f"{cls.__mro__[1].__module__}.{cls.__mro__[1].__qualname__}")
        raise NotInDeepc(f"{cls.__module__}.{cls.__qualname__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "NAME" and cls.__qualname__.endswith("Builder"):
            return cls.__qualname__
        raise NotInDeepc(f"{cls.__module__}.{cls.__qualname__}.{name}")


CONSTANTS = {"MIN_SWAPPABLE_BYTES": 2**20}  # private ones that the suite sizes its models by


PRELOADED = [  # what every worker would import for itself; what is not installed is passed over
    "torch",
    "deepc.compat.runtime.engine",
    "deepc.engine.assembly",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "unit.common",
    "unit.simple_model",
]


def stub(module: str, name: str) -> Any:
    if name in CONSTANTS:
        return CONSTANTS[name]
    return _Stub(name, (), {"__module__": module, "_peer_stub": True})


class _StubModule(finder.CompatModule):
    """A module that deepc has not."""

    def _resolve(self, name: str) -> Any:
        return stub(self.__name__, name)


class _StubLoader(finder._Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return _StubModule(spec.name)


class _Finder(importlib.abc.MetaPathFinder):
    """Before deepc's own: modules that it would refuse."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        from deepc.compat import names

        if not fullname.startswith("deepspeed.") or names.has_module(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, _StubLoader(), is_package=True)


_own = finder.CompatModule._resolve


def _resolve(module: finder.CompatModule, name: str) -> Any:
    if module.__name__ == "deepspeed.ops" and name == "__compatible_ops__":
        return _Ops()
    try:
        found = _own(module, name)
    except finder.UnknownNameError:
        return stub(module.__name__, name)
    return stub(module.__name__, name) if isinstance(found, finder._Lacking) else found


class _Ops(dict):  # type: ignore[type-arg]
    """deepspeed.ops.__compatible_ops__: what DeepSpeed would have compiled for a CPU and deepc has."""

    def __getitem__(self, name: str) -> bool:
        return name in (
            "CPUAdamBuilder",
            "FusedAdamBuilder",
            "CPUAdagradBuilder",
            "CPULionBuilder",
            "FusedLionBuilder",
            "async_io",
        )

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def mend(common: dict[str, Any]) -> None:
    """For unit/common.py, in the process of pytest and in its workers: a worker's pytest.fail reaches the test instead
    of killing the worker, and a test that hangs fails by itself, not the session with it. Workers are forked off a
    process that has imported what every test does."""
    from deepc.compat.runtime.engine import DeepSpeedEngine
    from deepc.zero.parameters import owners
    from deepc.zero.step.update import ShardedOptimizer

    def masters(self: Any) -> list[Any]:
        state = self._state
        return [state.master] if state.master is not None else [p.data for p in state.trained]

    def norm(self: Any) -> Any:
        return next(e for e in owners.alive() if e.optimizer is self).get_global_grad_norm()

    # Private attributes that the suite's helper for checkpoints reads of every model: the second is only watched, for
    # not being called, and of the third's values those before and after are compared. The norm is
    # engine.get_global_grad_norm().
    ShardedOptimizer.fp32_partitioned_groups_flat = property(masters)  # type: ignore[attr-defined]
    ShardedOptimizer._global_grad_norm = property(norm)  # type: ignore[attr-defined]
    DeepSpeedEngine.sparse_tensor_module_names = frozenset()  # type: ignore[attr-defined]
    DeepSpeedEngine._get_optimizer_ckpt_name = None  # type: ignore[attr-defined]
    execution, mp, pytest = common["DistributedExec"], common["mp"], common["pytest"]
    run = execution._dist_run

    def stack_of(pid: int) -> Path:
        return Path(f"{os.environ['DEEPC_PEER_RESULTS']}.{pid}.stack")

    def _dist_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        gc.freeze()  # some tests collect after each step, and would look at all that was imported
        faulthandler.register(signal.SIGUSR1, stack_of(os.getpid()).open("w"), all_threads=True)
        try:
            return run(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException as exc:  # a worker of multiprocessing.Pool ends by it, and its task never does
            raise AssertionError(f"{type(exc).__name__}: {exc}") from None

    def stacks(pool: Any) -> str:
        """Where each worker is."""
        for worker in pool._pool:
            if stack_of(worker.pid).exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(1)
        found = {w.pid: stack_of(w.pid) for w in pool._pool}
        return "\n".join(
            f"worker {pid}: {at.read_text() if at.exists() else 'has not come to the test yet: it still starts'}"
            for pid, at in found.items()
        )

    def launch(self: Any, num_procs: int, init_method: str) -> None:
        pool = mp.Pool(processes=num_procs)
        try:
            port = common["get_master_port"]()
            args = [(rank, num_procs, port, init_method) for rank in range(num_procs)]
            told = pool.starmap_async(self._dist_run, args).get(self.exec_timeout)
        except mp.TimeoutError:
            pytest.fail(f"hanged: no end after {self.exec_timeout} s\n{stacks(pool)}")
        finally:
            pool.terminate()
            pool.join()
        if any(told):
            pytest.skip(next(filter(None, told)))

    mp.set_forkserver_preload(PRELOADED)
    execution._dist_run, execution._launch_daemonic_procs = _dist_run, launch
    execution.reuse_dist_env = False


finder.CompatModule._resolve = _resolve  # type: ignore[method-assign]
sys.meta_path.insert(0, _Finder())
ops = importlib.import_module("deepspeed.ops")
ops.__dict__["__compatible_ops__"] = _Ops()
# The suite's workers are told of their node's size as DeepSpeed's launcher does; the process of pytest has no launcher.
os.environ.setdefault("LOCAL_SIZE", "4")
