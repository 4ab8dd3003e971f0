"""Examples and pairs: which tokens they have and which are learnt, by hand and against TRL's own preparation."""

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.assistant_turns import SpokenFinder
from plait.data.chat import Ids
from plait.data.examples import ExampleSet, Given, evaluation_samples, example_set
from plait.data.formats import Row, RowKind
from plait.data.mixture import Mixed, Stream
from plait.data.records import FinishReason
from plait.data.settings import DataSettings
from plait.data.sources import Source, open_splits, read_rows
from plait.errors import DataError
from tests.cases import examples
from tests.data.json_rows import written
from tests.data.test_prompts import one_prompt
from tests.models.tiny import tiny_tokenizer

END = "<|im_end|>"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def prepare(folder, *rows, kind=RowKind.EXAMPLES, limit=10_000, tokenizer=None, **keys) -> ExampleSet:
    name = written(folder / "rows.jsonl", rows)
    source = Source(name, tuple(read_rows(name, kind)), kind)
    return example_set(source, tokenizer or tiny_tokenizer(), DataSettings(source=name, **keys), limit)


def pairs(folder, *rows, **keys) -> ExampleSet:
    return prepare(folder, *rows, kind=RowKind.PAIRS, **keys)


def shown(one: Given) -> tuple[str, str, str]:
    """Prompt, response, and what of it is learnt, the rest as dots."""
    tokenizer = tiny_tokenizer()
    learnt = "".join(
        tokenizer.decode([token]) if trained else "." * len(tokenizer.decode([token]))
        for token, trained in zip(one.sample.token_ids, one.trained, strict=True)
    )
    return tokenizer.decode(one.sample.prompt.token_ids), tokenizer.decode(one.sample.token_ids), learnt


# -- what is learnt


def test_a_completion_is_learnt_with_its_end_and_a_prompt_is_not(tmp_path):
    (one,) = prepare(tmp_path, {"prompt": "what is 3 plus 4?", "completion": " 7", "n": 1}).given(0, uid=9)
    assert shown(one) == ("what is 3 plus 4?", " 7<|im_end|>", " 7<|im_end|>")
    sample = one.sample
    assert (sample.uid, sample.text, sample.logprobs, sample.policy_version) == ("9.0", " 7", (), -1)
    assert sample.finish_reason is FinishReason.STOP
    assert sample.prompt.columns == {"prompt": "what is 3 plus 4?", "completion": " 7", "n": 1}
    assert sample.prompt.text == "what is 3 plus 4?"


def test_an_end_that_is_there_is_not_doubled(tmp_path):
    (one,) = prepare(tmp_path, {"prompt": "a", "completion": f" 7{END}"}).given(0, 0)
    assert shown(one)[1] == " 7<|im_end|>"


def test_text_is_learnt_whole_but_for_its_first_token(tmp_path):
    (one,) = prepare(tmp_path, {"text": "the lazy dog"}).given(0, 0)
    ids = tiny_tokenizer()("the lazy dog" + END)["input_ids"]
    assert [*one.sample.prompt.token_ids, *one.sample.token_ids] == ids
    assert len(one.sample.prompt.token_ids) == 1
    assert set(one.trained) == {1.0}


def test_only_turns_of_the_assistant_are_learnt_each_with_the_token_that_closes_it(tmp_path):
    system = {"role": "system", "content": "add"}
    messages = [system, user("1+1?"), assistant("2"), user("1+2?"), assistant("3"), user("thanks")]
    (one,) = prepare(tmp_path, {"messages": messages}).given(0, 0)
    prompt, response, learnt = shown(one)
    assert prompt == f"<|im_start|>system\nadd{END}\n<|im_start|>user\n1+1?{END}\n<|im_start|>assistant\n"
    assert response == f"2{END}\n<|im_start|>user\n1+2?{END}\n<|im_start|>assistant\n3{END}"
    between = f"\n<|im_start|>user\n1+2?{END}\n<|im_start|>assistant\n"
    assert learnt == f"2{END}{'.' * len(between)}3{END}"
    assert one.sample.text == tiny_tokenizer().decode(one.sample.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 0, "train": False}])
def test_turns_that_say_so_are_read_and_not_learnt(tmp_path, off):
    """As OpenAI's format for training has it; the last one ends the sample where what is learnt ends."""
    first = [user("1+1?"), assistant("3") | off, user("sure?"), assistant("2") | {"weight": 1, "train": None}]
    (one,) = prepare(tmp_path, {"messages": first}).given(0, 0)
    prompt, response, learnt = shown(one)
    opened = "<|im_start|>assistant\n"
    assert prompt + response == (
        f"<|im_start|>user\n1+1?{END}\n{opened}3{END}\n<|im_start|>user\nsure?{END}\n{opened}2{END}"
    )
    assert learnt.replace(".", "") == f"2{END}"
    (one,) = prepare(tmp_path, {"messages": [*first, user("so?"), assistant("4") | off]}).given(0, 0)
    assert shown(one) == (prompt, response, learnt)
    alike = {"prompt": first[:1], "completion": first[1:]}
    assert shown(prepare(tmp_path, alike).given(0, 0)[0]) == (prompt, response, learnt)


