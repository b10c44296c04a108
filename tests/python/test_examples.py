"""The small examples: each of their training steps at ZeRO stages 0 to 3 against the same step in plain PyTorch, and
what they show when they run."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from programs import run_python
from ranks import run_quietly

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS, BATCH, DECAY = 5, 16, 0.9
OPTIMIZERS = {"AdamW": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.01}, "Adagrad": {"lr": 0.05}}


def example(name: str):
    """The module of an example."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


# ---- plain PyTorch with an engine's methods --------------------------------------------------------------------------
class Plain:
    """What the examples ask of an engine, by torch's own means; one process."""

    def __init__(self, model, optimizer, parameters=None) -> None:
        self.module = model
        parameters = [p for p in (model.parameters() if parameters is None else parameters) if p.requires_grad]
        self.optimizer = getattr(torch.optim, optimizer)(parameters, **OPTIMIZERS[optimizer])

    def __call__(self, *args):
        return self.module(*args)

    def parameters(self):
        return self.module.parameters()

    def backward(self, loss) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class PlainAverage:
    def __init__(self, engine) -> None:
        self.engine, self.module = engine, copy.deepcopy(engine.module)

    @torch.no_grad()
    def update(self) -> None:
        for mine, live in zip(self.module.parameters(), self.engine.module.parameters()):
            mine.lerp_(live, 1 - DECAY)


class Torch:
    engine, average = staticmethod(Plain), staticmethod(PlainAverage)


class Still(Plain):
    """Makes no step."""

    def step(self) -> None:
        self.optimizer.zero_grad()


class Untrained:
    engine, average = staticmethod(Still), staticmethod(PlainAverage)


class Deepc:
    def __init__(self, stage: int) -> None:
        self.stage, self.made = stage, []

    def engine(self, model, optimizer, parameters=None):
        import deepc

        cfg = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage},
            "deepc": {"bucket_elems": 8192},
            "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        }
        chosen = None if parameters is None else list(parameters)
        self.made.append(deepc.initialize(model=model, model_parameters=chosen, config=cfg)[0])
        return self.made[-1]

    def average(self, engine):
        import deepc

        return deepc.EMA(engine, DECAY, as_module=True)


# ---- one case per example: the losses of some steps ------------------------------------------------------------------
# kit: Torch or Deepc; part: this rank's part of a batch
def gan(kit, part):
    gan = example("gan")
    generator, critic = gan.make(0)
    c, g = kit.engine(critic, "AdamW"), kit.engine(generator, "AdamW")
    return [gan.train_step(g, c, *part(gan.batch(0, s, BATCH))) for s in range(STEPS)]


def actor_critic(kit, part, separate=False):
    rl = example("actor_critic")
    actor, critic = rl.make(0, separate)
    a = kit.engine(actor, "AdamW")
    c = kit.engine(critic, "AdamW", critic.parameters() if separate else critic.head.parameters())
    return [rl.train_step(a, c, *part(rl.starts(0, s, BATCH))) for s in range(STEPS)]


def images(kit, part):
    images = example("images")
    engine, data = kit.engine(images.make(0), "AdamW"), images.Pictures("glyphs", 0)
    return [[images.train_step(engine, *part(data.batch(s, BATCH)))] for s in range(STEPS)]


def recommender(kit, part):
    rec = example("recommender")
    engine, world = kit.engine(rec.make(0), "Adagrad"), rec.World(0)
    return [[rec.train_step(engine, *part(world.batch(s, BATCH)))] for s in range(STEPS)]


def speech(kit, part):
    speech = example("speech")
    engine = kit.engine(speech.make(0), "AdamW")
    return [[speech.train_step(engine, *part(speech.utterances(0, s, BATCH)))] for s in range(STEPS)]


def mean_teacher(kit, part):
    mt = example("mean_teacher")
    student = kit.engine(mt.make(0), "AdamW")
    average = kit.average(student)
    return [mt.train_step(student, average, mt.labelled(0), *part(mt.batch(0, s, BATCH)), 3.0) for s in range(STEPS)]


