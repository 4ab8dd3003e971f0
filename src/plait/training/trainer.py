"""The training engine of one role: scores rows, trains and evaluates on them, one micro-batch at a time.

Every call is a generator: each `next()` does one action and yields its record, so that a worker can do something else
in between. The result of a call is the generator's return value.

Training opens a mini-batch, does its forwards and backwards, and closes it with the optimizer step. Between open and
close the mini-batches of several models may share one pipeline schedule (`passes.OpenMiniBatch`).

Shapes: R response tokens, N samples, in row order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from plait.data.rows import FloatArray, Rows
from plait.dataflow import Asked
from plait.models.model import Model
from plait.models.outputs import Said
from plait.models.parallel.team import Team
from plait.policy.packing import NO_SAMPLES, MicroBatch
from plait.schedule.work import Done, Work
from plait.training.micro_batches import drawn_batches
from plait.training.mini_batch import LossCall, LossTerm, MiniBatch, mask_of
from plait.training.optimizer import MasterOptimizer
from plait.training.passes import OpenMiniBatch, forwards, loss_over
from plait.training.results import MiniBatchResult, TermResult, counted, train_metrics
from plait.training.rollout_check import coverage, rollout_comparison
from plait.training.router_balance import RouterBalance
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
            model.backbone.routers.check(model.backbone.layer_weights.having)
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
        copies = self.split(ordered)
        micros = self.part.as_many(copies[self.team.dp.index], copies)
        scored = ScoredRows(rows, output, sum(bool(micro.samples) for micro in micros))
        temperature = temperature or self.sample_settings.temperature
        stage = ScoringStage(self.part, ordered, micros, temperature, scored.take, output.top)
        yield from counted(forwards(stage, self.role, name), self.team)
        self.part.layers.rest()
        return summed(self.team, scored.values, self.model.device)

    # -- train

    def train(self, terms: Sequence[LossTerm], *, step: int) -> Work[list[dict[str, float]]]:
        """Train by a sum of losses, a step for each mini-batch; one micro-batch or optimizer step per `next()`.

        The i-th mini-batches of all terms make the i-th step: their gradients add up, each loss with denominators of
        its own. A term that has fewer mini-batches than another, because it has fewer samples, has no part in the last
        steps. The result does not depend on the order of rows. A mini-batch whose tokens are all masked adds nothing;
        where that goes for all terms there is no step, it is only counted.

        Args:
            step: training step of the run, part of the mini-batch draw.

        Returns:
            Metrics of each term: see `results.train_metrics`.

        Raises:
            RunError: a loss returned something else than a loss; a mask is not one; several optimizer steps in a row
                were not finite.
        """
        begun = self.begin(terms, step=step)
        while (opened := begun.open()) is not None:
            yield from counted(begun.alone(opened, self._execution.pipeline), self.team)
        return begun.metrics()

    def begin(self, terms: Sequence[LossTerm], *, step: int) -> BegunTraining:
        """Begin what `train` does, for a caller that opens and closes the mini-batches. Arguments as of `train`."""
        assert self._updates is not None, f"role {self.role} is frozen"
        return BegunTraining(self, [self._begun(term, self._updates.seed, step) for term in terms])

    def _begun(self, term: LossTerm, seed: int, step: int) -> BegunTerm:
        rows, call, settings = term.rows.ordered(), term.call, self.sample_settings
        drawn = drawn_batches(
            rows, term.mini_batches, epochs=term.epochs, seed=seed, step=step, whole_groups=call.whole_groups
        )
        noise = f"{seed} {step} {call.name or self.role}"
        batches = (
            MiniBatch(rows.select(members), call, self.role, settings, f"{noise} {number}")
            for number, members in enumerate(drawn)
        )
        return BegunTerm(replace(term, rows=rows), call.name or f"{self.role}.train", batches)

    # -- evaluate

    def evaluate(self, rows: Rows, call: LossCall) -> Work[dict[str, float]]:
        """The loss over all rows as one mini-batch, without an update (`evaluation.loss_over`); also for a frozen role.
        Without rows the result is empty; if every token is masked it is the loss alone, 0."""
        batch = MiniBatch(rows.ordered(), call, self.role, self.sample_settings, "evaluation")
        if batch.totals.tokens == 0:
            return {f"{self.role}/loss": 0.0} if len(rows) else {}
        copies = self.split(batch.rows, call.whole_groups)
        micros = self.part.as_many(copies[self.team.dp.index], copies)
        return (yield from loss_over(self.part, batch, micros, self.role, call.name or f"{self.role}.evaluate"))

    def split(self, rows: Rows, whole_groups: bool = False) -> tuple[tuple[MicroBatch, ...], ...]:
        """The micro-batches of every dp rank."""
        return self._execution.split(
            rows, num_shares=self.team.dp.size, num_stages=self.team.pp.size, whole_groups=whole_groups
        )


@dataclass
class BegunTerm:
    """A loss of a training under way."""

    term: LossTerm
    """With its rows in the order of `Rows.ordered`."""
    name: str
    """The call's."""
    batches: Iterator[MiniBatch]
    """Mini-batches that were not opened yet."""
    is_seen: bool = False
    """Whether a mini-batch was computed, so that the next ones are not compared with the sampling engine."""


