"""deepspeed.runtime.pipe's topology and schedules against deepc's own mesh and schedules. DeepSpeed's unit tests of
them run under tests/peer/deepspeed_tests.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deepc.compat.runtime.pipe import schedule
from deepc.compat.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    _square,
)
from deepc.errors import ArgumentError, UnsupportedError
from deepc.plan.mesh import Mesh
from deepc.plan.schedule import actions
from ranks import run_ranks


def test_a_topology_counts_as_a_mesh():
    topology, mesh = PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=4), Mesh(pp=3, dp=4, tp=2)
    assert topology.world_size() == mesh.size and topology.get_dim("model") == 2 and topology.get_dim("else") == 0
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        assert topology.get_coord(rank) == (at.pp, at.dp, at.tp) == topology.ProcessCoord(at.pp, at.dp, at.tp)
        assert topology.get_rank(pipe=at.pp, data=at.dp, model=at.tp) == rank
    for axis, ours in (("pipe", "pp"), ("data", "dp"), ("model", "tp")):
        assert topology.get_axis_comm_lists(axis) == [list(g) for g in mesh.groups(ours)]
    assert topology.filter_match(pipe=2, model=1) == [17, 19, 21, 23] and topology.get_axis_list("data", 3)[-1] == 23
    assert topology.get_axis_comm_lists("else") == []
    assert topology.get_rank_repr(23) == "model_01" and topology.get_rank_repr(23, ("model",)) == "pipe_02-data_03"


def test_even_numbers_of_stages_and_copies():
    assert [(_square(n).get_dim("pipe"), _square(n).get_dim("data")) for n in (1, 2, 4, 8, 12)] == [
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 2),
        (6, 2),
    ]


def test_what_a_topology_has_not_is_an_error():
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    for wrong, text in (
        (lambda: topology.get_coord(4), "rank 4 is not from 0 to 3"),
        (lambda: topology.get_rank(pipe=0), r"get_rank\(pipe\) needs a coordinate for each"),
        (lambda: topology.get_rank(pipe=2, data=0), "pipe=2, data=0.* is outside"),
        (lambda: topology.get_axis_list("model", 0), "'model' is no axis"),
        (lambda: ProcessTopology(["a", "b"], [2]), "each axis has one size"),
        (lambda: ProcessTopology(["a"], [0]), "at least 1"),
        (lambda: schedule.TrainSchedule(4, 2, 2), "stage 2 of 2"),
        (lambda: schedule.InferenceSchedule(0, 2, 1), "0 micro-batches"),
    ):
        with pytest.raises(ArgumentError, match=text):
            wrong()


def computed(steps, stage):
    """The computations of a stage, as deepc writes them; micro-batches are counted, since buffers come round."""
    micro = {schedule.ForwardPass: 0, schedule.BackwardPass: 0}
    out = []
    for instruction in sum(steps, []):
        if (kind := type(instruction)) in micro:
            out.append((kind.__name__[0], stage, micro[kind]))
            micro[kind] += 1
    return out


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (3, 2), (4, 8), (5, 7)])
def test_train_schedule_is_1f1b(stages, micro_batches):
    """In its order, with every message sent once and a step before it is received, and no buffer used twice at a
    time."""
    made = [schedule.TrainSchedule(micro_batches, stages, s) for s in range(stages)]
    steps = [list(s) for s in made]
    for s in range(stages):
        assert computed(steps[s], s) == list(actions("1f1b", stages=stages, micro_batches=micro_batches, rank=s))
        assert len(steps[s]) == 2 * (micro_batches + stages - 1)
        assert [type(i) for i in steps[s][-1][-3:]] == [
            schedule.ReduceTiedGrads,
            schedule.ReduceGrads,
            schedule.OptimizerStep,
        ]
        alive = set()
        for instruction in sum(steps[s], []):
            if isinstance(instruction, schedule.ForwardPass):
                assert instruction.buffer_id not in alive and instruction.buffer_id < made[s].num_pipe_buffers()
                alive.add(instruction.buffer_id)
            elif isinstance(instruction, schedule.BackwardPass):
                alive.remove(instruction.buffer_id)
        assert not alive
    for s in range(stages - 1):
        for sent, received, source, target in (
            (schedule.SendActivation, schedule.RecvActivation, s, s + 1),
            (schedule.SendGrad, schedule.RecvGrad, s + 1, s),
        ):
            at = [
                [t for t, todo in enumerate(steps[x]) for i in todo if type(i) is kind]
                for x, kind in ((source, sent), (target, received))
            ]
            assert at[0] == at[1] and len(at[0]) == micro_batches


def test_accumulation_and_text():
    steps = list(schedule.DataParallelSchedule(2, 1, 0))
    assert str(steps[0]) == "[LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0), BackwardPass(buffer_id=0)]"
    assert str(steps[1][3:]) == "[ReduceGrads(), OptimizerStep()]"


def grid_of(rank: int, world: int):
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=world // 2))
    sums = []
    for group in (
        grid.get_pipe_parallel_group(),
        grid.get_data_parallel_group(),
        grid.get_model_parallel_group(),
        grid.get_slice_parallel_group(),
    ):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        sums.append(int(x))
    with pytest.raises(ArgumentError, match="6 ranks"):
        PipelineParallelGrid(PipeDataParallelTopology(num_pp=3, num_dp=2))
    return (
        (grid.get_stage_id(), grid.get_data_parallel_rank(), grid.get_model_parallel_rank()),
        (grid.is_first_stage, grid.is_last_stage),
        sums,
        (grid.stage_to_global(0), grid.stage_to_global(1), grid.stage_to_global(1, data=0)),
        grid.p2p_groups,
    )


def test_a_grid_of_two_stages():
    hops = [[0, 1], [1, 0]]
    assert run_ranks(grid_of, 2) == [
        ((0, 0, 0), (True, False), [1, 0, 1, 0], (0, 1, 1), hops),
        ((1, 0, 1), (False, True), [1, 1, 1, 1], (0, 1, 1), hops),
    ]


@pytest.mark.full
def test_a_grid_of_two_stages_and_two_copies():
    hops = [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert run_ranks(grid_of, 4) == [
        ((0, 0, 0), (True, False), [2, 1, 2, 0], (0, 2, 2), hops),
        ((0, 1, 0), (True, False), [4, 1, 4, 1], (1, 3, 2), hops),
        ((1, 0, 1), (False, True), [2, 5, 2, 2], (0, 2, 2), hops),
        ((1, 1, 1), (False, True), [4, 5, 4, 3], (1, 3, 2), hops),
    ]


class Widening(torch.utils.data.Dataset):
    """Samples that can be put together with their neighbours only."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((1 + i // 4, 2), float(i)), torch.zeros(1 + i // 4, 2)


