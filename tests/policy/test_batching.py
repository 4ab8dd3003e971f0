"""Continuous batching as decisions: by hand, and over random workloads with a stand-in for the engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.batching import Scheduler
from plait.policy.step import Chunk, Limits, Start, StepKind, StepPlan
from tests.cases import examples


def scheduler(
    max_running: int = 4, max_prefill_tokens: int = 10, num_blocks: int | None = None, cache_blocks: int = 0
) -> Scheduler:
    """Blocks of four tokens."""
    return Scheduler(Limits(max_running, max_prefill_tokens, num_blocks, 4, cache_blocks))


def own(uid: int, num_tokens: int) -> list[tuple[int, int]]:
    """Prefix keys of the full blocks of a prompt that begins as no other."""
    return [(uid, at) for at in range(num_tokens // 4)]


def add(batch: Scheduler, uid: int, num_tokens: int, indices: Sequence[int]) -> None:
    batch.add(uid, num_tokens, indices, own(uid, num_tokens))


def chunks(plan: StepPlan) -> list[tuple]:
    return [(chunk.uid, chunk.index, chunk.start, chunk.stop, chunk.completes) for chunk in plan.chunks]


def test_prompts_are_prefilled_together_within_the_budget_and_cut_at_its_end() -> None:
    batch = scheduler()
    for uid, num_tokens in ((7, 4), (8, 5), (9, 6)):
        add(batch, uid, num_tokens, [0])
    plan = batch.plan()
    assert chunks(plan) == [(7, None, 0, 4, True), (8, None, 0, 5, True), (9, None, 0, 1, False)]
    assert plan.starts == (Start(7, (0,)), Start(8, (0,)))
    assert (plan.kind, plan.rows, plan.num_tokens, plan.num_context_tokens) == (StepKind.PREFILL, (), 10, 0)
    assert plan.drawn == [(7, 0), (8, 0)]
    plan = batch.plan()
    assert plan.rows == ((7, 0), (8, 0))
    assert chunks(plan) == [(9, None, 1, 6, True)]
    assert (plan.num_sequences, plan.num_tokens, plan.num_context_tokens) == (3, 7, 4 + 5 + 1)
    plan = batch.plan()
    assert (plan.kind, plan.rows) == (StepKind.DECODE, ((7, 0), (8, 0), (9, 0)))


def test_a_sample_that_came_stands_ahead_of_an_older_prompt_that_holds_the_pool() -> None:
    """Three of four blocks are a prompt's, of which a part is computed. Nothing else runs: it gives way to a sample
    from elsewhere that needs two, and is computed again behind that."""
    batch = scheduler(max_prefill_tokens=8, num_blocks=4)
    add(batch, 7, 12, [0])
    assert chunks(batch.plan()) == [(7, None, 0, 8, False)]
    assert batch.add_started((8, 0), 7, 0, ["b"]) is None
    plan = batch.plan()
    assert chunks(plan) == [(8, 0, 0, 7, True)]
    assert (plan.drawn, batch.blocks.num_held) == ([(8, 0)], 2)
    assert batch.plan().rows == ((8, 0),)
    batch.remove([(8, 0)])
    assert chunks(batch.plan()) == [(7, None, 0, 8, False)]


def test_samples_of_an_earlier_rollout_come_before_all_of_a_later_one_that_wait() -> None:
    """Prompt 7 and the sample of 8 are of rollout 5; then rollout 4 asks for 9, and for a sample that has begun."""
    batch = scheduler(max_running=1)
    batch.add(6, 3, [0], [], 4)
    assert batch.plan().starts == (Start(6, (0,)),)
    batch.add(7, 3, [0], [], 5)
    assert batch.add_started((8, 0), 5, 0, [], rollout=5) is None
    batch.add(9, 3, [0, 1], [], 4)
    assert batch.add_started((10, 0), 5, 0, [], rollout=4) is None
    batch.add(11, 3, [0], [], 5)
    assert [item.order[:2] for item in batch.sequences.in_turn()] == [(4, 4), (4, 3), (5, 2), (5, 1), (5, 5)]
    came = []
    for _ in range(6):
        batch.remove(list(batch.running))
        batch.start_ready()
        if not batch.running:
            batch.plan()
        came += batch.running
    assert came == [(10, 0), (9, 0), (9, 1), (8, 0), (7, 0), (11, 0)]


def test_of_two_rollouts_the_later_gives_way_though_it_was_asked_for_first() -> None:
    batch = scheduler(num_blocks=6)
    batch.add(7, 5, [0], own(7, 5), 5)
    assert batch.plan().starts == (Start(7, (0,)),)
    batch.add(8, 5, [0], own(8, 5), 4)
    assert [key for _ in range(9) for key in batch.plan().preempted] == [(7, 0)]


def test_a_group_larger_than_the_batch_starts_in_parts_and_keeps_its_turn() -> None:
    batch = scheduler(max_running=3)
    add(batch, 7, 3, range(4))
    add(batch, 8, 3, [0])
    assert batch.plan().starts == (Start(7, (0, 1, 2)),)
    assert (batch.start_ready(), batch.sequences.num_waiting, batch.plan().chunks) == ((), 2, ())
    batch.remove([(7, 1)])
    assert batch.start_ready() == (Start(7, (3,)),)
    assert batch.plan().rows == ((7, 0), (7, 2), (7, 3))
    batch.remove([(7, 0), (7, 2)])
    assert chunks(batch.plan()) == [(8, None, 0, 3, True)]


def test_places_are_kept_for_a_prompt_on_its_way() -> None:
    batch = scheduler(max_running=2, max_prefill_tokens=4)
    add(batch, 7, 6, [0, 1])
    add(batch, 8, 1, [0])
    assert chunks(batch.plan()) == [(7, None, 0, 4, False)]
    assert batch.plan().starts == (Start(7, (0, 1)),)


def test_samples_of_a_prompt_share_its_blocks_and_copy_the_last_one_on_write() -> None:
    batch = scheduler(num_blocks=9)
    add(batch, 7, 6, range(3))
    (chunk,) = batch.plan().chunks
    assert chunk == Chunk(7, None, 0, 6, (0, 1), True)
    assert batch.blocks.num_held == 2
    plan = batch.plan()
    assert plan.copies == ((1, 2), (1, 3)), "the last of them writes in place"
    assert plan.grown == ((7, 0), (7, 1))
    assert [sample.table for sample in batch.running.values()] == [[0, 2], [0, 3], [0, 1]]
    for _ in range(2):
        plan = batch.plan()
    assert plan.copies == ()
    assert plan.grown == ((7, 0), (7, 1), (7, 2)), "eight tokens were held: each takes a block"
    batch.remove([(7, index) for index in range(3)])
    assert batch.blocks.num_held == 0
    assert not batch.has_work


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    batch = scheduler(num_blocks=5)
    add(batch, 7, 8, [0])
    add(batch, 8, 2, [0])
    plan = batch.plan()
    assert chunks(plan) == [(7, None, 0, 8, True), (8, None, 0, 2, True)]
    for _ in range(4):  # sample 7 holds 12 tokens and 8 holds 6 then: five blocks
        assert batch.plan().preempted == ()
    plan = batch.plan()
    assert (plan.preempted, plan.rows, plan.grown) == (((8, 0),), ((7, 0),), ((7, 0),))
    assert (batch.sequences.num_waiting, batch.blocks.num_held) == (1, 4)
    assert batch.plan().chunks == (), "its seven tokens need two blocks, and one is free"
    batch.remove([(7, 0)])
    plan = batch.plan()
    assert chunks(plan) == [(8, 0, 0, 7, True)]
    assert plan.drawn == [(8, 0)]
    assert (batch.running[8, 0].num_computed_tokens, batch.running[8, 0].num_tokens) == (7, 8)


def test_a_prompt_waits_until_all_that_run_have_a_block_to_spare() -> None:
    batch = scheduler(num_blocks=4)
    add(batch, 7, 4, [0])
    batch.plan()
    add(batch, 8, 8, [0])
    assert batch.plan().chunks == (), "two are free, and it needs both"
    batch.remove([(7, 0)])
    assert chunks(batch.plan()) == [(8, None, 0, 8, True)]


def test_a_waiting_prompt_gives_way_before_any_that_runs() -> None:
    batch = scheduler(max_running=1, num_blocks=3)
    add(batch, 7, 6, [0, 1])
    batch.plan()
    plan = batch.plan()
    assert (plan.copies, batch.blocks.num_held) == (((1, 2),), 3)
    for _ in range(2):
        plan = batch.plan()
    assert plan.preempted == ()
    assert batch.running[7, 0].table == [0, 2, 1], "the last block of the prompt was given up"
    batch.remove([(7, 0)])
    assert batch.start_ready() == ()
    assert chunks(batch.plan()) == [(7, None, 0, 6, True)]


def test_equal_beginnings_are_computed_once() -> None:
    batch = scheduler(max_prefill_tokens=100, cache_blocks=8)
    batch.add(7, 9, [0], ["a", "b"])
    batch.add(8, 9, [0], ["a", "c"])
    batch.add(9, 8, [0], ["a", "b"])
    plan = batch.plan()
    assert [(c.start, c.stop, c.table) for c in plan.chunks] == [(0, 9, (0, 1, 2)), (4, 9, (0, 3, 4)), (4, 8, (0, 5))]
    batch.remove([(7, 0), (8, 0), (9, 0)])
    assert (batch.blocks.num_held, batch.blocks.num_cached) == (0, 3)
    batch.add(10, 12, [0], ["a", "b", "d"])
    assert [(c.start, c.stop) for c in batch.plan().chunks] == [(8, 12)]


def test_what_prompts_begin_with_is_computed_and_held_once_while_somebody_holds_it() -> None:
    """Two blocks in common, the second prompt finds them in the step of the first. A third one, when the first has
    ended, shares them with the second; a fourth, when nobody is left, computes them again."""
    batch, root = scheduler(max_running=9, max_prefill_tokens=100), [("root", 0), ("root", 1)]
    batch.add(7, 11, [0, 1], root)
    batch.add(8, 13, [0], [*root, (8, 2)])
    plan = batch.plan()
    assert [(c.start, c.stop, c.table) for c in plan.chunks] == [(0, 11, (0, 1, 2)), (8, 13, (0, 1, 3, 4))]
    assert (plan.num_tokens, plan.num_context_tokens, batch.blocks.num_held) == (11 + 5, 8, 5)
    batch.remove([(7, 0), (7, 1)])
    assert batch.blocks.num_held == 4
    batch.add(9, 9, [0], root)
    assert chunks(batch.plan()) == [(9, None, 8, 9, True)]
    batch.remove([(8, 0), (9, 0)])
    assert (batch.blocks.num_held, batch.blocks.num_cached) == (0, 0)
    batch.add(10, 9, [0], root)
    assert chunks(batch.plan()) == [(10, None, 0, 9, True)]


def test_a_pool_has_room_for_more_samples_whose_prompts_begin_alike() -> None:
    """Prompts of 12 tokens, and a block to spare for each that runs. Ten blocks hold four of which two of three blocks
    are in common, two that have nothing in common."""
    for root, most in ((2, 4), (0, 2)):
        batch = scheduler(max_running=9, max_prefill_tokens=100, num_blocks=10)
        for uid in range(4):
            batch.add(uid, 12, [0], [("root", at) if at < root else (uid, at) for at in range(3)])
        batch.plan()
        assert len(batch.running) == most


def test_a_sample_joins_with_what_it_holds_or_is_computed_again() -> None:
    batch = scheduler(num_blocks=3)
    assert batch.add_started((7, 2), 9, 8, ["a"]) == 0
    assert batch.sequences.find((7, 2)).table == [0, 1]
    plan = batch.plan()
    assert (plan.joined, plan.rows, plan.grown, plan.chunks) == (((7, 2),), ((7, 2),), ((7, 2),), ())
    assert batch.add_started((8, 0), 6, 5, ["b"]) is None, "no room beside the other"
    assert batch.plan().chunks == ()
    batch.remove([(7, 2)])
    assert chunks(batch.plan()) == [(8, 0, 0, 6, True)]


def test_samples_that_come_share_the_blocks_of_their_prompt() -> None:
    """A prompt of 9 tokens has two full blocks; what follows is each sample's own."""
    batch, names = scheduler(max_running=9), own(7, 9)
    assert batch.room.num_shared(names) == 0
    assert batch.add_started((7, 0), 12, 11, names) == 0
    assert batch.room.num_shared(names) == 8
    assert batch.add_started((7, 1), 18, 17, names) == 8
    assert batch.add_started((7, 2), 18, 17, names, is_current=False) == 0, "of other weights"
    assert [batch.sequences.find((7, index)).table for index in range(3)] == [
        [0, 1, 2],
        [0, 1, 3, 4, 5],
        [6, 7, 8, 9, 10],
    ]
    assert batch.add_started((7, 3), 14, 8, names) == 8, "with less than it needs to go on: the rest is computed"
    assert batch.sequences.find((7, 3)).table == [0, 1, 11, 12]
    plan = batch.plan()
    assert (plan.joined, chunks(plan)) == (((7, 0), (7, 1), (7, 2)), [(7, 3, 8, 14, True)])
    batch.remove([(7, index) for index in range(4)])
    assert (batch.blocks.num_held, batch.room.num_shared(names)) == (0, 0)


