"""A flow whose steps are generation; training would begin behind the last step that a benchmark runs."""

from __future__ import annotations

from typing import Any

from placed.fusion_flow import NEVER, Options
from plait.dataflow import Prompts, Role


def generated(prompts: Prompts, actor: Role, reward: Role, options: Options) -> None:
    samples = actor.generate(prompts)
    rewards = reward.score(samples)
    actor.train(samples, loss=policy_loss, after=NEVER, rewards=rewards)


def policy_loss(batch: Any, rewards: Any) -> Any:
    return -batch.aggregate(rewards * batch.logprobs, "token-mean")
