"""Prompts with completions of other rows of a batch, by hand."""

from __future__ import annotations

from hypothesis import given as drawn
from hypothesis import strategies as st

from plait.data.examples import GIVEN_VERSION, Given
from plait.data.mismatched import mismatched
from plait.data.records import FinishReason, Prompt, Sample


def given(uid: int, prompt: str, *token_ids: int, trained: tuple[float, ...] = (1.0,)) -> Given:
    sample = Sample(Prompt(uid, prompt, (ord(prompt),) * 2), 0, token_ids, (), "", FinishReason.STOP, GIVEN_VERSION)
    return Given(sample, trained)


def batch(prompts: str) -> list[Given]:
    """A response for each letter, the prompt; its only token is its place."""
    return [given(10 + place, letter, place) for place, letter in enumerate(prompts)]


def places(prompts: str) -> list[int]:
    """Of which row the completion of each is."""
    found = mismatched(batch(prompts), 100)
    assert [other.sample.prompt.uid for other in found] == [10 + i for i in range(len(prompts))]
    return [other.sample.token_ids[0] for other in found]


def test_each_prompt_has_the_completion_before_it():
    assert places("abcd") == [3, 0, 1, 2]
    assert places("ab") == [1, 0]


def test_completions_move_on_past_those_of_the_same_prompt():
    assert places("aabb") == [2, 3, 0, 1]
    assert places("aab") == [2, 0, 1], "one of the three stays with its own prompt, however they move"
    assert places("aaa") == [2, 0, 1], "there is no other prompt"


@drawn(st.text("abc", min_size=2, max_size=9))
def test_no_other_turn_leaves_fewer_prompts_with_their_own(prompts):
    found, count = places(prompts), len(prompts)
    assert sorted(found) == list(range(count)), "the completions are those of the batch"
    own = [sum(prompts[i] == prompts[i - shift] for i in range(count)) for shift in range(1, count)]
    shift = (0 - found[0]) % count
    assert found == [(i - shift) % count for i in range(count)]
    assert own.index(min(own)) + 1 == shift


def test_what_is_too_long_is_cut():
    """Behind a prompt of two tokens three have room."""
    long = given(1, "b", 5, 6, 7, 8, 9, trained=(1.0, 0.0, 1.0, 1.0, 1.0))
    cut, whole = mismatched([given(0, "a", 0), long], 5)
    assert (cut.sample.token_ids, cut.trained) == ((5, 6, 7), (1.0, 0.0, 1.0))
    assert cut.sample.prompt.text == "a"
    assert whole.sample.token_ids == (0,)
