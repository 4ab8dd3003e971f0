"""How shares of samples are cut, by hand and beside what a run does."""

from __future__ import annotations

from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.micro_batch import Cut, LargestBatch, pieces, share_of
from plait.policy.packing import GroupTokens, SampleSize
from plait.training.micro_batches import split_over
from tests.cases import examples


def test_a_prompts_samples_are_cut_where_that_fills_a_pipeline_better() -> None:
    """One prompt of a token with 8 samples of 8: in eight pieces the prompt is computed eight times, which is less than
    a pipeline that waits. In two prompts of 100 tokens with 2 samples each it is more."""
    assert pieces(8, 8, 1.0, 8.0, 8) == (8.0, 8)
    assert pieces(4, 2, 100.0, 8.0, 8) == (2.0, 2)
    assert pieces(4, 8, 10.0, 8.0, 1) == (1.0, 1)  # half of a prompt's samples, the whole of the prompt


def test_a_share_of_a_mini_batch() -> None:
    assert share_of(64, 1, 4) == 16
    assert share_of(64, 4, 4) == 4
    assert share_of(10, 3, 2) == 2  # of four samples
    assert share_of(2, 8, 1) == 1
    assert share_of(6, 1, 2, 2) == 4  # of three pairs


def test_the_largest_micro_batch_by_hand() -> None:
    """Groups of a prompt of 100 and 8 samples of 50 have 500 tokens."""

    def of(share: int, each: int, prompt: int, response: int, budget: int, root: int = 0, **how) -> LargestBatch:
        lengths = SampleLengths(Lengths.fixed(prompt, root), Lengths.fixed(response))
        return LargestBatch.of_share(share, each, lengths, Cut(budget, **how))

    alike = LargestBatch.of_groups

    assert of(32, 8, 100, 50, 1000) == alike(2, 8, 100, 50, count=2)
    assert of(32, 8, 100, 50, 4096) == alike(4, 8, 100, 50)
    assert of(4, 8, 100, 50, 4096) == alike(1, 4, 100, 50)  # half a group
    assert of(32, 8, 100, 50, 350) == alike(1, 5, 100, 50, count=7)  # a group is cut
    assert of(32, 8, 100, 50, 350, whole_groups=True) == alike(1, 8, 100, 50, count=4)
    assert of(32, 8, 100, 50, 120) == alike(1, 1, 100, 50, count=32)  # one sample is above it
    # Of shorter samples more fit in, with as many scores for each token.
    assert of(32, 8, 100, 50, 1200) == LargestBatch(1200, 6 * (100 * 100 + 400 * 150) * 2 // 5, count=2)
    assert of(32, 8, 100, 50, 700, root=60).tokens == 700
    assert of(32, 8, 100, 50, 700, root=60).scores == 60 * 60 + ceil(640 / 440 * (40 * 100 + 400 * 150))
    # A pipeline of two stages wants eight: four groups are cut in halves where prompts are short.
    assert of(32, 8, 10, 50, 4096, least=8) == alike(1, 4, 10, 50, count=8)
    assert of(32, 8, 100, 50, 4096, least=8) == alike(1, 8, 100, 50, count=4)
    # Behind 60 tokens that all prompts begin with a group has 440: of 940 a budget has room for two.
    assert of(32, 8, 100, 50, 940, root=60) == alike(2, 8, 100, 50, count=2, root_tokens=60)
    assert of(32, 8, 100, 50, 940, root=60).tokens == 940
    assert of(32, 8, 100, 50, 940, root=60).scores == 60 * 60 + 2 * (40 * 100 + 400 * 150)


def test_the_largest_of_given_texts_by_hand() -> None:
    """Pairs of 10 + 40 + 50, of 20 + 30 + 10 and of 5 + 5 + 10 tokens: 100, 60 and 20."""
    pairs = SampleLengths.given([GroupTokens(5, (5, 10)), GroupTokens(10, (40, 50)), GroupTokens(20, (30, 10))])
    scores = [10 * 10 + 40 * 50 + 50 * 60, 20 * 20 + 30 * 50 + 10 * 30, 5 * 5 + 5 * 10 + 10 * 15]
    of = lambda share, budget, **how: LargestBatch.of_share(share, 2, pairs, Cut(budget, **how))
    assert of(6, 1000) == LargestBatch(180, sum(scores))
    assert of(4, 1000) == LargestBatch(160, sum(scores[:2])), "where a step has two, the larger ones"
    assert of(6, 130) == LargestBatch(130, scores[0] + scores[1] // 2, count=2), "filled by half of the next"
    assert of(6, 80, whole_groups=True) == LargestBatch(100, scores[0], count=3), "one that is never split"
    assert of(6, 80) == LargestBatch(80, int(0.8 * scores[0]), count=3)
    assert of(6, 55) == LargestBatch(60, int(0.6 * scores[0]), count=4), "the longest sample, with its prompt"
    assert of(6, 1000, least=8, whole_groups=True) == LargestBatch(100, scores[0], count=3), "a pair each"
    assert of(12, 1000) == LargestBatch(360, 2 * sum(scores)), "more than there are: each counts twice"


def test_the_largest_of_given_texts_that_begin_alike() -> None:
    """Two of 40 + 10 and 36 + 20 tokens, of which all prompts begin with 32: 18 and 24 behind these."""
    texts = SampleLengths.given([GroupTokens(40, (10,)), GroupTokens(36, (20,))], root=32)
    found = LargestBatch.of_share(2, 1, texts, Cut(1000))
    assert found == LargestBatch(32 + 24 + 18, 32**2 + 4 * 36 + 20 * 56 + 8 * 40 + 10 * 50)


@settings(max_examples=examples(60, 600), deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12),
    root=st.sampled_from([0, 0, 35]),
    budget=st.integers(60, 600),
    ways=st.integers(1, 3),
    whole=st.booleans(),
)
def test_a_run_of_given_pairs_has_no_larger_one(rows, root, budget, ways, whole) -> None:
    """Whatever the lengths, as texts fill a micro-batch; of several shares the largest takes what is more than equal
    parts, a pair at most."""
    samples = [SampleSize(n, row[0], each, root) for n, row in enumerate(rows) for each in row[1:]]
    found = [micro for micros in split_over(samples, budget, ways=ways, whole_groups=whole) for micro in micros]
    pairs = SampleLengths.given([GroupTokens(root + row[0], tuple(row[1:])) for row in rows], root)
    share = share_of(len(samples), 1, ways, 2 if whole else 1)
    largest = LargestBatch.of_share(share, 2, pairs, Cut(budget, 1, whole))
    assert max(micro.num_tokens for micro in found) <= largest.tokens + (max(map(sum, rows)) if ways > 1 else 0)


@settings(max_examples=examples(60, 600), deadline=None)
@given(
    responses=st.lists(st.integers(1, 60), min_size=1, max_size=96),
    per_prompt=st.integers(1, 8),
    prompt=st.integers(1, 60),
    root=st.sampled_from([0, 0, 35]),
    budget=st.integers(96, 600),
    ways=st.integers(1, 3),
    least=st.sampled_from([1, 4, 8]),
)
def test_a_run_has_no_larger_one(responses, per_prompt, prompt, root, budget, ways, least) -> None:
    """However long its samples are; but by what samples of a group are over where they do not divide: a piece, which no
    micro-batch has above the budget."""
    drawn = [*responses, *[60] * (-len(responses) % per_prompt)]
    samples = [SampleSize(n // per_prompt, prompt, response, root) for n, response in enumerate(drawn)]
    found = [micro for micros in split_over(samples, budget, ways=ways, least=least) for micro in micros]
    lengths = SampleLengths(Lengths.fixed(root + prompt, root), Lengths.fixed(60))
    share = share_of(len(samples), 1, ways)
    largest = LargestBatch.of_share(share, per_prompt, lengths, Cut(budget, least))
    most, over = max(budget, root + prompt + 60), prompt + 60 * per_prompt if ways > 1 or least > 1 else 0
    assert max(micro.num_tokens for micro in found) <= min(most, largest.tokens + over)
    assert largest.tokens <= most
