"""The rules of a configuration: which values a key takes, and which keys go together. Reads a raw dictionary into
canonical values by path; the typed tree over them is tree.py's. Everything that is wrong is found before anything is
raised."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.dtypes import dtype as dtype_named
from ..errors import ConfigError, did_you_mean
from .curriculum import CurriculumScheduler
from .keys import (
    ANY,
    AUTO_SCHEDULER_PARAMS,
    IN_NODE,
    KEYS,
    LATER_OPTIMIZERS,
    OLD_NAMES,
    OPTIMIZER_PARAMS,
    RENAMED_SECTIONS,
    TABLE,
    Key,
    State,
)
from .values import (
    _ALIASES,
    _KIND_WORDS,
    _SECTIONS,
    AUTO,
    BadValue,
    _auto_message,
    _show,
    check_value,
    is_auto_a_value,
    suggest,
)

TRIANGLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SIZES = {k.path for k in KEYS if k.section == "zero_optimization" and k.kind == "int" and k.auto and k.leaf != "stage"}
"""Counts of elements that change no result."""


OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps", "decay": "weight_decay", "l2": "weight_decay"}
"""What other libraries call arguments of Adam, too far from ours for a comparison of spelling."""


class InertKey(NamedTuple):
    """A key that was given and changes nothing here."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class OptimizerConfig:
    """Section optimizer, resolved.

    `backend` is "deepc" (deepc.optim.AdamW, `params` complete: lr, betas, eps, weight_decay, amsgrad; `decoupled` False
    means Adam with L2) or "torch" (torch.optim.<type>(**params), `params` as given)."""

    type: str
    params: dict[str, Any]
    backend: str
    decoupled: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """Section scheduler: the name of a class of lr_schedules or of torch.optim.lr_scheduler, and its arguments."""

    type: str
    params: dict[str, Any]


def default_optimizer() -> OptimizerConfig:
    """What is used when neither the configuration nor the caller gives an optimizer: AdamW with DeepSpeed's
    defaults."""
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    return OptimizerConfig("AdamW", {n: OPTIMIZER_PARAMS[n].default for n in names}, "deepc", True)


