"""How shares of samples are cut, by hand and beside what a run does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.lengths import Lengths
from plait.cost.micro_batch import LargestBatch, pieces, share_of
from plait.policy.packing import SampleSize
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


def test_the_largest_micro_batch_by_hand() -> None:
    """Groups of a prompt of 100 and 8 samples of 50 have 500 tokens."""

    def of(share: int, each: int, prompt: int, *numbers: int, root: int = 0, **how) -> LargestBatch:
        return LargestBatch.of_share(share, each, Lengths.fixed(prompt, root), *numbers, **how)

    assert of(32, 8, 100, 50, 1200) == LargestBatch(2, 8, 100, 50, count=2)
    assert of(32, 8, 100, 50, 4096) == LargestBatch(4, 8, 100, 50)
    assert of(4, 8, 100, 50, 4096) == LargestBatch(1, 4, 100, 50)  # half a group
    assert of(32, 8, 100, 50, 350) == LargestBatch(1, 5, 100, 50, count=7)  # a group is cut
    assert of(32, 8, 100, 50, 350, whole_groups=True) == LargestBatch(1, 8, 100, 50, count=4)
    assert of(32, 8, 100, 50, 120) == LargestBatch(1, 1, 100, 50, count=32)  # one sample is above it
    # A pipeline of two stages wants eight: four groups are cut in halves where prompts are short.
    assert of(32, 8, 10, 50, 4096, least=8) == LargestBatch(1, 4, 10, 50, count=8)
    assert of(32, 8, 100, 50, 4096, least=8) == LargestBatch(1, 8, 100, 50, count=4)
    # Behind 60 tokens that all prompts begin with a group has 440: of 940 a budget has room for two.
    assert of(32, 8, 100, 50, 940, root=60) == LargestBatch(2, 8, 100, 50, count=2, root_tokens=60)
    assert of(32, 8, 100, 50, 940, root=60).tokens == 940
    assert of(32, 8, 100, 50, 940, root=60).scores == 60 * 60 + 2 * (40 * 100 + 400 * 150)


@settings(max_examples=examples(60, 600), deadline=None)
@given(
    groups=st.integers(1, 12),
    per_prompt=st.integers(1, 8),
    prompt=st.integers(1, 60),
    root=st.sampled_from([0, 0, 35]),
    response=st.integers(1, 60),
    budget=st.integers(20, 600),
    ways=st.integers(1, 3),
    least=st.sampled_from([1, 4, 8]),
)
def test_a_run_has_no_larger_one(groups, per_prompt, prompt, root, response, budget, ways, least) -> None:
    """But by what samples of a group are over where they do not divide: a piece."""
    samples = [SampleSize(group, prompt, response, root) for group in range(groups) for _ in range(per_prompt)]
    found = [micro for micros in split_over(samples, budget, ways=ways, least=least) for micro in micros]
    prompts, share = Lengths.fixed(root + prompt, root), share_of(len(samples), 1, ways)
    largest = LargestBatch.of_share(share, per_prompt, prompts, response, budget, least=least)
    piece = prompt + response * largest.samples_per_group
    assert max(micro.num_tokens for micro in found) <= largest.tokens + piece
    assert largest.tokens <= max(budget, root + prompt + response)
