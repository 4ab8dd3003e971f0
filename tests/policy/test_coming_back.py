"""Samples whose keys and values lie beside the pool: they come into it when they run, in their turn, and as there is
room."""

from __future__ import annotations

import pytest

from plait.policy.batching import Scheduler
from plait.policy.shares import all_may_go_on
from plait.policy.step import Key, Limits


def scheduler(num_blocks: int, max_running: int = 4) -> Scheduler:
    return Scheduler(Limits(max_running, 64, num_blocks))


def park(one: Scheduler, key: Key, num_tokens: int, rollout: int = 0) -> None:
    assert one.add_started(key, num_tokens, num_tokens - 1, (), is_parked=True, rollout=rollout) is None


def test_as_many_come_as_there_is_room_for() -> None:
    """Of three samples with two full blocks each: the first takes two, and one more is left for it to grow."""
    one = scheduler(num_blocks=4)
    for uid in range(3):
        park(one, (uid, 0), 33)
    assert one.blocks.num_held == 0, "who waits takes no room"
    plan = one.plan()
    assert plan.brought == plan.joined == plan.rows == ((0, 0),)
    assert plan.chunks == (), "nothing is computed again"
    one.remove([(0, 0)])
    assert one.plan().brought == ((1, 0),)


def test_none_comes_that_would_give_way_at_once() -> None:
    """Of five blocks two are held, and one of the others is to be left for who runs. What is parked has two full ones,
    and would ask for a third in this very step."""
    one = scheduler(num_blocks=5)
    one.add_started((0, 0), 32, 31, ())
    one.plan()
    park(one, (1, 0), 33)
    plan = one.plan()
    assert plan.brought == plan.preempted == ()
    assert plan.rows == ((0, 0),)
    one.remove([(0, 0)])
    assert one.plan().rows == ((1, 0),)


def test_what_was_parked_is_computed_but_for_the_newest_token() -> None:
    one = scheduler(num_blocks=8)
    park(one, (0, 0), 33)
    plan = one.plan()
    assert (plan.num_row_context, plan.num_tokens) == (32, 1)
    assert one.running[0, 0].num_computed_tokens == 33


def test_prompts_of_an_earlier_rollout_come_first() -> None:
    one = scheduler(num_blocks=8, max_running=1)
    park(one, (5, 0), 20, rollout=1)
    one.add(0, 10, [0], ())
    assert [chunk.uid for chunk in one.plan().chunks] == [0]
    assert one.running.keys() == {(0, 0)}
    one.remove([(0, 0)])
    assert one.plan().brought == ((5, 0),)


@pytest.mark.parametrize(("num_tokens", "comes"), [(17, True), (49, False)], ids=["fits", "does not fit"])
@pytest.mark.parametrize("gave_way", [False, True], ids=["first", "behind one that gave way"])
def test_steps_go_ahead_while_none_comes(num_tokens: int, comes: bool, gave_way: bool) -> None:
    """Of five blocks one is held, and one is to be left for who runs: three may be brought. What gave way asks for four
    and stands first."""
    one = scheduler(num_blocks=5)
    one.add_started((0, 0), 16, 15, ())
    one.plan()
    if gave_way:
        one.add_started((1, 0), 64, 0, ())
    park(one, (2, 0), num_tokens)
    assert all_may_go_on(one) == (not comes)
    assert bool(one.plan().brought) == comes


def test_where_nothing_runs_a_prompt_that_waits_gives_its_room_up() -> None:
    """It holds the whole pool, with samples that have not begun."""
    one = scheduler(num_blocks=2, max_running=1)
    one.add(1, 32, [0, 1], ())
    assert [chunk.uid for chunk in one.plan().chunks] == [1]
    one.remove([(1, 0)])
    assert one.blocks.num_held == 2
    park(one, (0, 0), 20)
    assert one.plan().brought == ((0, 0),)
    assert one.sequences.prompts[1].table == []


def test_new_weights_that_have_all_computed_again_leave_nothing_parked() -> None:
    one = scheduler(num_blocks=8)
    park(one, (0, 0), 20)
    one.recompute()
    plan = one.plan()
    assert plan.brought == ()
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == [(0, 20)]
