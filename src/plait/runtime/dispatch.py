"""Which call of a step goes on next: each begins as soon as what it needs is there and its ranks are free; all that are
under way go on in turns, an action at a time; and only where none of them can, this process waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.dataflow import Node
from plait.errors import RunError
from plait.rewards.pool import RewardPool
from plait.runtime.ranks.commands import LEADER
from plait.runtime.ranks.parts import WAIT_S
from plait.runtime.streams import Steps

if TYPE_CHECKING:
    from plait.runtime.ranks.crew import Crew

LOOK_S = 1.0
"""Between two looks at reward functions that say nothing."""


@dataclass(eq=False)
class Ongoing:
    """A call on its way."""

    node: Node
    steps: Steps = field(repr=False)
    mesh: frozenset[int]
    """Ranks that it keeps busy; without them others may begin beside it."""

    @property
    def others(self) -> list[int]:
        """Ranks that it may wait for."""
        return sorted(self.mesh - {LEADER})


class Arrivals:
    """What this process waits for where no call can go on: other ranks, and reward functions.

    Args:
        crew: all ranks.
    """

    def __init__(self, pools: Collection[RewardPool], crew: Crew) -> None:
        self._pools = tuple(pools)
        self._crew = crew
        self._last_s = time.monotonic()

    def moved(self) -> None:
        """A call has gone on."""
        self._last_s = time.monotonic()

    def wait(self, ongoing: Sequence[Ongoing]) -> None:
        """Until something has come that may let one of these calls go on.

        Raises:
            RunError: nothing has for WAIT_S.
        """
        found = [news for pool in self._pools if (news := pool.news())[0]]
        links = [link for of_pool, _ in found for link in of_pool]
        left = self._last_s + WAIT_S - time.monotonic()
        seconds = min([LOOK_S, *(seconds for _, seconds in found)]) if found else left
        ranks = sorted({rank for one in ongoing for rank in one.others})
        whom = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        what = f"{whom} ({', '.join(one.node.call for one in ongoing if one.others)})" if ranks else "reward functions"
        assert ranks or links, f"nobody would ever go on with {[one.node.call for one in ongoing]}"
        with self._crew.board.doing(ongoing[0].node.call):
            self._crew.mail.wait(max(0.0, seconds), what, links)
        if not found and time.monotonic() - self._last_s >= WAIT_S:
            raise RunError(f"rank {LEADER} expected a sign from {what} within {WAIT_S:g} s")


class Dispatcher:
    """Runs the calls of one step.

    Args:
        nodes: in graph order, in which they begin where they could begin at the same time.
        needs: id of each → ids of those that must have ended.
        early: whether a call may go on beside the rollout whose samples it reads, which is then not waited for.
        mesh: the ranks that a call needs to begin.
        begin: makes its steps, and says which ranks it keeps busy from then on.
        arrivals: what is waited for.
        doing: told which call goes on, while it does.
        went_on: told of each step of a call.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        needs: Mapping[int, frozenset[int]],
        *,
        early: Callable[[Node], bool],
        mesh: Callable[[Node], frozenset[int]],
        begin: Callable[[Node], Ongoing],
        arrivals: Arrivals,
        doing: Callable[[str], AbstractContextManager[None]] = nullcontext,
        went_on: Callable[[Node], None] = lambda node: None,
    ) -> None:
        self._waiting = list(nodes)
        self._ongoing: list[Ongoing] = []
        self._needs = needs
        self._early, self._mesh, self._begin = early, mesh, begin
        self._doing, self._went_on = doing, went_on
        self._arrivals = arrivals

    def run(self) -> None:
        """To the end of all calls. Raises what a call raises."""
        self._arrivals.moved()
        while self._waiting or self._ongoing:
            self._begin_ready()
            # What other ranks compute goes first: it takes no time here, and may have something to tell them.
            moved = False
            for one in sorted(self._ongoing, key=lambda one: LEADER in one.mesh):
                moved |= self._go_on(one)
            if moved:
                self._arrivals.moved()
            else:
                self._arrivals.wait(self._ongoing)

    def _begin_ready(self) -> None:
        left = {node.id for node in self._waiting} | {one.node.id for one in self._ongoing}
        busy = {rank for one in self._ongoing for rank in one.mesh}
        for node in list(self._waiting):
            needs = self._needs[node.id] & left
            mesh = self._mesh(node)
            if (needs and not (needs == {node.rows} and self._early(node))) or mesh & busy:
                continue
            begun = self._begin(node)
            self._waiting.remove(node)
            self._ongoing.append(begun)
            busy |= mesh | begun.mesh

    def _go_on(self, one: Ongoing) -> bool:
        try:
            with self._doing(one.node.call):
                return next(one.steps)
        except StopIteration:
            self._ongoing.remove(one)
            return True
        finally:
            self._went_on(one.node)
