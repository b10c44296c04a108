"""deepc.notebook.launch: what a notebook's cells define reaches the ranks, results and tracebacks come back, nothing is
left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time  # noqa: F401
from pathlib import Path

import pytest
import ranks
from programs import Program
from test_launch import Run, _runs, no_run_outlives_its_test, wait_for  # noqa: F401

# What a notebook does with cells: each is compiled under a name of its own, whose source linecache has, and runs in
# __main__.
NOTEBOOK = """
import linecache, sys
def cell(text, number=[0]):
    number[0] += 1
    name = f"<cell {{number[0]}}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), sys.modules["__main__"].__dict__)
for text in {cells!r}:
    cell(text)
"""


class Notebook(Run):
    """A process that runs cells, found by its marker as a Run is."""

    def __init__(self, folder: Path, *cells: str) -> None:
        self.marker = f"DEEPC_TEST_MARK={os.urandom(8).hex()}"
        name, value = self.marker.split("=")
        env = {**os.environ, name: value, "CUDA_VISIBLE_DEVICES": "", "DEEPC_LOG_LEVEL": "WARNING"}
        code = NOTEBOOK.format(cells=[textwrap.dedent(c).lstrip("\n") for c in cells])
        _runs.append(self)
        if not ranks.EXECUTES:
            self.process = Program(("-c", code), cwd=folder, env=env)
            return
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # what started pytest in the background may have it ignored, and a Python that finds it so leaves it so
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


SETUP = """
    from __future__ import annotations
    import dataclasses, functools, os, sys
    import xml.etree.ElementTree  # which binds xml alone
    import torch
    from torch import nn
    import deepc

    WIDTH = 4
    unsendable = (i for i in range(3))
"""

ERROR = """
    def error(*args, **options):
        try:
            deepc.notebook.launch(*args, **options)
        except deepc.DeepcError as exc:
            return f"{type(exc).__name__}: {exc}"
"""

DEFINITIONS = """
    @dataclasses.dataclass
    class Options:
        lr: float = 0.5
        note: "Unknown" = None

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

    class Net(Base):
        def forward(self, x):
            return self.layer(x).sum() * twice(1)

    def twice(x):
        return x + (once(x) if x else 0)

    def once(x):
        return x if x < 5 else twice(x)

    @functools.lru_cache
    def cached(x):
        return x * options.lr

    options = Options(lr=0.25)
    known = Net()