def test_drafts_are_computed_behind_the_newest_token_and_taken_back_where_they_were_wrong() -> None:
    """A prompt of 6 tokens: the newest and a draft of 5 are computed at 6 to 11, in the second and a third block."""
    batch = scheduler()
    add(batch, 7, 6, range(2))
    batch.plan()
    plan = batch.plan({(7, 1): 5})
    assert (plan.rows, plan.num_new, plan.num_drafted) == (((7, 0), (7, 1)), (1, 6), 5)
    assert (plan.copies, plan.grown) == (((1, 2),), ((7, 0), (7, 1)))
    assert [sample.table for sample in batch.running.values()] == [[0, 2], [0, 1, 3]]
    assert (plan.num_tokens, plan.num_context_tokens) == (7, 12)
    assert batch.running[7, 1].num_computed_tokens == 12
    batch.take_back({(7, 1): 4})
    assert (batch.running[7, 1].num_computed_tokens, batch.running[7, 1].num_tokens) == (8, 9)
    plan = batch.plan({(7, 1): 4})
    assert (plan.num_new, plan.grown) == ((1, 5), ((7, 1),)), "8 to 12: four in the block that it has"
    batch.remove([(7, 0), (7, 1)])
    assert batch.blocks.num_held == 0


def test_a_sample_that_shares_its_last_block_copies_it_and_grows_at_once() -> None:
    batch = scheduler()
    add(batch, 7, 6, range(2))
    batch.plan()
    plan = batch.plan({(7, 0): 9, (7, 1): 9})
    assert plan.copies == ((1, 2),)
    assert [sample.table for sample in batch.running.values()] == [[0, 2, 3, 4], [0, 1, 5, 6]]


