"""Weights out of training: safetensors files in Hugging Face's layout, in fp32, 16 bits or int8; and their way back
into a module.

    deepc.export(engine, "model", dtype="bf16")           # what from_pretrained loads, where the module has a Hugging
    Face config
    deepc.export(engine, "small", dtype="int8")           # weight-only int8 (int8.py)
    deepc.export("checkpoints", "model", dtype="fp32")    # of what engine.save_checkpoint wrote, without a model or
    ranks

Tied weights are stored once and noted in the file's metadata. One tensor at a time is whole in memory, and at most one
file's worth on rank 0; where ranks share the model's tensors, stages or experts, rank 0 holds it all."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union, cast

import torch

from ...core import dtypes
from ...core.ops import casts, name_of, torch_dtype
from ...errors import ArgumentError, CheckpointError, DeepcError, UnsupportedError, numeric
from ...nn import int8

if TYPE_CHECKING:
    from ...checkpoint import SafetensorsFile
    from ..base import EngineBase
    from ..states.averages import EMA

    Source = Union[EngineBase, EMA, torch.nn.Module, str, os.PathLike[str]]  # noqa: UP007

logger = logging.getLogger("deepc")
INDEX = "model.safetensors.index.json"
_STORED = (*dtypes.TRAINED, dtypes.dtype("int8"))


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype that weights can be stored and run in: its torch dtype. ArgumentError for others."""
    found = dtypes.find(dtype)
    if found not in _STORED:
        raise ArgumentError(
            f"dtype {dtype!r}: weights are stored and run in fp32, bf16, fp16 or int8 (or the torch dtype of one)"
        )
    return torch_dtype(found)