@dataclass
class BegunTraining:
    """A training under way: its mini-batches one after the other, one open at a time."""

    trainer: Trainer
    terms: Sequence[BegunTerm]
    results: list[MiniBatchResult] = field(default_factory=list)
    """What the mini-batches gave that are closed."""

    def open(self) -> OpenMiniBatch | None:
        """Begin the next mini-batch: set gradients to 0 and cut that of each term into micro-batches, which are still
        to be done; one without a trained token has none. None: there are no more mini-batches."""
        batches = [next(begun.batches, None) for begun in self.terms]
        if all(batch is None for batch in batches):
            return None
        trainer, dp = self.trainer, self.trainer.team.dp
        tallies = [None if batch is None else self._tally(at, batch) for at, batch in enumerate(batches)]
        copies: list[tuple[MicroBatch, ...]] = [()] * dp.size
        mine: list[tuple[MicroBatch, Tally, str]] = []
        num_samples = 0
        for begun, tally in zip(self.terms, tallies, strict=True):
            if tally is None or not tally.batch.totals.tokens:
                continue
            of_copies = trainer.split(tally.batch.rows, begun.term.call.whole_groups)
            copies = [(*before, *micros) for before, micros in zip(copies, of_copies, strict=True)]
            mine += [(micro, tally, f"{begun.name}/b{len(self.results)}") for micro in of_copies[dp.index]]
            num_samples += len(tally.batch.rows)
        if num_samples:
            trainer.optimizer.collected.zero()
        if trainer.optimizer.collected.in_each:
            most = max(map(len, copies))
            copies = [(*micros, *[NO_SAMPLES] * (most - len(micros))) for micros in copies]
            counted_by = next((tally for tally in tallies if tally is not None), None)
            assert counted_by is not None, "there is a mini-batch"
            mine += [(NO_SAMPLES, counted_by, self._name(tallies))] * (most - len(mine))
        micros, of_micros, names = zip(*mine, strict=True) if mine else ((), (), ())
        stage = TrainingStage(trainer.part, micros, trainer.optimizer, of_micros, num_samples, trainer.balance)
        return OpenMiniBatch(trainer.role, tuple(copies), stage, tuple(tallies), names, self._name(tallies))

    def _tally(self, at: int, batch: MiniBatch) -> Tally:
        begun, trainer = self.terms[at], self.trainer
        sees = not begun.is_seen and Said.LOGPROBS in trainer.model.says
        begun.is_seen |= batch.totals.tokens > 0
        return Tally(batch, sees=sees, routes=trainer.balance is not None or trainer.part.replays_experts)

    def _name(self, tallies: Sequence[Tally | None]) -> str:
        """That of a mini-batch: of the last term which is in it."""
        last = [begun for begun, tally in zip(self.terms, tallies, strict=True) if tally is not None][-1]
        return f"{last.name}/b{len(self.results)}"

    def alone(self, opened: OpenMiniBatch, rule: Rule) -> Work[None]:
        """All of an open mini-batch, where no other model's goes between, to its `close`."""
        yield from opened.run(rule)
        if (step := self.close(opened)) is not None:
            yield step

    def close(self, opened: OpenMiniBatch) -> Done | None:
        """End a mini-batch whose micro-batches are done: reduce gradients over the ranks and make the optimizer step.
        Returns the record of that step; None if no token was trained.

        Raises:
            RunError: several optimizer steps in a row were not finite; a peer is gone.
        """
        trainer, stage, role = self.trainer, opened.stage, self.trainer.role
        assert stage.is_finished, f"{role}: {len(stage.finished)} of {len(stage.micros)} micro-batches are done"
        terms, finite = [], True
        for tally in opened.tallies:
            if tally is None or not tally.batch.totals.tokens:
                terms.append(None if tally is None else TermResult({f"{role}/loss": 0.0}, is_masked=True))
                continue
            totals = tally.over(trainer.team, trainer.model.device)
            rollout = {} if totals.seen is None else rollout_comparison(*totals.seen, tally.batch.rows)
            metrics = {f"{role}/loss": totals.loss, **totals.means}
            terms.append(TermResult(metrics, False, totals.tokens, totals.num_nonfinite, rollout))
            finite &= totals.loss_is_finite
        if not stage.num_samples:
            self.results.append(MiniBatchResult(tuple(terms), None))
            return None
        trainer.part.layers.rest()
        self.results.append(MiniBatchResult(tuple(terms), trainer.optimizer.step(finite)))
        return Done(f"{opened.name}/step", "STEP", role=role)

    def metrics(self) -> list[dict[str, float]]:
        """What `train` returns, when all mini-batches are closed."""
        return [self._metrics_of(at, begun.term) for at, begun in enumerate(self.terms)]

    def _metrics_of(self, at: int, term: LossTerm) -> dict[str, float]:
        trainer, rows = self.trainer, term.rows
        stops = trainer.sample_settings.stop_token_ids
        stop_token_ids = frozenset(trainer.model.eos_token_ids if stops is None else stops)
        unshared = term.epochs * sum(len(s.prompt.token_ids) + s.num_tokens for s in rows.samples)
        covered = coverage(rows, mask_of(rows, term.call.mask, trainer.role), stop_token_ids)
        return train_metrics(self.results, at, trainer.role, {"tokens_unshared": unshared, **covered})
