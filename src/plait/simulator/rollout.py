"""Runs generation, migration and scoring with a virtual clock, by the policies that the engines run.

Every instance decides its next step by `policy.batching.Scheduler`, once a step has ended. When few samples are left
`policy.migration.decide` says which instances are freed; their samples travel on the link lane and go on elsewhere,
and the freed instances score what is finished. With a threshold of zero the same code is serial execution: scoring
starts when the last sample has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from plait.errors import ConfigError
from plait.policy.migration import InstanceLoad, Migration, Move, Transfer, Unfinished, decide
from plait.policy.step import Key, Limits, StepKind
from plait.schedule.action import Kind, action_id
from plait.schedule.timeline import Span, Timeline
from plait.simulator.engine import Request, Running, SimulatedEngine, Step


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

    threshold, max_batch, transfer: of `policy.migration.decide`
    kv_bytes:  of a context of so many tokens; kv_bytes_free: what an instance has beside its own samples
    move_s:    seconds on the link for a sample's move, given the sample and how it travels
    """

    threshold: int
    max_batch: int
    kv_bytes: Callable[[int], int] = lambda tokens: tokens
    kv_bytes_free: int = 2**62
    move_s: Callable[[Unfinished, Transfer], float] = lambda sample, transfer: 0.0
    transfer: Callable[[Unfinished], Transfer] = lambda sample: Transfer.KV


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
    rollout = _Rollout(requests, limits, step_s, scoring, fusion, model)
    rollout.run()
    return Outcome(
        Timeline(tuple(rollout.spans)).ordered(),
        rollout.generation_s,
        rollout.migration,
        tuple(tuple(instance.steps) for instance in rollout.instances),
    )


@dataclass(slots=True)
class _Instance:
    """busy: an action is under way; current: the step under way, None while scoring or idle; leaving: where its
    samples go, once that is decided
    """

    number: int
    engine: SimulatedEngine
    busy: bool = False
    current: Step | None = None
    leaving: dict[Key, Move] | None = None
    freed: bool = False
    steps: list[Step] = field(default_factory=list)
    num_scores: int = 0


