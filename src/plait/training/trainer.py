"""The training engine of one role: scores rows, trains and evaluates on them, a micro-batch at a time.

Every call is a generator: each `next()` does one action and yields a record of it, so that a worker may do something
else in between. What a call returns is the generator's return value.

Shapes: R response tokens, N samples, in row order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from plait.data.packed import PackedBatch, pack
from plait.data.rows import FloatArray, Rows
from plait.dataflow import Column, Level
from plait.errors import RunError
from plait.models.language_model import LanguageModel
from plait.models.scalar_model import ScalarModel
from plait.policy.packing import MicroBatch, SampleSize, draw_mini_batches, split_micro_batches
from plait.training.mini_batch import LossCall, MiniBatch, Outputs, mask_of
from plait.training.optimizer import MasterOptimizer, StepReport
from plait.training.rollout_check import coverage, rollout_comparison
from plait.training.settings import OptimizerSettings

COUNTS = frozenset(
    {
        "optimizer_steps",
        "skipped_steps",
        "nonfinite_losses",
        "nonfinite_gradients",
        "nonfinite_outputs",
        "masked_mini_batches",
        "tokens_computed",
        "tokens_unshared",
    }
)
"""Metrics of a `train` call that add up where a role is trained twice; they stand behind the last `/`."""

NO_VALUES: Mapping[Column, FloatArray] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Done:
    """One action that has just run."""

    action: str
    """Unique within a training step, such as `actor.train/b0/mb3` or `actor.train/b0/step`."""
    kind: str
    """SCORE (a forward), TRAIN (forward and backward) or STEP (an optimizer step)."""
    tokens: int
    """Tokens of the packed row that were computed; 0 for a STEP."""


@dataclass(frozen=True)
class _MiniBatchResult:
    metrics: dict[str, float]
    report: StepReport | None
    """None: every token is masked, so there was neither a forward nor a step."""
    tokens_computed: int = 0
    num_nonfinite: int = 0
    rollout: dict[str, float] = field(default_factory=dict)
    """Of the first mini-batch, before its step."""

    @property
    def is_applied(self) -> bool:
        return self.report is not None and not self.report.skipped


class Trainer:
    """See the top of the file. Without `optimizer` the role is frozen and only scores.

    The model is a language model (log-probs, entropies) or a scalar one (values, scores). Of its parameters the trained
    ones require gradients, and only while a training micro-batch runs: roles may share a module.

    A trained bfloat16 model must get new weights through `load_state`: what is written into its working weights
    otherwise is overwritten by the masters at the next step.

    Args:
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
    ) -> None:
        assert temperature > 0, f"log-probs need a temperature above 0, got {temperature}"
        assert optimizer is None or (total_optimizer_steps > 0 and max_response_tokens > 0), (
            "a trained role needs total_optimizer_steps and max_response_tokens"
        )
        self.model = model
        self.role = role
        model.module.requires_grad_(False)
        self._optimizer = None if optimizer is None else MasterOptimizer(model, optimizer, total_optimizer_steps)
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._checkpoint_activations = checkpoint_activations
        self._seed = seed
        self._share_prompts = share_prompts
        self._stop_token_ids = frozenset(model.eos_token_ids if stop_token_ids is None else stop_token_ids)
        # Several roles may train in one step: only the actor's counts go by the field's name for them.
        self._counts = "training" if role == "actor" else role

    def logprobs(
        self, rows: Rows, *, temperature: float | None = None, call: str | None = None
    ) -> Generator[Done, None, FloatArray]:
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

    def values(self, rows: Rows, *, call: str | None = None) -> Generator[Done, None, FloatArray]:
        """Score by a scalar model: the value of the state before each response token. As `logprobs` otherwise.

        Raises:
            RunError: the role is a language model.
        """
        return (yield from self._score(rows, "values", call, lambda outputs: outputs.values_R, Level.TOKEN))

    def scores(self, rows: Rows, *, call: str | None = None) -> Generator[Done, None, FloatArray]:
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
    ) -> Generator[Done, None, dict[str, float]]:
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
        ids = [(sample.prompt.uid, sample.index) for sample in rows.samples]
        results: list[_MiniBatchResult] = []
        steps = 0
        for epoch in range(epochs):
            draw = draw_mini_batches(
                ids, mini_batches, seed=self._seed, step=step, epoch=epoch, whole_groups=whole_groups
            )
            for members in draw:
                batch = MiniBatch(rows.select(members), asked)
                name = f"{call}/b{len(results)}"
                results.append((yield from self._mini_batch(batch, name, first=steps == 0)))
                steps += results[-1].report is not None
        unshared = epochs * sum(len(s.prompt.token_ids) + len(s.token_ids) for s in rows.samples)
        covered = coverage(rows, mask_of(rows, mask, self.role), self._stop_token_ids)
        return self._metrics(results, {"tokens_unshared": unshared, **covered})

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
    ) -> Generator[Done, None, dict[str, float]]:
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
        loss_value = 0.0
        for number, micro in enumerate(self._split(batch.rows, whole_groups)):
            with torch.no_grad():
                outputs = Outputs.of(self.model, self._pack(batch.rows, micro), asked.temperature)
                loss_value += float(batch.share(micro, outputs, needs_gradient=False))
            yield Done(f"{call}/mb{number}", "SCORE", micro.num_tokens)
        return {f"{self.role}/loss": loss_value, **batch.means.result()}

    def state(self) -> dict[str, Tensor]:
        """All that training on depends on, as tensors (see MasterOptimizer.state); empty for a frozen role."""
        return {} if self._optimizer is None else self._optimizer.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue bit for bit where `state` was taken; working weights included.

        Raises:
            RunError: the state belongs to another model or dtype.
        """
        if self._optimizer is not None:
            self._optimizer.load_state(state)

    def _score(
        self,
        rows: Rows,
        what: str,
        call: str | None,
        pick: Callable[[Outputs], Tensor | None],
        level: Level,
        temperature: float | None = None,
    ) -> Generator[Done, None, FloatArray]:
        call = call or f"{self.role}.{what}"
        found = np.zeros(rows.shape_of(level))
        order = sorted(range(len(rows)), key=lambda i: (rows.samples[i].prompt.uid, rows.samples[i].index))
        ordered = rows.select(order)
        for number, micro in enumerate(self._split(ordered)):
            with torch.no_grad():
                output = pick(Outputs.of(self.model, self._pack(ordered, micro), temperature or self._temperature))
            if output is None:
                kind, calls = (
                    ("a language model", "logprobs")
                    if isinstance(self.model, LanguageModel)
                    else ("a scalar model", "values and scores")
                )
                raise RunError(f"{call}: role `{self.role}` is {kind}, which has {calls}")
            positions = [order[i] for i in micro.samples]
            places = positions if level is Level.SAMPLE else rows.token_places(positions)
            found[places] = output.double().cpu().numpy()
            yield Done(f"{call}/mb{number}", "SCORE", micro.num_tokens)
        return found

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

    def _mini_batch(self, batch: MiniBatch, name: str, *, first: bool) -> Generator[Done, None, _MiniBatchResult]:
        assert self._optimizer is not None
        if batch.totals.tokens == 0:
            return _MiniBatchResult({f"{self.role}/loss": 0.0}, None)
        self._optimizer.zero_gradients()
        rows = batch.rows
        seen = np.zeros((2, rows.num_tokens))  # log-probs and entropies of a language model
        loss_value, tokens, num_nonfinite = 0.0, 0, 0
        for number, micro in enumerate(self._split(rows, batch.call.whole_groups)):
            share, outputs = self._forward_backward(batch, micro)
            loss_value += share
            tokens += micro.num_tokens
            num_nonfinite += outputs.num_nonfinite
            if first and outputs.logprobs_R is not None and outputs.entropies_R is not None:
                both = torch.stack([outputs.logprobs_R.detach(), outputs.entropies_R.detach()])
                seen[:, rows.token_places(micro.samples)] = both.double().cpu().numpy()
            yield Done(f"{name}/mb{number}", "TRAIN", micro.num_tokens)
        is_language = isinstance(self.model, LanguageModel)
        rollout = rollout_comparison(seen[0], rows.sampling_logprobs, seen[1], rows) if first and is_language else {}
        report = self._optimizer.step(math.isfinite(loss_value))
        yield Done(f"{name}/step", "STEP", 0)
        metrics = {f"{self.role}/loss": loss_value, **batch.means.result(), f"{self.role}/grad_norm": report.grad_norm}
        return _MiniBatchResult(metrics, report, tokens, num_nonfinite, rollout)

    def _forward_backward(self, batch: MiniBatch, micro: MicroBatch) -> tuple[float, Outputs]:
        """Add one micro-batch's gradients to the flat buffer. Returns its share of the loss, and the outputs."""
        assert self._optimizer is not None
        packed = self._pack(batch.rows, micro)
        with self._optimizer.collecting_gradients():
            outputs = Outputs.of(self.model, packed, batch.call.temperature, checkpoint=self._checkpoint_activations)
            share = batch.share(micro, outputs, needs_gradient=True)
            share.backward()
        return float(share.detach()), outputs

    def _split(self, rows: Rows, whole_groups: bool = False) -> tuple[MicroBatch, ...]:
        sizes = [SampleSize(s.prompt.uid, len(s.prompt.token_ids), len(s.token_ids)) for s in rows.samples]
        return split_micro_batches(
            sizes, self._micro_batch_tokens, share_prompts=self._share_prompts, whole_groups=whole_groups
        )

    def _pack(self, rows: Rows, micro: MicroBatch) -> PackedBatch:
        groups = [
            (rows.samples[members[0]].prompt.token_ids, [rows.samples[i].token_ids for i in members])
            for members in micro.groups
        ]
        return pack(groups, self.model.device)

    def _metrics(self, results: Sequence[_MiniBatchResult], counts: Mapping[str, float]) -> dict[str, float]:
        applied = [result.metrics for result in results if result.is_applied]
        if not applied:  # nothing was trained on: say the loss of it, 0
            applied = [result.metrics for result in results if result.report is None]
        names = dict.fromkeys(name for metrics in applied for name in metrics)
        metrics = {name: fmean(m[name] for m in applied if name in m) for name in names}
        reports = [result.report for result in results if result.report is not None]
        skipped = [report for report in reports if report.skipped]
        counts = {
            "optimizer_steps": len(reports),
            "skipped_steps": len(skipped),
            "nonfinite_losses": sum(not report.loss_is_finite for report in skipped),
            "nonfinite_gradients": sum(not math.isfinite(report.grad_norm) for report in skipped),
            "nonfinite_outputs": sum(result.num_nonfinite for result in results),
            "masked_mini_batches": len(results) - len(reports),
            "tokens_computed": sum(result.tokens_computed for result in results),
            **counts,
        }
        metrics |= {f"{self._counts}/{name}": value for name, value in counts.items()}
        if reports:
            metrics[f"{self.role}/lr"] = reports[-1].learning_rate
        return metrics | next((result.rollout for result in results if result.rollout), {})
