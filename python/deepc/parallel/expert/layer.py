"""The layer: a gate, its experts, and their sum; in residual form a network for all tokens beside them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...core.foreign import private
from ...errors import ArgumentError, MisuseError, UnsupportedError, numeric
from ...nn import rows as rows_of
from ...nn.rows import Rows
from ...plan.mesh import Mesh
from .dispatch import combine, dispatch
from .gate import Routes, TopKGate
from .group import ExpertGroup, expert_group, mesh_with_experts

logger = logging.getLogger("deepc")


class Experts(torch.nn.Module):
    """`deepspeed_experts`: copies of one network. Their parameters have `allreduce` False and `group_name`, by which
    DeepSpeed's helpers know them."""

    has_no_blocks = True  # that could be recomputed alone: an expert's rows are others each time

    @numeric
    def __init__(
        self, expert: torch.nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        super().__init__()
        self.deepspeed_experts = torch.nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        self.expert_group_name = expert_group_name
        for p in self.deepspeed_experts.parameters():
            p.allreduce, p.group_name = False, expert_group_name  # type: ignore[attr-defined]

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """rows [n, M], of which counts[e] in a row are expert e's -> each expert's output. Every expert runs,
        on no row as well: its gradients are zeros then, and what other ranks wait for happens."""
        outputs = []
        for i, (expert, part) in enumerate(zip(self.deepspeed_experts, rows.split(list(counts)))):
            out = rows_of.of_part(len(part), expert, part)
            out = out[0] if isinstance(out, tuple) else out
            if out.shape != part.shape:
                raise ArgumentError(
                    f"MoE: expert {i} made {list(out.shape)} of its input {list(part.shape)} [tokens, hidden_size];"
                    " experts take and give tokens of hidden_size"
                )
            outputs.append(out)
        return outputs


class MOELayer(torch.nn.Module):
    """Gate and experts. After a call `l_aux` and `exp_counts` are the gate's loss and the experts' wishes."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.group: ExpertGroup | None = None  # of spread experts; MoE.set_deepspeed_parallelism
        self._balance: torch.Tensor | None = None
        self.exp_counts: torch.Tensor | None = None

    @property
    def l_aux(self) -> torch.Tensor | None:
        """The load-balance loss of the last call. UnsupportedError where the layer has gone to another stage of a
        pipeline: what is here is of a call before that."""
        away = self.gate.wg.weight.is_meta
        if away and self._balance is not None and not self._balance.is_meta:
            raise UnsupportedError(
                "MoE: l_aux of a layer on another stage (pipeline.stages) is read here, which does not exist; let the"
                " blocks hand on the sum of their losses, as in `return x + out, l_aux_so_far + l_aux`"
            )
        return self._balance

    def forward(
        self,
        hidden_states: torch.Tensor,
        used_token: torch.Tensor | None = None,
        told: list[Routes] | None = None,
    ) -> torch.Tensor:
        """told: gets the routes of this call; l_aux and exp_counts stay those of the forward when it is recomputed."""
        if hidden_states.dim() == 0:
            raise ArgumentError("MoE: input of shape []; the last dimension must be hidden_size")
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        routes: Routes = self.gate(x, used_token)
        if private.graph_task_id() == -1:  # no recomputation, whose graph would be held by them until the next call
            self._balance, self.exp_counts = routes.balance, routes.chosen
        if told is not None:
            told.append(routes)
        own = Rows(len(routes.tokens), self.gate.most_rows(len(x), self.gate.num_experts), len(routes.tokens))
        return rows_of.of(own, self._through_experts, x, routes).reshape(hidden_states.shape)  # type: ignore[no-any-return]

    def _through_experts(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        rows = dispatch(x, routes)
        if self.group is None:
            outputs = self.experts(rows, routes.of_each())
        else:
            most = self.gate.most_rows(len(x), self.experts.num_local_experts, self.group.size)
            outputs = [self.group.through(rows, routes.of_each(), self.experts, most)]
        rows = torch.cat([*outputs, outputs[0].new_zeros(1, x.shape[1])])
        return combine(rows, routes)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the results of the last call, which hang in its graph."""
        return {**self.__dict__, "_balance": None, "exp_counts": None}


class MoE(torch.nn.Module):
    """A mixture of experts (DeepSpeed's deepspeed.moe.layer.MoE: its arguments, results and names of parameters)."""

    @numeric
    def __init__(
        self,
        hidden_size: int,
        expert: torch.nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """expert: a network from [tokens, hidden_size] to the same; copied num_experts times, and used itself as `mlp`
        of a residual layer. k: experts for a token. capacity_factor, eval_capacity_factor: places of an expert in
        training and evaluation, in tokens x k / num_experts; at least min_capacity. drop_tokens=False: places for all.
        use_rts: in top-1 training the places are drawn by lot, else the first tokens have them (k = 2: first choices
        before second ones; k > 2: the highest gates). noisy_gate_policy, in training: "Jitter" multiplies the gate's
        input by 1 +- 0.01, "RSample" draws experts by their probability. top2_2nd_expert_sampling: of top-2, in
        training, the second is drawn. use_residual: PR-MoE (arXiv:2201.05596, section 4.1): expert for all tokens,
        and a learned mixture of both. use_tutel: without effect, tokens go by index anyway.
        ep_size: the experts are spread over so many neighbouring ranks, num_experts / ep_size on each, whose parameters
        are made here; deepc.initialize, or set_deepspeed_parallelism(), connects the ranks.
        enable_expert_tensor_parallelism: over tensor-parallel ranks deepc.initialize cuts each expert, a usual MLP of
        linear layers, and `mlp` (else these ranks have them whole).
        Errors: MisuseError, ArgumentError for values that fit nothing."""
        super().__init__()
        for name, n in (("hidden_size", hidden_size), ("num_experts", num_experts), ("ep_size", ep_size)):
            if type(n) is not int or n < 1:
                raise ArgumentError(f"MoE: {name} = {n!r} must be an integer of at least 1")
        if num_experts % ep_size:
            raise MisuseError(f"MoE: ep_size = {ep_size} ranks can't share {num_experts} experts equally")
        if use_tutel:
            logger.info("MoE: use_tutel is without effect: tokens go to their experts by index")
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size, self.num_experts, self.num_local_experts = ep_size, num_experts, num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(gate, Experts(expert, self.num_local_experts, self.expert_group_name))
        if use_residual:
            self.mlp = expert
            self.coefficient = torch.nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Connects the ranks of spread experts; deepc.initialize does it. Collective over all ranks at the
        first call for an ep_size. UnsupportedError for use_data_before_expert_parallel_,
        which spreads over ranks far apart."""
        if use_data_before_expert_parallel_:
            raise UnsupportedError(
                "MoE: use_data_before_expert_parallel_=True asks for experts spread over ranks that are no neighbours,"
                " which deepc does not have; leave it False"
            )
        if self.ep_size > 1 and self.deepspeed_moe.group is None:
            self.deepspeed_moe.group = expert_group(mesh_with_experts(Mesh(dp=dist.get_world_size()), self.ep_size))

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden_states [..., hidden_size]; used_token: one number a token, 0 for padding, which goes to no expert (its
        output is 0). -> (output, l_aux, exp_counts): output as hidden_states; l_aux, a scalar in fp32 to be added to
        the loss with a small factor, in an engine with sequence parallelism that of whole sequences; exp_counts
        [num_experts] int64, tokens that chose each expert."""
        if self.ep_size > 1 and self.deepspeed_moe.group is None:
            raise MisuseError(
                f"MoE: the experts are spread over ep_size = {self.ep_size} ranks that are not connected yet; call"
                " deepc.initialize, or set_deepspeed_parallelism() of the layer on all ranks, first"
            )
        routes: list[Routes] = []
        output = self.deepspeed_moe(hidden_states, used_token, routes)
        if self.use_residual:
            beside = self.mlp(hidden_states)
            beside = beside[0] if isinstance(beside, tuple) else beside
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., :1] + beside * share[..., 1:]
        return output, routes[0].balance, routes[0].chosen
