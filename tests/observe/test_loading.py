"""What is said while something is loaded."""

from __future__ import annotations

from plait.observe.loading import loading, loading_shown


def test_what_is_read_again_and_again_is_said_once_and_what_takes_long_each_time() -> None:
    shown: list[str] = []
    loading("torch")  # nobody listens
    with loading_shown(shown.append):
        for _ in range(2):
            loading("tokenizer of m", once=True)
            loading("model m")
    with loading_shown(shown.append):
        loading("tokenizer of m", once=True)
    assert shown == ["tokenizer of m", "model m", "model m", "tokenizer of m"]
