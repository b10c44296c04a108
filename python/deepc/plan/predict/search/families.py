"""What the blocks of transformers' families have beside the matrices that all transformers have, from a config: biases,
norms, heads of keys, experts, learned positions, what stands before and after the blocks. With it, a model's
parameters are counted to the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import ArgumentError

Sizes = dict[str, Any]  # fields of models.Model


# What a config.json may leave out, and follows from no other size.
_DEFAULTS: dict[str, dict[str, int]] = {
    "deepseek_v2": {"q_lora_rank": 1536},
    "deepseek_v3": {"q_lora_rank": 1536},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "n_routed_experts": 8},
    "qwen2_moe": {
        "n_routed_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4},
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 4},
    "phimoe": {"n_routed_experts": 16, "num_key_value_heads": 8},
    "olmoe": {"n_routed_experts": 64, "num_experts_per_tok": 8},
    "granitemoe": {"n_routed_experts": 8},
    "smollm3": {"num_key_value_heads": 4},
    "glm": {"head_dim": 128, "num_key_value_heads": 2},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2},
    "helium": {"head_dim": 128},
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "ernie4_5": {"head_dim": 128, "num_key_value_heads": 2},
    "starcoder2": {"num_key_value_heads": 2},
}
# These cut the hidden size into heads, whatever a head_dim says.
_EQUAL_HEADS = {"gpt2", "openai-gpt", "gpt_bigcode", "gpt_neo", "gptj", "codegen", "gpt_neox", "opt", "biogpt", "bloom"}
_EQUAL_HEADS |= {"falcon", "stablelm", "persimmon", "bert", "roberta", "camembert", "xlm-roberta", "electra"}


class Config:
    """What a config says, or would if it said all: a config.json may leave out what is its class's default."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        self.kind, self.name = str(raw.get("model_type", "")), name
        self._raw: dict[str, Any] = {**_DEFAULTS.get(self.kind, {}), **raw}

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of these keys that has a whole number. ArgumentError for one below 0, and where none has, and there
        is no default."""
        for k in keys:
            if isinstance(n := self._raw.get(k), int) and not isinstance(n, bool):
                if n < 0:
                    raise ArgumentError(f"model {self.name}: {k} = {n} must be a whole number of at least 0")
                return n
        if default is None:
            raise ArgumentError(f"model {self.name}: the config has none of {', '.join(keys)}")
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        return default if (found := self._raw.get(key)) is None else bool(found)

    def numbers(self, key: str) -> frozenset[int]:
        """A list of whole numbers; none where there is no such key."""
        found = self._raw.get(key)
        if found is not None and not (isinstance(found, (list, tuple)) and all(type(n) is int for n in found)):
            raise ArgumentError(f"model {self.name}: {key} = {found!r} must be a list of whole numbers")
        return frozenset(found or ())


@dataclass(frozen=True)
class Block:
    """The sizes that a family's parameters follow from. kv: heads of keys and values."""

    hidden: int
    layers: int
    heads: int
    kv: int
    inner: int
    head_dim: int
    vocab: int

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv * self.head_dim

    def attention_biases(self, qkv: bool = True, out: bool = True) -> int:
        return qkv * (self.queries + 2 * self.keys) + out * self.hidden

    def mlp_biases(self, matrices: int = 2) -> int:
        """3 matrices: of a gated one."""
        return (matrices - 1) * self.inner + self.hidden

    def norms(self, count: float, bias: bool = False) -> int:
        return round(count * self.hidden) * (2 if bias else 1)


Family = Callable[[Config, Block], Sizes]


def _llama(
    norms: int = 2,
    qk: Callable[[Block], int] = lambda b: 0,
    attention: str = "attention_bias",
    out: str = "attention_bias",
    mlp: str = "mlp_bias",
    default: bool = False,
    tied: bool = False,
    gated: bool = True,
    final: float = 1,
) -> Family:
    """Norms with weights alone, rotary positions. attention, out, mlp: keys that say whether there are biases ("":
    there are none); default: of the first. qk: parameters of the norms of queries and keys. final: norms behind the
    blocks."""

    def sizes(c: Config, b: Block) -> Sizes:
        qkv = bool(attention) and c.flag(attention, default)
        has_out, has_mlp = bool(out) and c.flag(out), bool(mlp) and c.flag(mlp)
        rest = b.norms(norms) + b.attention_biases(qkv, has_out) + qk(b)
        return {
            "gated": gated,
            "rest": rest + (b.mlp_biases(3 if gated else 2) if has_mlp else 0),
            "after": b.norms(final),
            "tied": c.flag("tie_word_embeddings", tied),
        }

    return sizes


