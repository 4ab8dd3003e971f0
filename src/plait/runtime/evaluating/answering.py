"""Answer held-out prompts and score the answers: without a side effect on the run's draws or its data order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from plait.data.records import Sample
from plait.dataflow import CallKind
from plait.engines import GenerationEngine
from plait.generation.request import Request
from plait.kernels.noise import NoiseKey
from plait.metric_names import with_logged
from plait.recipes.recipe import Recipe
from plait.rewards.pool import RewardPool
from plait.rewards.scores import NONE, GroupScores
from plait.runtime.evaluating.evaluation import Evaluation, logged_means, task_of
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.inputs.held_out import HeldOut
from plait.runtime.steps.between_steps import BetweenSteps
from plait.runtime.steps.engine_loop import engine_loop
from plait.runtime.steps.function_reports import FunctionReports
from plait.runtime.steps.roles import ModelRole, RewardRole
from plait.schedule.work import MOVED_ON, Work

CALL = "evaluate"
"""What it is in the trace."""


class EvaluationStopped(Exception):
    """An evaluation was left between two items because a stop was asked for."""


@dataclass(frozen=True)
class Scorers:
    """What scores the answers."""

    reward: RewardRole | None
    """The recipe's, as `cost`; None where the flow has none."""
    cost: RewardRole | None
    eval_functions: RewardPool | None
    """Those of `evaluation.functions`."""

    def pools(self) -> dict[str, RewardPool]:
        """The pool of functions of each reward that has functions."""
        pools = {
            "reward": self.reward and self.reward.pool,
            "cost": self.cost and self.cost.pool,
            "eval_functions": self.eval_functions,
        }
        return {name: pool for name, pool in pools.items() if pool is not None}


def answer(
    actor: ModelRole,
    held_out: Sequence[HeldOut],
    recipe: Recipe,
    scorers: Scorers,
    between_steps: BetweenSteps,
    *,
    stop: Callable[[], bool],
) -> Evaluations:
    """Answer every prompt of all sets, together, and score the answers.

    Args:
        actor: has an engine.
        recipe: says where responses stop, and the seed of what is drawn.
        stop: asked between items; when it says True the evaluation is left, and its engine and the pools keep
            their work.

    Raises:
        RunError: a reward function failed and its policy is to stop.
        EvaluationStopped: `stop` said so.
    """
    assert actor.engine is not None, "who answers generates"
    per_item: dict[int, int] = {}
    for one in held_out:
        sampling = one.answering.sampling(recipe.sampling)
        for prompt in one.prompts:
            per_item[prompt.uid] = one.answering.samples_per_prompt
            actor.engine.add(Request(prompt, per_item[prompt.uid], sampling, NoiseKey(recipe.seed)))
    count = sum(per_item.values())
    between_steps.progress.phase(CALL, count, "items" if count == len(per_item) else "answers")
    scored = _FunctionScores(scorers.pools(), per_item, between_steps)
    ranks = actor.trainer.mesh(CallKind.GENERATE, begins=True)
    samples = between_steps.run(CALL, _answered(actor.engine, scored, stop), ranks, actor.trainer.role)
    return Evaluations({one.label: _evaluation(one, samples, scored, scorers, between_steps) for one in held_out})


