"""Scoring by a pool, and waiting for processes, for the tests of the pool."""

from __future__ import annotations

from typing import Any

from plait.data.records import Sample
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.scores import GroupScores

LIMIT_S = 0.5
"""Time limit of calls that are meant to pass it."""


def score(functions: Any, *groups: list[Sample], weights: Any = (), **options: Any) -> list[GroupScores]:
    if not isinstance(functions, list):
        functions = [functions]
    with RewardPool(reward_functions(functions, weights), timeout_s=options.pop("timeout_s", 20.0), **options) as pool:
        return pool.score([sample for one in groups for sample in one])
