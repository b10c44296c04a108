"""A checkpoint into an engine: any number of ranks and any stage reads what any other wrote (saving.py). What does not
fit is found before anything is overwritten; where reading breaks off later, nothing is trained with the mixture."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ...checkpoint.store import (
    CheckpointReader,
    decode_client_state,
    deepspeed_tags,
    is_checkpoint,
    list_tags,
    set_rng_state,
)
from ...errors import CheckpointError, DiskError
from ...optim.scaling import check_scaler_state
from ...optim.schedules import follow_loaded
from ...parallel.expert.spread import name_among_all
from ...zero.parameters.gathered import fill
from ...zero.step.twin import Like
from ...zero.tiers.windows import Window
from ..base import say
from .saving import (
    AVERAGE,
    EXTRA,
    SCALAR,
    TAG_BYTES,
    TOKEN_BYTES,
    Place,
    averages,
    buffers,
    extra_states,
    frozen_parameters,
    names_of,
    of_ranks,
    together,
)

if TYPE_CHECKING:
    from ..base import EngineBase
    from ..policy.policies import AutomaticPrecision

logger = logging.getLogger("deepc")
_WHOLE = Place((), 0, None)


class What(NamedTuple):
    """What of a checkpoint is loaded. strict: every name must be there; module_only: neither RNG states nor counts."""

    strict: bool = True
    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False

    @property
    def everything(self) -> bool:
        """Whether nothing of the optimizer and the parameters stays as it is."""
        return self.strict and self.optimizer_states


def load(
    engine: EngineBase, directory: str | os.PathLike[str], tag: str | None, what: What
) -> tuple[str | None, dict[str, Any]]:
    """Collective. See Engine.load_checkpoint."""
    directory, tag = os.fspath(directory), None if tag is None else str(tag)
    found = tag is not None or os.path.lexists(os.path.join(directory, "latest")) or bool(list_tags(directory))
    # Errors, which say what to do: DeepSpeed's, and one checkpoint instead of the folder that has it.
    found = found or bool(deepspeed_tags(directory)) or is_checkpoint(directory)
    seen = engine.everyone.gather_all(torch.tensor([int(found)], device="cpu")).view(-1).tolist()
    if any(seen) and not all(seen):
        raise CheckpointError(
            f"load_checkpoint of {directory}: rank {seen.index(1)} sees a checkpoint there and rank {seen.index(0)}"
            " sees none. All ranks load together, so name the same folder on each, one that all of them see (a shared"
            " file system, or a copy on each node)"
        )
    if not found:
        logger.warning("no checkpoint in %s: nothing was loaded", directory)
        return None, {}
    engine.group.barrier()  # nobody reads the old values any more: a forward elsewhere, initialize
    if not engine.broken_step:
        with contextlib.suppress(DiskError):  # loading is the way out
            engine.guard.take_in_writes()  # of what the checkpoint lacks; memory that a script replaced is ours again
    doing = f"loading checkpoint {tag or 'latest'} of {directory}"
    with contextlib.ExitStack() as until:
        failure: Exception | None = None
        try:
            reader = until.enter_context(CheckpointReader(directory, tag))
            state = _checked(engine, reader, what)
        except Exception as exc:  # told to the other ranks, then raised
            failure = exc
        together(engine, doing, failure)
        _check_same_save(engine, reader)
        if what.optimizer_states and engine.auto_precision is not None:
            _take_precision(engine, state["engine"].get("precision"))
        with _made_whole(engine, what, doing):
            _load(engine, reader, state, what, doing)
        return reader.path, state["client"]


def _check_same_save(engine: EngineBase, reader: CheckpointReader) -> None:
    """CheckpointError unless all ranks have opened the same one: copies on nodes may be of different age, and another
    job may have published one meanwhile. Collective."""
    tokens, tags = of_ranks(engine, (reader.token, TOKEN_BYTES), (reader.tag, TAG_BYTES))
    if other := next((r for r, token in enumerate(tokens) if token != tokens[0]), 0):
        raise CheckpointError(
            f"load_checkpoint of {reader.directory}: rank 0 has found '{tags[0]}' (save {tokens[0]}) there and rank"
            f" {other} '{tags[other]}' (save {tokens[other]}), of which nothing was loaded. Copy one checkpoint to all"
            " nodes; or give the tag, if another job saves into the folder"
        )


def _checked(engine: EngineBase, reader: CheckpointReader, what: What) -> dict[str, Any]:
    """The client state of a checkpoint that fits the engine; else the error, with nothing overwritten."""
    state = reader.client_state()
    if not isinstance(state, dict) or not isinstance(state.get("engine"), dict):
        raise CheckpointError(f"checkpoint {reader.path} was not written by engine.save_checkpoint")
    saved = state["engine"]
    is_new = "kind" in saved["optimizer"]  # else of before extra states, buffers of spread experts and late parameters
    _check_names(engine, reader, what.strict, is_new)
    if what.optimizer_states:
        _check_states(engine, reader, saved["optimizer"])
        if engine.scaler is not None and saved["scaler"] is not None:
            check_scaler_state(engine.scaler, saved["scaler"])
    if what.lr_scheduler_states:
        _check_schedule(engine, reader, saved["lr_scheduler"])
    for broken, all_of_it in ((engine.broken_step, True), engine.broken_load):
        if broken and not (what.everything if all_of_it else what.strict):
            raise CheckpointError(
                f"{broken} Load the checkpoint with its optimizer states (load_optimizer_states=True) and"
                " load_module_strict=True, so that nothing of it is left"
            )
    return state


@contextlib.contextmanager
def _made_whole(engine: EngineBase, what: What, doing: str) -> Iterator[None]:
    """What raises inside leaves a mixture of two states, with which nothing is trained or saved until a checkpoint is
    loaded."""
    try:
        yield
    except BaseException as exc:  # ^C too
        why = str(exc).rstrip(".") or type(exc).__name__
        text = (
            f"{doing} broke off when a part of it was loaded ({why}), so the engine has values of two states: load a"
            " checkpoint, or make the engine anew."
        )
        engine.left_in_part(text, what.optimizer_states)
        raise
    engine.step_is_whole()
    if engine.broken_load[0]:
        engine.left_in_part("", False)


def _load(engine: EngineBase, reader: CheckpointReader, state: dict[str, Any], what: What, doing: str) -> None:
    """Collective."""
    saved = state["engine"]
    failure: Exception | None = None
    scalars: list[tuple[str, int, Any]] = []
    try:
        _begin_anew(engine, what.everything)
        _load_parameters(engine, reader)
        _load_averages(engine, reader)
        if what.optimizer_states:
            _load_states(engine, reader)
            _load_own(engine, reader, saved["optimizer"])
            scalars = _scalars(engine, reader)
        else:
            there = {n.partition("/")[2] for n in reader.tensors if n.startswith(("fp32/", "frozen/"))}
            engine.optimizer.rewritten(i for i, n in enumerate(names_of(engine)) if n in there)
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    together(engine, doing, failure)
    engine.broken_pass = False
    engine.hooks.discard()
    engine.step_policy.discard(anew=True)
    engine._backwards = 0
    if engine._config.managed_gradient_accumulation:
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()  # of the step that is given up
    engine.skips.applied()
    _publish(engine)
    try:
        _load_extra(engine, reader)
        if what.optimizer_states:
            engine.optimizer.load_hyper_state(saved["optimizer"], scalars)
        _load_engine_state(engine, saved, what)
        _resume_averages(engine, saved.get("averages", {}))
        same = saved.get("mesh", [1, reader.world_size, 1, 1]) == list(engine.mesh.shape)
        if same and not what.module_only:
            set_rng_state(reader.rank_state(engine.everyone.rank)["rng"])
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    together(engine, doing, failure)


def _resume_averages(engine: EngineBase, saved: dict[str, int]) -> None:
    for label, average in engine.averages.items():
        average.loaded(saved.get(label, 0))
    if lost := sorted(set(saved) - set(engine.averages)):
        logger.warning(
            "the checkpoint has the average '%s', and this engine has none of that label: make it before"
            " load_checkpoint (deepc.EMA(engine, ...)), else it begins with the weights",
            lost[0],
        )


def _publish(engine: EngineBase) -> None:
    """What reads parameters sees the loaded ones; the disk of some rank may refuse them. Collective."""
    failure: Exception | None = None
    engine.state.break_off("")  # everything was written anew
    try:
        engine.publish()
    except DiskError as exc:
        failure = exc
    if engine.plan.parameters_on:
        together(engine, "loading a checkpoint", failure)


def _begin_anew(engine: EngineBase, everything: bool) -> None:
    """Where a step was broken off, or states on disk are damaged, loading puts all of them in their place."""
    walk = engine.state.walk()
    if everything and walk is not None:
        walk.forget()
    if everything and engine.state.tier is not None:  # a save or a view may have found damage, not only a step
        engine.state.tier.begin_anew()


def _resume_data(engine: EngineBase, saved: dict[str, int] | None) -> None:
    """The loader of training_data goes on where it was."""
    if saved is not None and engine.own_dataloader is not None:
        say(engine, engine.own_dataloader.load_state_dict(saved))
        engine.forget_batches()


def _take_precision(engine: EngineBase, saved: dict[str, Any] | None) -> None:
    """precision "auto": the mode that the checkpoint was saved in, before its values are read. What can't be changed
    to stays as it is. Collective."""
    policy = cast("AutomaticPrecision", engine.step_policy)
    before = policy.auto.state_dict()
    try:
        if saved is not None:
            policy.auto.load_state_dict(saved)
        policy.resume()
    except Exception:
        policy.auto.load_state_dict(before)
        raise


def _check_names(engine: EngineBase, reader: CheckpointReader, strict: bool, is_new: bool) -> None:
    """CheckpointError unless parameters, buffers and extra states are those of the model (not `strict`: as far as they
    are in both), of its shapes. is_new: else what older checkpoints lack is kept as it is."""
    frozen = [(name_among_all(n, engine.module), p) for n, p, late in frozen_parameters(engine) if is_new or not late]
    ours = dict((*zip(names_of(engine), engine.state.trained), *frozen))
    want = {n: Place.of(engine, p).shape for n, p in ours.items()}
    have, more = _stored(reader, "fp32", "frozen"), _stored(reader, "buffer", EXTRA)
    kept = {name_among_all(n, engine.module): tuple(b.shape) for n, b in buffers(engine.module)}
    always = {n for n, _ in buffers(engine.module) if name_among_all(n, engine.module) == n}
    extra_names = {name_among_all(n, engine.module) for n, _ in extra_states(engine.module)}
    missing, extra = [n for n in want if n not in have], [n for n in have if n not in want]
    missing += [n for n in (*kept, *extra_names) if n not in more and (is_new or n in always)]
    if engine.parts is None:
        extra += [n for n in more if n not in kept and n not in extra_names]
    else:  # each has a part of the names, tensor-parallel ranks the same
        first = engine.mesh.coordinates(engine.everyone.rank).ep == 0
        here = sum(n in have for n, p in ours.items() if first or id(p) in engine.spread)
        known = round(sum(engine.parts.totals(here))) // engine.mesh.tp
        extra = [f"{len(have) - known} that no {'stage' if engine.part is not None else 'rank'} has"] * (
            known < len(have)
        )
    for kind, shapes, found in (("parameter", want, have), ("buffer", kept, more)):
        for name, shape in shapes.items():
            if name in found and found[name] != shape:
                raise CheckpointError(
                    f"checkpoint {reader.path}: {kind} '{name}' has shape {found[name]} there and {shape} in the model"
                )
    if strict and (missing or extra):
        raise CheckpointError(
            f"checkpoint {reader.path} does not fit the model: missing {missing[:5]}{'...' * (len(missing) > 5)},"
            f" unexpected {extra[:5]}{'...' * (len(extra) > 5)} ({len(missing)} and {len(extra)});"
            " load_module_strict=False loads what fits"
        )


def _stored(reader: CheckpointReader, *kinds: str) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the logical tensors of some kinds."""
    split = ((full.partition("/"), info) for full, info in reader.tensors.items())
    return {name: tuple(info.shape) for (kind, _, name), info in split if kind in kinds}