def test_who_is_left_alone_with_a_shared_block_goes_on_in_it() -> None:
    """Two samples of a prompt have the one block of the pool. The younger one gives way, and no copy is needed then."""
    batch = scheduler(num_blocks=1)
    add(batch, 7, 2, [0, 1])
    assert batch.plan().starts == (Start(7, (0, 1)),)
    plan = batch.plan()
    assert (plan.preempted, plan.copies, plan.rows, plan.chunks) == (((7, 1),), (), ((7, 0),), ())
    batch.remove([(7, 0)])
    assert chunks(batch.plan()) == [(7, 1, 0, 3, True)]


def test_nobody_gives_way_for_a_draft() -> None:
    batch = scheduler(num_blocks=5)
    add(batch, 7, 8, [0])
    add(batch, 8, 2, [0])
    batch.plan()
    plan = batch.plan({(7, 0): 4, (8, 0): 2})
    assert (plan.num_new, plan.preempted) == ((1, 1), ()), "three blocks are wanted, two are free: none is computed"
    plan = batch.plan({(7, 0): 2, (8, 0): 0})
    assert plan.num_new == (3, 1)


def test_what_older_weights_computed_is_not_found() -> None:
    """Not of a prompt that was half computed when they changed, nor of what its samples said."""
    batch = scheduler(max_prefill_tokens=8, cache_blocks=9)
    batch.add(7, 12, [0], ["a", "b", "c"])
    batch.plan()
    batch.forget()
    assert [chunk.completes for chunk in batch.plan().chunks] == [True]
    batch.remove([(7, 0)], {(7, 0): ["a", "b", "c"]})
    assert (batch.blocks.num_held, batch.blocks.num_cached) == (0, 0)


