"""What a function may reply to a turn, and what it is given."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.errors import ConfigError
from plait.rewards.calls import call_arguments, missing_arguments
from plait.rewards.function_kinds import REPLY
from plait.rewards.functions import RewardFunction
from plait.rewards.group import Call, Group, packed_call
from plait.rewards.loading import load_function
from plait.rewards.reply_call import COLUMN, ReplyCall
from plait.rewards.signature import Form, Miscounted, RewardCall, Signature

TOOL = {"role": "tool", "content": "7", "name": "add"}
TURNS = ({"role": "assistant", "content": "a"}, TOOL, {"role": "assistant", "content": "b"})


def replied(tmp_path: Path, text: str, *, prompt: Any = "ask", **columns: Any) -> Any:
    """What `reply`, of this text, replies to a sample of two turns; as a worker calls it."""
    (tmp_path / "tools.py").write_text(text)
    asked = Prompt(1, "", (1,), {"prompt": prompt, **columns})
    sample = Sample(asked, 0, (4, 5), (), "a7b", FinishReason.STOP, replies=(Reply(1, (6,)),), turns=TURNS)
    logged: dict[str, Any] = {}
    call = RewardCall("reply", ReplyCall(load_function(f"{tmp_path}/tools.py:reply", key="turns.reply")))
    scores = call(call_arguments([sample]), [("", sample.text)], {"log_extra": logged.__setitem__})
    assert scores == [None]
    assert json.loads(json.dumps(logged)) == logged
    return logged[COLUMN][0]


@pytest.mark.parametrize(
    ("returned", "messages"),
    [
        ("None", None),
        ("'go on'", [{"role": "user", "content": "go on"}]),
        (repr(TOOL), [TOOL]),
        (f"[{TOOL!r}, {TOOL!r}]", [TOOL, TOOL]),
    ],
)
def test_what_may_be_returned(tmp_path: Path, returned: str, messages: list[Mapping[str, Any]] | None) -> None:
    assert replied(tmp_path, f"def reply(messages):\n    return {returned}\n") == messages
    assert replied(tmp_path, f"async def reply(messages):\n    return {returned}\n") == messages


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("7", "returned int 7; expected None (the conversation is over), a text"),
        ("[]", "returned list []; expected None"),
        ("['text']", "returned 'text' as a message, which needs texts as `role` and `content`"),
        ("{'role': 'tool', 'content': 3}", "as a message, which needs texts as `role` and `content`"),
        ("{'role': 'assistant', 'content': ''}", "a message of the role `assistant`: that is the model's"),
        ("'so \\ud83d'", "returned a text with half of a character ('\\ud83d', a surrogate) at 3; remove it"),
        ("[{'role': 'tool', 'content': '\\ud83d'}]", "returned a text with half of a character"),
    ],
)
def test_what_may_not(tmp_path: Path, returned: str, message: str) -> None:
    with pytest.raises(Miscounted, match=re.escape(message)):
        replied(tmp_path, f"def reply(messages):\n    return {returned}\n")


def test_it_is_given_the_conversation_and_the_columns_of_the_row(tmp_path: Path) -> None:
    code = "import json\ndef reply(messages, answer, **columns):\n    return json.dumps([messages, answer, columns])\n"
    asked = [{"role": "user", "content": "ask"}]
    for prompt in ("ask", asked):
        [message] = replied(tmp_path, code, prompt=prompt, answer=3, colour="red")
        assert json.loads(message["content"]) == [[*asked, *TURNS], 3, {"colour": "red"}]


def test_words_of_the_assistant_that_a_prompt_ends_with_are_of_the_first_turn(tmp_path: Path) -> None:
    """A game that is played again from its messages counts as many turns as the model had."""
    code = "import json\ndef reply(messages):\n    return json.dumps(messages)\n"
    asked = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "So "}]
    [message] = replied(tmp_path, code, prompt=asked)
    assert json.loads(message["content"]) == [asked[0], {"role": "assistant", "content": "So a"}, *TURNS[1:]]
    assert asked[1]["content"] == "So ", "the row is as it was"


def test_its_messages_are_the_conversation_beside_a_column_of_that_name(tmp_path: Path) -> None:
    code = "def reply(messages, **columns):\n    return f'{len(messages)} {sorted(columns)}'\n"
    [message] = replied(tmp_path, code, messages=["a column"], colour="red")
    assert message["content"] == "4 ['colour']"


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("sample_uid", "1.0"),
        ("sample_uid='own'", "1.0"),
        ("sample_uid, **columns", "1.0 ['colour']"),
        ("**columns", "['colour']"),
    ],
)
def test_what_the_sample_is_called_is_given_where_it_is_asked_for(tmp_path: Path, parameters: str, given: str) -> None:
    parts = [part for part, name in (("{sample_uid}", "sample_uid"), ("{sorted(columns)}", "**")) if name in parameters]
    code = f'def reply(messages, {parameters}):\n    return f"{" ".join(parts)}"\n'
    columns = {"colour": "red"} if "**" in parameters else {}
    [message] = replied(tmp_path, code, **columns)
    assert message["content"] == given


def test_a_column_in_the_place_of_what_was_said_is_refused() -> None:
    function, signature = (
        RewardFunction("reply", "tools.py:reply", kind=REPLY),
        Signature(Form.TRL, (), (), takes_all=True),
    )
    assert missing_arguments(function, signature, ["prompt", "answer"]) is None
    assert "have a column of that name" in str(missing_arguments(function, signature, ["prompt", "turns"]))


@pytest.mark.parametrize(
    "name",
    ["prompts", "completions", "completion_ids", "turns", "log_extra", "log_metric", "queries", "solution_str"],
)
def test_what_only_rewards_get_is_refused_or_left_to_its_default(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"`reply` needs `{name}`, which reward functions get"):
        replied(tmp_path, f"def reply(messages, {name}):\n    return None\n")
    code = f"def reply(messages, {name}='own'):\n    return {name}\n"
    (tmp_path / name).mkdir()
    assert replied(tmp_path / name, code)[0]["content"] == "own"


def test_draws_of_a_function_differ_from_turn_to_turn() -> None:
    function = RewardFunction("reply", "tools.py:reply", kind=REPLY)
    seen = set()
    for turns in (TURNS[:1], TURNS):
        sample = Sample(Prompt(1, "", (1,)), 0, (4,), (), "", FinishReason.STOP, turns=turns)
        call = Call(Group(0, (sample,), (function,)), 0, (0,))
        seen.add(pickle.loads(packed_call(call, "reply", number=1, seed=0))["noise"])
    assert len(seen) == 2


@pytest.mark.parametrize("parameters", ["(text)", "(messages, /)", "(*messages)"])
def test_a_function_that_cannot_be_given_messages_by_name_is_refused(tmp_path: Path, parameters: str) -> None:
    message = f"expected a function reply(messages, **columns), found reply{parameters}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        replied(tmp_path, f"def reply{parameters}:\n    return None\n")
