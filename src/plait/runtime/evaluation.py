"""Evaluation on held-out prompts: greedy, isolated, without a side effect on the run's draws or its data order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.data.records import Prompt, Sample
from plait.generation.engine import Engine
from plait.generation.noise import NoiseKey
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.observe.progress import Progress
from plait.rewards import evaluation as verdicts
from plait.rewards.pool import RewardPool


@dataclass(frozen=True)
class Evaluation:
    """What a model answered, item by item, in the order of the held-out prompts."""

    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    """NaN where no function applies."""
    task: verdicts.Evaluation | None
    """The verdicts of a task's scorer; None where the reward is the user's own."""

    def metrics(self) -> dict[str, float]:
        """`eval/reward`, and for a task `eval/accuracy` (exact), its 95 % Wilson interval, `eval/well_formed` and
        `eval/accuracy_well_formed`."""
        metrics = {
            "eval/reward": float(np.nanmean(self.rewards)) if np.isfinite(self.rewards).any() else float("nan"),
            "eval/response_length": float(np.mean([len(sample.token_ids) for sample in self.samples])),
        }
        if self.task is not None:
            exact, among = self.task.exact, self.task.exact_among_well_formed
            metrics |= {
                "eval/accuracy": exact.value,
                "eval/accuracy_low": exact.low,
                "eval/accuracy_high": exact.high,
                "eval/well_formed": self.task.well_formed.value,
                "eval/accuracy_well_formed": among.value if among is not None else 0.0,
            }
        return metrics

    def rows(self) -> list[dict[str, Any]]:
        """One record per item, for a samples file."""
        return [
            {
                "uid": sample.uid,
                "prompt": sample.prompt.text,
                "response": sample.text,
                "reward": reward,
                "verdict": self.task.verdicts[place].value if self.task else None,
                "finish_reason": sample.finish_reason.value,
                "token_ids": list(sample.token_ids),
            }
            for place, (sample, reward) in enumerate(zip(self.samples, self.rewards, strict=True))
        ]


def evaluate(
    engine: Engine, pool: RewardPool, prompts: Sequence[Prompt], settings: SamplingSettings, progress: Progress
) -> Evaluation:
    """Answer every prompt greedily and score the answers.

    Raises:
        RunError: a reward function failed and its policy is to stop.
    """
    for prompt in prompts:
        engine.add(Request(prompt, 1, settings.sampling(temperature=0.0), NoiseKey(0)))
    progress.phase("evaluate", len(prompts), "items")
    while engine.has_work:
        finished = engine.step()
        for sample in finished:
            pool.submit([sample])
        progress.advance(len(finished))
    scored = {group.samples[0].prompt.uid: group for group in pool.wait()}
    groups = [scored[prompt.uid] for prompt in prompts]
    has_verdicts = any("verdict" in group.extras for group in groups)
    return Evaluation(
        samples=tuple(group.samples[0] for group in groups),
        rewards=tuple(group.rewards[0] for group in groups),
        task=verdicts.evaluation_of(groups) if has_verdicts else None,
    )
