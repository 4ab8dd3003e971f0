"""How a run is asked to stop."""

from __future__ import annotations

import signal
import threading

import pytest

from plait.runtime.stopping import LEADERS_SIGNAL, stop_signals


class Sent:
    """Messages go through what one thread holds at a time, as a rank's connection; in the first a signal comes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.sending = threading.Lock()

    def message(self, text: str) -> None:
        assert self.sending.acquire(timeout=5), "whoever holds it waits for this one"
        self.texts.append(text)
        if len(self.texts) == 1:
            signal.raise_signal(LEADERS_SIGNAL)
        self.sending.release()


def test_a_signal_in_the_middle_of_a_message_is_answered_behind_it() -> None:
    """The leader waited for itself, and was called frozen after half a minute."""
    sent = Sent()
    with stop_signals(sent.message, [LEADERS_SIGNAL]) as stop:
        stop.doing = "finishing step 2"
        sent.message("step 1")
        assert stop.asked
    assert sent.texts == ["step 1", "finishing step 2; once more to leave at once"]


def test_the_second_signal_interrupts() -> None:
    sent = Sent()
    with stop_signals(sent.message, [LEADERS_SIGNAL]):
        sent.message("step 1")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(LEADERS_SIGNAL)
    assert sent.texts == ["step 1", "leaving; once more to leave at once"]
