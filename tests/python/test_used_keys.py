"""Every key that is documented as used changes something that a user can observe: one row each, two configurations that
differ in that key (and, where it needs another one, have that in common), and a look at what came of them. A used key
without a row, and a row whose two looks are equal, fail."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import logging
import os
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepc
import pytest
import torch
import torch.distributed as dist
from deepc.comm import calls
from deepc.config.explain import markdown
from deepc.config.keys import KEYS, State
from deepc.errors import CheckpointError
from ranks import run_ranks
from torch import nn

USED = {k.path for k in KEYS if k.state is State.ACTIVE}


# ---- a run and what is seen of it ------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 4))
        self.seen: list[torch.dtype] = []
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.inner(x.to(self.inner[0].weight.dtype))


def _merge(a: dict, b: dict) -> dict:
    return {
        **a,
        **{k: _merge(a[k], v) if isinstance(v, dict) and isinstance(a.get(k), dict) else v for k, v in b.items()},
    }


@contextlib.contextmanager
def _messages():
    """What deepc's logger is told, and its level."""
    log = logging.getLogger("deepc")
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    level = log.level
    log.addHandler(handler)
    try:
        yield told, log
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


BASE = {"train_micro_batch_size_per_gpu": 4, "deepc": {"log": {"format": "none"}}}


def run(
    raw: dict,
    *,
    steps: int = 3,
    bad: tuple[int, ...] = (),
    rank: int = 0,
    world: int = 1,
    pause: float = 0.0,
    lost: bool = False,
) -> SimpleNamespace:
    """`steps` micro-batches; the gradient of those in `bad` is not finite; `lost`: a weight is not. `error`: the class
    of what was raised."""
    cfg = _merge(BASE, raw)
    torch.manual_seed(0)
    model = Net()
    if lost:
        model.inner[0].bias.data[3] = float("nan")
    data = torch.utils.data.TensorDataset(torch.randn(6, 8))
    out = SimpleNamespace(error=None, applied=[], scales=[], lrs=[], sums=None)
    with _messages() as (out.told, log):
        try:
            engine, _, loader, _ = deepc.initialize(model=model, config=cfg, training_data=data)
        except Exception as exc:
            return SimpleNamespace(**{**vars(out), "error": type(exc).__name__, "message": str(exc)})
        out.loader, out.level, out.bucket_elems = len(loader), log.level, engine.plan.layout.bucket_elems
        out.stage, out.dtype, out.policy = engine.plan.stage, engine.dtype, engine.step_policy.describe()
        out.inert = {i.key for i in engine._config.inert}
        out.auto, out.table = engine.auto_precision, model.table.dtype
        try:
            for step in range(steps):
                g = torch.Generator().manual_seed(100 * step + rank)
                made = engine(torch.randn(4, 8, generator=g))
                out.computed = made.dtype
                out.loss = made.float().square().mean() * (float("inf") if step in bad else 100.0)
                engine.backward(out.loss)
                if step == 0 and engine.state.acc.numel():
                    out.sums = engine.state.acc.clone()
                time.sleep(pause)
                out.applied.append(engine.step().applied)
                out.scales.append(engine.loss_scale)
                out.lrs.append(engine.get_lr())
        except Exception as exc:
            out.error = type(exc).__name__
        out.timers = bool(engine.get_wall_clock_timers())
        out.weights = torch.cat([engine.full_fp32_param(p).flatten() for p in model.parameters()])
        out.sent = engine.comm_bytes
        out.seen = model.seen
        streamed = engine.state.streamed if engine.plan.mode == "streamed" else None
        out.gathers = streamed.stats()["gathers"] if streamed is not None else 0
        out.recomputed = engine.recomputation.stats().get("calls", 0)
        out.spilled = engine.activations.stats()["bytes_written"]
        engine.destroy()
    return out


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a == b


# ---- looks -----------------------------------------------------------------------------------------------------------
Look = Callable[[dict, Path], Any]


