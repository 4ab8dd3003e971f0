"""Runs generation, migration and scoring in simulated seconds, by the policies that the engines run and the dispatcher
of a run.

Generation on an instance is a task, and so is scoring on it, which begins when the instance is let go. Every instance
decides its next step by `policy.batching.Scheduler`, once a step has ended. When few samples are left
`policy.migration.decide` says which instances are freed; their samples travel on the link lane and go on elsewhere,
and the freed instances score what is finished. With a threshold of zero the same code is serial execution: scoring
starts when the last sample has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from plait.errors import ConfigError
from plait.policy.migration import InstanceLoad, Migration, Move, Transfer, Unfinished, decide
from plait.policy.step import Key, Limits, StepKind
from plait.schedule.action import Kind, action_id
from plait.schedule.dispatch import Dispatcher, Task
from plait.schedule.dispatch import Key as TaskKey
from plait.schedule.timeline import Timeline
from plait.schedule.work import MOVED_ON, Done, Work
from plait.simulator.clock import SimulatedClock
from tests.policy.played_engine import Request, SimulatedEngine, Step


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scoring of finished samples by each of `roles`: `seconds(role, tokens)` for a batch of at most `max_tokens`
    (a longer sample goes alone).
    """

    roles: tuple[str, ...]
    seconds: Callable[[str, int], float]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Fusion:
    """Migration: the policy's settings and what a move costs.

    threshold, max_batch, kept: of `policy.migration.decide`; transfer: how a sample travels, decided with it
    kv_bytes:  of a context of so many tokens; kv_bytes_free: what an instance has beside its own samples
    move_s:    seconds on the link for a sample's move, given the sample and how it travels
    """

    threshold: int
    max_batch: int
    kv_bytes: Callable[[int], int] = lambda tokens: tokens
    kv_bytes_free: int = 2**62
    move_s: Callable[[Unfinished, Transfer], float] = lambda sample, transfer: 0.0
    transfer: Callable[[Unfinished], Transfer] = lambda sample: Transfer.KV
    kept: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """timeline: steps, moves and scores, rank = instance; generation_s: end of the last sample;
    migration: the decision, None if there was none; steps: [instance] every step in order
    """

    timeline: Timeline
    generation_s: float
    migration: Migration | None
    steps: tuple[tuple[Step, ...], ...]


def simulate_rollout(
    requests: Sequence[Sequence[Request]],
    limits: Limits,
    step_s: Callable[[Step], float],
    *,
    scoring: Scoring | None = None,
    fusion: Fusion | None = None,
    model: str = "actor",
) -> Outcome:
    """Generate, and score if asked to, until all is done.

    requests: of each instance, in order of arrival
    step_s:   seconds of a step
    fusion:   None or a threshold of 0: no migration, scoring after the last sample

    Raises `ConfigError` when a kept instance could get more samples than `limits` allow, or a request occurs twice.
    """
    if fusion is not None and fusion.max_batch > limits.max_running:
        raise ConfigError(f"max_batch: expected at most max_running = {limits.max_running}, found {fusion.max_batch}")
    clock = SimulatedClock()
    rollout = _Rollout(requests, limits, step_s, scoring, fusion, model, clock)
    Dispatcher(rollout, clock, here=None).run(rollout.keys)
    assert rollout.left == 0, f"{rollout.left} samples were never finished"
    return Outcome(
        Timeline(tuple(clock.spans)).ordered(),
        rollout.generation_s,
        rollout.migration,
        tuple(tuple(instance.steps) for instance in rollout.instances),
    )


_GENERATE, _SCORE = 0, 1
"""What an instance does: its tasks have the numbers 2 i and 2 i + 1, so that instances take turns by their numbers."""


@dataclass(slots=True)
class _Instance:
    """current: the step under way; leaving: where its samples go, once that is decided; task: its generation, while it
    goes on; freed: the device has nothing left to do for generation
    """

    number: int
    engine: SimulatedEngine
    current: Step | None = None
    leaving: dict[Key, Move] | None = None
    task: Task | None = None
    freed: bool = False
    steps: list[Step] = field(default_factory=list)
    num_scores: int = 0

    def free(self) -> None:
        """Let the device go; what is still to be sent goes over the link beside what comes next on it."""
        self.freed = True
        if self.task is not None:
            self.task.release()


