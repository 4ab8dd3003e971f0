"""Sets of tokens as bytes: by hand, back and forth, and where they lie in a chunk of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.supports import WHOLE, Supports, bits_by_sums, bits_of, encoded, num_bit_bytes


def sets_of(*kept: list[int], vocabulary: int) -> list[bytes]:
    kept_BV = torch.zeros(len(kept), vocabulary, dtype=torch.bool)
    for row, ids in enumerate(kept):
        kept_BV[row, ids] = True
    return encoded(bits_of(kept_BV).numpy(), vocabulary)


def read(supports: Supports) -> list[list[int] | None]:
    ends = zip(supports.starts_R1, supports.starts_R1[1:], strict=False)
    return [
        None if count < 0 else supports.ids_n[start:stop].tolist()
        for count, (start, stop) in zip(supports.counts_R, ends, strict=True)
    ]


def test_by_hand() -> None:
    """Gaps 0, 0, 2 and 300 = 2 · 128 + 44; 24 of 27 tokens as bits; and all of them."""
    assert sets_of([0, 1, 4, 305], vocabulary=1000) == [b"\0\x00\x00\x02\xac\x02"]
    most = [token for token in range(27) if token not in (0, 9, 26)]
    assert sets_of(most, [*range(27)], [26], vocabulary=27) == [b"\1\xfe\xfd\xff\x03", WHOLE, b"\0\x1a"]


@given(st.data(), st.integers(1, 700))
def test_what_is_read_is_what_was_kept(data: st.DataObject, vocabulary: int) -> None:
    of_one = st.lists(st.integers(0, vocabulary - 1), min_size=1, unique=True).map(sorted) | st.just(
        [*range(vocabulary)]
    )
    kept = data.draw(st.lists(of_one, max_size=5))
    sets = sets_of(*kept, vocabulary=vocabulary)
    assert read(Supports(tuple(sets))) == [None if len(ids) == vocabulary else ids for ids in kept]
    assert all(len(one) <= num_bit_bytes(vocabulary) + 1 for one in sets)


def test_of_a_large_vocabulary() -> None:
    """A token beyond 2**14 takes three bytes, one beyond 2**21 four."""
    ids = [0, 2**14, 2**21 - 1, 2**22 + 5]
    assert read(Supports(tuple(sets_of(ids, vocabulary=2**23)))) == [ids]


@pytest.mark.parametrize("vocabulary", [1, 8, 9, 100])
def test_bits_are_the_same_on_any_device(vocabulary: int) -> None:
    kept_BV = torch.rand(6, vocabulary, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(bits_by_sums(kept_BV), bits_of(kept_BV))


def test_where_they_lie_in_a_chunk() -> None:
    """Rows 1 to 3 of five, of a rank that has the tokens 4 to 8."""
    sets = sets_of([0], [1, 4, 8], [*range(10)], [7, 9], [2], vocabulary=10)
    rows, places = Supports(tuple(sets)).within(slice(1, 4), 4, 9)
    assert (rows.tolist(), places.tolist()) == ([0, 2], [0, 4, 2 * 5 + 3])
    whole = Supports((WHOLE, WHOLE)).within(slice(0, 2), 0, 10)
    assert [part.tolist() for part in whole] == [[], []]


def test_of_samples() -> None:
    prompt, kept = Prompt(0, "", (1,)), sets_of([3], vocabulary=9)[0]
    told = Sample(prompt, 0, (3, 4), (0.0, -1.0), "", FinishReason.STOP, supports=(kept, WHOLE))
    plain = Sample(prompt, 1, (5,), (-1.0,), "", FinishReason.STOP)
    assert Supports.of([plain]) is None
    both = Supports.of([told, plain])
    assert both is not None
    assert read(both) == [[3], None, None]
    assert both.largest == 3
    assert both.counts_R.dtype == np.int64
