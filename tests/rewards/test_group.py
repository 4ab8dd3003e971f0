"""A group's result is a function of the outcomes of its calls, in whatever order they come."""

import json
import math
import os
import random
import re
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.rewards.call_results import check_scores
from plait.rewards.functions import RewardFunction, reward_functions
from plait.rewards.group import Call, Group
from plait.rewards.loading import load_function, split_path
from plait.rewards.scores import FailureKind, GroupScores
from plait.rewards.settings import RewardSettings
from tests.rewards import samples
from tests.rewards.samples import group, in_two_turns

WORDS = ("fine", "turns", "none", "nan", "raise")
VALUES = {"fine": 2.0, "turns": [1.5, 0.5], "none": None, "nan": math.nan}


TURNS = (2, 3, 1, 1)


def outcome(words: tuple[str, ...]) -> dict[str, Any] | None:
    """What a worker would say to these words, None for a failed call."""
    if "raise" in words:
        return None
    reply = check_scores([VALUES[word] for word in words], [2] * len(words)) | {"extras": {}, "metrics": {}}
    return json.loads(json.dumps(reply))


def play(one: Group, words: list[tuple[str, ...]], order: random.Random) -> GroupScores:
    calls: list[Call] = one.calls()
    while calls:
        call = calls.pop(order.randrange(len(calls)))
        reply = outcome(tuple(words[call.function][place] for place in call.places))
        if reply is None:
            calls += one.failed(call, FailureKind.RAISED, "raised", "trace")
        else:
            calls += one.scored(call, reply)
    assert one.done
    return one.result()


@given(
    words=st.integers(1, 4).flatmap(
        lambda n: st.lists(st.tuples(*[st.sampled_from(WORDS)] * n), min_size=1, max_size=3)
    ),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_results_do_not_depend_on_the_order_of_outcomes(words, seeds):
    functions = [RewardFunction(f"f{i}", "x:y", 10.0**i) for i in range(len(words))]
    made = [Group(0, [in_two_turns(sample) for sample in group(0, *words[0])], functions) for _ in seeds]
    one, two = (play(group_, words, random.Random(seed)) for group_, seed in zip(made, seeds, strict=True))
    assert repr(one) == repr(two)
    for place in range(len(words[0])):
        column = [row[place] for row in words]
        applies = [10.0**i * 2 for i, word in enumerate(column) if word in ("fine", "turns")]
        if {"nan", "raise"} & set(column) or not applies:
            assert math.isnan(one.rewards[place])
        else:
            assert one.rewards[place] == sum(one.by_turn[place]) == sum(applies)
            assert one.by_turn[place][0] == sum(10.0**i * 1.5 for i, word in enumerate(column) if word == "turns")
    bad = sum(word in ("nan", "raise") for row in words for word in row)
    assert len(one.failures) == bad


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 2.5, True, None], {"scores": [1.0, 2.5, 1.0, None], "by_turn": {}}),
        ((0.0, 0.0, 0.0, 0.0), {"scores": [0.0] * 4, "by_turn": {}}),
        (numpy.array([1.0, 2.0, 3.0, 4.0]), {"scores": [1.0, 2.0, 3.0, 4.0], "by_turn": {}}),
        ([torch.tensor([7.0]), *[None] * 3], {"scores": [7.0, *[None] * 3], "by_turn": {}}),
        (
            [[1, 0.5], (0.1, 0.2, True), numpy.array([3.0]), torch.tensor([4.0])],
            {"scores": [1.5, 1.3, 3.0, 4.0], "by_turn": {0: [1.0, 0.5], 1: [0.1, 0.2, 1.0], 2: [3.0]}},
        ),
    ],
)
def test_scores_that_are_fine(returned, expected):
    """Of samples of 2, 3, 1 and 1 turns: a number for all turns, or one for each, which the score is the sum of."""
    assert check_scores(returned, TURNS) == expected | {"faults": {}}


@pytest.mark.parametrize(
    ("returned", "turns", "said"),
    [
        (None, (1,), "returned None, expected a list with one number for each sample, here one"),
        (None, (1, 1), "returned None, expected a list with a number for each of 2 samples"),
        (0.5, (1,), "returned float 0.5, expected a list with one number for each sample, here one"),
        ([1.0], (1, 1), "returned 1 scores for 2 samples"),
    ],
)
def test_what_is_no_list_of_scores_is_told_with_what_was_expected(returned, turns, said):
    assert check_scores(returned, turns) == {"error": said, "miscounted": True}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            [1.0],
            r"returned list \[1\.0\] where a number or None is expected, or a number for each turn of the sample: "
            r"2, not 1",
        ),
        ([1.0, 2.0, 3.0], "2, not 3"),
        ([], "2, not 0"),
        (numpy.ones(3), "2, not 3"),
        ([1.0, None], "returned None for turn 2 where a number is expected"),
        (["1.0", 2.0], "returned str '1.0' for turn 1 where a number is expected"),
        ([[1.0], [2.0]], r"returned list \[1\.0\] for turn 1 where a number is expected"),
        ([1.0, math.nan], "returned nan for turn 2, which is no score"),
        ([-math.inf, 1.0], "returned -inf for turn 1, which is no score"),
        ([1e308, 1e308], "whose sum is no finite number"),
        ({0: 1.0, 1: 2.0}, "returned dict .* where a number or None is expected"),
    ],
)
def test_what_is_no_score_of_a_sample_of_two_turns(value, said):
    found = check_scores([value, None, 1.0, [2.0]], TURNS)
    assert found["scores"] == [None, None, 1.0, 2.0]
    assert found["faults"].keys() == {0}
    assert found["by_turn"].keys() == {3}
    assert re.match(said if said.startswith("returned") else f".*{said}", found["faults"][0])


