"""The leader's view of prompts that instances of their own compute, and that others draw samples of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.generation.request import Request
from plait.policy.prompt_pace import PromptRoom, Taken, num_that_go
from plait.policy.step import PROMPT
from plait.workers.call_messages import TELL_STEPS
from plait.workers.dealing import Outstanding
from plait.workers.gathering import Computed, Gathering, MoveWord, Pair, Said, Stage

_AFTER = {Stage.HERE: Stage.GIVE, Stage.GIVE: Stage.TAKE, Stage.TAKE: Stage.ENTER}


@dataclass
class _OnTheWay:
    """Prompts on their way between two instances. number: of the command that is to be answered"""

    gathering: Gathering
    number: int


class RemotePrompts:
    """Deals prompts to the instances that compute them, and has each go on where its samples are drawn.

    Args:
        places: numbers of the instances that compute prompts.
        outstanding: of the role's engine; samples count in the instances that draw them from the beginning.
        said: tokens of samples that have begun.
        tell: tells the instances that a stage concerns to do it; returns the number of the command.
        room: of each instance that draws.
        ahead: whether what moves may be sent beside the steps. False where messages meet by order, not by tag (NCCL):
            then both instances meet at a step.
    """

    def __init__(
        self,
        places: Sequence[int],
        outstanding: Outstanding,
        said: Mapping[tuple[int, int], int],
        tell: Callable[[Gathering], int],
        room: PromptRoom,
        *,
        ahead: bool,
    ) -> None:
        self._places, self._outstanding, self._said = tuple(places), outstanding, said
        self._tell, self._room = tell, room
        self._first = Stage.HERE if ahead else Stage.REST
        self._loads = dict.fromkeys(self._places, 0)
        """Instance → tokens of prompts that it was given, since nothing was outstanding."""
        self._computing: dict[int, Request] = {}
        """Prompt → its request, until it is on its way."""
        self._sources: dict[int, int] = {}
        """Prompt → the instance that computes it, until its samples may begin."""
        self._computed: dict[Pair, list[int]] = defaultdict(list)
        """Prompts that wait to go on, in the order in which they were computed."""
        self._on_the_way: dict[Pair, _OnTheWay] = {}
        self._count = 0
        self._news = False
        """Whether something has changed since `go_on` looked."""

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the commands about prompts on their way that are to be answered."""
        return frozenset(way.number for way in self._on_the_way.values())

    @property
    def instances(self) -> frozenset[int]:
        """Instances that have prompts for others."""
        return frozenset(self._sources.values())

    def deal(self, asked: Iterable[tuple[int, Request]]) -> dict[int, list[tuple[int, Request]]]:
        """Instance that computes prompts → what it gets of these, each with the instance that draws: each goes where
        the fewest tokens are, computed or not, so that who computes what depends on the requests alone."""
        shares: dict[int, list[tuple[int, Request]]] = defaultdict(list)
        for target, request in asked:
            source = min(self._places, key=lambda place: (self._loads[place], place))
            uid = request.prompt.uid
            self._loads[source] += len(request.prompt.token_ids)
            self._computing[uid], self._sources[uid] = request, source
            shares[source].append((target, request))
        return shares

    def look_again(self) -> None:
        """Samples have ended, or grown."""
        self._news = True

    def go_on(self) -> None:
        """Have prompts that are computed go on, as far as there is room for them where they are drawn."""
        if not self._news:
            return
        self._news = False
        waiting = {pair: uids for pair, uids in self._computed.items() if uids and pair not in self._on_the_way}
        if not waiting:
            return
        taken = self._taken()
        for pair, uids in sorted(waiting.items()):
            prompts = [self._taken_by(self._computing[uid]) for uid in uids]
            count = num_that_go(prompts, taken[pair[1]], self._room)
            if count:
                self._begin(pair, uids[:count])
                taken[pair[1]] = sum(prompts[:count], taken[pair[1]])
                del uids[:count]

    def _taken(self) -> defaultdict[int, Taken]:
        """What the instances that draw have, of what is not computed elsewhere."""
        prompts: set[int] = set()
        taken: defaultdict[int, Taken] = defaultdict(Taken)
        for (uid, index), place in self._outstanding.where.items():
            if uid in self._computing:
                continue
            tokens = self._said.get((uid, index), 0) + TELL_STEPS
            if uid not in prompts:
                prompts.add(uid)
                tokens += len(self._outstanding.prompts[uid].token_ids)
            taken[place] += Taken(1, tokens)
        return taken

    @staticmethod
    def _taken_by(request: Request) -> Taken:
        return Taken(len(request.indices), len(request.prompt.token_ids))

    def _begin(self, pair: Pair, uids: Sequence[int]) -> None:
        requests = [self._computing.pop(uid) for uid in uids]
        self._count += 1
        gathering = Gathering(
            {pair: [(uid, PROMPT) for uid in uids]},
            {uid: self._outstanding.numbers[uid] for uid in uids},
            stage=self._first,
            move=self._count,
            prompts=[request.prompt for request in requests] if self._first is Stage.HERE else (),
        )
        self._on_the_way[pair] = _OnTheWay(gathering, self._tell(gathering))

    def heard(self, number: int, place: int, word: MoveWord) -> None:
        """Take the answer of an instance to a command about prompts."""
        self._news = True
        if isinstance(word, Computed):
            for uid in word.uids:
                [target] = {self._outstanding.where[uid, index] for index in self._computing[uid].indices}
                self._computed[place, target].append(uid)
            return
        pair, way = next((pair, way) for pair, way in self._on_the_way.items() if way.number == number)
        stage = _AFTER.get(way.gathering.stage)
        if stage is not None:
            said = word.of_pairs if isinstance(word, Said) else {}
            way.gathering = replace(way.gathering, stage=stage, said=said)
            way.number = self._tell(way.gathering)
        if stage in (None, Stage.ENTER):
            del self._on_the_way[pair]
            for uid, _ in way.gathering.pairs[pair]:
                del self._sources[uid]

    def forget(self) -> None:
        """No sample is outstanding, or nobody waits for those that are."""
        self._loads = dict.fromkeys(self._places, 0)
        for known in (self._computing, self._sources, self._computed, self._on_the_way):
            known.clear()
