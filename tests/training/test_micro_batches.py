"""The split over ranks and micro-batches: every sample once, balanced, within the budget, the same from any process."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.packing import MicroBatch, SampleSize, root_of, split_micro_batches
from plait.training.micro_batches import shares_over, split_over


def group(uid: int, prompt: int, *responses: int) -> list[SampleSize]:
    return [SampleSize(uid, prompt, response) for response in responses]


GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=6)), min_size=0, max_size=8
)


def samples_of(groups: list[tuple[int, list[int]]]) -> list[SampleSize]:
    return [size for uid, (prompt, responses) in enumerate(groups) for size in group(uid, prompt, *responses)]


def tokens_of(micro: MicroBatch, samples: list[SampleSize]) -> int:
    """The root, and each group of the row once with its prompt."""
    prompts = sum(samples[members[0]].prompt_tokens for members in micro.groups)
    return samples[0].root_tokens + prompts + sum(samples[i].response_tokens for i in micro.samples)


@given(GROUPS, st.integers(0, 50), st.integers(1, 5), st.integers(1, 5), st.integers(1, 200), st.booleans())
def test_every_sample_once_within_the_budget(groups, root, ways, least, budget, whole_groups):
    samples = [replace(size, root_tokens=root) for size in samples_of(groups)]
    parts = split_over(samples, budget, ways=ways, least=least, whole_groups=whole_groups)
    assert len(parts) == ways
    assert sorted(chain.from_iterable(micro.samples for part in parts for micro in part)) == list(range(len(samples)))
    for micro in chain.from_iterable(parts):
        assert micro.num_tokens == tokens_of(micro, samples)
        assert micro.root_tokens == (root if len(micro.groups) > 1 else 0), "one group has it in its prompt"
        uids = [{samples[i].group for i in members} for members in micro.groups]
        assert all(len(uid) == 1 for uid in uids)
        found = {samples[i].group for i in micro.samples}
        if whole_groups:
            whole = [i for i, sample in enumerate(samples) if sample.group in found]
            assert sorted(micro.samples) == whole, "no group is cut"
        if micro.num_tokens > budget:
            assert len(found if whole_groups else micro.samples) == 1, "only what cannot be cut exceeds the budget"
    assert parts == split_over(samples, budget, ways=ways, least=least, whole_groups=whole_groups)


@given(GROUPS, st.integers(1, 200), st.booleans())
def test_one_rank_has_the_plain_split(groups, budget, whole_groups):
    samples = samples_of(groups)
    plain = split_micro_batches(samples, budget, whole_groups=whole_groups)
    assert split_over(samples, budget, whole_groups=whole_groups) == (plain,)


@given(GROUPS.filter(bool), st.integers(2, 4))
def test_ranks_are_balanced_to_one_sample(groups, ways):
    """No rank has more than its even part and one largest sample, were every prompt paid for each sample."""
    samples = samples_of(groups)
    parts = split_over(samples, 10_000, ways=ways)
    loads = [sum(micro.num_tokens for micro in part) for part in parts]
    paid = [sample.prompt_tokens + sample.response_tokens for sample in samples]
    assert max(loads) <= sum(paid) / ways + max(paid)


def test_the_root_is_paid_once_for_each_micro_batch():
    """Groups of 10 + 5 tokens behind 40: a budget of 70 has room for two of them."""
    samples = [SampleSize(uid, 10, 5, 40) for uid in range(4)]
    micros = split_micro_batches(samples, 70)
    assert [(micro.samples, micro.num_tokens) for micro in micros] == [((0, 1), 70), ((2, 3), 70)]
    assert [[micro.num_tokens for micro in part] for part in split_over(samples, 1000, ways=2)] == [[70], [70]]


def test_the_root_of_prompts():
    words = tuple(range(100))
    assert root_of([(*words, 1), (*words, 2, 3)]) == 100
    assert root_of([words, (*words, 2, 3)]) == 99, "each has one token of its own"
    assert root_of([(*words, 1), (*words[:40], 7), (*words[:60], 7)]) == 40
    assert root_of([(*words[:31], 1), (*words[:31], 2)]) == 0, "not worth it"
    assert root_of([words]) == root_of([]) == 0
    assert root_of([words, words]) == 99, "equal prompts"


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


def test_shares_by_time_count_the_squares_of_lengths():
    """Four prompts of a token each, with responses: 9, 6, 5 and 4 tokens are two shares of 13 and 11. Where a pair
    counts as much as a token they take 54, 27, 20 and 14, and the longest is alone, beside 61."""
    samples = [SampleSize(uid, 1, tokens - 1) for uid, tokens in enumerate((9, 6, 5, 4))]
    assert shares_over(samples, 2) == ((0, 3), (1, 2))
    assert shares_over(samples, 2, pair_tokens=1.0) == ((0,), (1, 2, 3))


@given(GROUPS.filter(bool), st.integers(2, 4), st.sampled_from([1e-4, 0.01, 1.0]))
def test_shares_by_time_have_every_sample_once_and_are_balanced_to_one(groups, ways, pair_tokens):
    samples = samples_of(groups)
    shares = shares_over(samples, ways, pair_tokens=pair_tokens)
    assert sorted(chain.from_iterable(shares)) == list(range(len(samples)))
    alone = [time_of([sample], pair_tokens) for sample in samples]
    loads = [time_of([samples[i] for i in share], pair_tokens) for share in shares]
    assert max(loads) <= sum(alone) / ways + max(alone) + 1e-6


def time_of(samples, pair_tokens):
    """Tokens and pairs of a row with each prompt once."""
    total = 0.0
    for prompt in {s.group: s.prompt_tokens for s in samples}.values():
        total += prompt + pair_tokens * prompt * (prompt + 1) / 2
    for s in samples:
        r, p = s.response_tokens, s.prompt_tokens
        total += r + pair_tokens * (r * p + r * (r + 1) / 2)
    return total
