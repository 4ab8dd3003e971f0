"""The three forms of a reward: told apart by their parameters, filled from the data, mixed in one pool."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path

import pytest

from plait.data.records import FinishReason, Prompt, Sample
from plait.errors import ConfigError, RunError
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.scores import FailureKind
from plait.rewards.signature import Form, RewardCall, Signature, signature_of
from plait.rewards.tasks import TaskReward, WellFormed
from tests.cases import slow_but
from tests.rewards import forms, samples
from tests.rewards.pools import score
from tests.rewards.samples import group, in_two_turns

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (forms.trl, Form.TRL),
        (samples.chars, Form.TRL),
        (samples.Weighted(1.0), Form.TRL),
        (TaskReward(), Form.TRL),
        (WellFormed(), Form.TRL),
        (lambda **columns: [], Form.TRL),
        (lambda completion_ids, solution: [], Form.TRL),
        (forms.compute_score, Form.VERL),
        (forms.gsm8k, Form.VERL),
        (forms.judged, Form.VERL),
        (forms.reward_func, Form.OPENRLHF),
        (lambda queries, **kwargs: [], Form.OPENRLHF),
    ],
)
def test_forms(function, form):
    assert signature_of("f", function).form is form


def test_what_a_function_can_be_given():
    assert signature_of("f", forms.compute_score) == Signature(
        Form.VERL,
        named=("data_source", "solution_str", "ground_truth", "extra_info"),
        required=("data_source", "solution_str", "ground_truth"),
        takes_all=False,
    )


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (forms.two_at_once, "`two_at_once(completions, solution_str)` fits more than one form (TRL, verl)"),
        (forms.sees_nothing, "`sees_nothing(prompts, answer)` gets no response"),
        (forms.other_names, "`other_names(texts)` gets no response"),
        (forms.by_position, "takes `completions`, `answer` by position only"),
    ],
)
def test_an_unknown_form_is_answered_with_the_three(function, found):
    with RewardPool(reward_functions([function])) as pool, pytest.raises(ConfigError) as caught:
        pool.start()
    for said in (found, "f(prompts, completions,", "compute_score(data_source,", "reward_func(queries, prompts,"):
        assert said in str(caught.value)
    assert str(caught.value).count("reward `") == 1


# -- verl


def test_verl_gets_one_sample_at_a_time_and_its_extras_are_logged():
    columns = {"data_source": "math", "ground_truth": "b", "extra_info": {"split": "train", "index": 3}}
    (one,) = score(forms.compute_score, group(0, "a", "b", **columns))
    assert one.rewards == (0.0, 1.0)
    info = {"split": "train", "index": 3}
    assert one.extras == {"acc": (False, True), "seen": (["math", "a", "b", info], ["math", "b", "b", info])}
    assert one.metrics == {"rewards/compute_score/acc": (0.0, 1.0)}


def test_verls_ground_truth_is_found_in_its_own_data_format():
    inside = {"data_source": "s", "reward_model": {"style": "rule", "ground_truth": "b"}}
    (one, two) = score(
        forms.compute_score, group(0, "a", "b", **inside), group(1, "b", **inside, ground_truth="c", extra_info=None)
    )
    assert one.rewards == (0.0, 1.0)
    assert two.rewards == (0.0,), "a column of its own comes first"
    with pytest.raises(RunError, match=r"no `ground_truth`, and its `reward_model` holds none: found \['style'\]"):
        score(forms.compute_score, group(0, "a", data_source="s", reward_model={"style": "model"}))


def test_a_column_that_only_other_rows_have_hides_no_answer():
    """Rows have the columns of all rows, and of all sources: None where they lack one."""
    inside = {"data_source": "s", "reward_model": {"style": "rule", "ground_truth": "b"}}
    bare = {"data_source": "s", "reward_model": None}
    one, two = score(
        forms.compute_score,
        group(0, "a", "b", **inside, ground_truth=None) + group(1, "b", "c", **bare, ground_truth="c"),
    )
    assert (one.rewards, two.rewards) == ((0.0, 1.0), (0.0, 1.0))
    unlabelled = {"data_source": "s", "ground_truth": None, "reward_model": {"style": "m"}}
    (three,) = score(forms.compute_score, group(0, "a", **unlabelled))
    assert three.extras["seen"] == (["s", "a", None, None],), "no row has to have one"
    (four,) = score(forms.in_lists, templated("a", "bb", labels=None, label="bb"))
    assert four.rewards == (0.0, 1.0)


def test_verls_other_shapes():
    (one,) = score([forms.gsm8k, forms.judged], group(0, "ab", "c", data_source="s", ground_truth="c"))
    assert one.scores == {"gsm8k": (0.0, 1.0), "judged": (2.0, 1.0)}
    columns = {"data_source": "s", "ground_truth": "c", "extra_info": None}
    (one,) = score(forms.partly, group(0, "a", "b", **columns))
    assert (one.rewards, one.extras) == ((1.0, 0.5), {"hint": ("x", None)})


def test_a_coroutine_keeps_its_client_from_call_to_call():
    """As in TRL, all calls have one event loop."""
    found = score(forms.asks_a_service, group(0, "a", "bb"), group(1, "ccc", "d"), workers=1)
    assert [one.rewards for one in found] == [(1.0, 2.0), (3.0, 1.0)]
    assert [one.recovered for one in found] == [(), ()]


def test_where_one_coroutine_fails_the_others_are_ended():
    ended = []

    async def waits(solution_str):
        if solution_str == "bad":
            raise ValueError("cannot read this")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(solution_str)

    with pytest.raises(ValueError, match="cannot read this"):
        RewardCall("waits", waits)({}, [("q", "slow"), ("q", "bad")], {})
    assert ended == ["slow"]


def test_a_coroutine_that_exits_does_so_once():
    async def leaves(solution_str):
        return float(len(solution_str)) if solution_str != "bad" else sys.exit(3)

    call = RewardCall("leaves", leaves)
    with pytest.raises(SystemExit):
        call({}, [("q", "bad"), ("q", "a")], {})
    assert call({}, [("q", "a"), ("q", "bb")], {}) == [1.0, 2.0]


def test_a_number_that_no_float_can_hold_is_logged_with_the_sample_and_in_no_curve():
    (one,) = score(forms.reads_a_number, group(0, "7", "1" + "0" * 400))
    assert one.rewards == (0.0, 0.0)
    assert one.extras == {"pred": (7, 10**400)}
    assert one.metrics == {"rewards/reads_a_number/pred": (7.0,)}


def test_the_sample_on_which_a_verl_function_fails_is_blamed():
    (one,) = score(forms.picky, group(0, "ok", "bad", "unscored", "skip"), on_error="drop")
    assert [(failure.uid, failure.kind) for failure in one.failures] == [
        ("0.1", FailureKind.RAISED),
        ("0.2", FailureKind.RAISED),
    ]
    assert "dict with `score`, found keys ['acc']" in one.failures[1].message
    assert "in picky" in one.failures[0].traceback
    assert "signature.py" not in one.failures[0].traceback, "the user's frames alone"
    assert one.rewards[0] == 1.0
    assert [math.isnan(reward) for reward in one.rewards[1:]] == [True] * 3, "None is no score and no failure"


# -- OpenRLHF


def templated(*texts: str, **columns: object) -> list[Sample]:
    prompt = Prompt(0, "<user>why?<bot>", (1, 2), {"prompt": "why?", **columns})
    return [Sample(prompt, index, (3,), (0.0,), text, FinishReason.STOP) for index, text in enumerate(texts)]


@pytest.mark.parametrize("column", slow_but(["label"], ["labels", "label"]))
def test_openrlhf_gets_queries_and_labels_and_may_return_tensors(column):
    functions = [forms.reward_func, forms.column_of_tensor]
    (one,) = score(functions, templated("a", "bb", **{column: "bb"}), weights=(1.0, 0.0), workers=1)
    assert one.rewards == (0.0, 1.0), "a query is the prompt after the template and the response"
    assert one.scores["column_of_tensor"] == (1.0, 2.0), "[N, 1] is read as [N]"
    assert one.extras == {"scores": (0.0, 0.5), "length": (16, 17)}
    assert one.metrics == {
        "rewards/reward_func/scores": (0.0, 0.5),
        "rewards/reward_func/length": (16.0, 17.0),
        "rewards/reward_func/k": (7.0,),
    }


def test_what_openrlhf_logs_as_tuples_is_logged_as_lists_are():
    (one,) = score(forms.logs_tuples, templated("a", "bb"))
    assert one.rewards == (1.0, 2.0)
    assert one.extras == {"scores": (0.5, 1.0), "length": (16, 17)}
    assert one.metrics["rewards/logs_tuples/length"] == (16.0, 17.0)


def test_openrlhf_returns_that_are_wrong():
    with pytest.raises(RunError, match=r"dict with `rewards`, found keys \['reward'\]"):
        score(forms.wrong_dict, group(0, "a"))
    with pytest.raises(RunError, match="`x` has 1 values for 2 samples, though not for one alone"):
        score(forms.wrong_log, group(0, "a", "b"))


def test_arrays_are_read_without_their_library():
    (one,) = score(forms.array, group(0, "a", "bbb"))
    assert (one.rewards, one.extras) == ((1.0, 3.0), {"half": (0.5, 1.5)})


# -- together


def test_the_three_forms_in_one_pool():
    columns = {"answer": "b", "ground_truth": "b", "data_source": "s", "label": "b"}
    (one,) = score(
        [forms.trl, forms.compute_score, forms.in_lists], group(0, "a", "b", **columns), weights=(1.0, 10.0, 100.0)
    )
    assert one.scores == dict.fromkeys(("trl", "compute_score", "in_lists"), (0.0, 1.0))
    assert one.rewards == (0.0, 111.0)


def test_a_score_for_each_turn_in_every_form():
    """By hand: of two turns and of one; what is given for the whole response counts in its last turn."""
    two, one = group(0, "abb", "bbbb")
    functions = [forms.by_turn, forms.by_turn_of_verl, forms.by_turn_of_openrlhf, samples.length]
    (scored,) = score(functions, [in_two_turns(two), one], weights=(1.0, 10.0, 100.0, 1000.0))
    assert list(scored.scores.values()) == [(3.0, 4.0)] * 4
    assert scored.by_turn == ((111.0, 222.0 + 3000.0), (444.0 + 4000.0,))
    assert scored.rewards == (3333.0, 4444.0)


def test_a_wrong_number_of_turns_is_named_and_its_sample_dropped():
    two, one = group(0, "abb", "bbbb")
    with pytest.raises(RunError, match=r"`two_turns` failed on sample 0\.1: returned list \[1\.0, 2\.0\] .*: 1, not 2"):
        score(forms.two_turns, [in_two_turns(two), one])
    (scored,) = score([forms.two_turns, samples.length], [in_two_turns(two), one], on_error="drop")
    assert [(failure.uid, failure.kind) for failure in scored.failures] == [("0.1", FailureKind.NO_SCORE)]
    assert scored.by_turn[0] == (1.0, 5.0)
    assert math.isnan(scored.rewards[1])


def test_scores_of_turns_that_a_sample_alone_is_asked_for():
    """The call for the group fails, and each sample is asked for by itself."""
    two, one, bad = group(0, "abb", "bbbb", "bad")
    (scored,) = score(forms.picky_by_turn, [in_two_turns(two), one, bad], on_error="drop")
    assert scored.by_turn[:2] == ((1.0, 2.0), (4.0,))
    assert [failure.uid for failure in scored.failures] == ["0.2"]


def test_a_column_that_two_functions_log_keeps_both():
    (one,) = score([forms.compute_score, forms.acc_too], group(0, "a", data_source="s", ground_truth="a"))
    assert one.extras["compute_score/acc"] == (True,)
    assert one.extras["acc_too/acc"] == ("mine",)
    assert "acc" not in one.extras
    assert "seen" in one.extras


@pytest.mark.parametrize(
    ("function", "columns", "said"),
    [
        (forms.compute_score, ["ground_truth"], r"needs `data_source`, but a reward of verl's form"),
        (forms.compute_score, ["data_source", "answer"], r"`ground_truth` \(column `ground_truth` or `reward_model`\)"),
        (forms.compute_score, ["data_source", "ground_truth"], None),
        (forms.compute_score, ["data_source", "reward_model"], None),
        (forms.partly, ["data_source", "ground_truth"], "needs `extra_info`"),
        (forms.reward_func, ["answer"], r"needs `labels` \(column `labels` or `label`\)"),
        (forms.reward_func, ["label"], None),
        (forms.wrong_dict, [], None),
        (forms.trl, ["anwser"], r"needs `answer` \(did you mean `anwser`\?\)"),
        (forms.by_the_step, [], r"needs `trainer_state` \(which TRL gives and plait does not, docs/rewards.md\), but"),
        (forms.by_the_step, ["trainer_state"], None),
    ],
)
def test_columns_that_are_missing_are_said_before_any_work(function, columns, said):
    with RewardPool(reward_functions([function])) as pool:
        if said is None:
            pool.start(["prompt", *columns])
        else:
            with pytest.raises(ConfigError, match=said):
                pool.start(["prompt", *columns])


def test_the_example_of_the_docs_gives_what_the_docs_show():
    done = subprocess.run(
        [sys.executable, "examples/three_forms.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"```text\n{done.stdout}```" in (ROOT / "docs/rewards.md").read_text()
