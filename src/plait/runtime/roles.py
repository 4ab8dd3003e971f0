"""What fills the roles of a flow: models with their engines, reward functions in worker processes.

A reward that is not trained is made of functions, of a frozen scalar model, or of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.rewards.pool import RewardPool
from plait.runtime.prepare import Prepared, load_tokenizer
from plait.runtime.scorer import ModelScorer, translator_for
from plait.workers.rank_state import is_reward
from plait.workers.remote_engine import RemoteEngine
from plait.workers.remote_trainer import RemoteTrainer
from plait.workers.worker_group import WorkerGroup


@dataclass
class ModelRole:
    """A model, of which this rank has a part, or none (None); `engine` is there for a role that generates."""

    model: Any
    trainer: RemoteTrainer
    engine: RemoteEngine | None = None


@dataclass
class RewardRole:
    """What scores samples: functions in worker processes, a frozen model, or both."""

    pool: RewardPool | None
    scorer: ModelScorer | None = None


RoleRuntime = ModelRole | RewardRole


def build_roles(prepared: Prepared, workers: WorkerGroup, pools: Mapping[str, RewardPool]) -> dict[str, RoleRuntime]:
    """Everything that the flow's roles need.

    Args:
        pools: reward role → its functions, already started.
    """
    flow, recipe = prepared.flow, prepared.recipe
    actor = next((one for one in prepared.models if one.role == "actor"), None)
    roles: dict[str, RoleRuntime] = {}
    for one in prepared.models:
        trainer = workers.trainer(one.role, prepared.shapes[one.name].max_positions)
        if is_reward(one, flow):
            settings = recipe.reward if one.role == "reward" else recipe.cost
            tokenizer = load_tokenizer(one.name, one.key)
            translator = None if actor is None else translator_for(load_tokenizer(actor.name), tokenizer)
            scorer = ModelScorer(trainer, translator, settings.model_weight, one.key, settings.on_error)
            roles[one.role] = RewardRole(pools.get(one.role), scorer)
            continue
        part = workers.rank_state.roles.get(one.role)
        engine = workers.engine(one.role) if workers.rank_state.places[one.role].generate else None
        roles[one.role] = ModelRole(None if part is None else part.model, trainer, engine)
    for role, pool in pools.items():
        roles.setdefault(role, RewardRole(pool))
    return roles
