"""Prompts that are computed for other engines; by hand, in blocks of four tokens."""

from __future__ import annotations

from plait.policy.batching import Scheduler
from plait.policy.prompts_alone import due, may_compute
from plait.policy.shares import num_wanted
from plait.policy.step import Limits, StepPlan


def scheduler(num_blocks: int | None = None, budget: int = 10) -> Scheduler:
    return Scheduler(Limits(2, budget, num_blocks, 4, starts=False))


def add(batch: Scheduler, uid: int, num_tokens: int, samples: int = 3, head: int | None = None) -> None:
    """
    Args:
        head: what it begins with; None: as no other.
    """
    names = [(uid if head is None else head, at) for at in range(num_tokens // 4)]
    batch.add(uid, num_tokens, range(samples), names)


def chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    assert (plan.rows, plan.starts) == ((), ())
    assert not any(chunk.completes for chunk in plan.chunks), "nobody reads logits"
    return [(chunk.uid, chunk.start, chunk.stop) for chunk in plan.chunks]


def test_more_prompts_than_samples_may_run_are_computed_in_the_order_in_which_they_came() -> None:
    batch = scheduler()
    for uid, num_tokens in ((7, 4), (8, 9), (9, 3)):
        add(batch, uid, num_tokens)
    assert num_wanted(batch) == 0, "no sample has a place in a share"
    assert chunks(batch.plan()) == [(7, 0, 4), (8, 0, 6)]
    assert batch.start_ready() == ()
    assert chunks(batch.plan()) == [(8, 6, 9), (9, 0, 3)]
    assert not may_compute(batch.sequences, batch.room)
    assert batch.has_work, "they wait to be taken out"


def test_what_is_computed_keeps_its_blocks_until_it_is_taken_out() -> None:
    """Two prompts of two blocks fill a pool of five but for one; the third has room when the first has gone."""
    batch = scheduler(num_blocks=5, budget=100)
    for uid in (1, 2, 3):
        add(batch, uid, 8)
    assert chunks(batch.plan()) == [(1, 0, 8), (2, 0, 8)]
    assert not may_compute(batch.sequences, batch.room)
    assert batch.plan().is_empty
    batch.remove([(1, index) for index in range(3)])
    assert may_compute(batch.sequences, batch.room)
    assert chunks(batch.plan()) == [(3, 0, 8)]


def test_a_prompt_that_fills_the_pool_is_computed_when_nothing_else_is_there() -> None:
    batch = scheduler(num_blocks=2, budget=5)
    add(batch, 1, 2)
    add(batch, 2, 8)
    assert chunks(batch.plan()) == [(1, 0, 2)]
    assert not may_compute(batch.sequences, batch.room)
    batch.remove([(1, index) for index in range(3)])
    assert chunks(batch.plan()) == [(2, 0, 5)]
    assert may_compute(batch.sequences, batch.room), "it is begun"


def due_in(batch: Scheduler) -> list[int]:
    return due(batch.sequences, batch.room, batch.limits.max_prefill_tokens)


def test_what_a_step_will_have_computed_is_known_before_it() -> None:
    """Ten tokens a step: 4 and 6 of 9, the other 3 with 3 of the next."""
    batch = scheduler()
    for uid, num_tokens in ((7, 4), (8, 9), (9, 3)):
        add(batch, uid, num_tokens)
    assert due_in(batch) == [7]
    assert due_in(batch) == [7], "nothing has changed by it"
    batch.plan()
    assert due_in(batch) == [8, 9]
    batch.plan()
    assert due_in(batch) == []


def test_no_prompt_is_due_that_has_no_room_in_the_next_step() -> None:
    """Two of two blocks fill a pool of five but for one, the third is due when one of them has gone; the first is due
    in any pool."""
    batch = scheduler(num_blocks=5, budget=100)
    for uid in (1, 2, 3):
        add(batch, uid, 8)
    assert due_in(batch) == [1, 2]
    batch.plan()
    assert due_in(batch) == []
    batch.remove([(1, index) for index in range(3)])
    assert due_in(batch) == [3]
    full = scheduler(num_blocks=2, budget=100)
    add(full, 1, 8)
    assert due_in(full) == [1]


def test_where_prompts_share_blocks_more_may_be_computed_than_was_due() -> None:
    batch = scheduler(budget=12)
    add(batch, 1, 9, head=0)
    add(batch, 2, 10, head=0)
    assert due_in(batch) == [1]
    assert chunks(batch.plan()) == [(1, 0, 9), (2, 8, 10)]


def test_what_prompts_begin_with_is_computed_once() -> None:
    batch = scheduler(budget=100)
    add(batch, 1, 9, head=0)
    add(batch, 2, 10, head=0)
    assert chunks(batch.plan()) == [(1, 0, 9), (2, 8, 10)]
