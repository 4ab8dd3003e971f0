"""The built-in reward: finding the answer, its form, and the scorers of reasoning_gym on text that they cannot read."""

import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from plait.data.tasks import create_task, draw
from plait.errors import ConfigError
from plait.rewards.answers import AnswerFormat, Verdict, extract_answer, has_form
from plait.rewards.functions import eval_functions_of, functions_of
from plait.rewards.pool import RewardPool
from plait.rewards.settings import RewardSettings
from plait.rewards.tasks import TaskReward, WellFormed, score_answer
from tests.rewards.samples import group


@pytest.mark.parametrize(
    ("text", "where", "answer"),
    [
        ("so <answer> 12 </answer>", "tags", "12"),
        ("<answer>1</answer> no: <answer>\n2\n</answer>.", "tags", "2"),
        ("<answer>a\nb</answer>", "tags", "a\nb"),
        ("<answer>12", "tags", None),
        ("<answer>  </answer>", "tags", None),
        ("<answer>1<answer>2</answer></answer>", "tags", "1<answer>2"),
        ("</answer><answer>3</answer>", "tags", "3"),
        ("first\n last \n\n", "line", "last"),
        (" \n", "line", None),
        ("7 + 5 = 12.", "number", "12"),
        ("it is -3", "number", "-3"),
        ("3 - 5 = -2", "number", "-2"),
        ("12-5", "number", "5"),
        ("(-4)", "number", "-4"),
        ("about 1,234,567 or so", "number", "1234567"),
        ("1,2,3", "number", "3"),
        ("0.50", "number", "0.50"),
        ("x2", "number", "2"),
        ("it is .5", "number", ".5"),
        ("it is -.5", "number", "-.5"),
        ("and so...5", "number", "5"),
        ("some 2e3 of them", "number", "2e3"),
        ("1.5E-3.", "number", "1.5E-3"),
        ("= \u22125", "number", "-5"),  # the minus sign of typeset mathematics
        ("none", "number", None),
        (" a b ", "whole", "a b"),
        ("", "whole", None),
    ],
)
def test_extract(text, where, answer):
    assert extract_answer(text, AnswerFormat(where)) == answer


def test_a_tag_that_is_said_over_and_over_takes_no_longer_than_other_text():
    began = time.perf_counter()
    assert extract_answer("<answer>" * 50_000, AnswerFormat.TAGS) is None
    assert time.perf_counter() - began < 5, "a call of the reward has 30 s; each tag read to the end takes minutes"


@given(st.text(), st.sampled_from(AnswerFormat))
def test_any_text_can_be_read(text, where):
    found = extract_answer(text, where)
    assert found is None or (found and found == found.strip())


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "it is {}.", "so\n= {}\n", "{:,}"]))
def test_a_number_is_found_again(number, template):
    assert extract_answer(template.format(number), AnswerFormat.NUMBER) == str(number)


@pytest.mark.parametrize(
    ("answer", "reference", "formed"),
    [
        ("7", "12", True),
        ("-1,000.5", "12", True),
        ("seven", "12", False),
        ("7 apples", "12", False),
        ("nan", "12", False),
        ("1e999999", "12", False),
        ("2 + 1e9999", "3 + 4", False),
        ("1e9", "12", True),
        ("dog", "cat", True),
        ("nan", "2+3i", False),
        ("inf", None, False),
        ("nan bread", "nan", True),
        ("anything", None, True),
    ],
)
def test_form(answer, reference, formed):
    assert has_form(answer, reference) is formed


ENTRY = {"question": "q", "answer": "12", "metadata": {}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("12", (Verdict.EXACT, 1.0)),
        ("+12.0", (Verdict.EXACT, 1.0)),
        ("13", (Verdict.WRONG, 0.0)),
        ("123", (Verdict.PARTIAL, pytest.approx(2 / 3))),
        ("12 is it", (Verdict.MALFORMED, 0.0)),
        (None, (Verdict.MALFORMED, 0.0)),
    ],
)
def test_verdicts_of_a_sum(answer, expected):
    assert score_answer("chain_sum", {}, answer, ENTRY) == expected


def test_a_scorer_that_raises_has_met_malformed_text():
    # prime_factorization raises ValueError, boxnet TypeError, coin_flip OverflowError on these.
    (entry,) = [create_task("prime_factorization", {})[0]]
    assert score_answer("prime_factorization", {}, "the factors are 2 and 3", entry) == (Verdict.MALFORMED, 0.0)
    assert score_answer("prime_factorization", {}, entry["answer"], entry) == (Verdict.EXACT, 1.0)
    coin = create_task("coin_flip", {})[0]
    assert score_answer("coin_flip", {}, "1e999999", coin) == (Verdict.MALFORMED, 0.0)


def test_a_scorer_that_computes_for_ever_has_met_malformed_text(monkeypatch):
    monkeypatch.setattr("plait.rewards.tasks._scorer", lambda task, parameters: NeverEnds())
    monkeypatch.setattr("plait.rewards.tasks.SCORER_LIMIT_S", 0.2)
    assert score_answer("chain_sum", {}, "12", ENTRY) == (Verdict.MALFORMED, 0.0)


class NeverEnds:
    def score_answer(self, answer, entry):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))


