"""An engine's checkpoint: what is in it, under which names, and how a rank finds its part again.

Logical tensors: `fp32/<parameter>` (masters, or the parameters themselves in fp32 training), `<state>/<parameter>` for
each optimizer state, `scalar.<state>/<parameter>` for one that is a number per parameter (a step count, where it is not
that of all), `average.<label>/<parameter>` for each deepc.EMA, `frozen/<parameter>`, `buffer/<name>`,
`extra/<module>._extra_state`. Each is recorded by name, shape and offset, so any number of ranks and any stage can read
it (loading.py). A failure on one rank is told to all, and all raise."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ...checkpoint.files import Source
from ...checkpoint.store import (
    CheckpointWriter,
    encode_client_state,
    new_token,
    rng_state,
    write_model,
)
from ...core.ops import name_of
from ...errors import CheckpointError, CheckpointTagError, CheckpointTypeError
from ...parallel.expert.spread import gather_experts, is_spread, name_among_all
from ...zero.parameters import owners
from ...zero.tiers.agree import run_together
from ...zero.tiers.windows import Window
from ..base import say
from .access import module_state_dict

if TYPE_CHECKING:
    from ...parallel.tensor.cut import Cut
    from ...plan.layout import Segment
    from ..base import EngineBase

logger = logging.getLogger("deepc")
_PLACE_BYTES = 256
TOKEN_BYTES, TAG_BYTES = 64, 256  # as many as a token has, more than a file's name may have
SCALAR = "scalar."  # begins the kind of a state that is a number per parameter
AVERAGE = "average."  # that of a deepc.EMA
EXTRA = "extra"  # a module's extra state as JSON; tensors in it are of the kinds extra.0, extra.1, ...


def together(engine: EngineBase, what: str, failure: Exception | None) -> None:
    """Every rank learns whether some rank failed. Also a barrier."""
    flags = (
        engine.everyone.gather_all(torch.tensor([0 if failure is None else 1], dtype=torch.int64, device="cpu"))
        .view(-1)
        .tolist()
    )
    if failure is not None:
        raise failure
    bad = [r for r, f in enumerate(flags) if f]
    if bad:
        raise CheckpointError(
            f"{what} failed on rank {', '.join(map(str, bad))} (its own message tells why); this rank gave up as well"
        )


def of_ranks(engine: EngineBase, *texts: tuple[str, int]) -> list[list[str]]:
    """Of each (text, bytes) what every rank has: the last so many bytes of it. Collective."""
    mine = b"".join(text.encode(errors="replace")[-n:].ljust(n, b"\0") for text, n in texts)
    rows = [
        bytes(row)
        for row in engine.everyone.gather_all(torch.tensor(list(mine), dtype=torch.uint8, device="cpu")).tolist()
    ]
    ends = list(itertools.accumulate(n for _, n in texts))
    return [
        [row[end - n : end].rstrip(b"\0").decode(errors="replace") for row in rows] for end, (_, n) in zip(ends, texts)
    ]


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
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().view(-1)


def _source(window: Window) -> torch.Tensor | Source:
    """What a checkpoint writes of it: from disk, and of codes, a part at a time."""
    if window.in_memory:
        return _host(window.read())
    return Source(window.length, window.array.dtype, lambda: (part.read() for part in window.parts()))


def buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of persistent buffers, each once."""
    seen: set[int] = set()
    for prefix, m in module.named_modules():
        for name, b in m._buffers.items():
            if b is not None and name not in m._non_persistent_buffers_set and id(b) not in seen:
                seen.add(id(b))
                yield (f"{prefix}." if prefix else "") + name, b


