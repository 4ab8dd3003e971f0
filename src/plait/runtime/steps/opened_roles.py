"""Opens the roles of a flow: the ranks with their models, the engines over them, and the functions that reward.

A reward that is not trained comes from functions, from frozen scalar models, or from both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from plait.data.records import FinishReason, Sample
from plait.data.replies import ReplyEncoder
from plait.engines import GenerationEngine
from plait.observe.progress import ProgressSink
from plait.recipes.role_models import filled_roles, reward_settings, scoring_models
from plait.recipes.turn_checks import rounds_by_prompt
from plait.rewards.pool import RewardPool
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.inputs.tokenizers import load_tokenizer
from plait.runtime.steps.between_steps import BetweenSteps
from plait.runtime.steps.conversing import Conversing, Replies
from plait.runtime.steps.function_reports import FunctionReports
from plait.runtime.steps.reward_pools import Pools, open_pools
from plait.runtime.steps.roles import FurtherRole, ModelRole, RewardRole, RoleRuntime, Roles
from plait.runtime.steps.scorer import ModelScorer, translator_for
from plait.runtime.workers import Workers
from plait.workers.recorder import Recorder


@dataclass(frozen=True)
class OpenedRoles:
    """The roles of a flow, and all that computes for them."""

    workers: Workers
    roles: Roles
    eval_functions: RewardPool | None
    """Functions of evaluations; None: there are none."""
    between_steps: BetweenSteps
    """Drives what is computed between steps. Its clock drives the steps, too."""


def open_roles(
    prepared: Prepared,
    join: Callable[[], Workers],
    recorder: Recorder,
    progress: ProgressSink,
    stack: ExitStack,
    output: Path | None = None,
) -> OpenedRoles:
    """Start the functions of a recipe, have all ranks load their models, and give each role its engines.

    Args:
        join: gives all ranks, with their models loaded.
        recorder: gets the actions of all calls.
        stack: closes the functions, and ends the processes that engines have for themselves.
        output: file for what functions print; None: it goes where this process prints.

    Raises:
        UserError: functions or models cannot be loaded, the data lack a column that a function needs, or a reward model
            cannot read the first prompt of a source.
        RunError: a rank could not load its models.
    """
    pools = open_pools(prepared, stack, output)
    workers = join()
    stack.callback(workers.end_engines)
    roles = _roles(prepared, workers, pools, recorder, progress.message)
    for pool in pools.all:
        pool.looked = workers.tick
    return OpenedRoles(
        workers, roles, pools.eval_functions, BetweenSteps(workers.clock(pools.all, progress), recorder, progress)
    )


def _roles(
    prepared: Prepared, workers: Workers, pools: Pools, recorder: Recorder, tell: Callable[[str], None]
) -> dict[str, RoleRuntime]:
    """
    Args:
        tell: is told how the function that replies has failed, if the run goes on; and what a reward model does not
            read.
    """
    replies = None if pools.replies is None else Replies(pools.replies, FunctionReports(recorder, tell))
    scorers = _scorers(prepared, workers, tell)
    roles: dict[str, RoleRuntime] = {}
    for model in prepared.models:
        mine, trainer = workers.model(model.role), workers.trainer(model.role)
        if model.is_reward:
            further = {name: scorers[role] for name, role in filled_roles(prepared.recipe)[model.role].items()}
            roles[model.role] = RewardRole(pools.rewards.get(model.role), scorers[model.role], mine, further)
            continue
        if model.reward:
            roles[model.role] = FurtherRole(scorers[model.role], mine)
            continue
        engine = workers.engine(model.role)
        if engine is not None and replies is not None:
            engine = _conversing(prepared, engine, replies)
        roles[model.role] = ModelRole(mine, trainer, engine)
    for role, pool in pools.rewards.items():
        roles.setdefault(role, RewardRole(pool))
    return roles


def _scorers(prepared: Prepared, workers: Workers, tell: Callable[[str], None]) -> dict[str, ModelScorer]:
    """Role → what scores by its model, for each that scores for a reward. Raises UserError as `_try_prompts`."""
    actor = next((model for model in prepared.models if model.role == "actor"), None)
    weights = {each.role: each.weight for each in scoring_models(prepared.recipe)}
    scorers: dict[str, ModelScorer] = {}
    for model in (model for model in prepared.models if model.reward):
        tokenizer = load_tokenizer(model.name, model.key)
        translator = None if actor is None else translator_for(load_tokenizer(actor.name), tokenizer, model.key, tell)
        shape = prepared.shapes[model.name]
        known = shape.vocabulary if max(tokenizer.get_vocab().values(), default=0) >= shape.vocabulary else None
        scorers[model.role] = scorer = ModelScorer(
            workers.trainer(model.role),
            translator,
            shape.max_positions,
            weights[model.role],
            model.key,
            reward_settings(model.reward, prepared.recipe).on_error,
            known,
        )
        _try_prompts(prepared, scorer)
    return scorers


def _conversing(prepared: Prepared, engine: GenerationEngine, replies: Replies) -> GenerationEngine:
    """An engine whose samples have several turns."""
    shape, most = prepared.shape, prepared.recipe.turns.max_turns
    encoder = ReplyEncoder(prepared.tokenizer, shape.vocabulary, prepared.recipe.turns.replier or "")
    by_prompt = rounds_by_prompt(prepared.recipe)
    return Conversing(engine, replies, encoder, most, shape.max_positions, by_prompt=by_prompt)


def _try_prompts(prepared: Prepared, scorer: ModelScorer) -> None:
    """Raises UserError where a reward model cannot read the first prompt of a source with an answer."""
    for prompts in () if prepared.train_set is None else prepared.train_set.sets:
        scorer.translated([Sample(prompts.prompt(0, 0), 0, (), (), "yes", FinishReason.LENGTH)])
