"""How an engine is made and unmade: what a failure leaves behind, arguments that nobody reads, events, messages."""

from __future__ import annotations

import logging
import os
import time

import pytest
import tiny
import torch
import torch.distributed as dist
from programs import run_python
from ranks import run_ranks


# ---- a failed initialize ---------------------------------------------------------------------------------------------
def fails_again_and_again(rank, world):
    import deepc

    def refuse(_):
        raise RuntimeError("no schedule today")

    seen = []
    for _ in range(4):
        for failing in ({"lr_scheduler": refuse}, {"optimizer": refuse}):  # after and before the states are made
            model = tiny.make_model()
            with pytest.raises(RuntimeError, match="no schedule"):
                deepc.initialize(model=model, config=tiny.config(2, micro=2), **failing)
            assert all(type(p) is torch.nn.Parameter for p in model.parameters())
        with open("/proc/self/maps") as maps:
            shared = sum(" rw-s " in line for line in maps)
        seen.append((len(os.listdir("/proc/self/fd")), shared))
    model = tiny.make_model()  # and what has failed can be made
    with pytest.raises(RuntimeError, match="no schedule"):
        deepc.initialize(model=model, config=tiny.config(3, micro=2), lr_scheduler=refuse)
    engine, *_ = deepc.initialize(model=model, config=tiny.config(3, micro=2))
    engine.backward(engine(*tiny.make_batch(0, 2)))
    applied = engine.step().applied
    engine.destroy()
    engine.destroy()  # once more does nothing
    return seen, applied


def left_by_an_earlier_default_group(rank, world, folder):
    from deepc.comm import start
    from deepc.comm.groups import open_group

    def ranks_are(n, name):
        dist.init_process_group("deepc", init_method=f"file://{folder}/{name}", rank=n, world_size=world)
        if n == 1:
            time.sleep(0.5)  # the other one looks where it is
        return open_group(torch.device("cpu"), start.DEFAULT_TIMEOUT)

    left = ranks_are(rank, "first")
    dist.destroy_process_group()
    now = ranks_are(world - 1 - rank, "second")  # as another test, or another cell of a notebook
    got = now.gather_all(torch.tensor([rank], dtype=torch.uint8)).flatten().tolist()
    now.close()
    left.close()
    dist.destroy_process_group()
    return got


def test_an_engine_of_an_earlier_default_group_is_not_asked(tmp_path):
    """Whoever waits looks at the ranks by the groups that it has with them: not by one that numbers them otherwise."""
    assert run_ranks(left_by_an_earlier_default_group, 2, args=(str(tmp_path),), backend=None) == [[1, 0], [1, 0]]


def test_failed_initialize_leaves_nothing_open():
    for seen, applied in run_ranks(fails_again_and_again, 2, fresh=True):
        assert applied
        assert seen[1:] == seen[1:2] * 3, seen


# ---- a model that can't be written -----------------------------------------------------------------------------------
def writes_where_it_can_not(rank, world, path):
    from deepc.compat.runtime.engine import initialize
    from deepc.errors import CheckpointError

    engine, *_ = initialize(model=tiny.make_model(), config=tiny.config(0, micro=2))
    with pytest.raises(CheckpointError) as told:
        engine.save_16bit_model(path)  # a file is where the folder should be
    assert (rank == 0) == isinstance(told.value.__cause__, OSError) and (rank != 0 or path in str(told.value))
    engine.save_16bit_model(path + ".folder")
    engine.destroy()


