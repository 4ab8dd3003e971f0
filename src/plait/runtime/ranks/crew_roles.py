"""What fills the roles of a flow on several ranks, for the leader."""

from __future__ import annotations

from collections.abc import Mapping

from plait.rewards.pool import RewardPool
from plait.runtime.prepare import Prepared, load_tokenizer
from plait.runtime.ranks.crew import Crew
from plait.runtime.ranks.parts import is_reward
from plait.runtime.roles import ModelRole, RewardRole, RoleRuntime
from plait.runtime.scorer import ModelScorer, translator_for


def crew_roles(prepared: Prepared, crew: Crew, pools: Mapping[str, RewardPool]) -> dict[str, RoleRuntime]:
    """What `roles.build_roles` makes, over the ranks of a crew."""
    flow, recipe = prepared.flow, prepared.recipe
    actor = next((one for one in prepared.models if one.role == "actor"), None)
    roles: dict[str, RoleRuntime] = {}
    for one in prepared.models:
        trainer = crew.trainer(one.role, prepared.shapes[one.name].max_positions)
        if is_reward(one, flow):
            settings = recipe.reward if one.role == "reward" else recipe.cost
            tokenizer = load_tokenizer(one.name, one.key)
            translator = None if actor is None else translator_for(load_tokenizer(actor.name), tokenizer)
            scorer = ModelScorer(trainer, translator, settings.model_weight, one.key, settings.on_error)
            roles[one.role] = RewardRole(pools.get(one.role), scorer)
            continue
        part = crew.parts.roles.get(one.role)
        engine = crew.engine(one.role) if crew.parts.places[one.role].generate else None
        roles[one.role] = ModelRole(None if part is None else part.model, trainer, engine)
    for role, pool in pools.items():
        roles.setdefault(role, RewardRole(pool))
    return roles
