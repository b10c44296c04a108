"""An engine's checkpoint: what is in it, under which names, and how a rank finds its part again.

Logical tensors: `fp32/<parameter>` (masters, or the parameters themselves in fp32 training), `<state>/<parameter>` for
each optimizer state, `scalar.<state>/<parameter>` for one that is a number per parameter (a step count, where it is not
that of all), `average.<label>/<parameter>` for each deepc.EMA, `frozen/<parameter>`, `buffer/<name>`. Each is recorded
by name, shape and offset, so any number of ranks and any stage can read it. A failure on one rank is told to all, and
all raise."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ...checkpoint.files import Source
from ...checkpoint.store import (
    CheckpointReader,
    CheckpointWriter,
    encode_client_state,
    list_tags,
    new_token,
    rng_state,
    set_rng_state,
    write_model,
)
from ...core.ops import name_of
from ...errors import CheckpointError, CheckpointTagError, CheckpointTypeError, DiskError
from ...parallel.expert.spread import gather_experts, name_among_all
from ...zero.tiers.windows import Window
from ..base import say
from .access import module_state_dict

if TYPE_CHECKING:
    from ...parallel.tensor.cut import Cut
    from ...plan.layout import Segment
    from ..base import EngineBase
    from ..policy.policies import AutomaticPrecision

logger = logging.getLogger("deepc")
_PLACE_BYTES = 256
_SCALAR = "scalar."  # begins the kind of a state that is a number per parameter
_AVERAGE = "average."  # that of a deepc.EMA
_TAG_BYTES = 256  # more than a file's name may have


def together(engine: EngineBase, what: str, failure: Exception | None) -> None:
    """Every rank learns whether some rank failed. Also a barrier."""
    flags = engine.everyone.gather_all(torch.tensor([0 if failure is None else 1], dtype=torch.int64)).view(-1).tolist()
    if failure is not None:
        raise failure
    bad = [r for r, f in enumerate(flags) if f]
    if bad:
        raise CheckpointError(
            f"{what} failed on rank {', '.join(map(str, bad))} (its own message tells why); this rank gave up as well"
        )


def _agree(engine: EngineBase, token: str, directory: str, tag: str) -> tuple[str, list[str], list[str]]:
    """(rank 0's token, the folder of each rank: the end of it, the tag of each rank). Collective."""
    texts = (token, directory, tag)
    sizes = (len(token.encode()), _PLACE_BYTES, _TAG_BYTES)
    mine = b"".join(text.encode()[-n:].ljust(n, b"\0") for text, n in zip(texts, sizes))
    rows = [bytes(row) for row in engine.everyone.gather_all(torch.tensor(list(mine), dtype=torch.uint8)).tolist()]

    def field(begin: int, end: int) -> list[str]:
        return [row[begin:end].rstrip(b"\0").decode(errors="replace") for row in rows]

    at = sizes[0] + sizes[1]
    return field(0, sizes[0])[0], field(sizes[0], at), field(at, at + sizes[2])


def _different(what: str, texts: list[str], fix: str) -> str:
    other = next(r for r, text in enumerate(texts) if text != texts[0])
    return (
        f"save_checkpoint was called with different {what}: rank 0 with '{texts[0]}', rank {other} with"
        f" '{texts[other]}'. {fix}"
    )


def _one_tag(engine: EngineBase, tags: list[str]) -> str:
    """The tag that all ranks save under, rank 0's. checkpoint.tag_validation: what is done if others came with another
    one, "Ignore", "Warn" or "Fail"."""
    if len(set(tags)) > 1 and (wanted := engine._config.checkpoint.tag_validation) != "Ignore":
        fix = "A tag with the time or the rank in it is made on rank 0 and broadcast"
        if wanted == "Fail":
            raise CheckpointTagError(_different("tags", tags, f"{fix} (checkpoint.tag_validation is Fail)"))
        say(engine, _different("tags", tags, f"All save under rank 0's. {fix}"), logging.WARNING)
    return tags[0]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous().view(-1)


def _source(window: Window) -> torch.Tensor | Source:
    """What a checkpoint writes of it: from disk, and of codes, a part at a time."""
    if window.in_memory:
        return _host(window.read())
    return Source(window.length, window.array.dtype, lambda: (part.read() for part in window.parts()))


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of persistent buffers, each once."""
    seen: set[int] = set()
    for prefix, m in module.named_modules():
        for name, b in m._buffers.items():
            if b is not None and name not in m._non_persistent_buffers_set and id(b) not in seen:
                seen.add(id(b))
                yield (f"{prefix}." if prefix else "") + name, b


def save(
    engine: EngineBase,
    directory: str | os.PathLike[str],
    tag: str,
    client_state: dict[str, Any],
    latest: bool,
    exclude_frozen: bool,
) -> None:
    """Collective. See Engine.save_checkpoint."""
    if not isinstance(client_state, dict):
        raise CheckpointTypeError(f"client_state must be a dict, got {type(client_state).__name__}")
    if engine.broken_step:
        raise CheckpointError(f"save_checkpoint: {engine.broken_step}")
    engine.guard.refuse_writes()
    _take_in_writes(engine)
    encode_client_state(client_state)  # refuse what can't be saved before a byte is written
    if engine.hooks.accumulated or engine.hooks.open:
        logger.warning(
            "save_checkpoint between a backward and its step: gradients of the unfinished step are not saved"
        )
    token, folders, tags = _agree(engine, new_token(), os.fspath(directory), str(tag))
    tag = _one_tag(engine, tags)
    writer: CheckpointWriter | None = None
    failure: Exception | None = None
    try:
        writer = CheckpointWriter(
            directory, str(tag), rank=engine.everyone.rank, world_size=engine.everyone.world, token=token
        )
        _add_tensors(engine, writer, exclude_frozen)
        with engine.events.span("write shard"):
            writer.write({"rng": rng_state()})
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    try:
        together(engine, f"saving checkpoint {tag}", failure)
        if engine.everyone.rank == 0:
            try:
                with engine.events.span("publish checkpoint"):
                    cast(CheckpointWriter, writer).publish(
                        {"client": client_state, "engine": _engine_state(engine)}, latest=latest
                    )
            except Exception as exc:
                places = [os.path.join(folder, tag) for folder in folders]
                fix = "All ranks must name the same folder"
                failure = exc if len(set(places)) == 1 else CheckpointError(_different("places", places, fix))
        together(engine, f"publishing checkpoint {tag}", failure)
    except Exception:
        if writer is not None:
            writer.abort()
        raise


def save_model(engine: EngineBase, directory: str | os.PathLike[str], exclude_frozen: bool) -> None:
    """Collective. See Engine.save_16bit_model."""
    failure: Exception | None = None
    staged = engine.part is not None
    whole = module_state_dict(engine, exclude_frozen and staged, keeps=engine.everyone.rank == 0)
    frozen = {n for n, _ in engine.state.frozen} if exclude_frozen and not staged else set()
    if engine.spread:
        frozen = set(gather_experts({n: torch.zeros(1) for n in sorted(frozen)}, engine.module))
    if engine.everyone.rank == 0:
        try:
            write_model(directory, {n: t for n, t in whole.items() if n not in frozen})
        except OSError as exc:
            failure = CheckpointError(f"can't write the model into {os.fspath(directory)}: {exc.strerror or exc}")
            failure.__cause__ = exc
        except Exception as exc:  # told to the other ranks, then raised
            failure = exc
    together(engine, "writing the model", failure)


def _add_tensors(engine: EngineBase, writer: CheckpointWriter, exclude_frozen: bool) -> None:
    st, plan = engine.state, engine.plan
    mine = engine.global_rank == 0 and engine.copy == 0
    at, names = engine.mesh.coordinates(engine.everyone.rank), _names(engine)
    first = at.tp == 0 and at.ep == 0  # of ranks that share a model: has what all have
    places = [_Place.of(engine, p) if engine.answers_for(p) else None for p in st.trained]

    def add(kind: str, s: Segment, values: torch.Tensor | Source) -> None:
        if (place := places[s.param]) is not None:
            begin = place.begin + s.param_begin
            writer.add(f"{kind}/{names[s.param]}", values, shape=place.shape, begin=begin, cut=place.cut)

    # At stage 0 every rank has everything: rank 0 writes. Of several copies the first is written.
    if mine or not plan.own_all and engine.copy == 0:
        for s in plan.segments:
            add("fp32", s, _source(st.window(s) if st.master is not None else Window(st.flat, s.flat_begin, s.length)))
        for name, s, window in engine.optimizer.owned_states():
            add(name, s, _source(window))
        here = {s.param for s in plan.segments if s.param_begin == 0}
        for name, i, value in engine.optimizer.scalar_states():
            if i in here and at.tp == 0 and engine.answers_for(st.trained[i]):  # cut parameters have one as well
                writer.add(f"{_SCALAR}{name}/{names[i]}", torch.tensor([value], dtype=torch.float64), shape=(1,))
        for name, i, whole in engine.optimizer.whole_states() if mine else ():
            if at.tp == 0 and engine.answers_for(st.trained[i]):  # cut parameters have one whole state as well
                writer.add(f"{name}/{names[i]}", _host(whole), shape=whole.shape)
        for label, s, view in _averages(engine):
            add(f"{_AVERAGE}{label}", s, _host(view))
    for part in engine.optimizer.own_states():
        shape = tuple(st.trained[part.param].shape)
        writer.add(f"{part.name}/{names[part.param]}", _host(part.values), shape=shape, begin=part.begin)
    for name, p in [] if exclude_frozen or not mine else st.frozen:
        if engine.answers_for(p):
            place, name = _Place.of(engine, p), name_among_all(name, engine.module)
            writer.add(f"frozen/{name}", _host(st.frozen_value(p)), shape=place.shape, begin=place.begin, cut=place.cut)
    if mine and first:
        for i, n in enumerate(plan.layout.numels):
            if n == 0:
                writer.add(f"fp32/{st.names[i]}", torch.empty(0), shape=st.trained[i].shape)
    stage = engine.part
    for name, b in _buffers(engine.module) if mine and at.tp == 0 else ():
        if (at.ep == 0 or id(b) in engine.spread) and (stage is None or stage.has_buffer(name)):
            writer.add(f"buffer/{name_among_all(name, engine.module)}", _host(b), shape=b.shape)


def _names(engine: EngineBase) -> list[str]:
    """Of the trained parameters, in checkpoints."""
    names = engine.state.names
    return [name_among_all(n, engine.module) for n in names] if engine.spread else list(names)


class _Place(NamedTuple):
    """Where this rank's values of a parameter are in the whole one: from element `begin` on in the order of `cut`."""

    shape: tuple[int, ...]
    begin: int
    cut: Cut | None

    @classmethod
    def of(cls, engine: EngineBase, p: torch.Tensor) -> _Place:
        cut = engine.cuts.get(id(p))
        return cls(tuple(p.shape), 0, None) if cut is None else cls(cut.shape, cut.begins[cut.rank], cut)


def _averages(engine: EngineBase) -> Iterator[tuple[str, Segment, torch.Tensor]]:
    """(label, segment, this rank's part of the average) of each deepc.EMA."""
    for label, average in engine.averages.items():
        for s in engine.plan.segments:
            yield label, s, average.piece(s)


def _engine_state(engine: EngineBase) -> dict[str, Any]:
    return {
        "ties": engine.ties(),
        "stage": engine.plan.stage,
        "world_size": engine.everyone.world,
        "mesh": list(engine.mesh.shape),
        "dtype": name_of(engine.dtype),
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "micro_steps": engine.micro_steps,
        "skipped_steps": engine.skipped_steps,
        "optimizer": engine.optimizer.hyper_state(),
        "scaler": engine.scaler.state_dict() if engine.scaler is not None else None,
        "precision": engine.auto_precision.state_dict() if engine.auto_precision is not None else None,
        "lr_scheduler": (
            engine.lr_scheduler.state_dict()
            if engine.lr_scheduler is not None and hasattr(engine.lr_scheduler, "state_dict")
            else None
        ),
        "data": engine.own_dataloader.state_dict() if engine.own_dataloader is not None else None,
        "curriculum": engine.curriculum.state_dict(),
        "averages": {label: average.updates for label, average in engine.averages.items()},
    }


def load(
    engine: EngineBase,
    directory: str | os.PathLike[str],
    tag: str | None,
    strict: bool,
    optimizer_states: bool,
    lr_scheduler_states: bool,
) -> tuple[str | None, dict[str, Any]]:
    """Collective. See Engine.load_checkpoint."""
    directory = os.fspath(directory)
    if tag is None and not os.path.lexists(os.path.join(directory, "latest")) and not list_tags(directory):
        logger.warning("no checkpoint in %s: nothing was loaded", directory)
        return None, {}
    engine.group.barrier()  # nobody reads the old values any more: a forward elsewhere, initialize
    if not engine.broken_step:
        with contextlib.suppress(DiskError):  # loading is the way out
            engine.guard.take_in_writes()  # of what the checkpoint lacks; memory that a script replaced is ours again
    if optimizer_states and engine.auto_precision is not None:
        _take_precision(engine, directory, tag)
    failure: Exception | None = None
    result: tuple[str | None, dict[str, Any]] = (None, {})
    scalars: list[tuple[str, int, float]] = []
    try:
        with CheckpointReader(directory, tag) as reader:
            state = reader.client_state()
            if not isinstance(state, dict) or not isinstance(state.get("engine"), dict):
                raise CheckpointError(f"checkpoint {reader.path} was not written by engine.save_checkpoint")
            _check_names(engine, reader, strict)
            if optimizer_states:
                _check_states(engine, reader, state["engine"]["optimizer"])
            _begin_anew(engine, strict and optimizer_states)
            _load_parameters(engine, reader)
            _load_averages(engine, reader)
            if optimizer_states:
                _load_states(engine, reader)
                _load_own(engine, reader, state["engine"]["optimizer"])
                scalars = _scalars(engine, reader)
            result = (reader.path, state["client"])
            same = state["engine"].get("mesh", [1, reader.world_size, 1, 1]) == list(engine.mesh.shape)
            own = reader.rank_state(engine.everyone.rank) if same else None
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    together(engine, f"loading checkpoint {tag or 'latest'} of {directory}", failure)
    engine.step_is_whole()
    engine.broken_pass = False
    engine.hooks.discard()
    engine.step_policy.discard()
    engine.skips.applied()
    _publish(engine)
    _load_engine_state(engine, state["engine"], scalars, optimizer_states, lr_scheduler_states)
    engine.step_policy.loaded()
    if optimizer_states and engine.resumes_data:
        _resume_data(engine, state["engine"].get("data"))
    saved_averages = state["engine"].get("averages", {})
    for label, average in engine.averages.items():
        average.loaded(saved_averages.get(label, 0))
    if lost := sorted(set(saved_averages) - set(engine.averages)):
        logger.warning(
            "the checkpoint has the average '%s', and this engine has none of that label: make it before"
            " load_checkpoint (deepc.EMA(engine, ...)), else it begins with the weights",
            lost[0],
        )
    if own is not None:
        set_rng_state(own["rng"])
    engine.everyone.barrier()
    return result


def _take_in_writes(engine: EngineBase) -> None:
    """What a script has written since the last step is saved, as the next step would take it in. Collective, where
    something lies on disk."""
    failure: Exception | None = None
    try:
        engine.guard.take_in_writes()
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    if engine.plan.updates_on_disk:
        together(engine, "taking in what a script has written", failure)
    elif failure is not None:
        raise failure


def _publish(engine: EngineBase) -> None:
    """What reads parameters sees the loaded ones; the disk of some rank may refuse them. Collective."""
    failure: Exception | None = None
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
    if engine.broken_step and not everything:
        raise CheckpointError(
            f"{engine.broken_step} Load the checkpoint with its optimizer states (load_optimizer_states=True) and"
            " load_module_strict=True, so that nothing of the broken step is left"
        )
    if everything and engine.state.tier is not None:  # a save or a view may have found damage, not only a step
        engine.state.tier.begin_anew()


def _resume_data(engine: EngineBase, saved: dict[str, int] | None) -> None:
    """The loader of training_data goes on where it was."""
    if saved is not None and engine.own_dataloader is not None:
        say(engine, engine.own_dataloader.load_state_dict(saved))
        engine.forget_batches()


def _take_precision(engine: EngineBase, directory: str, tag: str | None) -> None:
    """precision "auto": the mode that the checkpoint was saved in, before its values are read. Collective."""
    policy = cast("AutomaticPrecision", engine.step_policy)
    failure: Exception | None = None
    saved: dict[str, Any] | None = None
    try:
        with CheckpointReader(directory, tag) as reader:
            state = reader.client_state()
            saved = (
                state["engine"].get("precision")
                if isinstance(state, dict) and isinstance(state.get("engine"), dict)
                else None
            )
        if saved is not None:
            policy.auto.load_state_dict(saved)
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    together(engine, f"loading checkpoint {tag or 'latest'} of {directory}", failure)
    policy.resume()


def _check_names(engine: EngineBase, reader: CheckpointReader, strict: bool) -> None:
    st = engine.state
    frozen = [(name_among_all(n, engine.module), p) for n, p in st.frozen]
    ours = dict((*zip(_names(engine), st.trained), *frozen))
    want = {n: _Place.of(engine, p).shape for n, p in ours.items()}
    have = {n.split("/", 1)[1]: t.shape for n, t in reader.tensors.items() if n.split("/", 1)[0] in ("fp32", "frozen")}
    missing, extra = [n for n in want if n not in have], [n for n in have if n not in want]
    if engine.parts is not None:  # each has a part of the names, tensor-parallel ranks the same
        first = engine.mesh.coordinates(engine.everyone.rank).ep == 0
        here = sum(n in have for n, p in ours.items() if first or id(p) in engine.spread)
        known = round(sum(engine.parts.totals(here))) // engine.mesh.tp
        extra = [f"{len(have) - known} that no {'stage' if engine.part is not None else 'rank'} has"] * (
            known < len(have)
        )
    if strict and (missing or extra):
        raise CheckpointError(
            f"checkpoint {reader.path} does not fit the model: missing {missing[:5]}{'...' * (len(missing) > 5)},"
            f" unexpected {extra[:5]}{'...' * (len(extra) > 5)} ({len(missing)} and {len(extra)});"
            " load_module_strict=False loads what fits"
        )
    for name, shape in want.items():
        if name in have and tuple(have[name]) != shape:
            raise CheckpointError(
                f"checkpoint {reader.path}: parameter '{name}' has shape {tuple(have[name])} there and {shape} in the"
                " model"
            )


def _check_states(engine: EngineBase, reader: CheckpointReader, saved: dict[str, Any]) -> None:
    """CheckpointError unless there is what the optimizer wants; one of torch's gets the states that there are."""
    optimizer = engine.optimizer
    names = _names(engine)
    if not optimizer.core:
        mine, theirs = type(optimizer.base).__name__, saved["type"]
        if mine != theirs:
            raise CheckpointError(
                f"checkpoint {reader.path} was saved with {theirs}, whose states are not those of {mine}; pass"
                " load_optimizer_states=False"
            )
        kinds = sorted({full.partition("/")[0] for full in reader.tensors} - {"fp32", "frozen", "buffer"})
        kinds = [kind for kind in kinds if not kind.startswith((_SCALAR, _AVERAGE))]
        optimizer.prepare_states(lambda i: [kind for kind in kinds if f"{kind}/{names[i]}" in reader.tensors])
        return
    found = [*((n, s.param) for n, s, _ in optimizer.owned_states()), *((n, i) for n, i, _ in optimizer.whole_states())]
    for name, i in found:
        if f"{name}/{names[i]}" not in reader.tensors:
            raise CheckpointError(
                f"checkpoint {reader.path} has no optimizer state '{name}' of '{names[i]}': it was"
                " saved with another optimizer or with that parameter frozen; pass load_optimizer_states=False"
            )


_WHOLE = _Place((), 0, None)


def _read(reader: CheckpointReader, name: str, out: torch.Tensor, begin: int = 0, place: _Place = _WHOLE) -> None:
    """Fills the 1-D `out` (any device and floating dtype) from elements of logical tensor `name`, from element `begin`
    of what is here of it on."""
    stored = reader[name].dtype
    if out.device.type == "cpu" and out.dtype == stored and out.is_contiguous():
        reader.read(name, out, place.begin + begin, cut=place.cut)
        return
    buffer = torch.empty(out.numel(), dtype=stored)
    reader.read(name, buffer, place.begin + begin, cut=place.cut)
    out.copy_(buffer)


def _fill(reader: CheckpointReader, name: str, window: Window, begin: int, place: _Place) -> None:
    """Fills a window of states from elements of logical tensor `name`."""
    if window.in_memory:
        _read(reader, name, window.view, begin, place)
        return
    for part in window.parts():
        values = torch.empty(part.length)
        _read(reader, name, values, begin + part.begin - window.begin, place)
        part.write(values)


@torch.no_grad()
def _load_parameters(engine: EngineBase, reader: CheckpointReader) -> None:
    st, plan, names = engine.state, engine.plan, _names(engine)
    for s in plan.segments:
        name = names[s.param]
        source = f"fp32/{name}" if f"fp32/{name}" in reader.tensors else f"frozen/{name}"
        if source not in reader.tensors:
            continue
        flat, place = Window(st.flat, s.flat_begin, s.length), _Place.of(engine, st.trained[s.param])
        if st.master is None:
            _fill(reader, source, flat, s.param_begin, place)
        else:
            _fill(reader, source, st.window(s), s.param_begin, place)
            st.window(s).copy_into(flat)
        if (copy := st.host_copy(s.flat_begin, s.length)) is not None:
            copy.copy_(flat.view)
    for name, p in ((name_among_all(n, engine.module), p) for n, p in st.frozen):
        source = f"frozen/{name}" if f"frozen/{name}" in reader.tensors else f"fp32/{name}"
        if source in reader.tensors:
            value = torch.empty(p.numel(), dtype=p.dtype)
            _read(reader, source, value, place=_Place.of(engine, p))
            st.set_frozen(p, value.view(p.shape))
    for name, b in ((name_among_all(n, engine.module), b) for n, b in _buffers(engine.module)):
        if f"buffer/{name}" in reader.tensors:
            value = torch.empty(b.numel(), dtype=b.dtype)
            _read(reader, f"buffer/{name}", value)
            b.data.copy_(value.view(b.shape))


@torch.no_grad()
def _load_averages(engine: EngineBase, reader: CheckpointReader) -> None:
    """Averages that the checkpoint does not have begin as the weights that it has."""
    names = _names(engine)
    for label, s, view in _averages(engine):
        source = f"{_AVERAGE}{label}/{names[s.param]}"
        if source in reader.tensors:
            _read(reader, source, view, s.param_begin, _Place.of(engine, engine.state.trained[s.param]))
        else:
            engine.state.window(s).copy_to(view)


def _load_states(engine: EngineBase, reader: CheckpointReader) -> None:
    names = _names(engine)
    for name, s, window in engine.optimizer.owned_states():
        place = _Place.of(engine, engine.state.trained[s.param])
        _fill(reader, f"{name}/{names[s.param]}", window, s.param_begin, place)
    for name, i, whole in engine.optimizer.whole_states():
        _read(reader, f"{name}/{names[i]}", whole.view(-1))


def _scalars(engine: EngineBase, reader: CheckpointReader) -> list[tuple[str, int, float]]:
    """(state name, parameter, value) of states that are a number per parameter."""
    index = {name: i for i, name in enumerate(_names(engine))}
    found = []
    for full in reader.tensors:
        kind, _, name = full.partition("/")
        if kind.startswith(_SCALAR) and name in index:
            value = torch.empty(1, dtype=torch.float64)
            _read(reader, full, value)
            found.append((kind.removeprefix(_SCALAR), index[name], value.item()))
    return found


def _load_own(engine: EngineBase, reader: CheckpointReader, saved: dict[str, Any]) -> None:
    """What differs between ranks."""
    names = _names(engine)

    def read(name: str, param: int, out: torch.Tensor, begin: int) -> None:
        _read(reader, f"{name}/{names[param]}", out, begin)

    engine.optimizer.take_own(saved, read)


def _load_engine_state(
    engine: EngineBase,
    saved: dict[str, Any],
    scalars: list[tuple[str, int, float]],
    optimizer_states: bool,
    lr_scheduler_states: bool,
) -> None:
    engine.global_steps, engine.global_samples = saved["global_steps"], saved["global_samples"]
    engine.micro_steps, engine.skipped_steps = saved["micro_steps"], saved["skipped_steps"]
    engine.curriculum.load_state_dict(saved.get("curriculum", {}))
    if saved["world_size"] != engine.everyone.world or engine.micro_steps % engine.gradient_accumulation_steps():
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    if optimizer_states:
        engine.optimizer.load_hyper_state(saved["optimizer"], scalars)
        if engine.scaler is not None and saved["scaler"] is not None:
            engine.scaler.load_state_dict(saved["scaler"])
            engine.optimizer.loss_scale = engine.scaler.loss_scale
    if lr_scheduler_states and engine.lr_scheduler is not None and saved["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
