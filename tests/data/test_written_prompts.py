"""Prompts that functions have written, in tokens: as the prompts of the run are, and those of given responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.examples import ExampleSet, example_set
from plait.data.formats import Row, RowKind, checked_prompt
from plait.data.prompts import PromptSet, prompt_set
from plait.data.settings import DataSettings
from plait.data.sources import Source
from plait.errors import DataError
from tests.cases import examples
from tests.models.tiny import tiny_tokenizer

WHERE = "build_prompts(told), sample 7.0"


def asked(*prompts: Any, tokenizer: Any = None, **keys: Any) -> PromptSet:
    rows = tuple(Row({"prompt": prompt, "n": 1}, f"x:{number}") for number, prompt in enumerate(prompts))
    settings = DataSettings(source="x.jsonl", **keys)
    return prompt_set(Source("x.jsonl", rows, label="sums"), tokenizer or tiny_tokenizer(), settings, 1000)


def given_rows(row: dict[str, Any], kind: RowKind = RowKind.EXAMPLES, tokenizer: Any = None, **keys: Any) -> ExampleSet:
    source = Source("x.jsonl", (Row(row, "x:1"),), kind)
    return example_set(source, tokenizer or tiny_tokenizer(), DataSettings(source="x.jsonl", **keys), 1000)


def messages(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def text_of(token_ids: Any) -> str:
    return tiny_tokenizer().decode(list(token_ids))


# -- behind samples of the policy


def test_a_text_goes_where_the_prompts_of_the_run_go() -> None:
    """Into the template of questions, behind the system message and the examples; of the same uid and row."""
    rows = asked(
        "what is 3?",
        prompt_template="Q: {question}",
        system_prompt="Be brief.",
        examples=[("what is 1?", "1")],
    )
    own = rows.prompt(0, 7)
    new = rows.encoder.written(own, "what is 4?", WHERE)
    assert new.text == own.text.replace("what is 3?", "what is 4?") != own.text
    assert text_of(new.token_ids) == new.text
    assert (new.uid, new.source, dict(new.columns)) == (7, "sums", {"prompt": "what is 4?", "n": 1})
    assert new.asked[-1] == {"role": "user", "content": "Q: what is 4?"}
    assert rows.encoder.written(own, "what is 3?", WHERE) == own


def test_messages_go_through_the_chat_template() -> None:
    rows = asked("what is 3?", system_prompt="Be brief.", prompt_template="Q: {question}")
    new = rows.encoder.written(rows.prompt(0, 7), messages(("user", "a"), ("assistant", "b"), ("user", "c")), WHERE)
    said = (
        "user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert new.text == f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>{said}"


def test_a_text_that_is_sent_raw_stays_one() -> None:
    rows = asked("3 plus", chat_template=False)
    own = rows.prompt(0, 7)
    assert rows.encoder.written(own, "12 minus", WHERE).text == "12 minus"
    with pytest.raises(
        DataError, match=r"^build_prompts\(told\), sample 7.0: .* sent raw, but this is messages; return"
    ):
        rows.encoder.written(own, messages(("user", "a")), WHERE)


def test_what_the_template_refuses_is_told_by_the_functions_name() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if 'x' in messages[0].content %}{{ raise_exception('no x') }}{% endif %}ok"
    rows = asked("what", tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"^build_prompts\(told\), sample 7.0: .*: no x .*; change what it returns$"):
        rows.encoder.written(rows.prompt(0, 7), "x", WHERE)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (None, "must be a text or a list of messages, found null"),
        (7, "must be a text or a list of messages, found a number"),
        ("", "the prompt is empty"),
        ([], "an empty list of messages"),
        (["a"], r'expected messages \{"role": …, "content": …\} in `prompt`, found \'a\''),
        (messages(("user", "")), "the prompt is empty"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"^build_prompts\(told\), sample 7.0: .*{found}"):
        checked_prompt(prompt, WHERE)


def test_a_tuple_of_messages_is_a_list_of_them() -> None:
    assert checked_prompt(tuple(messages(("user", "a"))), WHERE) == messages(("user", "a"))


# -- behind given responses


def written_for(rows: ExampleSet, prompt: Any) -> tuple[str, str]:
    """What a response reads now, and what it is."""
    own = rows.given(0, 7)[0].sample
    new = rows.encoder.written(own.prompt, prompt, WHERE)
    assert (new.uid, new.columns["prompt"]) == (7, prompt)
    return text_of(new.token_ids), text_of(own.token_ids)


def test_behind_a_given_text() -> None:
    rows = given_rows({"prompt": "what is 3 plus 4?", "completion": " 7"}, prompt_template="Q: {question}")
    assert rows.encoder.asked(rows.given(0, 7)[0].sample.prompt) == "what is 3 plus 4?"
    assert written_for(rows, "say 7.") == ("Q: say 7.", " 7<|im_end|>")
    with pytest.raises(DataError, match="sent raw, but this is messages"):
        written_for(rows, messages(("user", "say 7.")))


def test_behind_a_given_conversation() -> None:
    """The prompt of `messages` is what comes before the first answer."""
    said = messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    rows = given_rows({"messages": said}, system_prompt="Be brief.")
    assert rows.encoder.asked(rows.given(0, 7)[0].sample.prompt) == said[:1]
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    response = "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>"
    for prompt in (messages(("user", "a and more")), "a and more"):
        assert written_for(rows, prompt) == (f"{start}a and more<|im_end|>\n<|im_start|>assistant\n", response)


def test_behind_the_result_of_a_tool() -> None:
    """What the assistant does not begin is not opened for it."""
    row = {"prompt": messages(("user", "a")), "completion": messages(("tool", "4"), ("assistant", "b"))}
    prompt, response = written_for(given_rows(row), messages(("user", "a and more")))
    assert prompt == "<|im_start|>user\na and more<|im_end|>\n"
    assert response == "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"


def test_both_of_a_pair_read_it() -> None:
    rows = given_rows({"chosen": "say yes", "rejected": "say no"}, RowKind.PAIRS)
    chosen, rejected = (one.sample for one in rows.given(0, 7))
    assert rows.encoder.asked(chosen.prompt) == "say"
    assert chosen.prompt == rejected.prompt
    assert written_for(rows, "do say")[0] == "do say"


def test_where_a_response_begins_within_its_prompt_the_new_one_ends_as_that_does() -> None:
    """The template opens an answer with thoughts that are over, and writes one without: the end of what it opens is no
    part of the prompt, nor of the new one."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}<think></think>{% endif %}"
    rows = given_rows({"messages": messages(("user", "a"), ("assistant", "b"))}, tokenizer=tokenizer)
    own = rows.given(0, 7)[0].sample
    assert own.prompt.text.endswith("<think></think>")
    assert written_for(rows, "c") == ("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n", "b<|im_end|>")


