"""A move of samples to other instances, as the leader follows it: which stage is next, and which answers it needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from plait.policy.step import Key
from plait.workers.gathering import Gathering, MoveWord, Pair, Said, Stage
from plait.workers.messages import Message

_AFTER = {Stage.HERE: Stage.GIVE, Stage.GIVE: Stage.TAKE, Stage.TAKE: Stage.REST}


class StagedMove:
    """
    Args:
        gathering: what moves.
        ahead: whether the bulk goes ahead, while both sides go on.
    """

    def __init__(self, gathering: Gathering, *, ahead: bool) -> None:
        self._gathering = gathering
        self._next: Stage | None = Stage.HERE if ahead else Stage.REST
        """The next stage, told when no answer is missing; None: all stages have been told."""
        self._missing: dict[int, set[int]] = {}
        """Number of a command → instances that are still to answer it."""
        self._said: dict[Pair, Message] = {}
        """Pair of instances → what one of them answered to the last stage that was told."""
        self._given: set[int] = set()
        """Sources that have begun to send."""

    @property
    def gathering(self) -> Gathering:
        return self._gathering

    @property
    def numbers(self) -> Collection[int]:
        """Numbers of the commands that are still to be answered."""
        return self._missing.keys()

    @property
    def is_over(self) -> bool:
        """Whether the samples have left."""
        return self._next is None and not self._missing

    def due(self, unfinished: Mapping[Key, int]) -> Gathering | None:
        """The stage that is to be told now; None: an answer has to come first, or all stages were told.

        Args:
            unfinished: sample → its instance; samples that have ended do not move any more.
        """
        if self._next is None or self._waits:
            return None
        pairs = self._gathering.pairs
        if self._next in (Stage.GIVE, Stage.REST):
            pairs = {pair: [key for key in keys if unfinished.get(key) == pair[0]] for pair, keys in pairs.items()}
        said = self._said if self._next in (Stage.GIVE, Stage.TAKE) else {}
        return replace(self._gathering, pairs=pairs, stage=self._next, said=said)

    @property
    def _waits(self) -> bool:
        """Whether an answer has to come first. TAKE needs only that all sources have begun to send."""
        if self._next is Stage.TAKE:
            return self._given != self._gathering.sources
        return bool(self._missing)

    def told(self, gathering: Gathering, number: int) -> None:
        """A stage has been told, by the command of this number."""
        self._next = _AFTER.get(gathering.stage)
        self._said = {}
        match gathering.stage:
            case Stage.HERE:
                self._missing[number] = set(gathering.targets)
            case Stage.GIVE | Stage.REST:
                self._missing[number] = set(gathering.sources)
            case Stage.TAKE:
                pass

    def heard(self, number: int, place: int, word: MoveWord) -> None:
        """An instance has answered the command of this number."""
        if isinstance(word, Said):
            self._said |= word.of_pairs
            if word.stage is Stage.GIVE:
                self._given.add(place)
                return  # its answer that all is sent comes later
        self._missing[number].remove(place)
        if not self._missing[number]:
            del self._missing[number]
