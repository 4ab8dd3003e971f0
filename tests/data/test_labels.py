"""Labelled responses: what their rows are, by hand and against TRL's own preparation, and what is wrong with some."""

from __future__ import annotations

import pytest

from plait.data.examples import ExampleSet, most_tokens
from plait.data.formats import RowKind
from plait.data.mismatched import mismatched
from plait.data.mixture import Mixed
from plait.data.settings import DataSettings
from plait.data.sources import open_splits, read_rows
from plait.errors import DataError
from tests.data.json_rows import written
from tests.data.test_examples import TrlTrainer, assistant, prepare, user
from tests.models.tiny import tiny_tokenizer

TEXTS = [
    {"prompt": "what is 3 plus 4?", "completion": " the answer is 7.", "label": True},
    {"prompt": "the answe", "completion": "r is 7", "label": False},
    {"prompt": "né", "completion": "e über 🦊", "label": True},
]
CHATS = [
    {"prompt": [user("1+1?")], "completion": [assistant("2")], "label": True},
    {"prompt": [user("1+1?"), assistant("2"), user("so?")], "completion": [assistant("fox")], "label": False},
]
PAIRS = [
    {"prompt": "what is 3 plus 4?", "chosen": " the answer is 7.", "rejected": " 8", "by": "a"},
    {"prompt": "the answe", "chosen": "r is 7", "rejected": " is", "by": "b"},
]
IMPLICIT = [
    {"chosen": "the lazy dog jumps", "rejected": "the lazy fox", "by": "a"},
    {"chosen": [user("1+1?"), assistant("2")], "rejected": [user("1+1?"), assistant("3")], "by": "b"},
]


def labelled(folder, *rows, **keys) -> ExampleSet:
    return prepare(folder, *rows, kind=RowKind.LABELLED, **keys)


def trl_rows(rows):
    """(prompt, completion, mismatched completion, label) as KTOTrainer prepares them."""
    datasets = pytest.importorskip("datasets")
    from trl import KTOConfig, KTOTrainer

    config = KTOConfig(max_length=None, report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=100)
    tokenizer = tiny_tokenizer()
    trainer = TrlTrainer(tokenizer)
    trainer.calculate_KL, trainer.desirable_weight, trainer.undesirable_weight = True, 1.0, 1.0
    dataset = datasets.Dataset.from_list(rows)
    prepared = KTOTrainer._prepare_dataset(trainer, dataset, tokenizer, config, "train")
    names = ("prompt_ids", "completion_ids", "KL_completion_ids", "label")
    return [tuple(row[name] for name in names) for row in prepared]


@pytest.mark.parametrize(
    "rows",
    [TEXTS, CHATS, PAIRS, IMPLICIT[:1], IMPLICIT[1:]],
    ids=["texts", "messages", "pairs", "pairs without a prompt", "pairs of messages"],
)
def test_rows_are_those_of_trl(tmp_path, rows):
    """Of messages without the line break after a turn. Of pairs TRL has all chosen ones first, and takes completions
    from rows of the same prompt as of another."""
    made = labelled(tmp_path, *rows)
    expected = trl_rows(rows)
    line_break = tiny_tokenizer()("\n")["input_ids"] if "content" in str(rows) else []
    if "chosen" in rows[0]:
        half = len(expected) // 2
        expected = [row for pair in zip(expected[:half], expected[half:], strict=True) for row in pair]
    given = [made.given(index, index)[0] for index in range(len(made))]
    others = mismatched(given, made.max_tokens)
    for one, other, (prompt, completion, kl_completion, label) in zip(given, others, expected, strict=True):
        assert list(one.sample.prompt.token_ids) == list(other.sample.prompt.token_ids) == prompt
        assert [*one.sample.token_ids, *line_break] == completion
        assert one.label == label
        if "label" in rows[0]:
            assert [*other.sample.token_ids, *line_break] == kl_completion


def test_a_pair_is_two_labelled_responses_with_its_other_columns(tmp_path):
    rows = read_rows(written(tmp_path / "rows.jsonl", [*PAIRS, TEXTS[2] | {"by": "c"}]), RowKind.LABELLED)
    assert [(row.columns["completion"], row.columns["label"], row.columns["by"]) for row in rows] == [
        (" the answer is 7.", True, "a"),
        (" 8", False, "a"),
        ("r is 7", True, "b"),
        (" is", False, "b"),
        ("e über 🦊", True, "c"),
    ]
    assert [row.question for row in rows] == ["what is 3 plus 4?"] * 2 + ["the answe"] * 2 + ["né"]


@pytest.mark.parametrize("label", [True, 1, 1.0, False, 0])
def test_labels_may_be_numbers(tmp_path, label):
    (given,) = labelled(tmp_path, TEXTS[0] | {"label": label}).given(0, 0)
    assert given.label == float(label)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "a", "completion": "b"},
            ["labelled responses need the columns", "`completion` and `label`"],
        ),
        ({"prompt": "a", "completion": "b", "labels": True}, ["rows.jsonl:1", "; rename `labels` to `label`"]),
        ({"prompt": "a", "completion": "b", "label": "good"}, ["`label` must be true", "or false, found 'good'"]),
        ({"prompt": "a", "completion": "b", "label": 2}, ["found 2"]),
        ({"prompt": "a", "completion": "b", "label": None}, ["need the columns"]),
        ({"prompt": "a", "completion": "", "label": True}, ["`completion` is empty"]),
        ({"text": "a b", "label": True}, ["labelled responses need the columns"]),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, ["`rejected` is empty"]),
    ],
)
def test_bad_rows_are_named(tmp_path, row, said):
    with pytest.raises(DataError) as caught:
        labelled(tmp_path, row)
    for words in said:
        assert words in str(caught.value)


def test_held_out_responses_have_labels_of_both_kinds(tmp_path):
    """Though the desirable response to each prompt comes first, and one of a prompt is held out."""
    rows = [
        {"prompt": f"{n}", "completion": f" {n}" if label else " no", "label": label}
        for label in (True, False)
        for n in range(40)
    ]
    settings = DataSettings(source=written(tmp_path / "rows.jsonl", rows))
    splits = open_splits(settings, 20, RowKind.LABELLED)
    held_out = splits.evaluation.rows
    assert 5 < sum(row.columns["label"] for row in held_out) < 15
    assert len({row.question for row in held_out}) == 20
    assert not {row.question for row in held_out} & {row.question for row in splits.train.rows}
    written(tmp_path / "rows.jsonl", rows[::-1])
    assert {row.columns["completion"] for row in open_splits(settings, 20, RowKind.LABELLED).evaluation.rows} == {
        row.columns["completion"] for row in held_out
    }, "whatever the order of the file"


def test_limits_are_said_of_labelled_responses(tmp_path):
    with pytest.raises(DataError, match="2 of 3 labelled responses are longer than 12 tokens"):
        labelled(tmp_path, *TEXTS, max_example_tokens=12)
    few, many = labelled(tmp_path, TEXTS[0], max_example_tokens=30), labelled(tmp_path, TEXTS[1])
    assert most_tokens(Mixed((few, many), ("a", "b"), (1.0, 1.0), (True, True))) == 10_000
