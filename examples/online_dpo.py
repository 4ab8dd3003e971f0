"""Online DPO (Guo et al. 2024, arXiv 2402.04792): of the responses to each prompt the best and the worst are a pair.

plait train examples/my_recipe.yaml --algorithm examples/online_dpo.py:online_dpo
"""

from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from plait.algorithms.losses import minus_log_sigmoid, of_samples
from plait.dataflow import Prompts, Role, per_group


class Options(BaseModel):
    beta: float = Field(0.1, gt=0)
    """Inverse temperature: how far the policy may move from the reference."""
    mini_batches: int = 1
    epochs: int = 1


def online_dpo(prompts: Prompts, actor: Role, ref: Role, reward: Role, options: Options) -> None:
    """The flow."""
    samples = actor.generate(prompts)
    sides = per_group(best_and_worst, reward.score(samples), name="sides", least_samples=2)
    actor.train(
        samples,
        loss=partial(pair_loss, beta=options.beta),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        keep=per_group(np.abs, sides, name="kept"),
        whole_groups=True,
        sides=sides,
        ref_logprobs=ref.logprobs(samples),
    )


def best_and_worst(scores: np.ndarray) -> np.ndarray:
    """1 for the best sample of the group, −1 for the worst; 0 for the others, and where all are alike."""
    sides = np.zeros_like(scores)
    if np.ptp(scores) > 0:
        sides[scores.argmax()], sides[scores.argmin()] = 1.0, -1.0
    return sides


def pair_loss(batch: Any, sides: Any, ref_logprobs: Any, *, beta: float) -> Any:
    """−log σ(β · (log-ratio of the better − log-ratio of the worse)), mean over pairs (DPO, eq. 7)."""
    first, second = batch.pairs(batch.per_sequence(batch.logprobs - ref_logprobs))
    side_of_first, _ = batch.pairs(of_samples(batch, sides))
    margins = beta * side_of_first * (first - second)
    batch.log("rewards/margins", margins, per="pair")
    return batch.mean_over_pairs(minus_log_sigmoid(margins))
