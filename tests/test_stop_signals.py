"""Who is told of signals that ask to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from plait.stop_signals import STOP_SIGNALS, heeded, interrupt, interrupts_kept, raise_lost, signals_to


@pytest.fixture(autouse=True)
def handling() -> Iterator[None]:
    """Those are as before when a test ends, and no interrupt is left."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with interrupts_kept():
        pass
    yield
    with interrupts_kept():
        pass
    for number, handler in before.items():
        signal.signal(number, handler)


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


class Signals:
    """Ctrl-C comes while it is destroyed, where Python drops what is raised."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_not_lost() -> None:
    with interrupts_kept():
        raise_lost()
        Signals()
        with pytest.raises(KeyboardInterrupt):
            raise_lost()
    raise_lost()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        os.kill(os.getpid(), signal.SIGINT)
    raise_lost()
