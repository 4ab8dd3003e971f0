"""What the leader has of the roles' weights: whether it is up to date, and when it can be computed with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from plait.workers.announcer import Announcer
from plait.workers.offload_manager import Need
from plait.workers.ranks import LEADER


class LeaderWeights:
    """`runtime.workers.LeaderWeights`."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        self._state = announcer.rank_state

    def now(self, role: str, weights: Tensor) -> Tensor | None:
        """The values of weights [elements, flat] that the leader has of a role, wherever they are; None: not as they
        are by now."""
        is_home = LEADER in self._state.places[role].home.mesh.ranks
        if not is_home and any(
            (role, number) in self._announcer.fresh.stale for number in range(len(self._state.copies[role]))
        ):
            return None
        return self._state.offloads.now(weights)

    @contextlib.contextmanager
    def holding(self) -> Iterator[bool]:
        """Within it the leader's models can be computed with, one after another; whether all of them can."""
        copies = [self._state.copies[role][number] for role, number in self._announcer.fresh.stale]
        gone = [rank for copy in copies if copy.after != "keep" for rank, _ in copy.parts]
        if LEADER in gone:
            yield False
            return
        needs: list[Need] = [(role, what) for role in self._state.roles for what in ("home", "score", "decode")]
        with self._state.offloads.holding(*needs) as all_fit:
            yield all_fit