"""


def test_cells_reach_the_ranks(tmp_path):
    """Classes with bases and decorators, functions that call each other, values of a notebook's class, lambdas,
    training with the engine."""
    work = """
        def train(steps, *, scale):
            torch.manual_seed(0)
            torch.set_num_threads(1)
            config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": options.lr}}, "zero_optimization": {"stage": 2}}
            engine, *_ = deepc.initialize(model=Net(), config=config)
            losses = []
            for _ in range(steps):
                loss = engine(torch.full((1, WIDTH), float(engine.global_rank + 1)))
                engine.backward(loss)
                engine.step()
                losses.append(round(loss.item(), 4))
            print("done with", cached(8))
            assert xml.etree.ElementTree.fromstring("<a/>").tag == "a"
            return os.environ["WORLD_SIZE"], len(losses), engine.global_rank, scale(3), dataclasses.replace(options, note=str(type(known).__mro__[1].__name__)), known.state_dict()
    """  # noqa: E501
    use = """
        add = 10
        got = deepc.notebook.launch(train, (3,), ranks=2, kwargs={"scale": lambda x: x * WIDTH + add})
        for rank, (world, steps, number, scaled, chosen, state) in enumerate(got):
            assert (world, steps, number, scaled) == ("2", 3, rank, 22), got
            assert chosen == Options(0.25, "Base")
            assert all(torch.equal(a, b) for a, b in zip(state.values(), known.state_dict().values()))
        print("all is well")
    """
    notebook = Notebook(tmp_path, SETUP, DEFINITIONS, work, use)
    code, out, err = notebook.finish()
    assert code == 0, err
    assert "all is well" in out and {"[0] done with 2.0", "[1] done with 2.0"} <= set(out.splitlines())
    assert notebook.wait_gone(20) == set()


@pytest.mark.full
def test_errors_come_back_with_their_place(tmp_path):
    cells = """
        def helper(x):
            raise ValueError(f"boom {x}")

        def fails(x):
            if os.environ["RANK"] == "1":
                helper(x)
            import time
            time.sleep(1000)
    """
    use = """
        text = error(fails, (7,), ranks=2)
        assert text.startswith("LaunchError: rank 1 (pid ") and "raised ValueError; the others were ended" in text, text
        assert text.endswith("ValueError: boom 7") and 'File "<cell 3>", line 2, in helper' in text and 'raise ValueError(f"boom {x}")' in text, text
        assert "notebook.py" not in text and "rank.py" not in text, text

        text = error(print, (unsendable,), ranks=1)
        assert text.startswith("ArgumentError: the function or its arguments can't be sent"), text
        assert error(print, ranks=0).startswith("ArgumentError: ranks must be") and error(3).startswith("ArgumentError: launch needs a function")
        print("all is well")
    """  # noqa: E501
    notebook = Notebook(tmp_path, SETUP, ERROR, cells, use)
    code, out, err = notebook.finish()
    assert code == 0 and "all is well" in out, err
    assert notebook.wait_gone(20) == set()


@pytest.mark.full
def test_what_can_t_be_sent_is_named(tmp_path):
    use = """
        text = error(lambda: list(unsendable), ranks=1)
        assert "LaunchError" in text and "the variable 'unsendable' (generator) can't be sent to the ranks" in text, text
        text = error(lambda: os._exit(9), ranks=1)
        assert "ended with exit code 9" in text, text
        text = error(lambda: sys.exit(0), ranks=2)
        assert "LaunchError: rank 0, 1 ended with exit code 0 before the function returned" in text, text
        text = error(lambda: (i for i in [1]), ranks=1)
        assert "the result (generator) can't be sent back" in text, text
        print("all is well")
    """  # noqa: E501
    notebook = Notebook(tmp_path, SETUP, ERROR, use)
    code, out, err = notebook.finish()
    assert code == 0 and "all is well" in out, err


@pytest.mark.full
def test_an_interrupt_ends_all_ranks(tmp_path):
    cells = """
        def waits():
            import pathlib, subprocess, sys, time
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
            pathlib.Path("ready" + os.environ["RANK"]).write_text("")
            time.sleep(1000)
        other = __import__("subprocess").Popen(["sleep", "1000"])     # the notebook's own
        try:
            deepc.notebook.launch(waits, ranks=2)
        except KeyboardInterrupt:
            print("interrupted", other.poll())
            other.kill()
    """
    notebook = Notebook(tmp_path, SETUP, cells)
    wait_for([tmp_path / "ready0", tmp_path / "ready1"], notebook)
    notebook.process.send_signal(signal.SIGINT)
    code, out, err = notebook.finish()
    assert code == 0 and "interrupted None" in out, err
    assert notebook.wait_gone(20) == set()


@pytest.mark.full
def test_a_kernel_that_is_killed_leaves_nothing(tmp_path):
    cells = """
        def waits():
            import pathlib, time
            pathlib.Path("ready" + os.environ["RANK"]).write_text("")
            time.sleep(1000)
        deepc.notebook.launch(waits, ranks=2)
    """
    notebook = Notebook(tmp_path, SETUP, cells)
    wait_for([tmp_path / "ready0", tmp_path / "ready1"], notebook)
    notebook.process.kill()
    notebook.finish()
    assert notebook.wait_gone(20) == set()


@pytest.mark.full
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the prompt keeps sources since Python 3.13")
def test_a_prompt_without_sources_sends_functions_and_refuses_classes(tmp_path):
    text = """
        import deepc, torch
        offset = 5
        def inner(x): return x + offset

        def outer(x): return inner(x) * torch.ones(1).item()

        class Plain: pass

        print("got", deepc.notebook.launch(outer, (2,), ranks=1))
        deepc.notebook.launch(lambda: Plain(), ranks=1)
    """
    done = subprocess.run(
        [sys.executable, "-i", "-c", ""],
        input=textwrap.dedent(text),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "DEEPC_LOG_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert "got [7.0]" in done.stdout, done.stderr
    assert "'Plain' can't be sent to the ranks" in done.stderr and "Put it into a file" in done.stderr