def of(name: str, **how: Any) -> Look:
    return lambda raw, tmp: getattr(run(raw, **how), name)


def told(text: str, **how: Any) -> Look:
    return lambda raw, tmp: sum(text in line for line in run(raw, **how).told)


def _steps(line: str) -> list[str]:
    """The number of a log line's step; a process that has had several engines names the engine before it."""
    return re.findall(r"^(?:engine \d+: )?step (\d+)", line)


def lines(raw: dict, tmp: Path) -> list[str]:
    return [step for t in run(raw, steps=4).told for step in _steps(t)]


def files(raw: dict, tmp: Path) -> list[str]:
    """Below `tmp`, where the run is at home; without what carries a time in its name."""
    run(raw, steps=1)
    return sorted({str(p.relative_to(tmp).parent) for p in tmp.rglob("*") if p.is_file()})


def leaves_out(raw: dict, tmp: Path) -> str:
    """What a step says of a parameter that its loss does not depend on."""
    model = Net()
    model.register_parameter("spare", nn.Parameter(torch.ones(2)))
    engine, *_ = deepc.initialize(model=model, config=_merge(BASE, raw))
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    try:
        engine.step()
    except deepc.DeepcError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def lengths(raw: dict, tmp: Path) -> list[Any]:
    """What a model that takes curriculum_seqlen is told, and the length of what it gets, from the loader."""
    seen: list[Any] = []

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4, 8)

        def forward(self, x: torch.Tensor, curriculum_seqlen: int | None = None) -> torch.Tensor:
            seen.append((curriculum_seqlen, x.shape[1]))
            return self.words(x).square().mean()

    data = torch.utils.data.TensorDataset(torch.zeros(32, 12, dtype=torch.long))
    engine, _, loader, _ = deepc.initialize(model=Told(), config=_merge(BASE, raw), training_data=data)
    kind = engine._config.curriculum_learning
    if kind.enabled and kind.schedule_type == "custom":
        engine.set_custom_curriculum_learning_schedule(lambda step: 7)
    for (x,), _ in zip(loader, range(5)):
        engine.backward(engine(x))
        engine.step()
    engine.destroy()
    return [*seen, engine.curriculum.by_length]


def checkpoints_told(raw: dict, tmp: Path) -> int:
    """Lines that deepspeed.checkpointing.checkpoint has told."""
    from deepc.compat.runtime import checkpointing

    checkpointing.configure(None, deepspeed_config=_merge(BASE, raw))
    try:
        with _messages() as (lines, log):
            log.setLevel(logging.INFO)
            checkpointing.checkpoint(torch.sin, torch.ones(3, requires_grad=True)).sum().backward()
        return sum("checkpoint " in line for line in lines)
    finally:
        checkpointing.configure(None)


def contiguous(raw: dict, tmp: Path) -> tuple[bool, bool]:
    """Whether inputs of checkpoints have a piece of memory, and one for many."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.linear, x * 1, use_reentrant=False).mean()

    try:
        engine = deepc.initialize(model=Again(), config=_merge(BASE, raw))[0]
    except deepc.errors.ConfigError:
        return False, False
    engine.backward(engine(torch.ones(400, 64)))
    committed = engine.activations.stats()["contiguous_committed"]
    engine.destroy()
    return committed > 0, committed > 1 << 20


def _parted(rank: int, world: int, raw: dict) -> int:
    from test_tensor_parallel import transformer

    model = transformer("gpt2").train()
    model.gradient_checkpointing_enable()
    engine = deepc.initialize(model=model, config=_merge(BASE, raw))[0]
    ids = torch.zeros(4, 16, dtype=torch.long)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    cut = engine.activations.stats()["bytes_cut"]
    engine.destroy()
    return cut


def parted(raw: dict, tmp: Path) -> list[int]:
    """Bytes of checkpoints' inputs of which two tensor-parallel ranks keep a part each."""
    return run_ranks(_parted, 2, args=(raw,), env={"DEEPC_LOG_LEVEL": "WARNING"})


