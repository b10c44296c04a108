"""The 1-bit optimizers as torch.optim.Optimizers, for any loop over torch.distributed (docs/onebit.md).

Every parameter of the param groups takes part in every step, on all ranks alike: where one has no gradient it counts as
zero, and one that does not require a gradient stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...errors import ArgumentError, MisuseError, UnsupportedError, numeric
from ..states.dense import Optimizer, check_beside, check_betas, check_numel, check_range, loss_of
from .adam import OneBitAdamMethod
from .exchange import Exchange, exchange_over
from .freeze import check_freeze_step
from .lamb import LiveLambMethod, OneBitLambMethod
from .method import Item, Method
from .places import Places, taken
from .zeroone import ZeroOneAdamMethod

KEY = "onebit"  # of a state_dict: what is not a state of a parameter


class OneBitOptimizer(Optimizer):
    """What the three share. method: how a step is made, from the first step on."""

    kind: type[Any]  # of Method; an optimizer may have one of its own
    options: dict[str, Any]
    group: Any = None
    average_gradients = hierarchical = True
    method: Method | None = None
    exchange: Exchange | None = None  # an engine's, where it makes one: its ranks share the states
    _wide: dict[int, torch.Tensor]

    def _start(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        options: dict[str, Any],
        refused: Mapping[str, Any],
        group: Any,
        average_gradients: bool,
        hierarchical: bool,
    ) -> None:
        """The constructor. refused: arguments of DeepSpeed's that ask for what is not there, if they are set."""
        name = type(self).__name__
        for key, asked in refused.items():
            if asked:
                raise UnsupportedError(f"{name}({key}={asked!r}) does not exist; leave it out")
        for key in ("lr", "eps", "weight_decay"):
            check_range(key, defaults[key])
        check_betas(defaults["betas"])
        if options["max_update"] is not None and not float(options["max_update"]) > 0:
            raise ArgumentError(f"max_update={options['max_update']!r}: it must be above 0, or None")
        for key in ("rotated", "preconditioned"):
            if not isinstance(options.get(key, False), bool):
                raise ArgumentError(f"{key}={options[key]!r}: it must be True or False")
        if options.get("preconditioned") and options["max_update"] is None:
            raise ArgumentError(
                f"{name}(preconditioned=True) needs max_update: an element whose variance was near zero when it was"
                " frozen would have a step of many times the others', and its block's magnitude would be its own. Set"
                " it; 1.0 is about the largest that Adam makes by itself"
            )
        self.options, self.group, self.average_gradients = options, group, average_gradients
        self.hierarchical = bool(hierarchical)
        defaults["betas"] = tuple(float(b) for b in defaults["betas"])
        super().__init__(params, defaults)
        if not isinstance(self, OneBitAdam) and any(g.get("non_freeze") for g in self.param_groups):
            raise UnsupportedError(f"{name}: non_freeze of a param group is of OneBitAdam; remove the key")

    # ---- what a loop asks --------------------------------------------------------------------------------------------
    @property
    def local_gradients(self) -> bool:
        """Whether the next step takes each rank's own gradients: DistributedDataParallel should not reduce them
        (no_sync)."""
        return not self._made().averages

    @property
    def sent_bytes(self) -> int:
        """What this optimizer has put on the wire on this rank."""
        return 0 if self.method is None else self.method.exchange.sent_bytes

    @property
    def phase(self) -> str:
        """What the ranks exchange now, in words."""
        return self._made().phase

    # ---- a step ------------------------------------------------------------------------------------------------------
    def _made(self) -> Method:
        if self.method is not None:
            return self.method
        self._params = [p for g in self.param_groups for p in g["params"]]
        device, items = self._params[0].device if self._params else torch.device("cpu"), []
        for group in self.param_groups:
            for p in group["params"]:
                self._check(p, device)
                flat = p.detach().view(-1)
                items.append(Item(flat if p.dtype == torch.float32 else flat.float(), group, tuple(p.shape)))
        exchange = exchange_over(self.group, self.hierarchical, device)
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self.method = self.kind(items, exchange, zeros, self.options)
        self._show()
        return self.method

    def _check(self, p: torch.Tensor, device: torch.device) -> None:
        name = type(self).__name__
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ArgumentError(f"{name} steps float32, bfloat16 and float16 parameters, got {p.dtype}")
        if p.device != device:
            raise ArgumentError(
                f"{name}: one parameter is on {device}, another on {p.device}, and all travel in one buffer; move the"
                " model to one device"
            )
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{name} runs on CPUs and on GPUs of CUDA, and the parameters are on {device}")
        if not p.is_contiguous():
            raise ArgumentError(
                f"{name}: a parameter of shape {tuple(p.shape)} and strides {p.stride()} is not contiguous; make it so"
                " with p.data = p.data.contiguous()"
            )

    def _show(self) -> None:
        """state[p]: views of what the method steps."""
        assert self.method is not None
        for p, item in zip(self._params, self.method.items):
            shown = {name: state.view(p.shape) for name, state in item.states.items()}
            self.state[p] = {"step": torch.tensor(float(self.method.steps), dtype=torch.float32, device="cpu"), **shown}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.method is not None:
            raise MisuseError(
                f"{type(self).__name__}: param groups can't be added after the first step, when the buffer that the"
                " ranks exchange is laid out; make the optimizer with all of them"
            )
        super().add_param_group(param_group)

    def check_groups(self) -> None:
        """ArgumentError if a param group's non_freeze is not what it was when the buffer was laid out: its parameters
        would be stepped with a momentum that does not travel."""
        if self.method is None:
            return
        sent = {id(item) for item in self.method.sent}
        for item in self.method.items:
            if bool(item.group.get("non_freeze")) == (id(item) in sent):
                raise ArgumentError(
                    f"{type(self).__name__}: non_freeze of a param group (of parameters of shape {tuple(item.shape)})"
                    f" is {item.group.get('non_freeze')!r} now, and was another when the buffer that the ranks exchange"
                    " was laid out: set it before the first step, or before deepc.initialize"
                )

    def _gradient(self, p: torch.Tensor) -> torch.Tensor:
        if p.grad is None:
            return torch.zeros(p.numel(), device=p.device, dtype=torch.float32)
        if p.grad.is_sparse:
            raise ArgumentError(f"{type(self).__name__} does not take sparse gradients; use nn.Embedding(sparse=False)")
        check_numel(p, "grad", p.grad, p.numel())
        return p.grad.detach().reshape(-1).float()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters. Collective. `closure` re-evaluates the model and returns the loss."""
        loss, method = loss_of(closure), self._made()
        self.check_groups()
        for p, item in zip(self._params, method.items):
            check_beside(p, item.states.values())  # somebody may have given it other memory
            self._check(p, p.device)
            for key, state in item.states.items():
                check_numel(p, key, state, p.numel())
            item.out = not p.requires_grad and p.grad is None
            item.grad = None if item.out else self._gradient(p)
            if p.dtype == torch.float32:
                item.param = p.detach().view(-1)
            else:
                item.param.copy_(p.detach().view(-1))
        if method.averages and self.average_gradients:
            method.exchange.mean([item.grad for item in method.items if item.grad is not None])
        method.step(1.0)
        for p, item in zip(self._params, method.items):
            item.grad = None
            self.state[p]["step"].fill_(method.steps)
            if p.dtype != torch.float32 and not item.out:
                p.detach().view(-1).copy_(item.param)
        torch.autograd.graph.increment_version([p for p in self._params if p.dtype == torch.float32])
        return loss

    # ---- states ------------------------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy. A copy could not step: what the ranks owe each other belongs to one optimizer of each,
        and a process group can't be copied."""
        raise UnsupportedError(
            f"{type(self).__name__} can't be copied or pickled (copy.deepcopy, torch.save of the optimizer itself):"
            " what the ranks owe each other is of this one. Make another with the same arguments on every rank, and"
            " other.load_state_dict(optimizer.state_dict())"
        )

    def state_dict(self) -> dict[str, Any]:
        """torch's, without exp_avg_mask, and under "onebit" what this rank alone has: save it on every rank."""
        out: dict[str, Any] = super().state_dict()
        for group in out["param_groups"]:
            group.pop("exp_avg_mask", None)
        if (method := self.method) is not None:
            index = {id(item): i for i, item in enumerate(method.items)}
            out[KEY] = {
                "numbers": method.numbers(),
                "world": method.exchange.world,
                "rank": method.exchange.rank,
                "workers": method.exchange.workers,
                "owned": method.exchange.owned(method.places.total) if method.errors() else {},
                "own": [(name, index[id(item)], t.clone()) for name, item, t in method.own()],
                "errors": {name: t.clone() for name, t in method.errors().items()},
            }
        return out

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the same rank of as many ranks: goes on bit for bit. Of others: `folded` makes one of all ranks'."""
        found: Mapping[str, Any] | None = state_dict.get(KEY)
        if found is None and state_dict["state"]:
            raise ArgumentError(
                f"{type(self).__name__}.load_state_dict: the state_dict has no {KEY!r}: it is of another optimizer"
            )
        order = [i for g in state_dict["param_groups"] for i in g["params"]]
        params = [p for g in self.param_groups for p in g["params"]]
        for p, index in zip(params, order if found is not None else ()):  # before anything is given up
            self._check_saved(p, state_dict["state"].get(index, {}))
        saved = {**state_dict, "state": {}, "param_groups": [dict(g) for g in state_dict["param_groups"]]}
        for mine, theirs in zip(self.param_groups, saved["param_groups"]):
            if "exp_avg_mask" in mine:
                theirs["exp_avg_mask"] = mine["exp_avg_mask"]
        super().load_state_dict(saved)
        self.method = None
        if found is None:
            return
        method = self._made()
        place, exchange = (found["world"], found["rank"]), method.exchange
        if found["world"] and place != (exchange.world, exchange.rank):
            raise ArgumentError(
                f"the state_dict is of rank {place[1]} of {place[0]}, and this is rank {exchange.rank} of"
                f" {exchange.world}: each rank owes what is its own. Load deepc.optim.onebit.dropin.folded(all ranks'"
                " state_dicts) on every rank"
            )
        if found["errors"]:
            method.check_frame(found["numbers"])
        for index, item in zip(order, method.items):
            for name, state in item.states.items():
                state.copy_(state_dict["state"][index][name].reshape(-1))
        method.load_numbers(found["numbers"])
        anchors = {id(item): t for name, item, t in method.own() if name == "anchor"}
        for name, i, values in found["own"]:
            item = method.items[i]
            if name == "param":
                item.param.copy_(values)
                self._params[i].detach().view(-1).copy_(values)
            else:
                (anchors[id(item)] if name == "anchor" else item.states[name]).copy_(values)
        if (errors := found["errors"]) and (method.errors_in_warm_up or not method.averages):
            _take_errors(method, found, errors)
        self._show()

    def _check_saved(self, p: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """ArgumentError unless these are states of `p`."""
        for name in self.kind.names:
            if name not in states:
                raise ArgumentError(
                    f"{type(self).__name__}.load_state_dict: there is no {name!r} of a parameter of shape"
                    f" {tuple(p.shape)}: the state_dict is of another optimizer, or of one with fewer parameters"
                )
            check_numel(p, name, states[name], p.numel())


def _take_errors(method: Method, found: Mapping[str, Any], errors: Mapping[str, torch.Tensor]) -> None:
    """Folded errors are as long as the blocks in use: the rest of the buffer owes nothing. Collective."""
    exchange, places = method.exchange, method.places
    owned = exchange.owned(places.total)
    worker, server = errors["worker"], errors["server"]
    if not found["world"] and worker.numel() == places.used:
        whole = torch.cat([worker, worker.new_zeros(places.total - places.used)])
        worker, server = taken(whole, owned["worker"]), worker.new_zeros(sum(e - b for b, e in owned["server"]))
    elif {k: [tuple(x) for x in v] for k, v in found["owned"].items()} != owned:
        raise ArgumentError(
            f"the state_dict's errors are of elements {found['owned'] or worker.numel()}, this rank's are of {owned}:"
            " it is of another model, or of ranks that lay on other nodes. Load deepc.optim.onebit.dropin.folded(all"
            " ranks' state_dicts) on every rank"
        )
    exchange.set_errors(places.total, worker, server)


def folded(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state_dicts of all ranks of a run, in rank order -> one that every rank of a run of any size loads. What the
    ranks owe is averaged, so that the sum of what was exchanged loses nothing; where ranks were between two
    synchronisations of 0/1 Adam, so is what they have moved. They may be on any devices; what is made is on the
    CPU."""
    if not states or any(KEY not in s for s in states) or [s[KEY]["rank"] for s in states] != list(range(len(states))):
        raise ArgumentError("folded: give the state_dicts of all ranks, in rank order, each saved after a step")
    parts, world = [s[KEY] for s in states], len(states)
    errors = [p["errors"] for p in parts]
    out = {**states[0], KEY: {**parts[0], "world": 0, "rank": 0, "own": [], "errors": {}}}
    for k, (name, i, _) in enumerate(parts[0]["own"]):
        out[KEY]["own"].append((name, i, sum(p["own"][k][2].cpu() for p in parts) / world))
    if errors[0]:
        owed = torch.zeros(
            Places([t.numel() for t in _states_of(states[0])], 1).used, dtype=torch.float32, device="cpu"
        )
        for p, e in zip(parts, errors):
            for kind, share in (("worker", 1.0 / p["workers"]), ("server", 1.0)):
                at = 0
                for begin, end in p["owned"][kind]:
                    used = owed[begin:end]  # what lies behind owes nothing
                    used.add_(e[kind][at : at + used.numel()].cpu(), alpha=share)
                    at += end - begin
        out[KEY]["errors"] = {"worker": owed, "server": torch.empty(0, dtype=torch.float32, device="cpu")}
    return out


def _states_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """One state of each parameter whose momentum travels."""
    groups = [g for g in state["param_groups"] if not g.get("non_freeze")]
    return [state["state"][i]["exp_avg"] for g in groups for i in g["params"]]


# ---- the three -------------------------------------------------------------------------------------------------------
class OneBitAdam(OneBitOptimizer):
    """1-bit Adam (Tang et al., arXiv:2102.02888), with DeepSpeed's arguments. Adam without correction of the bias and
    with decoupled weight decay on averaged gradients up to step `freeze_step`; then the variance is frozen and ranks
    exchange momentum in 1 bit an element.

    freeze_step: or "auto", when the variance is stable: its norm changed by less than 1 - var_freeze_threshold in
    1 / (1 - beta2) steps. max_update: bound on an element's exp_avg over the root of its variance where it came in 1
    bit; None: none, as in the paper. rotated (deepc's own): what travels is rotated before it is sent (dc_rotate of
    ops/ops.h) and back after, so that 1 bit keeps as much of momentum with heavy tails as of normal numbers.
    preconditioned (deepc's own): what travels is momentum over the frozen variance's root, and not momentum, so that a
    block's one magnitude is that of steps; max_update must be set. Keys of param groups: `exp_avg_mask` (1 where there
    are gradients, 0 where there never are), `non_freeze` (True: gradients averaged without compression throughout).
    group: the torch.distributed group of the ranks. hierarchical: ranks of one node average exactly, through its
    memory, and a node is a worker; False: every rank is one, as in the paper. average_gradients: the warm-up averages
    them here; False: somebody has (DistributedDataParallel). bias_correction, cuda_aware, comm_backend_name: without
    effect, as DeepSpeed's here.
    """

    kind = OneBitAdamMethod

    @numeric
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int | str = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        *,
        var_freeze_threshold: float = 0.96,
        max_update: float | None = None,
        rotated: bool = False,
        preconditioned: bool = False,
        group: Any = None,
        average_gradients: bool = True,
        hierarchical: bool = True,
    ) -> None:
        check_freeze_step("freeze_step", freeze_step)
        options: dict[str, Any] = dict(freeze_step=freeze_step, var_freeze_threshold=_share(var_freeze_threshold))
        refused = dict(eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        options.update(max_update=max_update, rotated=rotated, preconditioned=preconditioned)
        self._start(params, defaults, options, refused, group, average_gradients, hierarchical)


class OneBitLamb(OneBitOptimizer):
    """1-bit LAMB (Li et al., arXiv:2104.06069), with DeepSpeed's arguments; those that OneBitAdam has mean the same.

    coeff_beta: of the running mean of each parameter's ratio in the warm-up. factor_min, factor_max, factor_threshold:
    bounds of the factor on it after the freeze, and of its change from step to step. max_coeff, min_coeff: of the
    warm-up's ratios.

    ratios: "frozen": the paper's and DeepSpeed's, of all of the above. "live" (deepc's own): after the freeze each step
    has LAMB's ratio of norms, within max_coeff and min_coeff, and momentum is sent over the frozen variance's root;
    factor_* have no effect, and max_update must be set."""

    kind = OneBitLambMethod

    @numeric
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int | str = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        *,
        var_freeze_threshold: float = 0.96,
        max_update: float | None = None,
        rotated: bool = False,
        ratios: str = "frozen",
        group: Any = None,
        average_gradients: bool = True,
        hierarchical: bool = True,
    ) -> None:
        check_freeze_step("freeze_step", freeze_step)
        if not 0.0 <= float(min_coeff) <= float(max_coeff):
            raise ArgumentError(f"min_coeff must be in [0, max_coeff], got {min_coeff} with max_coeff {max_coeff}")
        if not 0.0 < float(factor_min) <= float(factor_max):
            raise ArgumentError(f"factor_min must be in (0, factor_max], got {factor_min} with factor_max {factor_max}")
        kinds: dict[str, type[OneBitLambMethod]] = {kind.ratios: kind for kind in (OneBitLambMethod, LiveLambMethod)}
        if ratios not in kinds:
            raise ArgumentError(f"ratios={ratios!r}: it must be one of {', '.join(kinds)}")
        if ratios == LiveLambMethod.ratios and max_update is None:
            raise ArgumentError(
                f"OneBitLamb(ratios={ratios!r}) needs max_update: an element without a gradient in the warm-up would"
                " get its block's magnitude for itself. Set it; 1.0 is about the largest that LAMB makes by itself"
            )
        self.kind = kinds[ratios]
        check_range("coeff_beta", coeff_beta, 1.0)
        check_range("factor_threshold", factor_threshold, 1.0)
        options: dict[str, Any] = dict(
            freeze_step=freeze_step,
            var_freeze_threshold=_share(var_freeze_threshold),
            coeff_beta=coeff_beta,
            factor_max=factor_max,
            factor_min=factor_min,
            factor_threshold=factor_threshold,
        )
        refused = dict(eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_coeff=max_coeff, min_coeff=min_coeff
        )
        options.update(max_update=max_update, rotated=rotated)
        self._start(params, defaults, options, refused, group, average_gradients, hierarchical)

    def get_lamb_coeffs(self) -> list[float]:
        """The factors on lr of the last step, in the order of the parameters."""
        return list(self.method.coefficients) if isinstance(self.method, OneBitLambMethod) else []


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam (Lu et al., arXiv:2202.06009), with DeepSpeed's arguments; those that OneBitAdam has too mean the same.

    var_freeze_step: the last step at which the variance may be updated. var_update_scaler: so many updates until the
    interval between them doubles (kappa). local_step_scaler: so many steps until the interval between two
    synchronisations doubles, local_step_clipper: its largest (H). preconditioned: once the variance is
    frozen."""

    kind = ZeroOneAdamMethod

    @numeric
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        *,
        max_update: float | None = None,
        rotated: bool = False,
        preconditioned: bool = False,
        group: Any = None,
        average_gradients: bool = True,
        hierarchical: bool = True,
    ) -> None:
        options: dict[str, Any] = dict(
            var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler,
            local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper,
        )
        for name, value in options.items():
            check_freeze_step(name, value, auto=False)
        refused = dict(eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        options.update(max_update=max_update, rotated=rotated, preconditioned=preconditioned)
        self._start(params, defaults, options, refused, group, average_gradients, hierarchical)


def _share(value: float) -> float:
    if not 0.0 < float(value) <= 1.0:
        raise ArgumentError(f"var_freeze_threshold={value!r}: it must be in (0, 1]")
    return float(value)