# ---- out -------------------------------------------------------------------------------------------------------------
@numeric
def export(
    source: Source,
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype = "fp32",
    *,
    keep: Sequence[str] = (),
    tag: str | None = None,
    average: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> list[str]:
    """Writes the weights of `source` to `folder` as model.safetensors (in parts with an index when they are more than
    `max_shard_bytes`), with config.json and generation_config.json (int8: in folder/config) where the module has a
    Hugging Face config. Returns the names of the files with weights.

    source: an Engine at any stage, over any axes (collective; fp32 values are the masters, unrounded; rank 0 writes),
    an EMA (its averages), an InferenceEngine or a module (rank 0 writes), or the folder of a checkpoint (`tag`, else
    the latest; `average`: the label of an EMA in it; run it in one process). dtype: of floating-point parameters and
    buffers; "int8": of the weights of linear layers, while the rest stays fp32; not from a checkpoint's folder, nor
    where ranks share the model: neither knows all layers. keep: patterns of parameter names that int8 leaves alone
    ("head.weight", "blocks.0.*")."""
    from ...checkpoint import write_model
    from ..states.saving import extra_states

    wanted = dtype_of(dtype)
    if isinstance(source, (str, os.PathLike)):
        return _export_checkpoint(source, folder, wanted, tag, average, max_shard_bytes)
    if tag is not None or average is not None:
        raise ArgumentError(
            "export: tag= and average= are for the folder of a checkpoint; pass the EMA object itself to export its "
            "averages"
        )
    weights = _Source(source)
    if weights.in_parts and wanted == torch.int8:
        raise UnsupportedError(
            "export of an engine whose ranks share the model to int8 does not exist: no rank has all layers. Export it"
            " to fp32, and that in one process: deepc.export(deepc.inference(model, checkpoint=folder), other,"
            ' dtype="int8")'
        )
    if weights.rank == 0 and (left := [n for n, _ in extra_states(weights.module)]):
        logger.warning("export writes tensors alone, without the extra state of the modules: %s", ", ".join(left))
    rows = weights.rows(wanted, keep)
    metadata = {**weights.ties(wanted, keep), "deepc.weights": name_of(wanted)}
    written: list[str] = []
    failure: Exception | None = None
    try:
        if weights.rank == 0:
            if wanted == torch.int8 and os.path.exists(os.path.join(folder, "config.json")):
                raise ArgumentError(
                    f"{os.fspath(folder)} has a config.json, with which from_pretrained would take int8 values for "
                    "weights; export int8 into a folder of its own"
                )
            written = write_model(folder, rows, max_shard_bytes, metadata=metadata)
            _write_config(weights.module, folder, wanted)
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
        if isinstance(exc, OSError) and not isinstance(exc, DeepcError):
            failure = CheckpointError(f"can't export into {os.fspath(folder)}: {exc.strerror or exc}")
            failure.__cause__ = exc
    try:
        for _ in rows:  # the other ranks' part of reading; rank 0's if writing failed, so that nobody waits
            pass
    except Exception as exc:
        failure = failure or exc
    if weights.engine is not None:
        from ..states.saving import together

        together(weights.engine, f"exporting to {os.fspath(folder)}", failure)
    elif failure is not None:
        raise failure
    return written


class _Source:
    """What can be exported: names in the module's order, and how a rank reads each tensor."""

    def __init__(self, source: Any) -> None:
        from ..base import EngineBase, Served
        from ..states.averages import EMA

        self.average = source if isinstance(source, EMA) else None
        holder = source.engine if isinstance(source, EMA) else source
        if isinstance(holder, Served):  # an InferenceEngine
            holder = holder.trainer if holder.trainer is not None else holder.module
        self.engine = holder if isinstance(holder, EngineBase) else None
        if not isinstance(holder, torch.nn.Module):
            raise ArgumentError(
                "export takes an Engine, an EMA, an InferenceEngine, a module or the folder of a checkpoint, got "
                f"{type(source).__name__}"
            )
        self.module: torch.nn.Module = self.engine.module if self.engine is not None else holder
        # of an engine over several axes this rank has a part
        self.in_parts = self.engine is not None and (
            self.engine.part is not None or bool(self.engine.cuts) or bool(self.engine.spread)
        )
        if self.engine is None:
            self.rank = _rank()  # 0 writes
        else:
            self.rank = self.engine.everyone.rank if self.in_parts else self.engine.group.rank + self.engine.copy
        self._trained = {id(p) for p in self.engine.state.trained} if self.engine is not None else set()
        self._frozen = {id(p) for _, p in self.engine.state.frozen} if self.engine is not None else set()

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers with all their names, in the order of state_dict."""
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for name, t in (*module._parameters.items(), *module._buffers.items()):
                if t is not None and name not in module._non_persistent_buffers_set:
                    yield (f"{prefix}." if prefix else "") + name, t

    def ties(self, dtype: torch.dtype, keep: Sequence[str]) -> dict[str, str]:
        """Further names of a tensor -> the name it is stored under."""
        if self.in_parts:
            return cast("EngineBase", self.engine).ties()
        first: dict[int, str] = {}
        quantized = int8.quantizable(self.module, keep) if dtype == torch.int8 else {}
        ties = {}
        for name, t in self._named():
            if first.setdefault(id(t), name) != name:
                ties[name] = first[id(t)]
                if id(t) in quantized:
                    ties[name + int8.SCALE] = first[id(t)] + int8.SCALE
        return ties

    def rows(self, dtype: torch.dtype, keep: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor as it is stored), each tensor once, read when it is asked for. Collective if an engine holds
        the weights."""
        if self.in_parts:
            yield from self._of_all_ranks(dtype)
            return
        quantized = int8.quantizable(self.module, keep) if dtype == torch.int8 else {}
        floats = torch.float32 if dtype == torch.int8 else dtype
        scales = {
            id(m.weight): m.weight_scale
            for m in self.module.modules()
            if isinstance(m, (int8.Int8Linear, int8.Int8Embedding))
        }
        as_scales = {id(s) for s in scales.values()}
        seen: set[int] = set()
        for name, t in self._named():
            if id(t) in seen:
                continue
            seen.add(id(t))
            if id(t) in quantized:
                q, scale = int8.quantize(self._read(t), quantized[id(t)], name)
                yield name, q
                yield name + int8.SCALE, scale
            elif id(t) in scales and dtype != torch.int8:
                yield name, int8.dequantize(self._read(t), self._read(scales[id(t)]), floats)
            elif id(t) not in as_scales or dtype == torch.int8:
                yield name, self._read(t).to(floats if casts(t) else t.dtype)

    @torch.no_grad()
    def _of_all_ranks(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of all stages, shards and experts, on the rank that writes; else nothing. Collective."""
        from ..states.access import of_all_ranks

        engine = cast("EngineBase", self.engine)
        own, ties = {name: self._shard(t) for name, t in self._named()}, engine.ties()
        whole = of_all_ranks(engine, own, keeps=self.rank == 0)
        for name, t in whole.items() if self.rank == 0 else ():
            if name not in ties:
                yield name, t.to(dtype) if casts(t) else t

    def _shard(self, t: torch.Tensor) -> torch.Tensor:
        """What this rank has of `t`, trained ones in fp32. Collective over those that own parts of it."""
        from ..states.access import _Access

        if id(t) not in self._trained:
            return self._read(t)
        if self.average is not None:
            return self.average.shard(t)
        return _Access(cast("EngineBase", self.engine), t).shard_fp32()

    @torch.no_grad()
    def _read(self, t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, torch.nn.Parameter) and id(t) in self._trained:
            from ..states.access import _Access

            if self.average is not None:
                return self.average.value(t)
            return _Access(cast("EngineBase", self.engine), t).fp32()
        if isinstance(t, torch.nn.Parameter) and id(t) in self._frozen and self.engine is not None:
            return self.engine.state.frozen_value(t)
        return t.detach()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def _export_checkpoint(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    dtype: torch.dtype,
    tag: str | None,
    average: str | None,
    max_shard_bytes: int,
) -> list[str]:
    if dtype == torch.int8:
        raise ArgumentError(
            "export of a checkpoint's folder to int8: the folder does not know which weights are of linear layers; use"
            ' deepc.export(deepc.inference(model, checkpoint=...), folder, dtype="int8")'
        )
    from ...checkpoint import write_model

    with open_weights(source, tag, average) as weights:
        rows = ((n, t.to(dtype) if casts(t) else t) for n, t in ((n, weights.tensor(n)) for n in weights.names))
        return write_model(folder, rows, max_shard_bytes, metadata={"deepc.weights": name_of(dtype)})


def _write_config(module: torch.nn.Module, folder: str | os.PathLike[str], dtype: torch.dtype) -> None:
    """Hugging Face's config.json, if the module has a config that can write itself; of int8 weights in a folder of its
    own, so that from_pretrained, which skips what it does not know of a quantisation, can't take int8 values for
    weights."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    name = name_of(torch.float32 if dtype == torch.int8 else dtype)
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", name)
    config.architectures = [type(module).__name__]
    where = os.path.join(folder, "config") if dtype == torch.int8 else folder
    config.save_pretrained(where)
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(where)


# ---- in --------------------------------------------------------------------------------------------------------------
class Weights:
    """Stored weights by the module's names. `names`: what is stored; `ties`: further names; `tensor(name)`: the values;
    `take_extra(module, name)`: gives it its extra state, which checkpoints alone have; whether there is one."""

    def __init__(
        self,
        path: str,
        names: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        read: Callable[[str], torch.Tensor],
        ties: Mapping[str, str],
        close: Callable[[], None],
        take_extra: Callable[[torch.nn.Module, str], bool] = lambda module, name: False,
    ) -> None:
        self.path, self.names, self.ties, self.close, self.tensor = path, names, ties, close, read
        self.take_extra = take_extra

    def find(self, name: str) -> str | None:
        """The name that `name` is stored under, or None."""
        name = self.ties.get(name, name)
        return name if name in self.names else None

    @property
    def int8(self) -> set[str]:
        """Names of weights that are stored as int8 with a scale."""
        return {n for n, (dtype, _) in self.names.items() if dtype == torch.int8 and n + int8.SCALE in self.names}

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_weights(path: str | os.PathLike[str], tag: str | None = None, average: str | None = None) -> Weights:
    """Opens the folder of a deepc checkpoint, a folder with model.safetensors (or its index), or one safetensors file.
    tag, average: of a checkpoint, which is then opened though there are other files in its folder; the second takes the
    averages of the EMA with this label. CheckpointError if there is nothing that can be read."""
    from ...checkpoint import list_tags

    path = os.fspath(path)
    if os.path.isfile(path):
        return _open_files(path, {os.path.basename(path)}, os.path.dirname(path) or ".", None, average)
    if tag is not None or (average is not None and list_tags(path)):
        return _open_checkpoint(path, tag, average)
    index = os.path.join(path, INDEX)
    if os.path.isfile(index):
        from ...checkpoint.files import parse_json

        with open(index, "rb") as f:
            where = parse_json(f.read(), index)
        where = where.get("weight_map") if isinstance(where, dict) else None
        if not isinstance(where, dict) or not all(
            isinstance(v, str) and os.path.basename(v) == v for v in where.values()
        ):
            raise CheckpointError(f"{index} is wrong: it has no weight_map of names to files beside it")
        return _open_files(path, set(where.values()), path, where, average)
    if os.path.isfile(os.path.join(path, "model.safetensors")):
        return _open_files(path, {"model.safetensors"}, path, None, average)
    if not list_tags(path) and not os.path.lexists(os.path.join(path, "latest")):
        raise CheckpointError(
            f"{path} holds no weights: neither a checkpoint of engine.save_checkpoint, nor model.safetensors, nor "
            f"{INDEX}"
        )
    return _open_checkpoint(path, tag, average)


def _open_checkpoint(path: str, tag: str | None, average: str | None) -> Weights:
    from ...checkpoint import CheckpointReader

    reader = CheckpointReader(path, tag)
    try:
        kinds = ("fp32", "frozen", "buffer") if average is None else (f"average.{average}", "frozen", "buffer")
        logical = {full.split("/", 1)[1]: full for full in reader.tensors if full.split("/", 1)[0] in kinds}
        if average is not None and not any(full.startswith(f"average.{average}/") for full in reader.tensors):
            labels = sorted(
                {full.split("/", 1)[0].split(".", 1)[1] for full in reader.tensors if full.startswith("average.")}
            )
            raise CheckpointError(
                f"checkpoint {reader.path} has no average {average!r}; it has {', '.join(map(repr, labels)) or 'none'}"
            )
        if not any(full.split("/", 1)[0] in kinds[:2] for full in reader.tensors):
            raise CheckpointError(
                f"checkpoint {reader.path} was not written by engine.save_checkpoint: it has no weights"
            )
    except BaseException:
        reader.close()
        raise
    kinds_of = {n: (reader[full].dtype, reader[full].shape) for n, full in logical.items()}
    from ..states.loading import take_extra

    return Weights(
        reader.path,
        kinds_of,
        lambda n: reader.tensor(logical[n]),
        {},
        reader.close,
        lambda module, name: take_extra(module, reader, name),
    )


def _open_files(path: str, files: set[str], folder: str, where: dict[str, str] | None, average: str | None) -> Weights:
    if average is not None:
        raise ArgumentError(
            f"average={average!r}: {path} is no checkpoint of engine.save_checkpoint, which alone holds averages"
        )
    from ...checkpoint import SafetensorsFile

    opened: dict[str, SafetensorsFile] = {}

    def close() -> None:
        for f in opened.values():
            f.close()

    try:
        for name in sorted(files):
            opened[name] = SafetensorsFile(os.path.join(folder, name))
        home = {key: f for f in opened.values() for key in f.keys()}
        for key, name in (where or {}).items():
            if key not in opened[name].tensors:
                raise CheckpointError(
                    f"{os.path.join(folder, name)} has no tensor {key!r}, which {INDEX} says is there"
                )
    except BaseException:
        close()
        raise
    ties = {
        alias: stored
        for f in opened.values()
        for alias, stored in f.metadata.items()
        if stored in home and alias not in home
    }
    return Weights(
        path, {k: (f[k].dtype, f[k].shape) for k, f in home.items()}, lambda n: home[n].tensor(n), ties, close
    )