def _evaluation(
    held_out: HeldOut,
    samples: Mapping[tuple[int, int], Sample],
    scored: _FunctionScores,
    scorers: Scorers,
    between_steps: BetweenSteps,
) -> Evaluation:
    """What a set measures, of whose answers all functions have said what they give; models score them now."""
    per_item = held_out.answering.samples_per_prompt
    answers = tuple(samples[prompt.uid, index] for prompt in held_out.prompts for index in range(per_item))
    of_functions = scored.of(answers)
    totals, of_models = dict[str, tuple[float, ...]](), dict[str, tuple[float, ...]]()
    for name, role in (("reward", scorers.reward), ("cost", scorers.cost)):
        if role is not None:
            of_role = _of_models(answers, role, between_steps)
            totals[name] = _totals(answers, role, of_functions.get(name), of_role)
            of_models |= {f"{name}s/{model}": scores for model, scores in of_role.items()}
    extras = _extras(of_functions, _told(of_models, len(answers)))
    measured = Evaluation(
        samples=answers,
        rewards=totals.get("reward", ()),
        task=task_of([logged.get("verdict") for logged in extras], per_item),
        extras=extras,
        per_item=per_item,
        pass_at=held_out.answering.pass_at,
    )
    taken = {name.removeprefix("eval/") for name in measured.metrics()}
    further = _further(totals.get("cost"), of_functions.get("eval_functions", ()), taken)
    groups = [scored.group for of_all in of_functions.values() for scored in of_all if scored.place == 0]
    return replace(measured, further=further, logged=_logged(groups, taken | further.keys()))


def _place(sample: Sample) -> tuple[int, int]:
    return sample.prompt.uid, sample.index


class _Scored(NamedTuple):
    """What functions say of an answer: the scores of all answers to its prompt, and its place among them."""

    group: GroupScores
    place: int

    @property
    def extras(self) -> dict[str, Any]:
        return {name: values[self.place] for name, values in self.group.extras.items()}


class _FunctionScores:
    """What the functions of some pools say of answers. They get all answers to a prompt together, as in training."""

    def __init__(
        self, pools: Mapping[str, RewardPool], per_item: Mapping[int, int], between_steps: BetweenSteps
    ) -> None:
        """`per_item`: uid of each prompt → how many answers it gets."""
        self._pools = pools
        self._per_item = per_item
        self._report = FunctionReports(between_steps.recorder, between_steps.progress.message)
        self._unscored: dict[int, list[Sample]] = {}
        """Prompt uid → its answers, while some are still to come."""
        self._scores: dict[str, dict[tuple[int, int], _Scored]] = {name: {} for name in pools}
        """Pool → place of a sample → its scores."""

    @property
    def are_left(self) -> bool:
        """Whether some are still to come."""
        return any(pool.num_outstanding for pool in self._pools.values())

    def submit(self, sample: Sample) -> None:
        answers = self._unscored.setdefault(sample.prompt.uid, [])
        answers.append(sample)
        if len(answers) < self._per_item[sample.prompt.uid]:
            return
        del self._unscored[sample.prompt.uid]
        for pool in self._pools.values():
            pool.submit(sorted(answers, key=_place))

    def collect(self) -> bool:
        """Take in what is there, and record it; whether there was anything. Raises RunError as `RewardPool.poll`."""
        has_news = False
        for name, pool in self._pools.items():
            for group in pool.poll():
                has_news = True
                for place, sample in enumerate(group.samples):
                    self._scores[name][_place(sample)] = _Scored(group, place)
                self._report(CALL, name, group)
        return has_news

    def of(self, samples: Sequence[Sample]) -> dict[str, list[_Scored]]:
        """Pool → the scores of these samples, when none are left."""
        return {name: [scores[_place(sample)] for sample in samples] for name, scores in self._scores.items()}


def _answered(
    engine: GenerationEngine, scored: _FunctionScores, stop: Callable[[], bool]
) -> Work[dict[tuple[int, int], Sample]]:
    """Samples by their place, when all is answered, and each answer scored by every pool."""
    samples: dict[tuple[int, int], Sample] = {}

    def go_on_unless_asked_to_stop() -> None:
        if stop():
            raise EvaluationStopped

    def take(finished: Sequence[Sample]) -> bool:
        for sample in finished:
            samples[_place(sample)] = sample
            scored.submit(sample)
        return scored.collect()

    yield from engine_loop(engine, CALL, take, before=go_on_unless_asked_to_stop)
    while scored.are_left:
        yield MOVED_ON if scored.collect() else None
    return samples


def _told(of_models: Mapping[str, tuple[float, ...]], count: int) -> list[dict[str, float | None]]:
    """Per answer what each model has given it, as `GroupScores.told` says it of functions."""
    return [
        {name: None if math.isnan(scores[place]) else scores[place] for name, scores in of_models.items()}
        for place in range(count)
    ]