def computed_again(raw: dict, tmp: Path) -> int:
    """How often the first layer of a PipelineModule ran for one micro-batch."""
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]
    ran: list[int] = []
    layers[1].register_forward_pre_hook(lambda *_: ran.append(1))
    model = deepc.pipe.PipelineModule(layers, num_stages=1, loss_fn=lambda out, _: out.mean())
    engine, *_ = deepc.initialize(model=model, config=_merge(BASE, raw))
    engine.train_batch(iter([(torch.randn(2, 8), None)] * engine.gradient_accumulation_steps()))
    engine.destroy()
    return len(ran)


def in_stages(raw: dict, tmp: Path) -> Any:
    return run_ranks(_in_stages, 2, args=(raw,))


def _in_stages(rank: int, world: int, raw: dict) -> tuple[int, str]:
    """(chunks, what the log says of the pipeline) of a model that two ranks cut."""
    cfg = _merge({**BASE, "pipeline": {"stages": 2}}, raw)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    engine, *_ = deepc.initialize(
        model=model, config=cfg, sample_batch=torch.ones(4, 8), loss_fn=lambda out, batch: out.mean()
    )
    words = engine._in_words()
    engine.destroy()
    return engine.part.order.chunks, words.split(" stages:")[0]


def refused(raw: dict, tmp: Path) -> Any:
    return run(raw, steps=0).error


def shards(raw: dict, tmp: Path) -> Any:
    return run_ranks(_shards, 2, args=(raw,))