def distill(kit, part):
    distill, images = example("distill"), example("images")
    engine = kit.engine(distill.Distilled(distill.make_student(0), images.make(0)), "AdamW")
    return [[distill.train_step(engine, *part(images.Pictures("glyphs", 0).batch(s, BATCH)[:1]))] for s in range(STEPS)]


def lora(kit, part):
    lora = example("lora")
    engine, text = kit.engine(lora.adapt(lora.make(0), 4, 0), "AdamW"), lora.text(1 << 16)
    return [[lora.train_step(engine, *part((lora.windows(text, 0, s, BATCH),)))] for s in range(STEPS)]


CASES = {f.__name__: f for f in (gan, actor_critic, images, recommender, speech, mean_teacher, distill, lora)}
CASES["actor_critic_separate"] = functools.partial(actor_critic, separate=True)
# What a loss is a difference of, where that is larger than the loss: a divergence of distributions over 10 classes is a
# cross-entropy less an entropy, each up to log(10), and is rounded like those.
TERMS = {"distill": math.log(10)}


def _losses(case: str, kit, rank: int = 0, world: int = 1) -> list[list[float]]:
    return [list(row) for row in CASES[case](kit, lambda batch: tuple(t.chunk(world)[rank] for t in batch))]


def _check(got, want, where: str, case: str, tolerance: float = 1e-6) -> None:
    assert len(got) == len(want) == STEPS
    for step, (a, b) in enumerate(zip(got, want)):
        for x, y in zip(a, b, strict=True):
            assert math.isclose(x, y, rel_tol=tolerance, abs_tol=max(1e-7, tolerance * TERMS.get(case, 0.0))), (
                f"{where}, step {step}: {a} and {b}"
            )


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.full)])
@pytest.mark.parametrize("case", list(CASES))
def test_the_losses_are_those_of_plain_pytorch_at_every_stage(case, stages):
    want = _losses(case, Torch)
    untrained = _losses(case, Untrained)
    assert math.isclose(want[0][0], untrained[0][0], rel_tol=1e-6)
    assert any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(want[-1], untrained[-1], strict=True))  # the steps count
    for stage in stages:
        kit = Deepc(stage)
        _check(_losses(case, kit), want, f"stage {stage}", case)
        for engine in kit.made:
            engine.destroy()


def _on_ranks(rank, world, case):
    out = {}
    for stage in (0, 2, 3):
        kit = Deepc(stage)
        out[stage] = _losses(case, kit, rank, world)
        for engine in kit.made:
            engine.destroy()
    return out


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in CASES if c != "actor_critic_separate"])
def test_two_ranks_share_a_batch(case):
    """The mean of the ranks' losses is the whole batch's. (An actor's loss is its own games': only the stages are
    compared.)"""
    ranks = run_quietly(_on_ranks, 2, case)
    for stage in (2, 3):
        for r in range(2):
            _check(ranks[r][stage], ranks[r][0], f"stage {stage}, rank {r}", case)
    means = [[(a + b) / 2 for a, b in zip(x, y)] for x, y in zip(ranks[0][3], ranks[1][3])]
    _check(means, _losses(case, Torch), "two ranks", case, 1e-5)


# ---- a teacher costs its weights -------------------------------------------------------------------------------------
def _bytes(rank, world):
    distill, images = example("distill"), example("images")
    out = []
    for width in (8, 64):
        engine = Deepc(3).engine(distill.Distilled(distill.make_student(0), images.make(0, width)), "AdamW")
        teacher = sum(p.numel() for p in engine.module.teacher.parameters())
        out.append((dict(engine.plan.bytes), engine.plan.frozen_elems, teacher))
        engine.destroy()
    return out


