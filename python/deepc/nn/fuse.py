"""deepc.fuse(model): Hugging Face models (and torch.nn's norms and GELUs) on deepc's fused operators, in place.

A module is fused by giving it a class made of its own class and one of the mixins below: parameters, buffers, hooks and
names stay what they are, so state_dict, checkpoints, save_pretrained and isinstance do too. Modules are known by the
name of their class, so transformers is never imported here; a subclass, or a module whose forward was replaced, is left
alone.

The loss: with labels and in training mode, the model's own forward runs with the head handing its input through, and
the loss is deepc.linear_cross_entropy on that, called through the head (whose hooks, a gather among them, run as for
any use of its weight). The logits are never made: outputs.logits is None then. Without labels, in eval mode, with
return_dict=False, with logits_to_keep or with a loss of the user's own, forward is the model's."""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..core import ops
from ..errors import ArgumentError, UnsupportedError
from .aten import matmul
from .loss import linear_cross_entropy

KINDS = ("norm", "mlp", "rotary", "attention", "loss")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SUPPORTED = """deepc.fuse replaces
  norm    nn.LayerNorm over the last dimension, nn.RMSNorm, and the RMSNorm of Llama, Mistral, Mixtral, Qwen2, Qwen3 and T5
  mlp     nn.GELU and transformers' GELU modules (GPT-2, BERT, ViT, T5 v1.1); SwiGLU of Llama, Mistral, Qwen2 and Qwen3 MLPs and of Mixtral's experts
  rotary  apply_rotary_pos_emb in the attention of Llama, Mistral, Mixtral, Qwen2 and Qwen3
  attention  scaled dot-product attention of transformers' models ("sdpa"), on the CPU
  loss    head and cross-entropy of the causal language models GPT-2, Llama, Mistral, Mixtral, Qwen2 and Qwen3, of T5ForConditionalGeneration and BertForMaskedLM"""  # noqa: E501


@dataclass
class FuseSummary:
    """What fuse did. replaced: kind -> names of modules (the model itself is ""); already: how many were fused before;
    skipped: name -> why."""

    replaced: dict[str, list[str]] = field(default_factory=lambda: {k: [] for k in KINDS})
    already: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    _modules: list[tuple[nn.Module, list[str]]] = field(default_factory=list, repr=False)  # and what of it is replaced

    @property
    def total(self) -> int:
        return sum(map(len, self.replaced.values()))

    def undo(self) -> None:
        """What this call replaced runs the modules' own code again."""
        while self._modules:
            module, kinds = self._modules.pop()
            if isinstance(module, _Fused):
                original, mixin = module._deepc_made_of
                left = [k for k in mixin._deepc_kinds if k not in kinds]  # another call's
                other = _Rotary if left == ["rotary"] else _Attention
                cast(Any, module).__class__ = _fused_class(original, other) if left else original

    def __str__(self) -> str:
        counts = ", ".join(f"{kind} {len(names)}" for kind, names in self.replaced.items() if names) or "nothing new"
        lines = [f"fused: {counts}" + (f" ({self.already} were already)" if self.already else "")]
        return "\n".join(lines + [f"  not fused: {name or 'the model'}: {why}" for name, why in self.skipped.items()])


def fuse_as_asked(model: nn.Module, asked: bool | str | Sequence[str]) -> FuseSummary | None:
    """What the configuration's deepc.fuse asks for. False: nothing. "auto": what can be fused, if anything. True: as
    "auto", but UnsupportedError for a model of which nothing can be. Kinds: those; UnsupportedError naming the kinds of
    which the model has nothing that can be fused."""
    if asked is False:
        return None
    kinds = KINDS if isinstance(asked, (bool, str)) else tuple(asked)
    try:
        summary = fuse(model, kinds)
    except UnsupportedError as exc:
        if asked == "auto":
            return FuseSummary(skipped={"": f"nothing in {type(model).__name__} can be fused"})
        raise UnsupportedError(f'deepc.fuse = {json.dumps(asked)}: {exc}\nSet it to "auto" or false.') from None
    present = {k for k, names in summary.replaced.items() if names}
    present |= {k for m in model.modules() if isinstance(m, _Fused) for k in m._deepc_kinds}
    if not isinstance(asked, (bool, str)) and (missing := [k for k in kinds if k not in present]):
        summary.undo()
        reasons = "".join(f"\n{name or type(model).__name__}: {why}" for name, why in summary.skipped.items())
        raise UnsupportedError(
            f"deepc.fuse = {json.dumps(list(kinds))}: nothing in {type(model).__name__} can be fused as"
            f' {", ".join(missing)}.{reasons}\n{_SUPPORTED}\nLeave {", ".join(missing)} out, or set it to "auto".'
        )
    return summary


