"""What the leader asks of all ranks: their timelines, on machines whose clocks are their own. No processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.schedule.timeline import Span
from plait.workers.recorder import Recorder
from plait.workers.upkeep import Recorded, Spans
from plait.workers.worker_group import WorkerGroup

LAUNCHED_S = 50.0
"""When both ranks did something, by the clock of the process that launched them."""


class Ranks:
    """An announcer whose ranks are here, each with how far its machine's clock is ahead."""

    def __init__(self, *ahead_s: float) -> None:
        leader, *others = ahead_s
        self.recorder = Recorder()
        self.rank_state = self._state(0, self.recorder, leader)
        self._others = [
            self._state(rank, Recorder.on_shared_clock(rank), ahead) for rank, ahead in enumerate(others, start=1)
        ]

    def _state(self, rank: int, recorder: Recorder, ahead_s: float) -> Any:
        start_s = LAUNCHED_S + ahead_s - recorder.zero_s
        recorder.extend([Span("actor.train/b0/mb0", "TRAIN", rank, start_s, start_s + 1.0)])
        offloads = SimpleNamespace(recorder=recorder, want=lambda: None)
        return SimpleNamespace(offloads=offloads, recorder=recorder, listeners={}, ahead_s=ahead_s)

    def ask(self, ranks: tuple[int, ...], command: Spans, what: str) -> list[Recorded]:
        own, *others = (self.recorder.drain(command.run(state)) for state in (self.rank_state, *self._others))
        return [own, *(command.result_of(answer.to_message()) for answer in others)]


@pytest.mark.parametrize("ahead_s", [(0.0, 0.0), (0.0, 1e6), (300.0, 0.0, 1000.0), (-7e5, 3.0)])
def test_what_ranks_did_at_the_same_time_is_at_the_same_time_whatever_their_machines_clocks_say(
    ahead_s: tuple[float, ...],
) -> None:
    announcer: Any = Ranks(*ahead_s)
    spans = WorkerGroup(announcer, len(ahead_s)).spans()
    assert [span.rank for span in spans] == list(range(len(ahead_s)))
    begun_s = LAUNCHED_S + ahead_s[0] - announcer.recorder.zero_s
    assert [span.start_s for span in spans] == pytest.approx([begun_s] * len(ahead_s))
    assert [span.end_s for span in spans] == pytest.approx([begun_s + 1.0] * len(ahead_s))
