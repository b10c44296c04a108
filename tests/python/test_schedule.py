"""plan/schedule.py: what C makes, as Python sees it; test_schedule.cpp has the arithmetic."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from deepc.cli import main
from deepc.errors import ArgumentError
from deepc.plan.schedule import KINDS, Action, Costs, Schedule, actions, default_chunks, predict, stage_rank
from ranks import run_ranks
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peer


def test_actions_of_a_rank():
    assert KINDS == ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
    assert actions("1f1b", stages=2, micro_batches=2, rank=1) == (
        Action("F", 1, 0),
        Action("B", 1, 0),
        Action("F", 1, 1),
        Action("B", 1, 1),
    )
    assert " ".join(map(str, actions("zb-h1", stages=2, micro_batches=1, rank=1, chunks=1))) == "1F0 1I0 1W0"
    assert [stage_rank("zb-v", stages=2, chunks=2, stage=s) for s in range(4)] == [0, 1, 1, 0]
    assert [stage_rank("interleaved", stages=2, chunks=2, stage=s) for s in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back(kind):
    made = Schedule.make(kind, stages=3, micro_batches=4)
    assert made.stages == 3 * default_chunks(kind)
    assert Schedule.parse(str(made)) == made == Schedule.parse(str(made).replace(" ", ",").replace("\n", "\r\n") + "\n")
    for action in sum(made.ranks, ()):
        theirs = peer._Action.from_str(str(action))
        assert action == (theirs.computation_type.value, theirs.stage_index, theirs.microbatch_index)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_accepts_the_schedules(kind):
    """Its own check of schedules, which its runtime applies to what it reads from a file."""
    made = Schedule.make(kind, stages=4, micro_batches=8)
    order = {rank: [peer._Action.from_str(str(a)) for a in row] for rank, row in enumerate(made.ranks)}
    peer._validate_schedule(order, 4, made.stages, 8)


def torch_runs(rank: int, world: int, kind: str, file: str):
    """torch's runtime trains four linear stages by the schedule in `file`: this rank's gradients, and the differences
    from those of one process; and what torch writes of its own schedule for the same stages."""
    torch.manual_seed(0)
    made = Schedule.parse(Path(file).read_text(encoding="utf-8"))
    layers = [torch.nn.Linear(4, 4) for _ in range(made.stages)]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    alone = copy.deepcopy(torch.nn.Sequential(*layers))
    sum(torch.nn.functional.mse_loss(alone(a), b) for a, b in zip(x.split(2), y.split(2))).backward()

    mine = sorted({a.stage for a in made.ranks[rank]})
    stages = [PipelineStage(layers[s], s, made.stages, torch.device("cpu")) for s in mine]
    runtime = peer._PipelineScheduleRuntime(stages, 4, loss_fn=torch.nn.functional.mse_loss, scale_grads=False)
    runtime._load_csv(file)
    inputs, target = [x] if 0 in mine else [], {"target": y} if made.stages - 1 in mine else {}
    runtime.step(*inputs, **target)
    far = max(float((layers[s].weight.grad - alone[s].weight.grad).abs().max()) for s in mine)
    theirs = {"zb-v": peer.ScheduleZBVZeroBubble, "interleaved": peer.ScheduleInterleaved1F1B}[kind](stages, 4)
    theirs._dump_csv(f"{file}.{rank}", format="compute_only")
    return far, Schedule.parse(Path(f"{file}.{rank}").read_text(encoding="utf-8")).check()


@pytest.mark.parametrize("kind", ["zb-v", pytest.param("interleaved", marks=pytest.mark.full)])
def test_torch_runs_the_schedules_and_ours_takes_its_own(kind, tmp_path):
    made = Schedule.make(kind, stages=2, micro_batches=4)
    (tmp_path / "ours.csv").write_text(str(made).replace(" ", ",") + "\n")
    for far, peak in run_ranks(torch_runs, 2, args=(kind, str(tmp_path / "ours.csv"))):
        assert far < 1e-6 and peak == made.check()


def test_in_time():
    made = Schedule.make("1f1b", stages=4, micro_batches=8)
    assert made.check() == (4, 3, 2, 1)
    time = made.simulate(Costs(F=1.0, I=1.0, W=1.0))
    assert time.makespan == time.span == 33 and time.busy == (24.0,) * 4 and time.bubble == pytest.approx(3 / 11)
    assert time.spans[3][0] == (3.0, 4.0) and len(time.spans[0]) == 16
    assert made.simulate(hop=1.0).makespan > made.simulate(hop=[1.0, 0.0, 0.0]).makespan > 33
    slow = made.simulate([Costs(), Costs(), Costs(2.0, 2.0, 2.0), Costs()])
    assert slow.busy == (24.0, 24.0, 48.0, 24.0) and slow.makespan == 55  # 2 + 48 + 1 wait for B0 + 2 x B
    assert made.simulate().peak == made.check()
    zero = Schedule.make("zb-v", stages=4, micro_batches=8).simulate()
    assert zero.span == 48 and zero.makespan == 51
    told = predict("zb-v", stages=4, micro_batches=8)
    assert (told.loads, told.makespan, told.bubble) == (zero.loads, 51, zero.bubble)


def test_what_is_refused():
    with pytest.raises(ArgumentError, match=r"'2f2b' is none; the schedules are gpipe, 1f1b"):
        actions("2f2b", stages=2, micro_batches=2, rank=0)
    with pytest.raises(ArgumentError, match="zb-v: chunks is 1"):
        actions("zb-v", stages=2, micro_batches=2, rank=0, chunks=1)
    with pytest.raises(ArgumentError, match="ranks is 0"):
        Schedule.make("1f1b", stages=0, micro_batches=2)
    with pytest.raises(ArgumentError, match="stage 4 is outside"):
        stage_rank("gpipe", stages=4, stage=4)
    with pytest.raises(ArgumentError, match="line 2, column 5: '1X0'"):
        Schedule.parse("0F0 0B0\n1F0 1X0")
    with pytest.raises(ArgumentError, match="no actions"):
        Schedule.parse("\n")
    with pytest.raises(ArgumentError, match="deadlock: rank 0 waits at action 1"):
        Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0").check()
    made = Schedule.make("gpipe", stages=3, micro_batches=2)
    with pytest.raises(ArgumentError, match="2 costs and 2 hops for 3 stages"):
        made.simulate([Costs(), Costs()])
    for wrong in (0, -1):
        with pytest.raises(ArgumentError, match=f"ranks is {wrong}"):
            predict("1f1b", stages=wrong, micro_batches=2)
    with pytest.raises(ArgumentError, match=r"cost\[0\] is -1"):
        made.simulate(Costs(F=-1.0))
    with pytest.raises(ArgumentError, match="rank 1 has no B or I of micro-batch 1"):
        Schedule((made.ranks[0], made.ranks[1][:-1], made.ranks[2]), 3, 2).check()


# ---- what a person sees ----------------------------------------------------------------------------------------------
DOCS = (Path(__file__).parents[2] / "docs" / "pipeline-schedules.md").read_text(encoding="utf-8")


def test_the_drawing_of_the_documentation(capsys, tmp_path):
    command, drawing, comparing, table = (block.strip("\n") for block in DOCS.split("```")[1:8:2])
    assert main(shlex.split(comparing)[1:]) == 0
    assert capsys.readouterr().out.strip("\n") == table
    words = shlex.split(command)[1:]
    assert main([*words[:-1], str(tmp_path / words[-1])]) == 0
    assert capsys.readouterr().out.strip("\n") == drawing
    picture = ElementTree.parse(tmp_path / words[-1]).getroot()
    told = [e.text for e in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(told) == 4 * 2 * 8 and told[0] == "F0 in stage 0: 0 to 1" and told[-1] == "B7 in stage 3: 25 to 27"


def test_drawings_of_several_stages_on_a_rank(capsys):
    assert main(["plan", "--schedule", "zb-v", "--stages", "2", "--micro-batches", "1", "--costs", "2,2,4"]) == 0
    assert capsys.readouterr().out == (
        "zb-v: 2 ranks, 1 micro-batch, 2 stages on each rank (a, b, ...)\n"
        "rank 0  F0a ........F0b I0b W0b---- ........I0a W0a----   computes 66.7%, holds 1 micro-batch\n"
        "rank 1  ....F0a F0b ........I0b W0b---- I0a W0a---- ....  computes 66.7%, holds 1 micro-batch\n"
        "makespan 12, of which ranks wait 33.3% (50.0% of the work)\n"
    )
    assert main(["plan", "--schedule", "zb-h1", "--stages", "2", "--micro-batches", "1", "--text"]) == 0
    assert capsys.readouterr().out == "0F0 0I0 0W0\n1F0 1I0 1W0\n"


def test_schedules_compared(capsys):
    assert main(["plan", "--schedule", "all", "--stages", "2", "--micro-batches", "4", "--costs", "2,2,2"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["gpipe", "1", "30", "25.0%", "25.0%", "4"],
        ["1f1b", "1", "30", "25.0%", "25.0%", "2"],
        ["interleaved", "2", "27", "12.5%", "12.5%", "2.5"],
        ["zb-h1", "1", "26", "8.3%", "8.3%", "2"],
        ["zb-v", "2", "25", "4.2%", "0.0%", "2"],
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--schedule all --chunks 2", "--chunks, --svg and --text are for one schedule"),
        ("--schedule zb-v --costs 1,2", "--costs 1,2: give three times, F,I,W"),
        ("--schedule zb-v --costs 1,2,0", "each time must be above 0"),
        ("--schedule zb-v --chunks 3", "zb-v: chunks is 3"),
        ("--schedule gpipe --micro-batches 0", "micro_batches is 0"),
        ("--schedule gpipe --hop -1", r"hop[0] is -1"),
        ("--config x --model y --stages 2", "--stages is an option of --schedule"),
        ("--schedule 1f1b --svg /nowhere/x.svg", "--svg /nowhere/x.svg: No such file or directory; name a file"),
        ("--schedule 1f1b --hop 1e12", "is too wide: at most 131072"),
        ("--schedule 1f1b --costs 1e-300,1,1", "is too wide"),
        ("--schedule 1f1b --ranks 8", "--ranks means nothing beside --schedule: --stages and --micro-batches say"),
        ("--schedule 1f1b --cluster x", "--cluster means nothing beside --schedule"),
        ("--cluster x --model gpt2 --ranks 8", "--ranks means nothing beside --cluster: the file has the nodes"),
        ("--cluster x --model gpt2 --config y", "--config means nothing beside --cluster"),
        ("--ranks 2", "give --config and --model, or --cluster and --model, or --schedule"),
    ],
)
def test_what_can_not_be_drawn(words, text, capsys):
    assert main(["plan", *words.split()]) == 2 and text in capsys.readouterr().err


def test_counts_alone_are_of_no_model(capsys):
    """Its configuration was taken and not looked at."""
    for option in ("--model", "--config", "--loss"):
        assert main(["estimate", "--params", "1e9", option, "x"]) == 2
        assert f"{option} means nothing beside --params" in capsys.readouterr().err


def test_a_picture_beside_the_actions(tmp_path, capsys):
    """--svg had no effect beside --text."""
    assert main(["plan", "--schedule", "gpipe", "--stages", "1", "--text", "--svg", str(tmp_path / "a.svg")]) == 0
    assert capsys.readouterr().out.startswith("0F0 ") and (tmp_path / "a.svg").read_text().startswith("<svg ")
