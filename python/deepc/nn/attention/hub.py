"""Block-sparse attention as an attention implementation of transformers: `attn_implementation="deepc_sparse"`."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core import ops
from ...errors import ArgumentError, ConfigError, UnsupportedError
from .layouts import MODES, SparsityConfig, from_config, to_section
from .module import SparseSelfAttention, both

NAME = "deepc_sparse"
SECTION = "sparse_attention"
"""Where a model's config keeps the layout, as a ds_config has it."""

_NOT_BUILT = ("softcap", "s_aux")


class _Layouts:
    """Layouts of one configuration. Lengths are rounded up to powers of two, of which shorter sequences see the upper
    left part; random blocks are drawn from the configuration and that length alone: the same on all ranks and after a
    resume."""

    LEAST = 64  # blocks: windows need some

    def __init__(self, section: Mapping[str, Any], config: SparsityConfig) -> None:
        self.section, self.config = section, config
        self._made = torch.empty(0, 0, 0, dtype=torch.bool, device="cpu")

    def of(self, keys: int) -> torch.Tensor:
        """bool [1 or heads, blocks, blocks] for `keys`."""
        blocks = -(-keys // self.config.block)
        size = max(self.LEAST, 1 << (blocks - 1).bit_length())
        if self._made.shape[1] != size:
            self.config.random = random.Random(f"{sorted(self.section.items())} {size}")
            self._made = self.config.make_layout(size * self.config.block)[: self.config.num_layout_heads].bool()
        return self._made[:, :blocks, :blocks]


class _OwnSection(dict[str, Any]):
    """The section of a layout of one's own class. It takes the layout along where a model's config is copied; JSON and
    pickle, which need not know the class, have its name."""

    def __init__(self, config: SparsityConfig) -> None:
        super().__init__(mode=type(config).__name__)
        self.config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> _OwnSection:
        return _OwnSection(self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


# By the identity of a model's config, which itself is written to JSON and copied.
_known: dict[int, tuple[weakref.ref[Any], int, _Layouts]] = {}


def _remember(config: Any, heads: int, layouts: _Layouts) -> _Layouts:
    key = id(config)
    _known[key] = (weakref.ref(config, lambda _: _known.pop(key, None)), heads, layouts)
    return layouts


def _layouts(module: torch.nn.Module, heads: int) -> _Layouts:
    """Of the module's model."""
    config: Any = module.config
    section = getattr(config, SECTION, None)
    if section is None:
        raise ConfigError(
            f"attn_implementation={NAME!r} needs a layout: set model.config.{SECTION} = "
            '{"mode": "fixed", "block": 64, ...}, or the same in the configuration of deepc.initialize'
        )
    if section.get("different_layout_per_head") and (all_heads := _heads_of(config)) not in (None, heads):
        raise UnsupportedError(
            f"{NAME!r}: {heads} of the {all_heads} heads are here (other ranks have the others), and each has a layout"
            " of its own by its number among all; leave different_layout_per_head out"
        )
    found = _known.get(id(config))
    if found and found[0]() is config and found[1] == heads and found[2].section == section:
        return found[2]
    if isinstance(section, _OwnSection):
        return _remember(config, heads, _Layouts(section, section.config))
    if (mode := section.get("mode", "fixed")) not in MODES:
        raise ConfigError(
            f"model.config.{SECTION} has mode {mode!r}; there are {', '.join(MODES)}. Of a layout of one's own a saved"
            f" model has the name alone: set it again, deepc.nn.attention.use_layout(model, {mode}(...))"
        )
    return _remember(config, heads, _of_section(section, heads))


def _of_section(section: Mapping[str, Any], heads: int) -> _Layouts:
    return _Layouts(dict(section), from_config(section, heads if section.get("different_layout_per_head") else 1))


def _groups(mask: torch.Tensor | None, positions: torch.Tensor | None, batch: int, rows: int, keys: int) -> Any:
    """Of a padding mask [batch, keys] (padding sees padding), or of position ids [1 or batch, rows] that begin again
    (packed rows)."""
    if mask is not None:
        seen = mask[:, -keys:].int()
        return seen[:, keys - rows :], seen
    if positions is None or rows != keys or positions.dim() != 2 or not bool((positions[:, 1:] == 0).any()):
        return None
    group = (positions == 0).cumsum(1).int().expand(batch, rows)
    return group, group


def _dropped(positions: torch.Tensor | None, keys: int) -> bool:
    """Whether queries at these positions have fewer keys than came before them."""
    return positions is not None and int(positions.max()) + 1 > keys


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """With the signature of transformers' attention functions. query: [batch, heads, rows, dim]; key and value:
    [batch, kv_heads, keys, dim], keys at least rows (a cache). attention_mask: None, [batch, keys] (0 for padding), or
    [1 or batch, 1 or heads, rows, keys]: bool (False hides) or added to the scores; with it nothing is causal but what
    it says, as in "sdpa". Heeds sliding_window and position_bias. Returns ([batch, rows, heads, dim], None)."""
    batch, heads, rows, dim = query.shape
    keys = key.shape[2]
    if asked := [k for k in _NOT_BUILT if kwargs.get(k) is not None]:
        raise UnsupportedError(f"{NAME!r} has no {asked[0]}; take attn_implementation='eager' for this model")
    if keys < rows:
        raise UnsupportedError(f"{rows} queries and {keys} keys: {NAME!r} is self-attention; a layout has no other")
    bias: torch.Tensor | None = kwargs.get("position_bias")
    if attention_mask is not None and attention_mask.dim() != 2:
        if attention_mask.dim() != 4:
            raise UnsupportedError(
                f"an attention mask of shape {tuple(attention_mask.shape)}: {NAME!r} takes [batch, keys] and [batch, "
                "heads, rows, keys]"
            )
        bias, attention_mask, whole = both(bias, attention_mask[..., :keys]), None, True
    else:
        whole = False
    layouts = _layouts(module, heads)
    block = layouts.config.block
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if layouts.config.attention not in ("either", "unidirectional" if is_causal else "bidirectional"):
        raise ConfigError(
            f"{SECTION}.attention = {layouts.config.attention!r}, and {type(module).__name__} is "
            f"{'causal' if is_causal else 'not causal'}: take {'unidirectional' if is_causal else 'bidirectional'!r}"
        )
    window = kwargs.get("sliding_window")
    if window and not is_causal and keys > window:
        raise UnsupportedError(
            f"sliding_window = {window} of {type(module).__name__}, which is not causal: windows to both sides are "
            "mode 'local'; set the model's to None"
        )
    groups = _groups(attention_mask, kwargs.get("position_ids"), batch, rows, keys)
    layout = layouts.of(keys)
    past = keys - rows
    if window and past and _dropped(kwargs.get("position_ids"), keys) and not bool(layout.all()):
        raise UnsupportedError(
            f"the cache has dropped keys that are out of the model's window of {window}: a layout counts from the "
            "first. Generate with use_cache=False, or set the model's sliding_window to None and take mode 'local'"
        )
    ahead = past % block  # rows of zeros, so that the queries begin with a block
    if past:
        query = torch.nn.functional.pad(query, (0, 0, ahead, 0))
        if groups is not None:
            groups = torch.nn.functional.pad(groups[0], (ahead, 0), value=-1), groups[1]
        if bias is not None and bias.shape[-2] > 1:
            bias = torch.nn.functional.pad(bias[..., -rows:, :], (0, 0, ahead, 0))
    out = ops.block_sparse_attention(
        query,
        key,
        value,
        layout[:, past // block :],
        block,
        is_causal=is_causal and not whole,
        scale=scaling,
        groups=groups,
        bias=bias,
        window=window if window and keys > window else None,
        dropout=dropout,
        diagonal=past - ahead,
    )
    return out[:, :, ahead:].transpose(1, 2).contiguous(), None


def _heads_of(config: Any) -> Any:
    return next((n for k in ("num_attention_heads", "n_head", "num_heads") if (n := getattr(config, k, None))), None)


def register() -> None:
    """Makes the name known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    AttentionInterface.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)  # [batch, keys], or None where nothing is padding


def use_layout(model: torch.nn.Module, section: Mapping[str, Any] | SparsityConfig) -> torch.nn.Module:
    """Switches a model of transformers to block-sparse attention, in place.

    section: {"mode": "fixed", "block": 64, ...} as in a configuration's `sparse_attention` (it is saved with the
    model's config), or a SparsityConfig, which is saved as such a section; of a class of one's own copies of the model
    have the layout, and a saved one has to be given it again. Returns the model. ConfigError for a wrong section,
    UnsupportedError for a model that is not transformers' or whose attention can't be chosen."""
    config: Any = getattr(model, "config", None)
    choose = getattr(model, "set_attn_implementation", None)
    heads = _heads_of(config)
    if config is None or choose is None or not isinstance(heads, int):
        raise UnsupportedError(
            f"{type(model).__name__} is no model of transformers whose attention can be chosen; put "
            "deepc.nn.attention.SparseSelfAttention or ops.block_sparse_attention into it"
        )
    if isinstance(section, SparsityConfig):
        if section.num_heads != heads:
            raise ArgumentError(f"the layout has {section.num_heads} heads; {type(model).__name__} has {heads}")
        written = to_section(section) or _OwnSection(section)
        layouts = _Layouts(dict(written), section)
    else:
        layouts = _of_section(section, heads)
        written = dict(layouts.section)
    setattr(config, SECTION, written)
    _remember(config, heads, layouts)
    register()
    choose(NAME)
    if config._attn_implementation != NAME:
        raise UnsupportedError(f"{type(model).__name__} keeps attn_implementation={config._attn_implementation!r}")
    return model


def use_asked(model: torch.nn.Module, section: Mapping[str, Any]) -> Callable[[], None]:
    """use_layout for a configuration's `sparse_attention`. A model that has SparseSelfAttention modules of its own has
    chosen where the layout goes: the section is only checked. Returns what gives the model its own attention back."""
    if any(isinstance(m, SparseSelfAttention) for m in model.modules()):
        from_config(section, 1)
        return lambda: None
    config: Any = getattr(model, "config", None)
    before, own = getattr(config, "_attn_implementation", None), getattr(config, SECTION, None)
    use_layout(model, section)

    def undo() -> None:
        if own is None:
            delattr(config, SECTION)
        else:
            setattr(config, SECTION, own)
        choose: Any = model.set_attn_implementation
        choose(before)

    return undo
