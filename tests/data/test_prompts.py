import copy
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.formats import Row
from plait.data.mixture import Mixed, Stream
from plait.data.prompts import PromptEncoder, PromptSet, evaluation_prompts, prompt_set
from plait.data.records import Prompt
from plait.data.settings import DataSettings
from plait.data.sources import Source
from plait.errors import DataError
from tests.cases import examples
from tests.models.tiny import tiny_tokenizer

TEXTS = ("what is 3 plus 4?", "what is 12 minus 5?", "the lazy dog")


def source(*prompts, **columns) -> Source:
    return Source("x.jsonl", tuple(Row({"prompt": p, **columns}, f"x.jsonl:{n}") for n, p in enumerate(prompts, 1)))


def keys(**given_keys) -> DataSettings:
    return DataSettings(source="x.jsonl", **given_keys)


def rendered(prompt, *, tokenizer=None, columns=None, **given_keys) -> str:
    row = Row({"prompt": prompt, **(columns or {})}, "x.jsonl:1")
    encoder = PromptEncoder(
        tokenizer or tiny_tokenizer(), keys(**given_keys), conversational=not isinstance(prompt, str)
    )
    return encoder.render(row)


class BosTokenizer:
    """Word ids, with a BOS (id 7) of its own as Llama's tokenizers add one; `<s>` in the text is that token too."""

    bos_token_id = 7
    chat_template = None

    def __call__(self, text, *, add_special_tokens=True):
        ids = [7 if word == "<s>" else 100 + len(word) for word in text.split()]
        return {"input_ids": [7, *ids] if add_special_tokens else ids}

    def apply_chat_template(self, conversation, **kwargs):
        return " ".join(["<s>", *(message["content"] for message in conversation), "assistant"])


class ChatBosTokenizer(BosTokenizer):
    chat_template = "a template that writes <s> itself"


# -- rendering


