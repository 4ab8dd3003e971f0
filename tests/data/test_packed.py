"""The packed row: ids, positions, who predicts whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.packed import Group, Span, pack
from tests.cases import examples


def test_by_hand() -> None:
    batch = pack([([10, 11, 12], [[20, 21], [30]]), ([40], [[50, 51]])])
    assert batch.token_ids_T.tolist() == [10, 11, 12, 20, 21, 30, 40, 50, 51]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]
    assert batch.groups == (
        Group(Span(0, 3), (Span(3, 2), Span(5, 1))),
        Group(Span(6, 1), (Span(7, 2),)),
    )
    assert batch.num_tokens == 9
    assert batch.response_lengths == (2, 1, 2)
    assert batch.targets_R.tolist() == [20, 21, 30, 50, 51]
    assert batch.predict_R.tolist() == [2, 3, 2, 6, 7]


def test_what_all_prompts_begin_with_stands_in_the_row_once() -> None:
    batch = pack([([7, 8, 10, 11], [[20, 21], [30]]), ([7, 8, 40], [[50]])], root_tokens=2)
    assert batch.token_ids_T.tolist() == [7, 8, 10, 11, 20, 21, 30, 40, 50]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 4, 2, 3]
    assert batch.root == Span(0, 2)
    assert batch.groups == (Group(Span(2, 2), (Span(4, 2), Span(6, 1))), Group(Span(7, 1), (Span(8, 1),)))
    assert batch.targets_R.tolist() == [20, 21, 30, 50]
    assert batch.predict_R.tolist() == [3, 4, 3, 7]


def test_what_was_not_drawn_is_in_the_row_and_predicted_by_nobody() -> None:
    given_of = [[(1, 3)], [], [(2, 3)]]
    batch = pack([([10, 11], [[20, 21, 22, 23], [30]]), ([40], [[50, 51, 52, 53]])], given=given_of)
    assert batch.token_ids_T.tolist() == [10, 11, 20, 21, 22, 23, 30, 40, 50, 51, 52, 53]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 2, 0, 1, 2, 3, 4]
    assert batch.targets_R.tolist() == [20, 23, 30, 50, 51, 53]
    assert batch.predict_R.tolist() == [1, 4, 1, 7, 8, 10]


def test_prompts_that_begin_otherwise_and_that_have_nothing_more_are_refused() -> None:
    with pytest.raises(AssertionError, match="differ in their first 2"):
        pack([([7, 8, 9], []), ([7, 9, 9], [])], root_tokens=2)
    with pytest.raises(AssertionError, match="behind its first 2"):
        pack([([7, 8, 9], []), ([7, 8], [])], root_tokens=2)


def test_empty_responses_have_no_rows_but_keep_their_place_among_the_samples() -> None:
    batch = pack([([1, 2], [[], [3], []])])
    assert batch.response_lengths == (0, 1, 0)
    assert batch.targets_R.tolist() == [3]
    assert batch.predict_R.tolist() == [1]


def test_prompts_without_responses_are_a_prefill() -> None:
    batch = pack([([1, 2], []), ([3], [])])
    assert batch.token_ids_T.tolist() == [1, 2, 3]
    assert [group.stop for group in batch.groups] == [2, 3]
    for column in (batch.targets_R, batch.predict_R):
        assert column.shape == (0,)
        assert column.dtype == torch.int64


def test_no_groups() -> None:
    assert pack([]).num_tokens == 0


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one token"):
        pack([([], [[1]])])


ids = st.integers(0, 1000)
groups = st.lists(
    st.tuples(st.lists(ids, min_size=1, max_size=6), st.lists(st.lists(ids, max_size=6), max_size=4)), max_size=5
)


@settings(max_examples=examples(40, 100), deadline=None)
@given(groups)
def test_every_sample_can_be_read_back(groups: list[tuple[list[int], list[list[int]]]]) -> None:
    batch = pack(groups)
    assert batch.num_tokens == sum(len(prompt) + sum(map(len, responses)) for prompt, responses in groups)
    samples = [(prompt, response) for prompt, responses in groups for response in responses]
    spans = [(group.prompt, span) for group in batch.groups for span in group.responses]
    first = 0
    for (prompt, response), (prompt_span, span) in zip(samples, spans, strict=True):
        places = [*range(prompt_span.start, prompt_span.stop), *range(span.start, span.stop)]
        assert batch.token_ids_T[places].tolist() == prompt + response
        assert batch.position_ids_T[places].tolist() == list(range(len(places)))
        mine = slice(first, first + len(response))
        first += len(response)
        assert batch.targets_R[mine].tolist() == response
        predictors = batch.predict_R[mine].tolist()
        assert predictors == places[len(prompt) - 1 : len(places) - 1][: len(response)]
