"""The optimizer's settings and its learning-rate schedule. Imports no torch."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from plait.settings import Endless, Settings

Decay = Annotated[float, Field(ge=0, lt=1)]

TIMESCALE = 10_000
"""Optimizer steps in which `inverse_sqrt` falls to 1/√2 of the peak where there is no warm-up, as in Transformers."""


class LearningRateSchedule(StrEnum):
    """What the learning rate is after the warm-up, as a share of its peak: names and values as in Transformers.

    With W steps of warm-up, x = (step − W) / (total − W) and m = `min_lr_ratio`.
    """

    CONSTANT = "constant"
    """Factor 1 after the warm-up."""
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    """The same, and a warm-up is demanded."""
    LINEAR = "linear"
    """m + (1 − m) (1 − x)."""
    COSINE = "cosine"
    """m + (1 − m) (1 + cos πx) / 2."""
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    """The same, and an m above 0 is demanded."""
    POLYNOMIAL = "polynomial"
    """m + (1 − m) (1 − x)^`power`."""
    INVERSE_SQRT = "inverse_sqrt"
    """√(W / step); without a warm-up √(T / (step + T)) with T = `TIMESCALE`. It knows no end."""


WITH_END = (
    LearningRateSchedule.LINEAR,
    LearningRateSchedule.COSINE,
    LearningRateSchedule.COSINE_WITH_MIN_LR,
    LearningRateSchedule.POLYNOMIAL,
)


class OptimizerSettings(Settings):
    """AdamW (Loshchilov & Hutter 2019) on float32 masters. Every count is in optimizer steps, that is mini-batches."""

    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate")
    schedule: LearningRateSchedule = Field(
        default=LearningRateSchedule.CONSTANT,
        description="after the warm-up: constant, linear, cosine, polynomial or inverse_sqrt (docs/recipes.md)",
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    warmup_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="the warm-up as a share of all optimizer steps of the role, rounded up"
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="where linear, cosine and polynomial end, as a share of the peak"
    )
    power: float = Field(default=1.0, gt=0, description="of the polynomial schedule; 1 is linear")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.999), description="decay of AdamW's two moments")
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon, added to the root of the second moment")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay of matrices; vectors have none")
    max_grad_norm: Endless = Field(
        default=1.0, gt=0, description="clip the gradient's global norm to this (.inf: never)"
    )
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="of the loss that balances the experts of a mixture, added to that of the flow; 0: none",
    )
    shard_gradients: bool = Field(
        default=False,
        description="ranks of dp hold the gradients of what they update alone (ZeRO-2): less memory, more messages",
    )
    shard_weights: bool = Field(
        default=False,
        description="shard the trained weights over dp, too, and gather one layer at a time (ZeRO-3); implies "
        "shard_gradients",
    )
    max_skipped_steps: int = Field(default=3, ge=1, description="stop after N non-finite optimizer steps in a row")

    @field_validator("warmup_steps", mode="before")
    @classmethod
    def _is_count(cls, value: Any) -> Any:
        if isinstance(value, float) and 0 < value < 1:
            raise ValueError(f"expected a number of optimizer steps, found {value:g}; a share is `warmup_ratio`")
        return value

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _is_bound(cls, value: Any) -> Any:
        if value is None or value == 0:
            raise ValueError(f"expected a number above 0, found {'null' if value is None else value}; .inf never clips")
        return value

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        schedule = self.schedule
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio:g}) are both set; give one "
                "of them"
            )
        if schedule is LearningRateSchedule.CONSTANT_WITH_WARMUP and not (self.warmup_steps or self.warmup_ratio):
            raise ValueError("schedule: constant_with_warmup needs a warm-up; set `warmup_steps` or `warmup_ratio`")
        if schedule is LearningRateSchedule.COSINE_WITH_MIN_LR and not self.min_lr_ratio:
            raise ValueError("schedule: cosine_with_min_lr needs a minimum; set `min_lr_ratio`, or schedule: cosine")
        if self.min_lr_ratio and schedule not in WITH_END:
            raise ValueError(
                f"min_lr_ratio has no effect with schedule: {schedule}; remove it, or set `schedule` to one of "
                f"{', '.join(WITH_END)}"
            )
        if self.power != 1 and schedule is not LearningRateSchedule.POLYNOMIAL:
            raise ValueError(f"power has no effect with schedule: {schedule}; remove it, or set schedule: polynomial")
        return self

    @property
    def shards_gradients(self) -> bool:
        """Whether ranks of dp hold the gradients of their share alone: of sharded weights always."""
        return self.shard_gradients or self.shard_weights

    def warmup(self, total_steps: int) -> int:
        """Optimizer steps of warm-up in a run of `total_steps` of them."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * total_steps)

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0, of `total_steps`.

        Warm-up over W steps: learning_rate · (step + 1) / W, so the first step already moves and step W − 1 has the
        peak. (In Transformers it is step / W: the first step does nothing.) After it as in
        `LearningRateSchedule`. Of a schedule that ends at 0 the last step of a run is thus small but not 0; past the
        end it is what the schedule ends at.
        """
        warmup = self.warmup(total_steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        x = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        match self.schedule:
            case LearningRateSchedule.CONSTANT | LearningRateSchedule.CONSTANT_WITH_WARMUP:
                return self.learning_rate
            case LearningRateSchedule.LINEAR:
                return self._above_least(self.learning_rate * (1 - x))
            case LearningRateSchedule.COSINE | LearningRateSchedule.COSINE_WITH_MIN_LR:
                return self._above_least(self.learning_rate * (1 + math.cos(math.pi * x)) / 2)
            case LearningRateSchedule.POLYNOMIAL:
                return self._above_least(self.learning_rate * (1 - x) ** self.power)
            case LearningRateSchedule.INVERSE_SQRT:
                timescale = warmup or TIMESCALE
                return self.learning_rate * math.sqrt(timescale / (step + timescale - warmup))

    def _above_least(self, decayed: float) -> float:
        """A rate that decays to 0, as one that decays to `min_lr_ratio` of the peak."""
        return decayed if self.min_lr_ratio == 0 else self._least + (1 - self.min_lr_ratio) * decayed

    @property
    def _least(self) -> float:
        return self.min_lr_ratio * self.learning_rate
