"""Which of its works a rank goes on with: a call that scores or trains, an instance that generates, a move.

Every work is done an action at a time, and between any two actions the rank takes what it has been sent, and asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """What one rank knows of a work that it has been given and has not ended."""

    number: int
    """Its place in the one order in which works are announced, which all ranks share."""
    is_joint: bool = False
    """Its actions wait for other ranks that have a part in it."""
    is_alone: bool = False
    """It changes weights, or needs memory that others hold: nothing else is under way on this rank meanwhile."""
    is_behind: bool = False
    """It begins when all before it have ended; what is behind it does not wait for it."""
    last: int = 0
    """The turn in which this rank last went on; 0: never."""


ALONE = Turn(0, is_alone=True)
"""The turn of work that no other work may run beside; its number is set later."""


def next_turn(works: Sequence[Turn]) -> int:
    """The number of the work that runs next.

    * A work that must be alone begins when all before it have ended, and none behind it begins before it has.
    * A work that is behind begins when all before it have ended.
    * Of the joint works only the first goes on. So on any two ranks that share two of them the same one is first, and
      no rank waits in one for a rank that waits in the other.
    * Of those that may go on, the one that has waited the longest does.

    Args:
        works: the open works of one rank, at least one; their numbers are distinct.
    """
    may: list[Turn] = []
    is_joined = False
    for place, work in enumerate(sorted(works, key=lambda work: work.number)):
        if work.is_alone and place > 0:
            break
        if not (work.is_joint and is_joined) and not (work.is_behind and place > 0):
            may.append(work)
        is_joined |= work.is_joint
        if work.is_alone:
            break
    return min(may, key=lambda work: (work.last, work.number)).number
