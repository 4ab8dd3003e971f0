"""How steps overlap. Ranks that hold a model in stages compute shares of the samples, one behind another
(`policy.decode_ring`). Everywhere else a step computes all samples; but on a device that computes while the host goes
on, the next one is launched *ahead*, before the host has read what this one drew: the device has the tokens where it
needs them, and does not wait for the host.

A sample that has ended in the meantime has a row in one more step, of which nothing counts. Who will end by its limit,
or might have to give way, is waited for; so each step ahead is one that could have been decided later as well.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.data.across import computes_behind
from plait.generation.drawing import Draws
from plait.generation.joint import Joint
from plait.generation.state import EngineState
from plait.generation.turns import Turn, Turns
from plait.policy.shares import all_may_go_on, has_room, next_share, num_wanted
from plait.policy.step import Share


class Overlap:
    """Which steps may be in flight at the same time.

    Args:
        state, joint, turns: of the engine.
        guesses: whether guesses are made, behind tokens that have to be known for it.
        land_all_but: lands the oldest steps until at most so many are in flight.
    """

    def __init__(
        self, state: EngineState, joint: Joint, turns: Turns, land_all_but: Callable[[int], None], *, guesses: bool
    ) -> None:
        self._state, self._joint, self._turns, self._land_all_but = state, joint, turns, land_all_but
        behind = computes_behind(state.model.device)
        self._ahead = behind and joint.is_alone and not state.forward.is_exact and not guesses

    def share(self, *, ahead: bool) -> tuple[int, Share | None]:
        """How many steps are to be in flight, and the share of the samples that the next one computes; None: all.

        If a sample would have to give way, it may be in flight: then all steps land first.

        Args:
            ahead: whether the next step may be launched ahead.
        """
        scheduler, joint = self._state.scheduler, self._joint
        groups = joint.num_groups(num_wanted(scheduler)) if joint.most_groups > 1 else 1
        if groups == 1:
            if not (ahead and self._goes(None)):
                self._land_all_but(0)
            return 1, None
        share = next_share(scheduler, self._turns.drawing, groups)
        if self._turns and not has_room(scheduler, share):
            self._land_all_but(0)
            share = next_share(scheduler, (), groups)
        return groups, share

    def goes(self, starts: Draws | None) -> bool:
        """Whether the next step is launched before the steps in flight land, and before the first tokens of samples are
        known that start now. If so, all of them have rows in it from here on."""
        if not self._goes(starts):
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

    def _goes(self, starts: Draws | None) -> bool:
        """See `goes`: nobody gives way in the next step, nobody comes back, and nobody ends before it for sure."""
        if not self._ahead or not all_may_go_on(self._state.scheduler):
            return False
        return starts is None or all(response.num_left > 1 for response in starts.samples)

    def _stays(self, turn: Turn) -> bool:
        draws, plan = turn.draws, turn.plan
        if not self._ahead or draws is None or draws.drafts or plan.chunks or plan.starts:
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
