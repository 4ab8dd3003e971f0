"""Samples that go on in another instance, from the ranks of the one to the ranks of the other.

Every rank of both instances makes a `SampleMover` and runs `moving` at the same time, in two stages:

    while the source goes on    mover.moving(keys, final=False)     mover.moving()
    then the rest               mover.moving(keys)                  mover.moving()     they go on in the target

In each the source offers samples, the target answers which tokens of them it lacks, and keys and values of just these
travel by one planned move, re-split by heads and layers where the instances differ. A prompt travels once for all its
samples, and not at all as far as the target's pool has its blocks. Nothing is reserved between the stages: what a pool
has lost by then is asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.generation.engine import Engine
from plait.generation.moves import SampleMoves
from plait.generation.records import HeldKV
from plait.generation.transfer import SampleState, holdings, parts
from plait.layout.batches import CacheShape
from plait.layout.holdings import Holdings
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import BUCKET_BYTES, plan_move
from plait.layout.move_plan import MovePlan
from plait.models.parallel.peers import Peers
from plait.policy.step import Key
from plait.reallocation.communicator import Channel
from plait.reallocation.memory import allocate
from plait.reallocation.mover import MoveReport, moving
from plait.schedule.work import Work
from plait.workers.messages import Message
from plait.workers.sample_offers import Answer, Lack, Offer, gaps, shares_prompt

_PROMPT = -1
"""In place of a sample's index: what all samples of a prompt share."""
_NAME = "samples"
"""The move's, in records and errors."""
_NUM_TAGS = 2
"""Tags of offers and answers: one for their lengths, one for themselves."""


@dataclass(frozen=True)
class SamplesMoved:
    """One stage on one rank."""

    keys: tuple[Key, ...]
    """Samples that were offered."""
    lacks: tuple[Lack, ...]
    """What the target asked for."""
    plan: MovePlan
    report: MoveReport


@dataclass(frozen=True)
class End:
    """One of the two instances that samples move between, as one rank sees it."""

    layout: Layout
    """An instance (dp 1) of the model."""
    engine: Engine | None = None
    """That of this rank in it; None: it has none there."""


