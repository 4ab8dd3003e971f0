"""Mini-batch draws and micro-batch splits: hand-made cases, then properties over random groups."""

from __future__ import annotations

import random
import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.packing import MicroBatch, SampleSize, draw_mini_batches, split_micro_batches


def sizes(*groups: tuple[int, list[int]]) -> list[SampleSize]:
    return [SampleSize(g, prompt, length) for g, (prompt, lengths) in enumerate(groups) for length in lengths]


def test_a_group_that_fits_pays_its_prompt_once():
    assert split_micro_batches(sizes((10, [5, 6, 7])), 28) == (MicroBatch(((0, 1, 2),), 28),)


def test_a_group_too_large_is_cut_and_pays_its_prompt_again():
    # 10 + 5 + 6 + 7 = 28 does not fit 27. Room for responses: 17. Longest first: 7, 6 together, then 5 alone.
    assert split_micro_batches(sizes((10, [5, 6, 7])), 27) == (MicroBatch(((1, 2),), 23), MicroBatch(((0,),), 15))


def test_pieces_of_different_groups_share_a_micro_batch():
    # Pieces of 12, 9 and 8 tokens under a budget of 20: largest first, 12 takes 8 with it, 9 stands alone.
    assert split_micro_batches(sizes((10, [1, 1]), (5, [4]), (4, [2, 2])), 20) == (
        MicroBatch(((0, 1), (3, 4)), 20),
        MicroBatch(((2,),), 9),
    )


def test_an_oversize_sample_stands_alone():
    assert split_micro_batches(sizes((4, [100, 1, 2])), 10) == (MicroBatch(((0,),), 104), MicroBatch(((1, 2),), 7))


def test_a_pair_too_large_stays_whole():
    # 10 + 5 + 6 + 7 = 28 does not fit 27 and runs alone.
    split = split_micro_batches(sizes((10, [5, 6, 7]), (2, [1, 1])), 27, whole_groups=True)
    assert split == (MicroBatch(((0, 1, 2),), 28), MicroBatch(((3, 4),), 4))


def test_whole_groups_are_drawn_though_they_are_few():
    # Two groups for three mini-batches: single samples are drawn, or with whole_groups two mini-batches.
    ids = [(uid, index) for uid in (1, 2) for index in range(3)]
    assert [len(part) for part in draw_mini_batches(ids, 3, seed=0, step=0, epoch=0)] == [2, 2, 2]
    drawn = draw_mini_batches(ids, 3, seed=0, step=0, epoch=0, whole_groups=True)
    assert sorted(drawn) == [(0, 1, 2), (3, 4, 5)]


def test_nothing_gives_nothing():
    assert split_micro_batches([], 10) == ()
    assert draw_mini_batches([], 3, seed=0, step=0, epoch=0) == ()


batches = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(0, 30), min_size=1, max_size=6)), min_size=1, max_size=8
).map(lambda groups: sizes(*groups))


@given(batches, st.integers(1, 120))
def test_split_properties(samples: list[SampleSize], budget: int):
    split = split_micro_batches(samples, budget)
    assert sorted(i for micro in split for i in micro.samples) == list(range(len(samples)))
    assert split == split_micro_batches(samples, budget)
    for micro in split:
        tokens = 0
        for members in micro.groups:
            assert len({samples[i].group for i in members}) == 1
            tokens += samples[members[0]].prompt_tokens + sum(samples[i].response_tokens for i in members)
        assert micro.num_tokens == tokens
        assert tokens <= budget or len(micro.samples) == 1
    for group in {s.group for s in samples}:
        members = [i for i, s in enumerate(samples) if s.group == group]
        prompt = samples[members[0]].prompt_tokens
        responses = sum(samples[i].response_tokens for i in members)
        paid = sum(set(piece) <= set(members) for micro in split for piece in micro.groups)
        if prompt + responses <= budget:
            assert paid == 1
        elif all(prompt + samples[i].response_tokens <= budget for i in members) and budget > prompt:
            # First fit leaves at most one bin half empty, so it takes fewer than twice the least possible, plus one.
            assert paid <= 2 * -(-responses // (budget - prompt)) + 1
        # No prompt is paid twice within one micro-batch.
        for micro in split:
            mine = [piece for piece in micro.groups if set(piece) <= set(members)]
            assert len(mine) <= 1 or prompt + min(samples[i].response_tokens for i in members) > budget


@given(batches, st.integers(1, 120))
def test_whole_groups_are_never_split(samples: list[SampleSize], budget: int):
    split = split_micro_batches(samples, budget, whole_groups=True)
    assert sorted(i for micro in split for i in micro.samples) == list(range(len(samples)))
    for micro in split:
        groups = {samples[i].group for i in micro.samples}
        assert set(micro.samples) == {i for i, s in enumerate(samples) if s.group in groups}, "a group is cut"
        prompts = sum(samples[piece[0]].prompt_tokens for piece in micro.groups)
        assert micro.num_tokens == prompts + sum(samples[i].response_tokens for i in micro.samples)
        assert len(micro.groups) == len(groups)
        assert micro.num_tokens <= budget or len(groups) == 1


@given(batches, st.integers(1, 120))
def test_wider_micro_batches_come_first(samples: list[SampleSize], budget: int):
    widest = [max(_piece_tokens(samples, piece) for piece in m.groups) for m in split_micro_batches(samples, budget)]
    assert all(a >= b for a, b in pairwise(widest))


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 40))
def test_each_piece_is_in_the_first_micro_batch_with_room(lengths: list[int], budget: int):
    samples = [SampleSize(i, 0, length) for i, length in enumerate(lengths)]
    first_fit: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for members in first_fit:
            if sum(lengths[k] for k in (*members, i)) <= budget:
                members.append(i)
                break
        else:
            first_fit.append([i])
    split = split_micro_batches(samples, budget)
    assert [sorted(micro.samples) for micro in split] == [sorted(members) for members in first_fit]