def _in_order(rank, world):
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed

    seen = []
    last = torch.nn.Linear(2, 2)
    last.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    model = deepspeed.pipe.PipelineModule([torch.nn.Linear(2, 2), last], num_stages=2, loss_fn=torch.nn.MSELoss())
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "steps_per_print": None}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3}}
    engine, *_ = deepspeed.initialize(model=model, config=config, training_data=Widening())
    for keeps in (engine.no_sync, engine.coalesce_grad_reduction):
        with pytest.raises(UnsupportedError, match=r"of a pipeline: train_batch .* leave the with block out"), keeps():
            pass
    for _ in range(3):
        engine.train_batch()
    return seen


def test_training_data_of_a_pipeline_comes_in_its_own_order():
    """And begins again at its end."""
    assert run_ranks(_in_order, 2)[1] == [(2, 1, 2)] * 2 + [(2, 2, 2)] * 2 + [(2, 1, 2)] * 2


def _shares_of_a_pipeline(rank, world, folder):
    """Each rank names a folder of its own: who writes there has taken itself for the one that has the model."""
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from deepspeed.utils import groups

    model = deepspeed.pipe.PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)], num_stages=2)
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    engine, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 1, "optimizer": optimizer})
    engine.save_16bit_model(f"{folder}/{rank}")
    return (
        (engine.global_rank, engine.world_size),
        dist.get_process_group_ranks(engine.data_parallel_group),
        groups._get_data_parallel_world_size(),
        groups._get_data_parallel_rank(),
        groups._get_sequence_data_parallel_world_size(),
        groups._get_broadcast_src_rank(),
    )


def test_stages_are_no_replicas_and_one_rank_writes_the_model(tmp_path):
    assert run_ranks(_shares_of_a_pipeline, 2, args=(str(tmp_path),)) == [((r, 2), [r], 1, 0, 1, r) for r in range(2)]
    assert [p.name for p in tmp_path.iterdir()] == ["0"]
    whole = torch.load(tmp_path / "0" / "pytorch_model.bin", weights_only=True)
    assert [tuple(t.shape) for t in whole.values()] == [(2, 2), (2,), (1, 2), (1,)]
