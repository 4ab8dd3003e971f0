"""What is said of errors of libraries."""

from __future__ import annotations

from plait.errors import cause_of


def test_of_a_library_only_its_first_sentence_is_said():
    text = (
        "[../third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5214. This may be due "
        "to another error. Please look at it before reporting an error. GLHF!\nException raised from"
    )
    assert cause_of(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:5214"
    assert cause_of(KeyError()) == "KeyError()"
