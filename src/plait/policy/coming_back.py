"""Samples that wait with all their tokens computed but the newest, and run as there are places: they came from another
engine, or their keys and values lie beside the pool while they wait.

Words as in `policy.batching`.
"""

from __future__ import annotations

from plait.policy.room import Room
from plait.policy.sequences import OLDEST, Sequences, Started
from plait.policy.step import Key


def come_back(sequences: Sequences, room: Room, most: int) -> tuple[list[Key], list[Key]]:
    """Let such samples run, while at most so many do: (joined, brought) of `StepPlan`."""
    joined: list[Key] = []
    brought: list[Key] = []
    while len(sequences.running) < most and (sample := _next(sequences, room, brought)) is not None:
        sequences.enter(sample)
        joined.append(sample.key)
    return joined, brought


def one_comes_back(sequences: Sequences, room: Room, most: int) -> bool:
    """Whether one of them would run now. Those whose tokens are in the pool count even where no place is free."""
    waiting = sequences.preempted
    if any(sample.num_computed_tokens == sample.num_tokens - 1 for sample in waiting):
        return True
    parked = next((sample for sample in waiting if sample.num_parked_tokens), None)
    if parked is None or len(sequences.running) >= most or _waits(parked, sequences):
        return False
    return not sequences.running or room.may_bring(parked)


def _waits(parked: Started, sequences: Sequences) -> bool:
    """Whether a prompt of an earlier rollout may need the room."""
    first = next(iter(sequences.prompts.values()), None)
    return first is not None and first.rollout < parked.order[0]


def _next(sequences: Sequences, room: Room, brought: list[Key]) -> Started | None:
    """The first of them. What is parked comes in its turn: not while a prompt of an earlier rollout may need the room.

    Args:
        brought: gets it, if it was parked.
    """
    for sample in sequences.preempted:
        if sample.num_parked_tokens:
            if _waits(sample, sequences) or not _is_brought(sample, sequences, room):
                return None
            brought.append(sample.key)
            return sample
        if sample.num_computed_tokens == sample.num_tokens - 1:
            return sample
    return None


def _is_brought(sample: Started, sequences: Sequences, room: Room) -> bool:
    """Whether there are blocks for what is parked of a sample; what waits gives its own up where nothing runs."""
    idle = not sequences.running
    while room.bring(sample, sample.num_parked_tokens, is_current=False) is None:
        other = sequences.youngest_waiting(OLDEST) if idle else None
        if other is None:
            assert not idle, f"{sample.num_parked_tokens} tokens do not fit into an empty pool"
            return False
        room.evict(other)
    sample.num_parked_tokens = 0
    return True
