"""A group on its way through the pool: which calls it needs, and what their outcomes come to.

Pure state, no process: the result is a function of the outcomes, in whatever order they arrive.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.data.records import Sample
from plait.errors import RunError
from plait.rewards.calls import call_arguments
from plait.rewards.function_kinds import REPLY
from plait.rewards.functions import RewardFunction
from plait.rewards.scores import NONE, Failure, FailureKind, GroupScores, Worked, weighted_reward, weighted_turns


@dataclass(eq=False)
class Call:
    """One function over some samples of a group; `places` are their places in it."""

    group: Group
    function: int
    places: tuple[int, ...]
    alone: bool = False
    """A retry of one sample after the call for the whole group failed."""
    again: bool = False
    """Whether this call is made again, for the samples on which the function did not fail when it had each alone: it
    may compare the samples of a group."""
    by_itself: bool = False
    """Whether it gets a worker of its own, because a worker died while it ran this call beside others."""
    lost: int = 0
    """Times that a worker was dead before it could take the call."""


@dataclass
class _Retry:
    """A failed call for the group, its samples being tried alone."""

    kind: FailureKind
    message: str
    traceback: str
    places: tuple[int, ...]
    left: int
    culprits: set[int] = field(default_factory=set)
    """Places of the samples on which the function has failed alone."""


class Group:
    """All samples of one prompt instance, and the functions to score them with."""

    def __init__(
        self, ticket: int, samples: Sequence[Sample], functions: Sequence[RewardFunction], rollout: str = ""
    ) -> None:
        self.ticket = ticket
        self.samples = tuple(samples)
        self.rollout = rollout
        """The call that drew them, where the flow has several."""
        self.failures: list[Failure] = []
        self.worked: list[Worked] = []
        """What its calls took; whoever makes them adds to it."""
        self._pending = 0
        self._functions = tuple(functions)
        self._scores: list[list[float | None]] = [[None] * len(samples) for _ in functions]
        self._by_turn: dict[tuple[int, int], tuple[float, ...]] = {}
        """(function, place) → what the score is the sum of, where the function gave a number for each turn."""
        self._failed_places = {place for place, sample in enumerate(samples) if sample.reply_error}
        self._retries: dict[int, _Retry] = {}
        self._recovered: list[tuple[int, str]] = []
        self._extras: dict[tuple[int, str], list[Any]] = {}
        self._metrics: dict[tuple[int, str], list[float]] = {}

    @property
    def done(self) -> bool:
        return self._pending == 0

    def calls(self) -> list[Call]:
        """One call of each function for the whole group, but for samples to which nobody could reply."""
        places = tuple(place for place in range(len(self.samples)) if place not in self._failed_places)
        calls = [Call(self, index, places) for index in range(len(self._functions)) if places]
        self._pending = len(calls)
        return calls

    def scored(self, call: Call, reply: Mapping[str, Any]) -> list[Call]:
        """A call came back: `scores`, `by_turn` and `faults` by place (see `call_results.check_scores`), `extras`,
        `metrics`. Returns the calls that follow."""
        if call.again:
            self._forget(call)
        for index, place in enumerate(call.places):
            self._scores[call.function][place] = reply["scores"][index]
        for index, turns in reply["by_turn"].items():
            self._by_turn[call.function, call.places[int(index)]] = tuple(turns)
        for column, values in reply["extras"].items():
            whole = self._extras.setdefault((call.function, column), [None] * len(self.samples))
            for place, value in zip(call.places, values, strict=True):
                whole[place] = value
        for name, values in reply["metrics"].items():
            self._metrics.setdefault((call.function, name), []).extend(values)
        for index, message in reply["faults"].items():
            self._blame(call.function, call.places[int(index)], FailureKind.NO_SCORE, message, "")
            if call.alone:
                self._retries[call.function].culprits.add(call.places[int(index)])
        if call.again and not self._retries[call.function].culprits:
            self._passed(call.function, "it was called again for all of them")
        return self._finish(call)

    def failed(self, call: Call, kind: FailureKind, message: str, traceback: str) -> list[Call]:
        """A call failed as a whole. Returns the calls that follow: those that try its samples alone."""
        first, *others = call.places
        if call.again:
            if kind is FailureKind.MISCOUNTED:
                self._blame_all(call.function, call.places, kind, message, traceback)
            else:
                self._passed(call.function, "each has the score that it got alone")
            return self._finish(call)
        if others:
            self._retries[call.function] = _Retry(kind, message, traceback, call.places, left=len(call.places))
            self._pending += len(call.places) - 1
            return [Call(self, call.function, (place,), alone=True) for place in call.places]
        self._blame(call.function, first, kind, message, traceback)
        if call.alone:
            self._retries[call.function].culprits.add(first)
        return self._finish(call)

    def result(self) -> GroupScores:
        assert self.done, "a group has a result when all its calls are done"
        names = [function.name for function in self._functions]
        weights = [function.weight for function in self._functions]
        places = range(len(self.samples))
        place_of = {sample.uid: place for place, sample in enumerate(self.samples)}
        return GroupScores(
            ticket=self.ticket,
            samples=self.samples,
            scores={
                name: tuple(NONE if score is None else score for score in row)
                for name, row in zip(names, self._scores, strict=True)
            },
            rewards=tuple(
                weighted_reward([row[place] for row in self._scores], weights, failed=place in self._failed_places)
                for place in places
            ),
            by_turn=tuple(weighted_turns(self._turns_of(place), weights) for place in places),
            failures=tuple(sorted(self.failures, key=lambda f: (place_of[f.uid], names.index(f.function)))),
            recovered=tuple(message for _, message in sorted(self._recovered)),
            extras={self._extra_name(*key): tuple(values) for key, values in sorted(self._extras.items())},
            metrics={name: tuple(sorted(self._logged(name))) for name in sorted({name for _, name in self._metrics})},
            worked=tuple(self.worked),
        )

    def _turns_of(self, place: int) -> list[tuple[float, ...]]:
        """For each function what it gave each turn of a sample; a score for all of them counts in the last one."""
        before = (0.0,) * (len(self.samples[place].turn_ends) - 1)
        return [
            self._by_turn.get((function, place), (*before, row[place] or 0.0))
            for function, row in enumerate(self._scores)
        ]

    def _extra_name(self, function: int, column: str) -> str:
        """A column that several functions log bears the function's name too, so that none replaces another's."""
        shared = sum(other == column for _, other in self._extras) > 1
        return f"{self._functions[function].name}/{column}" if shared else column

    def _blame(self, function: int, place: int, kind: FailureKind, message: str, traceback: str) -> None:
        sample, called = self.samples[place], self._functions[function]
        asked = sample.prompt.columns.get("prompt")
        prompt = asked if isinstance(asked, str) else sample.prompt.text
        turn = f", turn {len(sample.replies) + 1}" if called.kind is REPLY else ""
        where = sample.prompt.title(sample.index) + turn
        told = (message, traceback, sample.text, prompt)
        self.failures.append(Failure(sample.uid, called.name, kind, *told, called.kind, where))
        self._failed_places.add(place)
        self._scores[function][place] = None

    def _logged(self, metric: str) -> list[float]:
        """Values of a metric, of all functions that have logged it."""
        return [value for (_, name), values in self._metrics.items() if name == metric for value in values]

    def _forget(self, call: Call) -> None:
        """What a function said of samples alone, and says of them together now."""
        for function, column in self._extras:
            for place in call.places if function == call.function else ():
                self._extras[function, column][place] = None
        for place in call.places:
            self._by_turn.pop((call.function, place), None)
        self._metrics = {key: values for key, values in self._metrics.items() if key[0] != call.function}

    def _finish(self, call: Call) -> list[Call]:
        """Returns the calls that follow."""
        self._pending -= 1
        if not call.alone:
            return []
        retry = self._retries[call.function]
        retry.left -= 1
        return [] if retry.left else self._tried(call.function, retry)

    def _tried(self, function: int, retry: _Retry) -> list[Call]:
        """All samples of a call that failed have been tried alone. Returns the calls that follow: a miscount that none
        shows alone is the function's own fault, for all of them; else those on which it has not failed are scored
        together, as it may compare them."""
        if retry.kind is FailureKind.MISCOUNTED and not retry.culprits:
            self._blame_all(function, retry.places, retry.kind, retry.message, retry.traceback)
            return []
        left = tuple(place for place in retry.places if place not in retry.culprits)
        if len(left) < 2:
            return []
        self._pending += 1
        return [Call(self, function, left, again=True)]

    def _blame_all(self, function: int, places: Sequence[int], kind: FailureKind, message: str, traceback: str) -> None:
        for place in places:
            self._blame(function, place, kind, f"{message}, though not for one alone", traceback)

    def _passed(self, function: int, then: str) -> None:
        """Tell of a failure that no sample shows alone: it has passed (a service that was away), or the function cannot
        take so many at once."""
        name, retry = self._functions[function].name, self._retries[function]
        none = "any of the other samples" if retry.culprits else "any sample"
        message = (
            f"reward `{name}` on the group of {self.samples[0].prompt.title()}: {retry.message}, but not on {none}"
        )
        self._recovered.append((function, f"{message} alone: {then}"))


def packed_call(call: Call, name: str, *, number: int, seed: int) -> bytes:
    """What a worker is sent of a call.

    Args:
        name: of the function.
        number: of the call; its answer has it too.
        seed: of random numbers that the function draws.

    Raises:
        RunError: a column cannot be sent to another process.
    """
    samples = [call.group.samples[place] for place in call.places]
    request = {
        "call": number,
        "function": call.function,
        "noise": f"{seed}/{name}/{','.join(sample.uid + '+' * len(sample.turns) for sample in samples)}",
        "arguments": call_arguments(samples, call.group.rollout),
        "texts": [(sample.prompt.text, sample.text) for sample in samples],
        "turns": [len(sample.turn_ends) for sample in samples],
    }
    try:
        return pickle.dumps(request, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(
            f"the columns of {samples[0].prompt.title()} cannot be sent to reward `{name}`: {error}"
        ) from None
