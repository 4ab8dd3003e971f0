"""The generation engine: continuous batching over a paged pool of keys and values, one ragged step at a time.

`policy.batching` decides each step; this file carries the decisions out. On ranks that hold a model in stages steps
follow each other before their tokens are known: a step is *launched*, and *lands* when its tokens are there. A group's
prompt is computed once and its blocks serve all its samples. What a sample says is a function of weights, prompt,
parameters and noise key: not of who else runs, of chunks, drafts, preemption or the order of arrival, up to the
rounding of the forward; in exact mode to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from plait.data.records import FinishReason, Sample
from plait.generation.checks import allow, check_exact, check_kv, check_new, check_room
from plait.generation.drawing import Drawing, Draws
from plait.generation.forward import ChunkTokens
from plait.generation.joint import Alone, Joint
from plait.generation.moves import Parking
from plait.generation.occupancy import Occupancy
from plait.generation.records import StepRecord as StepRecord
from plait.generation.request import Request
from plait.generation.response import PendingPrompt
from plait.generation.rows import NO_DRAFTS, Drafts
from plait.generation.settings import SamplingSettings
from plait.generation.speculates import Speculates
from plait.generation.speculator import speculator_of
from plait.generation.state import EngineState
from plait.generation.turns import StepClock, Turn, Turns
from plait.models.language_model import LanguageModel
from plait.policy.shares import has_room, next_share, num_wanted
from plait.policy.step import Key, Share, StepPlan
from plait.schedule.update_rule import HeldKV
from plait.speculation.counts import Counts


class Engine:
    """Steppable generation on one model.

    Args:
        model: its weights may change while no work is in flight, or between two steps; then call `update_weights`.
        settings: limits and mode of the engine; the rest of them travels with each request.
        policy_version: stamped on the tokens until `update_weights`.
        joint: the ranks that step it together; by default this process alone.
        speculates: makes drafts; by default a `Speculator`, where the settings ask for one, with their draft model.
        keep_memory: of packed weights, and on a GPU of the pool and of graphs, while nothing is in flight, for the next
            time. False where the process needs it for something else then.

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
            model, settings, self._joint.computes(model), policy_version=policy_version, keep_memory=keep_memory
        )
        """What is in flight; samples leave it and come to it by `moves.SampleMoves`."""
        self.last_step: StepRecord | None = None
        self.speculates = speculates if speculates is not None else speculator_of(settings, state.forward)
        self._drawing = Drawing(state.rows, state.flight, model.tokenizer, self._joint, exact=settings.exact)
        self._turns = Turns()
        self._parking = Parking(state)
        self.occupancy = Occupancy(state, self._parking)

    # -- what is there

    @property
    def policy_version(self) -> int:
        """Stamped on the tokens that are drawn."""
        return self.state.flight.policy_version

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, or to give out."""
        return self.state.has_work or bool(self._turns.landed.finished)

    @property
    def said(self) -> dict[Key, int]:
        """Tokens of each sample that has begun and not ended."""
        return {key: len(response.token_ids) for key, response in self.state.flight.started.items()}

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
        """Queue a request; `step` does the work. Samples that have begun before go on ahead of those that have not.

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
        self._parking.resume(request)
        if fresh := tuple(request.fresh):
            flight.pending[uid] = PendingPrompt(request, limits, len(fresh))
            state.scheduler.add(uid, num_tokens, fresh, state.names(request.prompt))

    # -- a step

    @torch.no_grad()
    def step(self, drafts: Drafts = NO_DRAFTS) -> list[Sample]:
        """Compute one step: a further token for each running sample, and prompts as there are places; where steps
        follow each other before their tokens are known, for a share of them.

        Args:
            drafts: of running samples, guesses of their next tokens. Those that come true are drawn in this step, too:
                the samples are the same. Where there is no room for all drafts, none is computed.

        Returns:
            The samples that have ended, in it or in earlier steps whose tokens have come.

        Raises:
            RunError: the model gave logits that are not finite; another rank is gone, or does not answer.
            CallError: nothing is in flight, or the weights changed without `update_weights`.
        """
        allow(self.has_work, "step: no sample is in flight; ask `has_work` first")
        allow(not self.state.is_stale, "step: the weights changed while samples were in flight; call `update_weights`")
        waited_s = self._joint.waited_s
        record = self._launch(drafts) if self.state.has_work else None
        if not self.state.has_work:
            self._joint.rest()
            self.state.rest()
            self.speculates.rest()
        landed = self._turns.take_landed()
        self.last_step = record and replace(
            record,
            num_finished=len(landed.finished),
            num_drawn=landed.num_drawn,
            waited_s=self._joint.waited_s - waited_s,
        )
        return landed.finished

    def land(self) -> None:
        """Wait for the tokens of all steps in flight; the next `step` gives out what they ended. Called before samples
        leave, come, or are computed with other weights."""
        self._land_all_but(0)
        self._joint.rest()

    def _launch(self, drafts: Drafts) -> StepRecord | None:
        """Compute the next step, and land those that had to before it or have to now. None: no sample is idle, so that
        the oldest landed in its place."""
        state, scheduler, clock = self.state, self.state.scheduler, StepClock(self._joint, self.state.forward)
        groups, share = self._share()
        if share is None:
            self._start_ready()
        drafts = drafts or self.speculates.drafts(state.flight.started, share.rows if share else state.rows.keys)
        drafts = state.flight.shortened(drafts) if drafts else NO_DRAFTS
        plan = scheduler.plan({key: len(draft) for key, draft in drafts.items()}, share)
        if plan.is_empty and self._turns:
            self._land_all_but(len(self._turns) - 1)
            return None
        drafts = {key: drafts[key] for key in plan.rows if key in drafts} if plan.num_drafted else NO_DRAFTS
        state.follow(plan)
        with clock.packing():
            state.forward.prepare(state.flight.longest_left)
            self.speculates.prepare()
        if self._joint.most_groups > 1 and (plan.rows or plan.chunks):
            self._joint.expect(self._turns.num_next(scheduler, plan, groups))
        draws = self._compute(plan, drafts)
        self._turns.launch(Turn(plan, draws, clock.seconds))
        record = replace(StepRecord.of(plan, 0, 0), packing_s=clock.packing_s, num_groups=len(self._turns))
        self._land_all_but(groups - 1)
        return record

    def _share(self) -> tuple[int, Share | None]:
        """How many steps are to be in flight, and what of the samples the next one computes; None: all of them.

        Who would have to give way may be in flight: then all steps land first.
        """
        scheduler = self.state.scheduler
        groups = self._joint.num_groups(num_wanted(scheduler)) if self._joint.most_groups > 1 else 1
        if groups == 1:
            self._land_all_but(0)
            return 1, None
        share = next_share(scheduler, self._turns.drawing, groups)
        if self._turns and not has_room(scheduler, share):
            self._land_all_but(0)
            share = next_share(scheduler, (), groups)
        return groups, share

    def _compute(self, plan: StepPlan, drafts: Drafts) -> Draws | None:
        """The forward of a step, and its draws, where samples draw in it."""
        state = self.state
        rows = state.rows.part(plan.rows)
        chunks = [ChunkTokens(state.flight.chunk(chunk), chunk.completes) for chunk in plan.chunks]
        logits_RV = state.forward.logits(rows, drafts, chunks)
        logits_DV = state.flight.drawn_logits(plan, logits_RV)
        return None if logits_DV is None else self._drawing.of_step(logits_DV, rows, plan, drafts)

    def _land_all_but(self, count: int) -> None:
        """The oldest steps in flight land, so that no more than so many are."""
        while len(self._turns) > count:
            turn, clock = self._turns.oldest(), StepClock(self._joint, self.state.forward)
            num_drawn = 0 if turn.draws is None else self._settle(turn.draws)
            self.speculates.done(turn.plan, num_drawn, turn.seconds + clock.seconds)

    def _settle(self, draws: Draws) -> int:
        """Samples get their tokens; how many these are."""
        drawn = self._drawing.end(draws)
        self.state.scheduler.take_back(drawn.num_wrong)
        self._parking.park(key for key, response in drawn.ended.items() if response.is_parked)
        self._turns.landed.finished += self.state.settle(drawn)
        self._turns.landed.num_drawn += drawn.num_tokens
        return drawn.num_tokens

    def _start_ready(self) -> None:
        """Samples whose prompt is computed draw their first token, so that they have a row in the step."""
        if starts := self.state.scheduler.start_ready():
            self._settle(self._drawing.of_starts(starts))

    # -- what goes, and weights that change

    def abort(self, prompt_uid: int, index: int | None = None) -> list[Sample]:
        """Take a prompt's samples (or one of them) out; samples that have ended or never were are no error.

        Returns:
            The samples taken out, with what they had said: none of them will be delivered by `step`.
        """
        self.land()
        return self.state.stop((prompt_uid,), FinishReason.ABORTED, index)

    def halt(self, *, parks: bool) -> list[Sample]:
        """Take all samples out as they are, so that they go on later (`GoingOn`).

        Args:
            parks: keys and values of those that have begun stay here until then, so that they may be kept.

        Returns:
            Samples that had ended and were not given out, and the others with what they have said: FinishReason.OPEN.
        """
        self.land()
        if parks:
            self._parking.park(tuple(self.state.flight.started))
        open_samples = self.state.stop(self.state.flight.uids, FinishReason.OPEN)
        self.speculates.rest()
        return self._turns.take_landed().finished + open_samples

    def update_weights(self, version: int, kv: HeldKV = "recompute") -> None:
        """The model's weights have changed: stamp tokens from now on with `version`.

        Args:
            kv: of samples in flight. "recompute": from the new weights, as if they had been there from the start;
                "keep": what the old ones computed stays, which costs nothing and is not what the trainer will compute.
                Nothing of the old weights reaches later requests either way.

        Raises:
            CallError: `kv` is neither.
        """
        check_kv(kv)
        self.land()
        self.state.update_weights(version, kv)
        self.speculates.new_policy()


def drain(engine: Engine) -> Iterator[Sample]:
    """Step until no work is left; yield samples as they finish."""
    while engine.has_work:
        yield from engine.step()
