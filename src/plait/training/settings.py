"""The optimizer's settings and its learning-rate schedule. Imports no torch."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from plait.settings import Endless, Settings

Decay = Annotated[float, Field(ge=0, lt=1)]


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerSettings(Settings):
    """AdamW (Loshchilov & Hutter 2019) on float32 masters. Every count is in optimizer steps, that is mini-batches."""

    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")
    schedule: Schedule = Field(Schedule.CONSTANT, description="constant, linear or cosine decay to 0 after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of AdamW's two moments")
    epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon, added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices; vectors have none")
    max_grad_norm: Endless = Field(1.0, gt=0, description="clip the gradient's global norm to this (inf: never)")
    max_skipped_steps: int = Field(3, ge=1, description="stop after so many non-finite optimizer steps in a row")

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0, of `total_steps`.

        Warm-up: learning_rate · (step + 1) / warmup_steps, so the first step already moves and step warmup_steps − 1
        has the peak. After it, with x = (step − warmup_steps) / (total_steps − warmup_steps): 1, 1 − x, or
        (1 + cos πx) / 2 of the peak. The last step of a run is thus small but not 0; past the end the rate is 0.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        x = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        match self.schedule:
            case Schedule.CONSTANT:
                return self.learning_rate
            case Schedule.LINEAR:
                return self.learning_rate * (1 - x)
            case Schedule.COSINE:
                return self.learning_rate * (1 + math.cos(math.pi * x)) / 2
