"""Rollouts whose samples go on with later weights: several batches in one engine, and what is unfinished at the end of
a step stands still until the next weights are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from plait.data.records import FinishReason, Prompt, Sample
from plait.dataflow import Node
from plait.engines import GenerationEngine
from plait.generation.request import GoingOn, Request
from plait.generation.settings import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.step import Key
from plait.runtime.folder.moments import Moments
from plait.runtime.steps.rewarding import RewardCalls
from plait.runtime.steps.step import StepState
from plait.runtime.steps.streams import PartialRollout
from plait.schedule.dispatch import Key as CallKey
from plait.schedule.work import MOVED_ON, Work


@dataclass
class Beside:
    """The rollouts of one step: its own, and those of later batches beside it."""

    step: int
    batches: tuple[int, ...]
    """Whose rollouts run, in the order in which they ask."""
    until: frozenset[CallKey] | None = None
    """With the end of these calls those of later batches halt; with none, before they have begun. None: they do not."""
    ended: set[CallKey] = field(default_factory=set)
    """Calls that have ended."""
    asked: set[int] = field(default_factory=set)
    """Batches of which all samples have been asked for."""
    halted: bool = False

    def may_ask(self, batch: int) -> bool:
        """Whether all batches before it have: who has asked first gets the places."""
        return all(earlier in self.asked for earlier in self.batches if earlier < batch)

    @property
    def all_asked(self) -> bool:
        return self.asked.issuperset(self.batches)

    def stands(self, batch: int) -> bool:
        """Whether a batch is not to be drawn any further in this step."""
        return batch > self.step and self.until is not None and self.until <= self.ended

    def halt(self, engine: GenerationEngine, *, parks: bool) -> None:
        """Once, when its time has come."""
        if not self.halted and any(map(self.stands, self.batches)):
            self.halted = True
            engine.halt(parks=parks)


@dataclass(frozen=True)
class Asked:
    """What the samples of one rollout have in common."""

    node: Node
    count: int
    """Samples of each prompt."""
    sampling: Sampling
    noise: NoiseKey


class RunningOn:
    """
    Args:
        moments: where samples stood, and are to stand; None: the recipe has samples end with the step that began them,
            and only what an earlier stay of the run has begun goes on.
        keeps: keys and values are kept over an update.
    """

    def __init__(self, rewarding: RewardCalls, moments: Moments | None = None, *, keeps: bool = False) -> None:
        self._rewarding, self._moments, self._keeps = rewarding, moments, keeps
        self._out: dict[Key, tuple[Node, StepState]] = {}
        """Samples that an engine has been asked for, and their rollouts."""

    def work(
        self,
        asked: Asked,
        engine: GenerationEngine,
        state: StepState,
        beside: Beside,
        says: Callable[[int], None],
    ) -> Work[bool]:
        """Samples of the batch's prompts, as far as they come in this step; one step of the engine per `next()`.
        Whether all of them are there.

        Args:
            says: told how many samples are asked for.
        """
        node = asked.node
        growing = state.growing.setdefault(node.id, PartialRollout(state.prompts, asked.count))
        sent = set(state.sent.get(node.id, ()))
        for group in growing.whole:
            if group[0].prompt.uid not in sent:
                self._submit(node, group, state)
        while not beside.may_ask(state.step):
            yield None
        repeats = self._moments is not None and self._moments.at(beside.step + 1) is not None
        stands = not repeats and beside.stands(
            state.step
        )  # the record, if there is one, says who is drawn, and how far
        requests = [] if stands else list(self._requests(asked, state, growing, beside.step))
        mine = {(request.prompt.uid, index) for request in requests for index in request.indices}
        self._out |= dict.fromkeys(mine, (node, state))
        for request in requests:
            engine.add(request)
        if mine:
            says(len(mine))
        beside.asked.add(state.step)
        yield MOVED_ON
        while not beside.all_asked:
            yield None
        while engine.has_work and not mine.isdisjoint(self._out):
            if not repeats:  # else its samples stop by themselves
                beside.halt(engine, parks=self._keeps)
            done, finished = engine.advance(node.call) if engine.ready else (None, [])
            growing.hear(engine.said)
            if self._rewarding.poll(node):
                done = done or MOVED_ON
            for sample in finished:
                self._deliver(sample)
            yield done
        growing.hear({})
        for key in mine:
            self._out.pop(key, None)
        return len(growing.whole) == len(state.prompts)

    def _deliver(self, sample: Sample) -> None:
        """To the rollout that asked for it."""
        key = sample.prompt.uid, sample.index
        node, state = self._out.pop(key)
        begun = state.begun.setdefault(node.id, {})
        begun.pop(key, None)
        if sample.finish_reason is FinishReason.OPEN:
            if sample.token_ids:
                begun[key] = sample
        elif (group := state.growing[node.id].take(sample)) is not None:
            self._submit(node, group, state)

    def _submit(self, node: Node, group: Sequence[Sample], state: StepState) -> None:
        self._rewarding.submit(node, group, state)
        state.sent.setdefault(node.id, set()).add(group[0].prompt.uid)

    def _requests(self, asked: Asked, state: StepState, growing: PartialRollout, step: int) -> Iterator[Request]:
        """What is asked for in a step: samples that have not ended, up to where they stood when it ended in an earlier
        stay of the run."""
        left: dict[int, set[int]] = {}
        for uid, index in growing.unfinished:
            left.setdefault(uid, set()).add(index)
        for prompt in state.prompts:
            going_on = self._going_on(prompt, left.get(prompt.uid, set()), asked, state, step)
            request = Request(prompt, asked.count, asked.sampling, asked.noise, going_on=going_on)
            if request.indices:
                yield request

    def _going_on(self, prompt: Prompt, left: set[int], asked: Asked, state: StepState, step: int) -> GoingOn:
        """
        Args:
            left: samples of the prompt that have not ended.
        """
        begun = {
            index: sample for (uid, index), sample in state.begun.get(asked.node.id, {}).items() if uid == prompt.uid
        }
        before = self._moments.at(step) if self._moments is not None else None
        after = self._moments.at(step + 1) if self._moments is not None and state.step > step else None
        stops = {} if after is None else {i: n for i, n in after.standing.get(prompt.uid, {}).items() if i in left}
        lengths = {index: len(begun[index].token_ids) if index in begun else 0 for index in left}
        stand = {index for index, tokens in stops.items() if tokens <= lengths[index]}
        goes = {index: sample for index, sample in begun.items() if index in left - stand}
        # What said nothing with the last weights may or may not have been computed with them.
        kept = before is not None and before.kv == "keep"
        keeps = frozenset(index for index, sample in goes.items() if kept and sample.policy_version == step - 1)
        return GoingOn(
            tuple(goes.values()),
            frozenset(range(asked.count)) - (left - stand),
            {index: tokens for index, tokens in stops.items() if index not in stand},
            keeps,
            parks=self._keeps,
        )
