"""Decisions of a run that depended on the clock, kept in its folder: a run that is resumed decides the same again."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.file_writes import writing
from plait.observe.run_log import cut_torn_line, damaged, read_rows
from plait.policy.migration import AT_ONCE, STEPS_OF_A_MOVE, HowToMove, MoveTimes
from plait.policy.step import Key

LENGTHS_OF_STEPS = 4
"""Steps whose responses say how long those of the next will be."""
CallOfStep = tuple[int, str]
"""A step, counted from 1, and a call of it."""


def response_lengths(file: Path, rollout: str) -> list[int]:
    """Tokens of the responses of one rollout of a step, in the order in which a run hears them.

    Args:
        file: of the step's samples; a flow of several rollouts names that of each.
        rollout: its call.
    """
    return [len(row["token_ids"]) for row in read_rows(file) if row.get("rollout", rollout) == rollout]


class Decisions:
    """One row of JSON for each call of a step; `step` and `call` are among its values.

    Args:
        path: of the file. What is there was decided before, by the run that is resumed.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.is_file():
            cut_torn_line(path)
        rows: Iterable[dict[str, Any]] = read_rows(path) if path.is_file() else ()
        try:
            self._rows = {(row["step"], row["call"]): row for row in rows}
        except (KeyError, TypeError) as error:
            raise damaged(path, f"expected `step` and `call` in every row ({error!r})") from None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All, in the order in which they were made."""
        return list(self._rows.values())

    def of(self, key: CallOfStep) -> dict[str, Any] | None:
        """What was decided before; None: nothing was."""
        return self._rows.get(key)

    def keep(self, key: CallOfStep, values: dict[str, Any]) -> None:
        """Write what was decided, unless that is there from before. Raises RunError where that cannot be written."""
        if key in self._rows:
            return
        row = {"step": key[0], "call": key[1], **values}
        self._rows[key] = row
        with writing(self._path), open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")


class Experience:
    """What a run knows to decide moves of samples by, and what it has decided.

    Args:
        path: the file of its decisions; what is there was decided before, by the run that is resumed.
        lengths: of responses of its last steps, up to `step`.
        step: steps that the run has done.
        lag: steps by which decisions may be ahead of what they are made for; lengths are kept for as many more.
        times: what moves take; None: they go at once.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        lengths: Sequence[Sequence[int]] = (),
        times: MoveTimes | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        step: int = 0,
        lag: int = 0,
    ) -> None:
        self.decisions, self.times, self.clock = Decisions(path), times, clock
        self._lengths: deque[tuple[int, ...]] = deque(map(tuple, lengths), maxlen=LENGTHS_OF_STEPS + lag)
        self._step, self._lag = step, lag
        self._move_s: float | None = None
        for row in self.decisions.rows:
            self._move_s = row["move_s"] or self._move_s

    @property
    def lengths(self) -> list[int]:
        """Lengths of the responses of the last steps, in their order."""
        return [length for of_step in [*self._lengths][-LENGTHS_OF_STEPS:] for length in of_step]

    def lengths_before(self, step: int) -> list[tuple[int, ...]]:
        """Lengths of the responses of each of the last steps that are done in every run when something is decided for
        a step, counted from 0."""
        first, until = self._step - len(self._lengths), step - self._lag
        return [*self._lengths][max(0, until - LENGTHS_OF_STEPS - first) : max(0, until - first)]

    def heard(self, lengths: Sequence[int]) -> None:
        """The responses of a step have these lengths."""
        self._lengths.append(tuple(lengths))
        self._step += 1

    def move_s(self, step_s: float) -> float:
        """Seconds in which samples that move stand still, where a decode step takes so long."""
        return STEPS_OF_A_MOVE * step_s if self._move_s is None else self._move_s

    def how(self, contexts: Mapping[Key, int], step_s: float) -> HowToMove:
        """How samples move, each with so many tokens, where a decode step of all of them takes so long."""
        return AT_ONCE if self.times is None else self.times.how(contexts, step_s)

    def keep(self, key: CallOfStep, row: dict[str, Any], move_s: float | None) -> None:
        """A rollout has ended, and what was decided in it is written."""
        self._move_s = move_s or self._move_s
        self.decisions.keep(key, row)