def fuse(model: nn.Module, only: Iterable[str] = KINDS) -> FuseSummary:
    """Puts the modules of `model` that deepc has fused operators for onto them, in place; call it before
    deepc.initialize and torch.compile.

    only: kinds to replace, of "norm", "mlp", "rotary", "attention", "loss" (default all). Calling it again changes
    nothing. Results equal the model's up to rounding (norms and activations of 16-bit inputs are rounded once); float64
    inputs, meta tensors, norms whose weight has another dtype than their input, and 16-bit inputs of an nn.RMSNorm
    without an eps take the model's own code. Returns what was replaced. Raises UnsupportedError, with the list of what
    is supported, if nothing in the model can be fused, and ArgumentError for an unknown kind.
    """
    kinds = (only,) if isinstance(only, str) else tuple(only)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"fuse takes a torch.nn.Module, got {type(model).__name__}")
    if unknown := [k for k in kinds if k not in KINDS]:
        raise ArgumentError(f"only={kinds!r}: {unknown[0]!r} is not a kind of fusion; choose of {', '.join(KINDS)}")
    summary = FuseSummary()
    for name, module in list(model.named_modules()):
        _fuse_module(name, module, kinds, summary)
    if not summary.total and not summary.already:
        reasons = "".join(f"\n{name or type(model).__name__}: {why}" for name, why in summary.skipped.items())
        raise UnsupportedError(
            f"nothing in {type(model).__name__} can be fused with only={kinds!r}.{reasons}\n{_SUPPORTED}"
        )
    if (first := next(model.parameters(), None)) is not None:
        matmul.choose_own(first.device)
    return summary


def _fuse_module(name: str, module: nn.Module, kinds: tuple[str, ...], summary: FuseSummary) -> None:
    fused = module._deepc_kinds if isinstance(module, _Fused) else ()
    if isinstance(module, _Fused):
        summary.already += any(k in kinds for k in fused)
        if not isinstance(module, _Rebuilt):
            return
    found: list[tuple[str, type[_Fused]]] = []
    for kind, matches, mixin in _table():
        if kind not in kinds or kind in fused or any(kind == k for k, _ in found) or not matches(module):
            continue
        if why := _obstacle(module) or mixin._deepc_obstacle(module):
            summary.skipped[name] = why
        else:
            found.append((kind, mixin))
    if not found:
        return
    if isinstance(module, _Fused):
        cast(Any, module).__class__ = module._deepc_made_of[0]
    both = len(found) + len(fused) > 1  # of the two kinds that one module can have
    kinds_here = [kind for kind, _ in found]
    made = (_RotaryAttention if both else found[0][1])._deepc_apply(module)
    summary._modules += [(m, kinds_here) for m in made]
    for kind in kinds_here:
        summary.replaced[kind].append(name)


def _obstacle(module: nn.Module) -> str | None:
    return "its forward was replaced by somebody else" if "forward" in vars(module) else None


# ---- classes ---------------------------------------------------------------------------------------------------------
if TYPE_CHECKING:
    _Mixed = nn.Module  # what the mixins are mixed into
else:
    _Mixed = object


