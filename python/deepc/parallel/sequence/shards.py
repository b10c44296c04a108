"""Batches cut into the positions of each rank."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError, UnsupportedError

ROUTER_MASK = "router_mask"
_with_routers: weakref.WeakSet[Any] = weakref.WeakSet()


def mask_for_routers(group: Any) -> None:
    """From now on shard() says which positions of a batch of `group` a load-balance loss counts."""
    _with_routers.add(group)


def shard(
    batch: Mapping[str, Any], group: Any, *, pad_id: int = 0, ignore_index: int = -100, causal: bool = False
) -> dict[str, Any]:
    """This rank's positions of a batch of token sequences, as transformers' collators make them: input_ids and labels
    [samples, positions] and, if there are, position_ids. All ranks of the group give equal batches.

    Labels are shifted before they are cut: `shift_labels`, which share()d models take, has at each position the next
    token, wherever that is. position_ids are made where there are none. Sequences whose length the ranks don't divide
    are filled up with pad_id at their end, without labels.

    An attention_mask of ones is left out. With zeros, causal=True says that the model looks back only: where all zeros
    are at the end (right padding) and have no labels, they don't count, and the mask is left out too. For a share()d
    mixture of experts there is `router_mask` then, and where sequences are filled up: 0 for positions that its
    load-balance loss leaves out, 1 for others. ArgumentError for another mask or other shapes; UnsupportedError for
    packed samples (position_ids that do not go up by 1), and for tensors with the positions that are not known here."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise ArgumentError("sequence parallelism: a batch needs input_ids [samples, positions]")
    samples, length = ids.shape
    known = {
        "input_ids": pad_id,
        "labels": ignore_index,
        "position_ids": 0,
        "shift_labels": ignore_index,
        ROUTER_MASK: 0,
    }
    rest = {}
    for name, value in batch.items():
        if name in known:
            if value is not None and tuple(value.shape) != (samples, length):
                raise ArgumentError(
                    f"sequence parallelism: {name} is {list(value.shape)}, and input_ids {[samples, length]}"
                )
        elif name == "attention_mask":
            _check_mask(value, batch.get("labels"), ignore_index, causal)
        elif isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length:
            raise UnsupportedError(
                f"sequence parallelism: {name} {list(value.shape)} has the positions of input_ids, and how it is cut is"
                " not known; cut it in the loader and leave it out here"
            )
        else:
            rest[name] = value
    _check_positions(batch.get("position_ids"), batch.get("attention_mask"))
    whole = {name: batch[name] for name in known if batch.get(name) is not None}
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(length, device=ids.device).expand(samples, length)
    if "labels" in whole and "shift_labels" not in whole:
        whole["shift_labels"] = torch.nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=ignore_index)
    part = -(-length // ranks)
    missing = part * ranks - length
    if group in _with_routers and ROUTER_MASK not in whole:
        mask = batch.get("attention_mask")
        counted = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype)
        if missing or not bool(counted.all()):
            whole[ROUTER_MASK] = counted
    for name, t in whole.items():
        if missing:
            end = (
                torch.arange(length, length + missing, device=t.device).expand(samples, missing)
                if name == "position_ids"
                else t.new_full((samples, missing), known[name])
            )
            t = torch.cat((t, end), 1)
        rest[name] = t[:, me * part : (me + 1) * part].contiguous()
    return rest


def each_tensor(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """x with its tensors, in nested tuples, lists, mappings and dataclasses, changed. A dataclass and a mapping that
    can be changed (a tokenizer's BatchEncoding) keep their type, and are copied where something in them is another;
    another mapping becomes a dict."""
    if isinstance(x, torch.Tensor):
        return change(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(each_tensor(v, change) for v in x))
    if isinstance(x, (list, tuple)):
        return type(x)(each_tensor(v, change) for v in x)
    if type(x) is dict:
        return {k: each_tensor(v, change) for k, v in x.items()}
    if isinstance(x, Mapping):
        return _with_items(x, {k: each_tensor(v, change) for k, v in x.items()})
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = [f.name for f in dataclasses.fields(x) if hasattr(x, f.name)]
        return _with_fields(x, {n: each_tensor(getattr(x, n), change) for n in fields})
    return x


def _with_items(x: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if all(items[k] is v for k, v in x.items()):
        return x
    if not isinstance(x, MutableMapping):
        return items
    like = copy.copy(x)
    for k, v in items.items():
        like[k] = v
    return like


def _with_fields(x: Any, fields: dict[str, Any]) -> Any:
    if all(getattr(x, n) is v for n, v in fields.items()):
        return x
    like = copy.copy(x)
    for n, v in fields.items():
        object.__setattr__(like, n, v)  # a frozen one's too
    return like


def shorter(given: Any, part: int, length: int, group: Any) -> Any:
    """This rank's positions of sequences that end after `length`, of tensors in nested tuples, lists and dicts that are
    its `part` positions of longer ones. ArgumentError for a length that the ranks do not divide. Collective over the
    group, whose ranks have equally many positions."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    if part * ranks <= length:
        return given
    if length % ranks:
        raise ArgumentError(
            f"a curriculum by length comes to {length} positions, which {ranks} ranks that share sequences do not"
            f" divide; choose min_difficulty and difficulty_step that are multiples of {ranks}"
        )

    def cut(t: torch.Tensor) -> torch.Tensor:
        if t.dim() < 2 or t.shape[1] != part:
            return t
        parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, t.contiguous(), group=group)
        return torch.cat(parts, 1)[:, me * length // ranks : (me + 1) * length // ranks].contiguous()

    return each_tensor(given, cut)


def _check_mask(mask: Any, labels: Any, ignore_index: int, causal: bool) -> None:
    if mask is None or bool((mask != 0).all()):
        return
    if mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ArgumentError(
            "sequence parallelism: the attention_mask has zeros that are not at the end of sequences; only right"
            " padding can be left out. Pad on the right (tokenizer.padding_side)"
        )
    if not causal:
        raise ArgumentError(
            "sequence parallelism: the attention_mask has zeros. Of a model that looks back only, padding at the end"
            " does not count: say causal=True. Others would see it, and need batches without padding"
        )
    if labels is not None and bool((labels[mask == 0] != ignore_index).any()):
        raise ArgumentError(
            f"sequence parallelism: padded positions have labels other than {ignore_index}; transformers' collators set"
            " them so"
        )


def _check_positions(positions: Any, mask: Any) -> None:
    """That they are of one sample a row, as transformers tells: packed ones would see each other. Those of padding,
    which _check_mask lets pass, don't count."""
    if positions is None:
        return
    breaks = positions[:, 1:] != positions[:, :-1] + 1
    if mask is not None and mask.shape == positions.shape:
        breaks = breaks & (mask[:, 1:] != 0)
    if not bool(breaks.any()):
        return
    row, at = breaks.nonzero()[0].tolist()
    raise UnsupportedError(
        f"sequence parallelism: position_ids of row {row} go from {int(positions[row, at])} to"
        f" {int(positions[row, at + 1])} at column {at + 1}, as those of packed samples, which would see each other;"
        " give each sample a row of its own (padding at the end is left out by its attention_mask, with causal=True)"
    )


class Shards:
    """A loader whose batches are cut by shard(); options are its. len() and attributes are the loader's."""

    def __init__(self, loader: Iterable[Mapping[str, Any]], group: Any, **options: Any) -> None:
        self.loader, self.group, self.options = loader, group, options

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            yield shard(batch, self.group, **self.options)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while a copy of it is made, which has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)
