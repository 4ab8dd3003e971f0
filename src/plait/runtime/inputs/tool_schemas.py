"""What a model is told of tools: schemas that Transformers makes of their signatures and docstrings.

The files of the tools are imported in a process of their own, as wherever functions of the user's are called, and not
in the one that trains.
"""

from __future__ import annotations

import inspect
import pickle
import typing
from collections.abc import Callable, Sequence
from typing import Any

from plait.data.records import SAMPLE_UID, FinishReason, Prompt, Sample
from plait.errors import ConfigError
from plait.rewards.function_kinds import REPLY
from plait.rewards.functions import RewardFunction
from plait.rewards.pool import RewardPool
from plait.rewards.settings import TurnSettings
from plait.rewards.tool_calls import Schema
from plait.rewards.tools import KEY, Tool, load_tools

_COLUMN = "tools"


def described(paths: Sequence[str]) -> tuple[Schema, ...]:
    """The schemas of the tools at these paths.

    Raises:
        ConfigError: a tool cannot be loaded, or has no schema.
    """
    describes = RewardFunction("tools", pickle.dumps(_ToDescribe(tuple(paths))), kind=REPLY)
    nothing = Sample(Prompt(0, "", (), {"prompt": ""}), 0, (), (), "", FinishReason.STOP)
    with RewardPool([describes], TurnSettings()) as pool:
        pool.start()
        [group] = pool.score([nothing])
    [schemas] = group.extras[_COLUMN]
    return tuple(schemas)


class Describing:
    """Logs the schemas of tools, in the form of a reward that scores nothing."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        tools = load_tools(paths)
        self._schemas = [schema_of(tool, path) for tool, path in zip(tools.values(), paths, strict=True)]

    def __call__(self, completions: Sequence[str], log_extra: Callable[[str, Any], None]) -> list[None]:
        log_extra(_COLUMN, [self._schemas for _ in completions])
        return [None for _ in completions]


class _ToDescribe:
    """Becomes a `Describing` where it is unpickled."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths

    def __reduce__(self) -> tuple[type[Describing], tuple[tuple[str, ...]]]:
        return Describing, (self._paths,)


def schema_of(tool: Tool, path: str) -> Schema:
    """The schema of a function, but for the parameter `sample_uid`, which the model does not give.

    Raises:
        ConfigError: a type, the docstring, or its line on a parameter is missing.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(_without_uid(tool))
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"`{KEY}`: `{path}`: {error}; a tool needs a docstring that says what it does, with a line `NAME: what it "
            "is` for each parameter under `Args:`, and a type for each"
        ) from None


def _without_uid(tool: Tool) -> Tool:
    """A function with the same name, docstring and types, and all parameters but that one."""

    def shown() -> None: ...

    signature = inspect.signature(tool)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != SAMPLE_UID]
    asked = tool if inspect.isroutine(tool) else type(tool).__call__
    hints = typing.get_type_hints(asked)
    shown.__name__, shown.__doc__ = tool.__name__, inspect.getdoc(tool)
    shown.__annotations__ = {name: kind for name, kind in hints.items() if name != SAMPLE_UID}
    shown.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return shown
