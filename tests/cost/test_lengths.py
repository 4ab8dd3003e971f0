"""Numbers of tokens of given texts, by hand: each response behind its own prompt."""

from __future__ import annotations

import pytest

from plait.cost.lengths import Lengths, SampleLengths
from plait.policy.packing import GroupTokens

TWO = SampleLengths.given([GroupTokens(2, (6,)), GroupTokens(40, (1,))], root=1)
"""A short prompt with a long response, a long one with a short one: one token is that of both."""


def test_prompts_and_responses_of_given_texts() -> None:
    assert TWO.groups == (GroupTokens(40, (1,)), GroupTokens(2, (6,)))
    assert (TWO.prompts, TWO.responses) == (Lengths((2, 40), 1), Lengths((1, 6)))
    assert TWO.longest == 41
    assert SampleLengths(TWO.prompts, TWO.responses).longest == 46, "where any response may follow any prompt"


def test_pairs_of_given_texts() -> None:
    """A prompt of p tokens has p (p + 1) / 2, a response of r behind it r p + r (r + 1) / 2; the root has one."""
    of_prompts, of_responses = 3 + 820, (6 * 2 + 21) + (1 * 40 + 1)
    assert TWO.pairs(2, 2, 2) == of_prompts + of_responses
    assert TWO.pairs(2, 2, 1) == of_prompts + of_responses - 1
    unknown = SampleLengths(TWO.prompts, TWO.responses)
    assert unknown.pairs(2, 2, 2) == of_prompts + 2 * 3.5 * 21 + 21 + 1


def test_pairs_of_given_texts_within_a_window() -> None:
    """Of four tokens. Each token sees four, but the first three of a text 1, 2 and 3: of 2 tokens 3, of 8 six and five
    times four; of 40 six and 37 times four, and the next one four."""
    ((window, found),) = TWO.near_pairs([4, 64], 2, 2, 2)
    assert (window, found) == (4, 3 + (6 + 37 * 4) + (6 + 5 * 4 - 3) + 4)


def test_what_a_flow_reads_beside_its_prompts_has_lengths_of_its_own() -> None:
    drawn = SampleLengths(Lengths.fixed(5), Lengths.fixed(7), beside={"examples": TWO})
    assert drawn.of("examples") is TWO
    assert drawn.of("actor.generate") is drawn


def test_texts_need_a_token_of_their_own() -> None:
    with pytest.raises(AssertionError, match="a root of 2 tokens, the shortest has 2"):
        SampleLengths.given([GroupTokens(2, (1,))], root=2)
