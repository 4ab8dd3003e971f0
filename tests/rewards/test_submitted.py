"""Groups on their way through a pool, without a process: which call is the next, and what is told once."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import RunError
from plait.rewards.functions import RewardFunction
from plait.rewards.scores import FailureKind
from plait.rewards.settings import OnError
from plait.rewards.submitted import Submitted
from tests.rewards.samples import group

FUNCTIONS = (RewardFunction("length", "tests.rewards.samples:length"),)


def answer(*scores: float) -> dict[str, Any]:
    return {"scores": list(scores), "by_turn": {}, "faults": {}, "extras": {}, "metrics": {}}


def test_calls_that_are_made_again_come_before_those_of_later_groups() -> None:
    submitted = Submitted(FUNCTIONS, OnError.DROP)
    assert [submitted.add(group(uid, "a", "b")) for uid in (4, 7)] == [0, 1]
    first, second = submitted.calls
    submitted.calls.clear()
    submitted.make_by_themselves([first, second])
    assert list(submitted.calls) == [first, second]
    assert first.by_itself
    submitted.calls.popleft()
    submitted.failed(first, FailureKind.RAISED, "no", "")
    assert [call.places for call in submitted.calls] == [(0,), (1,), (0, 1)], "its samples alone, then the other group"


def test_scores_are_taken_once_and_a_forked_child_is_told_of_once() -> None:
    submitted = Submitted(FUNCTIONS, OnError.DROP)
    for uid in (4, 7):
        submitted.add(group(uid, "a"))
    submitted.forked(0)
    submitted.scored(submitted.calls.popleft(), answer(2.0))
    assert (submitted.num_pending, submitted.num_finished) == (1, 1)
    submitted.forked(0)
    submitted.scored(submitted.calls.popleft(), answer(3.0))
    one, two = submitted.take()
    assert (one.rewards, two.rewards) == ((2.0,), (3.0,))
    assert one.recovered == (FUNCTIONS[0].forked,)
    assert two.recovered == ()
    assert submitted.take() == []


def test_where_failures_stop_the_run_the_first_is_raised() -> None:
    submitted = Submitted(FUNCTIONS, OnError.STOP)
    submitted.add(group(4, "a"))
    with pytest.raises(RunError, match=r"`length` failed on .*no(.|\n)*`reward\.on_error: drop`"):
        submitted.failed(submitted.calls.popleft(), FailureKind.RAISED, "no", "")
    with pytest.raises(RunError, match="forked its worker process"):
        submitted.forked(0)
