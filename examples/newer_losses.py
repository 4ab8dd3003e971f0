"""GRPO's flow with losses that are not built in, a function of a few lines each, or on uncertain tokens alone.

plait train examples/my_recipe.yaml --algorithm examples/newer_losses.py:newer --options.loss topr --options.epochs 2
"""

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from plait.dataflow import Level, Prompts, Role, per_batch, per_group


class Options(BaseModel):
    loss: Literal["topr", "gpg"] = "topr"
    uncertain: float = Field(1.0, gt=0, le=1)
    """Share of the tokens of a batch that are trained, and counted: those of the highest entropy. (Wang et al. 2025,
    arXiv 2506.01939: 0.2; there the loss is divided by the number of all tokens.)"""
    mini_batches: int = 1
    epochs: int = 1


def newer(prompts: Prompts, actor: Role, reward: Role, options: Options) -> None:
    """The flow: the advantage is GRPO's."""
    samples = actor.generate(prompts)
    advantages = per_group(standardised, reward.score(samples), name="advantages", least_samples=2)
    mask = None
    if options.uncertain < 1:
        entropies = actor.entropies(samples)
        mask = per_batch(highest, entropies, name="uncertain", level=Level.TOKEN, share=options.uncertain)
    actor.train(
        samples,
        loss={"topr": topr, "gpg": gpg}[options.loss],
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        mask=mask,
        advantages=advantages,
        old_logprobs=actor.logprobs(samples) if options.loss == "topr" else None,
    )


def standardised(rewards: np.ndarray) -> np.ndarray:
    """Rewards of a group less their mean, over their standard deviation."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4) if len(rewards) > 1 else np.zeros(len(rewards))


def highest(values: list[np.ndarray], share: float) -> list[np.ndarray]:
    """1 at the highest numbers of the batch, so many of all, else 0; an array per sample."""
    limit = np.quantile(np.concatenate(values), 1 - share)
    return [(of_sample >= limit).astype(float) for of_sample in values]


def topr(batch: Any, advantages: Any, old_logprobs: Any) -> Any:
    """−A · w · log π of whole responses. A good one is learnt as it stands, w = 1; a bad one by its ratio to the policy
    that a step begins with, held constant, and at most 1: what is said no more is not pushed further down (tapered
    off-policy REINFORCE, Le Roux et al. 2025, arXiv 2503.14286)."""
    ratios = batch.sequence_sum(batch.logprobs.detach() - old_logprobs).clamp(max=0).exp()
    weights = ratios.where(advantages < 0, 1.0)
    return batch.aggregate(-weights * advantages * batch.sequence_sum(batch.logprobs), "seq-mean-token-mean")


def gpg(batch: Any, advantages: Any) -> Any:
    """−A · log π, without any ratio (group policy gradient, Chu et al. 2025, arXiv 2504.02546, without its factor for
    groups of equal rewards)."""
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")
