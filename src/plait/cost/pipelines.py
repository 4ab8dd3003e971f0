"""Seconds of micro-batches that go through the stages of a pipeline, with the messages between these. Torch-free.

A stage computes while messages are on their way, in both directions. What is left of them is how long they hold up the
micro-batches behind: until the first is there, and again wherever a stage has none left that it may begin with.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.layer_times import Terms, scaled, total

FILLING, HOPS = "filling and draining", "hops"
IDLE = frozenset({FILLING, HOPS})
"""Terms in which a rank of a pipeline has nothing to compute."""
GPIPE, IN_TURN = "gpipe", "one at a time"
"""Schedules (`schedule.training_order`) that are not counted as 1F1B is."""


def there(stages: Sequence[Terms], count: int, hop_s: float, *, in_turn: bool = False) -> Terms:
    """Forwards alone.

    Args:
        stages: what a micro-batch takes in each.
        count: micro-batches.
        hop_s: from a stage to the next.
        in_turn: each passes all stages before the next begins.
    """
    times, hops_s = [total(stage) for stage in stages], (len(stages) - 1) * hop_s
    behind_s = sum(times) + hops_s if in_turn else max(*times, hop_s)
    return _terms(stages, count, sum(times) + hops_s + (count - 1) * behind_s, in_turn=in_turn)


def there_and_back(stages: Sequence[Terms], count: int, hop_s: float, schedule: str = "") -> Terms:
    """Forwards and backwards; see `there`. By 1F1B a stage with d stages from it to the end has no more than d
    micro-batches under way, so each waits for one that goes to the end and comes back. Of equal stages with as many
    micro-batches for each, and hops no longer than a forward, this is what the schedule takes.

    Args:
        stages: a forward and a backward.
        schedule: as a placement names it; those that are none by a rule count as 1F1B.
    """
    times, hops_s = [total(stage) for stage in stages], 2 * (len(stages) - 1) * hop_s
    if in_turn := schedule == IN_TURN:
        behind_s = sum(times) + hops_s
    else:
        behind_s = max(*times, 2 * hop_s if schedule == GPIPE else hop_s)
    seconds = sum(times) + hops_s + (count - 1) * behind_s
    if schedule not in (GPIPE, IN_TURN):
        seconds += _held_up_s(times, count, hop_s, behind_s)
    return _terms(stages, count, seconds, in_turn=in_turn)


def _held_up_s(times: Sequence[float], count: int, hop_s: float, behind_s: float) -> float:
    """By how much longer than `behind_s` each micro-batch is behind the one before, summed up, of the stage where that
    is most: d of them go to the end and back while it waits."""
    most_s, way_s = 0.0, times[-1]
    for depth in range(2, min(len(times), count - 1) + 1):
        way_s += times[-depth]
        between_s = (way_s + 2 * (depth - 1) * hop_s) / depth
        most_s = max(most_s, (between_s - behind_s) * (count - depth / (depth - 1)))
    return most_s


def _terms(stages: Sequence[Terms], count: int, seconds: float, *, in_turn: bool) -> Terms:
    """What the seconds are made of: the slowest stage's work, that of the others once, and messages."""
    if len(stages) == 1:
        return scaled(stages[0], count)
    times = [total(stage) for stage in stages]
    slowest = max(range(len(stages)), key=times.__getitem__)
    terms = scaled(stages[slowest], count)
    terms[FILLING] = (count if in_turn else 1) * (sum(times) - times[slowest])
    terms[HOPS] = max(0.0, seconds - total(terms))
    return terms
