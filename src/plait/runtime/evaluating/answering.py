"""Answer held-out prompts and score the answers: without a side effect on the run's draws or its data order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plait.data.records import Prompt, Sample
from plait.engines import GenerationEngine
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.observe.progress import Progress
from plait.rewards.pool import RewardPool
from plait.rewards.scores import GroupScores
from plait.runtime.evaluating.evaluation import Evaluation, logged_means, task_of
from plait.runtime.steps.roles import RewardRole


class EvaluationStopped(Exception):
    """An evaluation was left between two items because a stop was asked for."""


@dataclass(frozen=True)
class HeldOut:
    """What is asked of a model."""

    prompts: Sequence[Prompt]
    sampling: SamplingSettings
    temperature: float = 0.0
    """0 answers greedily. Above it the draws are those of `seed`, the same in every evaluation."""
    seed: int = 0
    per_item: int = 1
    """Answers to each prompt."""
    pass_at: tuple[int, ...] = ()
    """Numbers k of pass@k that are asked for."""


@dataclass(frozen=True)
class Scorers:
    """What scores the answers."""

    reward: RewardRole | None
    """The recipe's, as `cost`; None where the flow has none."""
    cost: RewardRole | None
    judges: RewardPool | None
    """Functions that judge only."""

    def pools(self) -> dict[str, RewardPool]:
        """The functions of each, where it has some."""
        pools = {
            "reward": self.reward and self.reward.pool,
            "cost": self.cost and self.cost.pool,
            "judges": self.judges,
        }
        return {name: pool for name, pool in pools.items() if pool is not None}


def answer(
    engine: GenerationEngine,
    asked: HeldOut,
    scorers: Scorers,
    progress: Progress,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Answer every prompt and score the answers.

    Args:
        stop: asked between items; when it says True the evaluation is left, and `engine` and the pools keep their
            work.

    Raises:
        RunError: a reward function failed and its policy is to stop.
        EvaluationStopped: `stop` said so.
    """
    sampling = asked.sampling.sampling(temperature=asked.temperature)
    for prompt in asked.prompts:
        engine.add(Request(prompt, asked.per_item, sampling, NoiseKey(asked.seed)))
    progress.phase("evaluate", len(asked.prompts) * asked.per_item, "items" if asked.per_item == 1 else "answers")
    samples, scored = _answer(engine, scorers.pools(), progress, stop)
    answers = tuple(samples[prompt.uid, index] for prompt in asked.prompts for index in range(asked.per_item))
    groups = {name: [scores_of_all[_place(sample)] for sample in answers] for name, scores_of_all in scored.items()}
    judged = _judged(answers, scorers.cost, groups)
    of_reward = groups.get("reward")
    extras = tuple({name: values[0] for name, values in group.extras.items()} for group in of_reward or ())
    return Evaluation(
        samples=answers,
        rewards=() if scorers.reward is None else _totals(answers, scorers.reward, of_reward),
        task=task_of([logged.get("verdict") for logged in extras], asked.per_item),
        extras=extras,
        logged={name: mean for scores_of_all in groups.values() for name, mean in logged_means(scores_of_all).items()},
        judged=judged,
        per_item=asked.per_item,
        pass_at=asked.pass_at,
    )


def _place(sample: Sample) -> tuple[int, int]:
    return sample.prompt.uid, sample.index


def _answer(
    engine: GenerationEngine, pools: Mapping[str, RewardPool], progress: Progress, stop: Callable[[], bool]
) -> tuple[dict[tuple[int, int], Sample], dict[str, dict[tuple[int, int], GroupScores]]]:
    """Run the engine until all is answered, and each answer scored by every pool: samples and scores by their place
    (prompt uid, index)."""
    samples: dict[tuple[int, int], Sample] = {}
    scored: dict[str, dict[tuple[int, int], GroupScores]] = {name: {} for name in pools}

    def collect(name: str, groups: Sequence[GroupScores]) -> None:
        for group in groups:
            scored[name][_place(group.samples[0])] = group
            for trouble in (*group.failures, *group.recovered):
                progress.message(f"evaluation: {trouble}")

    while engine.has_work:
        if stop():
            raise EvaluationStopped
        _, finished = engine.advance("evaluate")
        for sample in finished:
            samples[_place(sample)] = sample
            for pool in pools.values():
                pool.submit([sample])
        for name, pool in pools.items():
            collect(name, pool.poll())
        progress.advance(len(finished))
    for name, pool in pools.items():
        collect(name, pool.wait())
    return samples, scored


def _judged(
    samples: tuple[Sample, ...], cost: RewardRole | None, groups: Mapping[str, Sequence[GroupScores]]
) -> dict[str, tuple[float, ...]]:
    """Scores of the role `cost` and of each judge; a judge of that name is `cost#2`."""
    judged: dict[str, tuple[float, ...]] = {}
    if cost is not None:
        judged["cost"] = _totals(samples, cost, groups.get("cost"))
    of_judges = groups.get("judges", ())
    for name in of_judges[0].scores if of_judges else ():
        judged[f"{name}#2" if name in judged else name] = tuple(group.scores[name][0] for group in of_judges)
    return judged


def _totals(samples: tuple[Sample, ...], role: RewardRole, scores: Sequence[GroupScores] | None) -> tuple[float, ...]:
    """The weighted scores of a role, those of its functions and of its model together."""
    totals = np.zeros(len(samples)) if scores is None else np.array([group.rewards[0] for group in scores])
    if role.scorer is not None:
        totals = totals + role.scorer.weight * role.scorer.trainer.finish(role.scorer.scores(samples, call="evaluate"))
    return tuple(totals.tolist())
