"""What fills the roles of a flow: models with their engines, reward functions in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from plait.engines import GenerationEngine, TrainingEngine
from plait.rewards.pool import RewardPool
from plait.rewards.scores import MODEL
from plait.runtime.steps.scorer import ModelScorer


@dataclass
class ModelRole:
    """A model, of which this rank has a part, or none (None); `engine` is there for a role that generates."""

    model: Any
    trainer: TrainingEngine
    engine: GenerationEngine | None = None


@dataclass
class RewardRole:
    """What scores samples: functions in worker processes, a frozen model, or both."""

    pool: RewardPool | None
    scorer: ModelScorer | None = None
    model: Any = None
    """See `ModelRole`."""
    engine: ClassVar[GenerationEngine | None] = None

    @property
    def weights(self) -> dict[str, float]:
        """Name of each function, and of the model, → its weight in the sum."""
        functions = {} if self.pool is None else {function.name: function.weight for function in self.pool.functions}
        return functions | ({} if self.scorer is None else {MODEL: self.scorer.weight})

    @property
    def trainer(self) -> TrainingEngine | None:
        """The engine of the model; None: functions score alone."""
        return None if self.scorer is None else self.scorer.trainer


RoleRuntime = ModelRole | RewardRole
"""Either has the attributes `model`, `trainer` and `engine`; what it lacks is None."""
Roles = Mapping[str, RoleRuntime]
"""Name of each role of a flow → what fills it."""


def models_of(roles: Roles) -> dict[str, ModelRole]:
    """Those that are models of the flow."""
    return {name: role for name, role in roles.items() if isinstance(role, ModelRole)}


def rewards_of(roles: Roles) -> dict[str, RewardRole]:
    """Those that give rewards or costs."""
    return {name: role for name, role in roles.items() if isinstance(role, RewardRole)}
