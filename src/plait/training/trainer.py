"""The training engine of one role: scores rows, trains and evaluates on them, a micro-batch at a time.

Every call is a generator: each `next()` does one action and yields a record of it, so that a worker may do something
else in between. What a call returns is the generator's return value.

Shapes: R response tokens, N samples, in row order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np
from torch import Tensor

from plait.data.rows import NO_VALUES, FloatArray, Rows
from plait.dataflow import Column, Level
from plait.errors import RunError
from plait.layout.holdings import Holdings
from plait.models.language_model import LanguageModel
from plait.models.parallel.team import Team
from plait.models.scalar_model import ScalarModel
from plait.policy.packing import MicroBatch
from plait.schedule.generators import one_f_one_b
from plait.schedule.work import Done, Work
from plait.training.micro_batches import split_over
from plait.training.mini_batch import LossCall, MiniBatch, Outputs, mask_of
from plait.training.optimizer import MasterOptimizer
from plait.training.passes import Passes, Rule
from plait.training.results import COUNTS as COUNTS
from plait.training.results import MiniBatchResult, counted, train_metrics
from plait.training.rollout_check import coverage, rollout_comparison
from plait.training.row_shares import drawn_batches, sizes_of
from plait.training.settings import OptimizerSettings
from plait.training.tally import Tally, summed

MICRO_BATCHES_OF_A_STAGE = 4
"""With so many at least, at most a fifth of a pipeline's time is spent filling and draining it."""


