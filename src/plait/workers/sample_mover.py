"""Samples that go on in another instance, from the ranks of the one to the ranks of the other.

Every rank of both instances makes a `SampleMover`. The bulk of keys and values may go ahead, while both sides go on:

    the target     answer = mover.here(prompts)                     which of the prompts' tokens it has
    the source     given = mover.give(keys, answer, number)         threads begin to send
    the target     mover.take(given, number)                        threads begin to receive

Then, or without that, all ranks of both run `mover.moving(keys)` at the same time: the source offers samples, the
target answers which tokens of them it lacks, keys and values of just these travel by one planned move, re-split by
heads and layers where the instances differ, and the samples go on in the target. A prompt travels once for all its
samples, and not at all as far as the target's pool has its blocks. Nothing is reserved between the stages: what a pool
has lost by then is asked for again. Nothing is asked for of samples that are computed again in the target.

Prompts that were computed for others (keys with PROMPT in place of an index) have no rest: they leave with `give`, and
with `enter` the target has them. Their samples begin there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.generation.moves import SampleMoves
from plait.generation.transfer import SampleState, holdings, parts
from plait.layout.caches import CacheShape
from plait.layout.holdings import Holdings
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import BUCKET_BYTES, plan_move
from plait.layout.move_plan import MovePlan
from plait.models.parallel.peers import Peers
from plait.policy.step import PROMPT, Key
from plait.reallocation.communicator import Channel
from plait.reallocation.memory import allocate
from plait.reallocation.mover import MoveReport, moving
from plait.schedule.update_rule import HeldKV
from plait.schedule.work import Work
from plait.workers.background_move import BackgroundMove
from plait.workers.messages import Message
from plait.workers.ranks import LEADER
from plait.workers.sample_offers import Answer, Given, Lack, Offer, gaps, lacks_of_sample, shares_prompt

_NAME = "samples"
"""The move's, in records and errors."""
_NUM_TAGS = 2
"""Tags of offers and answers: one for their lengths, one for themselves."""
_AHEAD_TAG = 1 << 28
"""Tags from here on belong to what goes ahead, `_TAGS_AHEAD` to each of the last `_MOVES_AHEAD` moves: nothing of one
that was given up is taken for another's."""
_TAGS_AHEAD, _MOVES_AHEAD = 1 << 16, 1 << 12


@dataclass(frozen=True)
class SamplesMoved:
    """What a rank did of a move."""

    keys: tuple[Key, ...]
    """Samples that were offered."""
    lacks: tuple[Lack, ...]
    """What the target asked for."""
    plan: MovePlan
    report: MoveReport
    ahead: MoveReport | None = None
    """The move of what went ahead; None: nothing did."""


@dataclass(frozen=True)
class End:
    """One of the two instances that samples move between, as one rank sees it."""

    layout: Layout
    """An instance (dp 1) of the model."""
    engine: Engine | None = None
    """That of this rank in it; None: it has none there."""


@dataclass(eq=False)
class _Ahead:
    """What goes ahead of samples, on one rank. move: None on ranks of both instances, until it is taken as well"""

    given: Given
    held: Holdings
    """What the target holds."""
    buffers: dict[str, Tensor]
    move: BackgroundMove | None = None


