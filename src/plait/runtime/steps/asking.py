"""What is asked of an engine for rollouts, and who gets the samples: of one batch, or of several in one engine, whose
samples go on with later weights. What is unfinished then at the end of a step stands still until these are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plait.data.records import FinishReason, Prompt, Sample
from plait.dataflow import Node
from plait.engines import GenerationEngine
from plait.generation.request import GoingOn, Request
from plait.generation.settings import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.step import Key
from plait.runtime.folder.moments import Moments
from plait.runtime.steps.drawing import drawing
from plait.runtime.steps.step import StepState
from plait.runtime.steps.streams import PartialRollout
from plait.runtime.steps.watch import Watch
from plait.schedule.dispatch import Key as CallKey
from plait.schedule.work import MOVED_ON, Work


class Scores(Protocol):
    """Who scores groups while others are drawn: `rewarding.RewardCalls`."""

    def submit(self, rollout: Node, group: Sequence[Sample], state: StepState) -> None: ...

    def poll(self, rollout: Node) -> bool: ...


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
class AskedRollout:
    """One rollout of a batch. growing: its prompts, and its samples as far as they are there."""

    node: Node
    state: StepState
    growing: PartialRollout
    sampling: Sampling
    noise: NoiseKey


class Asking:
    """Asks engines for the samples of rollouts, and gives each to the rollout that asked for it.

    Args:
        moments: where samples stood, and are to stand; None: the recipe has samples end with the step that began them,
            and only what an earlier stay of the run has begun goes on.
        keeps: keys and values are kept over an update.
    """

    def __init__(self, rewarding: Scores, moments: Moments | None = None, *, keeps: bool = False) -> None:
        self._rewarding, self._moments, self._keeps = rewarding, moments, keeps
        self._out: dict[str, dict[Key, AskedRollout]] = {}
        """Role → samples that its engine has been asked for, and their rollouts."""

    def work(
        self,
        asked: AskedRollout,
        engine: GenerationEngine,
        beside: Beside,
        says: Callable[[int], None],
        watch: Watch | None = None,
    ) -> Work[None]:
        """Samples of the rollout's prompts, as far as they come in this step; one step of the engine per `next()`.

        Args:
            says: told how many samples are asked for.
            watch: looks at the rollout after each step.
        """
        self._submit_whole(asked)
        while not beside.may_ask(asked.state.step):
            yield None
        repeats = self._moments is not None and self._moments.at(beside.step + 1) is not None
        # The record, if there is one, says who is drawn, and how far.
        stands = not repeats and beside.stands(asked.state.step)
        mine = set() if stands else self._ask(asked, engine, beside.step)
        if mine:
            says(len(mine))
        beside.asked.add(asked.state.step)
        if len(beside.batches) > 1:
            yield MOVED_ON
        while not beside.all_asked:
            yield None
        node, growing, out = asked.node, asked.growing, self._out_of(asked)

        def take(finished: Sequence[Sample]) -> bool:
            growing.hear(engine.said)
            has_news = self._rewarding.poll(node)
            for sample in finished:
                self._deliver(sample, out)
            if watch is not None:
                watch.look(len(finished))
            return has_news

        def is_there() -> bool:
            """While nobody else draws, samples may still be on their way between instances."""
            return mine.isdisjoint(out) and bool(out or not mine)

        def halt() -> None:
            if not repeats:  # else they stop by themselves
                beside.halt(engine, parks=self._keeps)

        yield from drawing(engine, node.call, take, before=halt, until=is_there)
        growing.hear({})
        for key in mine:
            out.pop(key, None)

    def _out_of(self, asked: AskedRollout) -> dict[Key, AskedRollout]:
        """All samples that the engine of its role has been asked for."""
        return self._out.setdefault(str(asked.node.role), {})

    def _ask(self, asked: AskedRollout, engine: GenerationEngine, step: int) -> set[Key]:
        """Ask for what is to be drawn in this step; the samples."""
        requests = list(self._requests(asked, step))
        mine = {(request.prompt.uid, index) for request in requests for index in request.indices}
        self._out_of(asked).update(dict.fromkeys(mine, asked))
        for request in requests:
            engine.add(request)
        return mine

    def _submit_whole(self, asked: AskedRollout) -> None:
        """Groups that were whole in an earlier stay of the run go to the reward functions again."""
        sent = set(asked.state.sent.get(asked.node.id, ()))
        for group in asked.growing.whole:
            if group[0].prompt.uid not in sent:
                self._submit(asked, group)

    def _deliver(self, sample: Sample, out: dict[Key, AskedRollout]) -> None:
        """To the rollout that asked for it."""
        key = sample.prompt.uid, sample.index
        asked = out.pop(key)
        begun = asked.state.begun.setdefault(asked.node.id, {})
        begun.pop(key, None)
        if sample.finish_reason is FinishReason.OPEN:
            if sample.token_ids:
                begun[key] = sample
        elif (group := asked.growing.take(sample)) is not None:
            self._submit(asked, group)

    def _submit(self, asked: AskedRollout, group: Sequence[Sample]) -> None:
        self._rewarding.submit(asked.node, group, asked.state)
        asked.state.sent.setdefault(asked.node.id, set()).add(group[0].prompt.uid)

    def _requests(self, asked: AskedRollout, step: int) -> Iterator[Request]:
        """What is asked for in a step: samples that have not ended, up to where they stood when it ended in an earlier
        stay of the run."""
        unfinished: dict[int, set[int]] = {}
        for uid, index in asked.growing.unfinished:
            unfinished.setdefault(uid, set()).add(index)
        for prompt in asked.growing.prompts:
            going_on = self._going_on(prompt, unfinished.get(prompt.uid, set()), asked, step)
            request = Request(prompt, asked.growing.count, asked.sampling, asked.noise, going_on=going_on)
            if request.indices:
                yield request

    def _going_on(self, prompt: Prompt, left: set[int], asked: AskedRollout, step: int) -> GoingOn:
        """
        Args:
            left: samples of the prompt that have not ended.
        """
        state = asked.state
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
            frozenset(range(asked.growing.count)) - (left - stand),
            {index: tokens for index, tokens in stops.items() if index not in stand},
            keeps,
            parks=self._keeps,
        )
