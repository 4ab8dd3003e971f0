"""What a role drew earlier, told to the ranks that draft for it."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data.records import Sample
from plait.workers.announcer import Announcer
from plait.workers.messages import Do, Message, pack_samples
from plait.workers.rank_state import RankState
from plait.workers.ranks import LEADER


class KnownTexts:
    """See `runtime.workers.KnownTexts`."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer

    def recall(self, role: str, samples: Sequence[Sample]) -> None:
        """See KnownTexts.recall. Of every instance the rank is told that delivers its samples: it drafts."""
        rank_state = self._announcer.rank_state
        instances = [layout.mesh.ranks for layout in rank_state.places[role].generate]
        told = [ranks[0] for ranks in instances if LEADER not in ranks]
        said = pack_samples(samples, {})
        self._announcer.tell(told, Message({**said.header, "do": Do.RECALL, "role": role}, said.arrays), None)
        if any(LEADER in ranks for ranks in instances):
            recall_here(rank_state, role, samples)


def recall_here(rank_state: RankState, role: str, samples: Sequence[Sample]) -> None:
    """This rank's engine of the role may guess from them."""
    engine = rank_state.roles[role].engine
    assert engine is not None, f"role {role} has no engine on rank {rank_state.rank}"
    for sample in samples:
        engine.speculates.recall(sample.prompt.token_ids, sample.token_ids, sample.logprobs)
