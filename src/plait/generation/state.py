"""What an engine holds: samples in flight, the decisions about them, their keys and values, their rows in the batch.

`engine.Engine` steps it; `moves.SampleMoves` takes samples out of it and puts others in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.data.records import FinishReason, Prompt, Sample
from plait.generation.backend import Computes
from plait.generation.flight import Drawn, InFlight
from plait.generation.forward import Forward
from plait.generation.pool import KVPool
from plait.generation.rows import DecodeBatch
from plait.generation.settings import SamplingSettings
from plait.models.language_model import LanguageModel
from plait.policy.batching import Scheduler
from plait.policy.blocks import prefix_keys
from plait.policy.step import Key, StepPlan
from plait.schedule.update_rule import HeldKV


class EngineState:
    """The parts that speak of the same samples, and what changes several of them at once.

    Args:
        computes: a step's forward of the model.
        policy_version: of the weights as they are.
        keep_memory: of packed weights, and on a GPU of the pool, while nothing is in flight, for the next time.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: SamplingSettings,
        computes: Computes,
        *,
        policy_version: int,
        keep_memory: bool,
    ) -> None:
        self.model = model
        self.limits = settings.limits(model.max_positions)
        self.scheduler = Scheduler(self.limits)
        self.pool = KVPool(self.limits.block_tokens)
        self.rows = DecodeBatch(settings.max_running, self.limits.block_tokens, model.device)
        self.forward = Forward(model, self.pool, exact=settings.exact, computes=computes)
        self.flight = InFlight(model.eos_token_ids, policy_version)
        self.epoch = 0
        """Counts how often everything in flight was computed again."""
        self.keep_memory = keep_memory
        self._weights_version = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_stale(self) -> bool:
        """Whether the weights are not those that are known of."""
        return self._weights_version != self.model.weights_version

    def names(self, prompt: Prompt) -> tuple[bytes, ...] | None:
        """See `Scheduler.add`."""
        return prefix_keys(prompt.token_ids) if self.limits.cache_blocks else None

    def expect_work(self) -> None:
        """Before samples are added: what is held counts only if it is of the weights as they are."""
        self.forward.work_added()
        if self.has_work:
            return
        if self.is_stale:
            self._forget()
        self._weights_version = self.model.weights_version

    def follow(self, plan: StepPlan) -> None:
        """Blocks and rows as a plan has them before the forward."""
        self.rows.remove(plan.preempted)
        self.enter(plan.joined)
        if plan.grown:
            tables = {key: self.scheduler.running[key].table for key in plan.grown}
            self.rows.set_tables(tables, max(plan.num_new))
        self.reserve()
        self.pool.copy(plan.copies)

    def reserve(self) -> None:
        """Memory for the blocks that have been given out."""
        self.pool.reserve(self.scheduler.blocks.num_touched, self.scheduler.blocks.num_blocks)

    def enter(self, keys: Sequence[Key]) -> None:
        """Samples that run take rows behind the others."""
        if not keys:
            return
        samples = [self.flight.started[key] for key in keys]
        tables = [self.scheduler.running[key].table for key in keys]
        numbers = [(s.token_ids[-1], len(s.tokens) - 1, s.noise_key, len(s.token_ids)) for s in samples]
        self.rows.append(keys, [s.request.sampling for s in samples], tables, numbers)

    def settle(self, drawn: Drawn) -> list[Sample]:
        """Samples that got a first row by what they drew enter the batch, those that have ended leave it; these.

        What ended samples hold may be found by prompts that go on with them.
        """
        self.enter(drawn.begun)
        ended = drawn.ended
        if not ended:
            return []
        for key in ended:
            del self.flight.started[key]
        self.rows.remove(ended)
        cached = self.limits.cache_blocks > 0
        contexts = {key: prefix_keys(response.tokens[:-1]) for key, response in ended.items()} if cached else None
        self.scheduler.remove(ended, contexts)
        return [response.sample(self.model.tokenizer) for response in ended.values()]

    def stop(self, uids: Iterable[int], reason: FinishReason, index: int | None = None) -> list[Sample]:
        """Samples of prompts, or of each the one of this index, are taken out; these, with what they had said."""
        waiting = tuple(self.scheduler.sequences.waiting)
        out = [response for uid in uids for response in self.flight.take_out(uid, index, waiting)]
        self.take_out([response.key for response in out])
        return [response.sample(self.model.tokenizer, reason) for response in out]

    def take_out(self, keys: Sequence[Key]) -> None:
        """Samples that are not in flight any more give up what they have."""
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
        """No sample is in flight, so weights may change: give back what was made of them, but for cached prefixes."""
        if self.scheduler.blocks.num_cached:
            self.forward.drop(keep_memory=self.keep_memory)
        else:
            self._forget()

    def _forget(self) -> None:
        """Give all memory back while nothing is in flight."""
        self.pool.clear(keep_memory=self.keep_memory)
        self.scheduler = Scheduler(self.limits)
        self.forward.drop(keep_memory=self.keep_memory)