def _check_states(engine: EngineBase, reader: CheckpointReader, saved: dict[str, Any]) -> None:
    """CheckpointError unless there is what the optimizer wants; one of torch's gets the states that there are."""
    optimizer = engine.optimizer
    optimizer.check_saved(saved, reader.path)
    if not optimizer.core:
        return
    names = names_of(engine)
    found = [*((n, s.param) for n, s, _ in optimizer.owned_states()), *((n, i) for n, i, _ in optimizer.whole_states())]
    for name, i in found:
        if f"{name}/{names[i]}" not in reader.tensors:
            raise CheckpointError(
                f"checkpoint {reader.path} has no optimizer state '{name}' of '{names[i]}': it was"
                " saved with another optimizer or with that parameter frozen; pass load_optimizer_states=False"
            )


def _check_schedule(engine: EngineBase, reader: CheckpointReader, saved: Any) -> None:
    """CheckpointError if the checkpoint's schedule keeps nothing of what this one does: torch's classes take any
    dictionary, and would begin anew."""
    schedule = engine.lr_scheduler
    if schedule is None or not saved or not isinstance(saved, dict):
        if saved and schedule is None:
            say(
                engine,
                f"checkpoint {reader.path} was saved with an LR schedule, and this engine has none: learning rates stay"
                " as they are after loading",
                logging.WARNING,
            )
        elif schedule is not None and saved is None:
            say(
                engine,
                f"checkpoint {reader.path} has no state of an LR schedule: this engine's goes on from where it is",
                logging.WARNING,
            )
        return
    kept = schedule.state_dict() if hasattr(schedule, "state_dict") else {}
    if saved.keys().isdisjoint(kept) and (kept or not hasattr(schedule, "load_state_dict")):
        theirs, ours = (", ".join(sorted(map(str, keys))) or "nothing" for keys in (saved, kept))
        raise CheckpointError(
            f"checkpoint {reader.path} was saved with another LR schedule, which keeps {theirs};"
            f" {type(schedule).__name__} keeps {ours}. Use the same schedule, or pass load_lr_scheduler_states=False"
        )


