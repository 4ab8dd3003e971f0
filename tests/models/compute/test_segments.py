"""Which tokens of a packed row go through a mixer together: every token once, little padding, the right states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.packed import pack
from plait.models.compute import segments
from plait.models.compute.attention import PackedContext
from plait.models.compute.segments import PADDED_SHARE, segment_plan
from tests.cases import examples
from tests.models.tiny import shared_model

shapes = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=0, max_size=4)), min_size=1, max_size=5
)


@settings(max_examples=examples(20, 60), deadline=None)
@given(shapes, st.integers(0, 9), st.integers(0, 40))
def test_each_token_is_read_from_a_sequence_that_ends_with_all_before_it(
    shape: list, root_tokens: int, padded: int
) -> None:
    """A mixer that sums what it has seen, its state the sum, tells which tokens it saw."""
    groups = [([1] * (root_tokens + p), [[1] * r for r in lengths]) for p, lengths in shape]
    batch = pack(groups, root_tokens=root_tokens)
    amounts_T1 = torch.arange(1.0, batch.num_tokens + 1, dtype=torch.float64)[:, None]
    cells = tokens = 0

    def mixer(inputs_BLH, before, real_BL):
        nonlocal cells, tokens
        cells += inputs_BLH.numel()
        tokens += int((inputs_BLH > 0).sum())
        seen_BL1 = inputs_BLH.cumsum(1) + before.get(("recurrent", 0), 0)
        return seen_BL1, {("recurrent", 0): seen_BL1[:, -1:]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "PADDED_TOKENS", padded)
        got_T1 = segment_plan(batch).mix(amounts_T1, mixer)
    root = amounts_T1[:root_tokens]
    assert torch.equal(got_T1[:root_tokens], root.cumsum(0))
    for group in batch.groups:
        prompt = torch.cat([root, amounts_T1[group.prompt.start : group.prompt.stop]])
        assert torch.equal(got_T1[group.prompt.start : group.prompt.stop], prompt.cumsum(0)[root_tokens:])
        for span in group.responses:
            sample = torch.cat([prompt, amounts_T1[span.start : span.stop]])
            assert torch.equal(got_T1[span.start : span.stop], sample.cumsum(0)[len(prompt) :])
    calls = len(segment_plan(batch).calls)
    assert cells - tokens <= max(PADDED_SHARE * tokens, 0) + padded * max(calls, 2 * len(groups) * 4)


def test_one_long_response_makes_no_batch_of_padding() -> None:
    batch = pack([([1] * 20, [[1] * 2000, *[[1] * 30] * 15])])
    plan = segment_plan(batch)
    assert [tuple(call.places_BL.shape) for call in plan.calls] == [(1, 20), (1, 2000), (15, 30)]
    assert [call.begins_B is None for call in plan.calls] == [True, False, False]


def test_those_that_go_on_have_two_places() -> None:
    plan = segment_plan(pack([([1] * 3, [[1], [1]])]))
    assert [call.places_BL.tolist() for call in plan.calls] == [[[0, 1, 2]], [[3, 5], [4, 5]]]


def test_a_lone_response_goes_through_with_its_prompt() -> None:
    plan = segment_plan(pack([([1] * 5, [[1] * 4]), ([1] * 7, [[1] * 2, []])]))
    assert [call.places_BL.tolist() for call in plan.calls] == [[[*range(9)], [*range(9, 18)]]]
    assert plan.calls[0].real_BL is None


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "bamba"])
def test_what_all_prompts_begin_with_may_stand_in_the_row_once(family: str) -> None:
    """lfm2 has biases in front of its convolution, bamba behind it: of padding they make something that must not be
    seen."""
    model = shared_model(family)
    groups = [([3, 4, 5, *own], [[9, 10], [11, 12, 13]]) for own in ([6], [7, 8, 20, 21, 22])]
    hidden = []
    for root_tokens in (0, 3):
        batch = pack(groups, root_tokens=root_tokens)
        row_TH = model.hidden(batch.token_ids_T, batch.position_ids_T, PackedContext(batch))
        hidden.append(torch.cat([row_TH[span.start : span.stop] for g in batch.groups for span in g.responses]))
    torch.testing.assert_close(*hidden)
