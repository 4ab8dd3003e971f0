"""Prompts that a model answers, in tokens: alone, whatever the recipe puts around those of the data."""

from __future__ import annotations

from typing import Any

import pytest

from plait.data.records import Prompt
from plait.data.settings import DataSettings
from plait.errors import DataError
from plait.runtime.inputs.prompt_encoders import AnsweredEncoder
from tests.models.tiny import tiny_tokenizer

OWN = Prompt(7, "", (1,), {"prompt": "own", "answer": "4", "tools": [{"name": "f"}]}, "sums")
AROUND = {
    "system_prompt": "be brief",
    "prompt_template": "Q: {question}",
    "examples": [("1 + 1?", "2")],
}


def encoder(tokenizer: Any = None, **keys: Any) -> AnsweredEncoder:
    return AnsweredEncoder(tokenizer or tiny_tokenizer(), DataSettings(source="sums.jsonl", **keys))


def test_a_text_is_what_a_user_says() -> None:
    made = encoder(**AROUND).written(OWN, "how good?", "here")
    assert made.text == "<|im_start|>user\nhow good?<|im_end|>\n<|im_start|>assistant\n"
    assert list(made.token_ids) == tiny_tokenizer()(made.text, add_special_tokens=False)["input_ids"]
    assert (made.uid, made.source) == (7, "sums")
    assert made.columns == {**OWN.columns, "prompt": "how good?"}
    assert made.asked == ({"role": "user", "content": "how good?"},)


def test_messages_are_as_they_stand() -> None:
    messages = [{"role": "system", "content": "grade"}, {"role": "user", "content": "it"}]
    made = encoder(**AROUND).written(OWN, messages, "here")
    assert made.text == ("<|im_start|>system\ngrade<|im_end|>\n<|im_start|>user\nit<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_chat_template_a_text_is_raw() -> None:
    made = encoder(chat_template=False).written(OWN, "how good?", "here")
    assert made.text == "how good?"
    with pytest.raises(DataError, match="here: the prompts of the run are texts that are sent raw, but this is messag"):
        encoder(chat_template=False).written(OWN, [{"role": "user", "content": "it"}], "here")
