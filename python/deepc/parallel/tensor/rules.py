"""Which modules of a model are cut, and how: rules by name, built in for models of transformers, or from the
configuration (DeepSpeed's tensor_parallel.partition_config); and what tp_model_init notes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ...config.source import read
from ...config.tree import Config
from ...errors import ArgumentError, ConfigError, UnsupportedError

KINDS = ("column", "row", "vocabulary", "head", "shared", "skip")


@dataclass(frozen=True)
class Rule:
    """pattern: of the name of a module (or of its weight: "...o_proj.weight"), matched whole. kind: of KINDS; "shared":
    the module is on every rank, inside of a region: the gradients of its parameters are added up; "skip": it is left as
    it is. blocks: the outputs (of a row-parallel layer: the inputs) consist of so many equal parts, or of parts of
    these sizes, each of which is cut. gathers: outputs come together. divided: attributes of the module around it that
    count what is here of it now."""

    pattern: str
    kind: str
    blocks: int | tuple[int, ...] = 1
    gathers: bool = False
    divided: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        return bool(re.fullmatch(self.pattern, name) or re.fullmatch(self.pattern, f"{name}.weight"))

    def sizes(self, features: int) -> tuple[int, ...]:
        """Of the blocks of so many features."""
        if isinstance(self.blocks, tuple):
            return self.blocks
        return (features // self.blocks,) * self.blocks if self.blocks > 1 else ()


# ---- adapters --------------------------------------------------------------------------------------------------------
# peft's LoRA puts `q_proj.base_layer`, `q_proj.lora_A.NAME` ([rank, in]) and `q_proj.lora_B.NAME` ([out, rank]) in the
# place of q_proj: y = base_layer(x) + scaling * lora_B(lora_A(dropout(x))).
_ADAPTER = re.compile(r"\.(base_layer|lora_[AB]\.[^.]+)$")


def own_name(name: str) -> str:
    """The layer's, of a part of an adapted one; else the same."""
    return _ADAPTER.sub("", name)


def around(name: str) -> str:
    """The module around a layer, be it adapted or not."""
    return own_name(name).rpartition(".")[0]


def is_adapter(name: str) -> bool:
    found = _ADAPTER.search(name)
    return found is not None and found[1] != "base_layer"


def is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer") and isinstance(getattr(module, "lora_A", None), torch.nn.ModuleDict)


def adapted(name: str, module: Any, rule: Rule) -> list[tuple[str, torch.nn.Module, Rule]]:
    """What `rule` of an adapted layer says of its parts. Of a column-parallel layer lora_B is cut as the layer is: its
    input is whole, and so is the gradient of it. Of a row-parallel one lora_A is: its sum ends there, and lora_B adds
    the same everywhere. UnsupportedError for what can't be."""
    if rule.kind not in ("column", "row", "skip"):
        raise UnsupportedError(
            f"tensor_parallel.autotp_size: {name} has adapters (LoRA), and is cut as {rule.kind}, which can't have"
            " them; leave it out of the adapters' target_modules, or out of what is cut (partition_type skip)"
        )
    variants = [*getattr(module, "lora_variant", ()), *(n for n, on in getattr(module, "use_dora", {}).items() if on)]
    if variants and rule.kind != "skip":
        raise UnsupportedError(
            f"tensor_parallel.autotp_size: the adapter {variants[0]!r} of {name} is a variant of LoRA (such as DoRA),"
            " which reads whole weights; use plain LoRA, or leave the module as it is (partition_type skip)"
        )
    inner = replace(rule, divided=())  # with the layer
    whole = replace(rule, kind="skip")
    cut = None if rule.gathers else {"column": "lora_B", "row": "lora_A"}.get(rule.kind)
    out: list[tuple[str, torch.nn.Module, Rule]] = [(f"{name}.base_layer", module.base_layer, rule)]
    for which in ("lora_A", "lora_B"):
        parts: torch.nn.ModuleDict = getattr(module, which)
        out += [(f"{name}.{which}.{k}", m, inner if which == cut else whole) for k, m in parts.items()]
    return out