class SampleMover:
    """The way from one instance to another, as one of their ranks sees it.

    Args:
        peers: all ranks of both, and maybe others; nobody else uses their group in `moving`.
        source, target: instances of one model. They may have ranks in common.
        kv: in the target, of samples whose source has another policy version, as of `import_sample`.
            "recompute": their keys and values are not asked for.
        bucket_bytes: longest message; besides the buffers of what moves, a rank needs two such.
    """

    def __init__(
        self, peers: Peers, source: End, target: End, *, kv: HeldKV = "recompute", bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.rank = peers.ranks[peers.index]
        for end in (source, target):
            assert (end.engine is not None) == (self.rank in end.layout.mesh.ranks), f"rank {self.rank} in {end}"
        self._peers, self._source, self._target = peers, source.layout, target.layout
        self._engines = tuple(end.engine for end in (source, target) if end.engine is not None)
        self._giver, self._taker = source.engine, target.engine
        self._leaving, self._entering = (
            None if end.engine is None else SampleMoves(end.engine.state) for end in (source, target)
        )
        self._kv: HeldKV = kv
        self._cluster = Cluster(1, 1 + max(*self._source.mesh.ranks, *self._target.mesh.ranks))
        self._bucket_bytes = bucket_bytes
        self._ahead: _Ahead | None = None
        """What goes ahead, from when it was given or taken."""
        self._arrived: dict[Key, list[SampleState]] = {}
        """In the target: what came of samples (of prompts, with `PROMPT`) that are still in the source."""

    # -- the bulk, which goes ahead

    @property
    def is_through(self) -> bool:
        """Whether what was given is on the other side, or nothing was."""
        return self._ahead is None or self._ahead.move is None or self._ahead.move.is_done

    def here(self, prompts: Sequence[Prompt]) -> Answer:
        """On ranks of the target: what of these prompts is lacking here."""
        moves = self._entering
        assert moves is not None, f"rank {self.rank} is not of the target"
        lacks = [
            Lack(prompt.uid, PROMPT, *gap)
            for prompt in prompts
            for gap in gaps(moves.num_shared(prompt), len(prompt.token_ids), ())
        ]
        return self._answer(moves, lacks)

    def give(self, keys: Sequence[Key], answer: Answer, number: int) -> Given:
        """On ranks of the source: begin to send what there is of samples by now; they go on here meanwhile.

        Args:
            keys: those that have not started, or have ended, are left out.
            answer: of the target, about their prompts.
            number: of the move, which both sides know it by.

        Raises:
            ModelError: the model is in parts, and it is not known which heads a rank has.
        """
        moves, giver = self._leaving, self._giver
        assert moves is not None, f"rank {self.rank} is not of the source"
        assert giver is not None, f"rank {self.rank} has no engine in the source"
        self._have_through()
        giver.land()
        offer = self._offer(moves, keys)
        lacks: list[Lack] = []
        for uid in offer.sharing(answer.policy_version):
            lacks += [lack for lack in answer.lacks if lack.uid == uid]
        for state in offer.states:
            lacks += lacks_of_sample(state, answer.policy_version, (), self._kv)
        given = Given(offer, replace(answer, lacks=tuple(lacks)))
        plan, held = self._planned(given.offer, given.answer)
        self._ahead = _Ahead(given, held[1], self._leave(offer, given.answer, held[0]))
        self._take_out(offer, only=PROMPT)
        if self._entering is None:
            self._ahead.move = self._sent_ahead(plan, self._ahead.buffers, number)
        return given

    def take(self, given: Given, number: int) -> None:
        """On ranks of the target: begin to receive what the source has given."""
        moves = self._entering
        assert moves is not None, f"rank {self.rank} is not of the target"
        if self._ahead is not None and self._ahead.move is not None:
            self._have_through()
        plan, held = self._planned(given.offer, given.answer)
        buffers = {} if self._ahead is None else self._ahead.buffers
        buffers |= allocate(held[1], self.rank, moves.model.device)
        self._ahead = _Ahead(given, held[1], buffers)
        self._ahead.move = self._sent_ahead(plan, buffers, number)

    def _sent_ahead(self, plan: MovePlan, buffers: Mapping[str, Tensor], number: int) -> BackgroundMove:
        assert plan.traffic.num_messages < _TAGS_AHEAD, f"{plan.traffic.num_messages} messages of one move"
        first = _AHEAD_TAG + number % _MOVES_AHEAD * _TAGS_AHEAD
        channel = Channel(self._peers.group, self._peers.timeout_s, first)
        return BackgroundMove(moving(plan, self.rank, buffers, channel, name=_NAME), _NAME)

    def enter(self) -> MoveReport | None:
        """On ranks of both: wait until what was given is on the other side. Its prompts go on in the target."""
        ahead = self._ahead
        report = self._have_through()
        if ahead is not None and self._entering is not None:
            self._take_in(ahead.given.offer, ahead.given.answer.policy_version)
        return report

    def wait(self, seconds: float) -> bool:
        """`is_through`, in so many seconds at most. Raises RunError: something is wrong with what goes ahead."""
        return self._ahead is None or self._ahead.move is None or self._ahead.move.wait(seconds)

    def _have_through(self) -> MoveReport | None:
        """Wait for what goes ahead, and keep what arrived; None: nothing does."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.move is None:
            return None
        others = self._target if self._entering is None else self._source
        with self._peers.waiting_for(f"rank {', '.join(map(str, others.mesh.ranks))} (what goes ahead of {_NAME})"):
            report = ahead.move.finish(self._peers.timeout_s)
        if self._entering is not None:
            self._keep(ahead.given.offer, ahead.given.answer, ahead.held, ahead.buffers)
        return report

    # -- the rest

    def moving(self, keys: Sequence[Key] = (), *, recompute: Collection[Key] = ()) -> Work[SamplesMoved]:
        """Do this rank's part, an action of the move per `next()`: samples leave the source, and are in the target when
        its ranks have come to the end.

        Args:
            keys: on ranks of the source: samples that have started there; those that have ended since are left out.
                Others whose bulk went ahead are given up: they stay.
            recompute: on ranks of the source: those whose keys and values do not travel.

        Raises:
            RunError: a rank is gone, or nothing came from it until the deadline of `peers`.
            ModelError: the model is in parts, and it is not known which heads a rank has.
        """
        for engine in self._engines:
            engine.land()
        ahead = self._have_through()
        offer = self._offered(keys, recompute)
        answer = self._answered(offer)
        plan, held = self._planned(offer, answer)
        buffers = self._leave(offer, answer, held[0])
        self._take_out(offer)
        if self._entering is not None:
            buffers |= allocate(held[1], self.rank, self._entering.model.device)
        channel = Channel(self._peers.group, self._peers.timeout_s, _NUM_TAGS, self._peers.waiting_for)
        report = yield from moving(plan, self.rank, buffers, channel, name=_NAME)
        if self._entering is not None:
            self._keep(offer, answer, held[1], buffers)
            self._take_in(offer, answer.policy_version)
        return SamplesMoved(tuple(state.key for state in offer.states), answer.lacks, plan, report, ahead)

    # -- what is told

    def _offer(self, moves: SampleMoves, keys: Sequence[Key], recompute: Collection[Key] = ()) -> Offer:
        started = [key for key in keys if moves.may_leave(key)]
        states = tuple(moves.export_sample(*key, until=0, final=False) for key in started)
        return Offer(states, tuple(key for key in started if key in recompute))

    def _offered(self, keys: Sequence[Key], recompute: Collection[Key]) -> Offer:
        others = [rank for rank in self._target.mesh.ranks if rank not in self._source.mesh.ranks]
        if self._leaving is None or self._giver is None:
            return Offer.from_message(self._receive(self._source, "an offer of samples"))
        offer = replace(self._offer(self._leaving, keys, recompute), learned=self._giver.speculates.learned())
        if self.rank == _speaker(self._source):
            self._send(others, offer.to_message(), "an offer of samples")
        return offer

    def _answered(self, offer: Offer) -> Answer:
        others = [rank for rank in self._source.mesh.ranks if rank not in self._target.mesh.ranks]
        if self._entering is None:
            return Answer.from_message(self._receive(self._target, "what is lacking of samples"))
        answer = self._answer(self._entering, self._lacking(offer, self._entering))
        if self.rank == _speaker(self._target):
            self._send(others, answer.to_message(), "what is lacking of samples")
        return answer

    def _answer(self, moves: SampleMoves, lacks: Sequence[Lack]) -> Answer:
        return Answer(tuple(lacks), moves.policy_version, moves.cut_shape)

    def _send(self, ranks: Sequence[int], message: Message, what: str) -> None:
        body = torch.frombuffer(message.to_bytes(), dtype=torch.uint8)
        for rank in ranks:
            for tag, tensor in enumerate((torch.tensor([len(body)]), body)):
                self._peers.send(tensor, self._peers.ranks.index(rank), tag, f"{_NAME}: {what}")

    def _receive(self, instance: Layout, what: str) -> Message:
        peer, what = self._peers.ranks.index(_speaker(instance)), f"{_NAME}: {what}"
        size = self._peers.recv(torch.zeros(1, dtype=torch.int64), peer, 0, what)
        body = torch.empty(int(size), dtype=torch.uint8)
        return Message.from_bytes(self._peers.recv(body, peer, 1, what).numpy())

    # -- what is lacking

    def _lacking(self, offer: Offer, moves: SampleMoves) -> list[Lack]:
        """What of the prompts neither the pool nor what went ahead has, and of samples what did not go ahead."""
        self._drop_others(offer)
        lacks = []
        for uid, state in offer.sharing(moves.policy_version).items():
            prompt, arrived = state.request.prompt, self._arrived.get((uid, PROMPT), ())
            ranges = gaps(moves.num_shared(prompt), len(prompt.token_ids), arrived)
            lacks += [Lack(uid, PROMPT, *gap) for gap in ranges]
        for state in offer.states:
            if state.key not in offer.recompute:
                arrived = self._arrived.get(state.key, ())
                lacks += lacks_of_sample(state, moves.policy_version, arrived, self._kv)
        return lacks

    def _drop_others(self, offer: Offer) -> None:
        """Forget what came of samples that ended in the source, or was computed again there."""
        epochs = {key: state.epoch for state in offer.states for key in (state.key, (state.key[0], PROMPT))}
        for key, states in tuple(self._arrived.items()):
            if any(state.epoch != epochs.get(key) for state in states):
                del self._arrived[key]

    # -- keys and values

    def _planned(self, offer: Offer, answer: Answer) -> tuple[MovePlan, tuple[Holdings, Holdings]]:
        """The move of what is lacking; holdings of the source, in its buffer `leaving`, and of the target, in
        `entering`."""
        held = self._holdings(offer, answer)
        return plan_move(*held, self._cluster, bucket_bytes=self._bucket_bytes), held

    def _holdings(self, offer: Offer, answer: Answer) -> tuple[Holdings, Holdings]:
        if not offer.states:
            nothing = Holdings((), "uint8", {}, {})
            return nothing, nothing
        shape, dtype = self._shape(offer, answer), offer.states[0].dtype
        lengths = [lack.length for lack in answer.lacks]
        source = holdings(shape, lengths, self._source, dtype, "leaving")
        return source, holdings(shape, lengths, self._target, dtype, "entering")

    def _shape(self, offer: Offer, answer: Answer) -> CacheShape:
        """As the instance has it that knows more: how ranks divide heads is seen where there are several."""
        source = offer.states[0].shape
        if answer.shape is None or self._source.parallelism.tp > 1:
            return source
        return answer.shape

    def _leave(self, offer: Offer, answer: Answer, held: Holdings) -> dict[str, Tensor]:
        """Copy what is lacking out of the pool."""
        moves = self._leaving
        if moves is None:
            return {}
        buffers, sharing = allocate(held, self.rank, moves.model.device), offer.sharing(answer.policy_version)
        for lack, flat in self._parts(offer, answer, held, buffers):
            key = sharing[lack.uid].key if lack.index == PROMPT else lack.key
            moves.export_sample(*key, since=lack.start, until=lack.stop, final=False, out=flat)
        return buffers

    def _keep(self, offer: Offer, answer: Answer, held: Holdings, buffers: Mapping[str, Tensor]) -> None:
        """Keep what arrived."""
        states, sharing = {state.key: state for state in offer.states}, offer.sharing(answer.policy_version)
        for lack, flat in self._parts(offer, answer, held, buffers):
            state = sharing[lack.uid] if lack.index == PROMPT else states[lack.key]
            stage = replace(state, shape=self._shape(offer, answer), start=lack.start, stop=lack.stop, kv=flat)
            self._arrived.setdefault(lack.key, []).append(stage)

    def _take_out(self, offer: Offer, only: int | None = None) -> None:
        """What is offered leaves the source; with `only`, what has that in place of an index."""
        if self._leaving is None or self._giver is None:
            return
        for state in offer.states:
            if only in (None, state.index):
                self._leaving.export_sample(*state.key, until=0)
        self._giver.rest()

    def _take_in(self, offer: Offer, policy_version: int) -> None:
        """With the last of what arrived the samples, or prompts, go on here.

        Args:
            policy_version: of the target, when it said what it lacks.
        """
        moves = self._entering
        assert moves is not None, f"rank {self.rank} is not of the target"
        assert self._taker is not None, f"rank {self.rank} has no engine in the target"
        for state in offer.states:
            prompt = self._arrived.get((state.key[0], PROMPT), ())
            if state.index == PROMPT:
                self._taker.add(state.request)
                moves.import_prompt(*prompt, state)
                continue
            shared = prompt if shares_prompt(state, policy_version) else ()
            own = () if state.key in offer.recompute else self._arrived.get(state.key, ())
            moves.import_sample(*shared, *own, state, kv="keep")  # it was sent
        self._arrived.clear()
        if offer.learned is not None and self._giver is None:
            self._taker.speculates.learn(offer.learned)

    def _parts(
        self, offer: Offer, answer: Answer, held: Holdings, buffers: Mapping[str, Tensor]
    ) -> Iterator[tuple[Lack, Tensor]]:
        """Each range of tokens that travels, with its part of this rank's buffer of `held`."""
        if answer.lacks:
            names = held.buffers.get(self.rank, {})
            flat = next((buffers[name] for name in names), offer.states[0].kv)
            flat_parts = parts(held, self._shape(offer, answer), len(answer.lacks), self.rank, flat)
            yield from zip(answer.lacks, flat_parts, strict=True)


def _speaker(instance: Layout) -> int:
    """The rank that tells the other instance: the one that says what its steps begin with (`instances.deciding`)."""
    return LEADER if LEADER in instance.mesh.ranks else instance.mesh.ranks[0]
