"""Two timelines held against each other: the same rows, and how far apart in time; or, where one has calls whole and
the other their parts, as a prediction and its run do, the busy seconds of calls and of kinds of actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.schedule.busy import busy_by_rank, call_of, kind_of
from plait.schedule.timeline import Span, Timeline, covered_s
from plait.schedule.work import DISK


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


@dataclass(frozen=True, slots=True)
class Busy:
    """Busy seconds in a step, in the mean over its steps; None: there is nothing of it on that side.

    name: of a call or a move, on `rank`; of a kind of action, on all ranks together, with `rank` None
    """

    name: str
    rank: int | None
    seconds_a: float | None
    seconds_b: float | None

    @property
    def error(self) -> float | None:
        """(b − a) / a."""
        if self.seconds_b is None or not self.seconds_a:
            return None
        return self.seconds_b / self.seconds_a - 1.0


@dataclass(frozen=True, slots=True)
class CallComparison:
    """Two timelines of which one has parts of what the other has whole: calls by rank, kinds, seconds of a step.

    whole: which of them has calls as one action, a or b
    """

    whole: str
    calls: tuple[Busy, ...]
    kinds: tuple[Busy, ...]
    step_a: float
    step_b: float

    @property
    def same_calls(self) -> bool:
        """Whether every call that one side has whole was done on the same ranks on the other."""
        pairs = [(call.seconds_a, call.seconds_b) for call in self.calls]
        if self.whole == "b":
            pairs = [(parts, whole) for whole, parts in pairs]
        return all(parts is not None for whole, parts in pairs if whole is not None)


def whole_side(a: Timeline, b: Timeline) -> str | None:
    """Which of two timelines has as one action, such as `actor.train`, what the other has parts of alone, such as
    `actor.train/b0/mb3`: a or b. None: neither has, they are of one grain."""
    for side, mine, other in (("a", a, b), ("b", b, a)):
        calls = {span.whole for span in other.spans} - {span.action for span in other.spans}
        if calls & {span.action for span in mine.spans}:
            return side
    return None


def compare_calls(a: Timeline, b: Timeline, whole: str) -> CallComparison:
    """Busy seconds of two timelines of different grain, in a step of each.

    Args:
        whole: as `whole_side` says.
    """
    a, b = _of_steps(a), _of_steps(b)
    steps_a, steps_b = _num_steps(a), _num_steps(b)
    calls = []
    left, right = busy_by_rank(a, call_of), busy_by_rank(b, call_of)
    for name in dict.fromkeys((*left, *right)):
        mine, other = left.get(name, {}), right.get(name, {})
        for rank in sorted({*mine, *other}):
            calls.append(Busy(name, rank, _in_a_step(mine, rank, steps_a), _in_a_step(other, rank, steps_b)))
    left, right = busy_by_rank(a, kind_of), busy_by_rank(b, kind_of)
    kinds = []
    for kind in dict.fromkeys((*left, *right)):
        seconds_a = sum(left[kind].values()) / steps_a if kind in left else None
        seconds_b = sum(right[kind].values()) / steps_b if kind in right else None
        kinds.append(Busy(kind, None, seconds_a, seconds_b))
    return CallComparison(whole, tuple(calls), tuple(kinds), _step_s(a) / steps_a, _step_s(b) / steps_b)


def _of_steps(timeline: Timeline) -> Timeline:
    """Without what belongs to no step (an evaluation), where steps are named."""
    spans = tuple(span for span in timeline.spans if span.step is not None)
    return replace(timeline, spans=spans) if spans else timeline


def _num_steps(timeline: Timeline) -> int:
    return max(1, len({span.step for span in timeline.spans}))


def _step_s(timeline: Timeline) -> float:
    """Seconds of all steps, without what is between them (an evaluation) and what is written to a disk."""
    steps: dict[int | None, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.lane != DISK:
            start_s, end_s = steps.get(span.step, (span.start_s, span.end_s))
            steps[span.step] = min(start_s, span.start_s), max(end_s, span.end_s)
    return covered_s(steps.values())


def _in_a_step(seconds: Mapping[int, float], rank: int, steps: int) -> float | None:
    return seconds[rank] / steps if rank in seconds else None


def compare(a: Timeline, b: Timeline) -> Comparison:
    """Match the spans of two timelines, predicted and measured say, by step, rank and action.

    An action that occurs several times in a step is matched in the order of time.
    """
    left, right = _keyed(a), _keyed(b)
    common = [key for key in left if key in right]
    kinds: dict[str, list[tuple[float, float]]] = {}
    for key in common:
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
