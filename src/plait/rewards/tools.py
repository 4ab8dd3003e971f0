"""The functions of `turns.tools` as one function that replies: calls in the model's last turn are made, and what comes
of each is a message of the role `tool`.

What a tool raises, or a call that cannot be made, is told to the model, and counted. A tool that hangs or ends its
process has failed as any function that replies. Runs inside workers: standard library only.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from plait.data.records import IS_ERROR, SAMPLE_UID
from plait.errors import ConfigError
from plait.rewards.awaiting import settled_together
from plait.rewards.loading import load_function
from plait.rewards.signature import is_coroutine
from plait.rewards.tool_calls import CallForm, Malformed, Schema, ToolCall, calls_in
from plait.user_code import said_by

KEY = "turns.tools"
Tool = Callable[..., Any]
_MOST_OF_ERROR = 500
"""Characters of what a tool raised that the model reads."""


class ToolCalls:
    """Replies to a turn with what the tools say that it calls; None to one that calls nothing.

    Args:
        tools, schemas: by name.
    """

    __name__ = "tools"

    def __init__(self, tools: Mapping[str, Tool], schemas: Mapping[str, Schema], form: CallForm) -> None:
        self._tools, self._schemas, self._form = tools, schemas, form
        self._signatures = {name: inspect.signature(tool) for name, tool in tools.items()}
        self.awaits = any(map(is_coroutine, tools.values()))

    def __call__(self, messages: Sequence[Mapping[str, Any]], sample_uid: str) -> Any:
        """Calls are made in their order, those of coroutine functions together."""
        calls = calls_in(messages[-1]["content"], self._form, self._schemas)
        told = [self._told(call, sample_uid) for call in calls]
        if any(map(inspect.isawaitable, told)):
            return settled_together(told)
        return told or None

    def _told(self, call: ToolCall | Malformed, sample_uid: str) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """The message that answers a call, to be awaited where the tool is."""
        if isinstance(call, Malformed):
            return _failed(call.why)
        if call.name not in self._tools:
            return _failed(f"there is no tool {call.name!r:.80}; there are {', '.join(self._tools)}")
        signature = self._signatures[call.name]
        own = {SAMPLE_UID: sample_uid} if SAMPLE_UID in signature.parameters else {}
        try:
            signature.bind(**{**call.arguments, **own})
        except TypeError as error:
            return _failed(f"{call.name} cannot be called so: {error}", call.name)
        try:
            result = self._tools[call.name](**{**call.arguments, **own})
            return _awaited(result, call.name) if inspect.isawaitable(result) else _said(result, call.name)
        except Exception as error:  # the model is told of it
            return _raised(error, call.name)


def load_tools(paths: Sequence[str]) -> dict[str, Tool]:
    """The functions at these paths, by name.

    Raises:
        ConfigError: one cannot be loaded, has no name, has parameters that are not given by name, or the name of
            another.
    """
    tools: dict[str, Tool] = {}
    for path in paths:
        tool = load_function(path, key=KEY)
        name = getattr(tool, "__name__", None)
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"`{KEY}`: `{path}` has no name that a model could call it by; give a function")
        if name in tools:
            raise ConfigError(f"`{KEY}`: two tools are called `{name}`; rename one of them")
        for parameter in inspect.signature(tool).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"`{KEY}`: `{path}` has the parameter `{parameter}`, but the arguments of a call have names; give "
                    "each a parameter of its own"
                )
        tools[name] = tool
    return tools


async def _awaited(result: Awaitable[Any], name: str) -> dict[str, Any]:
    try:
        return _said(await result, name)
    except Exception as error:  # the model is told of it
        return _raised(error, name)


def _said(result: Any, name: str) -> dict[str, Any]:
    """A text as it is; all else as JSON, as far as that has it."""
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        text = str(result)
    return {"role": "tool", "name": name, "content": _whole_characters(text)}


def _raised(error: Exception, name: str) -> dict[str, Any]:
    return _failed(said_by(error)[:_MOST_OF_ERROR], name)


def _failed(why: str, name: str | None = None) -> dict[str, Any]:
    named = {} if name is None else {"name": name}
    return {"role": "tool", **named, "content": _whole_characters(f"Error: {why}"), IS_ERROR: True}


def _whole_characters(text: str) -> str:
    """A text with `?` for halves of characters, which no tokenizer reads: a model may have written one in JSON."""
    return text.encode(errors="replace").decode()
