"""What fills the roles of a flow: models with their engines, reward functions in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """What scores samples: functions in worker processes, frozen models, or both."""

    pool: RewardPool | None
    scorer: ModelScorer | None = None
    """By the first model, which is this role's own."""
    model: Any = None
    """See `ModelRole`."""
    further: Mapping[str, ModelScorer] = field(default_factory=dict)
    """Name of the scores of each further model → what scores by it; each is of a `FurtherRole`."""
    engine: ClassVar[GenerationEngine | None] = None

    @property
    def weights(self) -> dict[str, float]:
        """Name of each function, and of each model, → its weight in the sum."""
        functions = {} if self.pool is None else {function.name: function.weight for function in self.pool.functions}
        return functions | {name: scorer.weight for name, scorer in self.scorers.items()}

    @property
    def scorers(self) -> dict[str, ModelScorer]:
        """Name of the scores of each model → what scores by it."""
        return {} if self.scorer is None else {MODEL: self.scorer, **self.further}

    @property
    def trainer(self) -> TrainingEngine | None:
        """The engine of the role's own model; None: functions score alone."""
        return None if self.scorer is None else self.scorer.trainer


@dataclass
class FurtherRole:
    """A frozen model that scores for a reward beside the reward's own."""

    scorer: ModelScorer
    model: Any
    """See `ModelRole`."""
    engine: ClassVar[GenerationEngine | None] = None

    @property
    def trainer(self) -> TrainingEngine:
        """The engine of the model."""
        return self.scorer.trainer


RoleRuntime = ModelRole | RewardRole | FurtherRole
"""Either has the attributes `model`, `trainer` and `engine`; what it lacks is None."""
Roles = Mapping[str, RoleRuntime]
"""Name of each role of a flow → what fills it."""


def models_of(roles: Roles) -> dict[str, ModelRole]:
    """Those that are models of the flow."""
    return {name: role for name, role in roles.items() if isinstance(role, ModelRole)}


def rewards_of(roles: Roles) -> dict[str, RewardRole]:
    """Those that give rewards or costs."""
    return {name: role for name, role in roles.items() if isinstance(role, RewardRole)}


def scorers_of(roles: Roles) -> dict[str, ModelScorer]:
    """Role → what scores by its model, for those of which a model scores for a reward or a cost."""
    scoring = {name: role.scorer for name, role in roles.items() if isinstance(role, RewardRole | FurtherRole)}
    return {name: scorer for name, scorer in scoring.items() if scorer is not None}
