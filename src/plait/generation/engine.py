"""The generation engine: continuous batching over a paged pool of keys and values, one ragged step at a time.

`policy.batching` decides each step; this file carries the decisions out. A step is *launched*, and *lands* when its
tokens are there; if ranks hold a model in stages, several steps are in flight. A prompt is computed once for all its
samples, and a common beginning of prompts once for all of them.

What a sample says is a function of weights, prompt, parameters and noise key. It does not depend on other samples,
chunks, drafts, preemption or the order of arrival, up to the rounding of the forward; in exact mode to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from plait.data.host_device import computes_behind
from plait.data.records import FinishReason, Sample
from plait.generation.checks import allow, check_exact, check_kv, check_new, check_room
from plait.generation.decode_batch import NO_DRAFTS, Drafts
from plait.generation.drawing import Drawing, Draws
from plait.generation.forward import ChunkTokens
from plait.generation.joint import Alone, Joint
from plait.generation.occupancy import Occupancy
from plait.generation.overlap import Overlap, Turn, Turns
from plait.generation.parking import Parking
from plait.generation.request import Request
from plait.generation.response import PendingPrompt
from plait.generation.settings import SamplingSettings
from plait.generation.speculates import Speculates
from plait.generation.speculator import speculator_of
from plait.generation.state import EngineState
from plait.generation.step_clock import StepClock
from plait.generation.step_record import StepRecord
from plait.models.language_model import LanguageModel
from plait.policy.step import Key, StepPlan
from plait.schedule.update_rule import HeldKV
from plait.speculation.counts import Counts


class Engine:
    """Steppable generation on one model.

    Args:
        model: its weights may change between two steps; then call `update_weights`.
        settings: limits and mode of the engine. Sampling parameters come with each request.
        policy_version: stamped on the tokens until `update_weights`.
        joint: the ranks that step the engine together; None: this process alone.
        speculates: makes drafts; None: what the settings ask for, with their draft model.
        keep_memory: whether the memory of packed weights, and on a GPU of the pool and of graphs, is kept while nothing
            is in flight. False if the process needs it for something else then.

    Raises:
        ConfigError: exact mode on another device than a CPU.
        ModelError: the draft model cannot be used.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: SamplingSettings,
        *,
        policy_version: int = 0,
        joint: Joint | None = None,
        speculates: Speculates | None = None,
        keep_memory: bool = True,
    ) -> None:
        check_exact(settings, model)
        self.model = model
        self._joint = joint if joint is not None else Alone()
        self.state = state = EngineState(
            model, settings, self._joint.link, policy_version=policy_version, keep_memory=keep_memory
        )
        """What is in flight. `moves.SampleMoves` takes samples out of it and puts others in."""
        self.last_step: StepRecord | None = None
        self.speculates = speculates or speculator_of(settings, state.forward, keep_memory=keep_memory)
        self._drawing = Drawing(state.rows, state.flight, model.tokenizer, self._joint, exact=settings.exact)
        self._turns = Turns()
        # A step may be launched ahead, before the host knows what the last one drew (`overlap`). Exact mode computes
        # from these tokens on the host; drafts stand behind them, so steps go ahead only while none are made.
        ahead = computes_behind(model.device) and not settings.exact
        quiet = self.speculates.quiet if ahead else None
        self._overlap = Overlap(state, self._joint, self._turns, self._land_all_but, quiet)
        self._parking = Parking(state)
        self.occupancy = Occupancy(state, self._parking)

    # -- state

    @property
    def policy_version(self) -> int:
        """Stamped on the tokens that are drawn."""
        return self.state.flight.policy_version

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute, or samples to return."""
        return self.state.has_work or bool(self._turns.landed.finished)

    @property
    def said(self) -> dict[Key, int]:
        """Tokens drawn so far of each sample that has begun and not ended."""
        return {key: len(response.token_ids) for key, response in self.state.flight.started.items()}

    @property
    def speculation(self) -> Counts | None:
        """Counts of drafts since the engine was made; None: speculation is off."""
        return self.speculates.counts

    # -- requests

    def add(self, request: Request) -> None:
        """Queue a request; `step` does the work. Samples that go on (`GoingOn`) come before new ones.

        Raises:
            DataError: the prompt is empty or leaves no room for a response, or the pool is too small for both.
            CallError: samples of the prompt are in flight.
        """
        state, flight = self.state, self.state.flight
        limits = tuple(request.limit(index, self.model.max_positions) for index in range(request.num_samples))
        uid, num_tokens = request.prompt.uid, len(request.prompt.token_ids)
        check_new(request, flight.pending, flight.started)
        check_room(state.scheduler, uid, num_tokens, max(limits))
        state.expect_work()
        self._parking.resume(request)
        if fresh := tuple(request.fresh):
            flight.pending[uid] = PendingPrompt(request, limits, len(fresh))
            names = state.pool.names(request.prompt.token_ids)
            state.scheduler.add(uid, num_tokens, fresh, names, request.noise.rollout)
        if request.in_turns:
            num_here = self.occupancy.num_running + self.occupancy.num_waiting
            state.scheduler.turns.expect(num_here, num_tokens + max(limits))

    # -- a step

    @torch.no_grad()
    def step(self, drafts: Drafts = NO_DRAFTS) -> list[Sample]:
        """Compute one step: the next token of each running sample, and prompts as far as there is room for them. If
        several steps are in flight, each computes a share of the samples.

        Args:
            drafts: running sample → drafts of its next tokens. Accepted draft tokens give the sample several tokens in
                this step; the samples are the same. If there is no room for all drafts, none is computed.

        Returns:
            The samples that ended in the steps that landed.

        Raises:
            RunError: the model gave logits that are not finite; another rank is gone, or does not answer. After
                that, samples can only be taken out (`abort`).
            CallError: nothing is in flight, or the weights changed without `update_weights`.
        """
        allow(self.has_work, "step: no sample is in flight; ask `has_work` first")
        allow(not self.state.is_stale, "step: the weights changed while samples were in flight; call `update_weights`")
        waited_s = self._joint.waited_s
        record = self._launch(drafts) if self.state.has_work else None
        self.rest()
        landed = self._turns.take_landed()
        self.last_step = record and record.ended(landed, self._joint.waited_s - waited_s)
        return landed.finished

    def land(self) -> None:
        """Land all steps in flight; the next `step` returns the samples that ended in them. To be called before samples
        leave or come, and before weights change."""
        self._land_all_but(0)
        self._joint.rest()

    def _launch(self, drafts: Drafts) -> StepRecord | None:
        """Launch the next step, and land the steps that must land before or after it. None: every sample is in a step
        that is in flight already, so the oldest of these steps landed instead."""
        state, scheduler, clock = self.state, self.state.scheduler, self._clock()
        ahead = not drafts and self._overlap.may_go_ahead
        groups, share = self._overlap.share(ahead=ahead)
        starts = self._start_ready(ahead=ahead) if share is None else None
        if not drafts and not ahead:
            running = share.rows if share else state.rows.keys
            drafts = self._joint.drafts(lambda: self.speculates.drafts(state.flight.started, running), running)
        drafts = state.flight.shortened(drafts) if drafts else NO_DRAFTS
        plan = scheduler.plan({key: len(draft) for key, draft in drafts.items()}, share)
        state.follow(plan)  # an empty one, too: samples may come back into the batch while all others are in flight
        self._parking.bring(plan.brought)
        if plan.is_empty and self._turns:
            self._land_all_but(len(self._turns) - 1)
            return None
        drafts = {key: drafts[key] for key in plan.rows if key in drafts} if plan.num_drafted else NO_DRAFTS
        with clock.packing():
            state.forward.prepare(state.flight.longest_left)
            self.speculates.prepare()
        if self._joint.most_groups > 1 and (plan.rows or plan.chunks):
            self._joint.expect(self._turns.num_next(scheduler, plan, groups))
        draws = self._compute(plan, drafts)
        num_groups = 1 if share is None else len(self._turns) + 1
        record = StepRecord.of(plan, len(scheduler.running), num_groups, clock.packing_s)
        self._overlap.launched(Turn(plan, starts, draws, clock.seconds), groups)
        return record

    def _compute(self, plan: StepPlan, drafts: Drafts) -> Draws | None:
        """The forward of a step, and its draws; None: no sample draws a token in it."""
        state = self.state
        rows = state.rows.part(plan.rows)
        chunks = [ChunkTokens(state.flight.chunk(chunk), chunk.completes) for chunk in plan.chunks]
        logits_RV = state.forward.logits(rows, drafts, chunks)
        logits_DV = state.flight.drawn_logits(plan, logits_RV)
        return None if logits_DV is None else self._drawing.of_step(logits_DV, rows, plan, drafts)

    def _land_all_but(self, count: int) -> None:
        """Land the oldest steps until at most `count` are in flight."""
        while len(self._turns) > count:
            turn, clock = self._turns.oldest(), self._clock()
            try:
                num_drawn = sum(self._settle(draws) for draws in (turn.starts, turn.draws) if draws is not None)
            except BaseException:
                self._turns.clear()
                raise
            self._turns.landing_s += (landing_s := clock.seconds)
            self.speculates.done(turn.plan, num_drawn, turn.seconds + landing_s)

    def _clock(self) -> StepClock:
        return StepClock(self._joint, self._turns, self.state.forward, self.speculates)

    def _settle(self, draws: Draws) -> int:
        """Give samples the tokens that they drew; the number of tokens."""
        drawn = self._drawing.end(draws)
        self.state.scheduler.take_back(drawn.num_wrong)
        self._parking.park(key for key, response in drawn.ended.items() if response.is_parked)
        self._turns.landed.add(drawn, self.state.settle(drawn))
        return drawn.num_tokens

    def _start_ready(self, *, ahead: bool) -> Draws | None:
        """Draw the first token of each sample whose prompt is computed, so that the sample takes part in the step. If
        the step is launched ahead, these draws are returned and land with it. Otherwise all steps land now."""
        starts = self.state.scheduler.start_ready()
        draws = self._drawing.of_starts(starts) if starts else None
        if ahead and self._overlap.goes(draws):
            return draws
        self._land_all_but(0)
        if draws is not None:
            self._settle(draws)
        return None

    # -- leaving, and new weights

    def rest(self) -> None:
        """Called when samples have ended or left: if none is in flight any more, free what was held for them, and what
        a draft model held."""
        if not self.state.has_work:
            self._land_all_but(0)  # steps that were computed for samples which have ended since
            self._joint.rest()
            self.state.rest()
            self._parking.rest()
            self.speculates.rest()

    def abort(self, prompt_uid: int, index: int | None = None) -> list[Sample]:
        """Take a prompt's samples out, or one of them. Samples that have ended or never were are no error.

        Returns:
            The samples taken out, with the tokens that they have; `step` will not return them.
        """
        self.land()
        stopped = self.state.stop((prompt_uid,), FinishReason.ABORTED, index)
        self.rest()
        return stopped

    def halt(self, *, parks: bool) -> list[Sample]:
        """Take all samples out as they are, so that they can go on later (`GoingOn`).

        Args:
            parks: keep the keys and values of those that have begun until then.

        Returns:
            Samples that have ended and that `step` has not returned, then the unfinished ones (FinishReason.OPEN).
        """
        self.land()
        if parks:
            self._parking.park(tuple(self.state.flight.started))
        open_samples = self.state.stop(self.state.flight.uids, FinishReason.OPEN)
        self.rest()
        return self._turns.take_landed().finished + open_samples

    def update_weights(self, version: int, kv: HeldKV = "recompute") -> None:
        """The model's weights have changed: stamp tokens from now on with `version`.

        Args:
            kv: what becomes of the keys and values of samples in flight. "recompute": they are computed again with the
                new weights. "keep": those of the old weights stay, which costs nothing and differs from what the
                trainer will compute. Later requests use neither.

        Raises:
            CallError: `kv` is neither.
        """
        check_kv(kv)
        self.land()
        self.state.update_weights(version, kv)
        self.speculates.new_policy()


def drain(engine: Engine) -> Iterator[Sample]:
    """Step until no work is left; yield samples as they end."""
    while engine.has_work:
        yield from engine.step()