def test_a_row_that_is_at_fault_itself_is_not_called_malformed_text(monkeypatch):
    with pytest.raises(KeyError):
        score_answer("leg_counting", {}, "3", {"question": "q", "metadata": {}})
    monkeypatch.setattr("plait.rewards.tasks._scorer", lambda task, parameters: AlwaysRaises())
    with pytest.raises(KeyError, match="metadata"):
        score_answer("chain_sum", {}, "12", ENTRY)


class AlwaysRaises:
    def score_answer(self, answer, entry):
        raise KeyError("metadata")


def rows(task: str, count: int, **parameters) -> list[dict]:
    return [row.columns for row in draw(task, parameters, 0, 0, count)[1]]


def test_the_reward_in_trls_signature():
    columns = rows("chain_sum", 3)
    right = [row["answer"] for row in columns]
    texts = [f"<answer>{right[0]}</answer>", f"<answer>{right[1]}9</answer>", right[2]]
    named = {name: [row[name] for row in columns] for name in columns[0] if name != "prompt"}
    logged: dict[str, list] = {}
    reward = TaskReward(partial_credit=True)
    scores = reward([row["prompt"] for row in columns], texts, **named, log_extra=logged.__setitem__)
    assert scores == [1.0, pytest.approx(len(right[1]) / (len(right[1]) + 1)), 0.0]
    assert logged == {"verdict": ["exact", "partial", "malformed"], "answer": [right[0], f"{right[1]}9", None]}
    prompts = [row["prompt"] for row in columns]
    assert TaskReward()(prompts, texts, **named) == [1.0, 0.0, 0.0], "without partial credit"
    assert WellFormed()(prompts, texts, **named) == [1.0, 1.0, 0.0]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert TaskReward()(prompts, messages, **named) == [1.0, 0.0, 0.0]


def test_task_and_form_through_the_pool():
    (row,) = rows("chain_sum", 1, max_terms=2)
    settings = RewardSettings(functions=("task", "well_formed"), weights=(1.0, 0.25), answer="number")
    prompt = row.pop("prompt")
    with RewardPool(functions_of(settings, task="chain_sum")) as pool:
        pool.start(["prompt", *row])
        (one,) = pool.score(group(0, f"= {row['answer']}", "I do not know", "0.123", prompt=prompt, **row))
    assert one.scores == {"task": (1.0, 0.0, 0.0), "well_formed": (1.0, 0.0, 1.0)}
    assert one.rewards == (1.25, 0.0, 0.25)
    assert one.extras["verdict"] == ("exact", "malformed", "wrong")


def test_functions_that_the_settings_name():
    assert [f.name for f in functions_of(RewardSettings(), task="chain_sum")] == ["task"]
    two = functions_of(RewardSettings(functions=("task", "tests.rewards.samples.length"), weights=(1, 2)), task="x")
    assert [(f.name, f.weight) for f in two] == [("task", 1.0), ("length", 2.0)]
    for functions, said in (((), "is empty"), (("task",), "names `task`"), (("well_formed",), "names `well_formed`")):
        with pytest.raises(ConfigError, match=said):
            functions_of(RewardSettings(functions=functions), task=None)
    names = ("task", "tests.rewards.samples.length")
    of_reward = functions_of(RewardSettings(functions=names, answer="number"), task="chain_sum")
    eval_functions = eval_functions_of(names, AnswerFormat.NUMBER, task="chain_sum")
    assert eval_functions == of_reward, "whatever names them"
    assert eval_functions_of((), AnswerFormat.NUMBER, task="chain_sum") == ()
    with pytest.raises(ConfigError, match=r"`evaluation\.functions` names `task`, but `data\.source` is a file"):
        eval_functions_of(("task",), AnswerFormat.NUMBER, task=None)


SLOW_TO_DRAW = {"composite", "knight_swap", "word_ladder", "rearc", "futoshiki", "intermediate_integration"}
QUICK = sorted(set(DATASETS) - SLOW_TO_DRAW)
NONSENSE = ("", "I think it is blue.", "5", "-", "[1, 2]", '{"a": 1}', "1/0", "((((", "1e999999", "nan", "a,b\nc")


def check_task(task: str) -> None:
    """The task's own answer is exact; any nonsense gets a verdict, never an exception; rows can be sent to workers."""
    parameters: dict = {}
    entry = create_task(task, parameters, seed=1, size=4)[0]
    if entry["answer"] is not None:
        assert score_answer(task, parameters, str(entry["answer"]), entry) == (Verdict.EXACT, 1.0)
    for text in NONSENSE:
        verdict, score = score_answer(task, parameters, text, entry)
        assert 0 <= score <= 1
        assert (score == 1.0) == (verdict is Verdict.EXACT)
        if text != str(entry["answer"]) and text in ("I think it is blue.", "((((", "nan"):
            assert verdict is not Verdict.EXACT or task in ACCEPT_ANYTHING, (task, text)
    json.dumps(entry, default=str)


ACCEPT_ANYTHING = ("game_of_life_halting",)
"""Refused as a source of data for that reason."""


@pytest.mark.parametrize("task", QUICK[::6])
def test_a_sixth_of_the_tasks(task):
    check_task(task)


@pytest.mark.slow
@pytest.mark.parametrize("task", QUICK)
def test_every_task(task):
    check_task(task)
