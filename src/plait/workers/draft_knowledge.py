"""The knowledge of engines that draft: asked of all ranks for a checkpoint, and told to the ranks of a resumed run."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data.records import Sample
from plait.speculation.knowledge import Known
from plait.workers.announcer import Announcer
from plait.workers.drawn_texts import DrawnTexts, drafting_rank
from plait.workers.knowledge_upkeep import TakeUpKnowledge, TellKnowledge
from plait.workers.upkeep import Recall


class DraftKnowledge:
    """`runtime.workers.DraftKnowledge` over all ranks, as the leader asks them.

    Args:
        num_ranks: of the run, the leader included.
    """

    def __init__(self, announcer: Announcer, num_ranks: int) -> None:
        self._announcer = announcer
        self._ranks = tuple(range(num_ranks))

    def told(self) -> tuple[list[Known], list[str]]:
        """See `runtime.workers`."""
        answers = self._announcer.ask(self._ranks, TellKnowledge(), "what it has learned of drafts")
        known = [known for answer in answers for known in answer.known]
        return known, [note for answer in answers for note in answer.notes]

    def take_up(self, known: Sequence[Known]) -> list[str]:
        """See `runtime.workers`."""
        command = TakeUpKnowledge(known)
        answers = self._announcer.ask(self._ranks, command, "what it takes up of drafts")
        return [note for answer in answers for note in answer.notes]

    def recall(self, role: str, samples: Sequence[Sample]) -> None:
        """See `runtime.workers`. In every instance it is told to the rank that makes its drafts."""
        instances = self._announcer.rank_state.places[role].drawing
        drafting = [drafting_rank(layout.mesh.ranks) for layout in instances]
        self._announcer.do(self._announcer.tell(drafting, Recall(role, DrawnTexts.told_of(samples)), None))
