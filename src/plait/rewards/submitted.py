"""The groups that a pool was given: their calls that are to be made, and what the outcomes come to.

Pure state, no process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.data.records import Sample
from plait.errors import RunError
from plait.rewards.functions import RewardFunction
from plait.rewards.group import Call, Group
from plait.rewards.scores import FailureKind, GroupScores
from plait.rewards.settings import OnError


class Submitted:
    """
    Args:
        functions: of the pool; of one kind.
        on_error: STOP raises RunError at a failure; DROP leaves the sample without a reward.
    """

    def __init__(self, functions: Sequence[RewardFunction], on_error: OnError) -> None:
        self.calls: deque[Call] = deque()
        """To be made, the next one first."""
        self._functions = tuple(functions)
        self._on_error = on_error
        self._groups: dict[int, Group] = {}
        self._finished: list[GroupScores] = []
        self._num_submitted = 0
        self._come_back: set[int] = set()
        """Functions of which a forked child came back, to be told with the next scores."""
        self._told: set[int] = set()

    @property
    def num_pending(self) -> int:
        """Groups that have no scores yet."""
        return len(self._groups)

    @property
    def num_finished(self) -> int:
        """Groups whose scores wait to be taken."""
        return len(self._finished)

    def add(self, samples: Sequence[Sample], rollout: str = "") -> int:
        """All samples of one prompt, drawn by a call. Returns the ticket that their scores will carry."""
        assert samples, "a group has at least one sample"
        assert len({sample.prompt.uid for sample in samples}) == 1, "a group is the samples of one prompt instance"
        ticket = self._num_submitted
        self._num_submitted += 1
        self._groups[ticket] = group = Group(ticket, samples, self._functions, rollout)
        self.calls.extend(group.calls())
        self._after(group)  # perhaps there is nothing to ask
        return ticket

    def take(self) -> list[GroupScores]:
        """Scores of the groups that have become done since the last time."""
        finished, self._finished = self._finished, []
        return finished

    def scored(self, call: Call, reply: Mapping[str, Any]) -> None:
        """A call came back, see `Group.scored`. Raises RunError as `failed`."""
        self._after(call.group, call.group.scored(call, reply))

    def failed(self, call: Call, kind: FailureKind, message: str, trace: str) -> None:
        """A call failed as a whole.

        Raises:
            RunError: by that a sample has failed, and failures stop the run.
        """
        self._after(call.group, call.group.failed(call, kind, message, trace))

    def forked(self, function: int) -> None:
        """A child that a function forked came back.

        Raises:
            RunError: failures stop the run.
        """
        if self._on_error is OnError.STOP:
            called = self._functions[function]
            raise RunError(called.forked + called.kind.way_out)
        self._come_back.add(function)

    def make_first(self, calls: Sequence[Call]) -> None:
        """These calls are the next ones."""
        self.calls.extendleft(reversed(calls))

    def make_by_themselves(self, calls: Sequence[Call]) -> None:
        """Make these calls next, each in a worker of its own."""
        for call in calls:
            call.by_itself = True
        self.make_first(calls)

    def _after(self, group: Group, calls: Sequence[Call] = ()) -> None:
        self.make_first(calls)
        if group.failures and self._on_error is OnError.STOP:
            raise RunError(f"{group.failures[0]}{self._functions[0].kind.way_out}")
        if group.done:
            del self._groups[group.ticket]
            remarks = [self._functions[place].forked for place in sorted(self._come_back - self._told)]
            self._told |= self._come_back
            result = group.result()
            self._finished.append(replace(result, recovered=(*result.recovered, *remarks)))
