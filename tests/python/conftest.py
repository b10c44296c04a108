"""For all Python tests: the GPU class, and no leftovers of the environment that started pytest."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
import ranks

# A launcher around pytest must not look like one around the tests.
for _name in (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
):
    os.environ.pop(_name, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of programs; see pytest_collection_finish


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Without collections of garbage, which walk all that is made here and find next to none: half of the time. pytest
    compiles a test file when it is first imported, and two workers would do so side by side: the second begins at the
    other end, and finds what the first has compiled when they meet."""
    gc.disable()
    try:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
        if worker[2:].isdigit() and int(worker[2:]) % 2 and all(map(os.path.isdir, session.config.args)):
            for file in sorted(Path(__file__).parent.glob("test_*.py"), reverse=True):
                with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection says why
                    importlib.import_module(file.stem)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, and so counted, where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    from gpus import gpu

    if not gpu.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A machine without a network has not what tests try deepc with: they are skipped there, and counted."""
    try:
        return (yield)
    except ModuleNotFoundError as exc:
        if exc.name in ranks.OPTIONAL:
            pytest.skip(str(exc))
        raise


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """In the full class: a test leaves the process as it was, for those that come after it in any order."""
    if not leftovers.LOOKED_FOR:
        yield
        return
    before = leftovers.state()
    yield
    assert not (left := leftovers.changed(before, leftovers.state())), f"the test has changed {', '.join(left)}"


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, _nothing_is_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are not of the GPU class run on the CPU, also where there is a GPU (initialize would take it)."""
    if request.node.get_closest_marker("gpu") is None:
        import torch
        from deepc import comm

        monkeypatch.setattr(comm, "default_device", lambda: torch.device("cpu"))


class _Anything:
    """Stands for every strategy of a hypothesis that is not installed: calls, attributes and operators give it
    again."""

    def __call__(self, *_: object, **__: object) -> _Anything:
        return self

    def __getattr__(self, _: str) -> _Anything:
        return self

    def __or__(self, _: object) -> _Anything:
        return self


def _without_hypothesis() -> None:
    """Files that import hypothesis can still be collected; its tests are skipped, one by one, and the others run."""
    module = types.ModuleType("hypothesis")

    def given(*_: object, **__: object):
        def wrap(test):
            @pytest.mark.skip(reason="hypothesis is not installed")
            def skipped() -> None: ...

            skipped.__name__, skipped.__doc__ = test.__name__, test.__doc__
            return skipped

        return wrap

    module.given = given
    module.settings = module.example = lambda *_, **__: lambda test: test
    module.strategies = module.assume = module.note = module.HealthCheck = _Anything()
    sys.modules["hypothesis"] = module


_HAS_HYPOTHESIS = importlib.util.find_spec("hypothesis") is not None
if not _HAS_HYPOTHESIS:
    _without_hypothesis()


def pytest_collection_finish() -> None:
    """While tests run nobody may think that hypothesis is there (torch looks). What has been imported and collected
    stays: collections of garbage need not walk it, nor copy its pages in forks. One thread: on small tensors the others
    only wait, turning (half of a test's CPU time, most of it beside other processes); who means threads asks."""
    if not _HAS_HYPOTHESIS:
        sys.modules.pop("hypothesis", None)
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failed test is named at once, with the end of what it says: who breaks a long run off, or whose run is broken
    off, has it."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        told = "\n".join(f"  {line}" for line in report.longreprtext.splitlines()[-30:])
        print(f"\nfailed: {report.nodeid} ({report.when})\n{told}", file=sys.__stderr__, flush=True)


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """deepc under the name deepspeed."""
    from deepc.compat import finder

    # another test of this process may have imported transformers before
    monkeypatch.delitem(sys.modules, "transformers.integrations.deepspeed", raising=False)
    if "deepspeed" in sys.modules and not finder.is_installed():
        pytest.skip("a real DeepSpeed is imported in this process")
    was = finder.is_installed()
    finder.install()
    yield importlib.import_module("deepspeed")
    if not was:
        finder.uninstall()
