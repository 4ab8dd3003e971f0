"""The two ends of a move of samples, each on one rank: what the source offers and sends, what the target lacks, keeps
and goes on with; and between them what travels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from plait.data.records import Prompt
from plait.generation.engine import Engine
from plait.generation.moves import SampleMoves
from plait.generation.transfer import SampleState, holdings, parts
from plait.layout.caches import CacheShape
from plait.layout.holdings import Holdings
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.move_plan import MovePlan
from plait.policy.step import PROMPT, Key
from plait.reallocation.memory import allocate
from plait.schedule.update_rule import HeldKV
from plait.workers.sample_offers import Answer, Given, Lack, Offer, gaps, lacks_of_sample, shares_prompt


@dataclass(frozen=True)
class Transfer:
    """What travels of samples: the keys and values that the target lacks, re-split by heads and layers where the
    instances differ."""

    given: Given
    source: Layout
    """The instance that the samples leave."""
    leaving: Holdings
    """Where it lies in the source, in the buffer `leaving`."""
    entering: Holdings
    """Where it lies in the target, in the buffer `entering`."""
    plan: MovePlan

    @classmethod
    def of(cls, given: Given, source: Layout, target: Layout, bucket_bytes: int) -> Self:
        """
        Args:
            source, target: the instances.
            bucket_bytes: longest message.
        """
        leaving = entering = Holdings((), "uint8", {}, {})
        if given.offer.states:
            shape, dtype = _shape(given, source), given.offer.states[0].dtype
            lengths = [lack.length for lack in given.answer.lacks]
            leaving = holdings(shape, lengths, source, dtype, "leaving")
            entering = holdings(shape, lengths, target, dtype, "entering")
        cluster = Cluster(1, 1 + max(*source.mesh.ranks, *target.mesh.ranks))
        return cls(given, source, leaving, entering, plan_move(leaving, entering, cluster, bucket_bytes=bucket_bytes))

    @property
    def shape(self) -> CacheShape:
        return _shape(self.given, self.source)

    @property
    def sharing(self) -> dict[int, SampleState]:
        """See `Offer.sharing`."""
        return self.given.offer.sharing(self.given.answer.policy_version)

    def parts(self, held: Holdings, rank: int, buffers: Mapping[str, Tensor]) -> Iterator[tuple[Lack, Tensor]]:
        """Each range of tokens that travels, with its part [elements] of a rank's buffer [elements, flat] of `held`."""
        if lacks := self.given.answer.lacks:
            flat = next((buffers[name] for name in held.buffers.get(rank, {})), self.given.offer.states[0].kv)
            yield from zip(lacks, parts(held, self.shape, len(lacks), rank, flat), strict=True)


def _shape(given: Given, source: Layout) -> CacheShape:
    """As the instance has it that knows more: how ranks divide heads is seen where there are several."""
    of_source, of_target = given.offer.states[0].shape, given.answer.shape
    return of_source if of_target is None or source.parallelism.tp > 1 else of_target