def _each_head(b: Block) -> int:
    return 2 * b.head_dim


def _all_heads(b: Block) -> int:
    return b.queries + b.keys


def _olmoe_heads(b: Block) -> int:
    """Whatever head_dim says."""
    return b.hidden + b.hidden // b.heads * b.kv


def _of_experts(dense: Family, shared: str = "", gate: bool = False, inner: str = "moe_intermediate_size") -> Family:
    """The same with experts. shared: key of the width of a network for all tokens beside them; gate: of that."""

    def sizes(c: Config, b: Block) -> Sizes:
        experts = c.number("num_experts", "num_local_experts", "n_routed_experts")
        step, never = c.number("decoder_sparse_step", default=1), c.numbers("mlp_only_layers")
        plain = tuple(i for i in range(b.layers) if i in never or not experts or (i + 1) % max(1, step))
        found = dense(c, b)
        if not experts or len(plain) == b.layers:
            return found
        return found | {
            "experts": experts,
            "top": c.number("num_experts_per_tok", default=2),
            "inner": c.number(inner, default=b.inner) if inner else b.inner,
            "shared": c.number(shared, default=0) if shared else 0,
            "shared_gate": gate,
            "dense": plain,
            "dense_inner": b.inner,
        }

    return sizes


def _gpt2(positions: bool = True, final: bool = True) -> Family:
    """Biases everywhere, norms with them, learned positions."""

    def sizes(c: Config, b: Block) -> Sizes:
        if c.flag("add_cross_attention"):
            raise ArgumentError(
                f"model {c.name}: add_cross_attention is true, and a decoder beside an encoder is not planned for"
            )
        rest = b.attention_biases() + b.mlp_biases() + b.norms(2, True)
        after = b.norms(1, True) if final else 0
        return {"rest": rest, "after": after, "tied": c.flag("tie_word_embeddings", True), "learned": positions}

    return sizes


def _gpt_neo(c: Config, b: Block) -> Sizes:
    rest = b.attention_biases(qkv=False) + b.mlp_biases() + b.norms(2, True)
    return {"rest": rest, "after": b.norms(1, True), "tied": c.flag("tie_word_embeddings", True), "learned": True}


def _gptj(c: Config, b: Block) -> Sizes:
    """One norm for attention and MLP, and a head with a bias."""
    after = b.norms(1, True) + b.vocab
    return {"rest": b.mlp_biases() + b.norms(1, True), "after": after, "tied": c.flag("tie_word_embeddings")}


def _gpt_neox(c: Config, b: Block) -> Sizes:
    bias = c.flag("attention_bias", True)
    rest = b.attention_biases(bias, bias) + b.mlp_biases() + b.norms(2, True)
    return {"rest": rest, "after": b.norms(1, True), "tied": c.flag("tie_word_embeddings")}


def _persimmon(c: Config, b: Block) -> Sizes:
    found = _gpt_neox(c, b)
    return found | {"rest": found["rest"] + 4 * b.head_dim * c.flag("qk_layernorm", True)}


def _opt(c: Config, b: Block) -> Sizes:
    """Positions are numbered from 2 on. Embedding and head may be narrower than the blocks."""
    bias, affine = c.flag("enable_bias", True), c.flag("layer_norm_elementwise_affine", True)
    before_blocks = c.flag("do_layer_norm_before", True) and not c.flag("_remove_final_layer_norm")
    narrow, h, tied = c.number("word_embed_proj_dim", default=b.hidden), b.hidden, c.flag("tie_word_embeddings", True)
    project = 0 if narrow == h else b.vocab * (narrow - h) + narrow * h
    return {
        "rest": bias * (b.attention_biases() + b.mlp_biases()) + affine * b.norms(2, True),
        "before": 2 * h + project,
        "after": affine * before_blocks * b.norms(1, True)
        + (project if not tied else 0 if narrow == h else narrow * h),
        "tied": tied,
        "learned": True,
    }


def _biogpt(c: Config, b: Block) -> Sizes:
    return _gpt2()(c, b) | {"before": 2 * b.hidden}


def _bloom(c: Config, b: Block) -> Sizes:
    """A norm behind the embedding, and no positions."""
    return _gpt2(positions=False)(c, b) | {"before": b.norms(1, True), "inner": 4 * b.hidden}