class Loader:
    """One load: walks the raw dict, checks each value against its row, applies the rules between keys. Afterwards:
    `values` (canonical values by path of what was given), `triangle` (the three batch sizes, None while one of them is
    "auto"), `optimizer`, `scheduler`, `auto`, `inert` and `errors`."""

    def __init__(self, raw: dict[str, Any], name: str, world_size: int, device_type: str, allow_auto: bool) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(
                f"world_size {world_size!r} must be a positive integer: the number of data-parallel ranks"
            )
        if device_type not in ("cpu", "cuda"):
            raise ConfigError(f'device_type {device_type!r} must be "cpu" or "cuda"')
        self.raw, self.name, self.world, self.device, self.allow_auto = raw, name, world_size, device_type, allow_auto
        self.values: dict[str, Any] = {}
        self.auto: list[str] = []
        self.inert: list[InertKey] = []
        self.errors: list[str] = []
        self.needs_batch = True
        self.triangle: tuple[int, int, int] | None = None
        self.optimizer: OptimizerConfig | None = None
        self.scheduler: SchedulerConfig | None = None

    def load(self) -> Loader:
        """Reads everything, and returns itself. ConfigError with all of `errors`, if there are any."""
        self._walk(self.raw, "")
        self._legacy()
        self.optimizer, self.scheduler = self._optimizer(), self._scheduler()
        self._rates_of_muon()
        self._reduction_rules()
        self._boundary_rules()
        self._precision_rules()
        self._offload_rules()
        self._activation_rules()
        self._budget_rules()
        self._curriculum_rules()
        self._zeropp_rules()
        self._timeline_rules()
        self._mesh_rules()
        self._triangle()
        if self.auto and not self.allow_auto:
            self._left_auto()
        if self.errors:
            raise ConfigError(
                self.errors[0]
                if len(self.errors) == 1
                else f"{len(self.errors)} things are wrong in the configuration:\n"
                + "\n".join(f"- {e}" for e in self.errors)
            )
        return self

    def get(self, path: str) -> Any:
        return self.values.get(path, TABLE[path].default)

    def fail(self, path: str, value: Any, text: str) -> None:
        self.errors.append(f"{self.name}: {path} = {_show(value)} {text}")

    # -- walking --

    def _walk(self, node: Mapping[str, Any], prefix: str) -> None:
        # Keys with dots last: TRL adds some beside the sections, and what stands in a section counts.
        for key, value in sorted(node.items(), key=lambda item: "." in item[0]):
            path = f"{prefix}.{key}" if prefix else key
            canonical = RENAMED_SECTIONS.get(path, path)
            canonical = _ALIASES.get(canonical, canonical)
            if "." in key and canonical in self.auto and value != AUTO:
                self.auto.remove(canonical)  # this is what fills it
            if "." in key and canonical in TABLE and (canonical in self.values or canonical in self.auto):
                why = f"it stands in section {TABLE[canonical].section} too, and that counts"
                self.inert.append(InertKey(path, value, why))
            elif canonical in TABLE:
                self._take(canonical, value)
            elif canonical in _SECTIONS:
                self._section(canonical, value)
            else:
                self.errors.append(f"{self.name}: unknown key {json.dumps(path)}.{suggest(path)}")

    def _section(self, path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            self._walk(value, path)
        elif path == "zero_optimization" and isinstance(value, bool):
            self.values["zero_optimization.stage"] = int(value)  # DeepSpeed's oldest form
        elif value is not None:
            inside = ", ".join(k.leaf for k in KEYS if k.section == path)
            self.fail(path, value, f"must be an object {{...}} with keys of: {inside}")

    def _take(self, path: str, value: Any) -> None:
        row = TABLE[path]
        if path in self.values or path in self.auto:
            self.errors.append(f"{self.name}: {path} is given twice, under its old and its new name. Remove one.")
            return
        if path == "pipeline.stages" and value == AUTO:
            value = None  # DeepSpeed's default: its models say it
        if isinstance(value, str) and value == AUTO and not is_auto_a_value(row):
            self._take_auto(row)
            return
        if path == "steps_per_print" and value == math.inf:
            value = None  # never, as accelerate writes it
        fraction = row.state is State.INERT and row.kind == "int" and isinstance(value, float) and value % 1 != 0
        try:
            # A hint of so many elements is often computed, 0.9 * hidden * hidden: what it rounds to changes no result.
            checked = check_value(row, round(value) if fraction and math.isfinite(value) else value)
        except BadValue as exc:
            self.fail(path, value, f"{exc}.")
            return
        if row.kind == "gated":
            self._gated(row, checked)
            return
        if (
            row.state in (State.LATER, State.REMOVED)
            and row.ok is not ANY
            and not any(_same(checked, o) for o in row.ok)
        ):
            self._refuse(row, path, value)
            return
        self.values[path] = checked
        if row.state is State.INERT and row.inert_on in ("", self.device):
            self.inert.append(InertKey(path, value, row.why))
        elif fraction:
            self.inert.append(InertKey(path, value, f"its fraction: it counts elements, and is read as {checked}"))

    def _take_auto(self, row: Key) -> None:
        if row.auto:
            self.auto.append(row.path)
        else:
            self.fail(
                row.path,
                AUTO,
                f"is not possible: no integration fills this key. Write {_KIND_WORDS.get(row.kind, 'a value')}, or "
                f"remove the key to get the default, {_show(row.default)}.",
            )

    def _left_auto(self) -> None:
        """What no integration has filled: an error, but for sizes that change no result. A second model (TRL's
        reference) is initialized with a configuration whose model-dependent sizes nobody has seen to; DeepSpeed takes
        its defaults for them."""
        if not set(self.auto) <= SIZES:
            self.errors.append(_auto_message(self.name, self.auto))
            return
        for path in self.auto:
            default = _show(TABLE[path].default)
            self.inert.append(InertKey(path, AUTO, f"nothing has filled it in, so it is the default, {default}"))
        self.auto.clear()

    def _gated(self, row: Key, section: Any) -> None:
        """A section that is off unless `enabled` says otherwise; a section without `enabled` is off only if it is
        empty."""
        if section is None or section == {}:
            return
        enabled = section.get("enabled", True)
        if enabled == AUTO:
            self.auto.append(f"{row.path}.enabled")
        elif enabled is not False:
            self._refuse(
                row, f"{row.path}.enabled" if "enabled" in section else row.path, section.get("enabled", section)
            )

    def _refuse(self, row: Key, path: str, value: Any) -> None:
        off = " or ".join(_show(o) for o in row.ok if o is not None) if row.ok is not ANY else ""
        if row.kind == "gated":
            off = '{"enabled": false}' if not path.endswith(".enabled") else "false"
        fix = f"Remove the key{' or set it to ' + off if off else ''}."
        if row.state is State.LATER:
            self.fail(path, value, f"asks for {row.why}, which deepc does not have yet. {fix}")
        else:
            self.fail(
                path,
                value,
                f"asks for a feature that DeepSpeed removed and deepc does not have; instead: {row.why}. {fix}",
            )

    # -- rules between keys --

    def _legacy(self) -> None:
        """Old names whose value goes to a new key."""
        for leaf in ("cpu_offload", "cpu_offload_param"):
            new = OLD_NAMES[old := f"zero_optimization.{leaf}"]
            if old in self.values and self.values[old] is not None:
                if new in self.values or new in self.auto:
                    self.errors.append(
                        f"{self.name}: {old} and {new} are both given; {old} is the old name. Remove it."
                    )
                self.values[new] = "cpu" if self.values[old] else "none"
        new = OLD_NAMES[old := "zero_optimization.stage3_gather_fp16_weights_on_model_save"]
        if old in self.values:
            if new in self.values or new in self.auto:
                self.errors.append(f"{self.name}: {old} and {new} are both given; {old} is the old name. Remove it.")
            self.values.setdefault(new, self.values[old])

    def _reduction_rules(self) -> None:
        """gradient_allreduce_op, with what DeepSpeed says of it."""
        path = "gradient_allreduce_op"
        given = self.values.get(path)
        if given is None:
            return
        if given.lower() not in ("mean", "sum"):
            self.errors.append(f"{self.name}: Invalid {path} {json.dumps(given)}: it must be mean or sum.")
            return
        self.values[path] = given.lower()
        if given.lower() == "mean":
            return
        zero, others = self.raw.get("zero_optimization"), self.raw.get("compile")
        limits = {
            "ZeRO stage 3": self.get("zero_optimization.stage") == 3,
            "ZenFlow": isinstance(zero, Mapping) and zero.get("zenflow") is not None,
            "DeepCompile": isinstance(others, Mapping) and bool(others.get("deepcompile")),
            'deepc.deterministic = "layout"': self.get("deepc.deterministic") is not None,
        }
        for what, here in limits.items():
            if here:
                self.fail(path, given, f"is not supported with {what}. Use mean, or remove the other.")

    def _boundary_rules(self) -> None:
        path = "managed_gradient_accumulation"
        limits = {
            "pipelines, whose train_batch is a whole step (pipeline.stages)": (self.get("pipeline.stages") or 1) > 1,
            'deepc.deterministic = "layout", which has to know the number of micro-batches before': (
                self.get("deepc.deterministic") is not None
            ),
        }
        for what, here in limits.items():
            if here and not self.get(path):
                self.fail(path, False, f"does not go with {what}. Remove one of the two.")

    def _precision_rules(self) -> None:
        narrow = self.get("data_types.grad_accum_dtype") or "fp32"
        if narrow != "fp32" and self.get("deepc.deterministic") is not None:
            self.fail(
                "data_types.grad_accum_dtype",
                narrow,
                'rounds after each micro-batch, and deepc.deterministic = "layout" adds them in another order, in fp32.'
                " Remove one of the two.",
            )
        if self.get("fp16.enabled") and self.get("bf16.enabled"):
            self.errors.append(f"{self.name}: fp16.enabled and bf16.enabled are both true. Set one of them to false.")
        auto = self.get("precision") == AUTO
        for path in ("fp16.enabled", "bf16.enabled"):
            if auto and (path in self.auto or (path in self.values and (self.values[path] or path == "bf16.enabled"))):
                self.fail(
                    "precision",
                    AUTO,
                    f"chooses between bf16 and fp32 by itself, and {path} is given too. Remove one of them.",
                )
        cast, on = dtype_named(self.get("torch_autocast.dtype")).short, self.get("torch_autocast.enabled")
        for path in ("fp16.enabled", "bf16.enabled"):
            if on and self.get(path) and not path.startswith(cast):
                self.fail(
                    "torch_autocast.dtype",
                    cast,
                    f"is another 16-bit type than that of {path}, and torch_autocast.enabled is true too. Set one of"
                    " the two to false, or this to the other's type.",
                )
        if auto and on:
            self.fail(
                "torch_autocast.enabled",
                True,
                'does not go with "precision": "auto", which changes what the model itself computes in. Remove one of'
                " them.",
            )
        for path in (k.path for k in KEYS if k.section == "deepc.precision"):
            if path in self.values and not auto:
                self.inert.append(InertKey(path, self.values[path], 'it needs "precision": "auto"'))

    def _offload_rules(self) -> None:
        stage = self.get("zero_optimization.stage")
        for what, needs in (("offload_optimizer", 1), ("offload_param", 3)):
            path = f"zero_optimization.{what}.device"
            device = self.get(path)
            if device == "nvme" and what == "offload_param":
                self._parameters_on_disk(path, stage)
            elif device == "nvme":
                self._nvme_rules(path)
            elif device == "cpu" and self.device == "cpu":
                self.inert.append(InertKey(path, device, "a CPU run keeps everything in host memory anyway"))
            elif device == "cpu" and stage < needs:
                self.inert.append(
                    InertKey(path, device, f"it needs ZeRO stage {needs} or higher, the stage is {stage}")
                )

        path = "zero_optimization.offload_optimizer.ratio"
        if (ratio := self.get(path)) < 1:
            if self.device == "cpu":
                why = "on a CPU run the part for the device and the part for the host lie in the same memory"
                self.inert.append(InertKey(path, ratio, why))
            elif self.get("zero_optimization.offload_optimizer.device") == "none":
                self.inert.append(InertKey(path, ratio, "nothing is offloaded (offload_optimizer.device)"))

        section = "zero_optimization.offload_optimizer"
        if self.get(f"{section}.device") != "nvme":
            reason = 'it is about states on disk (offload_optimizer.device "nvme")'
            keys = ("zero_optimization.sub_group_size", f"{section}.nvme_path", f"{section}.buffer_count")
            for key in (*keys, "aio.block_size", "aio.queue_depth"):
                if self.values.get(key) is not None:
                    self.inert.append(InertKey(key, self.values[key], reason))

        section = "zero_optimization.offload_param"
        if self.get(f"{section}.device") == "nvme":  # they act there, on every device
            self.inert = [row for row in self.inert if row.reason != IN_NODE]
        else:
            for key in (f"{section}.nvme_path", f"{section}.max_in_cpu"):
                if self.values.get(key) is not None:
                    reason = 'it is about parameters on disk (offload_param.device "nvme")'
                    self.inert.append(InertKey(key, self.values[key], reason))

    def _activation_rules(self) -> None:
        checkpoints, section = "activation_checkpointing", "deepc.activations"
        path, cut, piece = (
            f"{checkpoints}.{name}"
            for name in ("cpu_checkpointing", "partition_activations", "contiguous_memory_optimization")
        )
        number = f"{checkpoints}.number_checkpoints"
        on, folder, count = self.get(path), self.get(f"{section}.nvme_path"), self.get(number)
        contiguous = self.get(piece)
        if count is False:
            count = self.values[number] = None
        elif count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            self.fail(number, count, "must be a number of checkpoints, 1 or more, null or false.")
        if on and not folder and self.device == "cpu":
            reason = f"a CPU run keeps everything in host memory anyway; {section}.nvme_path puts activations on disk"
            self.inert.append(InertKey(path, on, reason))
        shared = self.get(cut) and (self.get("tensor_parallel.autotp_size") or 1) > 1
        if self.get(cut) and not shared:
            reason = "without tensor-parallel ranks (tensor_parallel.autotp_size) nobody else has the other parts"
            self.inert.append(InertKey(cut, True, reason))
        if contiguous and self.device != "cpu":
            self.fail(piece, True, f"exists on CPUs, and this run is on {self.device}. Remove it.")
        elif contiguous and on and folder:
            self.fail(
                piece, True, f"does not go with {path} and {section}.nvme_path, which put it on disk. Remove one."
            )
        elif contiguous and count is None:
            self.fail(piece, True, f"needs {checkpoints}.number_checkpoints, the checkpoints of a forward. Add it.")
        elif count is not None and not contiguous:
            self.inert.append(InertKey(number, count, f"it needs {piece}"))
        if not on or (self.device == "cpu" and not folder):
            needs = f"it needs {path}" + (f" and {section}.nvme_path" if self.device == "cpu" else "")
            keys = ["all"]
            if self.device != "cpu" or self.get(f"{checkpoints}.budget") is None:
                keys += ["nvme_path", *["min_bytes"] * (not shared and not contiguous)]
            for key in (f"{section}.{k}" for k in keys):
                if self.values.get(key):
                    self.inert.append(InertKey(key, self.values[key], needs))

    def _budget_rules(self) -> None:
        """activation_checkpointing.budget, which becomes bytes."""
        path = "activation_checkpointing.budget"
        given = self.values.get(path)
        if given is None:
            return
        nbytes = _bytes(given)
        if nbytes is None:
            self.fail(path, given, 'must be a number of bytes above 0, or text such as "8GB", "500 MiB".')
            return
        self.values[path] = nbytes

    def _curriculum_rules(self) -> None:

        def check(path: str, schedule: Any, of_lengths: bool) -> None:
            try:
                made = CurriculumScheduler(schedule)
                if of_lengths and made.kind != "custom" and (first := made.get_difficulty(1)) < 1:
                    raise ConfigError(
                        f"sequences of the first step would have {first} positions (min_difficulty"
                        f" {schedule['min_difficulty']}, schedule_config {_show(schedule['schedule_config'])}); begin"
                        " with difficulty_step or more"
                    )
            except ConfigError as exc:
                self.errors.append(f"{self.name}: {path}: {exc}")

        section = "curriculum_learning"
        names = ("curriculum_type", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
        if self.get(f"{section}.enabled"):
            schedule = {n: self.get(f"{section}.{n}") for n in names}
            check(section, schedule, schedule["curriculum_type"] == "seqlen")
        else:
            for key in (*(f"{section}.{n}" for n in names), "deepc.curriculum"):
                if self.values.get(key) is not None:
                    self.inert.append(InertKey(key, self.values[key], f"it needs {section}.enabled"))
        section = "data_efficiency.data_sampling.curriculum_learning"
        if not all(self.get(f"{s}.enabled") for s in ("data_efficiency", "data_efficiency.data_sampling", section)):
            return
        path = f"{section}.curriculum_metrics"
        metrics = self.get(path)
        if not metrics:
            self.fail(path, metrics, "must be an object {name: {min_difficulty, max_difficulty, schedule_type, ...}}.")
            return
        for name, metric in metrics.items():
            if not isinstance(metric, Mapping):
                self.fail(f"{path}.{name}", metric, "must be an object {min_difficulty, max_difficulty, ...}.")
                continue
            if (kind := metric.get("clustering_type", "single_cluster")) != "single_cluster":
                self.fail(
                    f"{path}.{name}.clustering_type",
                    kind,
                    "asks for samples drawn by their difficulty, which deepc does not have yet. Set it to"
                    ' "single_cluster", and see to the difficulty in engine.set_data_post_process_func.',
                )
            check(f"{path}.{name}", metric, name == "seqlen_truncate")

    def _nvme_rules(self, path: str) -> None:
        """Optimizer states on disk."""
        section = path.rpartition(".")[0]
        if not self.get(f"{section}.nvme_path"):
            self.fail(f"{section}.nvme_path", self.get(f"{section}.nvme_path"), "must name the folder for device nvme.")
        if self.get("precision") == AUTO:
            self.fail(
                path,
                "nvme",
                'does not go with "precision": "auto", which makes the fp32 masters anew when the precision changes. '
                "Set bf16.enabled, or nothing for fp32.",
            )
        if self.get("zero_optimization.zero_quantized_weights"):
            self.fail(
                path,
                "nvme",
                "does not go with zero_quantized_weights, which is made of the fp32 masters in memory. Remove one of "
                "them.",
            )
        if self.get("aio.block_size") % 4096:
            self.fail("aio.block_size", self.get("aio.block_size"), "must be a multiple of 4096 bytes.")

    def _parameters_on_disk(self, path: str, stage: Any) -> None:
        if isinstance(stage, int) and stage < 3:
            self.fail(
                path,
                "nvme",
                f"puts the parameters of ZeRO stage 3 on disk (NVMe), and zero_optimization.stage is {stage}. Set the"
                ' stage to 3, or this to "none".',
            )
        elif not self.get("zero_optimization.offload_param.nvme_path"):
            self.fail(
                path,
                "nvme",
                "needs a folder: set zero_optimization.offload_param.nvme_path to one on a fast local disk.",
            )

    def _zeropp_rules(self) -> None:
        """ZeRO++ acts on what crosses between CPU nodes; how many there are the engine knows."""
        stage = self.get("zero_optimization.stage")
        for leaf, needs, why in (
            ("zero_quantized_gradients", 0, ""),
            ("zero_quantized_weights", 1, "stage 0 sends no parameters"),
            ("zero_hpz_partition_size", 3, "parameters are partitioned at stage 3 only"),
        ):
            path = f"zero_optimization.{leaf}"
            value = self.get(path)
            if value <= (leaf == "zero_hpz_partition_size"):  # 0, 1 or false: not asked for
                continue
            if stage < needs:
                self.inert.append(InertKey(path, value, why))
            elif self.device == "cuda":
                self.fail(
                    path,
                    value,
                    "asks for ZeRO++ on GPUs, which deepc does not have yet (CPU nodes have it). Remove the key.",
                )
            elif leaf == "zero_hpz_partition_size" and self.world % value:
                self.fail(
                    path,
                    value,
                    f"does not divide the {self.world} rank(s). Set it to the number of ranks of a node, or to 1.",
                )

    def _timeline_rules(self) -> None:
        path = "deepc.timeline.steps"
        first, last = self.get(path)
        if path in self.values and (not first <= last or (last > 0 and first < 1)):
            self.fail(
                path, self.values[path], "must be two whole numbers, [first, last], 1 <= first <= last ([0, 0]: off)."
            )

    def _mesh_rules(self) -> None:
        """What follows counts data-parallel ranks."""
        stages = self.get("pipeline.stages") or 1
        if self.world % stages:
            self.fail(
                "pipeline.stages",
                stages,
                f"does not divide the {self.world} rank(s). Start a multiple of {stages}, or use fewer stages.",
            )
        else:
            self.world //= stages
        for key, size in (
            ("tensor_parallel.autotp_size", self.get("tensor_parallel.autotp_size") or 1),
            ("sequence_parallel_size", self.get("sequence_parallel_size")),
        ):
            if self.world % size:
                self.fail(key, size, f"does not divide {self.world} rank(s). Start a multiple of {size}, or lower it.")
            else:
                self.world //= size

    def _triangle(self) -> None:
        if any(f"{k}" in self.auto for k in TRIANGLE):
            return
        train, micro, accum = (self.values.get(k) for k in TRIANGLE)
        if train is None and micro is None:
            if self.needs_batch and not any(f" {k} = " in e for e in self.errors for k in TRIANGLE[:2]):
                self.errors.append(f"{self.name}: give train_batch_size or train_micro_batch_size_per_gpu (or both).")
            return
        shared = self.get("tensor_parallel.autotp_size") or 1
        samples = micro * accum * self.world if micro is not None and accum is not None else None
        if shared > 1 and samples is not None and train == samples * shared:
            self.inert.append(
                InertKey(
                    TRIANGLE[0],
                    train,
                    f"it counts the {shared} tensor-parallel ranks that share each sample, as DeepSpeed and"
                    f" transformers' Trainer do; a step has {samples} samples",
                )
            )
            train = samples
        triangle = resolve_batch(train, micro, accum, self.world)
        train2, micro2, accum2 = triangle
        if min(triangle) < 1 or train2 != micro2 * accum2 * self.world:

            def shown(key: str, given: int | None, now: int) -> str:
                return f"{key} {now}{'' if given is not None else ' (derived)'}"

            self.errors.append(
                f"{self.name}: {shown(TRIANGLE[0], train, train2)} is not {shown(TRIANGLE[1], micro, micro2)} * "
                f"{shown(TRIANGLE[2], accum, accum2)} * {self.world} rank(s) = {micro2 * accum2 * self.world}. "
                "Change one of them, or remove one: it is then derived."
            )
            return
        self.triangle = triangle

    # -- optimizer and scheduler --

    def _optimizer(self) -> OptimizerConfig | None:
        kind, params = self.values.get("optimizer.type"), self.values.get("optimizer.params")
        if kind is None:
            if params:
                self.fail(
                    "optimizer.params",
                    params,
                    'is given without optimizer.type. Add "type": "AdamW", or remove the section.',
                )
            return None
        params = dict(params or {})
        if "max_grad_norm" in params:
            self.fail(
                "optimizer.params.max_grad_norm",
                params.pop("max_grad_norm"),
                "is not an argument of an optimizer. Use gradient_clipping.",
            )
        lower = kind.lower()
        if lower in ("adam", "adamw"):
            return self._adam(lower, params)
        from ..optim.factory import OURS, torch_classes  # torch, for its classes' signatures

        ours = {name.lower(): name for name in OURS}
        if lower == "muon":  # as DeepSpeed reads the section: "betas" are of what is no matrix
            params = {"adam_betas" if k == "betas" else k: v for k, v in params.items()}
            params.setdefault("weight_decay", 0.0)
        if lower in ours:
            return self._by_signature(ours[lower], OURS[ours[lower]], params, "deepc")
        if lower in LATER_OPTIMIZERS:
            self.fail(
                "optimizer.type",
                kind,
                f"asks for {LATER_OPTIMIZERS[lower]}, which deepc does not have yet. Use AdamW or a torch.optim class.",
            )
            return None
        classes = torch_classes()
        if kind not in classes:
            known = did_you_mean(kind, [*OURS, *classes])
            self.fail("optimizer.type", kind, f"is neither {', '.join(OURS)} nor a class of torch.optim.{known}")
            return None
        if kind == "LBFGS":
            self.fail(
                "optimizer.type",
                kind,
                "needs a closure that runs the model again, which an engine's step() has not. Use another optimizer.",
            )
            return None
        return self._by_signature(kind, classes[kind], params, "torch")

    def _adam(self, lower: str, params: dict[str, Any]) -> OptimizerConfig:
        checked: dict[str, Any] = {}
        for key, value in params.items():
            path = f"optimizer.params.{key}"
            row = OPTIMIZER_PARAMS.get(key)
            if row is None:
                meant = f' Did you mean "{OTHER_NAMES[key]}"?' if key in OTHER_NAMES else ""
                meant = meant or did_you_mean(key, OPTIMIZER_PARAMS)
                self.errors.append(f"{self.name}: unknown key {json.dumps(path)}.{meant}")
                continue
            if value == AUTO and row.auto:
                self.auto.append(path)
                continue
            try:
                checked[key] = check_value(row, value)
            except BadValue as exc:
                self.fail(path, value, f"{exc}.")
                continue
            if row.state is State.LATER and checked[key] not in row.ok:
                self._refuse(row, path, value)
            elif row.state is State.INERT and not checked.get("torch_adam", params.get("torch_adam")):
                self.inert.append(InertKey(path, value, row.why))
        decoupled = lower == "adamw" or checked.pop("adam_w_mode", True)
        checked.pop("adam_w_mode", None)
        for key in ("bias_correction", "set_grad_none"):
            checked.pop(key, None)
        self._state_dtype(checked)
        if checked.pop("torch_adam", False):
            return OptimizerConfig("AdamW" if decoupled else "Adam", checked, "torch", decoupled)
        checked.pop("foreach", None), checked.pop("fused", None)
        return OptimizerConfig(
            "AdamW" if decoupled else "Adam", {**default_optimizer().params, **checked}, "deepc", decoupled
        )

    def _state_dtype(self, checked: dict[str, Any]) -> None:
        """Puts state_dtype in the place of DeepSpeed's fp32_optimizer_states, and refuses what does not go with it."""
        path, form = "optimizer.params.state_dtype", checked.pop("state_dtype", None)
        if checked.pop("fp32_optimizer_states", True) is False:
            if form not in (None, "bf16"):
                self.fail(path, form, "and fp32_optimizer_states false say different things. Remove one.")
            form = "bf16"
        if form in (None, "fp32"):
            return
        if checked.get("torch_adam"):
            self.fail(path, form, "is of deepc's Adam and AdamW. Remove torch_adam.")
        elif checked.get("amsgrad"):
            self.fail(path, form, "does not go with amsgrad. Remove one.")
        else:
            checked["state_dtype"] = form

    def _by_signature(self, kind: str, cls: type, params: dict[str, Any], backend: str) -> OptimizerConfig:
        """An optimizer whose arguments are those of its class; ZeRO may cut it if it is known to be elementwise."""
        from ..optim.factory import ACROSS_SHARDS, ELEMENTWISE, WHOLE_STATES, WHY_WHOLE, why_refused

        path = "optimizer.type"
        stage = self.get("zero_optimization.stage")
        if kind in WHOLE_STATES and stage == 3:
            self.fail(path, kind, f"at ZeRO stage {stage} {WHY_WHOLE}.")
        elif (
            kind not in ELEMENTWISE | ACROSS_SHARDS | WHOLE_STATES
            and stage > 0
            and not self.get("zero_allow_untested_optimizer")
        ):
            self.fail(
                path,
                kind,
                f"does not work element by element, so that ZeRO stage {stage} would change its result. Use stage 0, "
                "another optimizer, or set zero_allow_untested_optimizer to true.",
            )
        auto = ("lr", "betas", "eps", "weight_decay")
        own = {"freeze_step"} if kind in WHOLE_STATES else set()  # whose "auto" is the optimizer's
        checked = {k: v for k, v in params.items() if v != AUTO or k not in own}
        before = len(self.errors)
        self._check_signature(cls, "optimizer.params", checked, auto=auto, skip=1)
        given = {k: v for k, v in params.items() if v != AUTO or k in own}
        self._check_kinds(cls, {k: v for k, v in given.items() if k not in own})
        if len(self.errors) == before and (problem := why_refused(cls, given)) is not None:
            self.fail("optimizer.params", given, f"is not what {kind} takes: {problem}")
        return OptimizerConfig(kind, given, backend, kind != "Adam")

    def _check_kinds(self, cls: type, given: dict[str, Any]) -> None:
        """Arguments whose default is a number or a bool: a class may take the text "1e-3" for a number, and fail when
        it computes."""
        for name, argument in inspect.signature(cls).parameters.items():
            value = given.get(name, argument.default)
            if isinstance(argument.default, bool):
                good, word = isinstance(value, bool), "true or false"
            elif isinstance(argument.default, (int, float)):
                good, word = not isinstance(value, (bool, str, list, tuple, Mapping, type(None))), "a number"
            else:
                continue
            if not good:
                quotes = ", without quotes" if isinstance(value, str) else ""
                self.fail(f"optimizer.params.{name}", value, f"must be {word}{quotes}.")

    def _scheduler(self) -> SchedulerConfig | None:
        kind, params = self.values.get("scheduler.type"), self.values.get("scheduler.params")
        if kind is None:
            if params:
                self.fail("scheduler.params", params, "is given without scheduler.type. Add it, or remove the section.")
            return None
        from ..optim import schedules as lr_schedules

        try:
            schedule = lr_schedules.scheduler_class(kind)
        except ConfigError as exc:
            self.errors.append(f"{self.name}: {exc}")
            return None
        params = dict(params or {})
        self._check_signature(schedule, "scheduler.params", params, auto=AUTO_SCHEDULER_PARAMS, skip=1)
        params = {k: v for k, v in params.items() if not (isinstance(v, str) and v == AUTO)}
        if not any(a.startswith("scheduler.params.") for a in self.auto):
            try:
                lr_schedules.check_params(kind, params)
            except ConfigError as exc:
                self.errors.append(f"{self.name}: {exc}")
        return SchedulerConfig(kind, params)

    def _rates_of_muon(self) -> None:
        """Muon's two rates, where a schedule has one rate for all param groups, as DeepSpeed's."""
        if self.optimizer is None or self.optimizer.type != "Muon" or self.scheduler is None:
            return
        from ..optim.schedules import scheduler_class

        arguments = inspect.signature(scheduler_class(self.scheduler.type)).parameters
        for name in ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"):
            path = f"scheduler.params.{name}"
            if name not in arguments or path in self.auto:
                continue
            rate = self.scheduler.params.get(name, arguments[name].default)
            if isinstance(rate, (int, float)):
                why = f"{path} = {rate:g} is the rate of all param groups; give it as a list with one for each"
                for key in ("muon_lr", "adam_lr"):
                    if (own := self.optimizer.params.get(key)) is not None:
                        self.inert.append(InertKey(f"optimizer.params.{key}", own, why))

    def _check_signature(self, cls: type, prefix: str, params: dict[str, Any], auto: Any, skip: int) -> None:
        """Names of the arguments against the class's own signature; missing ones that have no default."""
        arguments = list(inspect.signature(cls).parameters.values())[skip:]
        names = {a.name for a in arguments}
        for key, value in params.items():
            if key not in names:
                self.errors.append(
                    f"{self.name}: unknown key {json.dumps(f'{prefix}.{key}')}: {cls.__name__} has no such "
                    f"argument.{did_you_mean(key, names)}"
                )
            elif isinstance(value, str) and value == AUTO:
                if key in auto:
                    self.auto.append(f"{prefix}.{key}")
                else:
                    self.fail(
                        f"{prefix}.{key}",
                        value,
                        "is not possible: no integration fills this key. Write a value or remove it.",
                    )
        for a in arguments:
            if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD and a.name not in params:
                self.errors.append(f"{self.name}: {prefix}.{a.name} is missing: {cls.__name__} needs it.")


_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024), ("", 1000))
}


def _bytes(value: Any) -> int | None:
    """8_000_000_000 of 8e9, "8GB", "8 gb"; GiB are 2**30. None for anything else."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        if found is None or found[2].lower() not in _UNITS:
            return None
        value = float(found[1]) * _UNITS[found[2].lower()]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < 2**62:
        return None
    return int(value)


def _same(a: Any, b: Any) -> bool:
    """Equality that does not take False for 0 or True for 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def resolve_batch(train: int | None, micro: int | None, accum: int | None, world: int) -> tuple[int, int, int]:
    """(train_batch_size, micro batch, accumulation) with the missing ones derived, by DeepSpeed's integer arithmetic.
    At least one of `train` and `micro` is given. The result need not fit together: the caller checks train == micro *
    accum * world."""
    if train is not None and micro is not None:
        return train, micro, accum if accum is not None else train // micro // world
    if train is not None:
        accum = 1 if accum is None else accum
        return train, train // world // accum, accum
    assert micro is not None  # the caller's contract, not input
    accum = 1 if accum is None else accum
    return micro * accum * world, micro, accum
