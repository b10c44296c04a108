"""What of a model is this rank's, and which ranks share it: stages, shards of tensor parallelism, experts."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import zlib
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...comm import start as comm
from ...comm.groups import make_one, open_group
from ...config.tree import Config, stages_asked
from ...errors import ArgumentError, ConfigError, DeepcError, UnsupportedError
from ...optim.rules import ONEBIT
from ...parallel.axes import AxisGroup, opened_comms
from ...parallel.expert.group import expert_group, mesh_with_experts
from ...parallel.expert.spread import (
    SharedGradients,
    connect,
    connected,
    one_size,
    ranks_of_experts,
    refuse_experts,
    share_sequences,
    spread_tensors,
)
from ...parallel.judged import Parts
from ...parallel.mpu import compare_again
from ...parallel.pipeline.layers import PipelineModule, mesh_of
from ...parallel.tensor.cut import cuts_of
from ...parallel.tensor.group import refuse_unequal, tensor_group
from ...parallel.tensor.random import same_state
from ...plan.mesh import Mesh
from ...zero.step.across.sharers import Sharers
from ...zero.tiers.agree import together
from ..base import EngineBase
from ..states.access import _Access

if TYPE_CHECKING:
    from ...parallel.pipeline.part import Part

logger = logging.getLogger("deepc")


def ranks_to_share(model: torch.nn.Module, source: Any) -> int:
    """Ranks as Config.load counts them."""
    import torch.distributed as dist

    if not isinstance(model, PipelineModule):
        return dist.get_world_size()
    if (asked := stages_asked(source)) not in (1, model.num_stages):
        raise ConfigError(
            f"pipeline.stages = {asked}, and the PipelineModule was made with num_stages={model.num_stages}; remove the"
            " key, which is for models that are no PipelineModule"
        )
    return model.mesh.dp * asked


def part_of(model: torch.nn.Module, config: Config, given: dict[str, Any], device: torch.device) -> Part | None:
    """What of the model is this rank's, where the ranks make pipelines. Takes loss_fn out of `given` where it uses it.
    Collective."""
    import torch.distributed as dist

    if isinstance(model, PipelineModule):
        model.mesh = mesh_asked(config, model.mesh.pp)
        if config.pipeline.activation_checkpoint_interval:
            model.set_checkpoint_interval(config.pipeline.activation_checkpoint_interval)
        return model
    if (stages := config.pipeline.stages or 1) == 1:
        return None
    from ...parallel.pipeline.cutting import CutModel
    from ...plan.schedule import Order

    asked = config.deepc.pipeline
    mesh_of(stages, "pipeline.stages = {}", dist.get_world_size())
    mesh = connected(model, mesh_asked(config, stages), device)
    order, loss_fn = Order.of(asked.schedule, stages, asked.chunks), given.pop("loss_fn", None)
    return CutModel(model, mesh, order, given.get("sample_batch"), loss_fn)


def keep_comparing(engine: EngineBase) -> None:
    """The ranks that share the model hold replicas of what is not cut, as initialize(mpu=) has found: forward goes on
    looking."""
    everyone, groups = engine.everyone, engine.mesh.groups("tp")
    trained = zip(engine.state.names, engine.state.trained)
    named = {n: _Access(engine, p) for n, p in trained if id(p) not in engine.cuts}
    # Each rank compares what it owns. Where experts are cut unevenly, ranks with the same replicas own other elements.
    owned = zlib.crc32(str([(n, [(s.param_begin, s.length) for s in a.mine]) for n, a in named.items()]).encode())
    told = everyone.gather_all(torch.tensor([owned], device="cpu")).view(-1).tolist()
    alike = all(told[r] == told[ranks[0]] for ranks in groups for r in ranks)
    engine.unequal_replicas = compare_again(
        everyone.gather_all,
        groups,
        lambda: ((n, a.local_fp32() if alike else a.shard_fp32()) for n, a in named.items()),
    )


def cut_as_asked(model: torch.nn.Module, config: Config, replicas: bool = False, whole_logits: bool = False) -> None:
    """Tensor parallelism: the model becomes this rank's shard of itself, unless it is one. replicas: nothing but
    experts that ask for it is cut. whole_logits: of a language model that makes its loss itself, unless the
    configuration says otherwise. Collective."""
    asked = config.tensor_parallel
    if (asked.autotp_size or 1) == 1 or cuts_of(model):
        return
    import torch.distributed as dist

    from ...parallel.tensor.model import cut_model

    stages = model.mesh.pp if isinstance(model, PipelineModule) else config.pipeline.stages or 1
    mesh = mesh_asked(config, stages)
    if replicas and stages > 1:
        raise UnsupportedError(
            "initialize(mpu=...) of a pipeline has several model-parallel ranks, and no parameter says that it is cut"
            " (tensor_model_parallel and partition_dim); set tensor_parallel.autotp_size, and deepc cuts the model"
        )
    if replicas and asked.partition_config is None:
        same_state(tensor_group(mesh))
        if dist.get_rank() == 0:
            logger.info("initialize(mpu=): nothing is cut; the %d ranks of a model hold replicas", mesh.tp)
        return
    if not isinstance(model, PipelineModule) and stages > 1:
        from ...parallel.pipeline.cutting.model import take_from_firsts

        take_from_firsts(model, mesh_with_experts(mesh, ranks_of_experts(model)))
    section = dataclasses.asdict(asked)
    whole = whole_logits and asked.vocab_parallel_lm_head is None and stages == 1  # a pipeline returns the loss alone
    if whole:
        section["vocab_parallel_lm_head"] = False
    summary = cut_model(model, tensor_group(mesh), section, mesh.sp)
    if dist.get_rank() == 0:
        logger.info("%s", summary)
        if whole and "head" in summary.cut:
            logger.info(
                "outputs.logits is whole, as in DeepSpeed; tensor_parallel.vocab_parallel_lm_head true computes the"
                " loss from each rank's part, in less memory"
            )


def mesh_asked(config: Config, stages: int) -> Mesh:
    """Of all ranks. Config.load has seen to it that the sizes divide."""
    import torch.distributed as dist

    tensor, sequence = config.tensor_parallel.autotp_size or 1, config.sequence_parallel_size
    return Mesh(pp=stages, dp=dist.get_world_size() // (stages * tensor * sequence), sp=sequence, tp=tensor)


def join_group(engine: EngineBase, part: Part | None, undo: contextlib.ExitStack) -> None:
    """Collective: engines are made in the same order on every rank."""
    engine.__dict__["part"] = part  # which may be the module itself
    engine.everyone = open_group(engine.device, comm.DEFAULT_TIMEOUT, "engine" if part is None else "pipeline")
    undo.callback(engine.everyone.close)
    engine.group, engine.parts, engine.cuts = engine.everyone, None, cuts_of(engine.module)
    mesh = mesh_asked(engine._config, 1) if part is None else part.mesh
    mesh = connect_experts(engine, mesh, undo)
    engine.mesh = dataclasses.replace(mesh, ranks_per_node=engine.group.ranks_per_node)
    check_cuts(engine)
    if part is not None or mesh.tp * mesh.ep > 1:
        engine.parts = Parts(engine.everyone, mesh)
        if mesh.tp > 1:
            engine.unequal_batches = lambda batch: refuse_unequal(batch, tensor_group(mesh))
        if mesh.pp * mesh.tp * mesh.ep > 1:
            ranks = mesh.holders(engine.everyone.rank)
            stages = part is not None and mesh.tp * mesh.sp * mesh.ep == 1
            engine.group = open_group(engine.device, comm.DEFAULT_TIMEOUT, ranks=ranks, uneven_parts=stages)
            undo.callback(engine.group.close)
    make_one([engine.group, engine.everyone], opened_comms(mesh))
    engine.averaging = engine.group
    engine.world_size, engine.global_rank = engine.group.world, engine.group.rank
    engine.local_rank = int(os.environ.get("LOCAL_RANK", engine.global_rank))


def connect_experts(engine: EngineBase, mesh: Mesh, undo: contextlib.ExitStack) -> Mesh:
    """The mesh with the ranks that share a model's experts, connected: gradients are averaged over them, and what is no
    expert's is the first data-parallel rank's. Collective."""
    module, whole = engine.module, engine.part is None or isinstance(engine.part, PipelineModule)
    if whole:  # else part_of has connected them, and their values are equal: before the model was cut
        mesh = _connected(engine, mesh)
    undo.callback(share_sequences, module, Mesh())
    engine.spread, engine.shared_gradients = spread_tensors(module), None
    if mesh.ep == 1:
        return mesh
    group = expert_group(mesh)
    for t in (*module.parameters(), *module.buffers()) if whole else ():
        if id(t) not in engine.spread and not t.is_meta:
            group.spread(t)  # those with the same experts take what the first of them has
    engine.shared_gradients = SharedGradients(engine.spread, group, engine._config)
    if engine.part is None:  # a pipeline's engine does it once a batch
        for handle in engine.shared_gradients.hook(module.parameters()):
            undo.callback(handle.remove)
    return mesh


def _connected(engine: EngineBase, mesh: Mesh) -> Mesh:
    """As connected, also of a stage, where others may have experts and this one none. Collective."""
    if engine.part is None:
        return connected(engine.module, mesh, engine.device)
    module, size = engine.module, 1
    share_sequences(module, mesh)
    failure: Exception | None = None
    try:
        refuse_experts(module, size := ranks_of_experts(module), engine.device)
    except DeepcError as exc:
        failure = exc
    together(engine.everyone, failure)
    size = one_size(engine.everyone.gather_all(torch.tensor([size], device="cpu")).view(-1).tolist())
    if size > 1:
        mesh = mesh_with_experts(mesh, size)
        connect(module, expert_group(mesh))
    return mesh


def check_cuts(engine: EngineBase) -> None:
    """Whether the model is cut as the configuration says."""
    found, asked = {cut.ranks for cut in engine.cuts.values()}, engine.mesh.tp
    if found - {asked}:
        raise ConfigError(
            f"the model's parameters are cut over {', '.join(map(str, sorted(found)))} ranks, and"
            f" tensor_parallel.autotp_size is {asked}; set it to that number"
        )


def check_shards(engine: EngineBase) -> None:
    """UnsupportedError for what works on whole parameters, where there are shards of them."""
    if not engine.cuts and engine.mesh.ep == 1:
        return
    rule = engine.optimizer.rule
    here = {
        type(engine.optimizer.base).__name__: engine.cuts and rule is not None and rule.kind == ONEBIT,
        "GPUs": engine.device.type != "cpu",
        '"precision": "auto"': engine.auto_precision is not None,
        'deepc.deterministic = "layout"': engine.step_policy.one_gradient,
    }
    if found := [what for what, is_so in here.items() if is_so]:
        kind = "tensor parallelism" if engine.cuts else "MoE: ep_size above 1"
        raise UnsupportedError(f"{kind} with {' and '.join(found)} does not exist; see docs/status.md")


def check_numbers(engine: EngineBase) -> None:
    """UnsupportedError, on all ranks, if states have a format, whose blocks and random bits follow an element's place
    in the flat space, and ranks that hold the same parameters beside shards of other sizes have them elsewhere: they
    would part. Collective."""
    rule, state = engine.optimizer.rule, engine.state
    if rule is None or not rule.form or (not engine.cuts and engine.mesh.ep == 1):
        return
    alike = [i for i, p in enumerate(state.trained) if id(p) not in engine.cuts and id(p) not in engine.spread]
    places = zlib.crc32(str([(state.names[i], state.plan.layout.offsets[i]) for i in alike]).encode())
    told = engine.everyone.gather_all(
        torch.tensor([engine.mesh.coordinates(engine.everyone.rank).pp, places], device="cpu")
    ).tolist()
    if len({tuple(row) for row in told}) > len({stage for stage, _ in told}):
        raise UnsupportedError(
            f'optimizer.params.state_dtype "{rule.form}" with shards of unequal sizes (heads, or a width, that the'
            " ranks do not divide) does not exist: what is not cut would be rounded differently on ranks that share"
            " the model. Leave state_dtype out, or choose a number of ranks that divides them"
        )


def check_stages(engine: EngineBase) -> None:
    """ArgumentError, on all ranks, if a stage of a pipeline has nothing to train. Collective."""
    if engine.parts is None:
        return
    away = engine.elsewhere()
    mine = sum(p.requires_grad for p in engine.module.parameters() if id(p) not in away)
    totals = engine.parts.totals(float(mine))
    if 0.0 in totals:
        raise ArgumentError(
            f"{engine.parts.name(totals.index(0.0))} has no parameter that requires a gradient; cut the model so"
            " that each has one (partition_method), or use fewer stages"
        )


def sharers_of(engine: EngineBase) -> Sharers | None:
    """The ranks that hold the other shards of trained parameters; None: nothing is cut."""
    cuts = {i: engine.cuts[id(p)] for i, p in enumerate(engine.state.trained) if id(p) in engine.cuts}
    if not engine.cuts:
        return None
    group = tensor_group(engine.mesh)
    return Sharers(cuts, group.rank, group.size, lambda mine, widths: group.gather(mine, 0, widths))


def leveller(engine: EngineBase) -> Callable[[Sequence[torch.Tensor]], None]:
    """What GatheredParameters calls on the ranks that write, of which each group of holders has one: of parameters that
    tensor- or expert-parallel ranks have alike (norms, gates) those with coordinate 0 count, so that all stay equal
    where only rank 0 has written. Collective over these ranks, which are a tensor and an expert group: they come with
    the same parameters in the same order."""
    mesh = engine.mesh
    groups: list[tuple[AxisGroup, Container[int]]] = []
    if mesh.tp > 1:
        groups.append((tensor_group(mesh), engine.cuts))
    if mesh.ep > 1:
        groups.append((expert_group(mesh), engine.spread))

    @torch.no_grad()
    def level(params: Sequence[torch.Tensor]) -> None:
        for group, different in groups:
            for p in params:
                if id(p) not in different:
                    group.spread(p.data)

    return level
