"""Advantages of newer papers, each a function of a few lines, a baseline that each prompt keeps, and KL-Cov.

plait train examples/my_recipe.yaml --algorithm examples/newer_advantages.py:newer --options.advantage pass_at_k

`tracked` needs a column `index` in the data, the prompts' numbers from 0. It takes one sample of each prompt, so leave
`samples_per_prompt` out of its recipe.
"""

from math import ceil, comb
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from plait.dataflow import Level, Prompts, Role, carried, per_batch, per_group


class Options(BaseModel):
    advantage: Literal["maxrl", "pass_at_k", "best", "tracked"] = "maxrl"
    k: int = Field(2, ge=1)
    """Of `pass_at_k`."""
    num_prompts: int = Field(1000, ge=1)
    """Of `tracked`: the indices are below it."""
    covariant: float = Field(0.0, ge=0, lt=1)
    """Share of the tokens of a batch that a KL to the policy of its beginning holds (Cui et al. 2025, KL-Cov, arXiv
    2505.22617: 0.002 and less): those that drive the entropy down."""
    mini_batches: int = 1
    epochs: int = 1


def newer(prompts: Prompts, actor: Role, reward: Role, options: Options) -> None:
    """The flow."""
    samples = actor.generate(prompts, samples_per_prompt=1 if options.advantage == "tracked" else None)
    scores, old = reward.score(samples), actor.logprobs(samples)
    keep = None
    match options.advantage:
        case "maxrl":
            advantages = per_group(maxrl, scores, name="advantages", least_samples=2)
        case "pass_at_k":
            advantages = per_group(pass_at_k, scores, name="advantages", least_samples=options.k, k=options.k)
        case "best":
            advantages = keep = per_group(best, scores, name="advantages", least_samples=2)
        case "tracked":
            tracker = carried("tracker", [0.5, 8.0] * options.num_prompts)
            index = samples.data("index")
            after = per_batch(tracked, tracker, scores, index, name="next_tracker", level=Level.BATCH)
            advantages = per_batch(above, tracker, scores, index, name="advantages")
            tracker.becomes(after)
    held = None
    if options.covariant > 0:
        held = per_batch(most_covariant, old, advantages, name="held", level=Level.TOKEN, share=options.covariant)
    actor.train(
        samples,
        loss=clipped,
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        keep=keep,
        advantages=advantages,
        old_logprobs=old,
        held=held,
    )


def maxrl(scores: np.ndarray) -> np.ndarray:
    """(r − mean r) / mean r, of scores of 0 and 1: an estimate of the gradient of log pass rate, to as many orders as
    the group has samples (MaxRL, Tajwar et al. 2026)."""
    mean = scores.mean()
    return (scores - mean) / mean if mean > 0 else np.zeros(len(scores))


def pass_at_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Of each sample the mean advantage of all groups of k that it is in, whose reward is that of their best (pass@k
    training, Chen et al. 2025, arXiv 2508.10751). Scores above 0.5 are right; 0 where all groups are alike."""
    right = scores > 0.5
    count, wrong = len(scores), int((~right).sum())
    if count < k:
        return np.zeros(count)
    mean = 1 - comb(wrong, k) / comb(count, k)
    deviation = np.sqrt(mean * (1 - mean))
    if deviation == 0:
        return np.zeros(count)
    of_wrong = 1 - mean - comb(wrong - 1, k - 1) / comb(count - 1, k - 1)
    return np.where(right, 1 - mean, of_wrong) / deviation


def best(scores: np.ndarray) -> np.ndarray:
    """1 for the best sample of the group, 0 for the others, and where all are alike: distilled into the policy (RAFT,
    Dong et al. 2023, arXiv 2304.06767)."""
    chosen = np.zeros(len(scores))
    if np.ptp(scores) > 0:
        chosen[scores.argmax()] = 1.0
    return chosen


def above(tracker: np.ndarray, scores: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Scores less what their prompts got before, standardised over the batch (SPO, Xu & Ding 2025, arXiv 2509.13232,
    with a weight that fades by 0.9 in place of one that follows the KL)."""
    gains = scores - tracker.reshape(-1, 2)[rows_of(index, tracker), 0]
    return (gains - gains.mean()) / (gains.std() + 1e-8)


def rows_of(index: np.ndarray, tracker: np.ndarray) -> np.ndarray:
    """The prompts' rows in the table, [samples] of whole numbers."""
    num_prompts = len(tracker) // 2
    fits = (index == index.astype(int)) & (index >= 0) & (index < num_prompts)
    if not fits.all():
        raise ValueError(f"`index`: expected whole numbers from 0 to {num_prompts - 1}, found {index[~fits][0]}")
    return index.astype(int)


def tracked(tracker: np.ndarray, scores: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Per prompt the mean of what it got so far and its weight, older scores counting 0.9 times as much each time."""
    table = tracker.reshape(-1, 2).copy()
    for score, place in zip(scores, rows_of(index, tracker), strict=True):
        weight = 0.9 * table[place, 1] + 1
        table[place] = table[place, 0] + (score - table[place, 0]) / weight, weight
    return table.ravel()


def most_covariant(logprobs: list[np.ndarray], advantages: np.ndarray, share: float) -> list[np.ndarray]:
    """1 at the tokens of the highest (log π − mean log π) · (A − mean A) of the batch, so many of all, else 0. A part
    of a token counts as one."""
    every = np.concatenate(logprobs)
    of_tokens = [np.full(len(part), advantage) for part, advantage in zip(logprobs, advantages, strict=True)]
    mean = np.concatenate(of_tokens).mean()
    products = [(part - every.mean()) * (a - mean) for part, a in zip(logprobs, of_tokens, strict=True)]
    held, highest = np.zeros(len(every)), np.argsort(-np.concatenate(products), kind="stable")
    held[highest[: ceil(share * len(every))]] = 1.0
    return np.split(held, np.cumsum([len(part) for part in logprobs])[:-1])


def clipped(batch: Any, advantages: Any, old_logprobs: Any, held: Any = None) -> Any:
    """The clipped surrogate, and |log ρ| at the tokens that are held."""
    log_ratios = batch.logprobs - old_logprobs
    ratios = log_ratios.exp()
    values = -(ratios * advantages).minimum(ratios.clamp(0.8, 1.2) * advantages)
    return batch.aggregate(values if held is None else values + held * log_ratios.abs(), "token-mean")