def test_what_is_not_learnt_of_a_pair_is_not_learnt_of_either(tmp_path):
    begin = [user("1+1?"), assistant("3") | {"weight": 0}, user("sure?")]
    row = {"prompt": begin[:1], "chosen": [*begin[1:], assistant("2")], "rejected": [*begin[1:], assistant("5")]}
    chosen, rejected = pairs(tmp_path, row).given(0, 0)
    assert [shown(one)[2].replace(".", "") for one in (chosen, rejected)] == [f"2{END}", f"5{END}"]


def test_of_a_conversation_in_parts_those_without_anything_to_learn_are_left_out(tmp_path):
    messages = [user("1+1?"), assistant("2#two"), user("so?"), assistant("2#so") | {"weight": 0}]
    tokenizer = reworded(tiny_tokenizer())
    found = prepare(tmp_path, {"messages": messages}, tokenizer=tokenizer)
    alone = prepare(tmp_path, {"messages": messages[:2]}, tokenizer=tokenizer)
    assert len(found) == 1
    assert shown(found.given(0, 0)[0]) == shown(alone.given(0, 0)[0])


def test_results_of_tools_are_not_learnt(tmp_path):
    call = {"role": "assistant", "content": "sum(1, 2)"}
    row = {"prompt": [user("1+2?")], "completion": [call, {"role": "tool", "content": "3"}, assistant("it is 3")]}
    (one,) = prepare(tmp_path, row).given(0, 0)
    assert shown(one)[2].replace(".", "") == f"sum(1, 2){END}it is 3{END}"


def test_a_call_of_tools_needs_no_content(tmp_path):
    """TRL's documentation writes calls so; with null it is the same row."""
    function = {"name": "sum", "arguments": {"a": 1}}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    rest = [{"role": "tool", "name": "sum", "content": "3"}, assistant("it is 3")]
    tokenizer = with_template_of("qwen2_5")
    shapes = {}
    for name, one in {"left out": call, "null": call | {"content": None}}.items():
        made = prepare(tmp_path, {"messages": [user("1+2?"), one, *rest]}, tokenizer=tokenizer)
        made_pair = pairs(
            tmp_path, {"prompt": [user("1+2?")], "chosen": [one], "rejected": [assistant("4")]}, tokenizer=tokenizer
        )
        given = [*made.given(0, 0), *made_pair.given(0, 1)]
        shapes[name] = [(one.sample.prompt.token_ids, one.sample.token_ids, one.trained) for one in given]
        learnt = learnt_turns(tokenizer, given[0].sample.token_ids, given[0].trained)
        assert learnt == [
            f'<tool_call>\n{{"name": "sum", "arguments": {{"a": 1}}}}\n</tool_call>{END}',
            f"it is 3{END}",
        ]
    assert shapes["left out"] == shapes["null"]
    with pytest.raises(DataError, match="expected messages"):
        prepare(tmp_path, {"messages": [{"role": "user"}, assistant("3")]})


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["values", "text"])
def test_arguments_of_a_call_may_be_json(tmp_path, arguments):
    """As OpenAI's API gives them: they are not written as JSON a second time. A template that puts texts together takes
    a text alone."""
    call = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    row = {"messages": [user("1+2?"), call]}
    tokenizer = with_template_of("qwen2_5")
    (one,) = prepare(tmp_path, row, tokenizer=tokenizer).given(0, 0)
    learnt = learnt_turns(tokenizer, one.sample.token_ids, one.trained)
    assert learnt == [f'<tool_call>\n{{"name": "f", "arguments": {{"a": 1}}}}\n</tool_call>{END}']
    joining = with_template_of("qwen2_5")
    joining.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ '=' + c.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    if isinstance(arguments, dict):
        with pytest.raises(DataError, match=r"can only concatenate str"):
            prepare(tmp_path, row, tokenizer=joining)
        return
    (one,) = prepare(tmp_path, row, tokenizer=joining).given(0, 0)
    assert learnt_turns(joining, one.sample.token_ids, one.trained) == [f'={{"a": 1}}{END}']


def test_a_completion_may_begin_with_the_result_of_a_tool(tmp_path):
    call = {"role": "assistant", "content": "sum(1, 2)"}
    row = {"prompt": [user("1+2?"), call], "completion": [{"role": "tool", "content": "3"}, assistant("it is 3")]}
    made = prepare(tmp_path, row)
    prompt, response, learnt = shown(made.given(0, 0)[0])
    assert prompt == f"<|im_start|>user\n1+2?{END}\n<|im_start|>assistant\nsum(1, 2){END}\n"
    opening = f"<|im_start|>tool\n3{END}\n<|im_start|>assistant\n"
    assert (response, learnt) == (f"{opening}it is 3{END}", f"{'.' * len(opening)}it is 3{END}")