def extra_states(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name in a state_dict, module) of those that have one (torch.nn.Module.get_extra_state)."""
    for prefix, m in module.named_modules():
        if type(m).get_extra_state is not torch.nn.Module.get_extra_state:
            yield (f"{prefix}." if prefix else "") + "_extra_state", m


def frozen_parameters(engine: EngineBase) -> list[tuple[str, torch.nn.Parameter, bool]]:
    """(name, parameter, whether it joined the model after initialize) of the parameters that are not trained, nor
    another engine's or stage's."""
    st, away = engine.state, engine.elsewhere()
    known = {id(p) for p in (*st.trained, *(p for _, p in st.frozen))}
    late = [
        (n, p, True)
        for n, p in engine.module.named_parameters()
        if id(p) not in known and id(p) not in away and not p.is_meta and owners.trainer(p) is None
    ]
    return [*((n, p, False) for n, p in st.frozen), *late]


def save(
    engine: EngineBase,
    directory: str | os.PathLike[str],
    tag: str,
    client_state: dict[str, Any],
    latest: bool,
    exclude_frozen: bool,
) -> None:
    """Collective. See Engine.save_checkpoint."""
    if broken := engine.broken_step or engine.broken_load[0]:
        raise CheckpointError(f"save_checkpoint: {broken}")
    engine.guard.refuse_writes()
    take_in_writes(engine)
    together(engine, f"saving checkpoint {tag}", _refusal(client_state))  # before a byte is written
    if engine.hooks.accumulated or engine.hooks.open:
        logger.warning(
            "save_checkpoint between a backward and its step: gradients of the unfinished step are not saved"
        )
    tokens, folders, tags = of_ranks(
        engine, (new_token(), TOKEN_BYTES), (os.fspath(directory), _PLACE_BYTES), (str(tag), TAG_BYTES)
    )
    tag = _one_tag(engine, tags)
    writer: CheckpointWriter | None = None
    failure: Exception | None = None
    try:
        writer = CheckpointWriter(
            directory, str(tag), rank=engine.everyone.rank, world_size=engine.everyone.world, token=tokens[0]
        )
        _add_tensors(engine, writer, exclude_frozen)
        with engine.events.span("write shard"):
            writer.write({"rng": rng_state()})
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    except BaseException:  # ^C, after which a notebook goes on
        if writer is not None:
            writer.abort()
        raise
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


def _refusal(client_state: dict[str, Any]) -> Exception | None:
    """What a checkpoint can't hold of it; the ranks may have come with different ones."""
    if not isinstance(client_state, dict):
        return CheckpointTypeError(f"client_state must be a dict, got {type(client_state).__name__}")
    try:
        encode_client_state(client_state)
    except Exception as exc:
        return exc
    return None


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def save_model(engine: EngineBase, directory: str | os.PathLike[str], exclude_frozen: bool) -> None:
    """Collective. See Engine.save_16bit_model."""
    failure: Exception | None = None
    staged = engine.part is not None
    whole = module_state_dict(engine, exclude_frozen and staged, keeps=engine.everyone.rank == 0)
    frozen = {n for n, _ in engine.state.frozen} if exclude_frozen and not staged else set()
    if engine.spread:
        frozen = set(
            gather_experts({n: torch.zeros(1, dtype=torch.uint8, device="cpu") for n in sorted(frozen)}, engine.module)
        )
    if engine.everyone.rank == 0:
        try:
            values = {n: t for n, t in whole.items() if n not in frozen and _is_dense(t)}
            if left := [n for n, t in whole.items() if not _is_dense(t)]:
                logger.warning(
                    "save_16bit_model writes dense tensors alone, without %s (an extra state, or sparse)",
                    ", ".join(left),
                )
            write_model(directory, values)
        except OSError as exc:
            failure = CheckpointError(f"can't write the model into {os.fspath(directory)}: {exc.strerror or exc}")
            failure.__cause__ = exc
        except Exception as exc:  # told to the other ranks, then raised
            failure = exc
    together(engine, "writing the model", failure)