def test_a_prompt_shares_nothing_that_older_weights_computed_for_another() -> None:
    """What a running sample keeps of them stays its own; the next two prompts share what the first of them computes."""
    batch, root = scheduler(max_running=9, max_prefill_tokens=100), [("root", 0), ("root", 1)]
    batch.add(7, 9, [0], root)
    batch.plan()
    batch.forget()
    batch.add(8, 9, [0], root)
    batch.add(9, 9, [0], root)
    assert chunks(batch.plan()) == [(8, None, 0, 9, True), (9, None, 8, 9, True)]
    tables = {key: set(sample.table) for key, sample in batch.running.items()}
    assert not tables[7, 0] & tables[8, 0]
    assert len(tables[8, 0] & tables[9, 0]) == 2
    batch.recompute()
    assert chunks(batch.plan()) == [(7, 0, 0, 11, True), (8, 0, 8, 10, True), (9, 0, 8, 10, True)]


def test_a_conversation_goes_on_from_what_was_said() -> None:
    """Prompt of 5 tokens, 6 said: the newest is not held, so two blocks of 10 tokens are full."""
    batch = scheduler(cache_blocks=9)
    batch.add(7, 5, [0], ["a"])
    for _ in range(6):
        batch.plan()
    batch.remove([(7, 0)], {(7, 0): ["a", "b"]})
    assert (batch.blocks.num_held, batch.blocks.num_cached) == (0, 2)
    batch.add(8, 13, [0], ["a", "b", "c"])
    assert [(chunk.start, chunk.stop) for chunk in batch.plan().chunks] == [(8, 13)]