def _extras(
    of_functions: Mapping[str, Sequence[_Scored]], of_models: Sequence[dict[str, float | None]]
) -> tuple[dict[str, Any], ...]:
    """Per answer what each function and each model of the reward and of the cost gave it, and the columns that the
    reward's functions and `evaluation.functions` logged. A column of both is the reward's, but for the verdicts of the
    others where the reward's are none of a task."""
    whole: list[dict[str, Any]] = [{} for _ in of_models]
    for name in ("reward", "cost"):
        if name in of_functions:
            pairs = zip(whole, of_functions[name], strict=True)
            whole = [told | group.told(place, name) for told, (group, place) in pairs]
    whole = [told | of_answer for told, of_answer in zip(whole, of_models, strict=True)]
    logged = [
        [scored.extras for scored in of_functions[name]]
        for name in ("reward", "eval_functions")
        if name in of_functions
    ]
    logged.sort(key=lambda columns: task_of([of_answer.get("verdict") for of_answer in columns], 1) is None)
    for columns in logged:
        whole = [with_logged(told, more, is_metric=False) for told, more in zip(whole, columns, strict=True)]
    return tuple(whole)


def _further(
    cost: tuple[float, ...] | None, of_eval: Sequence[_Scored], taken: Collection[str]
) -> dict[str, tuple[float, ...]]:
    """Scores of the role `cost` and of each of `evaluation.functions`; one of that name is `cost#2`, and so for a name
    that is taken by what is measured of answers."""
    further = {} if cost is None else {"cost": cost}
    for name in of_eval[0].group.scores if of_eval else ():
        title = f"{name}#2" if name in further or name in taken else name
        further[title] = tuple(group.scores[name][place] for group, place in of_eval)
    return further


def _logged(groups: Sequence[GroupScores], taken: Collection[str]) -> dict[str, float]:
    """Means of what functions logged, of all groups; and where the data have several sources, of each as `SOURCE/…`."""
    means = logged_means(groups)
    names = dict(zip(means, list(with_logged(dict.fromkeys(taken), means))[len(taken) :], strict=True))
    by_source: dict[str, list[GroupScores]] = {}
    for group in groups:
        by_source.setdefault(group.samples[0].prompt.source, []).append(group)
    of_sources = {
        f"{source}/{names[name]}": mean
        for source, of_source in by_source.items()
        if source
        for name, mean in logged_means(of_source).items()
    }
    return of_sources | {names[name]: mean for name, mean in means.items()}


def _of_models(
    samples: tuple[Sample, ...], role: RewardRole, between_steps: BetweenSteps
) -> dict[str, tuple[float, ...]]:
    """Name of the scores of each model of a role → its scores, before weights; NaN where nobody could reply."""
    none, scores = _none(samples), dict[str, tuple[float, ...]]()
    for name, scorer in role.scorers.items():
        trainer = scorer.trainer
        ranks = trainer.mesh(CallKind.SCORE, begins=True)
        scores[name] = tuple(
            (none + between_steps.run(CALL, scorer.scores(samples, call=CALL), ranks, trainer.role)).tolist()
        )
    return scores


def _totals(
    samples: tuple[Sample, ...],
    role: RewardRole,
    scores: Sequence[_Scored] | None,
    of_models: Mapping[str, tuple[float, ...]],
) -> tuple[float, ...]:
    """The weighted scores of a role, of its functions and its models together; NaN where nobody could reply."""
    totals = _none(samples) if scores is None else np.array([group.rewards[place] for group, place in scores])
    for name, scorer in role.scorers.items():
        totals = totals + scorer.weight * np.array(of_models[name])
    return tuple(totals.tolist())


def _none(samples: Sequence[Sample]) -> np.ndarray:
    """Nothing of each answer; no score of one to which nobody could reply."""
    return np.array([NONE if sample.reply_error else 0.0 for sample in samples])
