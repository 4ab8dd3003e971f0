"""What the flows that train a policy have in common: which log-probs they need, where the KL goes, the train call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from plait.algorithms.kl import KLController, KLPlace, adapted_kl_coef, mean_kl, reward_to_go, subtract_kl
from plait.algorithms.losses import cross_entropy, policy_loss
from plait.algorithms.options import LogprobSource, PolicyOptions
from plait.algorithms.surrogates import Ratio
from plait.dataflow import Generated, Given, Level, Role, Samples, carried, per_batch, per_sample
from plait.dataflow.handles import ColumnHandle
from plait.errors import FlowError


@dataclass(frozen=True)
class PolicyLogprobs:
    """The log-prob columns of one flow; a column that the flow can do without is None and never computed."""

    options: PolicyOptions
    kl_in: KLPlace
    ref: ColumnHandle | None
    """Log-probs of the reference, where there is a KL."""
    start: ColumnHandle | None
    """Log-probs of the policy that the batch begins with, or by `old_logprobs: engine` those that it was drawn with,
    where the KL is measured before training or the loss has a ratio to them (`PolicyOptions.compares`).
    """
    kl_coef: ColumnHandle | None
    """Weight of the KL where it adapts; None: that of the options."""

    @property
    def in_reward(self) -> bool:
        """Whether there is a KL in the reward."""
        return self.ref is not None and self.kl_in is KLPlace.REWARD

    @property
    def old(self) -> ColumnHandle | None:
        """For the loss."""
        return self.start if self.options.compares else None

    def off_score(self, scores: ColumnHandle) -> ColumnHandle:
        """The score of each response less its KL, where the KL is in the reward; else the scores."""
        return self.with_kl(subtract_kl, scores, "rewards", Level.SAMPLE) if self.in_reward else scores

    def to_go(self, scores: ColumnHandle, name: str) -> ColumnHandle:
        """The return from each token on, where the KL is in the reward; else the scores, the same for every token."""
        return self.with_kl(reward_to_go, scores, name, Level.TOKEN) if self.in_reward else scores

    def with_kl(
        self, fn: Callable[..., Any], scores: ColumnHandle, name: str, level: Level, **constants: Any
    ) -> ColumnHandle:
        """`fn(score, logprobs, ref_logprobs, kl_coef=…, estimator=…)` of each sample."""
        assert self.start is not None, "the KL in the reward is one of the policy that the batch begins with"
        assert self.ref is not None, "there is no KL without a reference"
        keywords = {"estimator": self.options.kl_estimator, **constants}
        if self.kl_coef is not None:
            return per_sample(fn, scores, self.start, self.ref, self.kl_coef, name=name, level=level, **keywords)
        keywords["kl_coef"] = self.options.kl_coef
        return per_sample(fn, scores, self.start, self.ref, name=name, level=level, **keywords)


def policy_logprobs(
    actor: Role, ref: Role | None, samples: Generated, options: PolicyOptions, kl_in: KLPlace
) -> PolicyLogprobs:
    """Ask for the log-probs that a flow needs. Where the weight of the KL adapts (`target_kl`), it begins at `kl_coef`
    and is the metric `kl_coef`.

    Raises:
        FlowError: `kl_coef` > 0 and nothing fills the role `ref`.
    """
    if options.kl_coef > 0 and ref is None:
        raise FlowError(
            "kl_coef > 0 needs the role `ref`, which nothing fills; set options.kl_coef to 0 or give a reference"
        )
    controller = options.kl_controller
    ref_logprobs = ref.logprobs(samples) if ref is not None and options.kl_coef > 0 else None
    measured = ref_logprobs is not None and (kl_in is KLPlace.REWARD or controller is not None)
    start = None
    if options.compares or measured:
        from_engine = options.old_logprobs is LogprobSource.ENGINE
        start = samples.logprobs if from_engine else actor.logprobs(samples)
    kl_coef = None
    if controller is not None and ref_logprobs is not None and start is not None:
        kl_coef = _adapting(controller, options, start, ref_logprobs)
    return PolicyLogprobs(options, kl_in, ref_logprobs, start, kl_coef)


def _adapting(controller: KLController, options: PolicyOptions, start: ColumnHandle, ref: ColumnHandle) -> ColumnHandle:
    kl_coef = carried("kl_coef", options.kl_coef)
    measured = per_batch(mean_kl, start, ref, name="objective/kl", level=Level.BATCH, estimator=options.kl_estimator)
    following = per_batch(
        adapted_kl_coef,
        kl_coef,
        measured,
        start,
        name="next_kl_coef",
        level=Level.BATCH,
        target=controller.target,
        horizon=controller.horizon,
    )
    kl_coef.becomes(following)
    return kl_coef


def learnt_beside(examples: Given | None, options: PolicyOptions) -> Given | None:
    """The examples that are in the loss beside samples; None: `ptx_coef` is 0.

    Raises:
        FlowError: `ptx_coef` > 0, and the flow is called without examples.
    """
    if options.ptx_coef > 0 and examples is None:
        raise FlowError("ptx_coef > 0 needs examples; set options.ptx_coef to 0, or call the flow with its `examples`")
    return examples if options.ptx_coef > 0 else None


def train_policy(
    actor: Role,
    samples: Samples,
    advantages: ColumnHandle,
    logprobs: PolicyLogprobs,
    *,
    examples: Given | None = None,
    ratio: Ratio = Ratio.TOKEN,
    keep: ColumnHandle | None = None,
    after: int = 0,
    weigh_kl: bool = False,
) -> None:
    """Train the actor by `policy_loss`, on advantages per sample or per token.

    Args:
        examples: as of `learnt_beside`: their cross entropy, times `ptx_coef`, is added to the loss of each optimizer
            step (PPO-ptx: Ouyang et al. 2022, arXiv 2203.02155, eq. 2). None: nothing is.
        keep: SAMPLE column; samples where it is 0 take no part.
        after: steps at the beginning of a run in which nothing is trained.
        weigh_kl: see `policy_loss`.
    """
    options, in_loss = logprobs.options, logprobs.kl_in is KLPlace.LOSS
    actor.train(
        samples,
        loss=partial(
            policy_loss,
            surrogate=options.surrogate(ratio),
            aggregation=options.aggregation,
            kl_coef=options.kl_coef if in_loss else 0.0,
            kl_estimator=options.kl_estimator,
            weigh_kl=weigh_kl,
            entropy_coef=options.entropy_coef,
            correction=options.corrected,
            off_policy_mask_threshold=options.off_policy_mask_threshold,
        ),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        keep=keep,
        after=after,
        with_next=examples is not None,
        advantages=advantages,
        old_logprobs=logprobs.old,
        ref_logprobs=logprobs.ref,
        kl_coef=logprobs.kl_coef if in_loss else None,
    )
    if examples is not None:
        actor.train(
            examples,
            loss=partial(cross_entropy, coef=options.ptx_coef, name="actor/ptx_loss"),
            mask=examples.trained,
            mini_batches=options.mini_batches,
            epochs=options.epochs,
            after=after,
        )