def test_a_hundred_thousand_samples_are_split_in_seconds():
    # Looking at one micro-batch after the other takes three quarters of a minute here.
    draw = random.Random(0)
    samples = [SampleSize(i, 200, min(4000, int(draw.lognormvariate(6, 1)))) for i in range(100_000)]
    began = time.process_time()
    split = split_micro_batches(samples, 4096)
    assert time.process_time() - began < 10
    assert sum(len(micro.samples) for micro in split) == len(samples)
    assert max(micro.num_tokens for micro in split) <= 4200, "a sample of more than the budget stands alone"


def _piece_tokens(samples: list[SampleSize], piece: tuple[int, ...]) -> int:
    return samples[piece[0]].prompt_tokens + sum(samples[i].response_tokens for i in piece)


def as_ids(ids: list[tuple[int, int]], drawn: tuple[tuple[int, ...], ...]) -> list[set[tuple[int, int]]]:
    return [{ids[i] for i in part} for part in drawn]


@given(
    st.sets(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=30),
    st.integers(1, 7),
    st.integers(0, 2**40),
)
def test_draw_properties(ids_set: set[tuple[int, int]], count: int, seed: int):
    ids = sorted(ids_set)
    drawn = draw_mini_batches(ids, count, seed=seed, step=3, epoch=1)
    assert sorted(i for part in drawn for i in part) == list(range(len(ids)))
    assert len(drawn) == min(count, len(ids))
    assert all(drawn)
    num_groups = len({uid for uid, _ in ids})
    if num_groups >= count:
        assert_whole_groups(ids, drawn)
    else:
        assert max(map(len, drawn)) - min(map(len, drawn)) <= 1
    whole = draw_mini_batches(ids, count, seed=seed, step=3, epoch=1, whole_groups=True)
    assert sorted(i for part in whole for i in part) == list(range(len(ids)))
    assert len(whole) == min(count, num_groups)
    assert_whole_groups(ids, whole)
    if num_groups >= count:
        assert whole == drawn, "asking for what happens anyway changes no draw"
    shuffled = random.Random(seed).sample(ids, len(ids))
    again = draw_mini_batches(shuffled, count, seed=seed, step=3, epoch=1)
    assert as_ids(ids, drawn) == as_ids(shuffled, again), "the draw depends on the order of arrival"


def assert_whole_groups(ids: list[tuple[int, int]], drawn: tuple[tuple[int, ...], ...]) -> None:
    for part in drawn:
        others = {ids[i][0] for i in range(len(ids)) if i not in part}
        assert not others & {ids[i][0] for i in part}, "a group is cut"


def test_draws_differ_by_seed_step_and_epoch():
    ids = [(uid, index) for uid in range(12) for index in range(4)]
    keys = [(seed, step, epoch) for seed in (0, 1) for step in (0, 1) for epoch in (0, 1)]
    drawn = {draw_mini_batches(ids, 3, seed=a, step=b, epoch=c) for a, b, c in keys}
    assert len(drawn) == len(keys)


def test_every_group_is_as_likely_in_every_mini_batch():
    # 600 draws of 4 groups into 2: a group stands in the first half about 300 times (sd 12).
    ids = [(uid, 0) for uid in range(4)]
    firsts = [0] * 4
    for step in range(600):
        for position in draw_mini_batches(ids, 2, seed=7, step=step, epoch=0)[0]:
            firsts[position] += 1
    assert sum(firsts) == 1200
    assert all(240 < count < 360 for count in firsts)


def test_the_draw_is_frozen():
    """A changed hash would change every run that is resumed across versions."""
    ids = [(uid, 0) for uid in range(6)]
    assert draw_mini_batches(ids, 3, seed=1, step=2, epoch=3) == FROZEN


FROZEN = ((2, 4), (0, 3), (1, 5))
