"""Who is told of signals that ask to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from plait.stop_signals import STOP_SIGNALS, heeded, interrupt, signals_to


@pytest.fixture(autouse=True)
def handling() -> Iterator[None]:
    """That of SIGHUP is as before when a test ends."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_asks_once_and_is_never_the_second_to_ask() -> None:
    came: list[int] = []
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with signals_to(lambda number, frame: came.append(number)):
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
    assert came == [signal.SIGHUP, signal.SIGTERM]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_what_nohup_has_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_to(lambda number, frame: None):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert heeded() == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_command_takes_back_no_terminal_that_closes_interrupts(*, inside: bool) -> None:
    signal.signal(signal.SIGHUP, interrupt)
    if inside:
        with signals_to(lambda number, frame: None):
            signal.raise_signal(signal.SIGHUP)
    else:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