def _add_tensors(engine: EngineBase, writer: CheckpointWriter, exclude_frozen: bool) -> None:
    st, plan = engine.state, engine.plan
    mine = engine.group.rank == 0 and engine.copy == 0
    at, names = engine.mesh.coordinates(engine.everyone.rank), names_of(engine)
    first = at.tp == 0 and at.ep == 0  # of ranks that share a model: has what all have
    places = [Place.of(engine, p) if engine.answers_for(p) else None for p in st.trained]

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
                number = value.detach().cpu() if isinstance(value, torch.Tensor) else _vector(value)
                writer.add(f"{SCALAR}{name}/{names[i]}", number.view(-1), shape=number.shape)
        for name, i, whole in engine.optimizer.whole_states() if mine else ():
            if at.tp == 0 and engine.answers_for(st.trained[i]):  # cut parameters have one whole state as well
                writer.add(f"{name}/{names[i]}", _host(whole), shape=whole.shape)
        for label, s, view in averages(engine):
            add(f"{AVERAGE}{label}", s, _host(view))
    for part in engine.optimizer.own_states():
        shape = tuple(st.trained[part.param].shape)
        writer.add(f"{part.name}/{names[part.param]}", _host(part.values), shape=shape, begin=part.begin)
    for name, p, late in [] if exclude_frozen or not mine else frozen_parameters(engine):
        if engine.answers_for(p) and not (late and _answered(engine, name) is None):
            place, name = Place.of(engine, p), name_among_all(name, engine.module)
            value = p if late else st.frozen_value(p)
            writer.add(f"frozen/{name}", _host(value), shape=place.shape, begin=place.begin, cut=place.cut)
    if mine and first:
        for i, n in enumerate(plan.layout.numels):
            if n == 0:
                writer.add(
                    f"fp32/{st.names[i]}", torch.empty(0, dtype=torch.float32, device="cpu"), shape=st.trained[i].shape
                )
    for name, b in buffers(engine.module) if mine and at.tp == 0 else ():
        if (stored := _answered(engine, name)) is not None:
            writer.add(f"buffer/{stored}", _host(b if b.layout == torch.strided else b.to_dense()), shape=b.shape)
    for name, m in extra_states(engine.module) if mine and at.tp == 0 else ():
        if (stored := _answered(engine, name)) is not None:
            _add_extra(writer, stored, m.get_extra_state())


def _answered(engine: EngineBase, name: str) -> str | None:
    """The name in checkpoints of something in the module (a buffer) that this stage and this expert rank write; None:
    another one does. By the name, not the tensor: a module may put another one in its place."""
    if engine.part is not None and not engine.part.has_buffer(name):
        return None
    stored, at = name_among_all(name, engine.module), engine.mesh.coordinates(engine.everyone.rank)
    first = at.ep == 0 or is_spread(name, engine.module)
    return stored if first else None


def _add_extra(writer: CheckpointWriter, name: str, value: Any) -> None:
    tree, tensors = encode_client_state(value, f"the extra state {name}")
    text = json.dumps(tree).encode()
    writer.add(f"{EXTRA}/{name}", torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for i, tensor in enumerate(tensors):
        writer.add(f"{EXTRA}.{i}/{name}", tensor)


def _vector(value: float) -> torch.Tensor:
    """[1] of a Python number, in a dtype that tells its type."""
    return torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def names_of(engine: EngineBase) -> list[str]:
    """Of the trained parameters, in checkpoints."""
    names = engine.state.names
    return [name_among_all(n, engine.module) for n in names] if engine.spread else list(names)


class Place(NamedTuple):
    """Where this rank's values of a parameter are in the whole one: from element `begin` on in the order of `cut`."""

    shape: tuple[int, ...]
    begin: int
    cut: Cut | None

    @classmethod
    def of(cls, engine: EngineBase, p: torch.Tensor) -> Place:
        cut = engine.cuts.get(id(p))
        return cls(tuple(p.shape), 0, None) if cut is None else cls(cut.shape, cut.begins[cut.rank], cut)


def averages(engine: EngineBase) -> Iterator[tuple[str, Segment, torch.Tensor]]:
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
        "global_tokens": engine.global_tokens,
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


def take_in_writes(engine: EngineBase) -> None:
    """What a script has written since the last step counts. What the disk of some rank refuses is raised on all.
    Collective, where something lies on disk."""
    if engine.plan.updates_on_disk:
        run_together(engine.everyone, engine.guard.take_in_writes)
    else:
        engine.guard.take_in_writes()
