"""A generation engine whose samples have several turns: what follows a turn is asked of a function of the user's.

Samples go on in rounds: each draws a turn; whoever has ended it is replied to while others are still being drawn; when
all are there, those that were replied to go on behind their replies, all at once. Where all samples of a step are in
one round, what is computed together depends on what was said, never on how long a reply took. Where each prompt has
rounds of its own, none waits for the tools of another; so it is where samples go on with new weights, as the clock
decides how far they are then anyway (`recipes.turn_checks.rounds_by_prompt`).

A turn that follows is a sample that goes on (`GoingOn`): tokens that were drawn are never written anew, and noise
depends on the position in the response, which counts replies. Samples that halt for new weights stand within a turn,
behind a reply, or where they wait for one: nobody waits for it then, and it is taken when they go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.data.records import FinishReason, Reply, Sample
from plait.data.replies import ReplyEncoder
from plait.engines import GenerationEngine
from plait.generation.refused import Refusals
from plait.generation.request import Request
from plait.policy.step import Key
from plait.rewards.pool import RewardPool
from plait.rewards.replies import reply_of
from plait.rewards.scores import Failure, GroupScores
from plait.runtime.steps.function_reports import FunctionReports
from plait.schedule.work import MOVED_ON, Done

ALL = -1
"""The round of all samples."""
CALL = "turns.reply"
"""What replies are in the trace."""


class Replies:
    """Asks the function that replies, for all engines of a run.

    Args:
        pool: calls the function, on one sample at a time.
        report: is told what it did, and how it failed, where the run goes on.
    """

    def __init__(self, pool: RewardPool, report: FunctionReports) -> None:
        self._pool, self._report = pool, report
        self._there: dict[int, GroupScores] = {}
        """Ticket → what has come and was not taken."""

    def ask(self, sample: Sample, rollout: str) -> int:
        """Ask for what follows the last turn of a sample, which has all its turns; the ticket of the answer.

        Args:
            rollout: see `RewardPool.submit`.
        """
        return self._pool.submit([sample], rollout)

    def hear(self) -> bool:
        """Take in what has come, whoever asked for it; whether anything has. Raises RunError: the function failed, and
        its policy is to stop."""
        answers = self._pool.poll()
        for answer in answers:
            self._there[answer.ticket] = answer
            self._report(CALL, "turns", answer)
        return bool(answers)

    def take(self, tickets: Collection[int]) -> dict[int, list[dict[str, Any]] | Failure | None]:
        """Those of these tickets that have been answered, each with what `reply_of` says."""
        mine = [ticket for ticket in self._there if ticket in tickets]  # few are there, and many may be waited for
        return {ticket: reply_of(self._there.pop(ticket)) for ticket in mine}


class Conversing:
    """`engines.GenerationEngine` over another, which draws the turns.

    Args:
        most: turns of the model in a sample.
        max_positions: of the model.
        by_prompt: whether samples of different prompts go on without each other.
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
        *,
        by_prompt: bool,
    ) -> None:
        self._engine, self._replies, self._encoder = engine, replies, encoder
        self._most, self._max_positions, self._by_prompt = most, max_positions, by_prompt
        self.traits, self.model = engine.traits, engine.model
        self._requests: dict[int, Request] = {}
        """By prompt uid, what was asked for."""
        self._begun: dict[Key, Sample] = {}
        """Samples that went on with a round under way and have not come back, as they were when it began."""
        self._asked: dict[int, Sample] = {}
        """Ticket → a sample that waits for its reply."""
        self._pending: dict[Key, int] = {}
        """Sample that has halted and waits for its reply → the ticket."""
        self._going_on: dict[Key, Sample] = {}
        """Samples that have their reply, and go on with the next round."""
        self._left = Counter[int]()
        """Round → its samples that are being drawn, or wait for a reply. A prompt's has its uid; that of all is ALL."""
        self._within: set[int] = set()
        """Prompts of which a sample has stopped within a turn."""
        self._halted = False

    @property
    def refusals(self) -> Refusals:
        return self._engine.refusals

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_work or self._begun or self._asked or self._going_on)

    @property
    def ready(self) -> bool:
        """Where replies are missing it always says so: `advance` looks for them."""
        return bool(self._asked) or not self._engine.has_work or self._engine.ready

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
        """Ask for samples of a prompt; their first turns, or those that they are in, belong to the round under way."""
        request = replace(request, in_turns=not request.one_turn)
        self._requests[request.prompt.uid] = request
        self._begin(request)

    def advance(self, call: str) -> tuple[Done | None, list[Sample]]:
        """A step of the engine, and the beginning of the next rounds. Returns a record, None while only replies are
        missing; and the samples that have ended, with all their turns, or that stop as they are.

        Raises:
            RunError: the function failed, and its policy is to stop.
            DataError: a reply cannot be written in the model's tokens.
        """
        done: Done | None = None
        drawn: list[Sample] = []
        if self._engine.has_work and self._engine.ready:
            done, drawn = self._engine.advance(call)
        back = [sample for sample in map(self._back, drawn) if sample is not None]
        has_news = self._replies.hear()  # perhaps for another engine, which is to look again before anybody waits
        back += self._replied()
        ended = [sample for sample in back if not self._goes_on(sample)]
        if not self._halted:
            ended += self._begin_rounds(dict.fromkeys(self._round_of(sample.prompt.uid) for sample in back))
        elif not self._engine.has_work:
            ended += self._stopped()
        done = done or (MOVED_ON if back or has_news else None)
        if not self.has_work:
            self._engine.end_turns()
            self._requests.clear()
            self._left.clear()
            self._within.clear()
            self._halted = False
        return done, ended

    def halt(self, *, parks: bool) -> None:
        """See GenerationEngine."""
        self._halted = True
        self._engine.halt(parks=parks)

    def end_turns(self) -> None:
        """See GenerationEngine: it is known here when no sample goes on."""

    def update_weights(self, version: int) -> None:
        self._engine.update_weights(version)

    def _round_of(self, uid: int) -> int:
        """The round of a prompt."""
        return uid if self._by_prompt else ALL

    def _begin(self, request: Request) -> None:
        """Have the turns drawn that the samples of a request are in, or begin; of others the reply is awaited."""
        self._left[self._round_of(request.prompt.uid)] += len(request.indices)
        waiting = [sample for sample in request.going_on.begun if sample.waits]
        for sample in waiting:
            self._ask(sample)
        begun = tuple(sample for sample in request.going_on.begun if not sample.waits)
        self._begun |= {_key(sample): sample for sample in begun}
        left_out = request.going_on.left_out.union(sample.index for sample in waiting)
        drawn = replace(request, going_on=replace(request.going_on, begun=begun, left_out=left_out))
        if drawn.indices:
            self._engine.add(drawn)

    def _ask(self, sample: Sample) -> None:
        """Have a reply made to the last turn of a sample, if that has not begun."""
        ticket = self._pending.pop(_key(sample), None)
        if ticket is None:
            ticket = self._replies.ask(sample, self._requests[sample.prompt.uid].rollout)
        self._asked[ticket] = sample

    def _back(self, sample: Sample) -> Sample | None:
        """A sample that the engine gives back, with what was said in it; None: it waits for a reply. Of one turn as it
        is."""
        begun = self._begun.pop(_key(sample), None)
        is_over = sample.finish_reason is not FinishReason.OPEN
        if begun is not None and begun.turns:
            sample = replace(sample, turns=(*begun.turns, self._encoder.turn(sample)) if is_over else begun.turns)
        most = 1 if self._requests[sample.prompt.uid].one_turn else self._most
        if sample.finish_reason is not FinishReason.STOP or len(sample.replies) + 1 >= most:
            return sample
        waiting = replace(sample, finish_reason=FinishReason.OPEN, turns=tuple(sample.messages))
        if self._stops(waiting):
            return waiting
        self._ask(waiting)
        return None

    def _replied(self) -> list[Sample]:
        """Take the replies that are there. Returns their samples: unfinished behind them, or ended."""
        taken = [(self._asked.pop(ticket), reply) for ticket, reply in self._replies.take(self._asked).items()]
        return [self._behind(sample, reply) for sample, reply in taken]

    def _behind(self, sample: Sample, messages: Sequence[Mapping[str, Any]] | Failure | None) -> Sample:
        """A sample behind a reply. It ends without one, and is cut where that leaves no room for a token of the next
        turn."""
        turns = sample.turns if sample.replies else ()
        if isinstance(messages, Failure):
            return replace(sample, finish_reason=FinishReason.ABORTED, turns=turns, reply_error=messages.error)
        request = self._requests[sample.prompt.uid]
        ids = () if messages is None else self._encoder.token_ids(sample, messages, request.sampling.stop)
        is_cut = sample.num_tokens + len(ids) >= request.limit(sample.index, self._max_positions)
        if messages is None or is_cut:
            reason = FinishReason.STOP if messages is None else FinishReason.LENGTH
            return replace(sample, finish_reason=reason, turns=turns)
        replies = (*sample.replies, Reply(len(sample.token_ids), ids))
        return replace(sample, replies=replies, turns=(*sample.turns, *messages))

    def _goes_on(self, sample: Sample) -> bool:
        """Whether a sample that left a round is in the next one."""
        self._left[self._round_of(sample.prompt.uid)] -= 1
        if sample.finish_reason is not FinishReason.OPEN or not sample.ends_with_reply or self._stops(sample):
            if sample.is_within_turn:
                self._within.add(sample.prompt.uid)
            return False
        self._going_on[_key(sample)] = sample
        return True

    def _stops(self, sample: Sample) -> bool:
        """Whether a sample is to stop where it is (`GoingOn.stops`), or was to before a reply that was shorter then."""
        stop = self._requests[sample.prompt.uid].going_on.stops.get(sample.index)
        return stop is not None and stop <= sample.num_tokens

    def _stopped(self) -> list[Sample]:
        """Those that have halted between two turns; for some the next round had been asked for."""
        stopped = [*self._begun.values(), *self._asked.values(), *self._going_on.values()]
        self._pending |= {_key(sample): ticket for ticket, sample in self._asked.items()}
        self._begun, self._asked, self._going_on = {}, {}, {}
        return stopped

    def _begin_rounds(self, rounds: Iterable[int]) -> list[Sample]:
        """Ask for the next turns where all samples of a round are there, in the order in which prompts were asked.
        Returns those that do not go on: if one of a prompt has stopped within its turn, nobody of it was in a later one
        then, whatever is replied now; so all that lies parked of a prompt is in one instance."""
        stopped: list[Sample] = []
        over = [number for number in rounds if not self._left[number]]
        for uid in self._requests if ALL in over else over:
            request = self._requests[uid]
            begun = tuple(
                self._going_on.pop((uid, index)) for index in request.indices if (uid, index) in self._going_on
            )
            if uid in self._within:
                stopped += begun
            elif begun:
                others = frozenset(range(request.num_samples)) - {sample.index for sample in begun}
                going_on = replace(request.going_on, begun=begun, left_out=others, keeps=frozenset())
                self._begin(replace(request, going_on=going_on))
        return stopped


def _key(sample: Sample) -> Key:
    return sample.prompt.uid, sample.index
