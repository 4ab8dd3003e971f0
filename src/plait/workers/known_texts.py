"""What a role drew earlier, told to the ranks that draft for it."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data.records import Sample
from plait.workers.announcer import Announcer
from plait.workers.ranks import LEADER
from plait.workers.upkeep import Recall


class KnownTexts:
    """See `runtime.workers.KnownTexts`."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer

    def recall(self, role: str, samples: Sequence[Sample]) -> None:
        """See KnownTexts.recall. Of every instance the rank is told that delivers its samples: it drafts."""
        rank_state = self._announcer.rank_state
        instances = [layout.mesh.ranks for layout in rank_state.places[role].generate]
        receivers = [ranks[0] for ranks in instances if LEADER not in ranks]
        receivers += [LEADER] if any(LEADER in ranks for ranks in instances) else []
        self._announcer.do(self._announcer.tell(receivers, Recall(role, samples), None))
