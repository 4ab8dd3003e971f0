"""Pipelines with messages between their stages, beside what a run's own schedules take by a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.layer_times import total
from plait.cost.pipelines import FILLING, HOPS, there, there_and_back
from plait.schedule.action import Action, Kind
from plait.schedule.pipeline import Pipeline, Workload
from plait.schedule.schedule import Schedule, with_transfers
from plait.schedule.training_order import SCHEDULES, rule_named
from plait.simulator.static import simulate
from tests.cases import examples


def played_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    count: int,
    hop_s: float,
    schedule: str,
    *,
    back: bool = True,
) -> float:
    """Of a schedule that `training.pipeline` runs: what a stage sends is on its way while it computes."""
    table = lambda seconds: tuple((each,) * count for each in seconds)
    stages = len(forward_s)
    own = Pipeline("m", 0, tuple(range(stages)), table(forward_s), table(backward_s), table([1.0] * stages))
    whole = rule_named(schedule)(Workload((own,), stages))
    rows = [[action for action in row if back or action.kind is Kind.FORWARD] for row in whole.rows]
    taken = {Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s}

    def seconds(action: Action) -> float:
        if action.kind in taken:
            return taken[action.kind][action.stage]
        return hop_s if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) else 0.0

    timeline = simulate(with_transfers(Schedule(tuple(map(tuple, rows)))), seconds)
    return max(span.end_s for span in timeline.spans)


def test_a_micro_batch_waits_for_one_that_goes_to_the_end_and_back() -> None:
    """Two equal stages of 1 + 2 s, four micro-batches, a second for each message. By 1F1B the first stage has two of
    them under way: what it begins third waits until the first is back, 8 s after it began. So two go by in 8 s, in
    place of 6. GPipe waits for messages at its ends alone."""
    stages = [{"layers": 3.0}] * 2
    assert total(there_and_back(stages, 4, 1.0)) == pytest.approx(6 + 2 + 3 * 3 + 2 * 1)
    assert total(there_and_back(stages, 4, 1.0, "gpipe")) == pytest.approx(6 + 2 + 3 * 3)
    assert total(there_and_back(stages, 4, 1.0, "one at a time")) == pytest.approx(4 * (6 + 2))
    assert total(there([{"layers": 1.0}] * 2, 4, 0.5)) == pytest.approx(2 + 0.5 + 3)
    assert total(there([{"layers": 1.0}] * 2, 4, 2.0)) == pytest.approx(2 + 2 + 3 * 2), "the link is the slowest"


def test_terms_are_the_slowest_stages_work_filling_and_messages() -> None:
    terms = there_and_back([{"layers": 3.0}, {"layers": 4.0, "head": 1.0}], 4, 0.5)
    assert terms == pytest.approx({"layers": 16.0, "head": 4.0, FILLING: 3.0, HOPS: 1.0})
    assert there_and_back([{"layers": 3.0}], 4, 0.5) == {"layers": 12.0}


@settings(deadline=None, max_examples=examples(30, 300))
@given(
    st.integers(2, 6),
    st.integers(2, 5),
    st.floats(0.0, 1.0),
    st.floats(1.0, 3.0),
    st.sampled_from(SCHEDULES),
)
def test_equal_stages_take_what_their_schedule_takes(stages, rounds, hop, ratio, schedule) -> None:
    """As many micro-batches for each, and messages that take no longer than a forward."""
    count = rounds * stages
    forward, backward = [1.0] * stages, [ratio] * stages
    played = played_s(forward, backward, count, hop, schedule)
    found = there_and_back([{"layers": 1.0 + ratio}] * stages, count, hop, schedule)
    assert total(found) == pytest.approx(played, rel=1e-9)


@settings(deadline=None, max_examples=examples(30, 300))
@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6), st.integers(1, 12), st.floats(0.0, 2.0))
def test_forwards_take_what_their_schedule_takes(forward, count, hop) -> None:
    """Whatever the stages."""
    played = played_s(forward, forward, count, hop, "gpipe", back=False)
    assert total(there([{"layers": each} for each in forward], count, hop)) == pytest.approx(played, rel=1e-9)


@settings(deadline=None, max_examples=examples(30, 300))
@given(
    st.lists(st.floats(0.5, 1.0), min_size=2, max_size=6), st.integers(1, 4), st.floats(0.0, 0.5), st.floats(0.0, 1.0)
)
def test_unequal_stages_take_nearly_what_their_schedule_takes(forward, rounds, hop, longer) -> None:
    """Within a fifth. Slower messages make nothing faster, nor do slower stages."""
    count, backward = rounds * len(forward) + 1, [2 * each for each in forward]
    stages = [{"layers": 3 * each} for each in forward]
    found = total(there_and_back(stages, count, hop))
    assert found == pytest.approx(played_s(forward, backward, count, hop, "1F1B"), rel=0.2)
    assert total(there_and_back(stages, count, hop + longer)) >= found * (1 - 1e-12)
    for at in range(len(stages)):
        slower = [{"layers": stage["layers"] + longer * (n == at)} for n, stage in enumerate(stages)]
        assert total(there_and_back(slower, count, hop)) >= found * (1 - 1e-12)
