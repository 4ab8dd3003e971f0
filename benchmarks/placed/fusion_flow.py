"""A flow whose steps are generation and scoring by three models; one sample of each group is trained on, so that
training takes little beside them. As in PPO, training reads all scores: none of it comes between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import BaseModel

from plait.dataflow import Prompts, Role, per_group


class Options(BaseModel):
    pass


def scored(prompts: Prompts, actor: Role, reward: Role, critic: Role, ref: Role, options: Options) -> None:
    samples = actor.generate(prompts)
    rewards = reward.score(samples)
    kept, values = ref.logprobs(samples), critic.values(samples)
    first = per_group(first_alone, rewards, name="first")
    actor.train(samples, loss=policy_loss, keep=first, kept=kept, old=values)
    critic.train(samples, loss=value_loss, keep=first, old=values)


def first_alone(rewards: np.ndarray) -> np.ndarray:
    """1 for the first sample of a group, 0 for the others."""
    alone = np.zeros_like(rewards)
    alone[0] = 1.0
    return alone


def policy_loss(batch: Any, kept: Any, old: Any) -> Any:
    return batch.aggregate((batch.logprobs - kept) ** 2 + 0.0 * old, "token-mean")


def value_loss(batch: Any, old: Any) -> Any:
    return batch.aggregate((batch.values - old) ** 2, "token-mean")
