"""What a side says about one PPO step."""

from __future__ import annotations

from dataclasses import dataclass

from grpo.measure import StepReport

PHASES = ("generation", "scoring", "training", "other")
"""Scoring: log-probs of the reference, values of the critic, the reward model. Training: both models, optimizer steps
included."""


@dataclass
class PPOStep(StepReport):
    """`scored_tokens` and `trained_tokens` are summed over the models."""

    optimizer_steps: int = 0
    """Of both trained models."""
    prompt_digest: str = ""
    """See `workload.digest`."""