class _Rollout:
    """`schedule.dispatch.Program`: generation and scoring of each instance, which is a rank."""

    def __init__(
        self,
        requests: Sequence[Sequence[Request]],
        limits: Limits,
        step_s: Callable[[Step], float],
        scoring: Scoring | None,
        fusion: Fusion | None,
        model: str,
        clock: SimulatedClock,
    ):
        self.step_s, self.scoring, self.fusion, self.model, self.clock = step_s, scoring, fusion, model, clock
        self.instances = [_Instance(number, SimulatedEngine(limits)) for number in range(len(requests))]
        self.tokens: dict[Key, int] = {}
        for instance, queue in zip(self.instances, requests, strict=True):
            for request in queue:
                instance.engine.add(request)
                for index, length in enumerate(request.lengths):
                    if (request.uid, index) in self.tokens:
                        raise ConfigError(f"request {request.uid}: expected uids that occur once")
                    self.tokens[request.uid, index] = request.prompt_tokens + length
        self.number = {key: k for k, key in enumerate(self.tokens)}
        self.left = len(self.tokens)
        self.generation_s = 0.0
        self.migration: Migration | None = None
        self.transfers: dict[int, Transfer] = {}
        """Number of a sample → how it travels, where it moves."""
        roles = scoring.roles if scoring is not None else ()
        self.unscored: dict[str, list[Key]] = {role: [] for role in roles}

    @property
    def keys(self) -> list[TaskKey]:
        what = (_GENERATE,) if self.scoring is None else (_GENERATE, _SCORE)
        return [(0, 2 * instance.number + one) for instance in self.instances for one in what]

    def needs(self, key: TaskKey) -> Collection[TaskKey]:
        number, what = divmod(key[1], 2)
        return ((0, 2 * number),) if what == _SCORE and not self.instances[number].freed else ()

    def partners(self, key: TaskKey) -> tuple[TaskKey, ...]:
        return (key,)

    def mesh(self, key: TaskKey) -> frozenset[int]:
        return frozenset({key[1] // 2})

    def begin(self, keys: tuple[TaskKey, ...]) -> Task:
        number, what = divmod(keys[0][1], 2)
        instance = self.instances[number]
        if what == _SCORE:
            return Task(keys, f"score/{number}", self._score(instance), self.mesh(keys[0]))
        instance.task = Task(keys, f"{self.model}/{number}", self._generate(instance), self.mesh(keys[0]), self.model)
        return instance.task

    def _generate(self, instance: _Instance) -> Work[None]:
        while self.left:
            if instance.leaving is not None:
                instance.free()
                self._send(instance, instance.leaving)
                return
            if instance.engine.has_work:
                yield from self._step(instance)
            else:  # samples of others may come
                yield None

    def _step(self, instance: _Instance) -> Work[None]:
        step = instance.engine.step()
        kind = Kind.PREFILL if step.kind is StepKind.PREFILL else Kind.DECODE
        name = action_id(kind, self.model, instance.number, 0, len(instance.steps))
        instance.steps.append(step)
        instance.current = step
        done = Done(name, kind.value, step.num_tokens)
        decided = yield from self.clock.take(
            done, instance.number, self.model, self.step_s(step), lambda: self._ended(instance, step)
        )
        if not decided:  # who scores takes what has ended before this instance goes on
            yield MOVED_ON

    def _ended(self, instance: _Instance, step: Step) -> bool:
        """Whether that changes what all of them do."""
        instance.current = None
        for key in step.finished:
            self.left -= 1
            for queue in self.unscored.values():
                queue.append(key)
        if self.left == 0:
            self.generation_s = self.clock.now_s
            for other in self.instances:
                other.free()
            return True
        if step.finished and self.migration is None and self.fusion is not None:
            self._consider(self.fusion)
            return self.migration is not None
        return False

    def _consider(self, fusion: Fusion) -> None:
        if any(instance.engine.num_waiting for instance in self.instances):
            return
        loads = [
            InstanceLoad(
                instance.number,
                tuple(self._unfinished(key, tokens, fusion) for key, tokens in self._growing(instance)),
                fusion.kv_bytes_free,
            )
            for instance in self.instances
        ]
        self.migration = decide(loads, fusion.threshold, fusion.max_batch, fusion.kept)
        if self.migration is None:
            return
        self.transfers = {sample.sample: fusion.transfer(sample) for load in loads for sample in load.unfinished}
        for number in self.migration.free:
            self.instances[number].leaving = {}
            if self.instances[number].current is None:
                self.instances[number].free()
        samples = {number: key for key, number in self.number.items()}
        for move in self.migration.moves:
            leaving = self.instances[move.source].leaving
            assert leaving is not None, f"sample {move.sample} moves from an instance that is kept"
            leaving[samples[move.sample]] = move

    def _growing(self, instance: _Instance) -> Iterator[tuple[Key, int]]:
        """The samples of an instance that are not known to be finished, with their tokens: the ends of a step under
        way are not known yet.
        """
        for sample in instance.engine.running:
            yield sample.key, sample.tokens
        for key in instance.current.finished if instance.current is not None else ():
            yield key, self.tokens[key]

    def _unfinished(self, key: Key, tokens: int, fusion: Fusion) -> Unfinished:
        return Unfinished(self.number[key], tokens, fusion.kv_bytes(tokens))

    def _send(self, instance: _Instance, moves: dict[Key, Move]) -> None:
        """The samples of a freed instance leave, one after the other over its link."""
        assert self.fusion is not None, "samples moved without settings for it"
        end = 0.0
        for sample in instance.engine.export():
            move = moves[sample.key]
            unfinished = self._unfinished(sample.key, sample.tokens, self.fusion)
            name = action_id(Kind.MOVE, self.model, instance.number, 0, move.sample)
            transfer = self.transfers[move.sample]
            moved = unfinished.kv_bytes if transfer is Transfer.KV else 0
            target = self.instances[move.target].engine
            end = self.clock.begin(
                Done(name, Kind.MOVE.value, bytes=moved, lane=Kind.MOVE.lane),
                instance.number,
                self.model,
                self.fusion.move_s(unfinished, transfer),
                lambda sample=sample, target=target, transfer=transfer: target.import_(sample, transfer),
                after_s=end,
            )

    def _score(self, instance: _Instance) -> Work[None]:
        assert self.scoring is not None, "scoring without settings"
        while True:
            role = next((role for role, queue in self.unscored.items() if queue), None)
            if role is not None:
                tokens = self._take(self.unscored[role], self.scoring.max_tokens)
                name = action_id(Kind.SCORE, role, instance.number, 0, instance.num_scores)
                instance.num_scores += 1
                done, seconds = Done(name, Kind.SCORE.value, tokens), self.scoring.seconds(role, tokens)
                yield from self.clock.take(done, instance.number, role, seconds, lambda: None)
            elif self.left:  # more will be finished
                yield None
            else:
                return

    def _take(self, queue: list[Key], most: int) -> int:
        """The next batch out of a queue: its tokens."""
        size, tokens = 0, 0
        while size < len(queue) and (size == 0 or tokens + self.tokens[queue[size]] <= most):
            tokens += self.tokens[queue[size]]
            size += 1
        del queue[:size]
        return tokens