@pytest.mark.parametrize("returned", [None, 1.0, "ab", {0: 1.0, 1: 2.0}, (x for x in (1.0, 2.0)), [1.0]])
def test_what_cannot_be_read_as_one_score_each(returned):
    assert check_scores(returned, [1, 1])["miscounted"]


# -- finding functions


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("length", "expected FILE.py:FUNCTION"),
        ("rewards.py", "expected FILE.py:FUNCTION"),
        ("http://localhost:5000/score", "found `http://.*`; a service is asked by a function of yours"),
        ("no/such.py:f", "`no/such.py` does not exist"),
        ("/dev/null/such.py:f", r"`/dev/null/such.py` cannot be read \(Not a directory\)"),
        ("my-module:f", "neither a Python file nor a module"),
        ("module:1f", "expected FILE.py:FUNCTION"),
    ],
)
def test_paths_that_have_no_form(path, said):
    with pytest.raises(ConfigError, match=said) as caught:
        split_path(path, key="reward.functions")
    assert "reward.functions" in str(caught.value)


def test_loading(tmp_path):
    assert load_function("tests.rewards.samples:length") is samples.length
    assert load_function("tests.rewards.samples.length") is samples.length
    assert load_function("os:path.join") is os.path.join
    (tmp_path / "mine.py").write_text("def f(**_): return [1.0]\n")
    assert load_function(f"{tmp_path}/mine.py:f")() == [1.0]
    with pytest.raises(ConfigError, match="no module `no_such_package`"):
        load_function("no_such_package.mod:f")
    with pytest.raises(ConfigError, match=r"mine\.py` has no `score`; its functions: f$"):
        load_function(f"{tmp_path}/mine.py:score")
    with pytest.raises(ConfigError, match=r"has no `lenght`; did you mean `length`\?"):
        load_function("tests.rewards.samples:lenght")


def test_two_files_of_one_name(tmp_path):
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def f(**_): return [{value}]\n")
    functions = [load_function(f"{tmp_path}/{folder}/mine.py:f") for folder in ("a", "b")]
    assert [function() for function in functions] == [[1.0], [2.0]]


def test_a_file_that_has_changed_is_imported_anew(tmp_path):
    file = tmp_path / "edited.py"
    file.write_text("def f(**_): return [1.0]\n")
    first = load_function(f"{file}:f")
    assert load_function(f"{file}:f") is first
    file.write_text("def f(**_): return [2.0]\n")
    assert load_function(f"{file}:f")() == [2.0]


def test_a_file_that_is_imported_begins_no_run(tmp_path):
    """A script without a guard: each process of a run would begin another."""
    file = tmp_path / "unguarded.py"
    file.write_text("import plait\ndef f(**_): return [1.0]\nplait.train(model='m', run_dir='never')\n")
    with pytest.raises(
        ConfigError, match=r"is called while .*unguarded.py is imported.* under `if __name__ =="
    ) as said:
        load_function(f"{file}:f")
    assert "plait.train(model='m'" in said.value.frames
    file.write_text("def f(**_): return [1.0]\n")
    assert load_function(f"{file}:f")() == [1.0]


def test_names_are_unique_and_what_cannot_be_sent_is_refused():
    made = reward_functions([samples.length, "tests.rewards.samples:length", samples.Weighted(2)])
    assert [function.name for function in made] == ["length", "length#2", "Weighted"]
    made = reward_functions([samples.length, samples.length], reserved=("length",))
    assert [function.name for function in made] == ["length#2", "length#3"]
    with pytest.raises(ConfigError, match="top level of a file"):
        reward_functions([lambda completions: [1.0]])
    with pytest.raises(ConfigError, match="one each"):
        reward_functions([samples.length], [1.0, 2.0])
    with pytest.raises(ConfigError, match="at least one function"):
        reward_functions([])


def test_settings_count_their_weights():
    with pytest.raises(ValueError, match="2 numbers for 1 functions"):
        RewardSettings(weights=(1.0, 2.0))
