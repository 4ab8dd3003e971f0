"""Stop strings against the plain question: does the whole decoded response contain one?"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.generation.stopping import completes_stop
from tests.models.tiny import VOCAB_SIZE, tiny_tokenizer


def first_stop(token_ids: list[int], stop: tuple[str, ...]) -> int | None:
    """How many tokens the engine would take, asking after each."""
    tokenizer = tiny_tokenizer()
    for count in range(1, len(token_ids) + 1):
        if completes_stop(tokenizer, token_ids[:count], stop):
            return count
    return None


def first_stop_in_whole_text(token_ids: list[int], stop: tuple[str, ...]) -> int | None:
    tokenizer = tiny_tokenizer()
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=False)
        if any(string in text for string in stop):
            return count
    return None


def test_what_stands_before_the_turn_does_not_count() -> None:
    tokenizer = tiny_tokenizer()
    before, turn = tokenizer.encode("</answer> </ans"), tokenizer.encode("wer> a quick")
    token_ids = [*before, *turn]
    assert completes_stop(tokenizer, token_ids[: len(before) + 1], ("</answer>",))
    for count in range(1, len(turn) + 1):
        assert not completes_stop(tokenizer, token_ids[: len(before) + count], ("</answer>",), len(before))
    assert completes_stop(tokenizer, [*token_ids, *tokenizer.encode("</answer>")], ("</answer>",), len(before))


def test_a_string_that_spans_tokens_ends_with_the_completing_one() -> None:
    tokenizer = tiny_tokenizer()
    token_ids = tokenizer.encode("a quick brown fox </answer> jumps")
    pieces = [tokenizer.decode([i]) for i in token_ids]
    assert "</answer>" not in pieces, "the string would not span tokens"
    count = first_stop(token_ids, ("</answer>", "nothing"))
    assert count is not None
    assert tokenizer.decode(token_ids[:count]) == "a quick brown fox </answer>"
    assert first_stop(token_ids, ("nothing",)) is None


def test_special_tokens_and_characters_of_several_bytes() -> None:
    tokenizer = tiny_tokenizer()
    assert first_stop([*tokenizer.encode("fox"), 2], ("<|im_end|>",)) == len(tokenizer.encode("fox")) + 1
    token_ids = tokenizer.encode("née → é")
    assert first_stop(token_ids, ("→",)) == len(tokenizer.encode("née →"))


def test_a_string_of_many_tokens_may_end_where_a_long_token_begins() -> None:
    """Six characters of four tokens each, and the first one of a token of ten."""
    tokenizer = tiny_tokenizer()
    token_ids = [*tokenizer.encode("🎉" * 6), 2]
    assert (len(token_ids), tokenizer.decode([2])) == (25, "<|im_end|>")
    assert first_stop(token_ids, ("🎉" * 6 + "<",)) == 25


@settings(max_examples=60, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    text=st.text("the answer is 7.é→", max_size=20),
    stop=st.lists(st.text("the answer is 7.é→", min_size=1, max_size=6), max_size=3),
)
def test_the_window_finds_what_the_whole_text_holds(token_ids: list[int], text: str, stop: list[str]) -> None:
    token_ids = token_ids + tiny_tokenizer().encode(text)
    assert first_stop(token_ids, tuple(stop)) == first_stop_in_whole_text(token_ids, tuple(stop))
