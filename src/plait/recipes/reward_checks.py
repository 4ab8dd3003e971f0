"""Whether every reward that a flow scores by is made of something, and no key of it or of evaluations is unread. Loads
no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.dataflow import CallKind, Dataflow
from plait.dataflow.graph import scores_alone, scores_by_turn, scores_decoupled
from plait.dataflow.unfit import nearest
from plait.errors import ConfigError, FlowError
from plait.recipes.evaluation_sets import evaluation_sets
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import LEARNT, REWARD_ROLES, reward_of, reward_settings, scoring_models
from plait.rewards.functions import TASK, WELL_FORMED, RewardFunction
from plait.rewards.scores import MODEL
from plait.rewards.settings import RewardSettings
from plait.settings import Settings

LIMITS = ("timeout_s", "workers", "max_concurrency", "memory_gb", "on_error")
"""Keys of a reward that hold for the functions of evaluations, too."""

OF_SETS = ("temperature", "top_p", "top_k", "min_p", "max_response_tokens", "samples_per_prompt", "pass_at")
"""Keys of evaluations, and of their sets, that are about what a model answers."""


def check_rewards(flow: Dataflow, recipe: Recipe, *, has_task: bool) -> None:
    """Raises ConfigError where a reward that the flow scores by is made of nothing."""
    for role in REWARD_ROLES:
        settings, kinds = reward_settings(role, recipe), flow.call_kinds(role)
        if kinds:
            lets_be = recipe.lets_be(role)
            _check_used(role, settings, scores="score" in kinds, flow=flow.name, lets_be=lets_be)
        if "score" not in kinds or settings.models or settings.functions:
            continue
        if role == "cost" or not has_task:
            raise ConfigError(
                f"the flow `{flow.name}` scores by the role `{role}`, which nothing fills: set `{role}.functions` "
                f"(FILE.py:FUNCTION or package.module:function) or `{role}.model` (a reward model)"
            )
    _check_critics(flow, recipe)


def _check_critics(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where several models score, and nothing says which one the critic begins as."""
    for critic, reward in LEARNT.items():
        models, stated = reward_settings(reward, recipe).models, getattr(recipe, critic).model
        if critic in flow.roles and len(models) > 1 and stated is None:
            raise ConfigError(
                f"`{critic}.model` is not set, and the role `{critic}` begins as the model that scores the same, but "
                f"`{reward}.model` names {len(models)}; set `{critic}.model`, such as to `{models[0]}` (with its "
                f"head) or to `{recipe.model}` (it gets a new head)"
            )


