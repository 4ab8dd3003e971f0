"""The training engine of one role: scores rows, trains and evaluates on them, one micro-batch at a time.

Every call is a generator: each `next()` does one action and yields its record, so that a worker can do something else
in between. The result of a call is the generator's return value.

Training opens a mini-batch, does its forwards and backwards, and closes it with the optimizer step. Between open and
close the mini-batches of several models may share one pipeline schedule (`passes.OpenMiniBatch`).

Shapes: R response tokens, N samples, in row order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from plait.data.rows import FloatArray, Rows
from plait.dataflow import Asked
from plait.models.model import Model
from plait.models.outputs import Said
from plait.models.parallel.team import Team
from plait.policy.packing import MicroBatch
from plait.schedule.work import Done, Work
from plait.training.evaluation import loss_over
from plait.training.mini_batch import LossCall, MiniBatch, mask_of
from plait.training.optimizer import MasterOptimizer
from plait.training.passes import OpenMiniBatch, forwards
from plait.training.results import MiniBatchResult, counted, train_metrics
from plait.training.rollout_check import coverage, rollout_comparison
from plait.training.router_balance import RouterBalance
from plait.training.row_shares import drawn_batches
from plait.training.scored_rows import ScoredRows, output_of
from plait.training.stages import ModelPart, ScoringStage, TrainingStage
from plait.training.tally import Tally, summed
from plait.training.trainer_settings import ExecutionSettings, Rule, SampleSettings, UpdateSettings


class Trainer:
    """Scores, trains and evaluates one role. Without `updates` the role is frozen: it scores and evaluates.

    The model is a language model (log-probs, entropies) or a scalar model (values, scores). Its trained parameters
    require gradients only while a training micro-batch runs, because roles may share a module.

    A trained bfloat16 model gets new weights through `MasterOptimizer.load_state` only: at the next step the masters
    overwrite whatever else was written into its working weights.

    On several ranks each has a Trainer of the role over its part of the model. All call the same methods with the same
    rows in the same order, run their generators to the end, and get the same results. A dp rank computes its share of
    the samples of each mini-batch and holds its share of the optimizer's state (ZeRO-1). Of samples outside its share
    it reads only lengths, ids, the mask, and whether the last trained token ends the response.

    Args:
        team: the ranks that hold the model together; None: this rank alone.
    """

    def __init__(
        self,
        model: Model,
        execution: ExecutionSettings,
        samples: SampleSettings,
        updates: UpdateSettings | None = None,
        *,
        role: str = "actor",
        team: Team | None = None,
    ) -> None:
        assert updates is None or samples.max_response_tokens > 0, "a trained role needs max_response_tokens"
        if execution.checkpoint_activations:
            model.backbone.recomputed_layers()  # a family that has none is refused here, not at the first step
        if samples.replays_experts:
            model.backbone.routers.check()
        model.module.requires_grad_(False)
        self.model = model
        self.role = role
        self.team = Team.alone() if team is None else team
        self._execution = execution
        self.sample_settings = samples
        self._updates = updates
        self._optimizer: MasterOptimizer | None = None
        if updates is not None:
            how = updates.optimizer, updates.total_optimizer_steps
            self._optimizer = MasterOptimizer(model, *how, self.team, is_followed=updates.is_followed)
        self.part = ModelPart(
            model, self.team, checkpoint=execution.checkpoint_activations, replays_experts=samples.replays_experts
        )
        coefficient = 0.0 if updates is None else updates.optimizer.router_aux_loss_coef
        self.balance = RouterBalance.of(model.config, model.dtype, coefficient) if coefficient > 0 else None
        """The loss of the routers that training adds."""

    @property
    def is_trained(self) -> bool:
        return self._optimizer is not None

    @property
    def optimizer(self) -> MasterOptimizer:
        """The optimizer of a trained role. Its state, working weights included, is all that training goes on from."""
        assert self._optimizer is not None, f"role {self.role} is frozen"
        return self._optimizer

    # -- score

    def score(
        self, rows: Rows, what: Asked, *, temperature: float | None = None, call: str | None = None
    ) -> Work[FloatArray]:
        """Score the rows with the current weights; one micro-batch per `next()`.

        The result does not depend on the order of `rows`: micro-batches are made in the order of `Rows.ordered`.

        Args:
            what: log-probs, entropies or `Top` of response tokens (language model); the value of the state before each
                response token, or the score at the last token of each sample (scalar model).
            temperature: of log-probs and entropies, 1 for given samples; None: the sampling temperature.
            call: name of the call in the flow, prefix of the action ids; None: the role's and the output's.

        Returns:
            [rows.num_tokens], for `Top` [rows.num_tokens, its width], for Score.SCORE [len(rows)]; float64, the exact
            values of the float32 that were computed, in the order of `rows`.

        Raises:
            RunError: the role's model is of the other kind.
        """
        output = output_of(what)
        name = call or f"{self.role}.{output.name}"
        output.require(self.model, self.role, name)
        ordered = rows.ordered()
        micros = self.split(ordered)[self.team.dp.index]
        scored = ScoredRows(rows, output, len(micros))
        temperature = temperature or self.sample_settings.temperature
        stage = ScoringStage(self.part, ordered, micros, temperature, scored.take, output.top)
        yield from counted(forwards(stage, self.role, name), self.team)
        return summed(self.team, scored.values, self.model.device)

    # -- train

    def train(self, rows: Rows, call: LossCall, *, mini_batches: int, epochs: int, step: int) -> Work[dict[str, float]]:
        """Train: `epochs` passes over `mini_batches` mini-batches; one micro-batch or optimizer step per `next()`.

        The result does not depend on the order of `rows`. A mini-batch whose tokens are all masked makes no optimizer
        step; it is only counted.

        Args:
            step: training step of the run, part of the mini-batch draw.

        Returns:
            Metrics: see `results.train_metrics`.

        Raises:
            RunError: the loss returned something else than a loss; the mask is not one; several optimizer steps in a
                row were not finite.
        """
        begun = self.begin(rows, call, mini_batches=mini_batches, epochs=epochs, step=step)
        while (opened := begun.open()) is not None:
            yield from counted(begun.alone(opened, self._execution.pipeline), self.team)
        return begun.metrics()

    def begin(self, rows: Rows, call: LossCall, *, mini_batches: int, epochs: int, step: int) -> BegunTraining:
        """Begin what `train` does, for a caller that opens and closes the mini-batches. Arguments as of `train`."""
        assert self._updates is not None, f"role {self.role} is frozen"
        rows, seed = rows.ordered(), self._updates.seed
        drawn = drawn_batches(rows, mini_batches, epochs=epochs, seed=seed, step=step, whole_groups=call.whole_groups)
        noise, settings = f"{seed} {step} {call.name or self.role}", self.sample_settings
        batches = (
            MiniBatch(rows.select(members), call, self.role, settings, f"{noise} {number}")
            for number, members in enumerate(drawn)
        )
        return BegunTraining(self, rows, call, batches, epochs)

    # -- evaluate

    def evaluate(self, rows: Rows, call: LossCall) -> Work[dict[str, float]]:
        """The loss over all rows as one mini-batch, without an update (`evaluation.loss_over`); also for a frozen role.
        Without rows the result is empty; if every token is masked it is the loss alone, 0."""
        batch = MiniBatch(rows.ordered(), call, self.role, self.sample_settings, "evaluation")
        if batch.totals.tokens == 0:
            return {f"{self.role}/loss": 0.0} if len(rows) else {}
        micros = self.split(batch.rows, call.whole_groups)[self.team.dp.index]
        return (yield from loss_over(self.part, batch, micros, self.role, call.name or f"{self.role}.evaluate"))

    def split(self, rows: Rows, whole_groups: bool = False) -> tuple[tuple[MicroBatch, ...], ...]:
        """The micro-batches of every dp rank."""
        return self._execution.split(
            rows, num_shares=self.team.dp.size, num_stages=self.team.pp.size, whole_groups=whole_groups
        )


@dataclass
class BegunTraining:
    """A training call under way: its mini-batches one after the other, one open at a time."""

    trainer: Trainer
    rows: Rows
    """All rows of the call, in the order of `Rows.ordered`."""
    call: LossCall
    batches: Iterator[MiniBatch]
    """Mini-batches that were not opened yet."""
    epochs: int
    results: list[MiniBatchResult] = field(default_factory=list)
    """What those that are closed gave."""

    @property
    def name(self) -> str:
        """The prefix of the action ids of the open mini-batch."""
        return f"{self.call.name or f'{self.trainer.role}.train'}/b{len(self.results)}"

    def open(self) -> OpenMiniBatch | None:
        """Begin the next mini-batch: set gradients to 0 and cut it into micro-batches, which are still to be done; one
        without a trained token has none. None: there are no more mini-batches."""
        if (batch := next(self.batches, None)) is None:
            return None
        trainer, copies = self.trainer, ((),) * self.trainer.team.dp.size
        if batch.totals.tokens:
            copies = trainer.split(batch.rows, self.call.whole_groups)
            trainer.optimizer.collected.zero()
        # Until the first optimizer step, log-probs are compared with those of the sampling engine.
        is_first = all(result.report is None for result in self.results)
        sees, balance = is_first and Said.LOGPROBS in trainer.model.says, trainer.balance
        tally = Tally(batch, sees=sees, routes=balance is not None or trainer.part.replays_experts)
        stage = TrainingStage(trainer.part, copies[trainer.team.dp.index], trainer.optimizer, tally, balance)
        return OpenMiniBatch(trainer.role, copies, stage)

    def alone(self, opened: OpenMiniBatch, rule: Rule) -> Work[None]:
        """All of an open mini-batch, where no other model's goes between, to its `close`."""
        yield from opened.run(rule, self.name)
        if (step := self.close(opened)) is not None:
            yield step

    def close(self, opened: OpenMiniBatch) -> Done | None:
        """End a mini-batch whose micro-batches are done: reduce gradients over the ranks and make the optimizer step.
        Returns the record of that step; None if no token was trained.

        Raises:
            RunError: several optimizer steps in a row were not finite; a peer is gone.
        """
        trainer, stage, tally, name = self.trainer, opened.stage, opened.stage.tally, self.name
        role, team = trainer.role, trainer.team
        assert stage.is_finished, f"{role}: {len(stage.finished)} of {len(stage.micros)} micro-batches are done"
        if tally.batch.totals.tokens == 0:
            self.results.append(MiniBatchResult({f"{role}/loss": 0.0}, None))
            return None
        totals = tally.over(team, trainer.model.device)
        rollout = {} if totals.seen is None else rollout_comparison(*totals.seen, tally.batch.rows)
        report = trainer.optimizer.step(totals.loss_is_finite)
        metrics = {f"{role}/loss": totals.loss, **totals.means, f"{role}/grad_norm": report.grad_norm}
        self.results.append(MiniBatchResult(metrics, report, totals.tokens, totals.num_nonfinite, rollout))
        return Done(f"{name}/step", "STEP", role=role)

    def metrics(self) -> dict[str, float]:
        """What `train` returns, when all mini-batches are closed."""
        trainer, rows = self.trainer, self.rows
        stops = trainer.sample_settings.stop_token_ids
        stop_token_ids = frozenset(trainer.model.eos_token_ids if stops is None else stops)
        unshared = self.epochs * sum(len(s.prompt.token_ids) + s.num_tokens for s in rows.samples)
        covered = coverage(rows, mask_of(rows, self.call.mask, trainer.role), stop_token_ids)
        return train_metrics(self.results, trainer.role, {"tokens_unshared": unshared, **covered})
