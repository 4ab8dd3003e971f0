"""Scoring by a pool, and waiting for processes, for the tests of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.data.records import Sample
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.scores import GroupScores

LIMIT_S = 1.0
"""Time limit of calls that are meant to pass it."""


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that its new parent has not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], Any], limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def score(functions: Any, *groups: list[Sample], weights: Any = (), **options: Any) -> list[GroupScores]:
    if not isinstance(functions, list):
        functions = [functions]
    with RewardPool(reward_functions(functions, weights), timeout_s=options.pop("timeout_s", 20.0), **options) as pool:
        return pool.score([sample for one in groups for sample in one])
