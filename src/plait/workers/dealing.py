"""Which instance of a role gets which requests, and what is outstanding: asked for, and not delivered yet."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.data.records import FinishReason, Prompt, Sample
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.step import Key


@dataclass
class Outstanding:
    """What the leader waits for from the instances of a role."""

    pending: list[Request] = field(default_factory=list)
    """Asked for, and not dealt yet."""
    where: dict[Key, int] = field(default_factory=dict)
    """Unfinished sample → the number of its instance, in the order in which they were dealt."""
    prompts: dict[int, Prompt] = field(default_factory=dict)
    """By uid, of what is dealt."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Prompt → the command that asked for its samples, which they are delivered under."""

    def dealt(self, requests: Sequence[Request], place: int, number: int) -> None:
        """An instance has been told these requests, by the command of this number."""
        for request in requests:
            uid = request.prompt.uid
            self.prompts[uid], self.numbers[uid] = request.prompt, number
            self.where |= {(uid, index): place for index in request.indices}

    def running(self, num_instances: int) -> tuple[int, ...]:
        """Unfinished samples of each instance."""
        counts = Counter(self.where.values())
        return tuple(counts[place] for place in range(num_instances))

    def forget_prompts(self) -> None:
        """All samples are delivered."""
        self.prompts.clear()
        self.numbers.clear()


class Dealer:
    """Deals requests to instances: the longest expected first, each to the one with the least expected tokens of its
    rollout, done or not; for a next turn, tokens that would have to be computed again count as well. So who generates
    what depends on the requests alone: who is idle is the clock's to say."""

    def __init__(self, num_instances: int) -> None:
        self._num_instances = num_instances
        self._loads: dict[tuple[NoiseKey, Sampling], list[int]] = {}
        """Rollout → expected tokens of what each instance was given of it, of those that were dealt since the last
        rest. What its requests have in common names it."""
        self._before: dict[tuple[NoiseKey, Sampling], list[int]] = {}
        """The same of those that were dealt between the two last rests, and not since."""
        self._parked: dict[int, int] = {}
        """Prompt → the instance where samples of it lie parked."""
        self._in_turns: dict[int, int] = {}
        """Prompt → the instance that drew its last turns, and holds them."""

    def deal(self, requests: Sequence[Request]) -> list[tuple[int, list[Request]]]:
        """(instance, what it gets, in the order in which it was asked for), by the numbers of the instances."""
        rollout = requests[0].noise, requests[0].sampling
        if rollout not in self._loads:
            self._loads[rollout] = self._before.pop(rollout, [0] * self._num_instances)
        loads = self._loads[rollout]
        shares: dict[int, list[int]] = defaultdict(list)
        for i in sorted(range(len(requests)), key=lambda i: (-expected_tokens(requests[i]), i)):
            parked = self._parked.pop(requests[i].prompt.uid, None)
            place = parked if requests[i].going_on.keeps else None
            if place is None:
                place = self._cheapest(requests[i], loads)
            if requests[i].in_turns:
                self._in_turns[requests[i].prompt.uid] = place
            loads[place] += expected_tokens(requests[i])
            shares[place].append(i)
        return [(place, [requests[i] for i in sorted(members)]) for place, members in sorted(shares.items())]

    def _cheapest(self, request: Request, loads: Sequence[int]) -> int:
        """The instance with the least to compute, where those that do not hold the turns before compute them again."""
        held, again = self._in_turns.get(request.prompt.uid), held_tokens(request)
        return min(range(len(loads)), key=lambda k: (loads[k] + (0 if k == held else again), k))

    def delivered(self, sample: Sample, place: int) -> None:
        """An instance has given a sample out; where it is not finished, it may lie parked there."""
        if sample.finish_reason is FinishReason.OPEN:
            self._parked[sample.prompt.uid] = place

    def rest(self) -> None:
        """All samples are delivered: a rollout that is not dealt before the next rest is over."""
        self._before, self._loads = self._loads, {}

    @property
    def knows_turns(self) -> bool:
        """Whether samples were dealt that may go on when they have ended."""
        return bool(self._in_turns)

    def end_turns(self) -> None:
        """Samples that have ended do not go on: nobody holds their turns."""
        self._in_turns.clear()


def expected_tokens(request: Request) -> int:
    """Tokens of prompt and responses; without recorded lengths, responses that reach their limit."""
    lengths = request.lengths or (request.sampling.max_tokens,) * request.num_samples
    begun = sum(sample.num_tokens for sample in request.going_on.begun)
    return len(request.prompt.token_ids) + sum(lengths[index] for index in request.indices) - begun


def held_tokens(request: Request) -> int:
    """Tokens of prompt and responses that were computed before."""
    return len(request.prompt.token_ids) + sum(sample.num_tokens for sample in request.going_on.begun)