def test_a_text_prompt_can_be_sent_as_a_message(tmp_path):
    keys = {"chat_template": True, "system_prompt": "add", "prompt_template": "Q: {question}"}
    (one,) = prepare(tmp_path, {"prompt": "1+1?", "completion": "2"}, **keys).given(0, 0)
    prompt = f"<|im_start|>system\nadd{END}\n<|im_start|>user\nQ: 1+1?{END}\n<|im_start|>assistant\n"
    assert shown(one) == (prompt, f"2{END}", f"2{END}")
    (raw,) = prepare(tmp_path, {"prompt": "1+1?", "completion": " 2"}, prompt_template="Q: {question}").given(0, 0)
    assert shown(raw)[:2] == ("Q: 1+1?", f" 2{END}")


def test_a_pair_has_one_prompt_and_two_responses(tmp_path):
    chosen, rejected = pairs(tmp_path, {"prompt": "3+4?", "chosen": " 7", "rejected": " 8 9"}).given(0, uid=5)
    assert chosen.sample.prompt is rejected.sample.prompt
    assert (chosen.sample.uid, rejected.sample.uid) == ("5.0", "5.1")
    assert shown(chosen)[1:] == (f" 7{END}", f" 7{END}")
    assert shown(rejected)[1] == f" 8 9{END}"


def test_a_pairs_margin_is_a_number_of_its_row(tmp_path):
    row = {"prompt": "3+4?", "chosen": " 7", "rejected": " 8"}
    assert [one.margin for one in pairs(tmp_path, row | {"margin": 2}).given(0, 0)] == [2.0, 2.0]
    assert [one.margin for one in pairs(tmp_path, row).given(0, 0)] == [0.0, 0.0]
    for wrong in ("2", True):
        with pytest.raises(DataError, match="`margin` must be a finite number"):
            pairs(tmp_path, row | {"margin": wrong})
    with pytest.raises(DataError, match="NaN is no number of JSON"):
        pairs(tmp_path, row | {"margin": float("nan")})


def test_a_pair_of_conversations_shares_what_it_begins_with(tmp_path):
    begin = [user("1+1?"), assistant("2"), user("3+4?")]
    made = pairs(tmp_path, {"chosen": [*begin, assistant("7")], "rejected": [*begin, assistant("8")]})
    chosen, rejected = made.given(0, 0)
    assert shown(chosen)[0].endswith(f"3+4?{END}\n<|im_start|>assistant\n")
    assert (shown(chosen)[1:], shown(rejected)[1]) == ((f"7{END}", f"7{END}"), f"8{END}")
    # With the prompt as a text beside, as some data sets have it.
    both = {"prompt": "1+1?", "chosen": [user("1+1?"), assistant("2")], "rejected": [user("1+1?"), assistant("3")]}
    assert shown(pairs(tmp_path, both).given(0, 0)[0])[0].startswith("<|im_start|>user\n1+1?")


def test_a_token_over_the_boundary_belongs_to_the_response(tmp_path):
    made = prepare(tmp_path, {"prompt": "the answe", "completion": "r is 7"}, {"prompt": "the", "completion": " 7"})
    (one,) = made.given(0, 0)
    whole = tiny_tokenizer()("the answer is 7" + END)["input_ids"]
    assert [*one.sample.prompt.token_ids, *one.sample.token_ids] == whole
    assert one.sample.prompt.text == "the answe"
    assert shown(one)[0] == "the"


# -- as TRL has it

TEXT_ROWS = [
    {"prompt": "what is 3 plus 4?", "completion": " the answer is 7."},
    {"prompt": "the answe", "completion": "r is 7"},
    {"prompt": "a", "completion": f" fox{END}"},
    {"prompt": "a  ", "completion": "  fox\n"},
    {"prompt": "né", "completion": "e über 🦊"},
]
CHAT_ROWS = [
    {"prompt": [user("1+1?")], "completion": [assistant("2")]},
    {"prompt": [user("1+1?"), assistant("2"), user("so?")], "completion": [assistant("fox")]},
]
PAIR_ROWS = [
    {"prompt": "what is 3 plus 4?", "chosen": " the answer is 7.", "rejected": " 8"},
    {"prompt": "the answe", "chosen": "r is 7", "rejected": " is"},
    {"chosen": "the lazy dog jumps", "rejected": "the lazy fox"},
    {"chosen": "the lazy dog", "rejected": "the lazy"},
]
CHAT_PAIR_ROWS = [
    {"prompt": [user("1+1?")], "chosen": [assistant("2")], "rejected": [assistant("3")]},
    {"chosen": [user("1+1?"), assistant("2")], "rejected": [user("1+1?"), assistant("3")]},
]


