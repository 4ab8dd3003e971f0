"""GRPO on own samples and learning from demonstrations in the same optimizer steps: CHORD, and LUFFY.

    plait train examples/my_recipe.yaml --algorithm examples/demonstrated.py:demonstrated \
        --data.source examples/demonstrations.jsonl --pretraining.source examples/demonstrations.jsonl

`chord` (Zhang et al. 2025, arXiv 2508.11408): (1 - mu) times the loss of GRPO, and mu times the cross entropy of
demonstrations, which may be of any prompts; mu falls from step to step. `luffy` (Yan et al. 2025, arXiv 2504.14945):
the demonstration of a prompt is one more sample of its group, drawn by another policy. For that both sources have the
same rows, each with a column `index` of its own.
"""

from functools import partial
from math import cos, pi
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from plait.dataflow import Given, Level, Prompts, Role, carried, per_batch, per_group


class Options(BaseModel):
    mix: Literal["chord", "luffy"] = "chord"
    weights: Literal["one", "phi", "entropy"] = "phi"
    """Of the tokens of demonstrations in `chord`: 1, CHORD's p (1 - p), or exp(-H) / 2, as SRFT (Fu et al. 2025, arXiv
    2506.19767) weighs them, here with the entropy of each token."""
    mu_first: float = Field(0.9, ge=0, le=1)
    mu_last: float = Field(0.05, ge=0, le=1)
    mu_steps: int = Field(100, ge=1)
    """Steps from the first mu to the last, along a cosine."""
    gamma: float = Field(0.1, gt=0)
    """Of `luffy`: a token of probability p counts p / (p + gamma)."""
    mini_batches: int = 1
    epochs: int = 1


def demonstrated(prompts: Prompts, examples: Given, actor: Role, reward: Role, options: Options) -> None:
    """The flow: the first call leaves the gradients of each mini-batch to the second, which makes the step of both."""
    samples = actor.generate(prompts)
    scores, old = reward.score(samples), actor.logprobs(samples)
    how: dict[str, Any] = {"mini_batches": options.mini_batches, "epochs": options.epochs}
    demonstrations: dict[str, Any] = {}
    match options.mix:
        case "chord":
            advantages = per_group(standardised, scores, name="advantages", least_samples=2)
            steps = carried("steps_before", 0.0)
            steps.becomes(per_batch(one_more, steps, name="steps_done", level=Level.BATCH))
            schedule = {"first": options.mu_first, "last": options.mu_last, "steps": options.mu_steps}
            given = per_batch(mu_at, steps, name="mu", level=Level.BATCH, **schedule)
            learn = partial(imitated, weights=options.weights)
        case "luffy":
            shown = reward.score(examples)
            groups = scores, shown, samples.data("index"), examples.data("index")
            advantages = per_group(of_samples, *groups, name="advantages")
            demonstrations["advantages"] = per_group(
                of_demonstrations, shown, scores, examples.data("index"), samples.data("index"), name="shown_advantages"
            )
            given = per_batch(share_of_second, scores, shown, name="demonstrated", level=Level.BATCH)
            learn = partial(shaped, gamma=options.gamma)
    own = per_batch(rest, given, name="drawn", level=Level.BATCH)
    aggregation = "token-mean" if options.mix == "chord" else "seq-mean-token-sum-norm"
    clipping = partial(clipped, aggregation=aggregation)
    actor.train(samples, loss=clipping, with_next=True, weight=own, advantages=advantages, old_logprobs=old, **how)
    actor.train(examples, loss=learn, mask=examples.trained, weight=given, **demonstrations, **how)


def standardised(scores: np.ndarray) -> np.ndarray:
    return (scores - scores.mean()) / (scores.std() + 1e-4)


def of_samples(scores: np.ndarray, shown: np.ndarray, index: np.ndarray, shown_index: np.ndarray) -> np.ndarray:
    """Scores of the samples of a prompt less the mean of these and of its demonstration's (without a division by the
    deviation, as in Dr. GRPO)."""
    if len(shown) != 1 or (index != shown_index[0]).any():
        raise ValueError("`data.source` and `pretraining.source` have to be the same rows, each with its own `index`")
    return scores - np.concatenate([scores, shown]).mean()


def of_demonstrations(shown: np.ndarray, scores: np.ndarray, shown_index: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The same of the demonstration; 0 where the prompt lost all of its samples."""
    del shown_index, index
    return shown - np.concatenate([scores, shown]).mean()


def one_more(steps: float) -> float:
    return steps + 1


def mu_at(steps_done: float, first: float, last: float, steps: int) -> float:
    """Along half a cosine, then `last`."""
    return last + (first - last) * (1 + cos(pi * min(1.0, steps_done / steps))) / 2


def share_of_second(scores: np.ndarray, shown: np.ndarray) -> float:
    """Of all samples of the step, how many are demonstrations."""
    return len(shown) / (len(scores) + len(shown))


def rest(share: float) -> float:
    return 1 - share


def clipped(batch: Any, weight: Any, advantages: Any, old_logprobs: Any, aggregation: str) -> Any:
    """PPO's surrogate, times a weight."""
    ratios = (batch.logprobs - old_logprobs).exp()
    values = -(ratios * advantages).minimum(ratios.clamp(0.8, 1.2) * advantages)
    return weight * batch.aggregate(values, aggregation)


def imitated(batch: Any, weight: Any, weights: str) -> Any:
    """The cross entropy, times a weight, and of each token a weight that has no gradient."""
    batch.log("actor/nll", -batch.logprobs)
    of_tokens = 1.0
    if weights == "phi":
        probabilities = batch.logprobs.detach().exp()
        of_tokens = probabilities * (1 - probabilities)
    elif weights == "entropy":
        of_tokens = 0.5 * (-batch.entropies.detach()).exp()
    return weight * batch.aggregate(-of_tokens * batch.logprobs, "token-mean")


def shaped(batch: Any, weight: Any, advantages: Any, gamma: float) -> Any:
    """LUFFY's policy shaping: the ratio to a policy that is certain of its demonstration is p, which counts
    p / (p + gamma), so that unlikely tokens have a gradient."""
    batch.log("actor/nll", -batch.logprobs)
    probabilities = batch.logprobs.exp()
    return weight * batch.aggregate(-advantages * probabilities / (probabilities + gamma), "seq-mean-token-sum-norm")
