"""What a user says about the numerics doctor. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from plait.settings import Settings


class DoctorSettings(Settings):
    """Thresholds and their sources: docs/doctor.md."""

    enabled: bool = Field(default=True, description="watch the numbers of each step and say what is off")
    stop_on: Literal["never", "error", "warning"] = Field(
        default="never", description="end the run at a finding of this severity; the step is recorded and saved first"
    )
    repeat_every: int = Field(
        default=50,
        ge=1,
        description="steps after which a finding that lasts is reported again; before, only when it gets worse",
    )
    rollout_probs_diff: float | None = Field(
        default=None,
        gt=0,
        description="mean |p_trainer - p_engine| that rings the alarm; by default 0.01 in bfloat16, 0.001 in float32, "
        "more at a temperature below 1",
    )
    max_version_lag: int = Field(default=0, ge=0, description="policy versions that samples may lag behind")
    dead_groups: float = Field(default=0.8, gt=0, le=1, description="share of groups without variance that is too many")
    truncated: float = Field(
        default=0.5, gt=0, le=1, description="share of responses truncated at the limit that is too many"
    )
    clipped: float = Field(default=0.3, gt=0, le=1, description="share of tokens that the clip stops that is too many")
    entropy_left: float = Field(
        default=0.2, ge=0, lt=1, description="share of the first step's entropy that is too little"
    )
    kl: float = Field(default=1.0, gt=0, description="KL to the reference, nats per token, that is too much")
