"""How steps overlap. Ranks that hold a model in stages compute shares of the samples, one behind another
(`policy.decode_ring`). Everywhere else a step computes all samples; but on a device that computes while the host goes
on, the next one is launched *ahead*, before the host has read what this one drew: the device has the tokens where it
needs them, and does not wait for the host.

A sample that has ended in the meantime has a row in one more step, of which nothing counts. Who will end by its limit,
or might have to give way, is waited for; so each step ahead is one that could have been decided later as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from plait.generation.drawing import Draws
from plait.generation.joint import Joint
from plait.generation.speculates import Quiet
from plait.generation.step_record import Landed
from plait.policy.batching import Scheduler
from plait.policy.shares import all_may_go_on, has_room, next_share, num_wanted
from plait.policy.step import Key, Share, StepPlan

if TYPE_CHECKING:
    from plait.generation.state import EngineState


@dataclass(frozen=True)
class Turn:
    """A step in flight."""

    plan: StepPlan
    starts: Draws | None
    """First tokens that samples drew before it, so that they have a row in it; None: there were none, or they are
    known."""
    draws: Draws | None
    """None: no sample draws in it."""
    seconds: float
    """How long this rank was busy with it so far."""


class Turns:
    """The steps in flight of an engine, oldest first. They land in this order, at the same place in the order of
    decisions on all ranks of an instance."""

    def __init__(self) -> None:
        self._open: deque[Turn] = deque()
        self.landed = Landed()
        """Results since `take_landed`."""
        self.landing_s = 0.0
        """Seconds in which steps have landed, so far."""

    def __len__(self) -> int:
        return len(self._open)

    def launch(self, turn: Turn) -> None:
        """Add a step that was launched."""
        self._open.append(turn)

    @property
    def newest(self) -> Turn | None:
        """The step that was launched last, if it is in flight."""
        return self._open[-1] if self._open else None

    def clear(self) -> None:
        """Forget the steps in flight: one before them has failed, and what they drew counts nothing."""
        self._open.clear()

    def oldest(self) -> Turn:
        """Remove and return the oldest step."""
        return self._open.popleft()

    def take_landed(self) -> Landed:
        """The results of the steps that landed since the last call."""
        landed, self.landed = self.landed, Landed()
        return landed

    @property
    def drawing(self) -> set[Key]:
        """Samples whose last token is not known yet."""
        return {response.key for turn in self._open if turn.draws is not None for response in turn.draws.samples}

    def num_next(self, scheduler: Scheduler, plan: StepPlan, num_groups: int) -> int:
        """Rows of the step after a planned one, if no sample ends or comes: samples that wait for their turn, and those
        whose tokens will be known by then.

        Args:
            plan: decided, not launched.
            num_groups: how many steps are in flight, the planned one included, when the next one is launched.
        """
        running = len(scheduler.running)
        landing = [*(turn.plan for turn in self._open), plan]
        landing = landing[: max(0, len(landing) + 1 - num_groups)]
        idle = running - len(self.drawing) - len(plan.drawn) + sum(len(other.drawn) for other in landing)
        return min(idle, ceil(running / num_groups))


class Overlap:
    """Which steps may be in flight at the same time.

    Args:
        state, joint, turns: of the engine.
        land_all_but: lands the oldest steps until at most so many are in flight.
        quiet: what makes drafts, where steps may be launched ahead while it makes none: the device computes behind, and
            nothing else needs to know the tokens. None: they may not.
    """

    def __init__(
        self,
        state: EngineState,
        joint: Joint,
        turns: Turns,
        land_all_but: Callable[[int], None],
        quiet: Quiet | None,
    ) -> None:
        self._state, self._joint, self._turns, self._land_all_but = state, joint, turns, land_all_but
        self._quiet = quiet if joint.is_alone else None

    @property
    def may_go_ahead(self) -> bool:
        """Whether the next step needs no tokens of those in flight for drafts."""
        return self._quiet is not None and self._quiet.is_quiet

    def share(self, *, ahead: bool) -> tuple[int, Share | None]:
        """How many steps are to be in flight, and the share of the samples that the next one computes; None: all.

        If a sample would have to give way, it may be in flight: then all steps land first.

        Args:
            ahead: whether the next step has no drafts, and may be launched ahead (`may_go_ahead`).
        """
        scheduler, joint = self._state.scheduler, self._joint
        groups = joint.num_groups(num_wanted(scheduler)) if joint.most_groups > 1 else 1
        if groups == 1:
            if ahead and self._quiet is not None:
                self._quiet.passes()
            else:
                self._land_all_but(0)
            return 1, None
        share = next_share(scheduler, self._turns.drawing, groups)
        if self._turns and not has_room(scheduler, share):
            self._land_all_but(0)
            share = next_share(scheduler, (), groups)
        return groups, share

    def goes(self, starts: Draws | None) -> bool:
        """Whether the next step is launched before the steps in flight land, and before the first tokens of samples are
        known that start now: if no sample is preempted or comes back in it, and none is certain to end before it. If
        so, all samples have rows in it from here on."""
        if not all_may_go_on(self._state.scheduler):
            return False
        if starts is not None and any(response.num_left <= 1 for response in starts.samples):
            return False
        for unknown in (self._turns.newest and self._turns.newest.draws, starts):
            if unknown is not None:
                self._follow(unknown)
        return True

    def launched(self, turn: Turn, groups: int) -> None:
        """A step was launched: land those that are not to be in flight beside the next one.

        It stays itself if the next one may be launched ahead of it: no prompt is computed in it (so that what those
        take is seen with their steps), and no sample ends by its limit.
        """
        self._turns.launch(turn)
        self._land_all_but(max(1, groups - 1))
        if groups == 1 and not self._stays(turn):
            self._land_all_but(0)

    def _stays(self, turn: Turn) -> bool:
        draws, plan = turn.draws, turn.plan
        if not self.may_go_ahead or draws is None or draws.drafts or plan.chunks or plan.starts:
            return False
        twice = {response.key for response in turn.starts.samples} if turn.starts is not None else ()
        live = (response for response in draws.samples if response.finish_reason is None)
        return all(response.num_left > 1 + (response.key in twice) for response in live)

    def _follow(self, draws: Draws) -> None:
        """Have a row in the next step for each sample that draws, with a token that the host does not know yet."""
        live = draws.of_live()
        keys, num_rows, token_ids_D = [response.key for response in live.samples], len(live.num_new), live.token_ids_D
        assert token_ids_D is not None, "this rank draws"
        if num_rows:
            self._state.rows.go_ahead(keys[:num_rows], token_ids_D[:num_rows])
        self._state.enter(keys[num_rows:], token_ids_D[num_rows:])
        draws.is_followed = True