class Trainer:
    """See the top of the file. Without `optimizer` the role is frozen and only scores.

    The model is a language model (log-probs, entropies) or a scalar one (values, scores). Of its parameters the trained
    ones require gradients, and only while a training micro-batch runs: roles may share a module.

    A trained bfloat16 model must get new weights through `load_state`: what is written into its working weights
    otherwise is overwritten by the masters at the next step.

    On several ranks every one has a Trainer of the same role over its part of the model; all call the same methods with
    the same rows in the same order, step their generators to the end, and get the same results. A dp rank computes its
    share of the samples of each mini-batch and holds its share of the optimizer's state (ZeRO-1). Of samples outside
    its share it reads lengths, ids, the mask, and whether the last trained token ends the response.

    Args:
        team: the ranks that hold the model together; None: this one alone.
        micro_batches: wanted of each mini-batch and dp rank, as far as there are samples; more where they would exceed
            `micro_batch_tokens`. None: 1, and of a pipeline MICRO_BATCHES_OF_A_STAGE for each stage.
        pipeline: makes the schedule of each mini-batch where the model is cut into stages; any valid one gives the same
            result (`schedule.generators` has some).
        total_optimizer_steps: of the whole run; where the learning-rate schedule ends.
        micro_batch_tokens: most packed tokens of one forward, prompts included; one longer sample runs alone.
        temperature: the sampling temperature, which log-probs are taken at unless a call says another.
        max_response_tokens: the response limit, denominator of the constant aggregation.
        checkpoint_activations: recompute layer activations in the backward pass.
        seed: of the run; fixes the mini-batches together with step and epoch.
        share_prompts: compute a group's prompt once. False gives the same result and is here to show that it does.
        stop_token_ids: that end a response, for `eos_coverage`; None: the model's.
    """

    def __init__(
        self,
        model: LanguageModel | ScalarModel,
        optimizer: OptimizerSettings | None = None,
        *,
        role: str = "actor",
        micro_batch_tokens: int,
        temperature: float,
        total_optimizer_steps: int = 0,
        max_response_tokens: int = 0,
        checkpoint_activations: bool = False,
        seed: int = 0,
        share_prompts: bool = True,
        stop_token_ids: Collection[int] | None = None,
        team: Team | None = None,
        micro_batches: int | None = None,
        pipeline: Rule = one_f_one_b,
    ) -> None:
        assert temperature > 0, f"log-probs need a temperature above 0, got {temperature}"
        assert optimizer is None or (total_optimizer_steps > 0 and max_response_tokens > 0), (
            "a trained role needs total_optimizer_steps and max_response_tokens"
        )
        self.model = model
        self.role = role
        model.module.requires_grad_(False)
        self.team = Team.alone() if team is None else team
        self._optimizer = (
            None if optimizer is None else MasterOptimizer(model, optimizer, total_optimizer_steps, self.team)
        )
        if checkpoint_activations:
            model.backbone.recomputed_layers()  # a family that has none is refused here, not at the first step
        self._passes = Passes(model, self.team, role=role, checkpoint=checkpoint_activations, rule=pipeline)
        self._micro_batch_tokens = micro_batch_tokens
        num_stages = self.team.pp.size
        default = MICRO_BATCHES_OF_A_STAGE * num_stages if num_stages > 1 else 1
        self._micro_batches = default if micro_batches is None else micro_batches
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._seed = seed
        self._share_prompts = share_prompts
        self._stop_token_ids = frozenset(model.eos_token_ids if stop_token_ids is None else stop_token_ids)

    def logprobs(self, rows: Rows, *, temperature: float | None = None, call: str | None = None) -> Work[FloatArray]:
        """Score: log-probs of the response tokens under the current weights; one micro-batch per `next()`.

        The result does not depend on the order of `rows`: micro-batches are made in the order of `Rows.ordered`.

        Args:
            temperature: 1 for samples that were given; the trainer's unless told.
            call: name of the call in the flow, prefix of the action ids; `{role}.logprobs` unless told.

        Returns:
            [rows.num_tokens] float64 (exact values of the float32 computed), in the order of `rows`.

        Raises:
            RunError: the role is a scalar model.
        """
        work = self._score(rows, "logprobs", call, lambda outputs: outputs.logprobs_R, Level.TOKEN, temperature)
        return (yield from work)

    def values(self, rows: Rows, *, call: str | None = None) -> Work[FloatArray]:
        """Score by a scalar model: the value of the state before each response token. As `logprobs` otherwise.

        Raises:
            RunError: the role is a language model.
        """
        return (yield from self._score(rows, "values", call, lambda outputs: outputs.values_R, Level.TOKEN))

    def scores(self, rows: Rows, *, call: str | None = None) -> Work[FloatArray]:
        """Score by a scalar model: its head at the last token of each sample, [len(rows)]. As `logprobs` otherwise.

        Raises:
            RunError: the role is a language model.
        """
        return (yield from self._score(rows, "scores", call, lambda outputs: outputs.scores_N, Level.SAMPLE))

    def train(
        self,
        rows: Rows,
        columns: Mapping[str, Column],
        loss: Callable[..., Tensor],
        *,
        mini_batches: int,
        epochs: int,
        step: int,
        mask: Column | None = None,
        whole_groups: bool = False,
        batch_values: Mapping[Column, FloatArray] = NO_VALUES,
        temperature: float | None = None,
        call: str | None = None,
    ) -> Work[dict[str, float]]:
        """Train: `epochs` passes over `mini_batches` mini-batches; one micro-batch or optimizer step per `next()`.

        The result does not depend on the order of `rows`. A mini-batch that the mask leaves no token of is no
        optimizer step: it is counted and nothing else.

        Args:
            columns: argument of the loss → column of `rows` (a node's `inputs`). SAMPLE columns are spread to tokens, a
                BATCH column is a scalar tensor (or an array), from `batch_values`.
            loss: `loss(batch, **columns)`, see `plait.algorithms.losses.LossBatch`.
            step: training step of the run, part of the mini-batch draw.
            mask: TOKEN column of `rows`, 1.0 where a token is trained and 0.0 where not; None: all are.
            whole_groups: never split the samples of one prompt over mini-batches or micro-batches.
            batch_values: BATCH column → value.
            temperature: that log-probs are taken at, 1 for samples that were given; the trainer's unless told.
            call: name of the call in the flow, prefix of the action ids; `{role}.train` unless told.

        Returns:
            Metrics. What the loss logs, `{role}/entropy` (nats, at the sampling temperature) and `{role}/loss`: token
            means (the loss: as aggregated) of each mini-batch, then the mean over optimizer steps; likewise
            `{role}/grad_norm`, before clipping. Skipped steps are left out of these means. `{role}/lr` is that of the
            last step. `training/rollout_*` compare the forward of the first mini-batch, before its step, with the
            sampling engine (`rollout_check`). Counts, under `training/` for the actor and under `{role}/` for another
            role: `optimizer_steps`, of them `skipped_steps` for `nonfinite_losses` or `nonfinite_gradients`;
            `nonfinite_outputs` of the model; `masked_mini_batches` without a trained token; `tokens_computed`, packed
            tokens, and `tokens_unshared`, what they would be with every sample's own prompt; `mask_coverage` and
            `eos_coverage` (`rollout_check.coverage`).

        Raises:
            RunError: the loss returns what is not a loss; the mask is none; several optimizer steps in a row were not
                finite.
        """
        assert self._optimizer is not None, f"role {self.role} is frozen"
        call = call or f"{self.role}.train"
        asked = self._asked(columns, loss, mask, whole_groups, batch_values, temperature)
        rows = rows.ordered()
        results: list[MiniBatchResult] = []
        steps = 0
        drawn = drawn_batches(rows, mini_batches, epochs=epochs, seed=self._seed, step=step, whole_groups=whole_groups)
        for members in drawn:
            batch = MiniBatch(rows.select(members), asked)
            name = f"{call}/b{len(results)}"
            work = self._mini_batch(batch, name, first=steps == 0)
            results.append((yield from counted(work, self.team)))
            steps += results[-1].report is not None
        unshared = epochs * sum(len(s.prompt.token_ids) + len(s.token_ids) for s in rows.samples)
        covered = coverage(rows, mask_of(rows, mask, self.role), self._stop_token_ids)
        return train_metrics(results, self.role, {"tokens_unshared": unshared, **covered})

    def evaluate(
        self,
        rows: Rows,
        columns: Mapping[str, Column],
        loss: Callable[..., Tensor],
        *,
        mask: Column | None = None,
        whole_groups: bool = False,
        batch_values: Mapping[Column, FloatArray] = NO_VALUES,
        temperature: float | None = None,
        call: str | None = None,
    ) -> Work[dict[str, float]]:
        """The loss over all rows as one mini-batch, without an update; one micro-batch per `next()`.

        Arguments as in `train`; a frozen role has it too.

        Returns:
            `{role}/loss`, `{role}/entropy` and what the loss logs, as one step of `train` over these rows would say
            them. Empty without rows; the loss alone, 0, where every token is masked.
        """
        call = call or f"{self.role}.evaluate"
        asked = self._asked(columns, loss, mask, whole_groups, batch_values, temperature)
        batch = MiniBatch(rows.ordered(), asked)
        if batch.totals.tokens == 0:
            return {f"{self.role}/loss": 0.0} if len(rows) else {}
        tally = Tally(batch)

        def take(micro: MicroBatch, outputs: Outputs) -> None:
            tally.add(micro, outputs, batch.share(micro, outputs, needs_gradient=False))

        micros = self._split(batch.rows, whole_groups)
        yield from counted(self._passes.forward(batch.rows, micros, asked.temperature, take, name=call), self.team)
        totals = tally.over(self.team, self.model.device)
        return {f"{self.role}/loss": totals.loss, **totals.means}

    def state(self) -> dict[str, Tensor]:
        """All that training on depends on, as tensors, of this rank's share (see MasterOptimizer.state); empty for a
        frozen role."""
        return {} if self._optimizer is None else self._optimizer.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue bit for bit where `state` was taken; working weights included. All ranks call it together.

        Raises:
            RunError: the state belongs to another model or dtype.
        """
        if self._optimizer is not None:
            self._optimizer.load_state(state)

    def holdings(self) -> dict[str, Holdings]:
        """Name of a flat tensor of `state` (masters, moments) → what every rank of the team holds of it, for moves, and
        for files that any layout can read. Its tensor is that of `buffers`. Empty for a frozen role."""
        return {} if self._optimizer is None else self._optimizer.holdings()

    def buffers(self) -> dict[str, Tensor]:
        """The flat tensors of `state`, the live ones: written in place by a move, and taken over by `load_state`."""
        return {} if self._optimizer is None else self._optimizer.buffers()

    def scratch(self) -> dict[str, Tensor]:
        """Flat tensors whose values no call leaves to the next."""
        return {} if self._optimizer is None else {"gradients": self._optimizer.gradients}

    def _score(
        self,
        rows: Rows,
        what: str,
        call: str | None,
        pick: Callable[[Outputs], Tensor | None],
        level: Level,
        temperature: float | None = None,
    ) -> Work[FloatArray]:
        call = call or f"{self.role}.{what}"
        is_language = isinstance(self.model, LanguageModel)
        if is_language != (what == "logprobs"):
            kind, calls = ("a language model", "logprobs") if is_language else ("a scalar model", "values and scores")
            raise RunError(f"{call}: role `{self.role}` is {kind}, which has {calls}")
        found = np.zeros(rows.shape_of(level))
        order = rows.order
        ordered = rows.ordered()

        def take(micro: MicroBatch, outputs: Outputs) -> None:
            output = pick(outputs)
            assert output is not None, f"{call}: the model gave no {what}"
            positions = [order[i] for i in micro.samples]
            places = positions if level is Level.SAMPLE else rows.token_places(positions)
            found[places] = output.double().cpu().numpy()

        micros, temperature = self._split(ordered), temperature or self._temperature
        yield from counted(self._passes.forward(ordered, micros, temperature, take, name=call), self.team)
        return summed(self.team, found, self.model.device)

    def _asked(
        self,
        columns: Mapping[str, Column],
        loss: Callable[..., Tensor],
        mask: Column | None,
        whole_groups: bool,
        batch_values: Mapping[Column, FloatArray],
        temperature: float | None,
    ) -> LossCall:
        return LossCall(
            role=self.role,
            loss=loss,
            columns=columns,
            batch_values=batch_values,
            mask=mask,
            whole_groups=whole_groups,
            temperature=temperature or self._temperature,
            max_response_tokens=self._max_response_tokens,
        )

    def _mini_batch(self, batch: MiniBatch, name: str, *, first: bool) -> Work[MiniBatchResult]:
        assert self._optimizer is not None
        if batch.totals.tokens == 0:
            return MiniBatchResult({f"{self.role}/loss": 0.0}, None)
        self._optimizer.zero_gradients()
        rows, asked = batch.rows, batch.call
        tally = Tally(batch, sees=first and isinstance(self.model, LanguageModel))
        yield from self._passes.train(
            rows,
            self._split(rows, asked.whole_groups),
            asked.temperature,
            self._optimizer,
            partial(batch.share, needs_gradient=True),
            tally.add,
            name=name,
        )
        totals = tally.over(self.team, self.model.device)
        rollout = {}
        if totals.seen is not None:
            rollout = rollout_comparison(totals.seen[0], totals.seen[1], totals.seen[2], rows)
        report = self._optimizer.step(totals.loss_is_finite)
        yield Done(f"{name}/step", "STEP", 0)
        metrics = {f"{self.role}/loss": totals.loss, **totals.means, f"{self.role}/grad_norm": report.grad_norm}
        return MiniBatchResult(metrics, report, totals.tokens, totals.num_nonfinite, rollout)

    def _split(self, rows: Rows, whole_groups: bool = False) -> tuple[MicroBatch, ...]:
        """The micro-batches of this rank."""
        return split_over(
            sizes_of(rows),
            self._micro_batch_tokens,
            ways=self.team.dp.size,
            least=self._micro_batches,
            share_prompts=self._share_prompts,
            whole_groups=whole_groups,
        )[self.team.dp.index]
