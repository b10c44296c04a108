"""A checkpoint of DeepSpeed's becomes one of deepc's (`deepc ckpt import`).

    TAG/mp_rank_00_model_states.pt                      stages 0 to 2: the module, counts, schedule, client state
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt       stage 3: the same of rank R, trained parameters left empty
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   stages 1 to 3: masters and optimizer states of rank R
    TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt, TAG/zero/optimizer_state.pt   universal: in place of the latter

Stages 1 and 2 lay the parameters of a param group one after the other and cut that line into a part a rank, padded at
its end (and between parameters, where the file says so). Stage 3 cuts each parameter into parts of ceil(n / ranks); a
rank has its parts one after the other. At stage 0 the optimizer knows its parameters by number alone. What
ds_to_universal.py made holds whole parameters, of tensor-parallel ranks and stages of a pipeline too; those of stage 3
without their shape.

The files are pickles. They are read by torch's restricted unpickler, which makes what _ALLOWED lists and torch's own
tensors and containers, and calls nothing else. Tensors stay in their files, which are mapped, until they are written,
a part at a time. All is checked before a byte is written; the checkpoint appears by CheckpointWriter's one rename."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..core.ops import name_of
from ..errors import CheckpointError, CheckpointTypeError
from ..optim.states.formats import ADAMW
from .files import Source
from .store import LATEST, CheckpointWriter, deepspeed_tags, encode_client_state

_WHOLE, _COMMON = "zero", "optimizer_state.pt"  # of a universal checkpoint: its folder of parameters, its one file
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_CHUNK = 4 << 20  # elements that are converted at a time
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_GROUP_KEYS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "initial_lr")  # of a param group, what is taken
# Of a model file, what is not the script's client_state.
_OWN_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler"
    " data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config"
    " ds_version checkpoint_parallel_dimensions universal_checkpoint_info sparse_tensor_module_names"
    " csr_tensor_module_names num_experts".split()
)


class _Fields:
    """Stands for an object of DeepSpeed's: its attributes, without its methods."""


_ALLOWED: list[Any] = [
    (_Fields, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Fields, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Fields, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Fields, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def _numpy() -> list[Any]:
    """What pickles of NumPy's arrays and numbers name, in client_state."""
    try:
        import numpy as np
    except ImportError:
        return []
    makers = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    rooms = ("numpy.core.multiarray", "numpy._core.multiarray")  # of NumPy 1 and 2
    named = [(f, f"{room}.{name}") for name, f in makers.items() for room in rooms]
    return [np.ndarray, np.dtype, *{type(np.dtype(c)) for c in "?bBhHiIlLqQefd"}, *named]


# ---- files -----------------------------------------------------------------------------------------------------------
def _load(path: str) -> Any:
    """What torch.save wrote, its tensors mapped."""
    try:
        with safe_globals([*_ALLOWED, *_numpy()]):
            unknown = sorted(get_unsafe_globals_in_checkpoint(path))
            if not unknown:
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as exc:  # whatever a damaged file makes of them
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise CheckpointError(
            f"{path} can't be read: {reason}. It is damaged (truncated?), or in the format of torch before 1.6"
        ) from exc
    raise CheckpointTypeError(
        f"{path} holds objects of {', '.join(unknown)}. A pickle can run anything, so import makes tensors, NumPy"
        " values, JSON types and DeepSpeed's own alone. Leave them out of client_state when DeepSpeed saves; or, if you"
        " trust the file, load it where these classes are (torch.load(weights_only=False)), convert them, and save it"
    )


def _by_rank(folder: str, found: dict[int, str], count: int) -> list[str]:
    """Paths of ranks 0 .. count - 1."""
    if lost := [r for r in range(count) if r not in found]:
        like = found[min(found)] if found else "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{lost[0]}", like)
        raise CheckpointError(
            f"{folder} has no {name}: it was saved by {count} ranks, and files of {len(found)} are there. Copy all of a"
            f" checkpoint (of one that was made universal its folder {_WHOLE})"
        )
    if more := sorted(set(found) - set(range(count))):
        raise CheckpointError(
            f"{os.path.join(folder, found[more[0]])} belongs to another save: this one is of {count} ranks. Remove what"
            " an earlier run of more ranks left there"
        )
    return [os.path.join(folder, found[r]) for r in range(count)]


def _is_universal(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, _WHOLE, _COMMON))


def _model_files(folder: str) -> list[str]:
    """Paths of a universal checkpoint's, a process of tensor and pipeline parallelism each (of stage 3: a rank)."""
    names = sorted(filter(_MODEL_FILE.fullmatch, os.listdir(folder)))
    if not names:
        raise CheckpointError(f"{folder} has no mp_rank_*_model_states.pt, which say what its parameters are")
    return [os.path.join(folder, n) for n in names]


