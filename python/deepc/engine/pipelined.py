"""The engine of a rank of a pipeline: `loss = engine.train_batch(data)`.

Each rank has an ordinary engine over its part of the model, whose group are the ranks with the same part: any ZeRO
stage, precision and clipping work as they do without a pipeline. What is added here: a batch goes through the stages by
a schedule (parallel/pipeline), steps are judged over all stages, and parameters that several stages compute with have
one trainer (part.Tie)."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..comm.failures import break_messages
from ..comm.groups import lost
from ..comm.place import node_id
from ..core.foreign.buffers import CAST_BUFFERS, mixing_is_told
from ..core.ops import add_up, torch_dtype
from ..errors import ArgumentError, ConfigError, DeepcError, DiskError, MisuseError, UnsupportedError
from ..parallel.pipeline.hops import Hops, in_words
from ..parallel.pipeline.measured import Measured, measured
from ..parallel.pipeline.part import called_to_evaluate
from ..parallel.pipeline.runtime import Stages
from ..zero.parameters.guard import casts_are_told
from ..zero.parameters.param import version_of
from ..zero.tiers.agree import together
from .base import StepResult, say
from .engine import Engine
from .states.stages import without_other_stages

if TYPE_CHECKING:
    from ..config.tree import Config
    from ..parallel.pipeline.part import Part
    from .events import Watcher

_SHOWN = 3  # the batch whose times a run's folder gets; those before it find nothing warm
_ONLY = (
    "an engine of a pipeline runs whole batches: call engine.train_batch(data_iter), or engine.eval_batch(data_iter)"
)


class PipelineEngine(Engine):
    """See deepc.initialize. train_batch, eval_batch and checkpoints are collective over all ranks."""

    part: Part
    _wants_loss = True
    _given = ""  # what the stage was given whose forward raised
    _begun = 0  # batches of training
    _shows = False  # whether this one is measured, for a run's folder

    def __init__(
        self, model: torch.nn.Module, config: Config, *, watchers: Sequence[Watcher] = (), **given: Any
    ) -> None:
        super().__init__(model, config, watchers=watchers, **given)
        place = self.mesh.coordinates(self.everyone.rank)
        self.stage_id, self.num_stages = place.pp, self.mesh.pp
        column = self.mesh.group("pp", self.everyone.rank)
        hops = Hops(column, functools.partial(lost, self.everyone), self._far(column))
        self._stages = Stages(self.part, column, place.pp, hops)
        self._indices = {id(p): i for i, p in enumerate(self.state.trained)}
        self._iterator: Iterator[Any] | None = None  # set_dataiterator's
        self._endless: Iterator[Any] | None = None  # over the loader
        self._outputs: list[Any] | None = None  # of the last layer, where an evaluation wants them beside the loss
        self._refuse_what_is_not_there()
        others = [p for p in model.parameters() if p.is_meta]  # what stands for other stages'
        self._elsewhere = frozenset(map(id, others))
        for p in others:  # says which dtype comes of them (rotary angles)
            if p.is_floating_point():
                p.data = p.data.to(self.dtype)
        # Gradients are added up on their rank, to be reduced once a batch. Where there is nothing to reduce, each
        # micro-batch has a pass of its own instead, as without a pipeline: that needs no second accumulator.
        shares = self.group.world > 1 or self.shared_gradients is not None
        self._sums = shares or self.part.order.chunks > 1 or self._stages.splits(self.micro_batches)
        # (number of a tie, the parameter, ranks of the pipeline that hold copies): those that this rank trains; and
        # (number, the copy, the rank that trains it)
        ties = [(i, tie.parameter, tie) for i, tie in enumerate(self.part.ties) if tie.parameter is not None]
        self._lent = [(i, p, tie.holders) for i, p, tie in ties if tie.owner == self.stage_id]
        self._copies = [(i, p, tie.owner) for i, p, tie in ties if self.stage_id in tie.holders]
        self._trained_ties = self._find_trained_ties()
        self._copied: dict[int, torch.Tensor] = {}  # number of a tie -> the sum of its copy's gradients
        self._watch_copies()
        self._spread_ties()
        say(self, self._in_words())

    def _far(self, column: Sequence[int]) -> frozenset[int]:
        """The ranks of this pipeline that are on other nodes. Collective over all ranks."""
        name = zlib.crc32(node_id().encode())
        nodes = self.everyone.gather_all(torch.tensor([name], dtype=torch.int64, device="cpu")).view(-1).tolist()
        return frozenset(stage for stage, rank in enumerate(column) if nodes[rank] != name)

    def _activations_sent(self) -> int:
        return super()._activations_sent() + self._stages.hops.sent_bytes

    def _in_words(self) -> str:
        """Of the pipeline, for the log."""
        part, ranks = self.part, self.mesh.pp
        replicas = f", {self.mesh.dp} data-parallel" * (self.mesh.dp > 1)
        return (
            f"pipeline: {ranks} rank{'s' * (ranks > 1)}{replicas}, {self.micro_batches} micro-batches a batch, schedule"
            f" {part.order.name}; stages: {part.describe()}"
        )

    @property
    def micro_batches(self) -> int:
        """Of a batch."""
        return self.gradient_accumulation_steps()

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage, whose inputs come from the data."""
        return self._stages.is_first()

    def is_last_stage(self) -> bool:
        """Whether it has the last one, which makes the loss."""
        return self._stages.is_last()

    def _refuse_what_is_not_there(self) -> None:
        here = {
            "GPUs": self.device.type != "cpu",
            '"precision": "auto"': self.auto_precision is not None,
            'deepc.deterministic = "layout"': self.step_policy.one_gradient,
            "managed_gradient_accumulation false": not self._config.managed_gradient_accumulation,
        }
        if found := [what for what, is_so in here.items() if is_so]:
            self.destroy()
            raise UnsupportedError(f"a pipeline with {' and '.join(found)} does not exist; see docs/status.md")

    # ---- batches -----------------------------------------------------------------------------------------------------
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Takes gradient_accumulation_steps micro-batches (of `data_iter`, or of training_data, which begins again at
        its end), trains on them and steps. Ranks with the first or last stage read data: those of one pipeline must get
        the same. The module is in training mode from then on, as in DeepSpeed. Returns the mean loss of all
        micro-batches and pipelines, on every rank. Collective."""
        loss = self._train_batch(data_iter)
        if self._shows:
            self._measured(loss)
        return loss

    def _train_batch(self, data_iter: Iterator[Any] | None) -> torch.Tensor:
        self.require_alive("train_batch")
        self.require_whole_step()
        with self._death_is_told():
            return self._trained(data_iter)

    def _trained(self, data_iter: Iterator[Any] | None) -> torch.Tensor:
        batches = self._fitted(self._draw_together(data_iter, self.micro_batches, trains=True))
        self.module.train()
        self._begun += 1
        if self._sums:
            self.hooks.synchronising, self.hooks.staged = False, True
            self.hooks.sums_in = torch_dtype(self.plan.accumulator)
        try:
            with self._told_to_all(), self.state.one_pass(trains=True):
                self.recomputation.begin_batch(lambda: self._stages.in_flight(len(batches)))
                losses = self._stages.train(self, batches, self._indices)
        except BaseException:
            self._copied.clear()
            self.hooks.give_up()
            raise
        finally:
            self.hooks.synchronising, self.hooks.staged, self.hooks.sums_in = True, False, None
        self._send_copied()
        if self._sums:
            self._take_copied()
        self._stages.hops.finish()
        self._share_gradients()
        if self._sums:
            self.hooks.flush()
        while not self.is_gradient_accumulation_boundary():
            self._end_micro_step()
        loss = self._mean(losses)
        super().step()
        return loss

    def measure_batch(self, data_iter: Iterator[Any] | None = None) -> Measured:
        """train_batch, with the times of its actions on all ranks of this pipeline, and what the schedule's simulation
        says of the same costs (parallel/pipeline/measured.py); deepc.plan.predict.timeline draws both, and `deepc
        report` what the run's folder got last. Collective."""
        return self._measured(self._train_batch(data_iter))

    def _measured(self, loss: torch.Tensor) -> Measured:
        """Of the batch that has just ended. Collective."""
        schedule = self.part.order.schedule(self.micro_batches)
        column = self.mesh.group("pp", self.everyone.rank)
        found = measured(loss, schedule, self._stages.times, column, self.everyone.gather_all)
        self.events.end("measure", found)
        return found

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The same without gradients and in evaluation mode, after which each module has the mode it had. Without
        data_iter the next batches of the training data are taken, and training goes on behind them. Returns the
        mean loss, on every rank (bcast_loss=False: None but where the last stage is); reduce_output=None: the list of
        losses of this pipeline, there. compute_loss=False or return_logits=True: what the last layer returned instead,
        or also (loss, outputs), there. Collective."""
        if reduce_output not in ("avg", None):
            raise ArgumentError(f'eval_batch(reduce_output={reduce_output!r}): it is "avg" or None')
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        self.require_alive("eval_batch")
        self.require_whole_step()
        with self._death_is_told():
            batches = self._draw_together(data_iter, count, trains=False)
        if data_iter is None and self._iterator is None and self.own_dataloader is not None:
            self.own_dataloader.stepped()  # no training gets these any more, nor does one that a checkpoint resumes
        self._wants_loss = compute_loss
        outputs: list[Any] = []
        self._outputs = outputs if return_logits else None
        try:
            with (
                called_to_evaluate(self.module),
                torch.no_grad(),
                self._told_to_all(),
                self.state.one_pass(trains=False),
            ):
                losses = self._stages.evaluate(self, batches)
        finally:
            self._wants_loss, self._outputs = True, None
        if not compute_loss:  # then what the last stage returns is the last layer's
            return losses if self.is_last_stage() else None
        if reduce_output is None:
            loss: Any = losses if self.is_last_stage() else None
        else:
            with self._death_is_told():
                loss = self._mean(losses)
            if not bcast_loss and not self.is_last_stage():
                loss = None
        return (loss, outputs if self.is_last_stage() else None) if return_logits else loss

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """What batches are drawn from where train_batch gets no data_iter; begins again at its end."""
        self.training_dataloader = loader
        self._iterator = self._endless = None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def forget_batches(self) -> None:
        self._endless = None

    def _draw_together(self, data_iter: Iterator[Any] | None, count: int, trains: bool) -> list[Any]:
        """_draw on all ranks, or an error on all: ranks that began a batch would wait for those that did not.
        Collective."""
        failure: Exception | None = None
        try:
            if trains and not torch.is_grad_enabled():
                raise MisuseError(
                    "train_batch inside of torch.no_grad() would make no gradients; leave it, or call eval_batch"
                )
            if trains:
                self.hooks.check()
                if self.hooks.accumulated or self.hooks.left_behind:
                    raise DeepcError(
                        "gradients are left of a batch that did not come to its end; call engine.zero_grad()"
                    )
            batches = self._draw(data_iter, count)
        except Exception as exc:  # told to the other ranks, then raised
            failure = exc
        shows = trains and self._begun == _SHOWN - 1 and self.monitor is not None and self.monitor.writes
        asked = count if isinstance(count, Integral) else 0
        mine = [failure is not None, trains, asked, self._lent_versions != self._versions_of_lent(), shows]
        *said, written, shown = zip(
            *self.everyone.gather_all(torch.tensor(mine, dtype=torch.int64, device="cpu")).tolist()
        )
        said, self._shows = list(zip(*said)), any(shown)
        if failure is not None:
            raise failure
        if bad := [str(rank) for rank, (failed, *_) in enumerate(said) if failed]:
            raise MisuseError(
                f"rank {', '.join(bad)} could not begin this batch (its own message tells why), so no rank did"
            )
        if any(other != said[0] for other in said):
            calls = (f"rank {r} {'train' if t else 'eval'}_batch of {n}" for r, (_, t, n) in enumerate(said))
            raise MisuseError(f"all ranks run the same batch: {', '.join(calls)} micro-batches")
        if any(written):
            self._spread_ties()
        return batches

    @contextlib.contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """Other ranks wait for what this one sends: an error here breaks their groups, so that all have one at once."""
        try:
            yield
        except BaseException as exc:
            what = f"rank {self.everyone.rank}, in stage {self.stage_id} of a pipeline, broke off a batch"
            told = self.break_groups(what, exc, self._given)
            self.state.fail(told)
            if told is not exc:
                raise told from exc
            raise

    def break_groups(self, what: str, error: BaseException, more: str = "") -> BaseException:
        """See EngineBase; and whoever waits for a message."""
        told = super().break_groups(what, error, more)
        break_messages(dist.group.WORLD)
        return told

    def _draw(self, data_iter: Iterator[Any] | None, count: int) -> list[Any]:
        """`count` micro-batches, Nones on a rank that reads none."""
        if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
            raise ArgumentError(
                f"eval_batch(num_micro_batches={count!r}): it is a number of micro-batches, 1 or more, or None for"
                " those of a batch of training"
            )
        if not (self.part.wants_batch or self.is_first_stage() or self.is_last_stage()):
            return [None] * int(count)
        if data_iter is None:
            data_iter = self._iterator
        if data_iter is None:
            if self._endless is None:
                if self.training_dataloader is None:
                    raise ArgumentError(
                        "train_batch without data: pass data_iter, an iterator of micro-batches, or training_data to"
                        " initialize"
                    )
                self._endless = _Endless(self.training_dataloader)
            data_iter = self._endless
        if not hasattr(data_iter, "__next__"):
            raise ArgumentError(
                f"train_batch takes an iterator of micro-batches, got {type(data_iter).__name__}; write iter(...), and"
                " keep it from batch to batch"
            )
        batches, failure = [], None
        for _ in range(
            int(count)
        ):  # all of them, so that ranks whose data has raised go on with the others' next batch
            try:
                batches.append(next(data_iter))
            except StopIteration:
                break
            except Exception as exc:
                failure = failure or exc
        if failure is not None:
            raise failure
        if len(batches) < count:
            raise MisuseError(
                f"the data ended after {len(batches)} of the {count} micro-batches of a batch"
                " (gradient_accumulation_steps); an iterator for training begins again at its end"
            )
        return batches

    def _fitted(self, batches: list[Any]) -> list[Any]:
        """The micro-batches as a curriculum wants them, which ranks that share tensors have alike; or an error on all
        ranks, of which some read no batch that could be wrong. Collective."""
        if self.curriculum.scheduler is None and self.unequal_batches is None:
            return batches
        failure: Exception | None = None
        try:
            if self.curriculum.scheduler is not None:
                batches = self.curriculum.micro_batches(self.global_steps + 1, batches)
            if self.unequal_batches is not None:
                self.unequal_batches(batches)
        except Exception as exc:  # told to the other ranks, then raised
            failure = exc
        together(self.everyone, failure)
        self.unequal_batches = None
        return batches

    def _mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of all pipelines; or an error on all ranks, where the last stage has none. Collective."""
        bad = [loss for loss in losses if not (_is_scalar(loss) or isinstance(loss, (int, float)))]
        row = [0.0, 0.0, 1.0] if bad else [float(sum(map(float, losses))), float(len(losses)), 0.0]
        rows = self.everyone.gather_all(torch.tensor(row, dtype=torch.float64, device="cpu"))
        total, count, wrong = rows.sum(0).tolist()
        if wrong:
            what = "what is no scalar"
            if bad:
                what = in_words(bad[0]) if isinstance(bad[0], (torch.Tensor, tuple)) else type(bad[0]).__name__
            raise ArgumentError(
                f"eval_batch gives the mean loss, and the last stage of the pipeline returned {what}; give the model a"
                " loss_fn that reduces it, or pass compute_loss=False for what the last layer returns"
            )
        return torch.tensor(total / count, dtype=torch.float32, device=self.device)

    # ---- what a batch asks of the engine (parallel/pipeline/runtime.py) ----------------------------------------------
    def run_stage(self, stage: int, received: Any, batch: Any) -> Any:
        first, last = stage == 0, stage == self._stages.count - 1
        read: tuple[tuple[Any, ...], dict[str, Any]] = ((), {}) if batch is None else self.part.inputs(batch)
        self.events.begin("forward", read if first else ((), {}))
        out = None
        try:
            with (
                self._regions_are_left(),
                mixing_is_told(self.module, self.dtype, CAST_BUFFERS),
                self.activations.around(),
                self.recomputation.around((received, read), stage),
                casts_are_told(self.module, self.state, self._elsewhere),
                self.autocast(),
            ):
                call = self._call_keeping if last and self._outputs is not None else self.step_policy.forward
                out = self.part.run(call, stage, received, batch, self._wants_loss)
            self.state.meet()
        except Exception as exc:
            if not first and not isinstance(exc, DeepcError):  # what comes from the stage before may not suit it
                self._given = f"its forward got {in_words(received)} from the stage before"
                if hasattr(exc, "add_note"):  # since Python 3.11
                    exc.add_note(f"in stage {stage} of a pipeline: {self._given}")
            raise
        finally:
            self.events.end("forward", out if last else None)
        if last and torch.is_grad_enabled() and not _is_scalar(out):
            raise ArgumentError(
                "the last stage of a pipeline must end in a scalar loss, got"
                f" {tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__}; give the model a"
                " loss_fn that reduces it"
            )
        return out

    def _call_keeping(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.step_policy.forward(inputs, kwargs)
        if self._outputs is not None:
            self._outputs.append(out)
        return out

    def backward_loss(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self.state.meet()
        self._micro_batch_is_done()

    def backward_stage(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        self.events.begin("backward", next(iter(gradients), None))
        try:
            if self.hooks.synchronising:
                self._backward_pass(lambda: _backward(outputs, gradients))
            else:
                _backward(outputs, gradients)
            self.state.meet()
        finally:
            self.events.end("backward", None)
        self._micro_batch_is_done()

    def _backward_pass(self, backward: Callable[[], None]) -> None:
        """Of a micro-batch. Where a disk breaks it off the batch is broken off, as by any error: other ranks are at
        other micro-batches, and can't be asked."""
        self.hooks.run(backward, self.is_gradient_accumulation_boundary(), self.loss_scale)

    def _micro_batch_is_done(self) -> None:
        if self.hooks.synchronising and not self.is_gradient_accumulation_boundary():
            self._end_micro_step()

    def bring(self, index: int, gradient: torch.Tensor) -> None:
        self.hooks.bring(index, gradient)

    def bring_product(self, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        self.hooks.bring_product(index, a, b)

    # ---- parameters of several stages --------------------------------------------------------------------------------
    def _find_trained_ties(self) -> frozenset[int]:
        """Numbers of the ties that are trained. Of the others (frozen, or without an optimizer) there is no gradient
        that a copy could send. Ranks must agree on what is frozen, else one would wait. Collective."""
        trained, wants, frozen = 1, 2, 4
        mine = []
        for tie in self.part.ties:
            p = tie.parameter
            said = 0 if p is None else wants if p.requires_grad else frozen
            mine.append(said | (trained if tie.owner == self.stage_id and id(p) in self._indices else 0))
        if not mine:
            return frozenset()
        rows = self.everyone.gather_all(torch.tensor(mine, dtype=torch.int64, device="cpu"))
        for tie, column in zip(self.part.ties, rows.T.tolist()):
            stages = [
                [self.mesh.coordinates(r).pp for r, said in enumerate(column) if said & k] for k in (wants, frozen)
            ]
            if all(stages):
                self.destroy()
                raise ArgumentError(
                    f"the tied parameter '{tie.name}' requires a gradient in stage {stages[0][0]} and none in stage"
                    f" {stages[1][0]}; they are one parameter: call requires_grad_ on all stages, or in the layer's"
                    " constructor"
                )
        return frozenset(i for i, column in enumerate(rows.T.tolist()) if any(said & trained for said in column))

    def _watch_copies(self) -> None:
        for i, copy, _ in self._copies:
            if not copy.requires_grad:
                continue

            def add(p: torch.Tensor, i: int = i) -> None:
                assert p.grad is not None
                grad, p.grad = p.grad, None
                if i in self._trained_ties:
                    self._copied[i] = add_up(self._copied.get(i), grad, torch_dtype(self.plan.accumulator))

            self._undo.callback(copy.register_post_accumulate_grad_hook(add).remove)

    def _send_copied(self) -> None:
        """The gradients of copies go to their trainer."""
        for i, copy, owner in self._copies:
            if i not in self._trained_ties:
                continue
            none = torch.zeros(copy.shape, dtype=torch_dtype(self.plan.accumulator), device="cpu")
            self._stages.send_tie(i, self._copied.pop(i, none), owner)

    def _take_copied(self) -> None:
        """A trainer takes the gradients of the copies."""
        for i, p, holders in self._lent:
            if i not in self._trained_ties:
                continue
            like = torch.empty(p.shape, dtype=torch_dtype(self.plan.accumulator), device="cpu")
            for holder in holders:
                self.hooks.bring(self._indices[id(p)], self._stages.receive_tie(i, like, holder))

    def _share_gradients(self) -> None:
        """The batch's gradients, over the ranks of the stage that share its experts. Collective."""
        shared, trained = self.shared_gradients, self.state.trained
        if shared is not None:
            self.hooks.change_left(lambda i, g: shared.of(g, id(trained[i])), torch_dtype(self.plan.accumulator))

    def last_backward_comes(self) -> None:
        """Where each backward is a pass, what copies got goes with the last one. There stages are in the order of
        their ranks, so that the passes of copies, which are in later stages, are over by now."""
        if not self._sums:
            self._take_copied()

    def publish(self) -> None:
        super().publish()
        # Not while the engine is being made; and where a disk may have broken it off on some rank, others don't wait
        # here: the next batch sees that parameters were written.
        if "_stages" in self.__dict__ and not self.plan.parameters_on:
            self._spread_ties()

    @torch.no_grad()
    def _spread_ties(self) -> None:
        """Copies get the trainer's values. Collective."""
        with self._lent_are_whole():
            for i, p, holders in self._lent:
                for holder in holders:
                    self._stages.send_tie(i, p.detach(), holder)
            for i, copy, owner in self._copies:
                copy.data = self._stages.receive_tie(i, torch.empty(copy.shape, dtype=self.dtype, device="cpu"), owner)
            self._stages.hops.finish()
        self._lent_versions = self._versions_of_lent()

    @contextlib.contextmanager
    def _lent_are_whole(self) -> Iterator[None]:
        """What this rank trains for others can be read; or no rank comes here, where the disk of one fails."""
        whole = self.state.whole([p for _, p, _ in self._lent], None)
        failure: DiskError | None = None
        try:
            whole.begin()
        except DiskError as exc:
            failure = exc
        try:
            if self.plan.parameters_on:
                together(self.everyone, failure)
            elif failure is not None:
                raise failure
            yield
        finally:
            if failure is None:
                whole.end()

    def _versions_of_lent(self) -> list[int]:
        """They change with each write that is not a step's (deepc.view, GatheredParameters): the next batch begins with
        the copies' new values."""
        return [version_of(p) for _, p, _ in self._lent]

    # ---- what a pipeline does not do ---------------------------------------------------------------------------------
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(_ONLY)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(_ONLY)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepResult:
        """The rest of a step that a disk broke off; train_batch makes the others."""
        if self.broken_step:
            return super().step(lr_kwargs)
        raise UnsupportedError(_ONLY)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        raise UnsupportedError(
            "engine.no_sync() of a pipeline: train_batch keeps the gradients of micro-batches on this rank as it is,"
            " and reduces them once, at the end of the batch; leave the with block out, and set"
            " gradient_accumulation_steps for more micro-batches"
        )
        yield  # what makes it a context manager

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        raise UnsupportedError(
            f"engine.set_gradient_accumulation_boundary({is_boundary}) of a pipeline: train_batch knows its boundary,"
            " which is behind the last of its gradient_accumulation_steps micro-batches; set that key of the"
            " configuration for another number of them"
        )

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(without_other_stages(self, state_dict), strict)
        self._spread_ties()


def _is_scalar(loss: Any) -> bool:
    return isinstance(loss, torch.Tensor) and loss.numel() == 1


def _backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    if outputs:
        torch.autograd.backward(list(outputs), list(gradients))


class _Endless:
    """The batches of a loader, again and again. No generator, which an error of the data would end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._given = loader, False
        self._batches = iter(loader)

    def __iter__(self) -> _Endless:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._given:
                raise ConfigError("training_data gives no micro-batch") from None
            self._batches, self._given = iter(self._loader), False
            return next(self)
        self._given = True
        return batch