class TrlTrainer:
    """What `_prepare_dataset` of TRL's trainers reads of them."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.chat_template = None
        self.completion_only_loss = True


def trl_examples(rows, **arguments):
    """(input_ids, labels) as SFTTrainer prepares them."""
    datasets = pytest.importorskip("datasets")
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(max_length=None, report_to="none", use_cpu=True, bf16=False, **arguments)
    tokenizer = tiny_tokenizer()
    prepared = SFTTrainer._prepare_dataset(
        TrlTrainer(tokenizer), datasets.Dataset.from_list(rows), tokenizer, config, False, None, "train"
    )
    return [(row["input_ids"], row["labels"]) for row in prepared]


def trl_pairs(rows):
    """(prompt, chosen, rejected) ids as DPOTrainer prepares them."""
    datasets = pytest.importorskip("datasets")
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(max_length=None, report_to="none", use_cpu=True, bf16=False)
    tokenizer = tiny_tokenizer()
    prepared = DPOTrainer._prepare_dataset(
        TrlTrainer(tokenizer), datasets.Dataset.from_list(rows), tokenizer, config, "train"
    )
    return [(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in prepared]


def as_labels(one: Given) -> tuple[list[int], list[int]]:
    prompt, response = one.sample.prompt.token_ids, one.sample.token_ids
    labels = [token if trained else -100 for token, trained in zip(response, one.trained, strict=True)]
    return [*prompt, *response], [-100] * len(prompt) + labels


def test_texts_are_those_of_trl(tmp_path):
    made = prepare(tmp_path, *TEXT_ROWS)
    assert [as_labels(made.given(i, i)[0]) for i in range(len(made))] == trl_examples(TEXT_ROWS)
    prompts = [made.given(i, i)[0].sample.prompt for i in range(len(made))]
    assert any(list(prompt.token_ids) != tiny_tokenizer()(prompt.text)["input_ids"] for prompt in prompts), (
        "over the boundary"
    )


def test_language_modelling_is_that_of_trl(tmp_path):
    rows = [{"text": "the lazy dog"}, {"text": f"a quick fox{END}"}]
    made = prepare(tmp_path, *rows)
    for index, (ids, labels) in enumerate(trl_examples(rows)):
        found, found_labels = as_labels(made.given(index, 0)[0])
        assert (found, found_labels[1:]) == (ids, labels[1:])  # the loss never reads the first label


def test_messages_are_those_of_trl_but_for_the_line_break_after_the_end(tmp_path):
    made = prepare(tmp_path, *CHAT_ROWS)
    (line_break,) = tiny_tokenizer()("\n")["input_ids"]
    for index, (ids, labels) in enumerate(trl_examples(CHAT_ROWS)):
        found, found_labels = as_labels(made.given(index, 0)[0])
        assert ([*found, line_break], [*found_labels, line_break]) == (ids, labels)


def test_conversations_are_those_of_trl_with_a_template_that_marks_the_assistant(tmp_path):
    from trl.data_utils import _tokenize

    messages = [user("1+1?"), assistant("2"), user("so?"), assistant("fox")]
    marked = tiny_tokenizer()
    marked.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}"
        "<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    theirs = _tokenize(marked, messages, return_assistant_tokens_mask=True)
    found, labels = as_labels(prepare(tmp_path, {"messages": messages}).given(0, 0)[0])
    assert found == theirs["input_ids"][:-1]
    assert [label != -100 for label in labels] == [bool(bit) for bit in theirs["assistant_masks"][:-1]]


MARKERS = [
    *("<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|return|>", "<｜end▁of▁sentence｜>"),
    *("<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>", "<|user|>", "<|assistant|>"),
]


def with_template_of(family: str):
    """The tiny tokenizer with a chat template that TRL brings along, and the markers that it writes."""
    import trl

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKERS})
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = (Path(trl.__file__).parent / f"chat_templates/{family}.jinja").read_text()
    return tokenizer


def learnt_turns(tokenizer, ids, bits) -> list[str]:
    marked = "".join(tokenizer.decode([token]) if bit else "\0" for token, bit in zip(ids, bits, strict=True))
    return [turn for turn in marked.split("\0") if turn]


@pytest.mark.parametrize(
    ("family", "first", "last"),
    [
        ("qwen2_5", "two<|im_end|>", "fox<|im_end|>"),
        ("qwen3_instruct_2507", "two<|im_end|>", "fox<|im_end|>"),
        ("llama3_2", "two<|eot_id|>", "fox<|eot_id|>"),
        ("gemma3", "two<end_of_turn>", "fox<end_of_turn>"),
        ("cohere2", "two<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "fox<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("deepseekv3", "two<｜end▁of▁sentence｜>", "fox<｜end▁of▁sentence｜>"),
        # The text ends with a marker of its own, after the one that closes the last turn.
        ("phi3", "two<|end|>", "fox<|end|>"),
        # The last turn is closed by another marker.
        ("gptoss", "<|channel|>final<|message|>two<|end|>", "<|channel|>final<|message|>fox<|return|>"),
        # Nothing closes a turn but the next one.
        ("glm4moe", "\n<think></think>\ntwo<|user|>", "\n<think></think>\nfox"),
    ],
)
def test_templates_of_many_families(tmp_path, family, first, last):
    tokenizer = with_template_of(family)
    messages = [user("1+1?"), assistant("two"), user("so?"), assistant("fox")]
    made = prepare(tmp_path, {"messages": messages}, tokenizer=tokenizer)
    (one,) = made.given(0, 0)
    assert learnt_turns(tokenizer, one.sample.token_ids, one.trained) == [first, last]
    assert one.sample.text.endswith("fox")
    (alone,) = prepare(tmp_path, {"prompt": messages[:3], "completion": messages[3:]}, tokenizer=tokenizer).given(0, 0)
    assert learnt_turns(tokenizer, alone.sample.token_ids, alone.trained) == [last]


@pytest.mark.parametrize("family", ["cohere", "gemma3", "llama3", "lfm2", "phi3", "qwen3_instruct_2507", "qwen3"])
def test_what_is_learnt_is_what_templates_for_training_mark_but_for_white_space(tmp_path, family):
    from trl.data_utils import _tokenize

    tokenizer = with_template_of(f"{family}_training")
    messages = [user("1+1?"), assistant("two"), user("so?"), assistant("fox")]
    (one,) = prepare(tmp_path, {"messages": messages}, tokenizer=tokenizer).given(0, 0)
    theirs = _tokenize(tokenizer, messages, return_assistant_tokens_mask=True)
    marked = learnt_turns(tokenizer, theirs["input_ids"], theirs["assistant_masks"])
    found = learnt_turns(tokenizer, one.sample.token_ids, one.trained)
    assert found == [turn.removesuffix("\n<|endoftext|>").removesuffix("\n<|im_end|>").rstrip() for turn in marked]


def test_a_template_that_leaves_out_what_is_said_is_refused(tmp_path):
    """As those of vision models do with texts."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.role != 'assistant' }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: .* leaves out what the assistant says in turn 2"):
        prepare(tmp_path, {"messages": [user("a"), assistant("b")]}, tokenizer=tokenizer)