def test_a_16bit_model_that_can_not_be_written_is_told_to_all_ranks(tmp_path):
    (tmp_path / "place").write_text("a file")
    run_ranks(writes_where_it_can_not, 2, args=(str(tmp_path / "place"),))
    assert (tmp_path / "place.folder" / "pytorch_model.bin").exists()


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_unknown_arguments_of_init_distributed_are_errors():
    import deepc

    for wrong in ({"time_out": 3}, {"world_sise": 4}, {"auto_mpi_discovery": True}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            deepc.init_distributed(**wrong)


def ports(rank, world):
    import deepc
    import torch.distributed as dist

    dist.destroy_process_group()
    os.environ.update(MASTER_PORT="29617")
    said = []
    for port in (29618, "29617", 0):
        with pytest.raises(deepc.DeepcError) as e:
            deepc.initialize(model=tiny.make_model(), config=tiny.config(0, micro=2), distributed_port=port)
        said.append(str(e.value))
    with pytest.raises(deepc.DeepcError) as e:
        deepc.initialize(model=tiny.make_model(), config=tiny.config(0, micro=2), dist_init_required=False)
    return [*said, str(e.value)]


def test_port_and_required_initialisation_act():
    (said,) = run_ranks(ports, 1, fresh=True)
    assert "29618" in said[0] and "MASTER_PORT=29617" in said[0]
    assert "'29617'" in said[1] and "distributed_port=0" in said[2]
    assert "dist_init_required=False" in said[3]


# ---- events ----------------------------------------------------------------------------------------------------------
def listens(rank, world, bare):
    import deepc
    from deepc.engine.events import Listener

    class Written(Listener):
        def __init__(self):
            self.lines, self.closed = [], 0

        def begin(self, name, now, what):
            self.lines.append(f"{name} (")

        def end(self, name, now, what):
            self.lines.append(f") {name}" + (" applied" if name == "step" and what is not None else ""))

        def close(self):
            self.closed += 1

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=tiny.config(1, micro=2, gas=2))
    mine = Written()
    engine.events.add(mine)
    for m in range(2):
        loss = engine(*tiny.make_batch(m, 2))
        loss.backward() if bare else engine.backward(loss)
        engine.step()
    methods = [n for n in vars(engine) if callable(getattr(type(engine), n, None))]
    engine.destroy()
    return mine.lines, mine.closed, methods


@pytest.mark.parametrize("bare", [False, True])
def test_events_tell_what_runs_and_nothing_is_wrapped(bare):
    once = ["forward (", ") forward", "backward (", "reduce (", ") reduce", ") backward"]
    parts = [f"{p} {n}" if p == ")" else f"{n} {p}" for n in ("gradient norm", "update", "publish") for p in "()"]
    want = [*once, "step (", ") step", *once, "step (", *parts, ") step applied"]
    for lines, closed, methods in run_ranks(listens, 2, args=(bare,)):
        assert lines == want and closed == 1 and methods == []


def test_an_exception_ends_what_began():
    import deepc
    from deepc.engine.events import Listener

    told = []

    class Tell(Listener):
        def begin(self, name, now, what):
            told.append((name, "begin"))

        def end(self, name, now, what):
            told.append((name, what))

    engine, *_ = deepc.initialize(model=torch.nn.Linear(2, 1), config={"train_batch_size": 1})
    engine.events.add(Tell())
    with pytest.raises(RuntimeError):
        engine(torch.ones(1, 3))
    with pytest.raises(deepc.DeepcError, match="without a backward"):
        engine.step()
    engine.destroy()
    assert told == [("forward", "begin"), ("forward", None), ("step", "begin"), ("step", None)]


# ---- messages --------------------------------------------------------------------------------------------------------
SAYS = """
import logging, sys
if "before" in sys.argv:
    logging.basicConfig(stream=sys.stdout, format="APP %(name)s %(message)s", level=logging.INFO)
import deepc
if "after" in sys.argv:
    logging.basicConfig(stream=sys.stdout, format="APP %(name)s %(message)s", level=logging.INFO)
logging.getLogger("deepc").info("hello")
logging.getLogger("deepc").debug("whispered")
"""


@pytest.mark.parametrize("configured", ["before", "after", "never"])
def test_an_application_that_configures_logging_has_the_say(configured):
    out = run_python("-c", SAYS, configured)
    assert out.returncode == 0, out.stderr
    if configured == "never":
        assert "deepc: hello\n" in out.stderr and out.stdout == ""
    else:
        assert out.stdout == "APP deepc hello\n" and "hello" not in out.stderr
    assert "whispered" not in out.stderr


def test_the_logger_hands_records_on():
    import deepc  # noqa: F401

    assert logging.getLogger("deepc").propagate