def test_a_frozen_teacher_costs_its_weights_once_per_node():
    for (small, few, n1), (large, many, n2) in run_quietly(_bytes, 2):
        assert n2 > 10 * n1 and many - few <= n2 - n1 + 64 * 40  # aligned to 64 elements
        assert large["params_shared"] - small["params_shared"] == 4 * (many - few)
        assert all(large[k] == small[k] for k in large if k.endswith("_private"))


# ---- what they show --------------------------------------------------------------------------------------------------
def _run(name: str, *args: str, ranks: int = 1) -> str:
    command = [
        "-m",
        "deepc",
        "run",
        "--num_ranks",
        str(ranks),
        "--cpu",
        str(EXAMPLES / f"{name}.py"),
        *args,
    ]
    package = str(Path(importlib.import_module("deepc").__file__).parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DEEPC_LOG_LEVEL": "WARNING", "PYTHONPATH": package}
    done = run_python(*command, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _numbers(line: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", line)]


def _last(out: str) -> list[float]:
    """The numbers of the last line that tells the result."""
    return _numbers([line for line in out.splitlines() if " before" in line][-1])


@pytest.mark.full
def test_recommender_runs_on_two_ranks_and_learns(tmp_path):
    before, after = _last(_run("recommender", "--steps", "60", "--stage", "3", ranks=2))
    assert before < 0.55 and after > before + 0.05


# name: (arguments, check of the numbers of the last line)
RESULTS = {
    "gan": ([], lambda n: n[0] < 20 and n[1] > 70 and n[3] == 6),
    "actor_critic": ([], lambda n: n[0] < 35 and n[1] > 80),
    "images": ([], lambda n: n[1] < 20 and n[2] > 88),
    "recommender": ([], lambda n: n[0] < 0.55 and n[1] > 0.67),
    "speech": ([], lambda n: n[0] > 80 and n[1] < 25),
    "mean_teacher": ([], lambda n: n[1] < 75 and n[3] > 95),
    "distill": ([], lambda n: n[0] < 25 and n[1] > 70),
    "lora": ([], lambda n: n[0] > n[1] + 0.5 and abs(n[1] - n[2]) < 0.005),
}


@pytest.mark.full
@pytest.mark.parametrize("name", list(RESULTS))
def test_each_example_shows_its_result_on_two_ranks_at_stage_3(name):
    args, check = RESULTS[name]
    out = _run(name, *args, ranks=2)
    assert check(_last(out)), out


@pytest.mark.full
def test_the_image_classifier_learns_scans_of_digits():
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    n = _last(_run("images", "--data", "digits"))
    assert n[2] > 90


@pytest.mark.full
def test_the_mean_teacher_is_saved_and_resumed(tmp_path):
    _run("mean_teacher", "--steps", "60", "--out", str(tmp_path / "whole"), ranks=2)
    _run("mean_teacher", "--steps", "60", "--stop", "30", "--out", str(tmp_path / "parts"), ranks=2)
    assert "resumed at step 30" in _run(
        "mean_teacher", "--steps", "60", "--out", str(tmp_path / "parts"), "--resume", ranks=2
    )
    from deepc.checkpoint import CheckpointReader

    with CheckpointReader(tmp_path / "whole") as a, CheckpointReader(tmp_path / "parts") as b:
        assert sum(n.startswith("average.ema/") for n in a.tensors) == 6
        for n in a.tensors:
            assert torch.equal(a.tensor(n), b.tensor(n)), n


@pytest.mark.full
def test_lora_leaves_a_small_checkpoint_and_a_merged_model(tmp_path):
    import deepc

    _run("lora", "--steps", "10", "--base-steps", "10", "--out", str(tmp_path), ranks=2)
    lora = example("lora")
    merged = deepc.inference(lora.make(3), checkpoint=tmp_path / "merged")
    assert merged(lora.windows(lora.text(), 0, -1, 4)).item() < 8
    from deepc.checkpoint import CheckpointReader

    with CheckpointReader(tmp_path) as reader:
        assert not any(n.startswith("frozen/") for n in reader.tensors) and any(
            n.endswith("up.weight") for n in reader.tensors
        )