def _prepare_torch_states(engine: EngineBase, reader: CheckpointReader) -> None:
    names, own = names_of(engine), {"fp32", "frozen", "buffer", EXTRA}
    kinds = sorted({full.partition("/")[0] for full in reader.tensors} - own)
    kinds = [kind for kind in kinds if not kind.startswith((SCALAR, AVERAGE, f"{EXTRA}."))]

    def has(i: int) -> dict[str, Like]:
        whole, here = Place.of(engine, engine.state.trained[i]).shape, tuple(engine.state.shapes[i])
        found = {kind: reader[full] for kind in kinds if (full := f"{kind}/{names[i]}") in reader.tensors}
        return {  # of a cut one this shard's
            kind: Like(here if info.shape == whole else info.shape, info.dtype) for kind, info in found.items()
        }

    engine.optimizer.prepare_states(has)


def _read(reader: CheckpointReader, name: str, out: torch.Tensor, begin: int = 0, place: Place = _WHOLE) -> None:
    """Fills the 1-D `out` (any device and floating dtype) from elements of logical tensor `name`, from element `begin`
    of what is here of it on."""
    stored = reader[name].dtype
    if out.device.type == "cpu" and out.dtype == stored and out.is_contiguous():
        reader.read(name, out, place.begin + begin, cut=place.cut)
        return
    buffer = torch.empty(out.numel(), dtype=stored, device="cpu")
    reader.read(name, buffer, place.begin + begin, cut=place.cut)
    out.copy_(buffer)