def check_evaluation(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where evaluations say more of answers than is read: of a flow without any, of where they are,
    or of an accuracy that is measured twice or by nothing; or where a reward that is nobody's says more than limits."""
    settings, generates = recipe.evaluation, bool(flow.of_kind(CallKind.GENERATE))
    of_task = {TASK, WELL_FORMED} & set(settings.functions)
    scores = "score" in flow.call_kinds("reward")
    if "reward" not in flow.roles:
        why = f"the flow `{flow.name}` has no role `reward` (`evaluation.functions` have its limits alone)"
        _refuse_set("reward", recipe.reward, {key: why for key in RewardSettings.model_fields if key not in LIMITS})
    if recipe.lets_be("evaluation"):
        return
    silent = {} if generates else dict.fromkeys(OF_SETS, f"the flow `{flow.name}` generates nothing")
    unread = dict(silent)
    if not generates:
        unread["functions"] = f"the flow `{flow.name}` generates nothing"
    if not of_task:
        unread["answer"] = "neither `task` nor `well_formed` is among `evaluation.functions`"
    _refuse_set("evaluation", settings, unread)
    for place, own in enumerate(settings.sets):
        _refuse_set(f"evaluation.sets.{place}", own, silent)
    _check_task_sets(flow, recipe)
    if scores and TASK in of_task & _names_of(recipe.reward):
        raise ConfigError(
            "`evaluation.functions` names `task`, but so does the reward, which evaluations take the accuracy from; "
            "remove it, or take `task` out of `reward.functions`"
        )
    if any(one.answering.pass_at for one in evaluation_sets(recipe)) and not scores and TASK not in of_task:
        raise ConfigError(
            f"`evaluation.pass_at` is set, but the flow `{flow.name}` has no reward, and nothing says which answers "
            "are right; add `task` (the scorer of a reasoning_gym task) to `evaluation.functions`, or remove it"
        )


def _check_task_sets(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where answers are scored by the scorer of a task, and the items of a set are no task's."""
    scoring = {"evaluation.functions": {TASK, WELL_FORMED} & set(recipe.evaluation.functions)}
    if "score" in flow.call_kinds("reward"):
        scoring["reward.functions"] = {TASK, WELL_FORMED} & _names_of(recipe.reward)
    for one in evaluation_sets(recipe):
        for key, names in scoring.items():
            if names and one.source is not None and one.source.task is None:
                raise ConfigError(
                    f"`{one.section}.source` is `{one.source.source}` and no reasoning_gym:TASK, but `{key}` has "
                    f"`{min(names)}`, which scores answers to tasks alone; give a task, or name a function of yours "
                    "that scores both"
                )


def check_parts(flow: Dataflow, recipe: Recipe, functions: Mapping[str, Sequence[RewardFunction]]) -> None:
    """Raises FlowError where the flow asks for the scores of a function alone that its reward does not have, or for
    those of turns of what is no reward.

    Args:
        functions: of each role that has some.
    """
    for node in flow.of_kind(CallKind.SCORE):
        role = str(node.role)
        of_models = [each.scores for each in scoring_models(recipe) if each.reward == role]
        names = [*(function.name for function in functions.get(role, ())), *of_models]
        more = "" if len(of_models) < 2 else f", `{of_models[1]}` and so on for further ones"
        has = f"it has those of: {', '.join(names)} (`{role}.functions`, and `{MODEL}` for `{role}.model`{more})"
        if not reward_of(role):
            has = f"only the roles {' and '.join(REWARD_ROLES)} score by functions"
            if scores_by_turn(node) is not None:
                raise FlowError(f"flow `{flow.name}` asks {node.call} for the scores of turns (`by_turn`); {has}")
            if scores_decoupled(node) is not None:
                raise FlowError(f"flow `{flow.name}` asks {node.call} for `decoupled` scores; {has}")
        for name in scores_alone(node):
            if name not in names:
                raise FlowError(
                    f"flow `{flow.name}` asks {node.call} for the scores of `{name}` alone{nearest(name, names)}; {has}"
                )


def _names_of(settings: RewardSettings) -> set[str]:
    """What a reward names as its functions, or by default has."""
    return set(settings.functions or (() if settings.models else (TASK,)))


def _check_used(role: str, settings: RewardSettings, *, scores: bool, flow: str, lets_be: bool) -> None:
    """Raises ConfigError where a key of a reward says something that nothing reads."""
    alone = bool(settings.models) and not settings.functions
    unread: dict[str, str] = {}
    if not scores:
        why = f"the flow `{flow}` trains the role `{role}` as a model"
        unread = {key: why for key in RewardSettings.model_fields if key != "model"}
        if len(settings.models) > 1:
            raise ConfigError(f"`{role}.model` names {len(settings.models)} models, but {why}; give one")
    elif not settings.models:
        unread = {"model_weight": f"`{role}.model` is not"}
    of_task = {TASK, WELL_FORMED} & _names_of(settings)
    if scores and not lets_be and TASK not in of_task:
        unread["partial_credit"] = f"`task` is not among `{role}.functions`"
    if scores and not lets_be and not of_task:
        unread["answer"] = f"neither `task` nor `well_formed` is among `{role}.functions`"
    if alone:
        unread |= {"weights": f"they are of `{role}.functions`, of which there are none (see `{role}.model_weight`)"}
    _refuse_set(role, settings, unread)


def _refuse_set(section: str, settings: Settings, unread: Mapping[str, str]) -> None:
    """Raises ConfigError where one of these keys of a section is set.

    Args:
        unread: key → why nothing reads it.
    """
    default = type(settings)()
    for key, why in unread.items():
        if getattr(settings, key) != getattr(default, key):
            raise ConfigError(f"`{section}.{key}` is set, but {why}; remove it")
