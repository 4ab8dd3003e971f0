"""What the flows that train a policy have in common: which log-probs they need, where the KL goes, the train call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from plait.algorithms.kl import KLPlace, reward_to_go, subtract_kl
from plait.algorithms.losses import Ratio, policy_loss
from plait.algorithms.options import PolicyOptions
from plait.dataflow import Level, Role, Samples, per_sample
from plait.dataflow.handles import ColumnHandle
from plait.errors import FlowError


@dataclass(frozen=True)
class PolicyLogprobs:
    """The log-prob columns of one flow; a column that the flow can do without is None and never computed."""

    options: PolicyOptions
    kl_in: KLPlace
    ref: ColumnHandle | None
    """Of the reference, where there is a KL."""
    start: ColumnHandle | None
    """Of the policy that the batch begins with, where the KL is in the reward or the batch is used more than once.
    A batch used once is on-policy: its old log-probs are the new ones."""

    @property
    def in_reward(self) -> tuple[ColumnHandle, ColumnHandle] | None:
        """Those of the policy and of the reference that make the KL in the reward; None where there is none."""
        if self.ref is None or self.start is None or self.kl_in is not KLPlace.REWARD:
            return None
        return self.start, self.ref

    @property
    def old(self) -> ColumnHandle | None:
        """For the loss."""
        return self.start if self.options.updates > 1 else None

    def off_score(self, scores: ColumnHandle, name: str) -> ColumnHandle:
        """The score of each response less its KL, where the KL is in the reward; else the scores."""
        if self.in_reward is None:
            return scores
        return per_sample(subtract_kl, scores, *self.in_reward, name=name, **self._kl)

    def to_go(self, scores: ColumnHandle, name: str) -> ColumnHandle:
        """The return from each token on, where the KL is in the reward; else the scores, the same for every token."""
        if self.in_reward is None:
            return scores
        return per_sample(reward_to_go, scores, *self.in_reward, name=name, level=Level.TOKEN, **self._kl)

    @property
    def _kl(self) -> dict[str, object]:
        return {"kl_coef": self.options.kl_coef, "estimator": self.options.kl_estimator}


def policy_logprobs(
    actor: Role, ref: Role | None, samples: Samples, options: PolicyOptions, kl_in: KLPlace
) -> PolicyLogprobs:
    """Ask for the log-probs that a flow needs.

    Raises:
        FlowError: `kl_coef` > 0 and nothing fills the role `ref`.
    """
    if options.kl_coef > 0 and ref is None:
        raise FlowError(
            "kl_coef > 0 needs the role `ref`, which nothing fills; set options.kl_coef to 0 or give a reference"
        )
    ref_logprobs = ref.logprobs(samples) if ref is not None and options.kl_coef > 0 else None
    needed = options.updates > 1 or (ref_logprobs is not None and kl_in is KLPlace.REWARD)
    return PolicyLogprobs(options, kl_in, ref_logprobs, actor.logprobs(samples) if needed else None)


def train_policy(
    actor: Role,
    samples: Samples,
    advantages: ColumnHandle,
    logprobs: PolicyLogprobs,
    *,
    ratio: Ratio = Ratio.TOKEN,
    keep: ColumnHandle | None = None,
) -> None:
    """Train the actor by `policy_loss`, on advantages per sample or per token.

    Args:
        keep: SAMPLE column; samples where it is 0 take no part.
    """
    options = logprobs.options
    actor.train(
        samples,
        loss=partial(
            policy_loss,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
            aggregation=options.aggregation,
            ratio=ratio,
            kl_coef=options.kl_coef if logprobs.kl_in is KLPlace.LOSS else 0.0,
            kl_estimator=options.kl_estimator,
        ),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        keep=keep,
        advantages=advantages,
        old_logprobs=logprobs.old,
        ref_logprobs=logprobs.ref,
    )
