"""What a transformer asks of a machine, layer by layer, from its sizes: parameters, products, memory traffic, what is
kept for backward, what parallel ranks exchange. docs/planner.md has the formulas and where they come from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....core import lib as _lib
from ....errors import ArgumentError, did_you_mean
from .families import FAMILIES, Block, Config, head_dim, heads_of_keys

_LAYERS, _WIDTH = 1 << 17, 1 << 31  # more is a slip of the pen


@dataclass(frozen=True)
class Model:
    """A decoder or encoder of equal blocks. inner: width of the MLP (of one expert). gated: three matrices in it
    instead of two. experts: 0 for a dense model; each token goes through `top` of them. positions: of a learned
    embedding. scores: attention writes its scores out (eager attention), where otherwise it keeps none; score_elems:
    kept of each (2.5 are 5 bytes in 16 bits, with dropout: arXiv:2205.05198, section 4). head_dim: of one head; the
    heads may be wider or narrower than the model together.

    What is known of a family (families.py): rest: parameters of a block beside its matrices (None: Llama's norms where
    it is gated, GPT-2's biases and norms where not); before, after: those before the blocks beside the embeddings, and
    behind them beside the head (None: a norm). attention: those of its matrices, if other than the sizes say.
    value_dim: of a head's values, if other than head_dim; value_base: of what they are a view of, which is kept.
    latents: elements of a token that attention keeps beside heads, on each tensor-parallel rank all. shared: width of a
    network for all tokens beside the experts, which shared_gate weighs. dense: numbers of blocks without experts;
    dense_inner: the width of their MLPs."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    inner: int = 0
    gated: bool = False
    experts: int = 0
    top: int = 1
    tied: bool = False
    positions: int = 0
    causal: bool = True
    scores: bool = False
    score_elems: float = 2.5
    head_dim: int = 0
    rest: int | None = None
    before: int = 0
    after: int | None = None
    attention: int = 0
    value_dim: int = 0
    value_base: int = 0
    latents: int = 0
    shared: int = 0
    shared_gate: bool = False
    dense: tuple[int, ...] = ()
    dense_inner: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "inner", self.inner or 4 * self.hidden)
        for field in ("layers", "hidden", "heads", "vocab", "seq", "kv_heads", "inner", "top"):
            if type(n := getattr(self, field)) is not int or n < 1:
                raise ArgumentError(f"model {self.name}: {field} = {n!r} must be a whole number of at least 1")
        _check_layers(self.name, self.layers)
        for field in (
            "hidden",
            "heads",
            "vocab",
            "seq",
            "kv_heads",
            "inner",
            "top",
            "experts",
            "positions",
            "head_dim",
            "value_dim",
            "value_base",
            "latents",
            "shared",
            "dense_inner",
        ):
            if type(n := getattr(self, field)) is int and n > _WIDTH:
                raise ArgumentError(f"model {self.name}: {field} = {n} must be at most {_WIDTH}")
        heads = ("head_dim", "value_dim", "value_base", "latents", "attention")
        for field in ("experts", "positions", "shared", "dense_inner", *heads):
            if type(n := getattr(self, field)) is not int or n < 0:
                raise ArgumentError(f"model {self.name}: {field} = {n!r} must be a whole number of at least 0")
        if (not self.head_dim and self.hidden % self.heads) or self.heads % self.kv_heads:
            raise ArgumentError(
                f"model {self.name}: {self.heads} heads don't divide hidden {self.hidden} (give head_dim if they need"
                f" not), or {self.kv_heads} heads of keys don't divide them"
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        object.__setattr__(self, "value_base", self.value_base or self.value_dim)
        if self.experts and self.top > self.experts:
            raise ArgumentError(f"model {self.name}: tokens go to {self.top} of {self.experts} experts")

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def values(self) -> int:
        return self.kv_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Width of what attention mixes of values."""
        return self.heads * self.value_dim

    @property
    def _attention(self) -> int:
        return self.attention or 2 * self.hidden * self.queries + 2 * self.hidden * self.keys

    def _mlp(self, inner: int) -> int:
        return (3 if self.gated else 2) * self.hidden * inner

    @property
    def _rest(self) -> int:
        if self.rest is not None:
            return self.rest
        if self.gated:
            return 2 * self.hidden
        return self.queries + 2 * self.keys + self.hidden + self.inner + self.hidden + 4 * self.hidden

    @property
    def parameters(self) -> int:
        rows = self.rows()
        return round(sum(r["params"] + r["expert_params"] for r in rows))

    def flops(self) -> float:
        """Of one sample, forward and backward, nothing computed again."""
        return 3 * sum(r["flops"] for r in self.rows())

    def rows(self) -> list[dict[str, float]]:
        """Each layer: the embedding, the blocks, the head. Keys are dc_planner_layer's."""
        block = self._block(self.experts)
        plain = self._block(0) if self.dense else block
        blocks = [plain if i in self.dense else block for i in range(self.layers)]
        return [self._embedding(), *blocks, self._head()]

    def _block(self, experts: int) -> dict[str, float]:
        s, h = self.seq, self.hidden
        qkv, mixed = self.queries + self.keys + self.values, self.mixed
        alone = self.inner if not self.experts else self.dense_inner  # of a block without experts
        # through how wide an MLP a token goes, and how many parameters are in what all tokens go through
        f, common = (self.top * self.inner + self.shared, self.shared) if experts else (alone, alone)
        rows = 1 + (self.top if experts else 1)
        wide = 3 if self.gated else 2
        scores = self.heads * s * s if self.scores else 0
        both = s * s * (self.queries + mixed)  # of queries and keys, of scores and values
        products = 2 * s * (self._attention + self._mlp(f)) + (1 if self.causal and not scores else 2) * both
        gates = experts * h + (h if experts and self.shared_gate else 0)
        return {
            "params": self._attention + self._mlp(common) + self._rest + gates,
            "expert_params": experts * self._mlp(self.inner),
            "flops": products + 2 * s * gates,
            # two norms read and write, two sums read twice and write: whole; attention moves heads, and the MLP's
            # activation: cut; scores are written, read and written by softmax and by dropout, read
            "traffic_whole": s * (10 * h + self.latents),
            "traffic": s * (2 * (qkv + mixed) + wide * f) + 6 * scores,
            # inputs of both norms and of both first products; then queries, keys, values, the mixed values, and the
            # MLP's inner elements before and after the activation
            "saved_whole": s * (4 * h + self.latents),
            "saved": s * (qkv + self.kv_heads * (self.value_base - self.value_dim) + mixed + wide * f)
            + self.score_elems * scores,
            "output": s * h,
            "tp_elems": rows * s * h,  # of experts, each token's rows
            "tp_calls": 2,
            "sp_elems": s * (qkv + mixed),
            "ep_elems": 2 * self.top * s * h if experts else 0,
            "calls": 20 + (12 if experts else 0),
            "block": 1,
        }

    def _embedding(self) -> dict[str, float]:
        s, h = self.seq, self.hidden
        none = dict.fromkeys(self._block(0), 0.0)
        return none | {
            "params": (self.vocab + self.positions) * h + self.before,
            "traffic_whole": 3 * s * h,
            "saved_whole": s * h / 4,
            "output": s * h,
            "tp_elems": s * h,
            "tp_calls": 1,
            "calls": 4,
        }

    def _head(self) -> dict[str, float]:
        s, h, v = self.seq, self.hidden, self.vocab
        none = dict.fromkeys(self._block(0), 0.0)
        return none | {
            "params": (0 if self.tied else v * h)
            + (self.after if self.after is not None else h if self.gated else 2 * h),
            "flops": 2 * s * h * v,
            # logits are written, read for their largest and their sum, and the loss' inputs are kept
            "traffic": 3 * s * v,
            "traffic_whole": 2 * s * h,
            "saved": 2 * s * v,
            "saved_whole": 2 * s * h,
            "output": 0,
            "tp_elems": s * h,
            "tp_calls": 1,
            "calls": 8,
        }

    def core_rows(self) -> Any:
        rows = self.rows()
        return (_lib.PlannerLayer * len(rows))(*(_lib.PlannerLayer(**r) for r in rows))


def _check_layers(name: str, layers: int) -> None:
    if layers > _LAYERS:
        raise ArgumentError(f"model {name}: layers = {layers} must be at most {_LAYERS}")


def _gpt(name: str, layers: int, hidden: int, heads: int, seq: int = 2048, vocab: int = 50257) -> Model:
    return Model(name, layers, hidden, heads, vocab, seq, tied=True, positions=seq)


# GPT-2 and GPT-3: arXiv:2005.14165, table 2.1; Llama 2: arXiv:2307.09288; Llama 3: arXiv:2407.21783, table 3; Mixtral:
# arXiv:2401.04088, table 1; gpt-1t: the trillion parameters of arXiv:2104.04473, table 1.
NAMED: dict[str, Model] = {
    m.name: m
    for m in (
        _gpt("gpt2", 12, 768, 12, 1024),
        _gpt("gpt2-medium", 24, 1024, 16, 1024),
        _gpt("gpt2-large", 36, 1280, 20, 1024),
        _gpt("gpt2-xl", 48, 1600, 25, 1024),
        _gpt("gpt3-6.7b", 32, 4096, 32),
        _gpt("gpt3-13b", 40, 5120, 40),
        _gpt("gpt3-175b", 96, 12288, 96, vocab=51200),
        _gpt("gpt-530b", 105, 20480, 128, vocab=51200),
        _gpt("gpt-1t", 128, 25600, 160, vocab=51200),
        Model("llama2-7b", 32, 4096, 32, 32000, 4096, inner=11008, gated=True),
        Model("llama2-13b", 40, 5120, 40, 32000, 4096, inner=13824, gated=True),
        Model("llama2-70b", 80, 8192, 64, 32000, 4096, kv_heads=8, inner=28672, gated=True),
        Model("llama3-8b", 32, 4096, 32, 128256, 8192, kv_heads=8, inner=14336, gated=True),
        Model("llama3-70b", 80, 8192, 64, 128256, 8192, kv_heads=8, inner=28672, gated=True),
        Model("llama3-405b", 126, 16384, 128, 128256, 8192, kv_heads=8, inner=53248, gated=True),
        Model("mixtral-8x7b", 32, 4096, 32, 32000, 4096, kv_heads=8, inner=14336, gated=True, experts=8, top=2),
    )
}


def model_of(given: str | Mapping[str, Any] | Any, seq: int | None = None) -> Model:
    """A name of NAMED; sizes as in "layers=12,hidden=768,heads=12,vocab=50257,seq=1024"; a transformers config.json,
    its folder, its contents, or a config object. seq: other than the model's longest. ArgumentError says what is
    missing."""
    if isinstance(given, Model):
        found = given
    elif isinstance(given, str):
        found = _from_text(given, seq)
    elif isinstance(given, Mapping):
        found = from_config(given, seq=seq)
    elif hasattr(given, "to_dict"):
        found = from_config(given.to_dict(), seq=seq)
    else:
        raise ArgumentError(f"model {given!r}: expected a name, sizes, a transformers config or the path of one")
    if seq is None:
        return found
    return replace(found, seq=seq, positions=max(found.positions, seq) if found.positions else 0)


def _from_text(text: str, seq: int | None) -> Model:
    if text in NAMED:
        return NAMED[text]
    if "=" in text and not os.path.exists(text):
        return _from_sizes(text)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ArgumentError(
            f"model {text!r}: no file, and no name; names are {', '.join(NAMED)}; or give sizes:"
            " layers=12,hidden=768,heads=12,vocab=50257,seq=1024"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ArgumentError(f"model {text}: no JSON: {exc}") from exc
    if not isinstance(config, Mapping):
        raise ArgumentError(
            f"model {text}: expected an object, as in a transformers config.json; got a {type(config).__name__}"
        )
    return from_config(config, str(path), seq)


def _from_sizes(text: str) -> Model:
    flags = ("gated", "tied", "causal", "scores")
    needed = ("layers", "hidden", "heads", "vocab", "seq")
    sizes = (*needed, "kv_heads", "head_dim", "inner", "experts", "top", "positions")
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in (*sizes, *flags):
            raise ArgumentError(f"model: {key!r} is no size; sizes are {', '.join((*sizes, *flags))}")
        if not (value.isascii() and value.isdigit()):
            raise ArgumentError(f"model: {part.strip()!r}: expected a whole number ({', '.join(flags)}: 0 or 1)")
        found[key] = bool(int(value)) if key in flags else int(value)
    if missing := [k for k in needed if k not in found]:
        raise ArgumentError(f"model: {missing[0]} is missing in {text!r}; needed are {', '.join(needed)}")
    return Model("model", **found)


def from_config(config: Mapping[str, Any], name: str = "", seq: int | None = None) -> Model:
    """From the contents of a transformers config.json. seq: where it does not say how many tokens. ArgumentError for
    one without the sizes of a transformer, or of a family that is not known (families.FAMILIES)."""
    kind = str(config.get("model_type", ""))
    name = name or kind or "model"
    c = Config(config, name)
    if config.get("is_encoder_decoder"):
        raise ArgumentError(
            f"model {name}: is_encoder_decoder is true, and a model of an encoder and a decoder is not planned"
            " for: its config would count as one of them. Give the sizes of equal blocks that come near it:"
            " layers=24,hidden=1024,heads=16,vocab=32128,seq=512"
        )
    hidden = c.number("hidden_size", "n_embd", "d_model", "n_embed")
    heads = c.number("num_attention_heads", "n_head", "num_heads")
    tokens = c.number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=seq)
    layers = c.number("num_hidden_layers", "n_layer", "num_layers")
    _check_layers(name, layers)  # before a family goes through them
    inner = c.number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    size, kv_heads = head_dim(c), heads_of_keys(c, heads)
    vocab = c.number("vocab_size")
    if not kind:  # sizes under transformers' names
        gated = str(config.get("hidden_act", "")) in ("silu", "swiglu")
        found: dict[str, Any] = {"gated": gated, "tied": c.flag("tie_word_embeddings", not gated), "learned": not gated}
    elif kind in FAMILIES:
        block = Block(hidden, layers, heads, kv_heads, inner, size or hidden // max(1, heads), vocab)
        found = FAMILIES[kind](c, block)
    else:
        near = f"layers={layers},hidden={hidden},heads={heads},kv_heads={kv_heads},inner={inner}"
        raise ArgumentError(
            f"model {name}: model_type {kind!r} is not known here, so what its blocks consist of is not either"
            f"{did_you_mean(kind, FAMILIES)}; known are {', '.join(FAMILIES)}. If it is a chain of equal blocks, give"
            f" their sizes: {near},vocab={vocab},seq={tokens} (with gated=1, tied=1, head_dim, experts, top where it"
            " has these)"
        )
    learned, first = found.pop("learned", False), found.pop("first", 0)
    sizes: dict[str, Any] = {"inner": inner, "kv_heads": kv_heads, "head_dim": size, **found}
    return Model(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        seq=tokens - first,
        positions=tokens if learned else 0,
        **sizes,
    )
