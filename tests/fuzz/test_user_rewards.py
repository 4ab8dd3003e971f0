"""Reward functions of the user's: one reply that says what was wrong with the user's own lines, whatever they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.errors import ConfigError
from tests.fuzz.user_rewards import FAILS, FINE, LOADED, answer


@pytest.mark.parametrize("case", LOADED)
def test_what_cannot_be_loaded(tmp_path: Path, case: str) -> None:
    source, said = LOADED[case]
    with pytest.raises(ConfigError) as caught:
        answer(tmp_path, source)
    assert said in str(caught.value)
    assert "/plait/" not in f"{caught.value}{caught.value.frames}"


@pytest.mark.parametrize("case", FAILS)
def test_what_fails_in_a_call(tmp_path: Path, case: str) -> None:
    source, said = FAILS[case]
    reply = answer(tmp_path, source)
    text = json.dumps(reply, ensure_ascii=False)
    assert said in (reply.get("error") or " ".join(reply["faults"].values()))
    assert "/plait/" not in text, "no frame of plait's own"
    assert len(text) < 20_000


@pytest.mark.parametrize("case", FINE)
def test_what_is_right_works(tmp_path: Path, case: str) -> None:
    reply = answer(tmp_path, FINE[case])
    assert "error" not in reply, reply
    assert reply["faults"] == {}
    assert len(reply["scores"]) == 3
    json.dumps(reply, default=str)
