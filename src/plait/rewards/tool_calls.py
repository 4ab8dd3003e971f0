"""Calls of tools in what a model says: which forms are read, and what a call comes to. Pure, standard library only.

Inside `<tool_call>…</tool_call>`, any number of which may stand beside other text:

    {"name": "add", "arguments": {"a": 1}}                            Hermes, Qwen 2.5 and 3
    <function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>       Qwen 3.5 and 3 Coder, Nemotron 3
    add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>               GLM 4.5

Or the turn is a call as a whole: `{"name": "add", "parameters": {"a": 1}}`, Llama 3.1 and 3.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Schema = Mapping[str, Any]
"""What chat templates take of a tool: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


class CallForm(StrEnum):
    """How a chat template writes calls, and how they are found in a turn."""

    BLOCKS = "blocks"
    WHOLE_TURN = "whole turn"


@dataclass(frozen=True)
class Tools:
    """What is known of the tools of a run."""

    schemas: tuple[Schema, ...]
    form: CallForm


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Malformed:
    """What was meant for a call, and is none."""

    why: str


_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_REASONED = "</think>"
"""What ends reasoning: calls in it are thoughts."""
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEY_AND_VALUE = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None}
"""Values as a template may write Python's."""


def calls_in(text: str, form: CallForm, schemas: Mapping[str, Schema]) -> list[ToolCall | Malformed]:
    """The calls in a turn, in order; none where it calls nothing.

    Args:
        text: of the turn, without special tokens.
        schemas: of the tools, by name: forms whose values are bare texts leave their kinds to these.
    """
    _, reasoned, answer = text.partition(_REASONED)
    said = answer if reasoned else text
    if form is CallForm.WHOLE_TURN:
        return _whole(said.strip())
    calls: list[ToolCall | Malformed] = []
    for part in said.split(_OPENS)[1:]:
        inside, closed, _ = part.partition(_CLOSES)
        calls.append(_block(inside.strip(), schemas) if closed else Malformed(f"{_OPENS} has no {_CLOSES}"))
    return calls


def _whole(said: str) -> list[ToolCall | Malformed]:
    """An answer in JSON is none, unless it has what a call has."""
    if not (said.startswith("{") and '"name"' in said and ('"parameters"' in said or '"arguments"' in said)):
        return []
    return [_from_json(said)]


def _block(inside: str, schemas: Mapping[str, Schema]) -> ToolCall | Malformed:
    if inside.startswith("<function="):
        found = _FUNCTION.fullmatch(inside)
        if found is None:
            return Malformed("<function=NAME> has no </function> at the end of the call")
        name, body = found.groups()
        return _of_texts(name.strip(), body, _PARAMETER, schemas)
    if "<arg_key>" in inside or re.fullmatch(r"[\w.-]+", inside):
        name, _, body = inside.partition("\n") if "\n" in inside else inside.partition("<arg_key>")
        return _of_texts(name.strip(), inside[len(name) :], _KEY_AND_VALUE, schemas)
    return _from_json(inside)


def _from_json(text: str) -> ToolCall | Malformed:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Malformed(f"the call is not valid JSON: {error}")
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return Malformed('a call is an object with "name" and "arguments"')
    arguments = said.get("arguments", said.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI's API writes them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Malformed(f'"arguments" are not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return Malformed(f'"arguments" must be an object, found {json.dumps(arguments)[:80]}')
    return ToolCall(said["name"], arguments)


def _of_texts(name: str, body: str, argument: re.Pattern[str], schemas: Mapping[str, Schema]) -> ToolCall | Malformed:
    """A call whose arguments are texts, one behind another. They are read from the first on, and not searched for: of
    arguments that a model repeats and never closes, each would be looked through to the end for each other."""
    pairs, at = list[tuple[str, str]](), 0
    while found := argument.match(body, at):
        key, text = found.groups()
        pairs.append((key.strip(), text))
        at = found.end()
    if left := body[at:].strip():
        return Malformed(f"the arguments of the call cannot be read: {left[:80]}")
    function = schemas.get(name, {}).get("function", {})
    kinds = function.get("parameters", {}).get("properties", {})
    return ToolCall(name, {key: _value(text, kinds.get(key, {})) for key, text in pairs})


def _value(text: str, kind: Mapping[str, Any]) -> Any:
    """A text as the value that a parameter takes; one that takes texts gets it as it is."""
    kinds = [kind, *kind.get("anyOf", ())]
    if any("string" in (one.get("type"), *_listed(one.get("type"))) for one in kinds) or not any(kinds):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _WORDS.get(text.strip(), text)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