class SampleMover:
    """The way from one instance to another, as one of their ranks sees it.

    Args:
        peers: all ranks of both, and maybe others; nobody else uses their group while samples move.
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
        self._leaving, self._entering = (
            None if end.engine is None else SampleMoves(end.engine.state) for end in (source, target)
        )
        self._kv = kv
        self._cluster = Cluster(1, 1 + max(*self._source.mesh.ranks, *self._target.mesh.ranks))
        self._bucket_bytes = bucket_bytes
        self._arrived: dict[Key, list[SampleState]] = {}
        """In the target: what came of samples (of prompts, with `_PROMPT`) that are still in the source."""

    def moving(self, keys: Sequence[Key] = (), *, final: bool = True) -> Work[SamplesMoved]:
        """Do this rank's part of one stage, an action of the move per `next()`.

        Between two `next()` engines of one rank may step; ranks of larger instances step together, so not here.

        Args:
            keys: on ranks of the source: samples that have started there; those that have ended since are left out.
                Others whose bulk was moved are given up: they stay.
            final: on ranks of the source: they leave it now, and are in the target when its ranks have come to the end.

        Raises:
            RunError: a rank is gone, or nothing came from it until the deadline of `peers`.
            ModelError: the model is in parts, and which heads a rank has cannot be said.
        """
        for engine in self._engines:
            engine.land()
        offer = self._offered(keys, final)
        answer = self._answered(offer)
        held = self._holdings(offer, answer)
        plan = plan_move(*held, self._cluster, bucket_bytes=self._bucket_bytes)
        buffers = self._leave(offer, answer, held[0])
        if self._entering is not None:
            buffers |= allocate(held[1], self.rank, self._entering.model.device)
        channel = Channel(self._peers.group, self._peers.timeout_s, _NUM_TAGS, self._peers.waiting_for)
        report = yield from moving(plan, self.rank, buffers, channel, name=_NAME)
        if self._entering is not None:
            self._take_in(offer, answer, held[1], buffers)
        return SamplesMoved(tuple(state.key for state in offer.states), answer.lacks, plan, report)

    # -- what is told

    def _offered(self, keys: Sequence[Key], final: bool) -> Offer:
        others = [rank for rank in self._target.mesh.ranks if rank not in self._source.mesh.ranks]
        if self._leaving is None:
            return Offer.from_message(self._receive(self._source, "an offer of samples"))
        here = [key for key in keys if key in self._leaving.started]
        offer = Offer(tuple(self._leaving.export_sample(*key, until=0, final=False) for key in here), final)
        if self.rank == self._source.mesh.ranks[0]:
            self._send(others, offer.to_message(), "an offer of samples")
        return offer

    def _answered(self, offer: Offer) -> Answer:
        others = [rank for rank in self._source.mesh.ranks if rank not in self._target.mesh.ranks]
        if self._entering is None:
            return Answer.from_message(self._receive(self._target, "what is lacking of samples"))
        part = self._entering.model.part
        shape = None if part is None else part.cache
        answer = Answer(tuple(self._lacking(offer, self._entering)), self._entering.policy_version, shape)
        if self.rank == self._target.mesh.ranks[0]:
            self._send(others, answer.to_message(), "what is lacking of samples")
        return answer

    def _send(self, ranks: Sequence[int], message: Message, what: str) -> None:
        body = torch.frombuffer(message.to_bytes(), dtype=torch.uint8)
        for rank in ranks:
            for tag, tensor in enumerate((torch.tensor([len(body)]), body)):
                self._peers.send(tensor, self._peers.ranks.index(rank), tag, f"{_NAME}: {what}")

    def _receive(self, instance: Layout, what: str) -> Message:
        peer, what = self._peers.ranks.index(instance.mesh.ranks[0]), f"{_NAME}: {what}"
        size = self._peers.recv(torch.zeros(1, dtype=torch.int64), peer, 0, what)
        body = torch.empty(int(size), dtype=torch.uint8)
        return Message.from_bytes(self._peers.recv(body, peer, 1, what).numpy())

    # -- what is lacking

    def _lacking(self, offer: Offer, moves: SampleMoves) -> list[Lack]:
        """What of the prompts neither the pool nor an earlier stage has, and of samples no earlier stage brought."""
        self._drop_others(offer)
        lacks = []
        for uid, state in offer.sharing(moves.policy_version).items():
            request = state.request
            ranges = gaps(
                moves.num_shared(request), len(request.prompt.token_ids), self._arrived.get((uid, _PROMPT), ())
            )
            lacks += [Lack(uid, _PROMPT, *each) for each in ranges]
        for state in offer.states:
            if state.policy_version != moves.policy_version and self._kv == "recompute":
                continue
            shares = shares_prompt(state, moves.policy_version)
            first = len(state.request.prompt.token_ids) if shares else 0
            lacks += [
                Lack(*state.key, *each)
                for each in gaps(first, state.num_computed_tokens, self._arrived.get(state.key, ()))
            ]
        return lacks

    def _drop_others(self, offer: Offer) -> None:
        """Forget what came of samples that ended in the source, or was computed again there."""
        epochs = {key: state.epoch for state in offer.states for key in (state.key, (state.key[0], _PROMPT))}
        for key, states in tuple(self._arrived.items()):
            if any(state.epoch != epochs.get(key) for state in states):
                del self._arrived[key]

    # -- keys and values

    def _holdings(self, offer: Offer, answer: Answer) -> tuple[Holdings, Holdings]:
        """Holdings of the source, in its buffer `leaving`, and of the target, in `entering`."""
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
        """Copy what is lacking out of the pool; what leaves for good leaves now."""
        moves = self._leaving
        if moves is None:
            return {}
        buffers, sharing = allocate(held, self.rank, moves.model.device), offer.sharing(answer.policy_version)
        for lack, flat in self._parts(offer, answer, held, buffers):
            key = sharing[lack.uid].key if lack.index == _PROMPT else lack.key
            moves.export_sample(*key, since=lack.start, until=lack.stop, final=False, out=flat)
        if offer.final:
            for state in offer.states:
                moves.export_sample(*state.key, until=0)
        return buffers

    def _take_in(self, offer: Offer, answer: Answer, held: Holdings, buffers: Mapping[str, Tensor]) -> None:
        """Keep what arrived; with the last of it the samples go on here."""
        moves = self._entering
        assert moves is not None, f"rank {self.rank} is not of the target"
        states, sharing = {state.key: state for state in offer.states}, offer.sharing(answer.policy_version)
        for lack, flat in self._parts(offer, answer, held, buffers):
            state = sharing[lack.uid] if lack.index == _PROMPT else states[lack.key]
            stage = replace(state, shape=self._shape(offer, answer), start=lack.start, stop=lack.stop, kv=flat)
            self._arrived.setdefault(lack.key, []).append(stage)
        if offer.final:
            for state in offer.states:
                prompt = self._arrived.get((state.key[0], _PROMPT), ())
                shared = prompt if shares_prompt(state, answer.policy_version) else ()
                moves.import_sample(*shared, *self._arrived.get(state.key, ()), state, kv="keep")  # it was sent
            self._arrived.clear()

    def _parts(
        self, offer: Offer, answer: Answer, held: Holdings, buffers: Mapping[str, Tensor]
    ) -> Iterator[tuple[Lack, Tensor]]:
        """Each range of tokens that travels, with its part of this rank's buffer of `held`."""
        if answer.lacks:
            names = held.buffers.get(self.rank, {})
            flat = next((buffers[name] for name in names), offer.states[0].kv)
            found = parts(held, self._shape(offer, answer), len(answer.lacks), self.rank, flat)
            yield from zip(answer.lacks, found, strict=True)