class _Fused(_Mixed):
    """Base of the mixins. A fused module's class is (mixin, the module's class), under that class's name:
    save_pretrained writes it to disk. What it adds is called _deepc_...: another name could hide one of the module's
    own (nn.Module.apply)."""

    _deepc_kinds: tuple[str, ...] = ()
    _deepc_made_of: tuple[type[nn.Module], type[_Fused]]

    @classmethod
    def _deepc_obstacle(cls, module: Any) -> str | None:
        """Why this very module can't be fused, or None."""
        return None

    @classmethod
    def _deepc_apply(cls, module: nn.Module) -> list[nn.Module]:
        """Fuses it; returns the modules that have another class now."""
        module.__class__ = _fused_class(type(module), cls)
        return [module]

    @classmethod
    def _deepc_body(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Attributes that depend on the module's class."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        original, mixin = type(self)._deepc_made_of
        return (
            _empty,
            (original, mixin),
            cast(Any, self).__getstate__() if hasattr(self, "__getstate__") else vars(self),
        )


_classes: dict[tuple[type[nn.Module], type[_Fused]], type[nn.Module]] = {}


def _fused_class(original: type[nn.Module], mixin: type[_Fused]) -> type[nn.Module]:
    made = _classes.get((original, mixin))
    if made is None:
        made = _classes[original, mixin] = type(
            original.__name__,
            (mixin, original),
            {
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                "__doc__": original.__doc__,
                "_deepc_made_of": (original, mixin),
                **mixin._deepc_body(original),
            },
        )
    return made


def _empty(original: type[nn.Module], mixin: type[_Fused]) -> nn.Module:
    """For pickle and copy: an instance without its state."""
    made = _fused_class(original, mixin)
    return made.__new__(made)


def _takes(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """With a weight of another dtype (autocast, fp32 norms in a 16-bit model) the result's dtype is the model's
    business: not ours."""
    return x.dtype in _DTYPES and x.device.type in ("cpu", "cuda") and (weight is None or weight.dtype == x.dtype)


def _fits(norm: Any, x: torch.Tensor) -> bool:
    """Whether x has the norm's last dimension, or the operator will say that it has not, by the weight's size."""
    return norm.weight is not None or x.shape[-1:] == norm.normalized_shape


class _RMSNorm(_Fused):
    _deepc_kinds = ("norm",)

    @classmethod
    def _deepc_obstacle(cls, module: Any) -> str | None:
        if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) != 1:
            return f"it normalises over {len(module.normalized_shape)} dimensions; the fused norm takes one"
        return None

    weight: torch.Tensor
    eps: float | None
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        if eps is None and hidden_states.dtype == torch.float32:
            eps = torch.finfo(torch.float32).eps
        takes = _takes(hidden_states, self.weight) and _fits(self, hidden_states)
        if eps is None or not takes:  # for 16 bits torch's own depends on its version
            plain: torch.Tensor = super().forward(hidden_states)
            return plain
        return ops.rms_norm(hidden_states, self.weight, eps)


class _LayerNorm(_Fused):
    _deepc_kinds = ("norm",)

    @classmethod
    def _deepc_obstacle(cls, module: Any) -> str | None:
        if len(module.normalized_shape) != 1:
            return f"it normalises over {len(module.normalized_shape)} dimensions; the fused norm takes one"
        return None

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def forward(self, input: torch.Tensor) -> Any:
        return (
            ops.layer_norm(input, self.weight, self.bias, self.eps)
            if _takes(input, self.weight) and _fits(self, input)
            else super().forward(input)
        )


class _GELU(_Fused):
    _deepc_kinds = ("mlp",)
    approximate = "none"

    def forward(self, input: torch.Tensor) -> Any:
        return ops.gelu(input, None, self.approximate) if _takes(input) else super().forward(input)


class _GELUTanh(_GELU):
    approximate = "tanh"


class _SwiGLU(_Fused):
    """Gated MLPs with gate_proj, up_proj, down_proj and act_fn."""

    _deepc_kinds = ("mlp",)

    @classmethod
    def _deepc_obstacle(cls, module: Any) -> str | None:
        return None if _is_silu(module.act_fn) else f"its activation is {type(module.act_fn).__name__}, not SiLU"

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: Any  # a module, or the weights of all experts
    act_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        takes = _takes(gate) and _is_silu(self.act_fn)  # which a script may have exchanged since
        out: torch.Tensor = self.down_proj(ops.swiglu(gate, up) if takes else self.act_fn(gate) * up)
        return out


class _Experts(_SwiGLU):
    """Mixtral's experts: transformers' batched and grouped products call _apply_gate; the plain loop over experts is
    here."""

    @classmethod
    def _deepc_obstacle(cls, module: Any) -> str | None:
        if (
            not getattr(module, "is_concatenated", True)
            or getattr(module, "is_transposed", False)
            or getattr(module, "has_bias", False)
        ):
            return "its experts' weights are interleaved, transposed or have a bias"
        return super()._deepc_obstacle(module)

    config: Any
    num_experts: int
    gate_up_proj: torch.Tensor

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ops.swiglu(gate, up) if _takes(gate) and _is_silu(self.act_fn) else self.act_fn(gate) * up

    def forward(  # type: ignore[override]  # of experts, not of a dense MLP
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        if getattr(self.config, "_experts_implementation", None) not in (None, "eager"):
            plain: torch.Tensor = super(_SwiGLU, self).forward(hidden_states, top_k_index, top_k_weights)
            return plain
        out = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self.num_experts:  # a place that no expert of this rank fills
                continue
            token, choice = torch.where(top_k_index == expert)
            gated = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            result = F.linear(gated, self.down_proj[expert]) * top_k_weights[token, choice, None]
            out.index_add_(0, token, result.to(out.dtype))
        return out


def _is_silu(act: Any) -> bool:
    return type(act) is nn.SiLU or _full_name(act) == "transformers.activations.SiLUActivation" or act is F.silu


class _Rebuilt(_Fused):
    """Attention whose forward runs with other globals: the same code, where names mean the fused ones. The rest of its
    globals are those of the moment; without __name__, so that torch.compile reads them here and not in the module of
    that name."""

    _deepc_names: dict[str, Callable[[Any], Any]] = {}  # name -> what takes the place of its value

    @classmethod
    def _deepc_obstacle(cls, module: Any) -> str | None:
        for name in cls._deepc_names:
            if not calls(module, name):
                return f"its forward does not call {name} itself"
        return None

    @classmethod
    def _deepc_body(cls, original: type[nn.Module]) -> dict[str, Any]:
        *around, inner = _layers(original.forward)
        names = {k: v for k, v in inner.__globals__.items() if k != "__name__"}
        names |= {k: fused(names[k]) for k, fused in cls._deepc_names.items()}
        made = functools.update_wrapper(_function_as(inner, names, inner.__closure__), inner)
        for outer in reversed(around):
            cells = tuple(types.CellType(made) if _holds(cell, inner) else cell for cell in outer.__closure__ or ())
            inner, within = outer, made
            made = functools.update_wrapper(_function_as(outer, outer.__globals__, cells), outer)
            made.__wrapped__ = within  # type: ignore[attr-defined]
        return {"forward": made}


def _function_as(function: Any, names: dict[str, Any], cells: tuple[types.CellType, ...] | None) -> Any:
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _holds(cell: types.CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # empty
        return False


def _layers(function: Any) -> list[Any]:
    """A function's decorators from the outermost on, then what they decorate (a renamed argument is taken under its old
    name by one around each forward, since transformers 5.24)."""
    found = [function]
    while isinstance(inner := getattr(found[-1], "__wrapped__", None), types.FunctionType):
        if not any(_holds(cell, inner) for cell in getattr(found[-1], "__closure__", None) or ()):
            break  # not what it calls: a function that update_wrapper gave another's looks
        found.append(inner)
    return found


def calls(module: nn.Module, name: str) -> bool:
    """Whether the module's forward itself, below what is wrapped around it, reads the global `name`."""
    layers = _layers(type(module).forward)
    return all(isinstance(f, types.FunctionType) for f in layers) and name in layers[-1].__code__.co_names


def _fused_rotary(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        return (ops.apply_rotary if _takes(q) and _takes(k) else plain)(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    return apply_rotary_pos_emb


class _Rotary(_Rebuilt):
    _deepc_kinds = ("rotary",)
    _deepc_names = {"apply_rotary_pos_emb": _fused_rotary}


class _Interfaces:
    """transformers' table of attentions, where "sdpa" is the fused one."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = self._plain.get_interface(name, default)
        return functools.partial(_attend, found) if name == "sdpa" else found

    def __getitem__(self, name: str) -> Any:
        return functools.partial(_attend, self._plain[name]) if name == "sdpa" else self._plain[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _attend(
    plain: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """transformers' sdpa_attention_forward; masks, biases and what else it may get are the plain one's."""
    query, key, value = ops.as_autocast(query, key, value)
    plainly = attention_mask is None and dropout < 1 and all(kwargs.get(k) is None for k in _MATTER)
    if plainly and _takes_heads(query, key, value, scaling):
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        out = ops.attention(query, key, value, bool(is_causal) and query.shape[2] > 1, scaling, dropout=dropout)
        return out.transpose(1, 2).contiguous(), None
    found: tuple[torch.Tensor, Any] = plain(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return found


# Of sdpa_attention_forward's further arguments those that it heeds.
_MATTER = ("position_bias", "cache", "softcap")


def _takes_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> bool:
    return (
        _takes(q)
        and q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype
        and q.dim() == 4
        and k.shape == v.shape
        and q.shape[-1] == k.shape[-1] <= 256
        and q.shape[1] % k.shape[1] == 0
        and (scaling is None or scaling > 0)
    )


class _Attention(_Rebuilt):
    _deepc_kinds = ("attention",)
    _deepc_names = {"ALL_ATTENTION_FUNCTIONS": _Interfaces}


class _RotaryAttention(_Rebuilt):
    _deepc_kinds = ("rotary", "attention")
    _deepc_names = {**_Rotary._deepc_names, **_Attention._deepc_names}


# ---- head and loss ---------------------------------------------------------------------------------------------------
class _Head(_Fused):
    """A Linear that hands its input through while `_deepc_hold`, and is called with labels for the loss."""

    _deepc_kinds = ()  # belongs to its model's "loss"
    _deepc_hold = False

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
        if labels is not None:
            return linear_cross_entropy(input, self.weight, labels, self.bias, **options)
        return input if self._deepc_hold else super().forward(input)


class _LanguageModel(_Fused):
    """Base: a model with `_deepc_head`, the path of its output Linear."""

    _deepc_kinds = ("loss",)
    _deepc_head = "lm_head"

    @classmethod
    def _deepc_obstacle(cls, module: Any) -> str | None:
        head = module.get_submodule(cls._deepc_head)
        if isinstance(head, _Head):
            return None
        if type(head) is not nn.Linear:
            return f"its head {cls._deepc_head} is {type(head).__name__}, not nn.Linear"
        return _obstacle(head)

    @classmethod
    def _deepc_apply(cls, module: nn.Module) -> list[nn.Module]:
        head = module.get_submodule(cls._deepc_head)
        heads = [] if isinstance(head, _Head) else _Head._deepc_apply(head)
        return heads + super()._deepc_apply(module)

    @classmethod
    def _deepc_body(cls, original: type[nn.Module]) -> dict[str, Any]:
        plain: Callable[..., Any] = original.forward
        parameters = list(inspect.signature(plain).parameters)
        place = parameters.index("labels") - 1  # without self

        @functools.wraps(plain)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                names = parameters[1 : 1 + len(args)]
                args, kwargs = (), {**dict(zip(names, args)), **kwargs}
            if not self._deepc_takes(kwargs):
                return plain(self, *args, **kwargs)
            return self._deepc_forward(plain, args, kwargs)

        return {"forward": forward}

    config: Any

    def _deepc_takes(self, kwargs: dict[str, Any]) -> bool:
        labels = kwargs.get("labels")
        if labels is None or not self.training or hasattr(self, "_loss_function"):
            return False
        head = self.get_submodule(self._deepc_head)
        if not isinstance(head, _Head):  # another has come since: an adapter's, one for a larger vocabulary
            return False
        if head.weight.dtype == torch.float64:
            return False  # the op has no such numbers
        keep, named = kwargs.get("logits_to_keep", 0), kwargs.get("return_dict")
        return isinstance(keep, int) and keep == 0 and bool(self.config.return_dict if named is None else named)

    def _deepc_forward(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        labels = kwargs.pop("labels")
        head: Any = self.get_submodule(self._deepc_head)
        head._deepc_hold = True
        try:
            outputs = plain(self, *args, **self._deepc_inputs(kwargs, labels))
        finally:
            head._deepc_hold = False
        loss = self._deepc_loss(head, outputs, labels, kwargs)
        fields = {name: getattr(outputs, name) for name in outputs.__dataclass_fields__}
        return type(outputs)(**{**fields, "loss": loss, "logits": None})

    def _deepc_inputs(self, kwargs: dict[str, Any], labels: torch.Tensor) -> dict[str, Any]:
        return kwargs

    def _deepc_loss(self, head: nn.Module, outputs: Any, labels: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        return head(outputs.logits, labels=labels.to(outputs.logits.device))


class _Causal(_LanguageModel):
    """transformers' ForCausalLMLoss: position i predicts label i + 1."""

    @classmethod
    def _deepc_obstacle(cls, module: Any) -> str | None:
        kind = getattr(module, "loss_type", None)
        known = kind in (None, "ForCausalLM") or kind == type(module).__name__
        return super()._deepc_obstacle(module) if known else f"its loss is {kind}, not ForCausalLM"

    def _deepc_loss(self, head: nn.Module, outputs: Any, labels: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        ignore, count, shifted = (
            kwargs.get("ignore_index", -100),
            kwargs.get("num_items_in_batch"),
            kwargs.get("shift_labels"),
        )
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignore)[..., 1:]
        hidden = outputs.logits
        options = {"ignore_index": ignore, "reduction": "mean" if count is None else "sum"}
        loss = head(hidden, labels=shifted.reshape(hidden.shape[:-1]).to(hidden.device), **options)
        if count is None:
            return loss
        return loss / (count.to(loss.device) if torch.is_tensor(count) else count)


class _CausalOfExperts(_Causal):
    router_aux_loss_coef: float

    def _deepc_loss(self, head: nn.Module, outputs: Any, labels: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        loss = super()._deepc_loss(head, outputs, labels, kwargs)
        if outputs.aux_loss is not None and outputs.router_logits is not None:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss.to(loss.device)
        return loss


class _T5(_LanguageModel):
    _shift_right: Callable[[torch.Tensor], torch.Tensor]

    def _deepc_inputs(self, kwargs: dict[str, Any], labels: torch.Tensor) -> dict[str, Any]:
        if kwargs.get("decoder_input_ids") is None and kwargs.get("decoder_inputs_embeds") is None:
            kwargs = {**kwargs, "decoder_input_ids": self._shift_right(labels)}
        return kwargs


class _MaskedLM(_LanguageModel):
    _deepc_head = "cls.predictions.decoder"


# ---- which class takes which mixin -----------------------------------------------------------------------------------
def _full_name(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _named(*names: str) -> Callable[[nn.Module], bool]:
    wanted = frozenset(names)
    return lambda module: _full_name(module) in wanted


def _family(suffix: str, *families: str) -> Callable[[nn.Module], bool]:
    return _named(*(f"transformers.models.{f.lower()}.modeling_{f.lower()}.{f}{suffix}" for f in families))


def _is_attention(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.") and calls(module, "ALL_ATTENTION_FUNCTIONS")


def _is_gelu(approximate: str, *names: str) -> Callable[[nn.Module], bool]:
    of_transformers = _named(*(f"transformers.activations.{n}" for n in names))
    return lambda m: (type(m) is nn.GELU and m.approximate == approximate) or of_transformers(m)


@functools.cache
def _table() -> tuple[tuple[str, Callable[[nn.Module], bool], type[_Fused]], ...]:
    """(kind, whether a module is meant, mixin), the first match counts."""
    llamas = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3")
    dense = tuple(f for f in llamas if f != "Mixtral")
    return (
        ("norm", lambda m: type(m) is nn.LayerNorm, _LayerNorm),
        ("norm", lambda m: type(m) is nn.RMSNorm, _RMSNorm),
        ("norm", _family("RMSNorm", *llamas), _RMSNorm),
        ("norm", _family("LayerNorm", "T5"), _RMSNorm),
        ("mlp", _is_gelu("tanh", "NewGELUActivation", "GELUTanh", "PytorchGELUTanh"), _GELUTanh),
        ("mlp", _is_gelu("none", "GELUActivation"), _GELU),
        ("mlp", _family("MLP", *dense), _SwiGLU),
        ("mlp", _family("Experts", "Mixtral"), _Experts),
        ("rotary", _family("Attention", *llamas), _Rotary),
        ("attention", _is_attention, _Attention),
        ("loss", _named("transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"), _Causal),
        ("loss", _family("ForCausalLM", *dense), _Causal),
        ("loss", _family("ForCausalLM", "Mixtral"), _CausalOfExperts),
        ("loss", _family("ForConditionalGeneration", "T5"), _T5),
        ("loss", _family("ForMaskedLM", "Bert"), _MaskedLM),
    )