def _falcon(c: Config, b: Block) -> Sizes:
    new, bias = c.flag("new_decoder_architecture"), c.flag("bias")
    norms = c.number("num_ln_in_parallel_attn", default=2) if new else 1 if c.flag("parallel_attn", True) else 2
    b = Block(b.hidden, b.layers, b.heads, b.kv, c.number("ffn_hidden_size", default=4 * b.hidden), b.head_dim, b.vocab)
    return {
        "inner": b.inner,
        "rest": bias * (b.attention_biases() + b.mlp_biases()) + b.norms(norms, True),
        "after": b.norms(1, True),
        "tied": c.flag("tie_word_embeddings", True),
    }


def _phi(c: Config, b: Block) -> Sizes:
    rest = b.attention_biases() + b.mlp_biases() + b.norms(1, True) + 4 * b.head_dim * c.flag("qk_layernorm")
    return {"rest": rest, "after": b.norms(1, True) + b.vocab, "tied": c.flag("tie_word_embeddings")}


def _phimoe(c: Config, b: Block) -> Sizes:
    bias = c.flag("attention_bias")
    return {
        "gated": True,
        "rest": b.attention_biases(bias, bias) + b.norms(2, True),
        "after": b.norms(1, True) + b.vocab * c.flag("lm_head_bias"),
        "tied": c.flag("tie_word_embeddings"),
    }


def _stablelm(c: Config, b: Block) -> Sizes:
    norms = 1 if c.flag("use_parallel_residual") else 2
    qk = _all_heads(b) if c.flag("qk_layernorm") else 0
    return {
        "gated": True,
        "rest": b.attention_biases(c.flag("use_qkv_bias"), False) + b.norms(norms, True) + qk,
        "after": b.norms(1, True),
        "tied": c.flag("tie_word_embeddings"),
    }


def _starcoder2(c: Config, b: Block) -> Sizes:
    bias = c.flag("use_bias", True)
    return {
        "rest": bias * (b.attention_biases() + b.mlp_biases()) + b.norms(2, True),
        "after": b.norms(1, True),
        "tied": c.flag("tie_word_embeddings", True),
    }


def _nemotron(c: Config, b: Block) -> Sizes:
    bias = c.flag("attention_bias")
    rest = b.attention_biases(bias, bias) + c.flag("mlp_bias") * b.mlp_biases() + b.norms(2, True)
    return {"rest": rest, "after": b.norms(1, True), "tied": c.flag("tie_word_embeddings")}


def _cohere(c: Config, b: Block) -> Sizes:
    """One norm for attention and MLP."""
    found = _llama(norms=1, tied=True)(c, b)
    return found | {"rest": found["rest"] + _all_heads(b) * c.flag("use_qk_norm")}


def _latent(routed: int, shared: int, dense: int, top: int) -> Family:
    """Attention whose keys and values come of a narrow latent (DeepSeek's). The defaults of experts, of shared ones, of
    the blocks before them without, and of a token's."""

    def sizes(c: Config, b: Block) -> Sizes:
        h, keys = b.hidden, c.number("kv_lora_rank", default=512)
        turned, still = c.number("qk_rope_head_dim", default=64), c.number("qk_nope_head_dim", default=128)
        value = c.number("v_head_dim", default=128)
        narrow, width = c.number("q_lora_rank", default=0), b.heads * (turned + still)
        attention = h * narrow + narrow * width if narrow else h * width
        attention += h * (keys + turned) + keys * b.heads * (still + value) + b.heads * value * h
        bias = c.flag("attention_bias") * (narrow + keys + turned + h)
        first = c.number("first_k_dense_replace", default=dense)
        experts = c.number("n_routed_experts", default=routed) if first < b.layers else 0
        inner = c.number("moe_intermediate_size", default=2048)
        return {
            "gated": True,
            "rest": b.norms(2) + narrow + keys + bias,
            "after": b.norms(1),
            "tied": c.flag("tie_word_embeddings"),
            "attention": attention,
            "kv_heads": b.heads,
            "head_dim": turned + still,
            "value_dim": value,
            "value_base": still + value,  # the part of the keys that is not turned is copied beside what is
            "latents": 2 * (narrow + keys) + turned,  # before their norms and behind
            "experts": experts,
            "top": c.number("num_experts_per_tok", default=top) if experts else 1,
            "inner": inner if experts else b.inner,
            "shared": inner * c.number("n_shared_experts", default=shared) if experts else 0,
            "dense": tuple(range(first)) if experts else (),
            "dense_inner": b.inner,
        }

    return sizes