def test_a_text_prompt_is_one_user_message():
    assert rendered("hi") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def strict_tokenizer():
    """As Gemma's: no system role."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    return tokenizer


def test_a_chat_template_that_refuses_the_prompt_is_said_with_its_place():
    assert rendered("hi", tokenizer=strict_tokenizer()) == rendered("hi")
    said = (
        r"x\.jsonl:1: the chat template of the model refuses the prompt: System role not supported \(messages: system, "
    )
    with pytest.raises(DataError, match=said + r"user\); change `data\.system_prompt`, or `data\.source`$"):
        rendered("hi", tokenizer=strict_tokenizer(), system_prompt="be brief")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with pytest.raises(DataError, match=said + r"user\); change `data\.source`$"):
        rendered(messages, tokenizer=strict_tokenizer())
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{{ messages[0]['content'] + '.' }}"
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: the chat template .* refuses the prompt: can only concatenate list"
    ):
        rendered([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], tokenizer=tokenizer)


def test_a_chat_template_that_is_none_is_said_to_be_that():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{% for message in messages %}\n{{ message['content'] "
    with pytest.raises(DataError, match=r"^the chat template of the model is not valid Jinja: line 2: unexpected end"):
        rendered("hi", tokenizer=tokenizer)


def test_template_and_system_prompt_go_around_the_question():
    text = rendered("2+2?", prompt_template="Q: {question} {x} A:", system_prompt="be brief")
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nQ: 2+2? {x} A:<|im_end|>\n<|im_start|>assistant\n"
    )


def test_raw_text():
    assert rendered("2+2?", chat_template=False, prompt_template="{question}=") == "2+2?="
    assert rendered("2+2?", tokenizer=BosTokenizer()) == "2+2?", "auto: a tokenizer without a template sends text raw"


def test_messages_end_where_the_response_begins():
    user = {"role": "user", "content": "hi"}
    assert rendered([user]) == rendered("hi")
    goes_on = rendered([user, {"role": "assistant", "content": "It is"}])
    assert goes_on.endswith("<|im_start|>assistant\nIt is")


def test_the_row_of_a_prompt_is_not_changed_by_a_system_prompt():
    row = Row({"prompt": [{"role": "user", "content": "hi"}]}, "x.jsonl:1")
    encoder = PromptEncoder(tiny_tokenizer(), keys(system_prompt="s"), conversational=True)
    assert encoder.render(row) == encoder.render(row)
    assert row.prompt == [{"role": "user", "content": "hi"}]


def test_template_arguments_of_a_row_reach_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}/{{ tools[0]['name'] }}/{{ style }}"
    columns = {"tools": [{"name": "sum"}], "chat_template_kwargs": {"style": "x"}}
    text = rendered("hi", tokenizer=tokenizer, columns=columns)
    assert text == "hi/sum/x"


def test_template_arguments_of_the_recipe_are_those_of_rows_that_say_nothing_else():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}/{{ style }}/{{ mood }}"
    own = [{}, {"chat_template_kwargs": None}, {"chat_template_kwargs": {"mood": "calm"}}]
    rows = Source("x", tuple(Row({"prompt": "hi", **columns}, f"x.jsonl:{n}") for n, columns in enumerate(own)))
    found = prompt_set(rows, tokenizer, keys(chat_template_kwargs={"style": "a", "mood": "b"}), 99)
    assert [found.prompt(n, n).text for n in range(3)] == ["hi/a/b", "hi/a/b", "hi/a/calm"]
    assert found.prompt(2, 2).columns["chat_template_kwargs"] == {"style": "a", "mood": "calm"}, "replies have it too"
    assert rows[0].columns == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("given_keys", "said"),
    [
        ({"chat_template_kwargs": {"modo": "b"}}, "`modo`, which the chat template of the model does not read"),
        ({"chat_template_kwargs": {"mood": "b"}, "chat_template": False}, "needs a chat template, but texts are sent"),
    ],
)
def test_template_arguments_that_nothing_reads_are_refused(given_keys, said):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}/{{ mood }}"
    with pytest.raises(DataError, match=said):
        PromptEncoder(tokenizer, keys(**given_keys), conversational=False)


TOOLS = [{"type": "function", "function": {"name": "sum"}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_that_the_template_leaves_out_are_refused(tools):
    with pytest.raises(DataError, match=r"x\.jsonl:1: the chat template of the model leaves out the column `tools`"):
        rendered("hi", columns={"tools": tools})
    called = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]
    with pytest.raises(DataError, match=r"x\.jsonl:1: the chat template of the model leaves out `tool_calls`"):
        rendered([*called, {"role": "tool", "content": "3"}])


@pytest.mark.parametrize("tools", [None, [], "[]", ""])
def test_no_tools_are_none(tools):
    assert rendered("hi", columns={"tools": tools}) == rendered("hi")


@pytest.mark.parametrize("tools", [3, {"name": "sum"}, "3"])
def test_tools_that_are_no_list_are_refused(tools):
    with pytest.raises(DataError, match=r"^x\.jsonl:1: column `tools` must be a list of tools, found"):
        rendered("hi", columns={"tools": tools})


@pytest.mark.parametrize(
    ("prompt", "given_keys", "tokenizer", "said"),
    [
        ([{"role": "user", "content": "a"}], {"prompt_template": "{question}"}, None, "data.prompt_template"),
        ([{"role": "user", "content": "a"}], {"chat_template": False}, None, "data.chat_template"),
        ([{"role": "user", "content": "a"}], {}, BosTokenizer(), "no chat template"),
        ([{"role": "system", "content": "a"}], {"system_prompt": "b"}, None, "x.jsonl:1"),
        ("a", {"chat_template": True}, BosTokenizer(), "no chat template"),
        ("a", {"chat_template": False, "system_prompt": "b"}, None, "data.system_prompt"),
    ],
)
def test_settings_that_do_not_fit_are_refused(prompt, given_keys, tokenizer, said):
    with pytest.raises(DataError, match=said):
        rendered(prompt, tokenizer=tokenizer, **given_keys)


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (BosTokenizer(), "ab abc", (7, 102, 103)),
        (BosTokenizer(), "<s> ab", (7, 102)),
        (ChatBosTokenizer(), "ab", (7, 102, 109)),
    ],
)
def test_there_is_one_bos(tokenizer, text, expected):
    encoder = PromptEncoder(tokenizer, keys(), conversational=False)
    assert encoder.token_ids(encoder.render(Row({"prompt": text}, "x:1"))) == expected


def test_token_ids_are_those_of_the_tokenizer():
    tokenizer = tiny_tokenizer()
    prompt = prompt_set(source(*TEXTS, answer="7"), tokenizer, keys(), 200).prompt(1, uid=5)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": TEXTS[1]}], add_generation_prompt=True)
    assert list(prompt.token_ids) == list(chat["input_ids"])
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.columns == {"prompt": TEXTS[1], "answer": "7"}


# -- length


def test_over_long_prompts_fail_or_are_dropped_and_never_cut():
    tokenizer = tiny_tokenizer()
    long = "fox " * 60
    rows = source(TEXTS[0], long, TEXTS[1])
    lengths = [
        len(prompt_set(source(text), tokenizer, keys(), 1000).prompt(0, 0).token_ids)
        for text in (TEXTS[0], long, TEXTS[1])
    ]
    limit = max(lengths[0], lengths[2])
    with pytest.raises(DataError) as caught:
        prompt_set(rows, tokenizer, keys(), limit)
    for words in ("1 of 3 prompts", "x.jsonl:2", f"has {lengths[1]}", f"than {limit} tokens", "data.max_prompt_tokens"):
        assert words in str(caught.value)
    kept = prompt_set(rows, tokenizer, keys(overlong_prompts="drop"), limit)
    assert (kept.kept, kept.num_dropped, kept.longest_tokens, len(kept)) == ((0, 2), 1, limit, 2)
    assert prompt_set(rows, tokenizer, keys(), lengths[1]).num_dropped == 0, "at the limit is not over it"
    one, other = (kept.prompt(n, n).token_ids for n in range(2))
    shared = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert kept.root == one[:shared] != ()
    with pytest.raises(DataError, match="3 of 3 prompts"):
        prompt_set(rows, tokenizer, keys(overlong_prompts="drop"), 2)


def test_an_empty_prompt_is_named():
    with pytest.raises(DataError, match=r"x\.jsonl:2: the prompt is empty"):
        prompt_set(source("a", ""), tiny_tokenizer(), keys(chat_template=False), 10)
    silent = copy.deepcopy(tiny_tokenizer())
    silent.chat_template = "{{ messages[0].text }}"
    with pytest.raises(DataError, match=r"^x\.jsonl:1: the chat template of the model writes nothing for it; remove"):
        prompt_set(source("a"), silent, keys(), 10)


# -- the stream


def stream(rows: int, seed: int = 0, *, shuffle: bool = True) -> Stream[PromptSet, Prompt]:
    made = source(*(f"question {n}" for n in range(rows)))
    prompts = PromptSet(
        made, PromptEncoder(tiny_tokenizer(), keys(), conversational=False), tuple(range(rows)), (9,) * rows, 0
    )
    return Stream(Mixed((prompts,), shuffles=(shuffle,)), one_prompt, seed=seed)


def one_prompt(prompts: PromptSet, row: int, uid: int) -> list[Prompt]:
    return [prompts.prompt(row, uid)]


def asked(prompts) -> list[str]:
    return [prompt.columns["prompt"] for prompt in prompts]


@settings(max_examples=examples(50, 100))
@given(rows=st.integers(1, 9), per_step=st.integers(1, 12), seed=st.integers(0, 5), steps=st.integers(1, 12))
def test_every_epoch_asks_every_row_once_and_uids_are_unique(rows, per_step, seed, steps):
    one = stream(rows, seed)
    run = [prompt for step in range(steps) for prompt in one.take(step * per_step, per_step)]
    assert [prompt.uid for prompt in run] == list(range(steps * per_step))
    for start in range(0, len(run) - rows + 1, rows):
        assert len(set(asked(run[start : start + rows]))) == rows
    counts = Counter(asked(run))
    assert max(counts.values()) - min(counts.values(), default=0) <= 1 or len(counts) < rows


@settings(max_examples=examples(30, 100))
@given(st.permutations(range(6)))
def test_a_step_does_not_depend_on_what_was_asked_before(order):
    straight = stream(5).take(0, 18)
    one = stream(5)
    for step in order:
        assert one.take(3 * step, 3) == straight[3 * step : 3 * step + 3]


def test_seeds_and_epochs_differ_and_the_order_is_pinned():
    epochs = [asked(stream(30, seed).take(30 * step, 30)) for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # Golden: a run that is resumed under a later version asks the same.
    assert asked(stream(6, seed=3).take(0, 6)) == [f"question {n}" for n in GOLDEN]
    assert asked(stream(4, shuffle=False).take(4, 4)) == [f"question {n}" for n in range(4)]


GOLDEN = (5, 2, 0, 3, 1, 4)


def test_epoch_and_evaluation_prompts():
    one = stream(8)
    assert [one.epoch(count) for count in (0, 12, 24)] == [0, 1.5, 3]
    held_out = evaluation_prompts(one.mixed.sets[0], 16)
    assert asked(held_out) == [f"question {n}" for n in range(8)]
    assert [prompt.uid for prompt in held_out] == list(range(16, 24))


def test_columns_of_a_prompt_survive_json():
    assert json.loads(json.dumps(dict(stream(2).take(0, 1)[0].columns)))


def test_examples_are_turns_before_the_question():
    text = rendered("2+2?", prompt_template="Q: {question}", system_prompt="add", examples=[("1+1?", "2")])
    assert text == (
        "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\nQ: 1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nQ: 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(DataError, match=r"`data\.examples`.*sent raw"):
        rendered("hi", chat_template=False, examples=[("a", "b")])
    with pytest.raises(DataError, match=r"`data\.examples`.*messages"):
        rendered([{"role": "user", "content": "hi"}], examples=[("a", "b")])


def written_by(template, prompt):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return rendered(prompt, tokenizer=tokenizer)


def test_messages_that_the_template_leaves_out_are_refused():
    """Templates write roles that they know, and many are silent about others."""
    known = "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
    question = {"role": "user", "content": " hi\n"}
    assert written_by(known, [question]) == "<user>hi"
    for role in ("system", "developer", "tool"):
        with pytest.raises(DataError, match=rf"^x\.jsonl:1: .* leaves out message 1, of the role `{role}`, so the"):
            written_by(known, [{"role": role, "content": "be brief"}, question])
    assert written_by(known, [{"role": "system", "content": " "}, question]) == "<user>hi", "there is nothing to see"


def test_a_message_that_says_what_the_template_says_by_itself_is_read():
    """Templates of Qwen2.5 and SmolLM2 begin a conversation without a system message with one of their own."""
    own = "{% if messages[0].role != 'system' %}<system>Be kind.{% endif %}"
    own += "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    question = {"role": "user", "content": "hi"}
    expected = "<system>Be kind.<user>hi"
    assert (
        written_by(own, [question])
        == written_by(own, [{"role": "system", "content": "Be kind."}, question])
        == expected
    )


def test_content_that_the_template_rewrites_is_not_left_out():
    loud = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    assert written_by(loud, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]) == (
        "BE BRIEFHI"
    )
