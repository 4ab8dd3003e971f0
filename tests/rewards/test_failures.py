"""Every way in which a function can fail in its worker, and who is blamed."""

from __future__ import annotations

import math
import os
import signal

import pytest

from plait.errors import RunError
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.scores import FailureKind
from tests.rewards import samples
from tests.rewards.pools import LIMIT_S, alive, score, until
from tests.rewards.samples import group


@pytest.mark.parametrize(
    ("word", "kind", "said", "trace"),
    [
        ("raise", FailureKind.RAISED, "ValueError: cannot read this", "in faulty"),
        ("exit", FailureKind.RAISED, "SystemExit: 3", "in faulty"),
        ("hang", FailureKind.TIMEOUT, "limit of 1 s (`reward.timeout_s`)", "in faulty"),
        ("hang in C", FailureKind.TIMEOUT, "limit of 1 s", ""),
        ("die", FailureKind.DIED, "exit code 7", ""),
        ("segfault", FailureKind.DIED, "SIGSEGV", "in faulty"),
        ("skip", FailureKind.MISCOUNTED, "0 scores for 1 samples", ""),
        ("bare", FailureKind.MISCOUNTED, "returned float 1.0, expected a list", ""),
        ("nan", FailureKind.NO_SCORE, "returned nan", ""),
        ("inf", FailureKind.NO_SCORE, "returned -inf", ""),
        ("text", FailureKind.NO_SCORE, "returned str '1.0'", ""),
        ("list", FailureKind.NO_SCORE, "returned list [1.0]", ""),
    ],
)
def test_the_culprit_is_found_and_dropped_alone(word, kind, said, trace):
    (bad, good) = score(
        [samples.faulty, samples.length], group(12, "a", word, "cc"), group(13, "d"), on_error="drop", timeout_s=LIMIT_S
    )
    (failure,) = bad.failures
    assert (failure.uid, failure.function, failure.kind) == ("12.1", "faulty", kind)
    assert said in failure.message
    assert trace in failure.traceback
    assert failure.response == word
    assert math.isnan(bad.scores["faulty"][1])
    assert bad.scores["length"] == (1.0, float(len(word)), 2.0)
    assert math.isnan(bad.rewards[1]), "a failed sample has no reward though another function scored it"
    assert (bad.rewards[0], bad.rewards[2], bad.num_dropped) == (2.0, 4.0, 1)
    assert good.rewards == (2.0,)


@pytest.mark.parametrize("word", ["raise", "nan", "die"])
def test_stop_names_the_sample_the_function_and_the_remedy(word):
    with pytest.raises(RunError) as caught:
        score(samples.faulty, group(7, "a", "b", word))
    for words in ("`faulty`", "sample 7.2", f"'{word}'", "reward.on_error: drop"):
        assert words in str(caught.value)
    if word == "raise":
        assert 'raise ValueError("cannot read this")' in str(caught.value), "the worker's own traceback"


def test_several_culprits_in_one_group():
    (one,) = score(samples.faulty, group(0, "raise", "ok", "die", "nan"), on_error="drop")
    assert [(failure.uid, failure.kind) for failure in one.failures] == [
        ("0.0", FailureKind.RAISED),
        ("0.2", FailureKind.DIED),
        ("0.3", FailureKind.NO_SCORE),
    ]
    assert one.rewards[1] == 2.0


def test_a_miscount_that_no_sample_shows_alone_is_everyones():
    (one,) = score(samples.one_for_all, group(0, "a", "b", "c"), on_error="drop")
    assert {failure.kind for failure in one.failures} == {FailureKind.MISCOUNTED}
    assert [failure.uid for failure in one.failures] == ["0.0", "0.1", "0.2"]
    assert one.num_dropped == 3
    with pytest.raises(RunError, match="1 scores for 3 samples, though not for one alone"):
        score(samples.one_for_all, group(0, "a", "b", "c"))


def test_a_failure_that_has_passed_is_told_and_does_not_stop_the_run():
    (one,) = score(samples.crowd_shy, group(3, "a", "b"))
    assert one.rewards == (2.0, 2.0)
    assert one.failures == ()
    assert "too many at once" in one.recovered[0]
    assert "prompt 3" in one.recovered[0]


def test_a_worker_that_died_while_idle_is_replaced():
    with RewardPool(reward_functions([samples.pids])) as pool:
        (one,) = pool.score(group(0, "a"))
        os.kill(one.extras["pid"][0], signal.SIGKILL)
        assert until(lambda: not alive(one.extras["pid"][0]))
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
    assert until(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_wait_has_a_deadline():
    with RewardPool(reward_functions([samples.faulty]), timeout_s=60) as pool:
        pool.start()
        pool.submit(group(9, "hang"))
        with pytest.raises(RunError, match="rewards of prompts 9 are not there after 0 s"):
            pool.wait(deadline_s=0.2)


def test_columns_that_cannot_be_sent_are_named():
    with (
        RewardPool(reward_functions([samples.length])) as pool,
        pytest.raises(RunError, match="columns of prompt 0 cannot be sent"),
    ):
        pool.score(group(0, "a", thing=lambda: None))