def _all_files(folder: str) -> list[str]:
    """Names, in an order of their own."""
    if not _is_universal(folder):
        return [found[rank] for found in _files(folder) for rank in sorted(found)]
    paths = [os.path.join(at, n) for at, _, names in os.walk(os.path.join(folder, _WHOLE)) for n in names]
    return sorted(os.path.relpath(p, folder) for p in (*paths, *_model_files(folder)))


def _files(folder: str) -> tuple[dict[int, str], dict[int, str]]:
    """Names of the model and of the optimizer files, by rank."""
    model: dict[int, str] = {}
    optim: dict[int, str] = {}
    names = sorted(os.listdir(folder))
    for pattern, what in (
        (r"(layer_\d+_)?expert_\d+_.*|expp_rank_.*", "experts of MoE layers, whose states each rank has its own of"),
        (r"layer_\d+-.*", "stages of a pipeline"),
        (r".*mp_rank_(0*[1-9]\d*)_.*", "tensor-parallel ranks or stages of a pipeline"),
        ("offloaded_tensors", "optimizer states that were swapped to NVMe"),
    ):
        if found := next((n for n in names if re.fullmatch(pattern, n)), None):
            raise CheckpointError(
                f"{os.path.join(folder, found)}: {what} are not imported as they lie here. DeepSpeed's"
                " ds_to_universal.py, where it takes the checkpoint, makes one of it that import takes; its"
                " zero_to_fp32.py writes the weights as safetensors, which a model loads before deepc.initialize"
            )
    prefix, whole = "", "mp_rank_00_model_states.pt"
    for name in names:
        if match := _MODEL_FILE.fullmatch(name):
            if model and (whole in (name, *model.values())):
                raise CheckpointError(
                    f"{folder} has weights of two saves: {model[min(model)]} and {name}. Remove those of the older one"
                )
            model[int(match[1] or 0)] = name
        elif match := re.fullmatch(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt", name):
            if optim and match[1] != prefix:
                raise CheckpointError(
                    f"{folder} has optimizer states of two saves: {optim[min(optim)]} and {name}. Remove those of the"
                    " older one"
                )
            prefix = match[1]
            optim[int(match[2])] = name
    return model, optim


def _token(folder: str, optimizer: bool) -> str | None:
    """Of the new checkpoint: nodes that import copies of one get the same, by which ranks know that they load the same.
    torch.save writes zip files, with a checksum of each value; None where it was told to leave them out."""
    seen = hashlib.sha256(str(optimizer).encode())
    for name in _all_files(folder):
        with zipfile.ZipFile(os.path.join(folder, name)) as archive:
            inside = [(i.filename.partition("/")[2], i.file_size, i.CRC) for i in archive.infolist()]
        if any(size and not checksum for _, size, checksum in inside):
            return None
        seen.update(json.dumps([name, inside]).encode())
    return seen.hexdigest()[:16]


# ---- values that lie in several tensors ------------------------------------------------------------------------------
class _Line:
    """1-D tensors, one after the other."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        for p in parts:
            if p.layout != torch.strided or p.device.type != "cpu":
                raise ValueError(f"a {p.layout} tensor on {p.device}, where a dense one with data should be")
        self.parts = [p.detach().reshape(-1) for p in parts]
        self.begins = list(itertools.accumulate((p.numel() for p in self.parts), initial=0))
        self.numel = self.begins[-1]

    def views(self, begin: int, count: int) -> Iterator[torch.Tensor]:
        for part, at in zip(self.parts, self.begins):
            low, high = max(begin, at), min(begin + count, at + part.numel())
            if low < high:
                yield part[low - at : high - at]


class _Place(NamedTuple):
    """`length` elements of the line `key` from element `begin` on."""

    key: int
    begin: int
    length: int


@dataclass
class _Optimizer:
    """What optimizer files say. lines: by kind ("fp32", "exp_avg", ...), by key; a kind that has no line of a key is
    zero there. places: where a parameter lies in the lines, by name. steps: of parameters that have not had all."""

    lines: dict[str, dict[int, _Line]]
    places: dict[str, list[_Place]]
    shapes: dict[str, tuple[int, ...]]
    kinds: tuple[str, ...] = ()
    step: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] | None = None

    def source(self, kind: str, name: str) -> Source:
        places, lines = self.places[name], self.lines.get(kind, {})
        zero = torch.zeros(1, dtype=torch.float32, device="cpu")

        def parts() -> Iterator[torch.Tensor]:
            for key, begin, length in places:
                views = lines[key].views(begin, length) if key in lines else [zero.expand(length)]
                for view in views:
                    for part in view.split(_CHUNK):
                        yield part.float().contiguous()

        return Source(math.prod(self.shapes[name]), torch.float32, parts)

    def check(self, path: str) -> None:
        for kind, lines in self.lines.items():
            for name, places in self.places.items():
                for key, begin, length in places:
                    if key in lines and begin + length > lines[key].numel:
                        raise CheckpointError(
                            f"{path}: {kind} of '{name}' ends at element {begin + length} of {lines[key].numel}. The"
                            " file is of another model or save than the weights, or its states lie elsewhere (NVMe)"
                        )


def _number(value: Any) -> Any:
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return list(value) if isinstance(value, tuple) else value


def _groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: _number(g[k]) for k in _GROUP_KEYS if k in g} for g in groups]


def _kinds(states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], config: Any, path: str) -> Any:
    """Names of Adam's moments; CheckpointError if the optimizer was another."""
    names = {n for s in states for n, v in s.items() if n != "step" and v is not None}
    chosen = config.get("optimizer") if isinstance(config, dict) else None
    called = str(chosen.get("type")) if isinstance(chosen, dict) else "the script's own"
    adam = all(("amsgrad" in g or "bias_correction" in g) and "max_coeff" not in g for g in groups)
    if not any(groups):  # elastic checkpoints have none
        adam = called.lower() in ("adam", "adamw")
    if not adam or not names <= set(_MOMENTS) or (names and not names >= set(_MOMENTS[:2])):
        raise CheckpointError(
            f"{path}: the optimizer ({called}) is not Adam or AdamW, whose states alone are imported; it has"
            f" {', '.join(sorted(names)) or 'none'}. --no-optimizer imports the weights"
        )
    return _MOMENTS[: 3 if _MOMENTS[2] in names or any(g.get("amsgrad") for g in groups) else 2]


def _step_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> int:
    return int(_number(state.get("step", group.get("step", 0))))


def _scaler(scaler: Any) -> dict[str, Any] | None:
    """In the form of optim.scaling."""
    if not isinstance(scaler, _Fields):
        return None
    state = vars(scaler)
    if not state.get("dynamic", "cur_hysteresis" in state):
        return {"loss_scale": float(state["cur_scale"])}
    return {
        "loss_scale": float(state["cur_scale"]),
        "hysteresis_left": int(state["cur_hysteresis"]),
        "step_count": int(state["cur_iter"]),
        "last_overflow_step": int(state["last_overflow_iter"]),
    }


# ---- stages 1 to 3 ---------------------------------------------------------------------------------------------------
class _Rank(NamedTuple):
    """An optimizer file. masters: by param group (stage 3: by sub-group); states: the same, by name."""

    masters: list[torch.Tensor]
    states: list[dict[str, Any]]
    same: dict[str, Any]  # what all ranks of a save have in common
    paddings: list[list[int]] | None


def _ranks_of(saved: Mapping[str, Any], path: str) -> int:
    """How many ranks share each param group of an optimizer file."""
    ranks = saved["partition_count"]
    ranks = ranks if isinstance(ranks, list) else [ranks]
    if len(set(ranks)) != 1:
        raise CheckpointError(f"{path}: experts of MoE layers, which other numbers of ranks share, are not imported")
    return int(ranks[0])


def _rank(path: str) -> _Rank:
    saved = _load(path)["optimizer_state_dict"]
    stage = int(saved.get("zero_stage", 1))  # the optimizer of bf16 at stage 1 does not say
    masters = saved["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
    base = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    if isinstance(base, list):  # "elastic", by group and without hyper-parameters
        groups: list[dict[str, Any]] = [{} for _ in base]
        states, own = base, [{"step": saved.get("base_optimizer_state_step", 0)} for _ in base]
    else:
        groups = base["param_groups"]
        own = [g for g in groups for _ in g["params"]]
        states = [base["state"].get(i, {}) for g in groups for i in g["params"]]
    if len(states) != len(masters):
        raise CheckpointError(f"{path}: it has masters of {len(masters)} groups and optimizer states of {len(states)}")
    same = {
        "ranks": _ranks_of(saved, path),
        "ZeRO stage": stage,
        "DeepSpeed's version": saved.get("ds_version"),
        "optimizer steps": [_step_of(s, g) for s, g in zip(states, own)],
        "groups": [{k: _number(v) for k, v in g.items() if k != "params"} for g in groups],
        "param_groups": _groups(groups),
        "loss scale": _scaler(saved.get("loss_scaler")),
    }
    return _Rank(masters, states, same, saved.get("param_alignment_paddings"))


def _same(first: Mapping[str, Any], other: Mapping[str, Any], path_of_first: str, path: str) -> None:
    for what, value in first.items():
        if other[what] != value:
            raise CheckpointError(
                f"{path} belongs to another save than {path_of_first}: {what} {other[what]} and {value}"
            )


def _sharded(
    files: list[str], shapes: list[dict[str, tuple[int, ...]]], config: Any, optimizer: bool
) -> tuple[_Optimizer, int]:
    """The optimizer, and the ZeRO stage. shapes: by param group, stage 3: by sub-group."""
    ranks = [_rank(path) for path in files]
    for rank, path in zip(ranks, files):
        _same(ranks[0].same | {"ranks": len(files)}, rank.same, files[0], path)
    first, path = ranks[0], files[0]
    stage, whole = first.same["ZeRO stage"], {n: s for group in shapes for n, s in group.items()}
    kinds = _kinds([s for r in ranks for s in r.states], first.same["groups"], config, path) if optimizer else ()

    def lines(kind: str) -> dict[int, _Line]:
        rows = [r.masters if kind == "fp32" else [s[kind] for s in r.states if kind in s] for r in ranks]
        if not any(rows):
            return {}  # no step was made yet
        if any(len(row) != len(first.masters) for row in rows):
            raise CheckpointError(f"{path}: not all param groups have the optimizer state '{kind}'")
        for sizes in zip(*([t.numel() for t in row] for row in rows)):
            _check_cut(sizes, stage == 3, kind, files)
        return {i: _Line(row) for i, row in enumerate(rows if stage == 3 else zip(*rows))}

    places, wanted = _cut(whole, len(ranks)) if stage == 3 else _in_groups(shapes, first.paddings, path)
    found = _Optimizer({k: lines(k) for k in ("fp32", *kinds)}, places, whole, kinds)
    found.check(path)
    for key, want in wanted.items():
        have = found.lines["fp32"][key].numel
        if have - want >= (1 if stage == 3 else 2 * len(ranks)):
            raise CheckpointError(
                f"{path}: there are {have} masters for {want} elements of parameters: it belongs to another model or"
                " save than the weights"
            )
    steps = first.same["optimizer steps"]
    found.step, found.groups = max(steps, default=0), first.same["param_groups"]
    found.steps = {n: step for group, step in zip(shapes, steps) for n in group if step != found.step}
    found.scaler = first.same["loss scale"]
    return found, stage


def _check_cut(sizes: tuple[int, ...], equal: bool, kind: str, files: list[str]) -> None:
    """CheckpointError unless ranks have parts of these sizes: equal ones; at stages 1 and 2 the last may be shorter,
    and what follows it empty."""
    last = max((r for r, n in enumerate(sizes) if n), default=0)
    odd = [r for r, n in enumerate(sizes) if n != sizes[0] and (equal or r < last or n > sizes[0])]
    if odd:
        raise CheckpointError(
            f"{files[odd[0]]} has {sizes[odd[0]]} elements of {kind} where {files[0]} has {sizes[0]}: one of them is"
            " damaged, or of another save"
        )


def _in_groups(
    shapes: list[dict[str, tuple[int, ...]]], paddings: list[list[int]] | None, path: str
) -> tuple[dict[str, list[_Place]], dict[int, int]]:
    """Stages 1 and 2: (places, elements of each line)."""
    places, wanted = {}, {}
    for g, group in enumerate(shapes):
        begin, between = 0, paddings[g] if paddings is not None else [0] * len(group)
        if len(between) != len(group):
            raise CheckpointError(f"{path}: group {g} has {len(between)} paddings for {len(group)} parameters")
        for (name, shape), padding in zip(group.items(), between):
            places[name] = [_Place(g, begin, math.prod(shape))]
            begin += math.prod(shape) + padding
        wanted[g] = begin
    return places, wanted


def _cut(whole: dict[str, tuple[int, ...]], ranks: int) -> tuple[dict[str, list[_Place]], dict[int, int]]:
    """Stage 3: (places, elements of each line)."""
    places, begin = {}, 0
    for name, shape in whole.items():
        n = math.prod(shape)
        part = -(-n // ranks)
        places[name] = [_Place(r, begin, max(0, min(part, n - r * part))) for r in range(ranks)]
        begin += part
    return places, dict.fromkeys(range(ranks), begin)


# ---- universal -------------------------------------------------------------------------------------------------------
def _universal(
    folder: str, shapes: Mapping[str, tuple[int, ...]], cut: bool, config: Any, optimizer: bool
) -> tuple[_Optimizer, int]:
    """The optimizer, and the ZeRO stage, of what ds_to_universal.py made. shapes: of the trained parameters, of one
    tensor-parallel rank (cut) or whole."""
    common = os.path.join(folder, _WHOLE, _COMMON)
    saved = _load(common)
    _ranks_of(saved, common)
    groups, inner = saved["param_groups"], saved.get("optimizer_state_dict", {}).get("state", {})
    at: dict[str, dict[str, str]] = {}
    for name in shapes:
        have = {k: os.path.join(folder, _WHOLE, name, f"{k}.pt") for k in ("fp32", *_MOMENTS, "step")}
        at[name] = {k: p for k, p in have.items() if os.path.isfile(p)}
        if "fp32" not in at[name]:
            raise CheckpointError(f"{have['fp32']} is not there: the weights have '{name}'. Copy all of a checkpoint")
    kinds = _kinds([{k: p for k, p in f.items() if k in _MOMENTS} for f in at.values()], groups, config, common)
    if optimizer and _MOMENTS[2] in kinds:
        raise CheckpointError(
            f"{common}: a universal checkpoint has no {_MOMENTS[2]}, which AdamW has here (amsgrad). Import the"
            " checkpoint that it was made of; --no-optimizer imports the weights"
        )
    out = _Optimizer({}, {}, {}, kinds if optimizer else (), groups=_groups(groups))
    of_all = max((_step_of(s, {}) for s in inner.values()), default=0)  # stage 3
    for key, (name, files) in enumerate(at.items()):
        for kind in ("fp32", *out.kinds):
            if kind in files:
                out.lines.setdefault(kind, {})[key] = _Line([_parameter(files[kind], name, kind, out, shapes, cut)])
        out.places[name] = [_Place(key, 0, math.prod(out.shapes[name]))]
        out.steps[name] = int(_number(_load(files["step"]))) if "step" in files else of_all if out.kinds else 0
    out.step = max(out.steps.values(), default=0)
    out.steps = {n: step for n, step in out.steps.items() if step != out.step}
    out.scaler = _scaler(saved.get("loss_scaler"))
    return out, int(saved.get("zero_stage", 1))


def _parameter(
    path: str, name: str, kind: str, out: _Optimizer, shapes: Mapping[str, tuple[int, ...]], cut: bool
) -> torch.Tensor:
    """One value of a parameter, whole; its shape goes to out.shapes with the masters."""
    found = _load(path)
    value = found["param"] if isinstance(found, dict) else found
    unpadded = isinstance(found, dict) and bool(found.get("vocab_tensor"))  # rows of a padded vocabulary are left out
    flat = value.dim() == 1 and value.numel() == math.prod(shapes[name])
    shape = shapes[name] if flat else tuple(value.shape)
    if kind == "fp32":
        out.shapes[name] = shape
    if shape != out.shapes[name] or not (cut or unpadded or shape == shapes[name]):
        wanted = shapes[name] if kind == "fp32" else out.shapes[name]
        raise CheckpointError(f"{path}: '{name}' has shape {tuple(value.shape)}, and {wanted} in the weights")
    return cast(torch.Tensor, value)


# ---- stage 0 ---------------------------------------------------------------------------------------------------------
def _unsharded(saved: Mapping[str, Any] | None, weights: dict[str, torch.Tensor], config: Any, path: str) -> _Optimizer:
    """weights: all parameters, in the module's order. saved: None: the weights alone."""
    shapes = {n: tuple(t.shape) for n, t in weights.items()}
    if saved is None:
        places = {n: [_Place(i, 0, t.numel())] for i, (n, t) in enumerate(weights.items())}
        return _Optimizer({"fp32": {i: _Line([t]) for i, t in enumerate(weights.values())}}, places, shapes)
    masters = saved.get("fp32_groups_flat") or saved.get("fp32_groups")
    inner = saved["optimizer_state_dict"] if masters is not None else saved
    groups, states = inner["param_groups"], inner["state"]
    kinds = _kinds(list(states.values()), groups, config, path)
    out = _Optimizer({}, {}, shapes, kinds, groups=_groups(groups))
    counts = {i: _step_of(states.get(i, {}), g) if i in states else 0 for g in groups for i in g["params"]}
    out.step = max(counts.values(), default=0)
    if masters is None:
        names = _numbered(groups, states, shapes, path)
        out.lines = {"fp32": {i: _Line([weights[n]]) for n, i in names.items()}}
        for kind in kinds:
            out.lines[kind] = {i: _Line([s[kind]]) for i, s in states.items() if kind in s}
        out.places = {n: [_Place(i, 0, weights[n].numel())] for n, i in names.items()}
        out.steps = {n: counts[i] for n, i in names.items() if counts[i] != out.step}
        out.check(path)
        return out
    out.lines = {"fp32": {g: _Line([m] if isinstance(m, torch.Tensor) else m) for g, m in enumerate(masters)}}
    for kind in kinds:
        rows = [[states[i][kind] for i in g["params"] if i in states] for g in groups]
        out.lines[kind] = {i: _Line(row) for i, row in enumerate(rows) if row}
    out.places = _recognised(out.lines["fp32"], weights, path)
    out.check(path)
    if "cur_scale" in saved:
        out.scaler = {"loss_scale": float(saved["cur_scale"])}
        if saved["dynamic_loss_scale"]:  # it has no hysteresis
            out.scaler |= {
                "hysteresis_left": 1,
                "step_count": int(saved["cur_iter"]),
                "last_overflow_step": int(saved["last_overflow_iter"]),
            }
    return out


def _in_order(
    names: Sequence[str], size: Callable[[str], int], fits: Callable[[str, int], bool], total: int, path: str
) -> dict[str, int]:
    """Where in a group of `total` elements (of fp32 training: parameters) each of its parameters begins. It has some of
    `names`, in their order; CheckpointError where that can be in more than one way (the first and the last differ)."""
    left, at = {}, 0
    for name in names:
        if at + size(name) <= total and fits(name, at):
            left[name] = at
            at += size(name)
    right, end = {}, total
    for name in reversed(names):
        if size(name) <= end and fits(name, end - size(name)):
            end -= size(name)
            right[name] = end
    if at == total and left == right:
        return left
    differ = sorted(set(left.items()) ^ set(right.items()))
    which = f"those of '{differ[0][0]}'" if differ else "whose"
    raise CheckpointError(
        f"{path}: a checkpoint of stage 0 has no names for the optimizer's states, and which are {which} can't be told"
        " (of frozen and trained parameters of one shape). Load it in DeepSpeed with ZeRO stage 1 and"
        " load_optimizer_states, save it there, and import that; or import the weights alone: --no-optimizer"
    )


def _of_shape(known: list[tuple[int, ...] | None], shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str, int], bool]:
    return lambda name, at: known[at] == shapes[name]


def _numbered(
    groups: Sequence[Mapping[str, Any]], states: Mapping[int, Any], shapes: dict[str, tuple[int, ...]], path: str
) -> dict[str, int]:
    """name -> number in torch's optimizer. Where it got all parameters as one group, the order of the module tells."""
    of_state = {i: tuple(s["exp_avg"].shape) for i, s in states.items()}
    if len(groups) == 1 and len(groups[0]["params"]) == len(shapes):
        names = dict(zip(shapes, groups[0]["params"]))
        if all(of_state.get(i, shapes[n]) == shapes[n] for n, i in names.items()):
            return names
    names = {}
    for group in groups:
        numbers = group["params"]
        known = [of_state.get(i) for i in numbers]
        found = _in_order(list(shapes), lambda n: 1, _of_shape(known, shapes), len(numbers), path)
        names |= {n: numbers[at] for n, at in found.items()}
    return names


def _rounded(line: _Line, weights: Mapping[str, torch.Tensor]) -> Callable[[str, int], bool]:
    """Whether a weight's master can begin at an element of the line: rounded it is the weight."""

    def fits(name: str, begin: int) -> bool:
        at, flat = 0, weights[name].reshape(-1)
        for view in line.views(begin, flat.numel()):
            if not torch.equal(view.to(flat.dtype), flat[at : at + view.numel()]):
                return False
            at += view.numel()
        return True

    return fits


def _recognised(masters: dict[int, _Line], weights: dict[str, torch.Tensor], path: str) -> dict[str, list[_Place]]:
    """Where each parameter lies in the masters of 16-bit training."""
    sizes = {n: w.numel() for n, w in weights.items() if w.numel()}
    places: dict[str, list[_Place]] = {}
    for g, line in masters.items():
        found = _in_order(list(sizes), sizes.__getitem__, _rounded(line, weights), line.numel, path)
        places |= {n: [_Place(g, at, sizes[n])] for n, at in found.items()}
    return places


# ---- the whole -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Imported:
    """What import_checkpoint did. left_out: key of the client state -> why it is not in the new checkpoint."""

    path: str
    stage: int
    ranks: int
    parameters: int
    elements: int
    kinds: tuple[str, ...]
    step: int
    left_out: dict[str, str]


def locate(path: str | os.PathLike[str], tag: str | None) -> str:
    """The folder of a tag of DeepSpeed's that PATH means."""
    folder = os.path.abspath(os.fspath(path))
    tags = deepspeed_tags(folder)
    if tag is None and "" in tags:
        return folder
    if not tags:
        raise CheckpointError(f"{os.fspath(path)} holds no checkpoint of DeepSpeed's: no folder with *_model_states.pt")
    if tag is None:
        latest = os.path.join(folder, LATEST)
        if not os.path.isfile(latest):
            latest += "_universal"
        if os.path.isfile(latest):
            with open(latest, errors="replace") as f:
                tag = f.readline().strip()
        elif len(tags) == 1:
            tag = tags[0]
    if tag not in tags:
        raise CheckpointError(
            f"there is no checkpoint {tag!r} of DeepSpeed's in {os.fspath(path)}. It has: {', '.join(tags)}"
        )
    return os.path.join(folder, tag)


@contextlib.contextmanager
def _as_deepspeed_writes(folder: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder} is not laid out as DeepSpeed does it: {type(exc).__name__}: {exc}. It may be damaged, or of a"
            " version that deepc does not know"
        ) from exc


@dataclass
class _Whole:
    """All that a checkpoint of deepc is made of. plain: "frozen/NAME", "buffer/NAME", "extra/NAME" -> values."""

    optimizer: _Optimizer
    plain: dict[str, tuple[tuple[int, ...], torch.Tensor | Source]]
    engine: dict[str, Any]
    client: dict[str, Any]
    left_out: dict[str, str]
    ranks: int


def import_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    optimizer: bool = True,
) -> Imported:
    """Writes the DeepSpeed checkpoint of `path` (a folder that DeepSpeed's save_checkpoint got, or FOLDER/TAG) as
    `out`/TAG, which engine.load_checkpoint(out) takes at any stage and number of ranks. optimizer: with Adam's states.
    CheckpointError names the file and what is wrong with it; nothing is written then."""
    folder = locate(path, tag)
    out, name = os.path.abspath(os.fspath(out)), os.path.basename(folder)
    if os.path.lexists(os.path.join(out, name)):
        raise CheckpointError(f"{os.path.join(out, name)} is there already: import writes a new folder")
    with _as_deepspeed_writes(folder):
        whole = _read(folder, optimizer)
    encode_client_state(whole.engine, "the state of the run")
    fresh = not os.path.isdir(out)
    writer = CheckpointWriter(out, name)
    writer.token = _token(folder, optimizer) or writer.token  # what is not there yet lies under a name of its own
    done = False
    try:
        _write(writer, whole)
        final = writer.publish({"client": whole.client, "engine": whole.engine})
        done = True
    finally:
        if not done:
            writer.abort()
            if fresh:
                with contextlib.suppress(OSError):
                    os.rmdir(out)
    o = whole.optimizer
    elements = sum(math.prod(o.shapes[n]) for n in o.places)
    return Imported(final, whole.engine["stage"], whole.ranks, len(o.places), elements, o.kinds, o.step, whole.left_out)


