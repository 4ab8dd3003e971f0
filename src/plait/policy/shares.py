"""Shares of a batch: where steps follow each other before their tokens are known (a model in stages), each computes a
part of the samples. Of those whose last token is known it takes the ones that have waited the longest, and so many that
all shares are equal. As samples end, shares get smaller; what is free is filled by those that wait.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from math import ceil

from plait.policy.batching import NO_DRAFTS, Scheduler
from plait.policy.coming_back import one_comes_back
from plait.policy.sequences import Started
from plait.policy.step import Key, Share


def num_wanted(scheduler: Scheduler) -> int:
    """Samples that run, and those that wait for which there are places; none where no sample begins."""
    if not scheduler.limits.starts:
        return 0
    running = len(scheduler.running)
    places = max(0, scheduler.limits.max_running - running)
    return running + sum(1 for _ in islice(scheduler.sequences.waiting, places))


def next_share(scheduler: Scheduler, in_flight: Collection[Key], num_groups: int) -> Share:
    """The next share of so many: of those that run, and with those that wait and have a place.

    Args:
        in_flight: running samples whose last token is not known.
    """
    idle = [sample for key, sample in scheduler.running.items() if key not in in_flight]
    most = ceil(len(scheduler.running) / num_groups)
    if len(idle) > most:
        chosen = {sample.key for sample in sorted(idle, key=lambda sample: sample.turn)[:most]}
        idle = [sample for sample in idle if sample.key in chosen]
    return Share(tuple(sample.key for sample in idle), ceil(num_wanted(scheduler) / num_groups))


def all_may_go_on(scheduler: Scheduler) -> bool:
    """Whether the next step computes all samples that run now, and no others but such as start: nobody gives way in it,
    nobody comes back who did before, and no prompt is computed, as far as that is known before it is decided."""
    running = scheduler.running
    if one_comes_back(scheduler.sequences, scheduler.room, scheduler.limits.max_running):
        return False
    if len(running) < scheduler.limits.max_running and (first := next(scheduler.sequences.in_turn(), None)) is not None:
        is_done = first.num_computed_tokens == first.num_tokens
        is_parked = isinstance(first, Started) and first.num_parked_tokens
        if not is_done and not is_parked and (first.table or scheduler.room.may_admit(first)):
            return False
    most_each = 2  # a block behind its table, and a copy of a shared one
    return scheduler.blocks.num_free >= most_each * len(running) or scheduler.room.has_room(running.values(), NO_DRAFTS)


def has_room(scheduler: Scheduler, share: Share) -> bool:
    """Whether the rows of a share can be computed, and nobody gives way for it."""
    return scheduler.room.has_room([scheduler.running[key] for key in share.rows], NO_DRAFTS)
