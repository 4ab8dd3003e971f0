"""The function that replies to a turn of the model, as a pool of reward functions calls it, and what it said."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from plait.rewards.function_kinds import REPLY
from plait.rewards.functions import RewardFunction, reward_functions
from plait.rewards.reply_call import COLUMN, KEY, ReplyCall
from plait.rewards.scores import Failure, GroupScores


def reply_function(path: str) -> RewardFunction:
    """What a pool calls. Raises ConfigError: the path has no valid form, or names no file."""
    (function,) = reward_functions((path,), key=KEY)
    assert isinstance(function.target, str), "a path stays one"
    return RewardFunction(function.name, pickle.dumps(_ToLoad(function.target)), kind=REPLY)


def reply_of(group: GroupScores) -> list[dict[str, Any]] | Failure | None:
    """The messages that were replied to the one sample of a group; None: its conversation is over. Or how the function
    failed on it."""
    return group.failures[0] if group.failures else group.extras[COLUMN][0]


class _ToLoad:
    """Becomes a `ReplyCall` where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], ReplyCall], tuple[str]]:
        return ReplyCall, (self._path,)