def test_a_token_over_the_boundary_asks_for_the_same_end() -> None:
    """` is` is one token, so the space at the end of the prompt belongs to the response."""
    rows = given_rows({"prompt": "what ", "completion": "is"})
    assert written_for(rows, "and what ") == ("and what", " is<|im_end|>")
    with pytest.raises(
        DataError, match=r"the given response begins within ' ', with which .*; return one that ends so"
    ):
        written_for(rows, "and what:")


def test_rows_that_are_learnt_whole_have_none() -> None:
    rows = given_rows({"text": "the lazy dog"})
    with pytest.raises(
        DataError, match=r"prompt 7: rows of `text` have no prompt .*; give them as `prompt` and `compl"
    ):
        rows.encoder.asked(rows.given(0, 7)[0].sample.prompt)


@settings(max_examples=examples(20, 200), deadline=None)
@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12).filter(str.strip), st.booleans())
def test_its_own_prompt_is_the_one_that_it_had(prompt: str, completion: str, chat: bool) -> None:
    try:
        rows = given_rows({"prompt": prompt, "completion": completion}, chat_template=chat)
    except DataError:
        return  # no token of the prompt is left, or nothing of the response
    own = rows.given(0, 7)[0].sample.prompt
    assert rows.encoder.written(own, rows.encoder.asked(own), WHERE).token_ids == own.token_ids


def test_a_row_of_the_run_keeps_its_place(tmp_path: Path) -> None:
    """What is written does not change the prompts of the run."""
    rows = asked("a", "b")
    before = [rows.prompt(index, index) for index in range(2)]
    rows.encoder.written(before[0], "c", WHERE)
    assert [rows.prompt(index, index) for index in range(2)] == before
