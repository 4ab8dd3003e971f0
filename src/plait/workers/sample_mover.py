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

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.layout.mesh import Layout
from plait.layout.move import BUCKET_BYTES
from plait.layout.move_plan import MovePlan
from plait.models.parallel.peers import Peers
from plait.policy.step import PROMPT, Key
from plait.reallocation.communicator import Channel
from plait.reallocation.mover import MoveReport, moving
from plait.schedule.update_rule import HeldKV
from plait.schedule.work import Work
from plait.workers.background_move import BackgroundMove
from plait.workers.messages import Message
from plait.workers.ranks import LEADER
from plait.workers.sample_ends import Source, Target, Transfer
from plait.workers.sample_offers import Answer, Given, Lack, Offer

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
    ahead: MoveReport | None
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
    """What goes ahead of samples, on one rank."""

    transfer: Transfer
    buffers: dict[str, Tensor]
    move: BackgroundMove | None = None
    """None on ranks of both instances until it is taken as well."""


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
        self._peers, self._between = peers, (source.layout, target.layout)
        self._source = None if source.engine is None else Source(source.engine, self.rank)
        self._target = None if target.engine is None else Target(target.engine, self.rank, kv)
        self._device = next(end.engine.state.model.device for end in (source, target) if end.engine is not None)
        self._kv: HeldKV = kv
        self._bucket_bytes = bucket_bytes
        self._ahead: _Ahead | None = None
        """What goes ahead, from when it was given or taken."""

    # -- the bulk, which goes ahead

    @property
    def is_through(self) -> bool:
        """Whether what was given is on the other side, or nothing was."""
        return self._ahead is None or self._ahead.move is None or self._ahead.move.is_done

    def here(self, prompts: Sequence[Prompt]) -> Answer:
        """On ranks of the target: what of these prompts is lacking here."""
        assert self._target is not None, f"rank {self.rank} is not of the target"
        return self._target.here(prompts)

    def give(self, keys: Sequence[Key], answer: Answer, number: int) -> Given:
        """On ranks of the source: begin to send what there is of samples by now; they go on here meanwhile.

        Args:
            keys: those that have not started, or have ended, are left out.
            answer: of the target, about their prompts.
            number: of the move, which both sides know it by.

        Raises:
            ModelError: the model is in parts, and it is not known which heads a rank has.
        """
        source = self._source
        assert source is not None, f"rank {self.rank} is not of the source"
        self._have_through()
        source.engine.land()
        transfer = self._transfer(source.ahead(keys, answer, self._kv))
        self._ahead = _Ahead(transfer, source.leave(transfer))
        source.take_out(transfer.given.offer, only=PROMPT)
        if self._target is None:
            self._begin(self._ahead, number)
        return transfer.given

    def take(self, given: Given, number: int) -> None:
        """On ranks of the target: begin to receive what the source has given."""
        assert self._target is not None, f"rank {self.rank} is not of the target"
        if self._ahead is not None and self._ahead.move is not None:
            self._have_through()
        transfer = self._transfer(given)
        buffers = {} if self._ahead is None else self._ahead.buffers
        self._ahead = _Ahead(transfer, buffers | self._target.room(transfer))
        self._begin(self._ahead, number)

    def _begin(self, ahead: _Ahead, number: int) -> None:
        """Threads begin to send or to receive it."""
        plan = ahead.transfer.plan
        assert plan.traffic.num_messages < _TAGS_AHEAD, f"{plan.traffic.num_messages} messages of one move"
        first = _AHEAD_TAG + number % _MOVES_AHEAD * _TAGS_AHEAD
        channel = Channel(self._peers.group, self._peers.timeout_s, first)
        work = moving(plan, self.rank, ahead.buffers, channel, name=_NAME)
        ahead.move = BackgroundMove(work, _NAME, self._device)

    def enter(self) -> MoveReport | None:
        """On ranks of both: wait until what was given is on the other side. Its prompts go on in the target."""
        ahead = self._ahead
        report = self._have_through()
        if ahead is not None:
            self._take_in(ahead.transfer.given)
        return report

    def wait(self, seconds: float) -> bool:
        """`is_through`, in so many seconds at most. Raises RunError: something is wrong with what goes ahead."""
        return self._ahead is None or self._ahead.move is None or self._ahead.move.wait(seconds)

    def _have_through(self) -> MoveReport | None:
        """Wait for what goes ahead, and keep what arrived; None: nothing does."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.move is None:
            return None
        source, target = self._between
        others = target if self._target is None else source
        with self._peers.waiting_for(f"rank {', '.join(map(str, others.mesh.ranks))} (what goes ahead of {_NAME})"):
            report = ahead.move.finish(self._peers.timeout_s)
        if self._target is not None:
            self._target.keep(ahead.transfer, ahead.buffers)
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
        for end in (self._source, self._target):
            if end is not None:
                end.engine.land()
        ahead = self._have_through()
        offer = self._offered(keys, recompute)
        transfer = self._transfer(Given(offer, self._answered(offer)))
        buffers: dict[str, Tensor] = {}
        if self._source is not None:
            buffers |= self._source.leave(transfer)
            self._source.take_out(offer)
        if self._target is not None:
            buffers |= self._target.room(transfer)
        channel = Channel(self._peers.group, self._peers.timeout_s, _NUM_TAGS, self._peers.waiting_for)
        report = yield from moving(transfer.plan, self.rank, buffers, channel, name=_NAME)
        if self._target is not None:
            self._target.keep(transfer, buffers)
        self._take_in(transfer.given)
        lacks = transfer.given.answer.lacks
        return SamplesMoved(tuple(state.key for state in offer.states), lacks, transfer.plan, report, ahead)

    def _transfer(self, given: Given) -> Transfer:
        return Transfer.of(given, *self._between, self._bucket_bytes)

    def _take_in(self, given: Given) -> None:
        if self._target is not None:
            self._target.take_in(given, learns=self._source is None)

    # -- what is told

    def _offered(self, keys: Sequence[Key], recompute: Collection[Key]) -> Offer:
        source, target = self._between
        if self._source is None:
            return Offer.of(self._receive(source, "an offer of samples"))
        offer = replace(self._source.offer(keys, recompute), learned=self._source.engine.speculates.learned())
        if self.rank == _speaker(source):
            others = [rank for rank in target.mesh.ranks if rank not in source.mesh.ranks]
            self._send(others, offer.to_message(), "an offer of samples")
        return offer

    def _answered(self, offer: Offer) -> Answer:
        source, target = self._between
        if self._target is None:
            return Answer.of(self._receive(target, "what is lacking of samples"))
        answer = self._target.lacking(offer)
        if self.rank == _speaker(target):
            others = [rank for rank in source.mesh.ranks if rank not in target.mesh.ranks]
            self._send(others, answer.to_message(), "what is lacking of samples")
        return answer

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


def _speaker(instance: Layout) -> int:
    """The rank that tells the other instance: the one that says what its steps begin with (`instances.deciding`)."""
    return LEADER if LEADER in instance.mesh.ranks else instance.mesh.ranks[0]
