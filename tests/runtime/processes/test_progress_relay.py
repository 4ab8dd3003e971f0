"""What the leader calls of its progress is called again where it is shown: the same calls, fewer of them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from plait.runtime.processes import progress_relay
from plait.runtime.processes.progress_relay import ProgressRelay, RelayedProgress
from tests.hand_clock import HandClock


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock.of(progress_relay, monkeypatch)


def told(texts: list[str]) -> list[Any]:
    return [json.loads(text) for text in texts]


def test_units_are_told_now_and_then_and_all_before_what_follows_them(hand: HandClock) -> None:
    texts: list[str] = []
    progress = RelayedProgress(texts.append)
    progress.start(3)
    progress.phase("actor.generate", 12, "samples")
    for _ in range(5):
        progress.advance(2)
    hand.now_s += 0.2
    progress.advance()
    progress.advance()
    progress.step_done(4, {"reward": 0.5}, {"saving": 1.5}, 0.5)
    assert told(texts) == [
        ["start", 3],
        ["phase", "actor.generate", 12, "samples"],
        ["advance", 2],
        ["advance", 9],
        ["advance", 1],
        ["step_done", 4, {"reward": 0.5}, {"saving": 1.5}, 0.5],
    ]


def test_what_is_left_is_told_at_the_end(hand: HandClock) -> None:
    texts: list[str] = []
    with RelayedProgress(texts.append) as progress:
        progress.advance(1)
        progress.advance(7)
        progress.message("saved")
    assert told(texts) == [["advance", 1], ["message", "saved"], ["advance", 7]]


class Shown:
    """Keeps what it is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.calls.append((name, *values))


def test_the_same_calls_are_shown_in_their_order() -> None:
    shown: Any = Shown()
    with ProgressRelay(shown) as relay, RelayedProgress(lambda text: relay.hear(0, text)) as progress:
        progress.start()
        progress.phase("actor.train", 2, "micro-batches")
        progress.advance(2)
        progress.step_done(1, {"loss": float("inf"), "name": "a"})
        progress.message("saved")
    assert shown.calls == [
        ("start", 0),
        ("phase", "actor.train", 2, "micro-batches"),
        ("advance", 2),
        ("step_done", 1, {"loss": float("inf"), "name": "a"}, {}, 0.0),
        ("message", "saved"),
    ]


def test_once_it_is_said_for_whom_a_silent_leader_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start on: before that, it loads too. And not again, however long it is silent later."""
    monkeypatch.setattr(progress_relay, "SILENT_S", 0.001)
    shown: Any = Shown()
    answers, asked = iter(["", "rank 1 loads"]), threading.Event()

    def waits_for() -> str:
        if answer := next(answers, "asked again"):
            asked.set()
        return answer

    with ProgressRelay(shown, waits_for) as relay, RelayedProgress(lambda text: relay.hear(0, text)) as progress:
        progress.message("read")
        assert not asked.wait(0.05)
        progress.start()
        assert asked.wait(10)
        time.sleep(0.05)
        progress.step_done(1, {})
    assert shown.calls == [
        ("message", "read"),
        ("start", 0),
        ("message", "rank 1 loads"),
        ("step_done", 1, {}, {}, 0.0),
    ]