def _fill(reader: CheckpointReader, name: str, window: Window, begin: int, place: Place) -> None:
    """Fills a window of states from elements of logical tensor `name`."""
    if window.in_memory:
        _read(reader, name, window.view, begin, place)
        return
    for part in window.parts():
        values = torch.empty(part.length, dtype=torch.float32, device="cpu")
        _read(reader, name, values, begin + part.begin - window.begin, place)
        part.write(values)


@torch.no_grad()
def _load_parameters(engine: EngineBase, reader: CheckpointReader) -> None:
    st, plan, names = engine.state, engine.plan, names_of(engine)
    for s in plan.segments:
        name = names[s.param]
        source = f"fp32/{name}" if f"fp32/{name}" in reader.tensors else f"frozen/{name}"
        if source not in reader.tensors:
            continue
        flat, place = Window(st.flat, s.flat_begin, s.length), Place.of(engine, st.trained[s.param])
        if st.master is None:
            _fill(reader, source, flat, s.param_begin, place)
        else:
            _fill(reader, source, st.window(s), s.param_begin, place)
            st.window(s).copy_into(flat)
        if (copy := st.host_copy(s.flat_begin, s.length)) is not None:
            copy.copy_(flat.view)
    for own, p, late in frozen_parameters(engine):
        name = name_among_all(own, engine.module)
        source = f"frozen/{name}" if f"frozen/{name}" in reader.tensors else f"fp32/{name}"
        if source in reader.tensors:
            value = torch.empty(p.numel(), dtype=p.dtype, device="cpu")
            _read(reader, source, value, place=Place.of(engine, p))
            if late:
                p.data.copy_(value.view(p.shape))
            else:
                st.set_frozen(p, value.view(p.shape))
    for name, b in ((name_among_all(n, engine.module), b) for n, b in buffers(engine.module)):
        if f"buffer/{name}" in reader.tensors:
            value = torch.empty(b.numel(), dtype=b.dtype, device="cpu")
            _read(reader, f"buffer/{name}", value)
            fill(b, value.view(b.shape))