def _named(*names: str) -> str:
    return r"(.*\.)?(" + "|".join(n.replace(".", r"\.") for n in names) + ")"


_LLAMA = (
    Rule(_named("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "column"),
    Rule(_named("self_attn.o_proj"), "row"),
    Rule(_named("mlp.gate_proj", "mlp.up_proj"), "column"),
    Rule(_named("mlp.down_proj"), "row"),
    Rule(_named("embed_tokens"), "vocabulary"),
    Rule(_named("lm_head"), "head"),
)
_QWEN3 = (*_LLAMA, Rule(_named("self_attn.q_norm", "self_attn.k_norm"), "shared"))
_GPT2 = (
    Rule(_named("attn.c_attn"), "column", 3, divided=("split_size", "num_heads")),
    Rule(_named("attn.c_proj", "crossattention.c_proj"), "row"),
    Rule(_named("crossattention.c_attn"), "column", 2, divided=("split_size", "num_heads")),
    Rule(_named("crossattention.q_attn"), "column"),
    Rule(_named("mlp.c_fc"), "column"),
    Rule(_named("mlp.c_proj"), "row"),
    Rule(_named("wte"), "vocabulary"),
    Rule(_named("lm_head"), "head"),
)
_BERT = (
    Rule(
        _named("attention.self.query", "attention.self.key", "attention.self.value"),
        "column",
    ),
    Rule(_named("attention.output.dense"), "row"),
    Rule(_named("intermediate.dense"), "column"),
    Rule(_named("output.dense"), "row"),
    Rule(_named("embeddings.word_embeddings"), "vocabulary"),
    Rule(_named("cls.predictions.decoder"), "head"),
)
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
    "bert": _BERT,
}

# The styles of transformers' own plans (config.base_model_tp_plan, model._tp_plan), for models that have no row above.
_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"kind": "column"},
    "rowwise": {"kind": "row"},
    "colwise_rep": {"kind": "column", "gathers": True},
    "colwise_gather_output": {"kind": "column", "gathers": True},
    "embedding_rowwise": {"kind": "vocabulary"},
    "replicated_with_grad_allreduce": {"kind": "shared"},
}


