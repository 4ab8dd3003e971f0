"""A generation engine whose samples have several turns: what follows a turn is asked of a function of the user's.

A round draws one turn of each sample. Whoever has ended its turn is replied to while others are still being drawn; when
all have, those that were replied to go on behind their replies, all at once. So what is computed together depends on
what was said, never on how long a reply took.

A turn that follows is a sample that goes on (`GoingOn`): tokens that were drawn are never written anew, and noise
depends on the position in the response, which counts replies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from plait.data.records import FinishReason, Reply, Sample
from plait.data.replies import ReplyEncoder
from plait.engines import GenerationEngine
from plait.generation.request import GoingOn, Request
from plait.policy.step import Key
from plait.rewards.pool import RewardPool
from plait.rewards.replies import reply_of
from plait.rewards.scores import GroupScores
from plait.runtime.steps.rewarding import record_functions
from plait.schedule.work import MOVED_ON, Done
from plait.workers.recorder import Recorder

CALL = "turns.reply"
"""What replies are in the trace."""


class Replies:
    """Asks the function that replies, for all engines of a run.

    Args:
        pool: calls the function, on one sample at a time.
        recorder: is told what it did.
    """

    def __init__(self, pool: RewardPool, recorder: Recorder) -> None:
        self._pool, self._recorder = pool, recorder
        self._there: dict[int, GroupScores] = {}
        """Ticket → what has come and was not taken."""

    def ask(self, sample: Sample) -> int:
        """Ask for what follows the last turn of a sample, which has all its turns; the ticket of the answer."""
        return self._pool.submit([sample])

    def take(self, tickets: Collection[int]) -> dict[int, list[dict[str, Any]] | None]:
        """Those of these tickets that have been answered, with the messages; None: the conversation is over.

        Raises:
            RunError: the function failed.
        """
        for answer in self._pool.poll():
            self._there[answer.ticket] = answer
            record_functions(self._recorder, CALL, "turns", answer)
        mine = [ticket for ticket in self._there if ticket in tickets]  # few are there, and many may be waited for
        return {ticket: reply_of(self._there.pop(ticket)) for ticket in mine}


class Conversing:
    """`engines.GenerationEngine` over another, which draws the turns.

    Args:
        most: turns of the model in a sample.
        max_positions: of the model.
    """

    moves = None
    """Samples stay in their instances: those that wait for a reply are in none."""

    def __init__(
        self,
        engine: GenerationEngine,
        replies: Replies,
        encoder: ReplyEncoder,
        most: int,
        max_positions: int,
    ) -> None:
        self._engine, self._replies, self._encoder = engine, replies, encoder
        self._most, self._max_positions = most, max_positions
        self.traits, self.model = engine.traits, engine.model
        self._requests: dict[int, Request] = {}
        """By prompt uid, what was asked for."""
        self._asked: dict[int, Sample] = {}
        """Ticket → a sample that waits for its reply."""
        self._going_on: dict[Key, Sample] = {}
        """Samples that have their reply, and go on with the next round."""
        self._said: dict[Key, tuple[Mapping[str, Any], ...]] = {}
        """Sample → its turns and replies so far."""

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def not_compiled(self) -> str | None:
        return self._engine.not_compiled

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_work or self._asked or self._going_on)

    @property
    def ready(self) -> bool:
        """Where only replies are missing it always says so: `advance` looks for them."""
        return self._engine.ready if self._engine.has_work else True

    @property
    def running(self) -> tuple[int, ...]:
        return self._engine.running

    @property
    def said(self) -> Mapping[Key, int]:
        return self._engine.said

    @property
    def at_work(self) -> frozenset[int]:
        return self._engine.at_work

    def add(self, request: Request) -> None:
        """Ask for samples of a prompt; their first turns belong to the round that is under way."""
        self._requests[request.prompt.uid] = request
        self._engine.add(request)

    def advance(self, call: str) -> tuple[Done | None, list[Sample]]:
        """A step of the round, or the beginning of the next one. Returns its record, None while only replies are
        missing; and the samples that have ended, with all their turns.

        Raises:
            RunError: the function failed.
            DataError: a reply cannot be written in the model's tokens.
        """
        ended: list[Sample] = []
        done: Done | None = None
        if self._engine.has_work:
            done, drawn = self._engine.advance(call)
            ended += [sample for sample in map(self._with_turn, drawn) if not self._asks(sample)]
        ended += self._replied()
        if not self._engine.has_work and not self._asked:
            self._begin_round()
            done = done or MOVED_ON
        if not self.has_work:
            self._requests.clear()
        return done, ended

    def halt(self, *, parks: bool) -> None:
        raise AssertionError(f"samples of several turns end with the weights that began them (parks: {parks})")

    def update_weights(self, version: int) -> None:
        self._engine.update_weights(version)

    def _with_turn(self, sample: Sample) -> Sample:
        """A sample as the engine gave it, with all that was said in it; of one turn as it is."""
        key = sample.prompt.uid, sample.index
        said = self._said.pop(key, ())
        return replace(sample, turns=(*said, self._encoder.turn(sample))) if said else sample

    def _asks(self, sample: Sample) -> bool:
        """Whether a turn may be replied to; then the function is asked."""
        if sample.finish_reason is not FinishReason.STOP or len(sample.replies) + 1 >= self._most:
            return False
        self._asked[self._replies.ask(replace(sample, turns=tuple(sample.messages)))] = sample
        return True

    def _replied(self) -> list[Sample]:
        """Take the replies that are there. Returns the samples that end with them."""
        ended = []
        for ticket, messages in self._replies.take(self._asked).items():
            sample = self._asked.pop(ticket)
            if messages is None or not self._goes_on(sample, messages):
                ended.append(sample if messages is None else replace(sample, finish_reason=FinishReason.LENGTH))
        return ended

    def _goes_on(self, sample: Sample, messages: list[dict[str, Any]]) -> bool:
        """Whether a reply leaves room for a token of the next turn; then the sample goes on with the next round."""
        request = self._requests[sample.prompt.uid]
        ids = self._encoder.token_ids(sample, messages, request.sampling.stop)
        if sample.num_tokens + len(ids) >= request.limit(sample.index, self._max_positions):
            return False
        key = sample.prompt.uid, sample.index
        self._said[key] = (*sample.messages, *messages)
        reply = Reply(len(sample.token_ids), ids)
        self._going_on[key] = replace(sample, finish_reason=FinishReason.OPEN, replies=(*sample.replies, reply))
        return True

    def _begin_round(self) -> None:
        """Ask for the next turns, in the order in which the prompts were asked."""
        for uid, request in self._requests.items():
            begun = tuple(
                self._going_on.pop((uid, index)) for index in request.indices if (uid, index) in self._going_on
            )
            if begun:
                others = frozenset(range(request.num_samples)) - {sample.index for sample in begun}
                self._engine.add(replace(request, going_on=GoingOn(begun, left_out=others)))
