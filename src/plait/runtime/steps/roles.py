"""What fills the roles of a flow: models with their engines, reward functions in worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.engines import GenerationEngine, TrainingEngine
from plait.rewards.pool import RewardPool
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


RoleRuntime = ModelRole | RewardRole