def rules_of(model: Any, section: Mapping[str, Any], ranks: int) -> tuple[tuple[Rule, ...], str]:
    """(rules for `model`, where they come from: for messages). section: tensor_parallel of a configuration. Where there
    are none for it: (), "". ConfigError, UnsupportedError for rules that can't be."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    built_in, source = _built_in(model, family)
    if (preset := section.get("preset_model")) is not None:
        if preset not in FAMILIES:
            raise ConfigError(
                f"tensor_parallel.preset_model = {preset!r}: deepc has rules for {', '.join(FAMILIES)}; give"
                " tensor_parallel.partition_config for others"
            )
        built_in, source = FAMILIES[preset], f"preset {preset}"
    if (asked := section.get("partition_config")) is None:
        return built_in, source
    own = _configured(asked, family, ranks)
    merged = asked.get("use_default_specs", True)
    return (*own, *(built_in if merged else ())), "tensor_parallel.partition_config"


def _built_in(model: Any, family: str | None) -> tuple[tuple[Rule, ...], str]:
    if family in FAMILIES:
        return FAMILIES[family], f"transformers' {family}"
    plan: dict[str, str] = {}
    for found in (
        getattr(getattr(model, "config", None), "base_model_tp_plan", None),
        getattr(model, "_tp_plan", None),
    ):
        plan.update(found if isinstance(found, Mapping) else {})
    if unknown := sorted({style for style in plan.values() if style not in _STYLES}):
        raise UnsupportedError(
            f"the tensor-parallel plan of transformers' {family} has modules of the style"
            f" {', '.join(map(repr, unknown))}, which deepc does not have; give tensor_parallel.partition_config"
        )
    rules = []
    for name, style in plan.items():
        pattern = r"(.*\.)?" + re.escape(name).replace(r"\*", r"\d+")
        options = dict(_STYLES[style])
        if name.endswith("lm_head"):
            options = {"kind": "head"}
        rules.append(Rule(pattern, **options))
    return tuple(rules), f"the plan of transformers' {family}" if rules else ""


def _configured(asked: Mapping[str, Any], family: str | None, ranks: int) -> list[Rule]:
    where = "tensor_parallel.partition_config"
    known = {
        "layer_specs",
        "use_default_specs",
        "strict_mode",
        "tp_size",
        "embedding_partition_dim",
        "lm_head_patterns",
    }
    if unknown := [k for k in asked if k not in known]:
        raise ConfigError(f"{where}.{unknown[0]} is no key of it; the keys are {', '.join(sorted(known))}")
    if asked.get("tp_size", 1) not in (1, ranks):
        raise ConfigError(f"{where}.tp_size = {asked['tp_size']}, and tensor_parallel.autotp_size is {ranks}")
    specs = asked.get("layer_specs", [])
    if not isinstance(specs, Sequence) or not all(isinstance(s, Mapping) for s in specs):
        raise ConfigError(f"{where}.layer_specs is a list of objects")
    rules: list[Rule] = []
    for i, spec in enumerate(specs):
        rules += _of_spec(spec, f"{where}.layer_specs[{i}]", family)
    return rules


def _of_spec(spec: Mapping[str, Any], where: str, family: str | None) -> list[Rule]:
    known = ("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce")
    if unknown := [k for k in spec if k not in known]:
        raise ConfigError(f"{where}.{unknown[0]} is no key of it; the keys are {', '.join(known)}")
    for key in ("patterns", "model_types"):
        given = spec.get(key) or []
        if not isinstance(given, (list, tuple)) or not all(isinstance(text, str) for text in given):
            raise ConfigError(f"{where}.{key} = {given!r}: it is a list of texts")
    if (types := spec.get("model_types")) and str(family).lower() not in [str(t).lower() for t in types]:
        return []
    kind = str(spec.get("partition_type", "column")).lower()
    if kind not in KINDS:
        raise ConfigError(f"{where}.partition_type = {kind!r}: it is one of {', '.join(KINDS)}")
    if kind == "skip" and spec.get("grad_allreduce"):
        kind = "shared"
    blocks = _blocks(spec, kind, where)
    rules = []
    for pattern in spec.get("patterns") or []:
        try:
            re.compile(pattern)
        except re.error as exc:
            raise ConfigError(f"{where}.patterns: {pattern!r} is no regular expression: {exc}") from None
        rules.append(Rule(f"(?:{pattern}).*", kind, blocks, bool(spec.get("gather_output", False))))
    return rules


def _blocks(spec: Mapping[str, Any], kind: str, where: str) -> int | tuple[int, ...]:
    """DeepSpeed's shape: [3, -1] are three equal parts, [[q, k, v], -1] three of these sizes."""
    shape, usual = spec.get("shape"), 1 if kind == "row" else 0
    if (dim := spec.get("partition_dim", usual)) not in (usual, None):
        raise UnsupportedError(f"{where}.partition_dim = {dim}: deepc cuts a {kind} layer along dimension {usual}")
    if shape is None:
        return 1
    if not isinstance(shape, Sequence) or len(shape) != 2 or shape[1 - usual] != -1:
        raise UnsupportedError(
            f"{where}.shape = {shape!r}: deepc takes two dimensions, the one that is cut as a number of equal parts or"
            " a list of sizes, the other -1"
        )
    parts = shape[usual]
    if isinstance(parts, int) and parts > 0:
        return parts
    if isinstance(parts, Sequence) and parts and all(type(n) is int and n > 0 for n in parts):
        return tuple(parts)
    raise ConfigError(f"{where}.shape = {shape!r}: parts are a positive number, or a list of positive sizes")


