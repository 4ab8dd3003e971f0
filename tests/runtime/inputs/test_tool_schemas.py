"""What a model is told of tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.rewards.tools import load_tools
from plait.runtime.inputs.tool_schemas import described, schema_of

TOOLS = '''
def where(sample_uid: str, city: str) -> dict:
    """Says where a city is.

    Args:
        city: Its name. (choices: ["Bonn", "Köln"])
    """

def add():
    """Adds nothing."""

def undescribed(a: int):
    """Has no line on it."""

def untyped(a):
    """Has no type.

    Args:
        a: Something.
    """

def silent(a: int): ...

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


def test_what_a_model_is_told_of_a_tool(paths: Any) -> None:
    """Not of the sample; a method of an object is a tool, too."""
    schema = schema_of(load_tools(paths("where"))["where"], "")
    assert schema["function"]["name"] == "where"
    assert schema["function"]["description"] == "Says where a city is."
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bonn", "Köln"], "description": "Its name."}},
        "required": ["city"],
    }
    of_method = schema_of(load_tools(paths("counter.add"))["add"], "")
    assert list(of_method["function"]["parameters"]["properties"]) == ["a"]


@pytest.mark.slow
def test_they_are_described_in_another_process(paths: Any) -> None:
    assert [schema["function"]["name"] for schema in described(paths("add", "where"))] == ["add", "where"]
    with pytest.raises(ConfigError, match=r"`turns\.tools`: .*silent`: Cannot generate JSON schema for silent"):
        described(paths("add", "silent"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("undescribed", "no description for the argument 'a'; a tool needs a docstring"),
        ("untyped", "Argument a is missing a type hint"),
        ("silent", "it has no docstring"),
    ],
)
def test_a_tool_without_a_schema_is_refused(paths: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"`turns.tools`: `PATH`: .*{message}"):
        schema_of(load_tools(paths(name))[name], "PATH")
