"""The state of an engine: samples in flight, their scheduler, their keys and values, their rows in the batch.

`engine.Engine` steps it; `moves.SampleMoves` takes samples out of it and puts others in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from plait.data.experts import Experts
from plait.data.records import FinishReason, Sample
from plait.generation.checks import allow
from plait.generation.decode_batch import UNKNOWN, DecodeBatch
from plait.generation.flight import Drawn, InFlight
from plait.generation.forward import Forward
from plait.generation.kept_experts import KeptExperts
from plait.generation.link import Link
from plait.generation.pool import KVPool
from plait.generation.response import Response
from plait.generation.settings import SamplingSettings
from plait.generation.states import Grown, StatePool
from plait.models.compute.recurrent import recurrent_layers_of
from plait.models.language_model import LanguageModel
from plait.policy.batching import Scheduler
from plait.policy.step import Key, StepPlan
from plait.schedule.update_rule import HeldKV


class EngineState:
    """The parts of an engine that know the same samples, and what changes several parts at once.

    Args:
        link: to the ranks that have other layers.
        policy_version: of the current weights.
        keep_memory: see `engine.Engine`.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: SamplingSettings,
        link: Link,
        *,
        policy_version: int,
        keep_memory: bool,
    ) -> None:
        self.model = model
        self.limits = settings.limits(model.max_positions)
        self.scheduler = Scheduler(self.limits)
        states = StatePool(self.limits.block_tokens, model.device) if recurrent_layers_of(model.config) else None
        self.pool = KVPool(self.limits.block_tokens, states, keeps_experts=settings.router_replay)
        self._experts = KeptExperts(model, self.pool, link) if settings.router_replay else None
        self.rows = DecodeBatch(settings.max_running, self.limits.block_tokens, model.device)
        self.forward = Forward(model, self.pool, exact=settings.exact, link=link)
        self.flight = InFlight(model.eos_token_ids, policy_version)
        self.epoch = 0
        """How often all keys and values in flight were computed again."""
        self.keep_memory = keep_memory
        self._weights_version = 0

    def compute_for_others(self) -> None:
        """From now on, before any work: prompts are computed for other engines, which draw their samples."""
        self.limits = replace(self.limits, starts=False)
        self.scheduler = Scheduler(self.limits)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_stale(self) -> bool:
        """Whether the model's weights have changed without `update_weights`."""
        return self._weights_version != self.model.weights_version

    def expect_work(self, *, are_new: bool | None = None) -> None:
        """Before samples are added: forget cached blocks of older weights.

        Args:
            are_new: whether the weights are others than those of the last work, whatever was written into them since;
                None: what was written has changed them.
        """
        self.forward.work_added()
        if self.has_work:
            return
        if self.is_stale if are_new is None else are_new:
            self._forget()
        self._weights_version = self.model.weights_version

    def follow(self, plan: StepPlan) -> None:
        """Give samples the blocks and rows that a plan has before its forward."""
        self.rows.remove(plan.preempted)
        self.enter(plan.joined)
        if plan.grown:
            tables = {key: self.scheduler.running[key].table for key in plan.grown}
            self.rows.set_tables(tables, max(plan.num_new))
        self.reserve()
        self.pool.copy(plan.copies)
        if self.pool.states is not None:
            allow(plan.num_drafted == 0, "drafts: the states of the model's layers cannot be taken back; give none")
            self.pool.states.expect(self._grown(plan), plan.copies, self._held_blocks)

    def _grown(self, plan: StepPlan) -> list[Grown]:
        """What a step computes of which sequences; the scheduler has counted it already."""
        running = [self.scheduler.running[key] for key in plan.rows]
        rows = [(s.table, s.num_computed_tokens - count, count) for s, count in zip(running, plan.num_new, strict=True)]
        return [*rows, *((chunk.table, chunk.start, chunk.stop - chunk.start) for chunk in plan.chunks)]

    def _held_blocks(self) -> list[int]:
        """The block that each sequence ends in."""
        size = self.limits.block_tokens
        computed = (item for item in self.scheduler.sequences if item.table and item.num_computed_tokens)
        return [item.table[(item.num_computed_tokens - 1) // size] for item in computed]

    def reserve(self) -> None:
        """Have memory for the blocks that have been given out."""
        self.pool.reserve(self.scheduler.blocks.num_touched, self.scheduler.blocks.num_blocks)

    def enter(self, keys: Sequence[Key], newest_B: Tensor | None = None) -> None:
        """Add rows for these running samples, after the others.

        Args:
            newest_B: int64 [B]; a token that each has drawn and the host does not know yet. None: it knows all.
        """
        if not keys:
            return
        samples = [self.flight.started[key] for key in keys]
        tables = [self.scheduler.running[key].table for key in keys]
        if newest_B is None:
            numbers = [(s.noise_key, s.token_ids[-1], len(s.tokens) - 1, len(s.token_ids)) for s in samples]
        else:
            numbers = [(s.noise_key, UNKNOWN, len(s.tokens), len(s.token_ids) + 1) for s in samples]
        self.rows.append(keys, [s.request.sampling for s in samples], tables, numbers, newest_B)

    def settle(self, drawn: Drawn) -> list[Sample]:
        """Add rows for samples that drew their first token, and remove the samples that have ended; returns these.

        With a prefix cache, or turns, the blocks of ended samples stay, for what continues their text.
        """
        self.enter(drawn.begun)
        ended = drawn.ended
        if not ended:
            return []
        for key in ended:
            del self.flight.started[key]
        self.rows.remove(ended)
        cached = self.scheduler.blocks.cache_blocks > 0
        contexts = {key: self.pool.names(response.tokens[:-1]) for key, response in ended.items()} if cached else None
        experts = self._experts_of(ended.values())
        self.scheduler.remove(ended, contexts)
        return [response.sample(self.model.tokenizer, experts=experts.get(key)) for key, response in ended.items()]

    def _experts_of(self, ended: Iterable[Response]) -> dict[Key, Experts]:
        """Those of the samples that keep them, which have ended and hold their blocks."""
        if self._experts is None:
            return {}
        keeping = [response for response in ended if response.request.sampling.keeps_experts]
        tables = [self.scheduler.running[response.key].table for response in keeping]
        lengths = [(len(response.tokens) - 1, len(response.request.prompt.token_ids)) for response in keeping]
        kept = self._experts.of([(table, *length) for table, length in zip(tables, lengths, strict=True)])
        return {response.key: experts for response, experts in zip(keeping, kept, strict=True)}

    def stop(self, uids: Iterable[int], reason: FinishReason, index: int | None = None) -> list[Sample]:
        """Take out the samples of these prompts, or only those of this index; returns them with their tokens."""
        out = self.flight.take_out(uids, index, tuple(self.scheduler.sequences.waiting))
        self.take_out(dict.fromkeys(response.key for response in out))
        return [response.sample(self.model.tokenizer, reason) for response in out]

    def take_out(self, keys: Collection[Key]) -> None:
        """Free rows and blocks of samples that are not in flight any more."""
        self.rows.remove(keys)
        self.scheduler.remove(keys)
        if not self.has_work:
            self.rest()

    def update_weights(self, version: int, kv: HeldKV) -> None:
        """See `Engine.update_weights`."""
        if self.has_work:
            if kv == "recompute":
                self._recompute()
            else:
                self.scheduler.forget()
            self.forward.drop(keep_memory=self.keep_memory)
        else:
            self._forget()
        self.flight.new_version(version)
        self._weights_version = self.model.weights_version

    def _recompute(self) -> None:
        self.epoch += 1
        self.scheduler.recompute()
        self.rows.clear()
        self.flight.forget_logits()

    def rest(self) -> None:
        """No sample is in flight: free what was made from the weights, which may change now, except cached blocks. All
        of it stays while samples that have ended may go on."""
        if self.scheduler.turns.are_expected:
            return
        if self.scheduler.blocks.num_cached:
            self.forward.drop(keep_memory=self.keep_memory)
        else:
            self._forget()

    def _forget(self) -> None:
        """Free all memory; nothing is in flight."""
        self.pool.clear(keep_memory=self.keep_memory)
        self.scheduler = Scheduler(self.limits)
        self.forward.drop(keep_memory=self.keep_memory)