def test_all_is_computed_again() -> None:
    batch = scheduler(max_running=2)
    add(batch, 7, 5, range(3))
    batch.plan()
    batch.plan()
    batch.recompute()
    assert (batch.blocks.num_held, len(batch.running), batch.sequences.num_waiting) == (0, 0, 3)
    plan = batch.plan()
    assert chunks(plan) == [(7, 0, 0, 7, True), (7, 1, 4, 7, True)], "the prompt's first block is shared"


@settings(max_examples=examples(100, 200), deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 9), min_size=1, max_size=7)), max_size=8),
    max_running=st.integers(1, 9),
    max_prefill_tokens=st.integers(1, 30),
    spare_blocks=st.sampled_from([0, 1, 3, 10, 1000]),
    aborts=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 6)), max_size=3),
    cache_blocks=st.sampled_from([0, 2, 50]),
    drafted=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
)
def test_every_sample_runs_to_its_end_in_any_pool(
    prompts, max_running, max_prefill_tokens, spare_blocks, aborts, cache_blocks, drafted
) -> None:
    """A stand-in engine that only counts: sample i of prompt u has lengths[i] tokens. The pool has room for the longest
    alone at least. No block is written by two, none is lost, and what is held was computed in its present blocks.
    In turn, samples draft so many tokens, of which so many are accepted.
    """
    longest = max((size + max(lengths) for size, lengths in prompts), default=1)
    batch = scheduler(max_running, max_prefill_tokens, -(-longest // 4) + spare_blocks, cache_blocks)
    for uid, (size, lengths) in enumerate(prompts):
        # All begin with the same two blocks, and each third prompt goes on as the one before.
        names = [("root", at) if at < 2 else ("prompt", uid % 3, at) for at in range(size // 4)]
        batch.add(uid, size, range(len(lengths)), names)
    said: dict[tuple[int, int], int] = {}
    written: dict[int, set[int]] = {}
    steps = 0

    def end(keys: list[tuple[int, int]], further: dict[tuple[int, int], int]) -> None:
        for key in keys:
            said[key] = said.get(key, 0) + 1 + further.get(key, 0)
        batch.remove([key for key in keys if said[key] == prompts[key[0]][1][key[1]]])

    def compute(table, start: int, stop: int) -> None:
        for at in range(start, stop):
            cells = written.setdefault(table[at // 4], set())
            if at % 4 == 0:
                cells.clear()
            cells.add(at % 4)
        for at in range(start):
            assert at % 4 in written[table[at // 4]], "a token is read that was never computed"

    while batch.has_work:
        end([(start.uid, index) for start in batch.start_ready() for index in start.indices], {})
        wanted, true = drafted[steps % len(drafted)]
        left = {key: prompts[key[0]][1][key[1]] - count - 1 for key, count in said.items()}
        before = {key: sample.num_computed_tokens for key, sample in batch.running.items()}
        plan = batch.plan({key: min(wanted, most) for key, most in left.items() if most > 0})
        assert plan.num_drafted == 0 or not plan.preempted
        assert len(batch.running) <= max_running
        assert plan.num_chunk_tokens <= max_prefill_tokens
        for source, target in plan.copies:
            written[target] = set(written[source])
        owned = []
        for key, count in zip(plan.rows, plan.num_new, strict=True):
            sample = batch.running[key]
            start, stop = sample.num_computed_tokens - count, sample.num_computed_tokens
            assert key in plan.joined or start == before[key]
            owned += sample.table[start // 4 : -(-stop // 4)]
            compute(sample.table, start, stop)
        assert len(set(owned)) == len(owned), "two write one block"
        for chunk in plan.chunks:
            compute(chunk.table, chunk.start, chunk.stop)
        assert plan.num_tokens or plan.starts or not batch.has_work, "a step that does nothing"
        further = {key: min(true, count - 1) for key, count in zip(plan.rows, plan.num_new, strict=True)}
        batch.take_back({key: count - 1 - further[key] for key, count in zip(plan.rows, plan.num_new, strict=True)})
        end(plan.drawn, further)
        steps += 1
        assert steps <= 3000
        if steps == 4:
            batch.remove(aborts)
        assert batch.sequences.num_waiting == len([*batch.sequences.waiting])
    lengths_of = {(uid, i): length for uid, (_, lengths) in enumerate(prompts) for i, length in enumerate(lengths)}
    assert all(said.get(key) == length for key, length in lengths_of.items() if key not in aborts)
    assert all(count <= lengths_of[key] for key, count in said.items())
    assert batch.blocks.num_held == 0
    assert batch.blocks.num_cached <= cache_blocks


def test_a_uid_waits_once() -> None:
    batch = scheduler()
    add(batch, 7, 3, [0])
    with pytest.raises(AssertionError, match="prompt 7 waits"):
        add(batch, 7, 3, [0])
