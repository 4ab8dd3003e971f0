"""Which samples instances give to others: by hand, and what holds of every decision."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.rebalance import (
    EQUAL,
    LEAST_SHARE,
    InstanceWork,
    MoveCost,
    Rebalancing,
    Shift,
    StepSeconds,
    UnfinishedSample,
    end_s,
    knee,
    rebalance,
)
from tests.cases import examples

FREE = MoveCost()


def cpu_ms(running: int, context: float) -> float:
    """A step of 135 million parameters on one core, in ms: a floor, and 2 ms a sample."""
    return 13.4 + 2.0 * running


def flat(running: int, context: float) -> float:
    return 1.0


def line(running: int, context: float) -> float:
    return 1.0 + running


def work(place: int, *left: int, context: int = 10, kv_tokens: float = inf, takes: bool = True) -> InstanceWork:
    growing = tuple(UnfinishedSample((place, index), context, steps) for index, steps in enumerate(left))
    return InstanceWork(place, growing, kv_tokens, takes)


def test_the_knee_by_hand() -> None:
    """Alone a sample has 1/15.4 tokens a ms. The tenth adds 10/33.4 - 9/31.4 = 0.01278 to nine, less than a fifth of
    it, 0.01299; the ninth added 0.01452. Of a curve without a slope every sample adds as much as the first."""
    assert knee(cpu_ms, 64, share=0.2) == 9
    assert knee(cpu_ms, 64) == 1, "two bring 0.050 more, four fifths would be 0.052"
    assert knee(flat, 64) == 64
    assert knee(cpu_ms, 4, share=0.2) == 4, "no instance has more"


def test_when_an_instance_ends_by_hand() -> None:
    """Two samples for 2 steps of 3 s, then one for 3 of 2 s. With one slot, each in its turn: 2 and 5 steps of 2 s."""
    growing = work(0, 2, 5).growing
    assert end_s(growing, line, 8) == 12.0
    assert end_s(growing, line, 1) == 14.0
    assert end_s((), line, 8) == 0.0


def test_contexts_count_in_a_step() -> None:
    """A second for each token: steps begin with 10 and 11 tokens, 10.5 and 11.5 in their middle; of two samples twice
    that, and the second alone for a step of 12.5."""
    one, two = work(0, 2).growing, work(0, 2, 3).growing
    assert end_s(one, lambda running, context: context, 8) == 22.0
    assert end_s(two, lambda running, context: context, 8) == 44.0 + 12.5


def test_the_fewest_that_equalise_by_hand() -> None:
    """Four samples of 10 steps end at 50 s; two of them on each side, at 30 s."""
    found = rebalance([work(0, 10, 10, 10, 10), work(1)], line, 8, FREE)
    assert (found.before_s, found.after_s, len(found.shifts)) == (50.0, 30.0, 2)
    assert all((one.source, one.target) == (0, 1) for one in found.shifts)


def test_sixteen_and_four_on_two_cores_by_hand() -> None:
    """A hundred steps of 45.4 ms; six move, and ten on each side take steps of 33.4 ms."""
    found = rebalance([work(0, *[100] * 16), work(1, *[100] * 4)], cpu_ms, 64, FREE)
    assert len(found.shifts) == 6
    assert (found.before_s, found.after_s) == (pytest.approx(4540.0), pytest.approx(3340.0))


def test_the_time_that_moves_take_counts() -> None:
    """Each side stands still for 3 s: 33 s. At 6 s, 36 s is a gain of 14 s, and three times the pause are asked for."""
    load = [work(0, 10, 10, 10, 10), work(1)]
    assert rebalance(load, line, 8, MoveCost(3.0)).after_s == 33.0
    assert rebalance(load, line, 8, MoveCost(6.0)).why == "it would gain too little"
    bytes_only = rebalance(load, line, 8, MoveCost(0.0, token_s=0.1))
    assert bytes_only.after_s == 32.0, "two contexts of ten tokens"


def test_nothing_moves_where_steps_take_as_long_for_one_as_for_many() -> None:
    found = rebalance([work(0, *[100] * 16), work(1)], flat, 64, FREE)
    assert found == Rebalancing((), 100.0, 100.0, "no move ends the last instance sooner")


def test_nothing_moves_between_equals_or_out_of_a_single_instance() -> None:
    assert not rebalance([work(0, 5, 9), work(1, 9, 5)], line, 8, FREE).shifts
    assert not rebalance([work(0, 9, 9)], line, 8, FREE).shifts


def test_a_full_pool_takes_nothing() -> None:
    full = [work(0, 10, 10, 10, 10), work(1, kv_tokens=19)]
    assert not rebalance(full, line, 8, FREE).shifts
    one = [work(0, 10, 10, 10, 10), work(1, kv_tokens=20)]
    assert rebalance(one, line, 8, FREE).after_s == 40.0, "one of 20 tokens"
    freed = [work(0, 10, 10, 10, 10), work(1, takes=False)]
    assert not rebalance(freed, line, 8, FREE).shifts, "its ranks do something else"


def test_samples_that_wait_for_a_slot_make_an_instance_late() -> None:
    """One slot each: four samples in turn take 80 s. Those that have begun may move, here the first; the target has a
    slot for it."""
    growing = tuple(UnfinishedSample((0, i), 10, 10, moves=i == 0) for i in range(4))
    found = rebalance([InstanceWork(0, growing), work(1)], line, 1, FREE)
    assert (found.before_s, found.after_s) == (80.0, 60.0)
    assert [one.sample.key for one in found.shifts] == [(0, 0)]


curves = st.builds(
    lambda fixed, each, context: lambda running, tokens: fixed + each * running + context * tokens,
    st.floats(0.1, 20.0),
    st.floats(0.0, 5.0),
    st.floats(0.0, 0.01),
)
loads = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 300), st.integers(1, 200), st.booleans()), max_size=12),
        st.one_of(st.just(inf), st.integers(0, 3000)),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def instances_of(load: list[tuple[list[tuple[int, int, bool]], float, bool]]) -> list[InstanceWork]:
    return [
        InstanceWork(place, tuple(UnfinishedSample((place, i), *one) for i, one in enumerate(rows)), kv_tokens, takes)
        for place, (rows, kv_tokens, takes) in enumerate(load)
    ]


def last_s(
    works: list[InstanceWork], shifts: tuple[Shift, ...], step_s: StepSeconds, slots: int, cost: MoveCost
) -> float:
    """When the last instance ends, counted anew."""
    ends = []
    for one in works:
        mine = [shift for shift in shifts if one.place in (shift.source, shift.target)]
        gone = {shift.sample.key for shift in mine if shift.source == one.place}
        here = [sample for sample in one.growing if sample.key not in gone]
        here += [shift.sample for shift in mine if shift.target == one.place]
        held_up = cost.pause_s + cost.token_s * sum(shift.sample.context for shift in mine) if mine else 0.0
        ends.append(end_s(here, step_s, slots) + held_up)
    return max(ends)


@settings(max_examples=examples(75, 150), deadline=None)
@given(loads, curves, st.integers(1, 12), st.floats(0.0, 20.0), st.floats(0.0, 0.05))
def test_what_holds_of_every_decision(
    load: list[tuple[list[tuple[int, int, bool]], float, bool]],
    step_s: StepSeconds,
    slots: int,
    pause_s: float,
    token_s: float,
) -> None:
    """It ends sooner, by what it says; every move is needed for that; no pool and no instance is overfilled; no sample
    moves twice, and no instance both gives and takes."""
    works, cost = instances_of(load), MoveCost(pause_s, token_s)
    found = rebalance(works, step_s, slots, cost)
    assert found == rebalance(works, step_s, slots, cost)
    assert found.before_s == last_s(works, (), step_s, slots, cost)
    assert found.after_s == pytest.approx(last_s(works, found.shifts, step_s, slots, cost))
    if not found.shifts:
        assert found.after_s == found.before_s
        assert found.why
        return
    assert found.before_s - found.after_s >= LEAST_SHARE * found.before_s
    assert LEAST_SHARE >= EQUAL
    for shift in found.shifts:
        fewer = tuple(one for one in found.shifts if one != shift)
        assert last_s(works, fewer, step_s, slots, cost) > found.after_s * (1 - 1e-12), f"{shift} is not needed"
    keys = [shift.sample.key for shift in found.shifts]
    assert len(set(keys)) == len(keys)
    assert {one.source for one in found.shifts}.isdisjoint(one.target for one in found.shifts)
    for one in works:
        here = [sample for sample in one.growing if sample.key not in keys]
        came = [shift.sample for shift in found.shifts if shift.target == one.place]
        assert all(shift.sample.moves for shift in found.shifts)
        if came:
            assert one.takes
            assert len(here) + len(came) <= slots
            assert sum(sample.context + sample.left for sample in (*here, *came)) <= one.kv_tokens