class Source:
    """The instance that samples leave, on one of its ranks."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine, self._rank = engine, rank
        self._moves = SampleMoves(engine.state)

    def offer(self, keys: Sequence[Key], recompute: Collection[Key] = ()) -> Offer:
        """Those of the samples that have started and not ended.

        Args:
            recompute: those whose keys and values do not travel.
        """
        started = [key for key in keys if self._moves.may_leave(key)]
        states = tuple(self._moves.export_sample(*key, until=0, final=False) for key in started)
        return Offer(states, tuple(key for key in started if key in recompute))

    def ahead(self, keys: Sequence[Key], answer: Answer, kv: HeldKV) -> Given:
        """What there is of the samples by now, and what of it goes ahead.

        Args:
            answer: of the target, about their prompts.
            kv: as of `SampleMover`.
        """
        offer = self.offer(keys)
        lacks = [lack for uid in offer.sharing(answer.policy_version) for lack in answer.lacks if lack.uid == uid]
        for state in offer.states:
            lacks += lacks_of_sample(state, answer.policy_version, (), kv)
        return Given(offer, replace(answer, lacks=tuple(lacks)))

    def leave(self, transfer: Transfer) -> dict[str, Tensor]:
        """Copy what travels out of the pool; the buffers [elements, flat] that it is sent from, by their names."""
        buffers = allocate(transfer.leaving, self._rank, self._moves.model.device)
        sharing = transfer.sharing
        for lack, flat in transfer.parts(transfer.leaving, self._rank, buffers):
            key = sharing[lack.uid].key if lack.index == PROMPT else lack.key
            self._moves.export_sample(*key, since=lack.start, until=lack.stop, final=False, out=flat)
        return buffers

    def take_out(self, offer: Offer, only: int | None = None) -> None:
        """Take the offered samples out of the engine; with `only`, those with that index."""
        for state in offer.states:
            if only in (None, state.index):
                self._moves.export_sample(*state.key, until=0)
        self.engine.rest()


class Target:
    """The instance that samples go on in, on one of its ranks.

    Args:
        kv: as of `SampleMover`.
    """

    def __init__(self, engine: Engine, rank: int, kv: HeldKV) -> None:
        self.engine, self._rank = engine, rank
        self._kv: HeldKV = kv
        self._moves = SampleMoves(engine.state)
        self._arrived: dict[Key, list[SampleState]] = {}
        """What came of samples (of prompts, with `PROMPT`) that are still in the source."""

    def here(self, prompts: Sequence[Prompt]) -> Answer:
        """What of these prompts is lacking."""
        return self._answer(
            Lack(prompt.uid, PROMPT, *gap)
            for prompt in prompts
            for gap in gaps(self._moves.num_shared(prompt), len(prompt.token_ids), ())
        )

    def lacking(self, offer: Offer) -> Answer:
        """What of the prompts neither the pool nor what went ahead has, and of samples what did not go ahead."""
        self._drop_others(offer)
        version, lacks = self._moves.policy_version, []
        for uid, state in offer.sharing(version).items():
            prompt, arrived = state.request.prompt, self._arrived.get((uid, PROMPT), ())
            ranges = gaps(self._moves.num_shared(prompt), len(prompt.token_ids), arrived)
            lacks += [Lack(uid, PROMPT, *gap) for gap in ranges]
        for state in offer.states:
            if state.key not in offer.recompute:
                lacks += lacks_of_sample(state, version, self._arrived.get(state.key, ()), self._kv)
        return self._answer(lacks)

    def _answer(self, lacks: Iterable[Lack]) -> Answer:
        return Answer(tuple(lacks), self._moves.policy_version, self._moves.cut_shape)

    def _drop_others(self, offer: Offer) -> None:
        """Forget what came of samples that ended in the source, or were computed again there."""
        epochs = {key: state.epoch for state in offer.states for key in (state.key, (state.key[0], PROMPT))}
        for key, states in tuple(self._arrived.items()):
            if any(state.epoch != epochs.get(key) for state in states):
                del self._arrived[key]

    def room(self, transfer: Transfer) -> dict[str, Tensor]:
        """The buffers [elements, flat] that what travels is received in, by their names."""
        return allocate(transfer.entering, self._rank, self._moves.model.device)

    def keep(self, transfer: Transfer, buffers: Mapping[str, Tensor]) -> None:
        """What travels has arrived in `buffers` (of `room`, [elements, flat]): keep it until the samples go on here."""
        states, sharing = {state.key: state for state in transfer.given.offer.states}, transfer.sharing
        for lack, flat in transfer.parts(transfer.entering, self._rank, buffers):
            state = sharing[lack.uid] if lack.index == PROMPT else states[lack.key]
            stage = replace(state, shape=transfer.shape, start=lack.start, stop=lack.stop, kv=flat)
            self._arrived.setdefault(lack.key, []).append(stage)

    def take_in(self, given: Given, *, learns: bool) -> None:
        """All that travels has arrived: the samples, or prompts, go on here.

        Args:
            given: as of the last transfer.
            learns: whether the engine learns of drafts what the source knows.
        """
        offer = given.offer
        for state in offer.states:
            prompt = self._arrived.get((state.key[0], PROMPT), ())
            if state.index == PROMPT:
                self.engine.add(state.request)
                self._moves.import_prompt(*prompt, state)
                continue
            shared = prompt if shares_prompt(state, given.answer.policy_version) else ()
            own = () if state.key in offer.recompute else self._arrived.get(state.key, ())
            self._moves.import_sample(*shared, *own, state, kv="keep")  # it was sent
        self._arrived.clear()
        if offer.learned is not None and learns:
            self.engine.speculates.learn(offer.learned)