def _bert(first: int = 0, biases: int = 2) -> Family:
    """With the head of a masked language model. first: the position from which numbers begin. biases: of a head that is
    not tied."""

    def sizes(c: Config, b: Block) -> Sizes:
        if c.flag("add_cross_attention") or c.flag("is_decoder"):
            raise ArgumentError(f"model {c.name}: as a decoder (is_decoder, add_cross_attention) it is not planned for")
        h, narrow = b.hidden, c.number("embedding_size", default=b.hidden)
        before = c.number("type_vocab_size", default=2) * narrow + 2 * narrow
        rows, tied = b.vocab + c.number("max_position_embeddings"), c.flag("tie_word_embeddings", True)
        before += 0 if narrow == h else rows * (narrow - h) + narrow * h + h
        after = h * narrow + 3 * narrow + b.vocab  # a layer with a norm, and the head's bias
        return {
            "rest": b.attention_biases() + b.mlp_biases() + b.norms(2, True),
            "before": before,
            "after": after + (0 if tied else b.vocab * (narrow - h + biases - 1)),
            "tied": tied,
            "learned": True,
            "causal": False,
            "first": first,
        }

    return sizes


_LLAMA, _PLAIN = _llama(), _llama(attention="", out="", mlp="")
_QWEN2, _QWEN3 = _llama(attention="qkv_bias", out="", mlp="", default=True), _llama(qk=_each_head, mlp="")
_OLMO2, _GLM = _llama(qk=_all_heads, mlp=""), _llama(out="", mlp="", default=True)
_ROBERTA = _bert(first=2)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "yi": _PLAIN,
    "internlm2": _llama(attention="bias", out="bias", mlp=""),
    "mistral": _PLAIN,
    "mixtral": _of_experts(_PLAIN, inner=""),
    "qwen2": _QWEN2,
    "qwen2_moe": _of_experts(_QWEN2, "shared_expert_intermediate_size", gate=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _of_experts(_QWEN3),
    "gemma": _llama(mlp="", tied=True),
    "gemma2": _llama(norms=4, mlp="", tied=True),
    "gemma3_text": _llama(norms=4, qk=_each_head, mlp="", tied=True),
    "phi3": _PLAIN,
    "phi": _phi,
    "phimoe": _of_experts(_phimoe, inner=""),
    "deepseek_v2": _latent(routed=64, shared=2, dense=0, top=6),
    "deepseek_v3": _latent(routed=256, shared=1, dense=3, top=8),
    "olmo": _llama(norms=0, mlp="", final=0),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _of_experts(_llama(qk=_olmoe_heads, mlp=""), inner=""),
    "cohere": _cohere,
    "cohere2": _cohere,
    "smollm3": _llama(tied=True),
    "granite": _LLAMA,
    "granitemoe": _of_experts(_llama(mlp=""), inner=""),
    "glm": _GLM,
    "glm4": _llama(norms=4, out="", mlp="", default=True),
    "exaone4": _llama(qk=_each_head, attention="", out="", mlp=""),
    "helium": _llama(out=""),
    "hunyuan_v1_dense": _llama(qk=_each_head, mlp=""),
    "seed_oss": _llama(out="attention_out_bias", default=True),
    "arcee": _llama(gated=False),
    "ernie4_5": _llama(attention="use_bias", out="use_bias", mlp="use_bias", tied=True),
    "nemotron": _nemotron,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "persimmon": _persimmon,
    "gpt2": _gpt2(),
    "openai-gpt": _gpt2(final=False),
    "gpt_bigcode": _gpt2(),
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "codegen": _gptj,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "biogpt": _biogpt,
    "bloom": _bloom,
    "falcon": _falcon,
    "bert": _bert(),
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "electra": _bert(biases=1),
}


def head_dim(c: Config) -> int:
    """0: the heads are the hidden size together."""
    return 0 if c.kind in _EQUAL_HEADS else c.number("head_dim", default=0)


def heads_of_keys(c: Config, heads: int) -> int:
    """Of keys and values."""
    if c.kind == "falcon":
        if c.flag("new_decoder_architecture"):
            return c.number("num_kv_heads", default=heads)
        return 1 if c.flag("multi_query", True) else heads
    if c.kind == "gpt_bigcode":
        return 1 if c.flag("multi_query", True) else heads
    return c.number("num_key_value_heads", default=heads)
