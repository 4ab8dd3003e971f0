"""Fills the roles of a flow. A reward that is not trained is of functions, of frozen scalar models, or of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plait.data.records import FinishReason, Sample
from plait.data.replies import ReplyEncoder
from plait.engines import GenerationEngine
from plait.recipes.role_models import filled_roles, reward_settings, scoring_models
from plait.recipes.turn_checks import rounds_by_prompt
from plait.rewards.pool import RewardPool
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.inputs.tokenizers import load_tokenizer
from plait.runtime.steps.conversing import Conversing, Replies
from plait.runtime.steps.function_reports import FunctionReports
from plait.runtime.steps.reward_pools import REPLIES
from plait.runtime.steps.roles import FurtherRole, ModelRole, RewardRole, RoleRuntime
from plait.runtime.steps.scorer import ModelScorer, translator_for
from plait.runtime.workers import Workers
from plait.workers.recorder import Recorder


def build_roles(
    prepared: Prepared,
    workers: Workers,
    pools: Mapping[str, RewardPool],
    recorder: Recorder,
    tell: Callable[[str], None],
) -> dict[str, RoleRuntime]:
    """Everything that the flow's roles need.

    Args:
        pools: of `open_pools`: reward role → its functions, and the one that replies.
        recorder: of the run.
        tell: is told how the function failed that replies, where the run goes on.

    Raises:
        UserError: a reward model cannot read the prompts of a source, as far as the first one tells.
    """
    replies = Replies(pools[REPLIES], FunctionReports(recorder, tell)) if REPLIES in pools else None
    scorers = _scorers(prepared, workers)
    roles: dict[str, RoleRuntime] = {}
    for model in prepared.models:
        mine, trainer = workers.model(model.role), workers.trainer(model.role)
        if model.is_reward:
            further = {name: scorers[role] for name, role in filled_roles(prepared.recipe)[model.role].items()}
            roles[model.role] = RewardRole(pools.get(model.role), scorers[model.role], mine, further)
            continue
        if model.reward:
            roles[model.role] = FurtherRole(scorers[model.role], mine)
            continue
        engine = workers.engine(model.role)
        if engine is not None and replies is not None:
            engine = _conversing(prepared, engine, replies)
        roles[model.role] = ModelRole(mine, trainer, engine)
    for role, pool in pools.items():
        if role != REPLIES:
            roles.setdefault(role, RewardRole(pool))
    return roles


def _scorers(prepared: Prepared, workers: Workers) -> dict[str, ModelScorer]:
    """Role → what scores by its model, for each that scores for a reward. Raises UserError as `_try_prompts`."""
    actor = next((model for model in prepared.models if model.role == "actor"), None)
    weights = {each.role: each.weight for each in scoring_models(prepared.recipe)}
    scorers: dict[str, ModelScorer] = {}
    for model in (model for model in prepared.models if model.reward):
        tokenizer = load_tokenizer(model.name, model.key)
        translator = None if actor is None else translator_for(load_tokenizer(actor.name), tokenizer, model.key)
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
    shape, most = prepared.shape, prepared.recipe.turns.most
    encoder = ReplyEncoder(prepared.tokenizer, shape.vocabulary)
    by_prompt = rounds_by_prompt(prepared.recipe)
    return Conversing(engine, replies, encoder, most, shape.max_positions, by_prompt=by_prompt)


def _try_prompts(prepared: Prepared, scorer: ModelScorer) -> None:
    """Raises UserError where a reward model cannot read the first prompt of a source with an answer."""
    for prompts in () if prepared.train_set is None else prepared.train_set.sets:
        scorer.translated([Sample(prompts.prompt(0, 0), 0, (), (), "yes", FinishReason.LENGTH)])
