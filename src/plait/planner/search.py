"""Search for a short, then lean, fused schedule; needs no solver. What is tried in which order is in `portfolio`: a
search that ends by `max_moves`, or at both bounds, gives the same schedule every time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from plait.errors import ConfigError
from plait.planner.evaluate import Score, score_order
from plait.planner.portfolio import Portfolio
from plait.planner.tables import schedule_from
from plait.schedule.pipeline import Workload
from plait.schedule.schedule import Schedule
from plait.stop_signals import signals_to

Stop = Literal["bounds", "time", "moves", "interrupted", "rule"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a search knows after a turn: seconds so far, best makespan and peak memory, and the makespan's bound."""

    seconds: float
    makespan: float
    peak_memory: float
    lower_bound: float
    moves: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search.

    score:       of `schedule`
    lower_bound: no schedule is shorter; the makespan itself where a sweep has tried all others
    proven:      no schedule of this workload is shorter (the makespan equals a proven bound)
    seconds:     wall time; moves: schedules tried
    stopped_by:  `bounds` when the makespan is at its bound and the peak memory at that of 1F1B; `rule` when there was
                 no search, but a schedule built by a rule
    """

    schedule: Schedule
    score: Score
    lower_bound: float
    proven: bool
    seconds: float
    moves: int
    stopped_by: Stop


def search(
    workload: Workload,
    seconds: float = 10.0,
    *,
    seed: int = 0,
    max_moves: int | None = None,
    memory: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The best schedule found within `seconds`: least makespan, then least peak memory of the worst rank.

    max_moves:   stop after so many schedules tried, for a result that does not depend on the speed of the machine
    memory:      whether to go on after the bound of the makespan is reached, until the bound of the memory is
    on_progress: called after every turn (a fraction of a second)
    clock:       what `seconds` is measured by; a benchmark passes `time.process_time`
    Ctrl-C ends the search and the best schedule so far is returned (`stopped_by` is "interrupted").

    Raises:
        ConfigError: `seconds` is below 0.
    """
    if seconds < 0:
        raise ConfigError(f"seconds: expected zero or more, found {seconds}")
    portfolio = Portfolio(workload, seed)
    began = clock()
    stopped_by: Stop = "bounds"
    with interruptible() as interrupted:
        portfolio.compile()
        began = clock()
        while not portfolio.done(memory):
            if interrupted():
                stopped_by = "interrupted"
                break
            spent = clock() - began
            if spent >= seconds:
                stopped_by = "time"
                break
            if max_moves is not None and portfolio.moves >= max_moves:
                stopped_by = "moves"
                break
            share = portfolio.moves / max_moves if max_moves is not None else spent / seconds
            portfolio.turn(memory and (portfolio.at_bound or share > 0.8))
            if on_progress is not None:
                on_progress(
                    Progress(clock() - began, portfolio.makespan, portfolio.peak, portfolio.bound, portfolio.moves)
                )
    spent = clock() - began
    schedule = schedule_from(workload, portfolio.t, portfolio.best, "fused")
    result = score_order(workload, portfolio.t, portfolio.best)
    return SearchResult(schedule, result, portfolio.bound, portfolio.at_bound, spent, portfolio.moves, stopped_by)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it the first signal that asks to stop only answers True from then on; a second one interrupts at once.

    A KeyboardInterrupt could be raised, and lost, inside compiled code's callbacks. Outside the main thread no signal
    arrives, and the answer stays False.
    """
    asked = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    with signals_to(remember):
        yield lambda: asked
