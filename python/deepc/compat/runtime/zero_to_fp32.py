"""Whole weights out of a checkpoint that engine.save_checkpoint wrote (deepspeed.utils.zero_to_fp32's functions, over
deepc's checkpoints).

    python -m deepc.compat.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization]

save_checkpoint of the compatibility layer puts a script zero_to_fp32.py beside the checkpoints that does the same.
Trained parameters come from the fp32 masters; tied weights are there under all their names; buffers keep their dtype.
One tensor is read at a time. Files are read without pickle and checked against their checksums."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.files import replace_file
from ...checkpoint.store import CheckpointReader, forget_shards, read_latest, write_model
from ...checkpoint.tool import parse_size
from ...core import dtypes
from ...core.files import atomic_write
from ...core.ops import casts, torch_dtype
from ...errors import ArgumentError, CheckpointError
from ...zero.parameters.param import is_lent

logger = logging.getLogger("deepc")
_NAMES = sorted(n for d in dtypes.TRAINED for n in (d.name, d.short))
_KINDS = ("fp32", "frozen", "buffer")
_PICKLED_INDEX = "pytorch_model.bin.index.json"


class _Lazy:
    """A tensor that is read when contiguous() is called. `shape` and `dtype` are known before."""

    def __init__(self, weights: _Weights, name: str) -> None:
        self._weights, self._name = weights, name
        info = weights.reader[name]
        self.shape, self.dtype = torch.Size(info.shape), info.dtype

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        """The values, in new memory on the CPU."""
        return self._weights.reader.tensor(self._name)


class _Weights(Mapping[str, Any]):
    """The model's names of a checkpoint -> _Lazy."""

    def __init__(self, directory: str | os.PathLike[str], tag: str | None, exclude_frozen: bool) -> None:
        self.reader = CheckpointReader(directory, tag)
        kinds = tuple(k for k in _KINDS if not (exclude_frozen and k == "frozen"))
        stored = {n.partition("/")[2]: n for n in self.reader.tensors if n.partition("/")[0] in kinds}
        state = self.reader.client_state()
        engine = state.get("engine") if isinstance(state, dict) else None
        self.ties: dict[str, str] = dict(engine.get("ties") or {}) if isinstance(engine, dict) else {}
        self._at = {**stored, **{alias: stored[name] for alias, name in self.ties.items() if name in stored}}

    def __getitem__(self, name: str) -> _Lazy:
        return _Lazy(self, self._at[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def first_of(self, name: str) -> str:
        """The name under which `name`'s values were stored."""
        return self._at[name]


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None, exclude_frozen: bool) -> _Weights:
    path = Path(checkpoint_dir)
    if tag is None and not (path / "latest").exists() and (path / "index.json").exists():  # the folder of one tag
        path, tag = path.parent, path.name
    return _Weights(path, tag if tag is not None else read_latest(path), exclude_frozen)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> Any:
    """The state_dict of a checkpoint, whole, on the CPU: trained parameters in fp32, frozen ones and buffers as they
    are. tag: default the last one. lazy_mode: values are read at `.contiguous()`. CheckpointError if there is none, or
    it is damaged."""
    weights = _open(checkpoint_dir, tag, exclude_frozen_parameters)
    if lazy_mode:
        return dict(weights)
    read: dict[str, torch.Tensor] = {}
    out = {}
    for name in weights:
        first = weights.first_of(name)
        if first not in read:
            read[first] = weights[name].contiguous()
        out[name] = read[first]
    return out


def _shard_bytes(size: str | int | None) -> int:
    """ "5GB" (decimal, as huggingface_hub counts) in bytes; None: no limit."""
    if size is None:
        return 1 << 62
    return size if isinstance(size, int) else parse_size(size)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = dtypes.find(dtype)
    if found not in dtypes.TRAINED:
        raise ArgumentError(f"dtype {dtype!r}: one of {', '.join(_NAMES)}")
    return torch_dtype(found)


def _converted(weights: _Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, values), each stored tensor once."""
    seen: set[str] = set()
    for name in weights:
        if weights.first_of(name) in seen:
            continue
        seen.add(weights.first_of(name))
        values = weights[name].contiguous()
        yield name, values.to(dtype) if casts(values) else values


def write_pickled(path: str | os.PathLike[str], obj: Any) -> None:
    """torch.save to `path`, where it appears whole: what was there stays until then, also if the disk is full or the
    process is killed. CheckpointError if it can't be written."""
    path = os.fspath(path)
    try:
        with atomic_write(path, durable=True) as file:
            torch.save(obj, file)
    except (OSError, RuntimeError) as exc:
        cause = exc.__context__ if isinstance(exc.__context__, OSError) else exc  # torch.save has words of its own
        raise CheckpointError(f"can't write {path}: {getattr(cause, 'strerror', None) or cause}") from exc


def _write_pickled(weights: _Weights, dtype: torch.dtype, output_dir: Path, limit: int) -> None:
    """pytorch_model.bin, or shards of it with an index, as Hugging Face names them. Those of an earlier call that are
    not written anew are removed last: from_pretrained would take them."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    for name, values in _converted(weights, dtype):
        nbytes = values.numel() * values.element_size()
        if shards[-1] and sizes[-1] + nbytes > limit:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = values
        sizes[-1] += nbytes
    for alias, name in weights.ties.items():
        for shard in shards:
            if name in shard:
                shard[alias] = shard[name]
    n = len(shards)
    files = ["pytorch_model.bin"] if n == 1 else [f"pytorch_model-{i + 1:05d}-of-{n:05d}.bin" for i in range(n)]
    forget_shards(os.fspath(output_dir), _PICKLED_INDEX, files)
    for shard, file in zip(shards, files):
        write_pickled(output_dir / file, shard)
    if n > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": {k: f for s, f in zip(shards, files) for k in s}}
        files.append(_PICKLED_INDEX)
        replace_file(os.fspath(output_dir / files[-1]), (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    for path in output_dir.iterdir():
        if path.name not in files and re.fullmatch(r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?", path.name):
            path.unlink()


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights of a checkpoint as a Hugging Face model: with safe_serialization model.safetensors, else
    pytorch_model.bin (both in shards with an index beyond max_shard_size). Floating-point tensors become `dtype`."""
    weights, target = _open(checkpoint_dir, tag, exclude_frozen_parameters), _dtype(dtype)
    output, limit = Path(output_dir), _shard_bytes(max_shard_size)
    output.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        write_model(output, _converted(weights, target), limit, metadata=weights.ties)
    else:
        _write_pickled(weights, target, output, limit)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """convert_zero_checkpoint_to_state_dict in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Loads the weights of a checkpoint into a plain model (one that no engine holds) on the CPU, and returns it. Names
    that only one of them has are left out, as in DeepSpeed; a warning tells them. Inside of GatheredParameters without
    modifier_rank the model's parameters have them until its end, each rank's its own."""
    model.cpu()
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    lent = {n: p for n, p in model.named_parameters(remove_duplicate=False) if is_lent(p)}
    taken = {n for n, p in lent.items() if n in values and values[n].shape == p.shape}
    for n in taken:
        lent[n].data.copy_(values[n])
    left = model.load_state_dict({n: t for n, t in values.items() if n not in taken}, strict=False)
    for names, text in (
        (
            [n for n in left.missing_keys if n not in taken],
            "%d of the model's tensors are not in checkpoint %s and keep their values: %s",
        ),
        (left.unexpected_keys, "%d tensors of checkpoint %s are not in the model: %s"),
    ):
        if names:
            logger.warning(text, len(names), checkpoint_dir, ", ".join(names[:5]) + ", ..." * (len(names) > 5))
    return model


SCRIPT = '''#!/usr/bin/env python
"""Writes the weights of the checkpoints in this folder as one model: ./zero_to_fp32.py . OUTPUT_DIR [--safe_serialization]"""
import sys

from deepc.compat.zero_to_fp32 import main

sys.exit(main())
'''  # noqa: E501


def leave_script(directory: str | os.PathLike[str]) -> None:
    """Puts zero_to_fp32.py into a folder of checkpoints, as DeepSpeed does. Where it can't be written (another user's,
    a file system without modes) a warning says so: the checkpoint is whole, and other ranks have gone on."""
    path = Path(directory, "zero_to_fp32.py")
    try:
        path.write_text(SCRIPT)
        path.chmod(0o755)
    except OSError as exc:
        logger.warning(
            "can't write %s: %s; the checkpoint is saved, and `python -m deepc.compat.zero_to_fp32` does the same",
            path,
            exc.strerror or exc,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Writes the weights of a deepc checkpoint as one model."
    )
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, or of one tag (global_step14)")
    parser.add_argument("output_dir", help="where the model goes")
    parser.add_argument(
        "--dtype", default="fp32", choices=_NAMES, help="dtype of floating-point weights (default: fp32)"
    )
    parser.add_argument("--max_shard_size", default="5GB", help="size of one file (default: 5GB)")
    parser.add_argument(
        "--safe_serialization", action="store_true", help="model.safetensors instead of pytorch_model.bin"
    )
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: the last one)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted for compatibility")
    args = parser.parse_args(argv)
    try:
        convert_zero_checkpoint_to_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            args.dtype,
            args.max_shard_size,
            args.safe_serialization,
            args.tag,
            args.exclude_frozen_parameters,
        )
    except (CheckpointError, ArgumentError) as error:
        print(f"zero_to_fp32: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
