import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.policy.decode_ring import (
    Ring,
    groups_in_flight,
    groups_of_batch,
    groups_to_fill,
    intra_batch_gain,
    may_consume,
    may_start,
    ring_schedule,
)
from plait.schedule.action import Kind
from plait.schedule.validate import validate
from plait.simulator.static import simulate


@pytest.mark.parametrize(
    ("stages", "groups", "hop", "round_s", "utilisation"),
    [
        (4, 1, 0.0, 8.0, 0.25),  # naive: one stage in P is busy
        (4, 4, 0.0, 8.0, 1.0),
        (4, 4, 0.5, 10.0, 0.8),
        (4, 5, 0.5, 10.0, 1.0),  # one slack slot hides a hop of t / P
        (4, 8, 0.5, 16.0, 1.0),
        (1, 1, 0.0, 2.0, 1.0),
    ],
)
def test_closed_forms(stages, groups, hop, round_s, utilisation):
    ring = Ring(stages, groups, 2.0, hop)
    assert ring.round_s == round_s
    assert ring.utilisation == utilisation


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 5), st.integers(1, 8), st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.0, 0.25, 0.5, 1.0, 4.0])
)
def test_the_simulator_runs_at_the_rate_of_the_closed_form(stages, groups, stage_s, hop_s):
    ring = Ring(stages, groups, stage_s, hop_s)
    rounds = 12
    schedule = ring_schedule(stages, groups, rounds)
    validate(schedule)
    hop = hop_s if stages > 1 else 0.0
    timeline = simulate(schedule, lambda action: stage_s, latency_s=lambda a, b: hop_s)
    ends = {(s.action): s.end_s for s in timeline.spans}
    last = f"{stages - 1}DECODE{groups - 1}"
    expected = Ring(stages, groups, stage_s, hop).round_s
    assert ends[f"{last}.{rounds - 1}"] - ends[f"{last}.4"] == pytest.approx((rounds - 5) * expected)
    if hop == hop_s:
        assert groups * stage_s / expected == pytest.approx(ring.utilisation)


def test_every_step_runs_once_and_a_token_is_there_before_it_is_used():
    schedule = ring_schedule(3, 4, 5, model="actor", prefill=True)
    assert len(schedule) == 3 * 4 * (5 + 1)
    timeline = simulate(schedule, lambda a: 5.0 if a.kind is Kind.PREFILL else 1.0)
    at = {span.action: span for span in timeline.spans}
    for group in range(4):
        for round in range(5):
            for stage in range(1, 3):
                before, after = at[f"actor:{stage - 1}DECODE{group}.{round}"], at[f"actor:{stage}DECODE{group}.{round}"]
                assert before.end_s <= after.start_s
            if round:
                assert at[f"actor:2DECODE{group}.{round - 1}"].end_s <= at[f"actor:0DECODE{group}.{round}"].start_s
    for stage in range(3):
        row = [span for span in timeline.spans if span.rank == stage]
        assert [span.kind for span in row[:4]] == ["PREFILL"] * 4, "the start delay: all prefills go first"


def test_groups_released_at_equal_spacing_never_meet():
    """With the start delay a group reaches each stage exactly when the one before it leaves."""
    ring = Ring(4, 4, 2.0)
    starts = [ring.released_s(group, prefilled_s=100.0) for group in range(4)]
    assert starts == [100.0, 102.0, 104.0, 106.0]
    assert ring.feedback_slots == 1
    assert Ring(4, 6, 2.0).feedback_slots == 3
    assert Ring(4, 2, 2.0).feedback_slots == 0


def test_how_many_groups():
    assert groups_to_fill(4, 2.0, 0.0) == 4
    assert groups_to_fill(4, 2.0, 0.5) == 5
    assert groups_to_fill(4, 2.0, 0.6) == 6
    compute_bound = lambda n: 0.1 * n  # noqa: E731
    memory_bound = lambda n: 1.0  # noqa: E731
    assert intra_batch_gain(compute_bound, 64, 4, 0.0) == pytest.approx(4)
    assert intra_batch_gain(memory_bound, 64, 4, 0.0) == 1
    assert groups_of_batch(memory_bound, 64, 4, 0.0).num_groups == 1
    assert groups_of_batch(compute_bound, 64, 4, 0.0).num_groups == 4
    full = groups_in_flight(memory_bound, 64, 4, 0.25, max_groups=8)
    assert (full.num_groups, full.utilisation) == (5, 1.0)
    assert groups_in_flight(memory_bound, 64, 4, 0.25, max_groups=3).num_groups == 3


def test_consumption_is_bounded_by_staleness():
    assert may_start(batch=3, newest_trained=3, max_staleness=0)
    assert not may_start(batch=4, newest_trained=3, max_staleness=0)
    assert may_start(batch=4, newest_trained=3, max_staleness=1)
    assert may_consume(4, {4: 0, 5: 2}, staleness=1, max_staleness=1)
    assert not may_consume(5, {5: 2}, staleness=0, max_staleness=1)
    assert not may_consume(4, {}, staleness=2, max_staleness=1)


def test_a_ring_without_stages_is_refused():
    with pytest.raises(ConfigError, match="decode ring"):
        Ring(0, 1, 1.0)
    with pytest.raises(ConfigError, match="max_groups"):
        groups_in_flight(lambda n: 1.0, 8, 4, 0.0, max_groups=0)
