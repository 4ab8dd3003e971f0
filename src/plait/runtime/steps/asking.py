"""Asks an engine for the samples of rollouts, and gives each sample to the rollout that asked for it.

Rollouts of several batches may share an engine, and their samples may go on with later weights: what is unfinished at
the end of a step then halts until the new weights are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plait.data.records import FinishReason, Prompt, Sample
from plait.dataflow import Node
from plait.engines import GenerationEngine
from plait.generation.request import GoingOn, Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.step import Key
from plait.runtime.folder.moments import Moment, Moments
from plait.runtime.steps.engine_loop import engine_loop
from plait.runtime.steps.partial_rollout import PartialRollout
from plait.runtime.steps.step import StepState
from plait.runtime.steps.watch import Watch
from plait.schedule.dispatch import Key as CallKey
from plait.schedule.update_rule import WAITS, UpdateRule
from plait.schedule.work import MOVED_ON, Work


class Scores(Protocol):
    """Scores groups while others are drawn: `rewarding.RewardCalls`."""

    def submit(self, rollout: Node, group: Sequence[Sample], state: StepState) -> None: ...

    def poll(self, rollout: Node) -> bool: ...


@dataclass
class Beside:
    """The rollouts of one step: its own, and those of later batches that run with it."""

    step: int
    batches: tuple[int, ...]
    """The batches whose rollouts run, in the order in which they ask for samples."""
    until: frozenset[CallKey] | None = None
    """When these calls have ended, the rollouts of later batches halt; if empty, before they begin. None: they do not
    halt."""
    ended: set[CallKey] = field(default_factory=set)
    """Calls that have ended."""
    asked: set[int] = field(default_factory=set)
    """Batches of which all samples have been asked for."""
    halted: bool = False

    def may_ask(self, batch: int) -> bool:
        """Whether all earlier batches have asked: whoever asks first gets the places in the engine."""
        return all(earlier in self.asked for earlier in self.batches if earlier < batch)

    @property
    def all_asked(self) -> bool:
        return self.asked.issuperset(self.batches)

    def stands(self, batch: int) -> bool:
        """Whether a batch is not to be drawn any further in this step."""
        return batch > self.step and self.until is not None and self.until <= self.ended

    def halt(self, engine: GenerationEngine, *, parks: bool) -> None:
        """Halt the engine, once, if a batch is not to be drawn any further."""
        if not self.halted and any(map(self.stands, self.batches)):
            self.halted = True
            engine.halt(parks=parks)


@dataclass(frozen=True)
class AskedRollout:
    """One rollout of a batch, and how it samples; `growing` has its prompts and the samples that have ended."""

    node: Node
    state: StepState
    growing: PartialRollout
    sampling: Sampling
    noise: NoiseKey
    name: str = ""
    """`Dataflow.rollout_name`."""


class Asking:
    """See the top of the file.

    Args:
        moments: how far samples were when weights changed, which a resumed run repeats; None: samples end in the step
            that began them, and only samples that an earlier stay of the run has begun go on.
        rule: how samples go on when weights change.
    """

    def __init__(self, rewarding: Scores, moments: Moments | None = None, rule: UpdateRule = WAITS) -> None:
        self._rewarding, self._moments, self._rule = rewarding, moments, rule
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
        """Draw the samples of the rollout's prompts, as far as they come in this step; one step of the engine per
        `next()`.

        Args:
            says: is told how many samples are asked for.
            watch: looks at the rollout after each step.
        """
        self._submit_whole(asked)
        while not beside.may_ask(asked.state.step):
            yield None
        # What says which samples are drawn, and how far: an earlier stay of the run, or the rule; else the clock.
        is_said = self.record(beside) is not None or self._rule.tokens is not None
        stands = not is_said and beside.stands(asked.state.step)
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
            """Whether the loop may end while the engine still has work: this rollout asked for nothing, or all of its
            samples have come and only those of other rollouts are outstanding."""
            return mine.isdisjoint(out) and bool(out or not mine)

        def halt() -> None:
            if not is_said:  # else samples stop by themselves
                beside.halt(engine, parks=self._rule.keeps)

        yield from engine_loop(engine, node.call, take, before=halt, until=is_there)
        growing.hear({})
        for key in mine:
            out.pop(key, None)

    def record(self, beside: Beside) -> Moment | None:
        """What an earlier stay of the run has recorded of the end of a step; None: nothing."""
        return None if self._moments is None else self._moments.at(beside.step + 1)

    def _out_of(self, asked: AskedRollout) -> dict[Key, AskedRollout]:
        """The samples that the engine of the rollout's role has been asked for and not delivered."""
        return self._out.setdefault(str(asked.node.role), {})

    def _ask(self, asked: AskedRollout, engine: GenerationEngine, step: int) -> set[Key]:
        """Ask the engine for what is to be drawn in this step; the samples asked for."""
        requests = list(self._requests(asked, step))
        mine = {(request.prompt.uid, index) for request in requests for index in request.indices}
        self._out_of(asked).update(dict.fromkeys(mine, asked))
        for request in requests:
            engine.add(request)
        return mine

    def _submit_whole(self, asked: AskedRollout) -> None:
        """Give groups that an earlier stay of the run had completed to the reward functions again."""
        sent = set(asked.state.sent.get(asked.node.id, ()))
        for group in asked.growing.whole:
            if group[0].prompt.uid not in sent:
                self._submit(asked, group)

    def _deliver(self, sample: Sample, out: dict[Key, AskedRollout]) -> None:
        """Give a sample to the rollout that asked for it; a whole group goes to the reward functions."""
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
        """The requests of a step: for samples that have not ended, as far as the record of an earlier stay says."""
        unfinished: dict[int, set[int]] = {}
        for uid, index in asked.growing.unfinished:
            unfinished.setdefault(uid, set()).add(index)
        begun: dict[int, dict[int, Sample]] = {}
        for (uid, index), sample in asked.state.begun.get(asked.node.id, {}).items():
            begun.setdefault(uid, {})[index] = sample
        for prompt in asked.growing.prompts:
            left = unfinished.get(prompt.uid, set())
            going_on = self._going_on(prompt, left, begun.get(prompt.uid, {}), asked, step)
            is_made = asked.node.prompts is not None  # `turns.reply` answers what is said to prompts of the data
            request = Request(
                prompt,
                asked.growing.count,
                asked.sampling,
                asked.noise,
                going_on=going_on,
                one_turn=is_made,
                rollout=asked.name,
            )
            if request.indices:
                yield request

    def _going_on(
        self, prompt: Prompt, left: set[int], begun: Mapping[int, Sample], asked: AskedRollout, step: int
    ) -> GoingOn:
        """Where the samples of a prompt go on, and where they stop.

        Args:
            left: indices of the samples of the prompt that have not ended.
            begun: index → those of them that have begun.
        """
        state = asked.state
        before = self._moments.at(step) if self._moments is not None else None
        after = self._moments.at(step + 1) if self._moments is not None and state.step > step else None
        lengths = {index: begun[index].num_tokens if index in begun else 0 for index in left}
        stops: dict[int, int] = {}
        if after is not None:
            stops = {i: n for i, n in after.standing.get(prompt.uid, {}).items() if i in left}
        elif self._rule.tokens is not None and state.step > step:
            stops = {index: tokens + self._rule.tokens for index, tokens in lengths.items()}
        stand = {index for index, tokens in stops.items() if tokens <= lengths[index]}
        goes = {index: sample for index, sample in begun.items() if index in left - stand}
        # A sample that drew no token with the last weights, or is between two turns, may not have been computed.
        kept = before is not None and before.kv == "keep"
        within = (sample for sample in goes.values() if sample.is_within_turn)
        keeps = frozenset(sample.index for sample in within if kept and sample.policy_version == step - 1)
        return GoingOn(
            tuple(goes.values()),
            frozenset(range(asked.growing.count)) - (left - stand),
            {index: tokens for index, tokens in stops.items() if index not in stand},
            keeps,
            parks=self._rule.keeps,
        )
