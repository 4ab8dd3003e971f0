"""A flow whose steps are generation and scoring by three models; training, which as in PPO reads all scores, would
begin behind the last step that a benchmark runs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from plait.dataflow import Prompts, Role

NEVER = 1_000_000
"""Steps before which nothing is trained on."""


class Options(BaseModel):
    pass


def scored(prompts: Prompts, actor: Role, reward: Role, critic: Role, ref: Role, options: Options) -> None:
    samples = actor.generate(prompts)
    rewards = reward.score(samples)
    kept, values = ref.logprobs(samples), critic.values(samples)
    actor.train(samples, loss=policy_loss, after=NEVER, rewards=rewards, kept=kept, old=values)
    critic.train(samples, loss=value_loss, after=NEVER, rewards=rewards, old=values)


def policy_loss(batch: Any, rewards: Any, kept: Any, old: Any) -> Any:
    return batch.aggregate((rewards - old) * (batch.logprobs - kept), "token-mean")


def value_loss(batch: Any, rewards: Any, old: Any) -> Any:
    return batch.aggregate((batch.values - rewards) ** 2 + 0.0 * old, "token-mean")
