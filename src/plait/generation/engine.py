"""The generation engine: continuous batching over a paged pool of keys and values, one ragged step at a time.

`policy.batching` decides each step; this file carries the decisions out. A group's prompt is computed once and its
blocks serve all its samples. What a sample says is a function of weights, prompt, parameters and noise key: not of who
else runs, of chunks, drafts, preemption or the order of arrival, up to the rounding of the forward; in exact mode to
the bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from plait.data.records import FinishReason, Sample
from plait.generation.checks import allow, check_exact, check_new, check_room
from plait.generation.drawing import Drawing
from plait.generation.forward import ChunkTokens
from plait.generation.records import Choose, HeldKV
from plait.generation.records import StepRecord as StepRecord
from plait.generation.records import WeightUpdate as WeightUpdate
from plait.generation.request import Request
from plait.generation.response import PendingPrompt
from plait.generation.rows import NO_DRAFTS, Drafts
from plait.generation.sampler import sample
from plait.generation.settings import SamplingSettings
from plait.generation.speculator import Speculates, speculator_of
from plait.generation.state import EngineState
from plait.models.language_model import LanguageModel
from plait.policy.step import StepPlan
from plait.speculation.counts import Counts


class Engine:
    """Steppable generation on one model.

    Args:
        model: its weights may change while no work is in flight, or between two steps; then call `update_weights`.
        settings: limits and mode of the engine; the rest of them travels with each request.
        policy_version: stamped on the tokens until `update_weights`.
        choose: draws the tokens.
        speculates: makes drafts; by default a `Speculator`, where the settings ask for one.
        keep_memory: of packed weights, while nothing is in flight, for the next time. False where the process needs it
            for something else then.

    Raises:
        ConfigError: exact mode on another device than a CPU.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: SamplingSettings,
        *,
        policy_version: int = 0,
        choose: Choose = sample,
        speculates: Speculates | None = None,
        keep_memory: bool = True,
    ) -> None:
        check_exact(settings, model)
        self.model = model
        self.state = state = EngineState(model, settings, policy_version=policy_version, keep_memory=keep_memory)
        """What is in flight; samples leave it and come to it by `moves.SampleMoves`."""
        self.updates = self.state.updates
        self.last_step: StepRecord | None = None
        self.speculates = speculates if speculates is not None else speculator_of(settings)
        self._drawing = Drawing(state.rows, state.flight, model.tokenizer, choose, exact=settings.exact)

    # -- what is there

    @property
    def policy_version(self) -> int:
        """Stamped on the tokens that are drawn."""
        return self.state.flight.policy_version

    @property
    def has_work(self) -> bool:
        return self.state.has_work

    @property
    def num_running(self) -> int:
        """Samples in the batch."""
        return len(self.state.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Samples that have not started, or wait to be computed again."""
        return self.state.scheduler.sequences.num_waiting

    @property
    def kv_bytes(self) -> int:
        """Memory of the pool."""
        return self.state.pool.num_bytes

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """(tokens in blocks that somebody holds, tokens that the pool may hold)."""
        blocks, block_tokens = self.state.scheduler.blocks, self.state.limits.block_tokens
        return blocks.num_held * block_tokens, blocks.num_blocks * block_tokens

    @property
    def received_bytes(self) -> int:
        """Activations that came from other ranks of the instance, so far."""
        return self.model.team.received_bytes

    @property
    def speculation(self) -> Counts | None:
        """How it went since the engine was made; None: it is off."""
        return self.speculates.counts

    @property
    def not_compiled(self) -> str | None:
        """See `Forward.not_compiled`."""
        return self.state.forward.not_compiled

    # -- what comes

    def add(self, request: Request) -> None:
        """Queue a request; `step` does the work.

        Raises:
            DataError: the prompt is empty or leaves no room for a response, or the pool is too small for both.
            CallError: samples of the prompt are in flight.
        """
        state, flight = self.state, self.state.flight
        limits = tuple(request.limit(index, self.model.max_positions) for index in range(request.num_samples))
        uid, num_tokens = request.prompt.uid, len(request.prompt.token_ids)
        check_new(uid, flight.pending, flight.started)
        check_room(state.scheduler, uid, num_tokens, max(limits))
        state.expect_work()
        flight.pending[uid] = PendingPrompt(request, limits, request.num_samples)
        state.scheduler.add(uid, num_tokens, range(request.num_samples), state.names(request))

    # -- a step

    @torch.no_grad()
    def step(self, drafts: Drafts = NO_DRAFTS) -> list[Sample]:
        """Compute one step: a further token for each running sample, and prompts as there are places.

        Args:
            drafts: of running samples, guesses of their next tokens. Those that come true are drawn in this step, too:
                the samples are the same. Where there is no room for all drafts, none is computed.

        Returns:
            The samples that it finished.

        Raises:
            RunError: the model gave logits that are not finite.
            CallError: nothing is in flight, or the weights changed without `update_weights`.
        """
        began, state = time.perf_counter(), self.state
        allow(state.has_work, "step: no sample is in flight; ask `has_work` first")
        allow(not state.is_stale, "step: the weights changed while samples were in flight; call `update_weights`")
        finished, num_begun = self._start_ready()
        num_drawn = num_begun
        drafts = drafts or self.speculates.drafts(state.flight.started, state.rows.keys)
        drafts = state.flight.shortened(drafts) if drafts else NO_DRAFTS
        plan = state.scheduler.plan({key: len(draft) for key, draft in drafts.items()})
        drafts = {key: drafts[key] for key in plan.rows if key in drafts} if plan.num_drafted else NO_DRAFTS
        self._apply(plan)
        packing_s = self._prepare()
        chunks = [ChunkTokens(state.flight.chunk(chunk), chunk.completes) for chunk in plan.chunks]
        logits_RV = state.forward.logits(state.rows, drafts, chunks)
        logits_DV = state.flight.drawn_logits(plan, logits_RV)
        if logits_DV is not None:
            drawn = self._drawing.of_step(logits_DV, plan, drafts)
            finished, num_drawn = finished + state.settle(drawn), num_drawn + drawn.num_tokens
        self.speculates.done(plan, num_drawn - num_begun, time.perf_counter() - began - packing_s)
        if not state.has_work:
            state.rest()
            self.speculates.rest()
        self.last_step = StepRecord.of(plan, len(finished), num_drawn, packing_s)
        return finished

    def _start_ready(self) -> tuple[list[Sample], int]:
        """Samples whose prompt is computed draw their first token, so that they have a row in the step."""
        starts = self.state.scheduler.start_ready()
        if not starts:
            return [], 0
        drawn = self._drawing.of_starts(starts)
        return self.state.settle(drawn), drawn.num_tokens

    def _apply(self, plan: StepPlan) -> None:
        """Blocks and rows as the plan has them before the forward."""
        state, running = self.state, self.state.scheduler.running
        state.rows.remove(plan.preempted)
        state.enter(plan.joined)
        if plan.grown:
            state.rows.set_tables({key: running[key].table for key in plan.grown}, max(plan.num_new))
        assert state.rows.keys == list(plan.rows), "rows and decisions are about the same samples"
        state.reserve()
        state.pool.copy(plan.copies)

    def _prepare(self) -> float:
        """Weights as the forward reads them fastest; the seconds that it took."""
        began = time.perf_counter()
        self.state.forward.prepare(self.state.flight.longest_left)
        return time.perf_counter() - began

    # -- what goes, and weights that change

    def abort(self, prompt_uid: int, index: int | None = None) -> list[Sample]:
        """Take a prompt's samples (or one of them) out; samples that have ended or never were are no error.

        Returns:
            The samples taken out, with what they had said: none of them will be delivered by `step`.
        """
        out = self.state.flight.take_out(prompt_uid, index, self.state.scheduler.sequences.waiting)
        self.state.take_out([response.key for response in out])
        return [response.sample(self.model.tokenizer, FinishReason.ABORTED) for response in out]

    def update_weights(self, version: int, kv: HeldKV = "recompute") -> None:
        """The model's weights have changed: stamp tokens from now on with `version`.

        Args:
            kv: of samples in flight. "recompute": from the new weights, as if they had been there from the start;
                "keep": what the old ones computed stays, which costs nothing and is not what the trainer will compute.
                Recorded in `updates`. Nothing of the old weights reaches later requests either way.

        Raises:
            CallError: `kv` is neither.
        """
        self.state.update_weights(version, kv)
        self.speculates.new_policy()


def drain(engine: Engine) -> Iterator[Sample]:
    """Step until no work is left; yield samples as they finish."""
    while engine.has_work:
        yield from engine.step()
