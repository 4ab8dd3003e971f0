"""GRPO's flow with losses of other papers, each a function of a few lines, and training on uncertain tokens alone.

plait train examples/my_recipe.yaml --algorithm examples/newer_losses.py:newer --options.loss sapo
"""

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from plait.dataflow import Level, Prompts, Role, per_batch, per_group


class Options(BaseModel):
    loss: Literal["cispo", "gmpo", "sapo"] = "cispo"
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
        loss={"cispo": cispo, "gmpo": gmpo, "sapo": sapo}[options.loss],
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        mask=mask,
        advantages=advantages,
        old_logprobs=actor.logprobs(samples),
    )


def standardised(rewards: np.ndarray) -> np.ndarray:
    """Rewards of a group less their mean, over their standard deviation."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4) if len(rewards) > 1 else np.zeros(len(rewards))


def highest(values: list[np.ndarray], share: float) -> list[np.ndarray]:
    """1 at the highest numbers of the batch, so many of all, else 0; an array per sample."""
    limit = np.quantile(np.concatenate(values), 1 - share)
    return [(of_sample >= limit).astype(float) for of_sample in values]


def cispo(batch: Any, advantages: Any, old_logprobs: Any) -> Any:
    """−A · min(ρ, 5), held constant, · log π: a token that is clipped has a gradient too (MiniMax-M1, arXiv 2506.13585;
    the bound is that of ScaleRL, arXiv 2510.13786)."""
    weights = (batch.logprobs.detach() - old_logprobs).exp().clamp(max=5.0)
    return batch.aggregate(-weights * advantages * batch.logprobs, "token-mean")


def gmpo(batch: Any, advantages: Any, old_logprobs: Any) -> Any:
    """−A times the geometric mean of the ratios of a response, each of them clipped to e^±0.4 where it would gain (Zhao
    et al. 2025, arXiv 2507.20673)."""
    signs = advantages.sign()
    gains = signs * (batch.logprobs - old_logprobs)
    lengths = batch.per_sequence(batch.mask).clamp(min=1)
    ratios = (batch.per_sequence(signs * gains.clamp(max=0.4)) / lengths).exp()
    return batch.mean_over_sequences(-ratios * batch.per_sequence(advantages) / lengths)


def sapo(batch: Any, advantages: Any, old_logprobs: Any) -> Any:
    """−A · 4/τ · σ(τ (ρ − 1)), a soft gate in place of the clip; τ is 1 where A > 0, else 1.05 (Gao et al. 2025, arXiv
    2511.20347)."""
    taus = 1.05 - 0.05 * (advantages > 0).to(advantages.dtype)
    gates = (taus * ((batch.logprobs - old_logprobs).exp() - 1)).sigmoid() * 4 / taus
    return batch.aggregate(-gates * advantages, "seq-mean-token-mean")