def _shards(rank: int, world: int, raw: dict) -> Any:
    """A language model's parameters on a rank, and whether it makes logits while it trains."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8)).train()
    try:
        engine, *_ = deepc.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **raw})
    except deepc.errors.DeepcError as exc:
        return type(exc).__name__
    ids = torch.arange(8).view(1, 8)
    logits = engine(input_ids=ids, labels=ids).logits
    return {n: tuple(p.shape) for n, p in model.named_parameters()}, logits is None


def text_of(raw: dict, tmp: Path) -> list[str]:
    """The flops profile, without figures that time changes."""
    run(raw, steps=4)
    text = (tmp / "profile.txt").read_text() if (tmp / "profile.txt").exists() else ""
    return [line.strip().split(" ")[0].split(":")[0].split("(")[0] for line in text.splitlines()]


def profiled(start: str, part: Callable[[str], Any] = str) -> Look:
    def look(raw: dict, tmp: Path) -> list[Any]:
        run(raw, steps=4)
        return [part(x) for x in (tmp / "profile.txt").read_text().splitlines() if x.strip().startswith(start)]

    return look


def printed(raw: dict, tmp: Path) -> Any:
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(raw, steps=4)
    return "Profiler" in out.getvalue(), (tmp / "profile.txt").exists()


def stderr_lines(raw: dict, tmp: Path) -> int:
    """JSON lines come past the logger."""
    import io

    with contextlib.redirect_stderr(io.StringIO()) as out:
        run(raw, steps=2)
    return sum(line.startswith("{") for line in out.getvalue().splitlines())


def trace(what: Callable[[list[dict]], Any], **how: Any) -> Look:
    def look(raw: dict, tmp: Path) -> Any:
        run(raw, steps=3, **how)
        found = [p for p in tmp.rglob("*.json*") if "trace" in p.name or "rank" in p.name]
        events = [e for p in found for e in json.loads(p.read_text())["traceEvents"]] if found else []
        return what(events)

    return look


def series(raw: dict, tmp: Path) -> list[str]:
    """What the engine's own AutoPrecision makes of good steps, overflows and a diverging loss; as on a machine with
    bf16, whatever this one has."""
    auto = run(raw, steps=0).auto
    auto.fast = auto.mode = "bf16"
    modes = []
    for applied, loss in [(True, 1.0)] * 20 + [(False, None)] * 2 + [(True, 1.0)] * 30 + [(True, 2.5)] * 12:
        auto.after_step(applied, loss)
        modes.append(auto.mode)
    return modes


class _Package:
    """Stands for a tracker's package: notes every call with its arguments."""

    def __init__(self, notes: list, path: str) -> None:
        self._notes, self._path = notes, path

    def __getattr__(self, name: str) -> Any:
        return _Package(self._notes, f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        numbers = self._path.rsplit(".", 1)[-1] in ("log", "add_scalar", "__internal_api__log_metric__")
        self._notes.append((self._path, len(args) if numbers else str(args), "" if numbers else str(kwargs)))
        return self


def tracker(package: str, *inside: str) -> Look:
    def look(raw: dict, tmp: Path) -> list:
        notes: list = []
        was = {name: sys.modules.get(name) for name in (package, *inside)}
        for name in was:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__file__ = __file__  # inspect looks at that of every module
            module.__getattr__ = _Package(notes, name).__getattr__  # type: ignore[method-assign]
            sys.modules[name] = module
        try:
            run(raw, steps=3)
        finally:
            for name, module in was.items():
                sys.modules.pop(name) if module is None else sys.modules.update({name: module})
        return notes

    return look


def collectives(raw: dict, tmp: Path) -> Any:
    log = calls.logger
    with _messages() as (said, _):
        try:
            log.configure(False)
            log.reset()
            run(raw, steps=1)
            dist.all_reduce(torch.ones(4))
            dist.broadcast(torch.ones(4), 0)
            found = log.log_all(print_log=False, return_dict=True)["summary"]
            ops = sorted(name.split("|")[0].strip() + str("Caller" in name) for name in found)
            return ops, any("time (ms)" in s for s in said)
        finally:
            log.configure(False)


def replaced(raw: dict, tmp: Path) -> list[str]:
    """The classes of a model's modules while an engine has it: of modules that run as they are, torch's own."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
    engine = deepc.initialize(model=model, config=_merge(BASE, raw))[0]
    found = [base.__name__ for m in model for base in type(m).__mro__[:2]]
    engine.destroy()
    return found


def on_ranks(name: str, nodes: int = 1) -> Look:
    return lambda raw, tmp: run_ranks(_on_ranks, 2, args=(raw, name, nodes))


def _on_ranks(rank: int, world: int, raw: dict, name: str, nodes: int) -> Any:
    if nodes > 1:
        os.environ["DEEPC_NODE_ID"] = f"host{rank}"
    try:
        found = getattr(run(raw, rank=rank, world=world), name)
        return len([t for t in found if _steps(t)]) if name == "told" else found
    finally:
        os.environ.pop("DEEPC_NODE_ID", None)


def tags(raw: dict, tmp: Path) -> Any:
    return run_ranks(_tags, 2, args=(raw, str(tmp)))


def _tags(rank: int, world: int, raw: dict, folder: str) -> Any:
    engine = deepc.initialize(model=Net(), config=_merge(BASE, raw))[0]
    with _messages() as (said, _):
        try:
            engine.save_checkpoint(folder, tag=f"of{rank}")
            saved = engine.load_checkpoint(folder)[0]
        except CheckpointError as exc:
            saved = str(exc).split(":")[0]
    engine.destroy()
    return saved and os.path.basename(saved), any("different tags" in s for s in said)


def predicted(raw: dict, tmp: Path) -> bool:
    engine = deepc.initialize(model=Net(), config=_merge(BASE, raw), sample_batch=torch.randn(4, 8))[0]
    known = engine.memory_plan is not None
    engine.destroy()
    return known


def estimated(raw: dict, tmp: Path) -> list[tuple[str, int]]:
    """Where a GPU run would have its states; no GPU is needed to say so."""
    found = deepc.estimate(Net, _merge(BASE, raw), device="cuda")
    return [str(row) for row in found.rows]


def planned(raw: dict, tmp: Path) -> Any:
    """How states on disk come and go."""
    engine = deepc.initialize(model=Net(), config=_merge(BASE, raw))[0]
    disk, info = engine.plan.disk, engine.state.tier.stream.info()
    found = disk.cell_elems, disk.slots, disk.buffer_bytes, info["block_bytes"], info["depth"]
    engine.destroy()
    return found


# ---- the table -------------------------------------------------------------------------------------------------------
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
WARM = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
PLAIN = {"deepc": {"log": {"format": "plain"}}}
FLOPS = {"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "profile.txt"}}
TIMELINE = {"deepc": {"timeline": {"steps": [1, 2], "folder": "trace", "memory_ms": 0}}}
ON_DISK = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "."}}}
PARAMETERS_ON_DISK = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "nvme", "nvme_path": "."},
    }
}
ACTIVATIONS = {
    "activation_checkpointing": {"cpu_checkpointing": True},
    "deepc": {"activations": {"nvme_path": ".", "all": True, "min_bytes": 1}},
}
PARTED = {
    "tensor_parallel": {"autotp_size": 2},
    "activation_checkpointing": {"partition_activations": True},
    "deepc": {"activations": {"min_bytes": 1024}},
}
CONTIGUOUS = {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 1}}
CURRICULUM = {
    "curriculum_learning": {
        "enabled": True,
        "min_difficulty": 2,
        "max_difficulty": 10,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2},
    }
}
_METRICS = {"seqlen_truncate": CURRICULUM["curriculum_learning"]}
EFFICIENCY = {
    "data_efficiency": {
        "enabled": True,
        "data_sampling": {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": _METRICS}},
    }
}
_SAMPLING = "data_efficiency.data_sampling"
AUTO = {"precision": "auto", "deepc": {"precision": {"fp32_steps": 10}}}
COMMS = {"comms_logger": {"enabled": True}}
CSV = {"csv_monitor": {"enabled": True}}
BOARD = {"tensorboard": {"enabled": True}}
WANDB = {"wandb": {"enabled": True}}
COMET = {"comet": {"enabled": True}}
board = tracker("tensorboard", "torch.utils.tensorboard")
wandb = tracker("wandb")
comet = tracker("comet_ml")

ROWS: dict[str, tuple[dict, Any, Look]] = {
    # key: (what both configurations have, the key's value in the second, the look)
    "train_batch_size": ({"train_batch_size": 4}, 8, of("applied", steps=4)),
    "train_micro_batch_size_per_gpu": ({"train_batch_size": 8}, 8, of("applied", steps=4)),
    "gradient_accumulation_steps": ({}, 2, of("applied", steps=4)),
    "steps_per_print": (PLAIN, 2, lines),
    "wall_clock_breakdown": ({}, True, of("timers")),
    "memory_breakdown": ({}, True, told("memory")),
    "dump_state": ({}, True, told("gradient_clipping = 1.0 (default)")),
    "log_level": ({}, "error", of("level")),
    "dataloader_drop_last": ({}, True, of("loader")),
    "optimizer.type": (SGD, "AdamW", of("weights")),
    "optimizer.params": (ADAM, {"lr": 1e-3}, of("weights")),
    "zero_allow_untested_optimizer": (
        {"optimizer": {"type": "SparseAdam"}, "zero_optimization": {"stage": 1}},
        True,
        refused,
    ),
    "scheduler.type": (WARM, "WarmupCosineLR", refused),
    "scheduler.params": (WARM, {"warmup_num_steps": 7}, of("lrs")),
    "precision": ({}, "auto", lambda raw, tmp: run(raw, steps=0).auto is None),
    "fp16.enabled": ({}, True, of("dtype")),
    "fp16.auto_cast": (FP16, True, of("seen")),
    "fp16.loss_scale": (FP16, 4.0, of("scales")),
    "fp16.initial_scale_power": (FP16, 3, of("scales")),
    "fp16.loss_scale_window": (FP16, 1, of("scales")),
    "fp16.hysteresis": (FP16, 1, of("scales", bad=(0,))),
    "fp16.consecutive_hysteresis": (FP16, True, of("scales", bad=(0, 2), steps=4)),
    "fp16.min_loss_scale": (_merge(FP16, {"fp16": {"hysteresis": 1}}), 16, of("error", bad=(0, 1))),
    "bf16.enabled": ({}, True, of("dtype")),
    "bf16.check_grad_overflow": ({"bf16": {"enabled": True}}, False, of("applied", bad=(1,))),
    "gradient_clipping": (SGD, 0, of("weights")),
    "torch_autocast.enabled": ({}, True, of("computed")),
    "torch_autocast.dtype": ({"torch_autocast": {"enabled": True}}, "fp16", of("computed")),
    "managed_gradient_accumulation": ({"gradient_accumulation_steps": 2}, False, of("applied")),
    "prescale_gradients": ({"gradient_predivide_factor": 8}, True, of("sums")),
    "gradient_predivide_factor": ({}, 8, of("sums")),
    "gradient_allreduce_op": ({**SGD, "gradient_clipping": 0.0}, "sum", on_ranks("weights")),  # clipped, both are alike
    "communication_data_type": (SGD, "bf16", on_ranks("weights")),
    "data_types.grad_accum_dtype": (ADAM, "bf16", of("weights")),
    "data_types.buffer_dtype": ({"bf16": {"enabled": True}}, "bf16", of("table")),
    "zero_optimization.stage": ({}, 2, of("stage")),
    "zero_optimization.reduce_bucket_size": ({}, 512, of("bucket_elems")),
    "zero_optimization.offload_optimizer.device": ({"zero_optimization": {"stage": 1}}, "cpu", estimated),
    "zero_optimization.offload_optimizer.nvme_path": (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        ".",
        refused,
    ),
    "zero_optimization.offload_optimizer.buffer_count": (
        _merge(ON_DISK, {"zero_optimization": {"sub_group_size": 100}}),
        40,
        planned,
    ),
    "zero_optimization.offload_optimizer.ratio": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        0.5,
        estimated,
    ),
    "zero_optimization.ignore_unused_parameters": ({"zero_optimization": {"stage": 2}}, False, leaves_out),
    "zero_optimization.sub_group_size": (ON_DISK, 100, planned),
    "aio.block_size": (ON_DISK, 8192, planned),
    "aio.queue_depth": (ON_DISK, 2, planned),
    "zero_optimization.offload_param.device": ({"zero_optimization": {"stage": 3}}, "nvme", refused),
    "zero_optimization.offload_param.nvme_path": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        ".",
        refused,
    ),
    "zero_optimization.offload_param.max_in_cpu": (PARAMETERS_ON_DISK, 0, of("gathers")),
    "zero_optimization.cpu_offload": ({}, True, estimated),
    "zero_optimization.cpu_offload_param": ({}, True, of("inert")),
    "zero_optimization.zero_hpz_partition_size": ({"zero_optimization": {"stage": 3}}, 2, refused),
    "zero_optimization.zero_quantized_weights": (
        {"zero_optimization": {"stage": 2}},
        True,
        on_ranks("sent", nodes=2),
    ),
    "zero_optimization.zero_quantized_gradients": (
        {"zero_optimization": {"stage": 2}},
        True,
        on_ranks("sent", nodes=2),
    ),
    "checkpoint.tag_validation": ({}, "Fail", tags),
    "tensorboard.enabled": ({}, True, board),
    "tensorboard.output_path": (BOARD, "there", board),
    "tensorboard.job_name": (BOARD, "mine", board),
    "csv_monitor.enabled": ({}, True, files),
    "csv_monitor.output_path": (CSV, "there", files),
    "csv_monitor.job_name": (CSV, "mine", files),
    "wandb.enabled": ({}, True, wandb),
    "wandb.group": (WANDB, "mine", wandb),
    "wandb.team": (WANDB, "mine", wandb),
    "wandb.project": (WANDB, "mine", wandb),
    "comet.enabled": ({}, True, comet),
    "comet.samples_log_interval": (COMET, 1, comet),
    "comet.project": (COMET, "mine", comet),
    "comet.workspace": (COMET, "mine", comet),
    "comet.api_key": (COMET, "mine", comet),
    "comet.experiment_name": (COMET, "mine", comet),
    "comet.experiment_key": (COMET, "mine" * 8, comet),
    "comet.online": (COMET, False, comet),
    "comet.mode": (COMET, "create", comet),
    "flops_profiler.enabled": ({"flops_profiler": {"output_file": "profile.txt"}}, True, text_of),
    "flops_profiler.recompute_fwd_factor": (
        {"wall_clock_breakdown": True, **FLOPS},
        1.0,
        profiled("bwd FLOPS", lambda line: line.split(":")[0]),
    ),
    "flops_profiler.profile_step": (FLOPS, 2, profiled("Profile Summary at step")),
    "flops_profiler.module_depth": (FLOPS, 0, text_of),
    "flops_profiler.top_modules": (FLOPS, 2, profiled("params      -", lambda line: line.count("': '"))),
    "flops_profiler.detailed": (FLOPS, False, text_of),
    "flops_profiler.output_file": ({"flops_profiler": {"enabled": True}}, "profile.txt", printed),
    "comms_logger.enabled": ({}, True, collectives),
    "comms_logger.verbose": (COMMS, True, collectives),
    "comms_logger.prof_all": (COMMS, False, collectives),
    "comms_logger.debug": (COMMS, True, collectives),
    "comms_logger.prof_ops": (
        {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["broadcast"]}},
        ["all_reduce"],
        collectives,
    ),
    "activation_checkpointing.cpu_checkpointing": (ACTIVATIONS, False, of("spilled")),
    "activation_checkpointing.budget": ({"activation_checkpointing": {"budget": "1GB"}}, None, of("recomputed")),
    "activation_checkpointing.partition_activations": (PARTED, False, parted),
    "activation_checkpointing.contiguous_memory_optimization": (CONTIGUOUS, False, contiguous),
    "activation_checkpointing.number_checkpoints": (CONTIGUOUS, 16, contiguous),
    "activation_checkpointing.profile": ({}, True, checkpoints_told),
    "curriculum_learning.enabled": (CURRICULUM, False, lengths),
    "curriculum_learning.curriculum_type": (CURRICULUM, "words", lengths),
    "curriculum_learning.min_difficulty": (CURRICULUM, 8, lengths),
    "curriculum_learning.max_difficulty": (CURRICULUM, 8, lengths),
    "curriculum_learning.schedule_type": (CURRICULUM, "custom", lengths),
    "curriculum_learning.schedule_config": (
        CURRICULUM,
        {"total_curriculum_step": 2, "difficulty_step": 2},
        lengths,
    ),
    "data_efficiency.enabled": (EFFICIENCY, False, lengths),
    f"{_SAMPLING}.enabled": (EFFICIENCY, False, lengths),
    f"{_SAMPLING}.curriculum_learning.enabled": (EFFICIENCY, False, lengths),
    f"{_SAMPLING}.curriculum_learning.curriculum_metrics": (
        EFFICIENCY,
        {"seqlen_truncate": {**CURRICULUM["curriculum_learning"], "min_difficulty": 6}},
        lengths,
    ),
    "deepc.curriculum": (CURRICULUM, "truncate", lengths),
    "deepc.activations.nvme_path": (ACTIVATIONS, None, of("spilled")),
    "deepc.activations.all": (ACTIVATIONS, False, of("spilled")),
    "deepc.activations.min_bytes": (ACTIVATIONS, 1 << 16, of("spilled")),
    "pipeline.activation_checkpoint_interval": ({}, 2, computed_again),
    "pipeline.stages": ({}, 2, refused),
    "tensor_parallel.autotp_size": ({}, 2, refused),
    "sequence_parallel_size": ({}, 2, refused),
    "sparse_attention": ({}, {"mode": "dense"}, refused),
    "tensor_parallel.preset_model": ({"tensor_parallel": {"autotp_size": 2}}, "bert", shards),
    "tensor_parallel.vocab_parallel_lm_head": ({"tensor_parallel": {"autotp_size": 2}}, False, shards),
    "tensor_parallel.partition_config": (
        {"tensor_parallel": {"autotp_size": 2}},
        {"layer_specs": [{"patterns": [r".*mlp\.c_(fc|proj)"], "partition_type": "skip"}]},
        shards,
    ),
    "deepc.pipeline.schedule": ({}, "gpipe", in_stages),
    "deepc.pipeline.chunks": ({"deepc": {"pipeline": {"schedule": "interleaved"}}}, 4, in_stages),
    "deepc.bucket_elems": ({}, 1024, of("bucket_elems")),
    "deepc.deterministic": ({}, "layout", of("policy")),
    "deepc.fuse": ({}, "auto", replaced),
    "deepc.memory_plan": ({}, "states", predicted),
    "deepc.max_lost_steps": (SGD, 2, of("error", lost=True, steps=4)),
    "deepc.run_dir": ({}, "run", files),
    "deepc.log.format": ({"steps_per_print": 1, **PLAIN}, "json", stderr_lines),
    "deepc.log.ranks": ({"steps_per_print": 1, **PLAIN}, "all", on_ranks("told")),
    "deepc.log.seconds": (PLAIN, 1e-9, lines),
    "deepc.log.total_steps": (
        {"steps_per_print": 1, **PLAIN},
        77,
        lambda raw, tmp: sum("/77" in t for t in run(raw).told),
    ),
    "deepc.timeline.steps": ({"deepc": {"timeline": {"folder": "trace"}}}, [1, 1], files),
    "deepc.timeline.modules": (TIMELINE, True, trace(lambda events: {e["name"] for e in events if e["ph"] == "X"})),
    "deepc.timeline.memory_ms": (
        TIMELINE,
        1,
        # moments, of which each has as many counters as there are kinds of memory in this process: 14 at the borders of
        # spans, and hundreds in the pauses, a few on a busy machine
        trace(lambda events: len({e["ts"] for e in events if e["ph"] == "C"}) > 20, pause=0.5),
    ),
    "deepc.timeline.folder": (TIMELINE, "elsewhere", files),
    "deepc.precision.overflow_steps": (AUTO, 1, series),
    "deepc.precision.divergence_factor": (AUTO, 3.0, series),
    "deepc.precision.divergence_steps": (AUTO, 5, series),
    "deepc.precision.fp32_steps": (AUTO, 14, series),
}


def test_every_used_key_has_a_row():
    assert set(ROWS) == USED, (sorted(USED - set(ROWS)), sorted(set(ROWS) - USED))


def _with(base: dict, path: str, value: Any) -> dict:
    for part in reversed(path.split(".")):
        value = {part: value}
    out = _merge(base, value)
    if path == "optimizer.params" or path == "scheduler.params":  # the whole object, not a merge into it
        section = path.split(".")[0]
        out[section] = {**base[section], "params": value[section]["params"]}
    return out


@pytest.mark.parametrize("path", sorted(ROWS))
def test_a_used_key_changes_something(path, tmp_path, monkeypatch):
    base, value, look = ROWS[path]
    changed = _with(base, path, value)
    seen = []
    for name, raw in (("base", base), ("base again", base), ("changed", changed)):
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        monkeypatch.chdir(folder)
        seen.append(look(raw, folder))
    assert equal(seen[0], seen[1]), f"the look at {path} is not repeatable: {seen[:2]}"
    assert not equal(seen[0], seen[2]), f"{path} = {value!r} changes nothing: {seen[0]}"


def test_the_document_calls_used_what_is_used():
    text = markdown()
    for path in USED:
        assert f"| `{path}` |" in text
