"""Which samples instances give to others: by hand, and what holds of every decision."""

from __future__ import annotations

import itertools
from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.rebalance import (
    LEAST_SHARE,
    TIMES_MOVES,
    InstanceWork,
    MoveCost,
    Rebalancing,
    Shift,
    StepSeconds,
    UnfinishedSample,
    chances_of,
    ends_s,
    last_end_s,
    rebalance,
)
from tests.cases import examples

FREE = MoveCost()


def cpu_ms(running: float, context: float) -> float:
    """A step of 135 million parameters on one core, in ms: a floor, and 2 ms a sample."""
    return 13.4 + 2.0 * running


def flat(running: float, context: float) -> float:
    return 1.0


def line(running: float, context: float) -> float:
    return 1.0 + running


def work(
    place: int, num: int, *chances: int, context: int = 10, kv_tokens: float = inf, takes: bool = True
) -> InstanceWork:
    growing = tuple(UnfinishedSample((place, index), context) for index in range(num))
    return InstanceWork(place, growing, chances or (10,), kv_tokens, takes)


def test_what_samples_may_still_need_by_hand() -> None:
    """A sample that has said nothing may come to 50 or 150 tokens, one that has said 100 to 150: half of the chances
    are of each."""
    found = Counter(chances_of([0, 100], [50, 150], 200))
    assert found.keys() == {50, 150}
    assert found[150] == pytest.approx(16, abs=1)
    assert Counter(chances_of([0] * 300 + [100] * 100, [50, 150], 200))[150] == pytest.approx(24, abs=1)
    assert set(chances_of([190], [50, 150], 400)) == {32}, "longer than any before"
    assert set(chances_of([190], [50, 150], 200)) == {10}, "all that the limit allows"
    assert set(chances_of([], [5], 200)) == {5}


def test_when_samples_of_an_instance_end_by_hand() -> None:
    """Two samples that need 2 or 4 steps: 2 steps of 3 s; in the next two the other one is there with a chance of a
    half, of 2.5 s. With one slot the second waits for three steps of 2 s, and has its own of 2 s then."""
    assert ends_s(work(0, 2, 2, 4), line, 8) == [6.0, 11.0]
    assert ends_s(work(0, 2, 2, 4), line, 1) == [10.0, 14.0]
    assert ends_s(work(0, 2, 3, 3), line, 8) == [9.0, 9.0]


def test_contexts_count_in_a_step() -> None:
    """A second for each token: steps begin with 10 and 11 tokens, 10.5 and 11.5 in their middle; the third has 12.5."""
    assert ends_s(work(0, 1, 2, 3), lambda running, context: context, 8) == [22.0, 34.5]


def test_when_the_last_is_expected_to_end_by_hand() -> None:
    """Two samples that end after 1 or 3 s have both ended after 1 s with a chance of a quarter: 1 + 3/4 · 2. Beside one
    that ends after 2 s, one of them lasts longer with a half."""
    assert last_end_s([(2, [1.0, 3.0])]) == 2.5
    assert last_end_s([(1, [1.0, 3.0]), (1, [2.0, 2.0])]) == 2.5
    assert last_end_s([(1, [1.0, 3.0]), (0, [9.0, 9.0])]) == 2.0
    assert last_end_s([]) == 0.0


@given(st.lists(st.tuples(st.integers(1, 2), st.lists(st.integers(1, 9), min_size=1, max_size=3)), max_size=3))
def test_the_last_end_is_that_of_all_that_may_happen(ends: list[tuple[int, list[int]]]) -> None:
    """Each sample of each instance with each of its ends."""
    ends = [(num, sorted(seconds)) for num, seconds in ends]
    samples = [seconds for num, seconds in ends for _ in range(num)]
    lasts = [max(case, default=0) for case in itertools.product(*samples)]
    assert last_end_s(ends) == pytest.approx(sum(lasts) / len(lasts))


def test_the_fewest_that_level_by_hand() -> None:
    """Four samples of 10 steps end at 50 s; two of them on each side, at 30 s."""
    found = rebalance([work(0, 4), work(1, 0)], line, 8, FREE)
    assert (found.before_s, found.after_s, len(found.shifts)) == (50.0, 30.0, 2)
    assert all((one.source, one.target) == (0, 1) for one in found.shifts)


def test_sixteen_and_four_on_two_cores_by_hand() -> None:
    """A hundred steps of 45.4 ms; six move, and ten on each side take steps of 33.4 ms."""
    found = rebalance([work(0, 16, 100), work(1, 4, 100)], cpu_ms, 64, FREE)
    assert len(found.shifts) == 6
    assert (found.before_s, found.after_s) == (pytest.approx(4540.0), pytest.approx(3340.0))


def test_a_single_sample_may_be_the_last_as_well() -> None:
    """Eight samples and one that need 10 or 100 steps: the one is not taken to end sooner, its steps are shorter. So
    all is levelled: (8, 1) becomes (5, 4)."""
    found = rebalance([work(0, 8, 10, 100), work(1, 1, 10, 100)], cpu_ms, 64, FREE)
    assert len(found.shifts) == 3
    assert found.after_s < found.before_s


def test_the_time_that_moves_take_counts() -> None:
    """Each side stands still for 3 s: 33 s. At 7 s that is 37 s, but 51 s as it is weighed."""
    load = [work(0, 4), work(1, 0)]
    assert TIMES_MOVES == 3.0
    assert rebalance(load, line, 8, MoveCost(3.0)).after_s == 33.0
    assert rebalance(load, line, 8, MoveCost(7.0)).shifts == ()
    bytes_only = rebalance(load, line, 8, MoveCost(0.0, token_s=0.1))
    assert bytes_only.after_s == 32.0, "two contexts of ten tokens"


