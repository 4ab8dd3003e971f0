"""What leader and other ranks do alike, beside the calls of the flow: moves, checkpoints, timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from plait.models.files.finite import Broken
from plait.schedule.timeline import Span
from plait.schedule.work import Work
from plait.workers.rank_state import RankState

Counts = dict[str, dict[str, int]]
"""Role → counts of its optimizer."""


def moving_part(rank_state: RankState, role: str, numbers: Sequence[int]) -> Work[None]:
    """Bring a role's weights from its home to some of its copies (`RankState.copies`)."""
    rank_state.make_room(role, numbers)
    for number in numbers:
        yield from rank_state.moving(role, number)


def saving_part(rank_state: RankState, folder: Path) -> Work[tuple[Counts, list[Broken]]]:
    """Write what this rank holds of the optimizers' state. Returns the counts of what it trains, and what of it is not
    finite: such a role is not written, and the checkpoint cannot be used."""
    counts: Counts = {}
    found: list[Broken] = []
    for role in rank_state.trained:
        found += rank_state.broken(role)
        if not found:
            counts[role] = yield from rank_state.saving(role, folder)
    return counts, found


def loading_part(rank_state: RankState, folder: Path, counts: Mapping[str, Mapping[str, int]] | None) -> Work[None]:
    """Continue from a checkpoint of any plan; `counts` are of its state, None where one process saved it."""
    for role in rank_state.trained:
        yield from rank_state.loading(role, folder, None if counts is None else counts[role])


def spans_as_values(spans: Sequence[Span], zero_s: float) -> list[Any]:
    """For a message; the times are shifted to a clock that began at `zero_s`."""
    return [list(astuple(replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s))) for span in spans]
