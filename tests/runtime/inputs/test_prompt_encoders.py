"""Which encoder makes tokens of a written prompt: that of the sample's own source; or, where a model answers it, one
that puts nothing around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.data.examples import ExampleSet, example_set
from plait.data.formats import Row, RowKind
from plait.data.mixture import Mixed
from plait.data.prompts import PromptSet, prompt_set
from plait.data.records import MadeOf, Prompt
from plait.data.settings import DataSettings
from plait.data.sources import Source
from plait.dataflow import CallKind, Grain, Node
from plait.errors import DataError
from plait.runtime.inputs.prompt_encoders import AnsweredEncoder, PromptEncoders
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


# -- behind which responses are scored


def asked(label: str, template: str) -> PromptSet:
    source = Source("x.jsonl", (Row({"prompt": "what is 3?"}, "x:1"),), label=label)
    tokenizer: Any = tiny_tokenizer()
    return prompt_set(source, tokenizer, DataSettings(source="x", prompt_template=template), 100)


def labelled(label: str) -> ExampleSet:
    row = Row({"prompt": "what is 3?", "completion": " 3", "label": True}, "x:1")
    source = Source("x.jsonl", (row,), RowKind.LABELLED, label=label)
    tokenizer: Any = tiny_tokenizer()
    return example_set(source, tokenizer, DataSettings(source="x", prompt_template=f"{label}: {{question}}"), 100)


def made_by(call: str, kind: CallKind) -> Node:
    return Node(0, call, kind, Grain.SAMPLE, None, 0)


def written(encoders: PromptEncoders, call: Node, own: Prompt) -> str:
    return encoders.of(call, own).written(own, "why?", "x").text


def test_what_is_made_of_samples_is_asked_as_it_was_made_and_has_nothing_around_it() -> None:
    """Whatever its row of the data is."""
    sets = (labelled("a"),)
    encoders = PromptEncoders(None, {"labelled": Mixed(sets, ("a",))}, encoder())
    own = sets[0].given(0, 4)[0].sample.prompt
    made = replace(own, made_of=MadeOf(0, ((0, 0),)), columns={**own.columns, "prompt": "how good?"})
    own_encoder = encoders.of(made_by("judge.generate", CallKind.GENERATE), made)
    assert own_encoder.asked(made) == "how good?"
    assert own_encoder.written(made, "why?", "x").text == encoder().written(made, "why?", "x").text


def test_each_source_has_its_own() -> None:
    sets = asked("sums", "sum: {question}"), asked("words", "word: {question}")
    encoders = PromptEncoders(Mixed(sets, ("sums", "words")), {}, encoder())
    call = made_by("actor.generate", CallKind.GENERATE)
    for rows, expected in zip(sets, ("sum: why?", "word: why?"), strict=True):
        assert expected in written(encoders, call, rows.prompt(0, 4))


def test_what_is_made_of_labelled_responses_has_theirs() -> None:
    sets = labelled("a"), labelled("b")
    encoders = PromptEncoders(None, {"labelled": Mixed(sets, ("a", "b"))}, encoder())
    own = sets[1].given(0, 4)[0].sample.prompt
    for name in ("labelled", "mismatched"):
        assert written(encoders, made_by(name, CallKind.READ), own) == "b: why?"
    assert written(encoders, made_by("labelled", CallKind.READ), replace(own, source="a")) == "a: why?"
