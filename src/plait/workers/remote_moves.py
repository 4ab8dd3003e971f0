"""The leader's moves of unfinished samples between the instances of a role."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from plait.policy.migration import AT_ONCE, Bounds, HowToMove, InstanceLoad, Unfinished, decide
from plait.policy.step import Key
from plait.workers.dealing import Outstanding
from plait.workers.gathering import Gathering, Left, MoveWord, Stage
from plait.workers.staged_move import StagedMove


class RemoteMoves:
    """`engines.InstanceMoves` over the instances of a role: one move at a time, told stage by stage.

    Args:
        num_instances: of the role.
        outstanding: of the role's engine; samples that begin to leave count in their targets from then on.
        tell: tells the instances that a stage concerns to do it; returns the number of the command.
        gathers: see InstanceMoves.
    """

    def __init__(
        self, num_instances: int, outstanding: Outstanding, tell: Callable[[Gathering], int], *, gathers: bool
    ) -> None:
        self._num_instances, self._outstanding, self._tell = num_instances, outstanding, tell
        self.gathers = gathers
        self._under_way: StagedMove | None = None
        self._count = 0
        self._began_at_s = 0.0
        self._leaving: dict[int, list[Key]] = {}
        """Instance → samples that are about to leave it."""
        self._began: dict[Key, int] = {}
        """Sample that has moved → the instance in which it began."""
        self.moved_s: float | None = None
        """See InstanceMoves."""

    @property
    def unfinished(self) -> tuple[tuple[Key, ...], ...]:
        keys: list[list[Key]] = [[] for _ in range(self._num_instances)]
        for key, place in self._outstanding.where.items():
            keys[place].append(key)
        return tuple(map(tuple, keys))

    @property
    def is_moving(self) -> bool:
        return self._under_way is not None

    @property
    def instances(self) -> frozenset[int]:
        """The instances with a part in the move under way."""
        return frozenset() if self._under_way is None else self._under_way.gathering.instances

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the commands that instances are still to answer."""
        return frozenset() if self._under_way is None else frozenset(self._under_way.numbers)

    def gathering(self, bounds: Bounds, kept: int = 1) -> dict[tuple[int, int], list[Key]]:
        """See InstanceMoves. The leader decides by what it knows: it counts each sample with the tokens of its prompt
        and of the longest response. Empty if a sample would come back to the instance in which it began."""
        where = self._outstanding.where
        loads = self._loads(bounds)
        dealt = not self._outstanding.pending and len(loads) > 1
        migration = decide(loads, len(where), bounds.slots, kept) if dealt else None
        if migration is None or self.is_moving:
            return {}
        keys = list(where)
        pairs: dict[tuple[int, int], list[Key]] = defaultdict(list)
        for move in migration.moves:
            pairs[move.source, move.target].append(keys[move.sample])
        if any(self._began.get(key) == target for (_, target), moved in pairs.items() for key in moved):
            return {}
        return dict(pairs)

    def _loads(self, bounds: Bounds) -> list[InstanceLoad]:
        """Loads of the instances that have samples. Rooms are counted in tokens, as if samples of a prompt did not
        share its keys and values."""
        unfinished: list[list[Unfinished]] = [[] for _ in range(self._num_instances)]
        for number, ((uid, _), place) in enumerate(self._outstanding.where.items()):
            tokens = len(self._outstanding.prompts[uid].token_ids)
            unfinished[place].append(Unfinished(number, tokens, tokens + bounds.response))
        return [
            InstanceLoad(place, tuple(samples), bounds.kv_tokens - sum(sample.kv_bytes for sample in samples))
            for place, samples in enumerate(unfinished)
            if samples
        ]

    def move(self, pairs: Mapping[tuple[int, int], Sequence[Key]], how: HowToMove = AT_ONCE) -> int:
        """See InstanceMoves."""
        out = self._outstanding
        moving = {pair: [key for key in keys if out.where.get(key) == pair[0]] for pair, keys in pairs.items()}
        moving = {pair: keys for pair, keys in moving.items() if keys}
        if self.is_moving or out.pending or not moving:
            return 0
        self.moved_s = None
        self._count += 1
        numbers = {uid: out.numbers[uid] for keys in moving.values() for uid, _ in keys}
        prompts = [out.prompts[uid] for uid in numbers] if how.ahead else ()
        gathering = Gathering(moving, numbers, how.recompute, move=self._count, prompts=prompts)
        self._under_way = StagedMove(gathering, ahead=how.ahead)
        self.go_on()
        return sum(map(len, moving.values()))

    def go_on(self) -> None:
        """Tell the next stage of the move, unless an answer has to come first."""
        moving = self._under_way
        while moving is not None and (stage := moving.due(self._outstanding.where)) is not None:
            if stage.stage is Stage.REST:
                self._begin_to_leave(stage)
            moving.told(stage, self._tell(stage))

    def _begin_to_leave(self, gathering: Gathering) -> None:
        """From now on the samples pause, and count in their targets."""
        self._began_at_s = time.perf_counter()
        self._leaving = {source: [] for source in gathering.sources}
        for (source, target), keys in gathering.pairs.items():
            self._leaving[source] += keys
            for key in keys:
                self._outstanding.where[key] = target
                self._began.setdefault(key, source)

    def heard(self, number: int, place: int, word: MoveWord) -> None:
        """Take the answer of an instance. Samples that had not begun there when the others left stay."""
        assert self._under_way is not None, f"instance {place} has samples move, and nobody asked it"
        self._under_way.heard(number, place, word)
        if not isinstance(word, Left):
            return
        gone = set(word.keys)
        where = self._outstanding.where
        for key in self._leaving.pop(place):
            if key in where and key not in gone:
                where[key] = place
        if self._under_way.is_over:
            self._under_way = None
            self.moved_s = time.perf_counter() - self._began_at_s

    def forget(self) -> None:
        """No sample is outstanding: forget the move, and where samples began."""
        self._under_way = None
        self._leaving.clear()
        self._began.clear()
