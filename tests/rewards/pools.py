"""Scoring by a pool, and waiting for processes, for the tests of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.data.records import Sample
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.scores import GroupScores
from plait.rewards.settings import RewardSettings

LIMIT_S = 0.5
"""Time limit of calls that are meant to pass it."""


def score(
    functions: Any, *groups: list[Sample], weights: Any = (), seed: int = 0, output: Path | None = None, **settings: Any
) -> list[GroupScores]:
    """settings: keys of RewardSettings; by default a call may take 20 s."""
    if not isinstance(functions, list):
        functions = [functions]
    of_pool = RewardSettings(**{"timeout_s": 20.0, **settings})
    with RewardPool(reward_functions(functions, weights), of_pool, seed=seed, output=output) as pool:
        return pool.score([sample for one in groups for sample in one])