def test_nothing_moves_where_steps_take_as_long_for_one_as_for_many() -> None:
    found = rebalance([work(0, 16, 100), work(1, 0)], flat, 64, FREE)
    assert found == Rebalancing((), 100.0, 100.0)


def test_nothing_moves_between_equals_or_out_of_a_single_instance() -> None:
    assert not rebalance([work(0, 2, 5, 9), work(1, 2, 5, 9)], line, 8, FREE).shifts
    assert not rebalance([work(0, 2)], line, 8, FREE).shifts


def test_a_full_pool_takes_nothing() -> None:
    assert not rebalance([work(0, 4), work(1, 0, kv_tokens=19)], line, 8, FREE).shifts
    one = rebalance([work(0, 4), work(1, 0, kv_tokens=20)], line, 8, FREE)
    assert one.after_s == 40.0, "one of 20 tokens"
    assert not rebalance([work(0, 4), work(1, 0, takes=False)], line, 8, FREE).shifts, "its ranks do something else"


def test_samples_that_wait_for_a_slot_make_an_instance_late() -> None:
    """One slot each: four samples in turn take 80 s. Those that have begun may move, here the first; the target has a
    slot for it."""
    growing = tuple(UnfinishedSample((0, i), 10, moves=i == 0) for i in range(4))
    found = rebalance([InstanceWork(0, growing, (10,)), work(1, 0)], line, 1, FREE)
    assert (found.before_s, found.after_s) == (80.0, 60.0)
    assert [one.sample.key for one in found.shifts] == [(0, 0)]


def test_who_had_nothing_expects_what_samples_had_ahead_of_them() -> None:
    """Its own samples ended before those that come were as long: what would have been ahead of them tells nothing."""
    found = rebalance([work(0, 4, 10), work(1, 0, 90)], line, 8, FREE)
    assert found.after_s == 30.0


curves = st.builds(
    lambda fixed, each, context: lambda running, tokens: fixed + each * running + context * tokens,
    st.floats(0.1, 20.0),
    st.floats(0.0, 5.0),
    st.floats(0.0, 0.01),
)
loads = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=12),
        st.lists(st.integers(1, 200), min_size=1, max_size=9).map(sorted),
        st.one_of(st.just(inf), st.integers(0, 3000)),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
Load = list[tuple[list[tuple[int, bool]], list[int], float, bool]]


def instances_of(load: Load) -> list[InstanceWork]:
    return [
        InstanceWork(
            place,
            tuple(UnfinishedSample((place, i), *one) for i, one in enumerate(rows)),
            tuple(chances),
            kv_tokens,
            takes,
        )
        for place, (rows, chances, kv_tokens, takes) in enumerate(load)
    ]


def last_s(
    works: list[InstanceWork], shifts: tuple[Shift, ...], step_s: StepSeconds, slots: int, cost: MoveCost, times: float
) -> float:
    """When the last sample is expected to end, counted anew, if moves take so many times what they do."""
    ends = []
    for one in works:
        mine = [shift for shift in shifts if one.place in (shift.source, shift.target)]
        gone = {shift.sample.key for shift in mine if shift.source == one.place}
        here = [sample for sample in one.growing if sample.key not in gone]
        came = [shift for shift in mine if shift.target == one.place]
        chances = works[came[0].source].chances if came and not here else one.chances
        held_up = cost.pause_s + cost.token_s * sum(shift.sample.context for shift in mine) if mine else 0.0
        there = InstanceWork(one.place, (*here, *(shift.sample for shift in came)), chances)
        ends.append((len(there.growing), [times * held_up + end for end in ends_s(there, step_s, slots)]))
    return last_end_s(ends)


@settings(max_examples=examples(40, 150), deadline=None)
@given(loads, curves, st.integers(1, 12), st.floats(0.0, 20.0), st.floats(0.0, 0.05))
def test_what_holds_of_every_decision(
    load: Load, step_s: StepSeconds, slots: int, pause_s: float, token_s: float
) -> None:
    """The last sample is expected to end sooner, by what it says, even if moves took longer; no pool and no instance is
    overfilled; no sample moves twice, and no instance both gives and takes."""
    works, cost = instances_of(load), MoveCost(pause_s, token_s)
    found = rebalance(works, step_s, slots, cost)
    assert found == rebalance(works, step_s, slots, cost)
    assert found.before_s == pytest.approx(last_s(works, (), step_s, slots, cost, 1.0))
    assert found.after_s == pytest.approx(last_s(works, found.shifts, step_s, slots, cost, 1.0))
    if not found.shifts:
        assert found.after_s == found.before_s
        return
    dear_s = last_s(works, found.shifts, step_s, slots, cost, TIMES_MOVES)
    assert dear_s <= found.before_s * (1 - LEAST_SHARE) + 1e-9
    keys = [shift.sample.key for shift in found.shifts]
    assert len(set(keys)) == len(keys)
    assert {one.source for one in found.shifts}.isdisjoint(one.target for one in found.shifts)
    assert all(shift.sample.moves for shift in found.shifts)
    for one in works:
        came = [shift for shift in found.shifts if shift.target == one.place]
        if not came:
            continue
        assert one.takes
        assert len(one.growing) + len(came) <= slots
        held = sum(sample.context + sum(one.chances) / len(one.chances) for sample in one.growing)
        for shift in came:
            chances = works[shift.source].chances
            held += shift.sample.context + sum(chances) / len(chances)
        assert held <= one.kv_tokens + 1e-6
