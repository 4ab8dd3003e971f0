"""Every way in which a function can fail in its worker, and who is blamed."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import ConfigError, RunError
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.scores import FailureKind
from tests.cases import slow_but
from tests.processes import gone
from tests.rewards import samples
from tests.rewards.pools import LIMIT_S, score
from tests.rewards.samples import group


@pytest.mark.parametrize(
    ("word", "kind", "said", "trace"),
    [
        ("raise", FailureKind.RAISED, "ValueError: cannot read this", "in faulty"),
        ("exit", FailureKind.RAISED, "SystemExit: 3", "in faulty"),
        ("hang", FailureKind.TIMEOUT, f"limit of {LIMIT_S:g} s (`reward.timeout_s`)", "in faulty"),
        ("hang in C", FailureKind.TIMEOUT, f"limit of {LIMIT_S:g} s", ""),
        ("die", FailureKind.DIED, "exit code 7", ""),
        ("segfault", FailureKind.DIED, "SIGSEGV", "in faulty"),
        ("skip", FailureKind.MISCOUNTED, "0 scores for 1 samples", ""),
        ("bare", FailureKind.MISCOUNTED, "returned float 1.0, expected a list", ""),
        ("nan", FailureKind.NO_SCORE, "returned nan", ""),
        ("inf", FailureKind.NO_SCORE, "returned -inf", ""),
        ("text", FailureKind.NO_SCORE, "returned str '1.0'", ""),
        ("list", FailureKind.NO_SCORE, "returned list [1.0, 2.0] where", ""),
    ],
)
def test_the_culprit_is_found_and_dropped_alone(word, kind, said, trace):
    groups = group(12, "a", word, "cc"), group(13, "d")
    limit = {"timeout_s": LIMIT_S} if kind is FailureKind.TIMEOUT else {}
    (bad, good) = score([samples.faulty, samples.length], *groups, on_error="drop", **limit)
    (failure,) = bad.failures
    assert (failure.uid, failure.function, failure.kind) == ("12.1", "faulty", kind)
    assert said in failure.message
    assert f"the prompt was: 'q'\nthe response was: {word!r}" in str(failure)
    assert trace in failure.traceback
    assert failure.response == word
    assert math.isnan(bad.scores["faulty"][1])
    assert bad.scores["length"] == (1.0, float(len(word)), 2.0)
    assert math.isnan(bad.rewards[1]), "a failed sample has no reward though another function scored it"
    assert (bad.rewards[0], bad.rewards[2]) == (2.0, 4.0)
    assert good.rewards == (2.0,)


@pytest.mark.parametrize("word", ["raise", "nan", "die"])
def test_stop_names_the_sample_the_function_and_the_remedy(word):
    with pytest.raises(RunError) as caught:
        score(samples.faulty, group(7, "a", "b", word))
    for words in ("`faulty`", "sample 7.2", f"'{word}'", "reward.on_error: drop"):
        assert words in str(caught.value)
    if word == "raise":
        assert 'raise ValueError("cannot read this")' in str(caught.value), "the worker's own traceback"


def test_functions_of_costs_are_told_the_keys_of_costs():
    (function,) = reward_functions([samples.faulty], key="cost.functions")
    with RewardPool((function,)) as pool, pytest.raises(RunError, match=r"`cost\.on_error: drop`"):
        pool.score(group(7, "a", "raise"))
    with pytest.raises(ConfigError, match=r"`cost\.weights` has 2 numbers for 1 functions"):
        reward_functions([samples.faulty], [1.0, 2.0], key="cost.functions")


def test_several_culprits_in_one_group():
    (one,) = score(samples.faulty, group(0, "raise", "ok", "die", "nan"), on_error="drop")
    assert [(failure.uid, failure.kind) for failure in one.failures] == [
        ("0.0", FailureKind.RAISED),
        ("0.2", FailureKind.DIED),
        ("0.3", FailureKind.NO_SCORE),
    ]
    assert one.rewards[1] == 2.0


def test_a_miscount_that_no_sample_shows_alone_is_everyones_who_was_asked_about():
    asked = group(0, "a", "b", "c", "d")
    asked[1] = replace(asked[1], reply_error="raised KeyError: 7")
    (one,) = score(samples.one_for_all, asked, on_error="drop")
    assert {failure.kind for failure in one.failures} == {FailureKind.MISCOUNTED}
    assert [failure.uid for failure in one.failures] == ["0.0", "0.2", "0.3"]
    assert all(map(math.isnan, one.rewards))
    with pytest.raises(RunError, match="1 scores for 3 samples, though not for one alone"):
        score(samples.one_for_all, group(0, "a", "b", "c"))


def test_of_samples_to_which_nobody_could_reply_functions_are_not_asked():
    known, unknown = (
        [replace(one, reply_error=one.text and "raised KeyError: 7") for one in group(uid, *texts)]
        for uid, texts in ((0, ("raise", "", "raise")), (1, ("raise", "raise")))
    )
    one, other = score([samples.faulty, samples.length], known, unknown)
    assert one.scores["length"][1] == one.rewards[1] - one.scores["faulty"][1] == 0.0
    assert [math.isnan(reward) for reward in one.rewards] == [True, False, True]
    assert [math.isnan(score) for row in one.scores.values() for score in row] == [True, False, True] * 2
    assert all(map(math.isnan, other.rewards))
    assert not one.failures
    assert not other.failures


def test_a_failure_that_has_passed_is_told_and_does_not_stop_the_run():
    (one,) = score(samples.crowd_shy, group(3, "a", "b"))
    assert one.rewards == (2.0, 2.0)
    assert one.failures == ()
    assert "too many at once" in one.recovered[0]
    assert "prompt 3" in one.recovered[0]


def test_samples_that_a_function_compares_are_scored_together_after_a_failure_too():
    """Of a sample alone every rank is 0."""
    (one,) = score(samples.ranks, group(3, "aaa", "b", "cc"))
    assert one.rewards == (2.0, 0.0, 1.0)
    assert (one.extras, one.metrics) == ({"beside": (2, 2, 2)}, {"asked_about": (3.0,)})
    assert "raised ConnectionError: away, but not on any sample alone: it was called again" in one.recovered[0]
    (two,) = score(samples.ranks, group(3, "aaa", "raise", "b"), on_error="drop")
    assert two.scores["ranks"][0::2] == (1.0, 0.0)
    assert math.isnan(two.rewards[1])
    assert (two.extras["beside"][0::2], two.metrics) == ((1, 1), {"asked_about": (2.0,)})
    assert len(two.failures) == 1
    assert two.recovered == ()


def test_samples_that_cannot_be_scored_together_keep_what_they_got_alone():
    (one,) = score(samples.crowd_shy, group(3, "a", "b"))
    assert one.recovered[0].endswith("but not on any sample alone: each has the score that it got alone")


def test_a_worker_that_died_while_idle_is_replaced():
    with RewardPool(reward_functions([samples.pids])) as pool:
        (one,) = pool.score(group(0, "a"))
        os.kill(one.extras["pid"][0], signal.SIGKILL)
        assert gone(one.extras["pid"][0])
        (two,) = pool.score(group(1, "a"))
    assert two.rewards == (0.0,)
    assert two.extras["pid"] != one.extras["pid"]


def test_what_a_function_started_is_killed_with_it(tmp_path):
    (tmp_path / "spawns.py").write_text(
        "import subprocess, time\n"
        "def spawn(completions, **_):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(1000)\n"
    )
    (one,) = score(f"{tmp_path}/spawns.py:spawn", group(0, "a"), on_error="drop", timeout_s=LIMIT_S)
    assert one.failures[0].kind is FailureKind.TIMEOUT
    assert "spawns.py" in one.failures[0].traceback, "where it hung"
    assert gone(int((tmp_path / "pid").read_text()))


def test_columns_that_cannot_be_sent_are_named():
    with (
        RewardPool(reward_functions([samples.length])) as pool,
        pytest.raises(RunError, match="columns of prompt 0 cannot be sent"),
    ):
        pool.score(group(0, "a", thing=lambda: None))


# -- forks


@pytest.mark.parametrize("function", slow_but([samples.forks_unseen], [samples.forks, samples.forks_unseen]))
def test_what_a_forked_child_brings_back_is_nobodys_reward(function):
    """Every sample keeps its own reward, in calls after the fork too."""
    groups = [group(uid, "fork" if uid % 3 == 0 else "x" * uid) for uid in range(1, 13)]
    results = score(function, *groups, on_error="drop")
    assert [result.rewards for result in results] == [(float(len(one[0].text)),) for one in groups]
    said = [message for result in results for message in result.recovered]
    assert len(said) == 1, "once"
    assert f"reward `{function.__name__}` forked its worker process" in said[0]


def test_a_forked_child_that_comes_back_stops_the_run():
    groups = [group(uid, "fork") for uid in range(40)]
    with pytest.raises(RunError, match=r"reward `forks` forked its worker process, and the child came back"):
        score(samples.forks, *groups)


def test_forked_children_that_end_are_no_ones_business():
    (one,) = score(samples.forks_and_ends, group(0, "a", "bb"))
    assert (one.rewards, one.recovered) == ((1.0, 2.0), ())


def test_what_is_no_answer_is_an_error_of_the_function():
    (one,) = score(samples.babbles, group(0, "a"), on_error="drop")
    (failure,) = one.failures
    assert (failure.function, failure.kind) == ("babbles", FailureKind.DIED)
    assert "something else than an answer on the connection" in failure.message


# -- memory


def test_a_function_that_asks_for_more_memory_than_its_limit_fails_alone():
    (bad, good) = score(samples.hoards, group(0, "0", "3"), group(1, "0"), on_error="drop", memory_gb=1.0)
    (failure,) = bad.failures
    assert (failure.uid, failure.kind) == ("0.1", FailureKind.RAISED)
    assert "MemoryError: the limit is 1 GB (`reward.memory_gb`)" in failure.message
    assert "in hoards" in failure.traceback
    assert (bad.rewards[0], good.rewards) == (0.0, (0.0,))
    with pytest.raises(RunError, match=r"sample 0\.0: raised MemoryError: the limit is 1 GB"):
        score(samples.hoards, group(0, "3"), memory_gb=1.0)


def test_a_library_that_fills_the_memory_takes_its_worker_alone():
    (one,) = score(samples.hoards_in_c, group(0, "0", "3", "0"), on_error="drop", memory_gb=1.0)
    (failure,) = one.failures
    assert (failure.uid, failure.kind) == ("0.1", FailureKind.DIED)
    assert "SIGSEGV" in failure.message
    assert (one.rewards[0], one.rewards[2]) == (1.0, 1.0)


def test_workers_and_what_they_start_end_before_the_trainer():
    (one,) = score(samples.oom_scores, group(0, "a"))
    assert one.extras["adj"] == ([1000, 1000],)
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 1000
