"""Two timelines held against each other: the same rows, and how far apart in time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from plait.schedule.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class KindError:
    """All actions of one kind: how many in both timelines, their seconds in each, and the mean of |b − a| / a."""

    kind: str
    count: int
    seconds_a: float
    seconds_b: float
    mean_error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """kinds: per kind of action; only_a, only_b: rows of one timeline alone, as (step, rank, action);
    reordered: for each (rank, lane) whose common actions run in another order, the first pair that differs;
    makespan_a, makespan_b in seconds
    """

    kinds: tuple[KindError, ...]
    only_a: tuple[tuple[int | None, int, str], ...]
    only_b: tuple[tuple[int | None, int, str], ...]
    reordered: tuple[tuple[int, str, str, str], ...]
    makespan_a: float
    makespan_b: float

    @property
    def same_rows(self) -> bool:
        """Whether both ran the same actions in the same order on every lane."""
        return not (self.only_a or self.only_b or self.reordered)


def compare(a: Timeline, b: Timeline) -> Comparison:
    """Match the spans of two timelines, predicted and measured say, by step, rank and action.

    An action that occurs several times in a step is matched in the order of time.
    """
    left, right = _keyed(a), _keyed(b)
    both = [key for key in left if key in right]
    kinds: dict[str, list[tuple[float, float]]] = {}
    for key in both:
        kinds.setdefault(left[key].kind, []).append((left[key].duration_s, right[key].duration_s))
    return Comparison(
        tuple(_error(kind, pairs) for kind, pairs in sorted(kinds.items())),
        tuple((key[0], key[1], key[2]) for key in left if key not in right),
        tuple((key[0], key[1], key[2]) for key in right if key not in left),
        _reordered(left, right),
        a.makespan_s,
        b.makespan_s,
    )


_Key = tuple[int | None, int, str, int]


def _keyed(timeline: Timeline) -> dict[_Key, Span]:
    seen: Counter[tuple[int | None, int, str]] = Counter()
    keyed: dict[_Key, Span] = {}
    for span in timeline.ordered().spans:
        row = (span.step, span.rank, span.action)
        keyed[*row, seen[row]] = span
        seen[row] += 1
    return keyed


def _error(kind: str, pairs: list[tuple[float, float]]) -> KindError:
    relative = [abs(y - x) / x if x > 0 else float(y != x) for x, y in pairs]
    return KindError(
        kind, len(pairs), sum(x for x, _ in pairs), sum(y for _, y in pairs), sum(relative) / len(relative)
    )


def _reordered(left: dict[_Key, Span], right: dict[_Key, Span]) -> tuple[tuple[int, str, str, str], ...]:
    rows: dict[tuple[int, str], tuple[list[_Key], list[_Key]]] = {}
    for side, (mine, other) in enumerate(((left, right), (right, left))):
        for key, span in mine.items():
            if key in other:
                rows.setdefault((span.rank, span.lane), ([], []))[side].append(key)
    differing = []
    for (rank, lane), (a, b) in sorted(rows.items()):
        pair = next(((x, y) for x, y in zip(a, b, strict=False) if x != y), None)
        if pair is not None:
            differing.append((rank, lane, pair[0][2], pair[1][2]))
        elif len(a) != len(b):
            longer = a if len(a) > len(b) else b
            differing.append((rank, lane, longer[min(len(a), len(b))][2], "nothing"))
    return tuple(differing)
