"""What engines have learned about guesses, asked of all ranks for a checkpoint, and told to those of a resumed run."""

from __future__ import annotations

from collections.abc import Sequence

from plait.speculation.knowledge import Known
from plait.workers.announcer import Announcer
from plait.workers.knowledge_upkeep import TakeUpKnowledge, TellKnowledge


class GuessKnowledge:
    """`runtime.workers.GuessKnowledge`: all ranks, as the leader asks them.

    Args:
        num_ranks: of the run, the leader included.
    """

    def __init__(self, announcer: Announcer, num_ranks: int) -> None:
        self._announcer = announcer
        self._ranks = tuple(range(num_ranks))

    def told(self) -> tuple[list[Known], list[str]]:
        """See GuessKnowledge.told."""
        answers = self._announcer.ask(self._ranks, TellKnowledge(), "what it has learned of guesses")
        known = [known for answer in answers for known in answer.known]
        return known, [note for answer in answers for note in answer.notes]

    def take_up(self, known: Sequence[Known]) -> list[str]:
        """See GuessKnowledge.take_up."""
        command = TakeUpKnowledge(known)
        answers = self._announcer.ask(self._ranks, command, "what it takes up of guesses")
        return [note for answer in answers for note in answer.notes]
