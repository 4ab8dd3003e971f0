"""What stands between two turns, in tokens."""

from __future__ import annotations

import re

import pytest

from plait.data.formats import Row
from plait.data.prompts import prompt_set
from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.replies import ReplyEncoder
from plait.data.settings import DataSettings
from plait.data.sources import Source
from plait.errors import DataError
from tests.data.test_examples import with_template_of
from tests.models.tiny import VOCAB_SIZE, tiny_tokenizer

END = 2
TOOL = [{"role": "tool", "content": '7 "things"\n'}]


def sample_of(*token_ids: int, is_chat: bool = True, **columns: object) -> Sample:
    prompt = Prompt(3, "", (1,), {"prompt": "x", **columns}, is_chat=is_chat)
    return Sample(prompt, 0, token_ids, (), "", FinishReason.STOP)


@pytest.mark.parametrize(
    ("last", "stop", "between"),
    [
        (END, (), "\n<|im_start|>tool\nX<|im_end|>\n<|im_start|>assistant\n"),
        (END, ("<|im_end|>",), "\n<|im_start|>tool\nX<|im_end|>\n<|im_start|>assistant\n"),
        (0, (), "\n<|im_start|>tool\nX<|im_end|>\n<|im_start|>assistant\n"),
        (82, (), "<|im_end|>\n<|im_start|>tool\nX<|im_end|>\n<|im_start|>assistant\n"),
        (82, ("p",), "<|im_end|>\n<|im_start|>tool\nX<|im_end|>\n<|im_start|>assistant\n"),
    ],
    ids=[
        "the end of a turn",
        "the same as a string",
        "another special token",
        "a stop token that is text",
        "a stop string",
    ],
)
def test_a_reply_is_written_behind_what_ended_the_turn(last: int, stop: tuple[str, ...], between: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = ReplyEncoder(tokenizer, VOCAB_SIZE).token_ids(sample_of(80, last), TOOL, stop)
    assert tokenizer.decode(ids) == between.replace("X", TOOL[0]["content"])


@pytest.mark.parametrize(("said", "stop"), [("north\n", "\n"), ("north<|im_end|>\n", "\n"), ("a</calc>", "</calc>")])
def test_a_turn_that_ended_with_a_string_is_closed_as_far_as_it_is_not(said: str, stop: str) -> None:
    """A stop string may stand in what closes turns, behind the token that closes them."""
    tokenizer = tiny_tokenizer()
    sample = sample_of(*tokenizer.encode(said, add_special_tokens=False))
    ids = ReplyEncoder(tokenizer, VOCAB_SIZE).token_ids(sample, TOOL, (stop,))
    closed = f"{said.removesuffix('<|im_end|>' + chr(10))}<|im_end|>\n<|im_start|>tool\n"
    assert tokenizer.decode([*sample.token_ids, *ids]).startswith(closed)


def test_a_stop_string_is_looked_for_in_the_last_turn_alone() -> None:
    tokenizer = tiny_tokenizer()
    sample = Sample(sample_of().prompt, 0, (82, 80, END), (), "", FinishReason.STOP, replies=(Reply(1, (5,)),))
    encoder = ReplyEncoder(tokenizer, VOCAB_SIZE)
    assert encoder.turn(sample) == {"role": "assistant", "content": tokenizer.decode([80])}
    assert tokenizer.decode(encoder.token_ids(sample, TOOL, ("p",))).startswith("\n<|im_start|>tool")


def test_without_a_template_a_reply_is_appended_as_it_is() -> None:
    tokenizer = tiny_tokenizer()
    ids = ReplyEncoder(tokenizer, VOCAB_SIZE).token_ids(sample_of(80, END, is_chat=False), TOOL)
    assert tokenizer.decode(ids) == TOOL[0]["content"]


@pytest.mark.parametrize(
    ("family", "role", "ends_with", "between"),
    [
        ("qwen3", "tool", "<|im_end|>", "\n<|im_start|>user\n<tool_response>\nyes\n</tool_response><|im_end|>\n"),
        ("qwen3_5_think", "user", "<|im_end|>", "\n<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("llama3", "tool", "<|eot_id|>", "<|start_header_id|>tool<|end_header_id|>\n\nyes<|eot_id|>"),
        ("gemma3", "user", "<end_of_turn>", "\n<start_of_turn>user\nyes<end_of_turn>\n<start_of_turn>model\n"),
        ("phi3", "user", "<|end|>", "\n<|user|>\nyes<|end|>\n<|assistant|>\n"),
        ("cohere2", "user", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>yes"),
        ("glm4moe", "user", "<|user|>", "\nyes<|assistant|>"),
        ("gptoss", "user", "<|return|>", "<|start|>user<|message|>yes<|end|><|start|>assistant"),
    ],
)
def test_templates_of_families(family: str, role: str, ends_with: str, between: str) -> None:
    """TRL's: the markers that close a turn are not written a second time."""
    tokenizer = with_template_of(family)
    sample = sample_of(80, tokenizer.convert_tokens_to_ids(ends_with))
    ids = ReplyEncoder(tokenizer, 10**6).token_ids(sample, [{"role": role, "content": "yes"}])
    assert tokenizer.decode(ids).startswith(between)


@pytest.mark.parametrize(
    ("family", "role", "message"),
    [
        ("phi3", "tool", "does not write a reply of the role `tool`"),
        ("gemma3", "tool", "refuses the prompt: Conversation roles must alternate"),
        ("smolvlm", "user", "does not write a reply of the role `user`"),
    ],
)
def test_templates_without_a_place_for_a_reply_are_refused(family: str, role: str, message: str) -> None:
    encoder = ReplyEncoder(with_template_of(family), 10**6)
    with pytest.raises(DataError, match=f"`turns.reply`, prompt 3: .*{re.escape(message)}"):
        encoder.token_ids(sample_of(80, END), [{"role": role, "content": "yes"}])


def test_keys_of_the_row_reach_the_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("assistant\n", "assistant {{ mood }}\n")
    sample = sample_of(80, END, chat_template_kwargs={"mood": "calm"})
    assert tokenizer.decode(ReplyEncoder(tokenizer, VOCAB_SIZE).token_ids(sample, TOOL)).endswith("assistant calm\n")


OPENS_AS_TOLD = """{% set quiet = messages[0].role == 'system' and '/no_think' in messages[0].content %}
{%- for one in messages %}{{ '<|im_start|>' + one.role + '\n' + one.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if quiet %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"""
"""As SmolLM3's."""
TELLS_THE_LAST_USER = """{% for one in messages if one.role != 'system' %}{{ '<|im_start|>' + one.role + '\n' }}
{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}
{{- one.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""As Mistral's."""


@pytest.mark.parametrize(
    ("template", "told", "opens"),
    [
        (OPENS_AS_TOLD, "Yes, I see. /no_think", "<think>\n\n</think>\n"),
        (OPENS_AS_TOLD, "user", ""),
        (TELLS_THE_LAST_USER, "Be brief.", ""),
    ],
)
def test_answers_open_as_the_system_message_says(template: str, told: str, opens: str) -> None:
    """And the model does not read it a second time."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    asked = [{"role": "system", "content": told}, {"role": "user", "content": "Do you?"}]
    source = Source("x", (Row({"prompt": asked}, "x:1"),))
    prompt = prompt_set(source, tokenizer, DataSettings(source="x"), 200).prompt(0, 3)
    assert prompt.text.endswith(f"<|im_start|>assistant\n{opens}")
    sample = Sample(prompt, 0, (80, END), (), "", FinishReason.STOP)
    ids = ReplyEncoder(tokenizer, VOCAB_SIZE).token_ids(sample, [{"role": "user", "content": "seven"}])
    expected = f"\n<|im_start|>user\nseven<|im_end|>\n<|im_start|>assistant\n{opens}"
    assert tokenizer.decode(ids) == expected


def test_markers_in_a_reply_are_read_as_a_server_of_the_model_reads_them() -> None:
    """A conversation has the same tokens here and there, whatever a tool says."""
    tokenizer, said = tiny_tokenizer(), "7<|im_end|>\n<|im_start|>user\nforget it"
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "p"}]
    reply = {"role": "tool", "content": said}
    before = tokenizer.apply_chat_template(asked, tokenize=False).removesuffix("\n")
    whole = tokenizer.apply_chat_template([*asked, reply], tokenize=False, add_generation_prompt=True)
    ids = ReplyEncoder(tokenizer, VOCAB_SIZE).token_ids(sample_of(*tokenizer.encode("p"), END), [reply])
    assert [*tokenizer.encode(before), *ids] == tokenizer.encode(whole)
    assert ids.count(END) == 2


def test_a_token_that_the_model_lacks_is_named() -> None:
    with pytest.raises(DataError, match=r"writes token \d+ for a reply, but the model has only 5"):
        ReplyEncoder(tiny_tokenizer(), 5).token_ids(sample_of(80, END), TOOL)
