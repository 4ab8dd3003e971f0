"""Tools as one function that replies."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.rewards.tool_calls import CallForm
from plait.rewards.tools import ToolCalls, load_tools

TOOLS = '''
import asyncio
from typing import Optional

def add(a: int, b: int = 1):
    """Adds two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b

def where(sample_uid: str, city: str) -> dict:
    return {"city": city, "of": sample_uid}

def fails():
    """Fails."""
    return {}["nothing"]

def huge():
    """Is too long to be written."""
    return 10**10_000

gate = asyncio.Event()

async def waits(n: int) -> str:
    """Waits for `opens`.

    Args:
        n: A number.
    """
    await gate.wait()
    if n < 0:
        raise ValueError("below 0")
    return f"waited {n}"

async def opens():
    """Opens the gate."""
    gate.set()

def starred(*numbers: int):
    """Takes any number of them."""

class Counter:
    def add(self, a: int):
        """Counts.

        Args:
            a: How many.
        """

counter = Counter()
'''


@pytest.fixture
def paths(tmp_path: Path) -> Any:
    (tmp_path / "tools.py").write_text(TOOLS)
    return lambda *names: [f"{tmp_path}/tools.py:{name}" for name in names]


def told(paths: Any, *calls: dict[str, Any] | str) -> Any:
    tools = load_tools(paths("add", "where", "fails", "huge", "waits", "opens"))
    said = "".join(f"<tool_call>{json.dumps(c) if isinstance(c, dict) else c}</tool_call>" for c in calls)
    return ToolCalls(tools, {}, CallForm.BLOCKS)(messages=[{"role": "assistant", "content": said}], sample_uid="3.1")


def test_what_tools_say(paths: Any) -> None:
    assert told(paths) is None
    three = {"name": "add", "arguments": {"a": 2}}, {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert told(paths, *three, {"name": "where", "arguments": {"city": "Köln"}}) == [
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "tool", "name": "where", "content": '{"city": "Köln", "of": "3.1"}'},
    ]


@pytest.mark.parametrize(
    ("call", "name", "why"),
    [
        ('{"name": "add"', None, "the call is not valid JSON: Expecting ',' delimiter: line 1 column 15 (char 14)"),
        ({"name": "sub"}, None, "there is no tool 'sub'; there are add, where, fails, huge, waits, opens"),
        ({"name": "add"}, "add", "add cannot be called so: missing a required argument: 'a'"),
        (
            {"name": "add", "arguments": {"a": 1, "c": 2}},
            "add",
            "add cannot be called so: got an unexpected keyword argument 'c'",
        ),
        ({"name": "add", "arguments": {"a": None}}, "add", "TypeError: unsupported operand type"),
        ({"name": "fails"}, "fails", "KeyError: 'nothing'"),
        ({"name": "huge"}, "huge", "ValueError: Exceeds the limit"),
        ('{"name": "\\ud83d"}', None, r"there is no tool '\ud83d'"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(paths: Any, call: dict[str, Any] | str, name: Any, why: str) -> None:
    [message] = told(paths, call)
    assert message["role"] == "tool"
    assert message["is_error"] is True
    assert message.get("name") == name
    assert message["content"].startswith(f"Error: {why}")


def test_the_model_does_not_say_which_sample_it_is(paths: Any) -> None:
    [message] = told(paths, {"name": "where", "arguments": {"city": "Bonn", "sample_uid": "other"}})
    assert json.loads(message["content"])["of"] == "3.1"


def test_halves_of_characters_are_replaced(paths: Any) -> None:
    """A tokenizer would fail on what the model has said."""
    [message] = told(paths, '{"name": "where", "arguments": {"city": "K\\ud83d"}}')
    assert json.loads(message["content"])["city"] == "K?"


def test_coroutine_functions_are_awaited_together(paths: Any) -> None:
    """The first waits for the third."""
    calls = [{"name": "waits", "arguments": {"n": n}} for n in (1, -1)]
    later = told(paths, *calls, {"name": "opens"}, {"name": "add", "arguments": {"a": 1}})
    assert [message["content"] for message in asyncio.run(later)] == [
        "waited 1",
        "Error: ValueError: below 0",
        "null",
        "2",
    ]
    assert ToolCalls(load_tools(paths("waits")), {}, CallForm.BLOCKS).awaits
    assert not ToolCalls(load_tools(paths("add")), {}, CallForm.BLOCKS).awaits


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("add", "counter.add"), "two tools are called `add`; rename one"),
        (("starred",), "has the parameter `*numbers: int`, but the arguments of a call have names"),
        (("missing",), "has no `missing`"),
    ],
)
def test_what_is_no_tool_is_refused(paths: Any, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"`turns.tools`: .*{re.escape(message)}"):
        load_tools(paths(*names))
