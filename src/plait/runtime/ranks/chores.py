"""What leader and other ranks do alike, beside the calls of the flow: moves, checkpoints, timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from plait.runtime.ranks.parts import Parts
from plait.runtime.ranks.residence import record_moves
from plait.runtime.recorder import DISK, Recorder
from plait.schedule.timeline import Span


def move_part(parts: Parts, role: str, numbers: Sequence[int], recorder: Recorder) -> None:
    """Bring a role's weights from its home to some of its copies (`Parts.copies`)."""
    parts.make_room(role, numbers)
    for number in numbers:
        record_moves(parts.moving(role, number), recorder, role)


def save_part(parts: Parts, folder: Path, recorder: Recorder) -> dict[str, dict[str, int]]:
    """Write what this rank holds of the optimizers' state. Returns role → counts, of what it trains."""
    counts: dict[str, dict[str, int]] = {}
    for role in parts.trained:
        counts[role] = record_moves(parts.saving(role, folder), recorder, lane=DISK)
    return counts


def load_part(parts: Parts, folder: Path, counts: Mapping[str, Mapping[str, int]] | None, recorder: Recorder) -> None:
    """Continue from a checkpoint of any plan; `counts` are of its state, None where one process saved it."""
    for role in parts.trained:
        record_moves(parts.loading(role, folder, None if counts is None else counts[role]), recorder, lane=DISK)


def spans_as_values(spans: Sequence[Span], zero_s: float) -> list[Any]:
    """For a parcel; the times are shifted to a clock that began at `zero_s`."""
    return [list(astuple(replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s))) for span in spans]