@pytest.mark.parametrize("rows", [PAIR_ROWS[:2], PAIR_ROWS[2:]], ids=["explicit", "implicit"])
def test_pairs_of_texts_are_those_of_trl(tmp_path, rows):
    made = pairs(tmp_path, *rows)
    for index, (prompt, *responses) in enumerate(trl_pairs(rows)):
        both = made.given(index, 0)
        assert list(both[0].sample.prompt.token_ids) == prompt
        assert [list(one.sample.token_ids) for one in both] == responses
        assert all(set(one.trained) == {1.0} for one in both)


@pytest.mark.parametrize("row", CHAT_PAIR_ROWS, ids=["explicit", "implicit"])
def test_pairs_of_messages_are_those_of_trl_but_for_the_line_break(tmp_path, row):
    both = pairs(tmp_path, row).given(0, 0)
    line_break = tiny_tokenizer()("\n")["input_ids"]
    ((prompt, *responses),) = trl_pairs([row])
    assert list(both[0].sample.prompt.token_ids) == prompt
    assert [[*one.sample.token_ids, *line_break] for one in both] == responses


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=12).filter(str.strip)


@settings(deadline=None, max_examples=examples(24, 60))
@given(prompt=TEXT, turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_any_conversation_is_put_together_again(prompt, turns):
    """Prompt and response are the rendered whole up to its last end; what is learnt is the answers, one by one."""
    messages = [{"role": "system", "content": prompt}]
    for question, answer in turns:
        messages += [user(question), assistant(answer)]
    source = Source("x", tuple(_rows([{"messages": messages}])), RowKind.EXAMPLES)
    tokenizer = tiny_tokenizer()
    (one,) = example_set(source, tokenizer, DataSettings(source="x"), 10_000).given(0, 0)
    ids = [*one.sample.prompt.token_ids, *one.sample.token_ids]
    assert ids == tokenizer.apply_chat_template(messages)["input_ids"][: len(ids)]
    learnt = [token for token, trained in zip(one.sample.token_ids, one.trained, strict=True) if trained]
    assert tokenizer.decode(learnt) == "".join(answer + END for _, answer in turns)
    assert one.sample.token_ids[-1] == tokenizer.eos_token_id


def _rows(values, kind=RowKind.EXAMPLES):
    from plait.data.formats import make_row

    return [make_row(value, kind, "prompt", f"x:{number}") for number, value in enumerate(values, 1)]


# -- what is refused


def reworded(tokenizer):
    """As Qwen3's: reasoning is kept in the last turn alone."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('#')[-1] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def test_where_a_template_rewrites_earlier_turns_a_conversation_is_several_examples(tmp_path):
    """The same as a row for each answer, in which the model reads what it would read when it answers."""
    messages = [user("1+1?"), assistant("2#two"), user("so?"), assistant("2#so"), user("and?"), assistant("2#and")]
    tokenizer = reworded(tiny_tokenizer())
    by_hand = [{"prompt": messages[:at], "completion": messages[at : at + 1]} for at in (1, 3, 5)]
    one_turn = {"messages": [user("a"), assistant("b")]}
    found, expected = [
        prepare(tmp_path, *rows, tokenizer=tokenizer, system_prompt="s")
        for rows in ([one_turn, {"messages": messages, "x": 7}], [one_turn, *by_hand])
    ]
    assert (len(found), found.num_parted, expected.num_parted) == (4, 1, 0)
    assert found.lengths == expected.lengths
    for index in range(4):
        (mine,), (theirs,) = found.given(index, index), expected.given(index, index)
        assert shown(mine) == shown(theirs)
        assert mine.trained == theirs.trained
        assert mine.sample.prompt.token_ids == theirs.sample.prompt.token_ids
        assert mine.sample.prompt.columns.get("x") == (7 if index else None)
        assert "messages" not in mine.sample.prompt.columns or index == 0
    assert [shown(found.given(index, 0)[0])[1] for index in range(1, 4)] == [
        f"2#{it}{END}" for it in ("two", "so", "and")
    ]


def test_parting_a_long_conversation_takes_a_few_renderings_of_each_answer():
    tokenizer, count = reworded(tiny_tokenizer()), 40
    turns = [turn for at in range(count) for turn in (user(f"{at}?"), assistant(f"hm#{at}"))]
    ids, rendered = Ids(tokenizer), []
    finder = SpokenFinder(tokenizer, lambda text, chat: rendered.append(text) or ids(text, chat=chat))
    parts = finder.parted([], turns, Row({}, "x:1"), "x")
    assert parts == [([], turns[:2]), *((turns[:at], turns[at : at + 1]) for at in range(3, 2 * count, 2))]
    assert len(rendered) < 12 * count


def test_only_where_a_template_rewrites_turns_a_conversation_is_parted(tmp_path):
    """Qwen3's keeps what was said since the last question of the user: a call, what it returned, and the answer."""
    called = {"tool_calls": [{"function": {"name": "add", "arguments": {}}}], "reasoning_content": "hm"}
    call, told = {**assistant(""), **called}, {"role": "tool", "content": "2"}
    answers = [{**assistant(text), "reasoning_content": "so"} for text in ("two", "three")]
    messages = [user("1+1?"), call, told, answers[0], user("so?"), call, told, answers[1]]
    tokenizer = with_template_of("qwen3")
    made = prepare(tmp_path, {"messages": messages}, tokenizer=tokenizer)
    assert (len(made), made.num_parted) == (2, 1)
    calling = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    for index, text in enumerate(("two", "three")):
        (one,) = made.given(index, index)
        answer = f"<think>\nso\n</think>\n\n{text}<|im_end|>"
        assert learnt_turns(tokenizer, one.sample.token_ids, one.trained) == [calling, answer]
        before = tokenizer.decode(one.sample.prompt.token_ids)
        assert "think" not in before
        assert ("two" in before) == (index == 1)


def test_a_text_whose_system_message_is_written_last_is_refused_by_its_place(tmp_path):
    """No parting helps a question and its answer."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{{ messages[0].content }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {"prompt": "1+1?", "completion": "two"}
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*the first 2 turns .* differently once others follow"):
        prepare(tmp_path, row, tokenizer=tokenizer, chat_template=True, system_prompt="be the fox")


def test_turns_that_are_rewritten_at_once_are_refused(tmp_path):
    """A pair is of whole completions; and no parting helps where the prompt itself is written otherwise."""
    messages = [user("1+1?"), assistant("2#two"), user("so?"), assistant("2#so")]
    tokenizer = reworded(tiny_tokenizer())
    row = {"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:2]}
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*the first 2 turns .*`data.source`, with the turns before"):
        pairs(tmp_path, row, tokenizer=tokenizer)
    row = {"messages": [user("2#1+1?"), assistant("two"), user("so?"), assistant("so")]}
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*the first 1 turns .*`data.source`, with the turns before"):
        prepare(tmp_path, row, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "completion": " "}, ["rows.jsonl:1", "`completion` is empty"]),
        ({"prompt": "a", "completion": ""}, ["`completion` is empty"]),
        ({"text": ""}, ["`text` is empty"]),
        ({"text": 7}, ["`text` must be a text", "found a number"]),
        ({"prompt": "", "completion": "b"}, ["the prompt is empty"]),
        ({"prompt": "th", "completion": "e cat"}, ["the prompt is one token with what follows it; make it longer"]),
        ({"prompt": "a", "completion": 7}, ["`completion` must be a text or a list of messages", "found a number"]),
        ({"prompt": "a", "completion": [assistant("b")]}, ["the prompt is a text, but `completion` is messages"]),
        ({"prompt": [user("a")], "completion": "b"}, ["the prompt is messages, but `completion` is a text"]),
        ({"prompt": [user("a")], "completion": [user("b")]}, ["no turn of the assistant"]),
        ({"prompt": [user("a")], "completion": [assistant("")]}, ["a turn of the assistant in `completion` is empty"]),
        ({"messages": [user("a")]}, ["no turn of the assistant", "remove"]),
        ({"messages": [assistant("a")]}, ["the assistant speaks first", "data.system_prompt"]),
        ({"prompt": "a", "completions": "b"}, ["`prompt` and `completion`", "; rename `completions` to `completion`"]),
        ({"mesages": []}, ["; rename `mesages` to `messages`"]),
        ({"messages": "a"}, ["rows.jsonl:1: `messages` must be a list of messages, found a text", "column `text`"]),
        ({"question": "a", "answer": "b"}, ["; rename `question` to `prompt` and `answer` to `completion`"]),
        ({"instruction": "a", "input": "", "output": "b"}, ["; rename `instruction` to `prompt` and `output` to `co"]),
        ({"prompt": "a", "response": "b"}, ["; rename `response` to `completion`"]),
        ({"prompt": "a"}, ["examples need the columns", "found `prompt`; rename the columns"]),
        (
            {"prompt": "a", "completion": None},
            ["found `prompt`; `completion` is null; give it a value, or remove the row"],
        ),
        ({"conversations": [{"from": "human", "value": "a"}]}, ["make of `conversations` a column `messages`"]),
        ({"text": "a b", "images": [1]}, ["images"]),
        ({"messages": [user("a"), assistant("b") | {"weight": 0.5}]}, ["must be 0 (not learnt) or 1", "found 0.5"]),
        ({"messages": [user("a"), assistant("b") | {"weight": "0"}]}, ["must be 0 (not learnt) or 1", "found '0'"]),
        ({"messages": [user("a"), assistant("b") | {"train": 0}]}, ["`train` of a message", "must be true or false"]),
        ({"messages": [user("a"), assistant("b") | {"weight": 0}]}, ["all turns of the assistant", "nothing to learn"]),
        ({"messages": [user("a"), assistant("b") | {"weight": 1, "train": False}]}, ["by its `weight`", "otherwise"]),
        (
            {"messages": [user("a"), assistant("b"), user("c") | {"train": True}, assistant("d")]},
            ["of the role `user`", "by its `train`", "only what the assistant says"],
        ),
    ],
)
def test_bad_examples_are_named(tmp_path, row, said):
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, row)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, ["pairs need the columns `chosen` and `rejected`"]),
        ({"prompt": "a", "chosen": "b", "rejcted": "c"}, ["; rename `rejcted` to `rejected`"]),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, ["`rejected` is empty"]),
        ({"prompt": "a", "chosen": "b", "rejected": [assistant("c")]}, ["both be texts or both messages"]),
        ({"chosen": "a b", "rejected": "c d"}, ["no `prompt`", "do not begin alike"]),
        (
            {
                "prompt": "a",
                "chosen": [{"role": "assistant", "content": "b"}],
                "rejected": [{"role": "assistant", "content": "c"}],
            },
            ["the prompt is a text, the completions are messages", "do not begin alike", "make it a list"],
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ["rows.jsonl:1", "the same", "data.overlong_prompts: drop"]),
    ],
)
def test_bad_pairs_are_named(tmp_path, row, said):
    with pytest.raises(DataError) as caught:
        pairs(tmp_path, row)
    for words in said:
        assert words in str(caught.value)


def test_mixed_formats_and_settings_that_do_not_fit(tmp_path):
    with pytest.raises(DataError, match=r"mixed formats: the completion of .*:1 is a text, the text of .*:2"):
        prepare(tmp_path, {"prompt": "a", "completion": "b"}, {"text": "c d"})
    for key, value in (("chat_template", True), ("system_prompt", "s"), ("prompt_template", "{question}")):
        with pytest.raises(DataError, match=f"`data.{key}` is about prompts"):
            prepare(tmp_path, {"text": "a b"}, **{key: value})
    with pytest.raises(DataError, match=r"`data\.system_prompt` needs a chat template"):
        prepare(tmp_path, {"prompt": "a", "completion": "b"}, system_prompt="s")
    with pytest.raises(DataError, match=r"`data\.chat_template` is false"):
        prepare(tmp_path, CHAT_ROWS[0], chat_template=False)
    no_end = tiny_tokenizer()
    no_end.eos_token = None
    with pytest.raises(DataError, match="no EOS token"):
        prepare(tmp_path, TEXT_ROWS[0], tokenizer=no_end)


# -- length


def test_over_long_examples_fail_or_are_dropped_and_never_cut(tmp_path):
    rows = [TEXT_ROWS[0], {"prompt": "a", "completion": " fox" * 90}, TEXT_ROWS[2]]
    free = prepare(tmp_path, *rows)
    lengths = [len(as_labels(free.given(i, 0)[0])[0]) for i in range(3)]
    limit = max(lengths[0], lengths[2])
    assert lengths[1] > limit
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, *rows, limit=limit)
    for words in ("1 of 3 examples", "rows.jsonl:2", f"{lengths[1]} in all", "data.max_example_tokens"):
        assert words in str(caught.value)
    kept = prepare(tmp_path, *rows, limit=limit, overlong_prompts="drop")
    assert (kept.kept, kept.num_dropped, kept.longest_tokens, len(kept)) == ((0, 2), 1, limit, 2)
    short = len(free.given(2, 0)[0].sample.prompt.token_ids)
    assert prepare(tmp_path, *rows, overlong_prompts="drop", max_prompt_tokens=short).kept == (1, 2)
    assert prepare(tmp_path, *rows, overlong_prompts="drop", max_example_tokens=limit).kept == (0, 2)
    with pytest.raises(DataError, match="3 of 3 examples"):
        prepare(tmp_path, *rows, limit=1, overlong_prompts="drop")


def test_equal_pairs_are_dropped_and_counted(tmp_path):
    same = {"prompt": "a", "chosen": "b", "rejected": f"b{END}"}
    made = pairs(tmp_path, PAIR_ROWS[0], same, overlong_prompts="drop")
    assert (made.kept, made.num_dropped, len(made.given(0, 0))) == ((0,), 1, 2)
    with pytest.raises(DataError, match="the same in every pair"):
        pairs(tmp_path, same, overlong_prompts="drop")


# -- streams and splits


def test_a_stream_takes_every_row_once_per_epoch_as_prompts_do(tmp_path):
    rows = [{"prompt": f"{n}", "chosen": " a", "rejected": " b"} for n in range(5)]
    made = pairs(tmp_path, *rows)
    stream = Stream(Mixed((made,)), ExampleSet.given, seed=3)
    taken = stream.take(0, 10)
    assert [one.sample.uid for one in taken] == [f"{uid}.{index}" for uid in range(10) for index in (0, 1)]
    asked = [one.sample.prompt.text for one in taken[::2]]
    assert sorted(asked[:5]) == sorted(asked[5:]) == list("01234")
    assert asked[:5] != asked[5:]
    assert stream.take(6, 2) == taken[12:16]
    assert stream.epoch(10) == 2
    in_order = Stream(Mixed((made,), shuffles=(False,)), ExampleSet.given, seed=3).take(5, 5)
    assert [one.sample.prompt.text for one in in_order[::2]] == list("01234")
    held_out = evaluation_samples(made, 16)
    assert [one.sample.prompt.uid for one in held_out[::2]] == list(range(16, 21))


def test_prompts_and_examples_of_one_seed_take_the_same_places(tmp_path):
    from plait.data.prompts import prompt_set

    name = written(tmp_path / "rows.jsonl", [{"prompt": f"{n}", "completion": " a"} for n in range(9)])
    keys = DataSettings(source=name, chat_template=False)
    prompts = prompt_set(open_splits(keys).train, tiny_tokenizer(), keys, 100)
    examples = example_set(open_splits(keys, 0, RowKind.EXAMPLES).train, tiny_tokenizer(), keys, 100)
    asked = Stream(Mixed((prompts,)), one_prompt, seed=1).take(3, 11)
    given = Stream(Mixed((examples,)), ExampleSet.given, seed=1).take(3, 11)
    assert [one.sample.prompt.text for one in given] == [prompt.text for prompt in asked]


def test_no_question_is_learnt_and_held_out(tmp_path):
    rows = [{"prompt": f"{n % 10}", "completion": f" {n}"} for n in range(30)]
    splits = open_splits(DataSettings(source=written(tmp_path / "rows.jsonl", rows)), 4, RowKind.EXAMPLES)
    held_out = {row.question for row in splits.evaluation.rows}
    assert len(held_out) == len(splits.evaluation) == 4
    assert not held_out & {row.question for row in splits.train.rows}
    assert (len(splits.train), splits.num_removed) == (18, 12)
    conversations = [{"messages": [user(f"{n % 3}"), assistant(f"{n}")]} for n in range(9)]
    splits = open_splits(DataSettings(source=written(tmp_path / "rows.jsonl", conversations)), 1, RowKind.EXAMPLES)
    assert len(splits.train) == 6
    one_prompt = [{"prompt": "Review:", "chosen": f" {n % 6}", "rejected": " x"} for n in range(12)]
    splits = open_splits(DataSettings(source=written(tmp_path / "rows.jsonl", one_prompt)), 2, RowKind.PAIRS)
    assert (len(splits.train), len(splits.evaluation)) == (8, 2)
    with pytest.raises(DataError, match="a reasoning_gym task has prompts, but pairs are needed"):
        open_splits(DataSettings(source="reasoning_gym:chain_sum"), 1, RowKind.PAIRS)


def test_the_columns_of_the_documented_formats_are_read(tmp_path):
    """Every line of the table in docs/data.md, with texts and with messages."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    begins = tuple(f"| `{kind}` |" for kind in (RowKind.EXAMPLES, RowKind.PAIRS, RowKind.LABELLED))
    lines = [line for line in page.splitlines() if line.startswith(begins)]
    assert len(lines) == 6
    for line in lines:
        kind, names = (cell.strip() for cell in line.split("|")[1:3])
        columns = [name.strip(" `") for name in names.split(",")]
        texts = {name: f"a b {name}" for name in columns}
        turns = {name: [user("a"), assistant(name)] for name in columns}
        if "prompt" in columns:
            turns = {name: [user("a") if name == "prompt" else assistant(name)] for name in columns}
        texts, turns = ({**row, "label": True} if "label" in columns else row for row in (texts, turns))
        columns = [name for name in columns if name != "label"]
        for row in [texts] * ("messages" not in columns) + [turns] * ("text" not in columns):
            assert len(prepare(tmp_path, row, kind=RowKind(kind.strip("`"))).given(0, 0)) == len(columns) - (
                "prompt" in columns
            )
