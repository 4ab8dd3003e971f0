"""The one loop that steps a generation engine: in rollouts, in evaluations, and where engines are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from plait.data.records import Sample
from plait.schedule.work import MOVED_ON, Done, Work


class SteppedEngine(Protocol):
    """What of `engines.GenerationEngine` the loop needs."""

    @property
    def has_work(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    def advance(self, call: str) -> tuple[Done | None, list[Sample]]: ...


def engine_loop(
    engine: SteppedEngine,
    call: str,
    take: Callable[[Sequence[Sample]], bool],
    *,
    before: Callable[[], None] = lambda: None,
    until: Callable[[], bool] = lambda: False,
) -> Work[None]:
    """Step an engine until it has given out all that it was asked for; one step, at most, per `next()`.

    Args:
        call: that the steps are actions of.
        take: given the samples that have ended by now, perhaps none; whether something else has come, so that there is
            news though the engine had nothing to do.
        before: called before each step.
        until: what was asked for here is there, or nobody wants it any longer; others may go on with the engine.
    """
    while engine.has_work and not until():
        before()
        done, finished = engine.advance(call) if engine.ready else (None, [])
        if take(finished):
            done = done or MOVED_ON
        yield done
