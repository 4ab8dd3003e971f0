"""The split over ranks and micro-batches: every sample once, balanced, within the budget, the same from any process."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.packing import MicroBatch, SampleSize, split_micro_batches
from plait.training.micro_batches import split_over


def group(uid: int, prompt: int, *responses: int) -> list[SampleSize]:
    return [SampleSize(uid, prompt, response) for response in responses]


GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=6)), min_size=0, max_size=8
)


def samples_of(groups: list[tuple[int, list[int]]]) -> list[SampleSize]:
    return [size for uid, (prompt, responses) in enumerate(groups) for size in group(uid, prompt, *responses)]


def tokens_of(micro: MicroBatch, samples: list[SampleSize]) -> int:
    """Each group of the row once with its prompt."""
    prompts = sum(samples[members[0]].prompt_tokens for members in micro.groups)
    return prompts + sum(samples[i].response_tokens for i in micro.samples)


@given(GROUPS, st.integers(1, 5), st.integers(1, 5), st.integers(1, 200), st.booleans(), st.booleans())
def test_every_sample_once_within_the_budget(groups, ways, least, budget, share_prompts, whole_groups):
    samples = samples_of(groups)
    how = {"share_prompts": share_prompts, "whole_groups": whole_groups}
    parts = split_over(samples, budget, ways=ways, least=least, **how)
    assert len(parts) == ways
    assert sorted(chain.from_iterable(micro.samples for part in parts for micro in part)) == list(range(len(samples)))
    for micro in chain.from_iterable(parts):
        assert micro.num_tokens == tokens_of(micro, samples)
        uids = [{samples[i].group for i in members} for members in micro.groups]
        assert all(len(uid) == 1 for uid in uids)
        assert share_prompts or all(len(members) == 1 for members in micro.groups)
        found = {samples[i].group for i in micro.samples}
        if whole_groups:
            whole = [i for i, sample in enumerate(samples) if sample.group in found]
            assert sorted(micro.samples) == whole, "no group is cut"
        if micro.num_tokens > budget:
            assert len(found if whole_groups else micro.samples) == 1, "only what cannot be cut exceeds the budget"
    assert parts == split_over(samples, budget, ways=ways, least=least, **how)


@given(GROUPS, st.integers(1, 200), st.booleans(), st.booleans())
def test_one_rank_has_the_plain_split(groups, budget, share_prompts, whole_groups):
    samples, how = samples_of(groups), {"share_prompts": share_prompts, "whole_groups": whole_groups}
    assert split_over(samples, budget, **how) == (split_micro_batches(samples, budget, **how),)


@given(GROUPS.filter(bool), st.integers(2, 4))
def test_ranks_are_balanced_to_one_sample(groups, ways):
    """No rank has more than its even part and one largest sample, were every prompt paid for each sample."""
    samples = samples_of(groups)
    parts = split_over(samples, 10_000, ways=ways)
    loads = [sum(micro.num_tokens for micro in part) for part in parts]
    paid = [sample.prompt_tokens + sample.response_tokens for sample in samples]
    assert max(loads) <= sum(paid) / ways + max(paid)


def test_groups_stay_whole_where_that_is_balanced():
    samples = [size for uid in range(4) for size in group(uid, 10, 5, 5, 5)]
    parts = split_over(samples, 1000, ways=2)
    assert [[micro.groups for micro in part] for part in parts] == [
        [((0, 1, 2), (6, 7, 8))],
        [((3, 4, 5), (9, 10, 11))],
    ]


def test_a_group_is_cut_where_ranks_would_wait():
    """One group of 10 + 4 · 30: two ranks take two samples each, and both pay the prompt."""
    parts = split_over(group(0, 10, 30, 30, 30, 30), 1000, ways=2)
    assert [[micro.num_tokens for micro in part] for part in parts] == [[70], [70]]
    assert split_over(group(0, 10, 30, 30), 1000, ways=2, whole_groups=True) == (
        (MicroBatch(((0, 1),), 70),),
        (),
    )


def test_a_pipeline_has_enough_micro_batches():
    samples = [size for uid in range(6) for size in group(uid, 4, 6, 6)]
    (micros,) = split_over(samples, 1000, least=4)
    assert sorted(micro.num_tokens for micro in micros) == [16, 16, 32, 32]
    (few,) = split_over(samples[:3], 1000, least=8)
    assert [micro.samples for micro in few] == [(0,), (1,), (2,)]