@torch.no_grad()
def _load_averages(engine: EngineBase, reader: CheckpointReader) -> None:
    """Averages that the checkpoint does not have begin as the weights that it has."""
    names = names_of(engine)
    for label, s, view in averages(engine):
        source = f"{AVERAGE}{label}/{names[s.param]}"
        if source in reader.tensors:
            _read(reader, source, view, s.param_begin, Place.of(engine, engine.state.trained[s.param]))
        else:
            engine.state.window(s).copy_to(view)


def _load_states(engine: EngineBase, reader: CheckpointReader) -> None:
    if not engine.optimizer.core:
        _prepare_torch_states(engine, reader)
    names = names_of(engine)
    for name, s, window in engine.optimizer.owned_states():
        place = Place.of(engine, engine.state.trained[s.param])
        _fill(reader, f"{name}/{names[s.param]}", window, s.param_begin, place)
    for name, i, whole in engine.optimizer.whole_states():
        _read(reader, f"{name}/{names[i]}", whole.view(-1))


def _scalars(engine: EngineBase, reader: CheckpointReader) -> list[tuple[str, int, Any]]:
    """(state name, parameter, value) of states that are a number per parameter: a tensor without dimensions, or a
    Python number."""
    index = {name: i for i, name in enumerate(names_of(engine))}
    found: list[tuple[str, int, Any]] = []
    for full, info in reader.tensors.items():
        kind, _, name = full.partition("/")
        if kind.startswith(SCALAR) and name in index:
            value = reader.tensor(full)
            found.append((kind.removeprefix(SCALAR), index[name], value.item() if info.shape else value))
    return found


def _load_extra(engine: EngineBase, reader: CheckpointReader) -> None:
    for own, module in extra_states(engine.module):
        take_extra(module, reader, name_among_all(own, engine.module))


def take_extra(module: torch.nn.Module, reader: CheckpointReader, name: str) -> bool:
    """Gives `module` the extra state that is stored as `name`. Whether there is one."""
    if (full := f"{EXTRA}/{name}") not in reader.tensors:
        return False
    tree = json.loads(bytes(reader.tensor(full).tolist()))
    parts = sorted((int(k.split("/", 1)[0].rpartition(".")[2]), k) for k in reader.tensors if _part_of(k, name))
    module.set_extra_state(decode_client_state(tree, [reader.tensor(k) for _, k in parts]))
    return True


def _part_of(full: str, name: str) -> bool:
    """Whether a logical tensor is one inside of the extra state `name`."""
    return full.startswith(f"{EXTRA}.") and full.partition("/")[2] == name


def _load_own(engine: EngineBase, reader: CheckpointReader, saved: dict[str, Any]) -> None:
    """What differs between ranks."""
    names = names_of(engine)

    def read(name: str, param: int, out: torch.Tensor, begin: int) -> None:
        _read(reader, f"{name}/{names[param]}", out, begin)

    engine.optimizer.take_own(saved, read)


def _load_engine_state(engine: EngineBase, saved: dict[str, Any], what: What) -> None:
    if not what.module_only:
        engine.global_steps, engine.global_samples = saved["global_steps"], saved["global_samples"]
        engine.global_tokens = saved.get("global_tokens", 0)  # an earlier version saved none, and nor does DeepSpeed
        engine.micro_steps, engine.skipped_steps = saved["micro_steps"], saved["skipped_steps"]
        engine.curriculum.load_state_dict(saved.get("curriculum", {}))
        if saved["world_size"] != engine.everyone.world or engine.in_accumulation:
            engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    if what.optimizer_states and engine.scaler is not None and saved["scaler"] is not None:
        engine.scaler.load_state_dict(saved["scaler"])
    if what.lr_scheduler_states and engine.lr_scheduler is not None and saved["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        if not what.optimizer_states:
            follow_loaded(engine.lr_scheduler, engine.optimizer.param_groups)
    engine.step_policy.loaded()
    if what.optimizer_states and engine.resumes_data:
        _resume_data(engine, saved.get("data"))
