"""What a recipe says of the models of roles beside the actor and the rewards. Torch-free."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from plait.paths import path_key
from plait.settings import Settings
from plait.training.settings import OptimizerSettings


class ValueOptimizerSettings(OptimizerSettings):
    """Those of a critic, which has a head to learn from nothing: its rate is higher unless stated."""

    learning_rate: float = Field(default=1e-5, gt=0, description="peak learning rate")


class ValueSettings(Settings):
    """A critic. It has no adapter settings of its own: `lora` holds for every trained role."""

    model: str | None = Field(
        default=None,
        description="what it begins as; by default the model that scores the same, or else the run's `model`",
    )
    optimizer: ValueOptimizerSettings = ValueOptimizerSettings()

    _paths = path_key("model")


class ReferenceSettings(Settings):
    """A reference that is another model, such as a teacher; or one that follows the policy (TRPO with an updated prior:
    Gorbatovski et al. 2024, arXiv 2404.09656)."""

    model: str | None = Field(
        default=None, description="what it begins as, such as a teacher; by default the run's `model`"
    )
    sync_every: int = Field(
        default=0,
        ge=0,
        description="bring the reference towards the policy every N steps; 0: it stays as it began",
    )
    mixup: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="share of the policy in the reference that a sync makes; 1: a copy of the policy",
    )

    _paths = path_key("model")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.model is not None and self.sync_every:
            raise ValueError(
                f"model is `{self.model}`, but a reference that follows the policy (sync_every {self.sync_every}) "
                "begins as the run's model; leave one of them out"
            )
        return self

    def check_read(self) -> None:
        self._check_switch("sync_every", "`reference.sync_every` above 0", "mixup")


class JudgeSettings(Settings):
    """A model that says something of what others have said, in a flow that asks it (docs/samples-from-samples.md)."""

    model: str | None = Field(
        default=None, description="what it is; it has the tokens of `model`, and is that by default, as it began"
    )

    _paths = path_key("model")