def _write(writer: CheckpointWriter, whole: _Whole) -> None:
    o = whole.optimizer
    for name in o.places:
        for kind in ("fp32", *o.kinds):
            writer.add(f"{kind}/{name}", o.source(kind, name), shape=o.shapes[name])
        if o.kinds and name in o.steps:
            writer.add(f"scalar.step/{name}", torch.tensor([o.steps[name]], device="cpu"))
    for full, (shape, values) in whole.plain.items():
        writer.add(full, values, shape=shape)
    writer.write()


def _read(folder: str, optimizer: bool) -> _Whole:
    """What is in the files, its tensors still in them; CheckpointError unless they are of one save, and whole."""
    universal = _is_universal(folder)
    model, optim = ({}, {}) if universal else _files(folder)
    paths = _model_files(folder) if universal else [os.path.join(folder, model[min(model)])]
    path = paths[0]
    first = _load(path)
    module, shapes, ranks = first["module"], first["param_shapes"], int(first["dp_world_size"])
    whole, config = os.path.basename(path).startswith("mp_rank"), first.get("ds_config")
    processes = {match[2] for p in paths if (match := _MODEL_FILE.fullmatch(os.path.basename(p)))}
    cut = len(processes) > 1 or int(first.get("mp_world_size") or 1) != 1
    if not universal and not isinstance(module, dict):
        raise CheckpointError(f"{path} has no weights: stages of a pipeline are imported of a universal checkpoint")
    if not universal and cut:
        raise CheckpointError(
            f"{path}: weights of {first['mp_world_size']} tensor-parallel ranks are imported of a universal checkpoint"
        )
    if not universal and not whole:
        paths = _by_rank(folder, model, ranks)
    models = [first, *(_load(p) for p in paths[1:])]
    for other, p in zip(models[1:], paths[1:]):
        _same({k: first[k] for k in ("dp_world_size", "global_steps", "ds_version")}, other, path, p)
    if universal and (cut or not isinstance(module, dict)):
        module = _nothing_beside_trained(models, path)
    ties, buffer_names = dict(first.get("shared_params") or {}), set(first["buffer_names"])
    tensors = {n: t for n, t in module.items() if isinstance(t, torch.Tensor) and n not in ties}
    extra = {n: v for n, v in module.items() if n.endswith("_extra_state") and n not in buffer_names}
    buffers = _once({n: t for n, t in tensors.items() if n in buffer_names}, ties)
    weights = {n: t for n, t in tensors.items() if n not in buffer_names and n not in extra}
    weights = _once(weights, ties) if whole else weights
    if universal:
        trained = {n: tuple(size) for m in models for group in m["param_shapes"] for n, size in group.items()}
        found, stage = _universal(folder, trained, cut, config, optimizer)
    elif shapes is not None:
        groups = [{n: tuple(s) for n, s in group.items()} for group in shapes]
        found, stage = _sharded(_by_rank(folder, optim, ranks), groups, config, optimizer)
    else:
        saved = first["optimizer"] if optimizer else None
        found, stage = _unsharded(saved, weights, config, path), 0
    if found.kinds and not found.lines.get(found.kinds[0]) and first["global_steps"] > first["skipped_steps"]:
        raise CheckpointError(
            f"{folder} has no optimizer states of its {first['global_steps']} steps. --no-optimizer imports the weights"
        )
    updates = int(first["global_steps"]) - int(first["skipped_steps"])
    # Some begin with an update by nothing.
    if whole and stage and weights and found.kinds and not 0 <= found.step - updates <= 1:
        alike = [_rounded(found.lines["fp32"][p[0].key], weights)(n, p[0].begin) for n, p in found.places.items()]
        if sum(alike) < len(alike) / 2:
            raise CheckpointError(
                f"{path} belongs to another save than the optimizer's files: it is of {updates} updates, they are of"
                f" {found.step}, and its weights are not their masters, rounded"
            )
    plain: dict[str, tuple[tuple[int, ...], torch.Tensor | Source]] = {
        f"buffer/{n}": (tuple(t.shape), _host(t)) for n, t in buffers.items()
    }
    if whole:
        rest = {n: t for n, t in weights.items() if n not in found.places}
        plain |= {f"frozen/{n}": (tuple(t.shape), _host(t)) for n, t in rest.items()}
    else:
        plain |= _frozen([m.get("frozen_param_fragments") or {} for m in models], first, path)
    for n, value in extra.items():
        tree, inside = encode_client_state(value, f"the extra state {n}")
        text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
        plain[f"extra/{n}"] = (tuple(text.shape), text)
        plain |= {f"extra.{i}/{n}": (tuple(t.shape), t) for i, t in enumerate(inside)}
    client, left_out = _client_state({k: v for k, v in first.items() if k not in _OWN_KEYS})
    dtype = next((weights[n].dtype for n in found.places if n in weights), torch.float32)
    engine = {
        "ties": ties,
        "stage": stage,
        "world_size": 0,  # of no engine: micro-batches are counted anew, random generators go on as they are
        "mesh": [],
        "dtype": name_of(dtype),
        "global_steps": int(first["global_steps"]),
        "global_samples": int(first.get("global_samples") or 0),
        "micro_steps": 0,
        "skipped_steps": int(first["skipped_steps"]),
        "optimizer": {
            "type": "AdamW" if found.kinds else "no optimizer",
            "kind": [ADAMW, *found.kinds] if found.kinds else ["none"],
            "step": found.step,
            "param_groups": found.groups,
        },
        "scaler": found.scaler if dtype == torch.float16 else None,
        "precision": None,
        "lr_scheduler": first.get("lr_scheduler"),
        "data": None,
        "curriculum": {},
        "averages": {},
        "imported": f"DeepSpeed {first.get('ds_version')}",
    }
    return _Whole(found, plain, engine, client, left_out, ranks)


