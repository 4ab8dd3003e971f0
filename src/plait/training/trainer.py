"""The training engine of one role: scores rows, and trains on them, a micro-batch at a time.

Both calls are generators: each `next()` does one action and yields a record of it, so that a worker may do something
else in between. What a call returns is the generator's return value.

Shapes: R response tokens of a micro-batch, in row order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from plait.data.packed import PackedBatch, pack
from plait.data.rows import FloatArray, Rows
from plait.dataflow import Column, Level
from plait.models.language_model import LanguageModel
from plait.policy.packing import MicroBatch, SampleSize, draw_mini_batches, split_micro_batches
from plait.training.loss_batch import MicroBatchLoss, MiniBatchTotals, TokenMeans, loss_share
from plait.training.optimizer import MasterOptimizer, StepReport
from plait.training.settings import OptimizerSettings


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
    report: StepReport
    tokens_computed: int
    logprobs: FloatArray
    """[R of the mini-batch], before the step."""
    sampling_logprobs: FloatArray


class Trainer:
    """See the top of the file. Without `optimizer` the role is frozen and only scores.

    A trained bfloat16 model must get new weights through `load_state`: what is written into its working weights
    otherwise is overwritten by the masters at the next step.

    Args:
        total_optimizer_steps: of the whole run; where the learning-rate schedule ends.
        micro_batch_tokens: most packed tokens of one forward, prompts included; one longer sample runs alone.
        temperature: the sampling temperature, which log-probs are taken at.
        max_response_tokens: the response limit, denominator of the constant aggregation.
        checkpoint_activations: recompute layer activations in the backward pass.
        seed: of the run; fixes the mini-batches together with step and epoch.
        share_prompts: compute a group's prompt once. False gives the same result and is here to show that it does.
    """

    def __init__(
        self,
        model: LanguageModel,
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
    ) -> None:
        assert temperature > 0, f"log-probs need a temperature above 0, got {temperature}"
        assert optimizer is None or (total_optimizer_steps > 0 and max_response_tokens > 0), (
            "a trained role needs total_optimizer_steps and max_response_tokens"
        )
        self.model = model
        self.role = role
        self._optimizer = None if optimizer is None else MasterOptimizer(model, optimizer, total_optimizer_steps)
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._checkpoint_activations = checkpoint_activations
        self._seed = seed
        self._share_prompts = share_prompts
        model.module.requires_grad_(optimizer is not None)

    def logprobs(self, rows: Rows, *, call: str | None = None) -> Generator[Done, None, FloatArray]:
        """Score: log-probs of the response tokens under the current weights; one micro-batch per `next()`.

        The result does not depend on the order of `rows`: micro-batches are made in the order of `Rows.ordered`.

        Args:
            call: name of the call in the flow, prefix of the action ids; `{role}.logprobs` unless told.

        Returns:
            [rows.num_tokens] float64 (exact values of the float32 computed), in the order of `rows`.
        """
        call = call or f"{self.role}.logprobs"
        logprobs = np.zeros(rows.num_tokens)
        order = sorted(range(len(rows)), key=lambda i: (rows.samples[i].prompt.uid, rows.samples[i].index))
        ordered = rows.select(order)
        for number, micro in enumerate(self._split(ordered)):
            with torch.no_grad():
                logprobs_R, _ = self.model.logprobs(self._pack(ordered, micro), self._temperature)
            logprobs[rows.token_places([order[i] for i in micro.samples])] = logprobs_R.double().cpu().numpy()
            yield Done(f"{call}/mb{number}", "SCORE", micro.num_tokens)
        return logprobs

    def train(
        self,
        rows: Rows,
        columns: Mapping[str, Column],
        loss: Callable[..., Tensor],
        *,
        mini_batches: int,
        epochs: int,
        step: int,
        call: str | None = None,
    ) -> Generator[Done, None, dict[str, float]]:
        """Train: `epochs` passes over `mini_batches` mini-batches; one micro-batch or optimizer step per `next()`.

        The result does not depend on the order of `rows`.

        Args:
            columns: argument of the loss → column of `rows` (a node's `inputs`). SAMPLE columns are spread to tokens.
            loss: `loss(batch, **columns)`, see `plait.algorithms.losses.LossBatch`.
            step: training step of the run, part of the mini-batch draw.
            call: name of the call in the flow, prefix of the action ids; `{role}.train` unless told.

        Returns:
            Metrics. What the loss logs, `{role}/entropy` (nats, at the sampling temperature) and `{role}/loss`: token
            means (the loss: as aggregated) of each mini-batch, then the mean over optimizer steps; likewise
            `{role}/grad_norm`, before clipping. Skipped steps are left out of these means and counted in
            `training/skipped_steps`. `{role}/lr` is that of the last step. `training/rollout_*` compare the forward of
            the first mini-batch, before its step, with the sampling engine, over tokens. `training/tokens_computed`
            counts packed tokens; `training/tokens_unshared` what they would be with every sample's own prompt.

        Raises:
            RunError: the loss returns what is not a loss; several optimizer steps in a row were not finite.
        """
        assert self._optimizer is not None, f"role {self.role} is frozen"
        call = call or f"{self.role}.train"
        rows = rows.ordered()
        ids = [(sample.prompt.uid, sample.index) for sample in rows.samples]
        results: list[_MiniBatchResult] = []
        for epoch in range(epochs):
            for members in draw_mini_batches(ids, mini_batches, seed=self._seed, step=step, epoch=epoch):
                name = f"{call}/b{len(results)}"
                results.append((yield from self._mini_batch(rows.select(members), columns, loss, name)))
        unshared = epochs * sum(len(s.prompt.token_ids) + len(s.token_ids) for s in rows.samples)
        return self._metrics(results, unshared)

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

    def _mini_batch(
        self, rows: Rows, columns: Mapping[str, Column], loss: Callable[..., Tensor], name: str
    ) -> Generator[Done, None, _MiniBatchResult]:
        assert self._optimizer is not None
        self._optimizer.zero_gradients()
        totals = MiniBatchTotals.of(rows, self._max_response_tokens)
        means = TokenMeans(totals.tokens)
        logprobs = np.zeros(rows.num_tokens)
        loss_value, tokens = 0.0, 0
        for number, micro in enumerate(self._split(rows)):
            share, logprobs_R = self._forward_backward(rows, micro, columns, loss, totals, means)
            logprobs[rows.token_places(micro.samples)] = logprobs_R
            loss_value += share
            tokens += micro.num_tokens
            yield Done(f"{name}/mb{number}", "TRAIN", micro.num_tokens)
        report = self._optimizer.step(math.isfinite(loss_value))
        yield Done(f"{name}/step", "STEP", 0)
        metrics = {f"{self.role}/loss": loss_value, **means.result(), f"{self.role}/grad_norm": report.grad_norm}
        return _MiniBatchResult(metrics, report, tokens, logprobs, rows.sampling_logprobs)

    def _forward_backward(
        self,
        rows: Rows,
        micro: MicroBatch,
        columns: Mapping[str, Column],
        loss: Callable[..., Tensor],
        totals: MiniBatchTotals,
        means: TokenMeans,
    ) -> tuple[float, FloatArray]:
        """Add one micro-batch's gradients to the flat buffer. Returns its share of the loss, and its log-probs [R]."""
        assert self._optimizer is not None
        logprobs_R, entropies_R = self.model.logprobs(
            self._pack(rows, micro), self._temperature, checkpoint=self._checkpoint_activations
        )
        lengths = np.diff(rows.offsets)[list(micro.samples)]
        places = rows.token_places(micro.samples)

        def to_tokens(values: FloatArray) -> Tensor:
            return torch.as_tensor(values, dtype=logprobs_R.dtype, device=logprobs_R.device)

        def column_R(column: Column) -> Tensor:
            values = rows.columns[column]
            if column.level is Level.TOKEN:
                return to_tokens(values[places])
            return to_tokens(np.repeat(values[list(micro.samples)], lengths))

        batch = MicroBatchLoss(
            logprobs_R,
            entropies_R,
            to_tokens(rows.sampling_logprobs[places]),
            lengths.tolist(),
            totals,
            means,
        )
        batch.log(f"{self.role}/entropy", entropies_R)
        share = loss_share(loss, batch, {name: column_R(column) for name, column in columns.items()})
        with self._optimizer.collecting_gradients():
            share.backward()
        return float(share.detach()), logprobs_R.detach().double().cpu().numpy()

    def _split(self, rows: Rows) -> tuple[MicroBatch, ...]:
        sizes = [SampleSize(s.prompt.uid, len(s.prompt.token_ids), len(s.token_ids)) for s in rows.samples]
        return split_micro_batches(sizes, self._micro_batch_tokens, share_prompts=self._share_prompts)

    def _pack(self, rows: Rows, micro: MicroBatch) -> PackedBatch:
        groups = [
            (rows.samples[members[0]].prompt.token_ids, [rows.samples[i].token_ids for i in members])
            for members in micro.groups
        ]
        return pack(groups, self.model.device)

    def _metrics(self, results: Sequence[_MiniBatchResult], unshared: int) -> dict[str, float]:
        applied = [result.metrics for result in results if not result.report.skipped]
        names = dict.fromkeys(name for metrics in applied for name in metrics)
        metrics = {name: fmean(m[name] for m in applied if name in m) for name in names}
        metrics |= {
            "training/optimizer_steps": len(results),
            "training/skipped_steps": len(results) - len(applied),
            "training/tokens_computed": sum(result.tokens_computed for result in results),
            "training/tokens_unshared": unshared,
        }
        if results:
            metrics[f"{self.role}/lr"] = results[-1].report.learning_rate
            metrics |= rollout_comparison(results[0].logprobs, results[0].sampling_logprobs)
        return metrics


def rollout_comparison(logprobs: FloatArray, sampling_logprobs: FloatArray) -> dict[str, float]:
    """How far the trainer's log-probs are from the sampling engine's, both [R]; empty for no token.

    `training/rollout_probs_diff_mean|max`: |p_train − p_sampling| of the sampled tokens. `training/rollout_kl`: k3
    estimate of KL(sampling ‖ training), mean of w − 1 − log w with w = p_train / p_sampling (Schulman 2020).
    `training/rollout_ess`: effective sample size (Σw)² / Σw² over the number of tokens, 1 where they agree. Empty too
    where the forward was not finite: its step was skipped and counted.
    """
    if not len(logprobs) or not np.isfinite(logprobs).all():
        return {}
    difference = np.abs(np.exp(logprobs) - np.exp(sampling_logprobs))
    log_ratio = np.clip(logprobs - sampling_logprobs, -20.0, 20.0)
    weights = np.exp(log_ratio)
    return {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_kl": float((weights - 1 - log_ratio).mean()),
        "training/rollout_ess": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }
