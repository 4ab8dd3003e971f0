"""The function that replies to a turn of the model, as a pool of reward functions calls it, and what it said."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.rewards.function_kinds import REPLY
from plait.rewards.functions import RewardFunction, reward_functions
from plait.rewards.loading import load_function
from plait.rewards.reply_call import COLUMN, KEY, ReplyCall
from plait.rewards.scores import Failure, GroupScores
from plait.rewards.tool_calls import CallForm, Schema, Tools
from plait.rewards.tools import KEY as OF_TOOLS
from plait.rewards.tools import ToolCalls, load_tools


def reply_function(path: str) -> RewardFunction:
    """What a pool calls. Raises ConfigError: the path has no valid form, or names no file."""
    (function,) = reward_functions((path,), key=KEY)
    assert isinstance(function.target, str), "a path stays one"
    return RewardFunction(function.name, pickle.dumps(_ToLoad(function.target)), kind=REPLY)


def tools_function(paths: Sequence[str], tools: Tools) -> RewardFunction:
    """What a pool calls to have tools called. Raises ConfigError as above.

    Args:
        tools: what is known of those at `paths`.
    """
    targets = [function.target for function in reward_functions(paths, key=OF_TOOLS)]
    by_name = {schema["function"]["name"]: schema for schema in tools.schemas}
    return RewardFunction("tools", pickle.dumps(_ToolsToLoad(targets, by_name, tools.form)), kind=REPLY)


def reply_of(group: GroupScores) -> list[dict[str, Any]] | Failure | None:
    """The messages that were replied to the one sample of a group; None: its conversation is over. Or how the function
    failed on it."""
    return group.failures[0] if group.failures else group.extras[COLUMN][0]


class _ToLoad:
    """Becomes a `ReplyCall` where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], ReplyCall], tuple[str]]:
        return _replying, (self._path,)


class _ToolsToLoad:
    """Becomes the `ReplyCall` of tools."""

    def __init__(self, *how: Any) -> None:
        self._how = how

    def __reduce__(self) -> tuple[Callable[..., ReplyCall], tuple[Any, ...]]:
        return _calling_tools, self._how


def _replying(path: str) -> ReplyCall:
    return ReplyCall(load_function(path, key=KEY))


def _calling_tools(paths: Sequence[str], schemas: Mapping[str, Schema], form: CallForm) -> ReplyCall:
    return ReplyCall(ToolCalls(load_tools(paths), schemas, form))