# ---- asked for by a call ---------------------------------------------------------------------------------------------
_ASKED = "_deepc_tensor_parallel"
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def tp_model_init(
    model: torch.nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    tp_group: Any = None,
) -> torch.nn.Module:
    """Notes that deepc.initialize is to cut `model` over `tp_size` ranks, as tensor_parallel.autotp_size does, and
    returns it: nothing is cut yet. dtype: of training, checked against the configuration (None: not). config: the rest
    of the section tensor_parallel, or a whole configuration that has one (transformers gives its own). tp_group: this
    rank's, of ranks next to each other, which share a model; another, on any rank, is an UnsupportedError of initialize
    on all, and initialize takes no mpu beside it."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"tp_model_init takes a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise ArgumentError(f"tp_model_init(tp_size={tp_size!r}): it is a number of ranks, 1 or more")
    if dtype is not None and dtype not in _DTYPES:
        raise ArgumentError(f"tp_model_init(dtype={dtype}): it is one of {', '.join(map(str, _DTYPES))}")
    section = config or {}
    if isinstance(whole := section.get("tensor_parallel"), Mapping):
        section = whole
    if (other := section.get("autotp_size") or tp_size) != tp_size:
        raise ConfigError(
            f"tp_model_init(tp_size={tp_size}), and its config has tensor_parallel.autotp_size = {other}; make them"
            " equal, or leave the key out"
        )
    section = {**section, "autotp_size": tp_size}
    model.__dict__[_ASKED] = section, dtype, _ranks_of(tp_group)
    return model


def _ranks_of(group: Any) -> list[int] | None:
    """In place of the group, which a copy of the model could not take along. None: none was given."""
    if group is None:
        return None
    return sorted(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else []


def _refuse_another_group(theirs: list[int], size: int) -> None:
    """UnsupportedError, on all ranks, unless each gave the group that deepc makes. Collective over all ranks."""
    begin = dist.get_rank() // size * size
    ours = list(range(begin, begin + size))
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, (theirs, ours))
    for rank, (theirs, ours) in enumerate(given):
        if theirs != ours:
            raise UnsupportedError(
                f"tp_model_init(tp_size={size}, tp_group=...): rank {rank} gave a group of the ranks {theirs}, and"
                f" ranks next to each other share a model, here {ours}; leave tp_group out"
            )


def as_noted(model: torch.nn.Module, source: Any, mpu: Any) -> Any:
    """The configuration with what tp_model_init has noted. ConfigError where they contradict each other, or mpu.
    Collective if there is a group."""
    if (noted := model.__dict__.get(_ASKED)) is None:
        return source
    section, dtype, ranks = noted
    if ranks is not None:
        if mpu is not None:
            raise ConfigError(
                "tp_model_init provided tp_group; initialize must not receive mpu, which says as well which ranks share"
                " the model. Leave one of them out"
            )
        _refuse_another_group(ranks, section["autotp_size"])
    raw = dict(read(source.raw if isinstance(source, Config) else source)[0])
    given = dict(raw.get("tensor_parallel") or {})
    for key, value in section.items():
        if given.setdefault(key, value) != value:
            raise ConfigError(
                f"tensor_parallel.{key} = {given[key]!r}, and tp_model_init got {value!r}; make them equal, or"
                " leave one out"
            )
    if dtype is not None:
        on = [n for n in ("bf16", "fp16") if isinstance(s := raw.get(n), Mapping) and s.get("enabled")]
        if on and on[0] != _DTYPES[dtype]:
            raise ConfigError(
                f"Conflicting dtype: {on[0]}.enabled is true, and tp_model_init got {dtype}; make them equal"
            )
    return {**raw, "tensor_parallel": given}
