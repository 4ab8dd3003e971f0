"""A whole algorithm in one file outside the package: flow, advantage, loss and their options.

    plait train examples/my_recipe.yaml --algorithm examples/my_flow.py:best_of_group

Each prompt's best response is pushed up and its worst pushed down; the rest of the group is left alone.
"""

from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel

from plait.dataflow import Prompts, Role, per_group


class Options(BaseModel):
    """Keys under `options:` in the recipe, or `--options.KEY` on the command line."""

    margin: float = 0.0
    """Groups whose rewards differ by no more than this teach nothing."""
    entropy_bonus: float = 0.0


def best_of_group(prompts: Prompts, actor: Role, reward: Role, options: Options) -> None:
    """The flow: runs once, on handles; plait keeps the graph of its calls."""
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    signs = per_group(best_and_worst, scores, name="advantages", margin=options.margin)
    actor.train(samples, loss=partial(signed_loss, entropy_bonus=options.entropy_bonus), advantages=signs)


def best_and_worst(scores: np.ndarray, margin: float) -> np.ndarray:
    """+1 for the best sample of the group, −1 for the worst, 0 for the others."""
    signs = np.zeros_like(scores)
    if scores.max() - scores.min() > margin:
        signs[scores.argmax()], signs[scores.argmin()] = 1.0, -1.0
    return signs


def signed_loss(batch: Any, advantages: Any, *, entropy_bonus: float) -> Any:
    """−A log π − bonus · entropy per token; `aggregate` divides by the tokens of the whole mini-batch, however the
    work is split over micro-batches and devices."""
    batch.log("actor/pushed", advantages.abs())
    return batch.aggregate(-advantages * batch.logprobs - entropy_bonus * batch.entropies, "token-mean")
