"""How many tokens a run's data has: of all rows, or of a sample of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from plait.cost.lengths import Lengths
from plait.data.mixture import Mixed
from plait.policy.packing import GroupTokens
from plait.runtime.inputs.text_lengths import PREDICTED_ROWS, lengths_in, longest_given


@dataclass(frozen=True)
class Rows:
    lengths: tuple[Any, ...]
    root: tuple[int, ...] = ()
    max_tokens: int = 1000

    def __len__(self) -> int:
        return len(self.lengths)


def mixed(*sets: Rows, weights: tuple[float, ...] | None = None) -> Any:
    names = tuple("abc"[: len(sets)])
    return cast(Any, Mixed(sets, names, weights or tuple(float(len(rows)) for rows in sets), (True,) * len(sets)))  # type: ignore[type-var]


def test_few_rows_all_count() -> None:
    found = lengths_in(mixed(Rows((7, 3, 5)), Rows((4,))), {}, 9)
    assert (found.prompts, found.responses) == (Lengths((3, 4, 5, 7)), Lengths.fixed(9))


def test_of_many_rows_evenly_spaced_ones_count_and_the_longest() -> None:
    """1,024 of 1 to 1,024 tokens: each second, and the last."""
    found = lengths_in(mixed(Rows(tuple(range(1024, 0, -1)))), {}, 9).prompts.values
    assert len(found) == PREDICTED_ROWS
    assert found[:3] == (2, 4, 6)
    assert found[-2:] == (1022, 1024)


def test_sources_count_by_what_is_drawn_of_them() -> None:
    """Three of four prompts are drawn of the one with a row of 10 tokens."""
    found = lengths_in(mixed(Rows((10,)), Rows((2,) * 600), weights=(3.0, 1.0)), {}, 9).prompts
    assert found.mean == (3 * 10 + 2) / 4
    one = lengths_in(mixed(Rows((10, 20)), weights=(0.25,)), {}, 9).prompts
    assert one.values == (10, 20), "of one alone a weight says nothing"


def test_given_texts_keep_their_prompts_and_what_these_begin_with() -> None:
    words = tuple(range(50))
    pairs = Rows((GroupTokens(60, (3, 4)), GroupTokens(51, (9, 1))), words)
    found = lengths_in(None, {"pairs": mixed(pairs)}, 9)
    assert found.groups == (GroupTokens(60, (3, 4)), GroupTokens(51, (9, 1)))
    assert (found.prompts.root, found.longest) == (50, 64)
    other = Rows((GroupTokens(60, (1, 1)),), (*words[:40], 7))
    assert lengths_in(None, {"pairs": mixed(pairs, other)}, 9).prompts.root == 40, "of both sources"
    few = Rows((GroupTokens(60, (1, 1)),), words[:31])
    assert lengths_in(None, {"pairs": mixed(pairs, few)}, 9).prompts.root == 0, "not worth it"


def test_a_flow_that_generates_and_reads_has_both() -> None:
    given = Rows((GroupTokens(6, (3,)),))
    found = lengths_in(mixed(Rows((7,))), {"examples": mixed(given)}, 9)
    assert found.of("examples").groups == given.lengths
    assert found.prompts == Lengths.fixed(7)


def test_where_only_the_most_tokens_are_known_all_are_of_responses() -> None:
    assert longest_given(512, "pairs").groups == (GroupTokens(1, (511, 511)),)
    assert longest_given(512, "examples").longest == 512


def test_of_many_pairs_the_longest_sample_counts_though_its_pair_is_not_the_longest() -> None:
    pairs = Rows((*(GroupTokens(10, (3000, 3000 + n % 7)) for n in range(5000)), GroupTokens(100, (1, 4000))))
    found = lengths_in(None, {"pairs": mixed(pairs)}, 9)
    assert found.longest == 4100
    assert len(found.groups) == PREDICTED_ROWS + 1


def test_any_response_of_labelled_ones_may_follow_any_prompt() -> None:
    """Of rows in the order of their lengths each prompt has the response half of them away; and the longest has the
    longest, as far as the limit allows."""
    rows = Rows(
        (GroupTokens(5, (1,)), GroupTokens(5, (30,)), GroupTokens(40, (2,)), GroupTokens(6, (3,))), max_tokens=60
    )
    found = lengths_in(None, {"labelled": mixed(rows)}, 9)
    assert found.longest == found.of("labelled").longest == 42
    others = found.of("mismatched")
    assert sorted(others.groups) == sorted(
        GroupTokens(p, (r,)) for p, r in [(5, 30), (6, 2), (5, 1), (40, 3), (40, 20)]
    )
    assert others.longest == 60