class _Rollout:
    def __init__(
        self,
        requests: Sequence[Sequence[Request]],
        limits: Limits,
        step_s: Callable[[Step], float],
        scoring: Scoring | None,
        fusion: Fusion | None,
        model: str,
    ):
        self.step_s, self.scoring, self.fusion, self.model = step_s, scoring, fusion, model
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
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.ticket = 0
        self.now = self.generation_s = 0.0
        self.link_free = [0.0] * len(self.instances)
        self.migration: Migration | None = None
        roles = scoring.roles if scoring is not None else ()
        self.unscored: dict[str, list[Key]] = {role: [] for role in roles}

    def run(self) -> None:
        for instance in self.instances:
            self.go_on(instance)
        while self.events:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
        assert self.left == 0, f"{self.left} samples were never finished"

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        self.ticket += 1
        heapq.heappush(self.events, (time_s, self.ticket, happen))

    def go_on(self, instance: _Instance) -> None:
        """Begin the instance's next step, or score, or do nothing."""
        if instance.busy:
            return
        if instance.leaving is not None:
            self.send(instance)
        if instance.engine.has_work:
            self.decode(instance)
        elif self.scoring and (instance.freed or self.left == 0):
            self.score(instance)

    def decode(self, instance: _Instance) -> None:
        step = instance.engine.step()
        seconds = self.step_s(step)
        kind = Kind.PREFILL if step.kind is StepKind.PREFILL else Kind.DECODE
        name = action_id(kind, self.model, instance.number, 0, len(instance.steps))
        instance.steps.append(step)
        instance.current = step
        self.occupy(instance, name, kind, seconds, self.model, step.num_tokens, lambda: self.ended(instance, step))

    def ended(self, instance: _Instance, step: Step) -> None:
        instance.current = None
        for key in step.finished:
            self.left -= 1
            for queue in self.unscored.values():
                queue.append(key)
        if self.left == 0:
            self.generation_s = self.now
            self.wake()
        elif step.finished and self.migration is None and self.fusion is not None:
            self.consider(self.fusion)

    def consider(self, fusion: Fusion) -> None:
        if any(instance.engine.num_waiting for instance in self.instances):
            return
        loads = [
            InstanceLoad(
                instance.number,
                tuple(self.unfinished(key, tokens, fusion) for key, tokens in self.growing(instance)),
                fusion.kv_bytes_free,
            )
            for instance in self.instances
        ]
        self.migration = decide(loads, fusion.threshold, fusion.max_batch, fusion.transfer)
        if self.migration is None:
            return
        for number in self.migration.free:
            self.instances[number].leaving = {}
        samples = {number: key for key, number in self.number.items()}
        for move in self.migration.moves:
            leaving = self.instances[move.source].leaving
            assert leaving is not None, f"sample {move.sample} moves from an instance that is kept"
            leaving[samples[move.sample]] = move
        self.wake()

    def growing(self, instance: _Instance) -> Iterator[tuple[Key, int]]:
        """The samples of an instance that are not known to be finished, with their tokens: the ends of a step under
        way are not known yet.
        """
        for sample in instance.engine.running:
            yield sample.key, sample.tokens
        for key in instance.current.finished if instance.current is not None else ():
            yield key, self.tokens[key]

    def unfinished(self, key: Key, tokens: int, fusion: Fusion) -> Unfinished:
        return Unfinished(self.number[key], tokens, fusion.kv_bytes(tokens))

    def send(self, instance: _Instance) -> None:
        """At a step's end: the samples of a freed instance leave, one after the other over its link."""
        moves, instance.leaving, instance.freed = instance.leaving, None, True
        assert moves is not None, "only an instance that was told where to send to sends"
        assert self.fusion is not None, "samples moved without settings for it"
        for sample in instance.engine.export():
            move = moves[sample.key]
            tokens = sample.tokens
            unfinished = self.unfinished(sample.key, tokens, self.fusion)
            seconds = self.fusion.move_s(unfinished, move.transfer)
            start = max(self.now, self.link_free[instance.number])
            self.link_free[instance.number] = start + seconds
            name = action_id(Kind.MOVE, self.model, instance.number, 0, move.sample)
            moved = unfinished.kv_bytes if move.transfer is Transfer.KV else 0
            self.spans.append(
                Span(name, Kind.MOVE.value, instance.number, start, start + seconds, moved, 0, "send", self.model)
            )
            target = self.instances[move.target]
            self.at(start + seconds, lambda sample=sample, target=target, move=move: self.arrive(sample, target, move))

    def arrive(self, sample: Running, target: _Instance, move: Move) -> None:
        target.engine.import_(sample, move.transfer)
        self.go_on(target)

    def score(self, instance: _Instance) -> None:
        assert self.scoring is not None, "scoring without settings"
        role = next((role for role, queue in self.unscored.items() if queue), None)
        if role is None:
            return
        queue = self.unscored[role]
        size, tokens = 0, 0
        while size < len(queue) and (size == 0 or tokens + self.tokens[queue[size]] <= self.scoring.max_tokens):
            tokens += self.tokens[queue[size]]
            size += 1
        del queue[:size]
        name = action_id(Kind.SCORE, role, instance.number, 0, instance.num_scores)
        instance.num_scores += 1
        self.occupy(instance, name, Kind.SCORE, self.scoring.seconds(role, tokens), role, tokens, lambda: None)

    def occupy(
        self,
        instance: _Instance,
        name: str,
        kind: Kind,
        seconds: float,
        role: str,
        tokens: int,
        then: Callable[[], None],
    ) -> None:
        """Keep the instance's compute lane busy; what comes `then` is done at the end, and the instance goes on."""
        end = self.now + seconds
        self.spans.append(
            Span(name, kind.value, instance.number, self.now, end, tokens=tokens, lane="compute", role=role)
        )
        instance.busy = True

        def finish() -> None:
            instance.busy = False
            then()
            self.wake_scorers()
            self.go_on(instance)

        self.at(end, finish)

    def wake(self) -> None:
        for instance in self.instances:
            self.go_on(instance)

    def wake_scorers(self) -> None:
        """Freed instances that ran out of finished samples look again."""
        for instance in self.instances:
            if instance.freed:
                self.go_on(instance)
