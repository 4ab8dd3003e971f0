from __future__ import annotations

import pytest

from plait.dataflow.call_name import CallName, numbered


@pytest.mark.parametrize(
    ("text", "plain", "role", "asks"),
    [
        ("actor.generate", "actor.generate", "actor", "generate"),
        ("actor.logprobs#2", "actor.logprobs", "actor", "logprobs"),
        ("prompts", "prompts", "prompts", ""),
        ("", "", "", ""),
    ],
)
def test_what_a_name_says(text: str, plain: str, role: str, asks: str) -> None:
    assert CallName.of(text) == CallName(plain, role, asks)


def test_several_calls_have_numbers_from_two_on() -> None:
    used: list[str] = []
    for call in ["actor.train", "critic.train", "actor.train", "actor.train"]:
        used.append(numbered(call, used))
    assert used == ["actor.train", "critic.train", "actor.train#2", "actor.train#3"]
    assert {CallName.of(name).plain for name in used} == {"actor.train", "critic.train"}
