"""Which calls are found in what a model says, by hand."""

from __future__ import annotations

import re

import pytest

from plait.rewards.tool_calls import CallForm, Malformed, ToolCall, calls_in

SCHEMAS = {
    "add": {
        "function": {
            "parameters": {
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "array", "items": {"type": "number"}},
                    "name": {"type": "string"},
                    "either": {"type": ["integer", "string"]},
                    "sure": {"type": "boolean"},
                    "any": {},
                }
            }
        }
    }
}


def found(text: str, form: CallForm = CallForm.BLOCKS) -> list[ToolCall | Malformed]:
    return calls_in(text, form, SCHEMAS)


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "add", "arguments": {"a": 1, "name": "2"}}',
        '\n{"name": "add", "arguments": "{\\"a\\": 1, \\"name\\": \\"2\\"}"}\n',
        "\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=name>\n2\n</parameter>\n</function>\n",
        "add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>name</arg_key>\n<arg_value>2</arg_value>\n",
    ],
)
def test_calls_in_blocks(inside: str) -> None:
    call = ToolCall("add", {"a": 1, "name": "2"})
    assert found(f"<tool_call>{inside}</tool_call>") == [call]
    assert found(f"I add.\n<tool_call>{inside}</tool_call>\n<tool_call>{inside}</tool_call> Then?") == [call, call]


@pytest.mark.parametrize("inside", ["<function=now>\n</function>", "now", '{"name": "now"}'])
def test_a_call_without_arguments(inside: str) -> None:
    assert found(f"<tool_call>\n{inside}\n</tool_call>") == [ToolCall("now", {})]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a", "7", 7),
        ("a", "seven", "seven"),
        ("b", "[1, 2.5]", [1, 2.5]),
        ("name", "7", "7"),
        ("name", "two\nlines", "two\nlines"),
        ("either", "7", "7"),
        ("sure", "true", True),
        ("sure", "False", False),
        ("any", "7", "7"),
        ("unknown", "7", "7"),
    ],
)
def test_texts_become_what_the_parameter_takes(key: str, text: str, value: object) -> None:
    call = f"<tool_call><function=add>\n<parameter={key}>\n{text}\n</parameter>\n</function></tool_call>"
    assert found(call) == [ToolCall("add", {key: value})]


@pytest.mark.parametrize("text", ["", "42", "the tool <calc>", '{"name": "add", "arguments": {}}'])
def test_a_turn_that_calls_nothing(text: str) -> None:
    assert found(text) == []


def test_what_is_thought_of_is_not_called() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert found(f"<think>Perhaps {call}? No.</think>4") == []
    assert found(f"I could.</think>{call}") == [ToolCall("add", {})]


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ('{"name": "add"', "the call is not valid JSON: "),
        ("[1]", 'a call is an object with "name" and "arguments"'),
        ('{"name": 3}', 'a call is an object with "name" and "arguments"'),
        ('{"name": "add", "arguments": [1]}', '"arguments" must be an object, found [1]'),
        ('{"name": "add", "arguments": "a"}', '"arguments" are not valid JSON: '),
        ("[" * 100_000, "the call is not valid JSON: "),
        ("", "the call is not valid JSON: "),
        ("<function=add>\n<parameter=a>1</parameter>", "<function=NAME> has no </function> at the end"),
        ("<function=add><parameter=a>1</function>", "the arguments of the call cannot be read: <parameter=a>1"),
        ("add\n<arg_key>a</arg_key>\n1", "the arguments of the call cannot be read: <arg_key>a</arg_key>"),
    ],
)
def test_what_is_malformed_is_said(inside: str, why: str) -> None:
    [call] = found(f"<tool_call>{inside}</tool_call>")
    assert isinstance(call, Malformed)
    assert re.match(re.escape(why), call.why)


@pytest.mark.parametrize(
    ("begins", "repeated", "ends"),
    [
        ("add", "<arg_key>a</arg_key><arg_value>1", ""),
        ("<function=add>", "<parameter=a>\n1\n", "</function>"),
        ("<function=add>", "<parameter=a>1" + "\n" * 40, "</function>"),
    ],
)
def test_arguments_that_are_repeated_and_never_closed_are_read_once(begins: str, repeated: str, ends: str) -> None:
    """Searched through for each other they would take hours, and the tool be said to hang."""
    [call] = found(f"<tool_call>{begins}{repeated * 5_000}{ends}</tool_call>")
    assert call == Malformed(f"the arguments of the call cannot be read: {(repeated * 40)[:80]}")


def test_a_call_that_is_not_closed() -> None:
    assert found('<tool_call>{"name": "add"}') == [Malformed("<tool_call> has no </tool_call>")]


def test_a_turn_that_is_a_call_as_a_whole() -> None:
    """An answer in JSON is none."""
    call = [ToolCall("add", {"a": 1})]
    assert found('\n{"name": "add", "parameters": {"a": 1}}', CallForm.WHOLE_TURN) == call
    assert found('{"name": "Ada", "born": 1815}', CallForm.WHOLE_TURN) == []
    assert found('I call {"name": "add", "parameters": {"a": 1}}', CallForm.WHOLE_TURN) == []
    [call_cut] = found('{"name": "add", "parameters": {"a": 1', CallForm.WHOLE_TURN)
    assert isinstance(call_cut, Malformed)