def _nothing_beside_trained(models: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    """Of a universal checkpoint of tensor-parallel ranks or stages: {}; what each had besides is nowhere whole."""
    for m in models:
        module = m["module"] if isinstance(m["module"], dict) else {}
        trained = {n for group in m["param_shapes"] for n in group} | set(m.get("shared_params") or {})
        beside = [*m["buffer_names"], *(m.get("frozen_param_shapes") or {}), *(set(module) - trained)]
        if beside:
            raise CheckpointError(
                f"{path}: '{min(beside)}' is a buffer or not trained, and of tensor-parallel ranks and stages of a"
                " pipeline trained parameters alone are imported. DeepSpeed's zero_to_fp32.py, where it takes the"
                " checkpoint, writes the weights as safetensors, which a model loads before deepc.initialize"
            )
    return {}


def _host(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense.contiguous().view(-1)


def _once(tensors: dict[str, torch.Tensor], ties: dict[str, str]) -> dict[str, torch.Tensor]:
    """Each tensor under its first name; the others join `ties`."""
    first: dict[Any, str] = {}
    out = {}
    for name, t in tensors.items():
        key = (t.data_ptr(), tuple(t.shape), t.dtype) if t.layout == torch.strided and t.numel() else name
        if (known := first.setdefault(key, name)) != name:
            ties[name] = known
        else:
            out[name] = t
    return out


def _frozen(
    fragments: list[Mapping[str, torch.Tensor]], first: Mapping[str, Any], path: str
) -> dict[str, tuple[tuple[int, ...], torch.Tensor | Source]]:
    """Stage 3: frozen parameters, each rank's file has a part of each."""
    out: dict[str, tuple[tuple[int, ...], torch.Tensor | Source]] = {}
    for name, size in (first.get("frozen_param_shapes") or {}).items():
        line, shape = _Line([f[name] for f in fragments]), tuple(size)
        if line.numel < math.prod(shape):
            raise CheckpointError(
                f"{path}: the frozen parameter '{name}' of shape {shape} has {line.numel} elements in all ranks' files"
            )
        out[f"frozen/{name}"] = shape, Source(math.prod(shape), line.parts[0].dtype, _views(line, math.prod(shape)))
    return out


def _views(line: _Line, count: int) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: line.views(0, count)


def _client_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(what a checkpoint of deepc holds of it, why not the rest by key)."""
    kept, left_out = {}, {}
    for key, value in state.items():
        try:
            encode_client_state({key: value})
            kept[key] = value
        except CheckpointTypeError as exc:
            left_out[str(key)] = str(exc)
    return kept, left_out
