"""Pipeline schedules by rule: GPipe, 1F1B, and two models one after the other.

Each returns the schedule; `planner.evaluate.score` or the simulator says how long it takes. None looks at durations.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.schedule.action import Action, Kind
from plait.schedule.pipeline import Pipeline, Workload
from plait.schedule.schedule import Schedule

Word = tuple[Kind, int]
"""A forward or backward of one micro-batch, on a stage that is understood."""


def gpipe(workload: Workload) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019); models one after the other without a barrier."""
    return _concatenated(workload, lambda p, stage: _flush(p.num_microbatches, p.num_microbatches), "gpipe")


def one_f_one_b(workload: Workload) -> Schedule:
    """1F1B (Narayanan et al. 2021) of each model, one model after the other without a barrier.

    A stage keeps at most as many micro-batches in flight as there are stages from it to the end, or fewer where the
    memory cap of its rank says so. Where one model follows another on a rank, the two together may still exceed it.
    """
    return _concatenated(workload, lambda p, stage: _flush(p.num_microbatches, _depth(workload, p, stage)), "1F1B")


def opposite(workload: Workload) -> tuple[Schedule, ...]:
    """The baseline 1F1B-opposite: 1F1B of two models in opposite directions, without a barrier, both ways round."""
    turned = Workload(workload.pipelines[::-1], workload.num_ranks, workload.caps)
    return one_f_one_b(workload), one_f_one_b(turned)


def one_at_a_time(workload: Workload) -> Schedule:
    """Every micro-batch forward and backward before the next: no overlap, the least memory. Fits any cap that fits one
    micro-batch.
    """
    return _concatenated(workload, lambda p, stage: _flush(p.num_microbatches, 1), "one at a time")


def in_flight(schedule: Schedule) -> tuple[dict[str, int], ...]:
    """For each rank, model → the most micro-batches whose forward has begun and whose backward has not ended."""
    result = []
    for row in schedule.rows:
        now: dict[str, int] = {}
        most: dict[str, int] = {}
        for action in row:
            if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                now[action.model] = now.get(action.model, 0) + (1 if action.kind is Kind.FORWARD else -1)
                most[action.model] = max(most.get(action.model, 0), now[action.model])
        result.append(most)
    return tuple(result)


def _depth(workload: Workload, p: Pipeline, stage: int) -> int:
    """Micro-batches in flight of `stage`, so that no stage after it holds more: a stage with less room limits those
    behind it, or they would wait for each other for ever.
    """
    rooms = [1 + _room(p, s, workload.caps[p.ranks[s]], p.num_stages - 1 - s) for s in range(p.num_stages)]
    return min(rooms[: stage + 1])


def _room(p: Pipeline, stage: int, cap: float, most: int) -> int:
    largest = max(p.activation[stage], default=0.0)
    if largest <= 0 or cap == float("inf"):
        return most
    return max(0, min(most, int(cap / largest * (1 + 1e-12)) - 1))


def _flush(num_microbatches: int, depth: int) -> list[Word]:
    """`depth` forwards, then one backward and one forward by turns, then the backwards that are left."""
    words: list[Word] = [(Kind.FORWARD, i) for i in range(min(depth, num_microbatches))]
    for i in range(num_microbatches):
        words.append((Kind.BACKWARD, i))
        if depth + i < num_microbatches:
            words.append((Kind.FORWARD, depth + i))
    return words


def _concatenated(workload: Workload, words: Callable[[Pipeline, int], list[Word]], name: str) -> Schedule:
    rows: list[list[Action]] = [[] for _ in range(workload.num_ranks)]
    for p in workload.pipelines:
        for stage, rank in enumerate(p.ranks):
            rows[rank].extend(p.action(kind, stage, i) for kind, i in words(p, stage))
    return Schedule(tuple(tuple(row) for row in rows), name)
