"""Batches generated ahead: by hand, and at random with simulated seconds and slow sides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.dataflow import CallKind, Node, trace
from plait.runtime.steps.asking import Beside
from plait.schedule.dispatch import Dispatcher, Key, Task
from plait.schedule.needs import early_scores, needs_of
from plait.schedule.open_steps import OpenSteps
from plait.schedule.work import Done, Work
from plait.simulator.clock import SimulatedClock

FLOW = trace(grpo, roles=("actor", "ref", "reward"), options=GRPOOptions(kl_coef=0.1, mini_batches=2))
CALLS = {node.call: node.id for node in FLOW.nodes}
GENERATE, TRAIN, REF = CALLS["actor.generate"], CALLS["actor.train"], CALLS["ref.logprobs"]


def open_steps(most: int, steps: int = 6, *, apart: bool = False, frozen: Collection[str] = ()) -> OpenSteps:
    needs = needs_of(FLOW, ["reward"])
    return OpenSteps(FLOW, needs, most, steps, lambda node: apart, early=early_scores(FLOW, needs, frozen))


def test_with_nothing_ahead_a_step_is_its_own_calls() -> None:
    one = open_steps(0)
    assert one.calls(2, done=()) == [(2, node.id) for node in FLOW.nodes]
    assert one.needs(2, (2, TRAIN)) == {(2, need) for need in needs_of(FLOW, ["reward"])[TRAIN]}


def test_the_first_step_draws_as_many_batches_as_may_be_open() -> None:
    one = open_steps(2)
    assert one.calls(0, done=()) == [*((0, node.id) for node in FLOW.nodes), (1, GENERATE), (2, GENERATE)]
    rest = [(1, node.id) for node in FLOW.nodes if node.id != GENERATE]
    assert one.calls(1, done={(1, GENERATE), (2, GENERATE)}) == [*rest, (3, GENERATE)]


def test_a_model_that_never_changes_scores_a_batch_when_it_is_drawn() -> None:
    needs = needs_of(FLOW, ["reward"])
    assert early_scores(FLOW, needs, ["ref"]) == {REF}
    one = open_steps(1, frozen=["ref"])
    assert one.calls(0, done=())[-2:] == [(1, GENERATE), (1, REF)]
    assert one.needs(0, (1, REF)) == {(1, GENERATE)}
    assert (1, REF) not in one.calls(1, done={(1, GENERATE), (1, REF)})
    assert (1, REF) in one.calls(1, done={(1, GENERATE)}), "as where a checkpoint was read, which keeps no scores"
    halting = replace(one, beside=lambda node: True)
    assert halting.calls(0, done=())[-1] == (1, GENERATE), "not all of its samples need be there"


def test_a_reward_model_scores_a_batch_when_it_is_drawn_and_is_added_up_in_its_step() -> None:
    """Its call runs twice: it is none of what is done before the step."""
    needs = needs_of(FLOW, ["reward"])
    reward = CALLS["reward.score"]
    assert early_scores(FLOW, needs, ["ref", "reward"]) == {REF, reward}
    one = open_steps(1, frozen=["ref", "reward"])
    assert set(one.calls(0, done=())[-3:]) == {(1, GENERATE), (1, REF), (1, reward)}
    assert one.needs(0, (1, reward)) == {(1, GENERATE)}
    assert (1, reward) in one.calls(1, done={(1, GENERATE), (1, REF)})


def test_nothing_is_drawn_for_steps_behind_the_last() -> None:
    one = open_steps(2, steps=4)
    assert list(one.ahead(1)) == [2, 3]
    assert list(one.ahead(2)) == [3]
    assert [key for key in one.calls(3, done={(3, GENERATE)}) if key[1] == GENERATE] == []


def test_rollouts_draw_prompts_in_the_order_of_their_batches() -> None:
    assert {(0, GENERATE), (1, GENERATE)} <= open_steps(2).needs(0, (2, GENERATE))


def test_weights_that_generate_are_trained_when_nothing_generates_with_them() -> None:
    assert {(1, GENERATE), (2, GENERATE)} <= open_steps(2).needs(0, (0, TRAIN))
    assert not {(1, GENERATE), (2, GENERATE)} & open_steps(2, apart=True).needs(0, (0, TRAIN))


@dataclass
class Run:
    """A run in simulated seconds, on a rank that generates and one that does everything else, or on one alone.

    seconds: of each call, by its kind; actions: of each call.
    """

    open: OpenSteps
    ranks: dict[CallKind, int]
    seconds: dict[CallKind, float]
    actions: int = 2
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    version: int = 0
    drawn: dict[int, int] = field(default_factory=dict)
    """Batch → the version that all of its actions were done with."""
    scored: list[Key] = field(default_factory=list)
    trained: list[tuple[int, int]] = field(default_factory=list)
    """(batch, version of its samples) of each update."""
    most_open: int = 0
    published: int = 0
    step: int = 0

    def needs(self, key: Key) -> Collection[Key]:
        return self.open.needs(self.step, key)

    def partners(self, key: Key) -> tuple[Key, ...]:
        return (key,)

    def mesh(self, key: Key) -> frozenset[int]:
        kind = self.open.flow.nodes[key[1]].kind
        return frozenset((self.ranks[kind],)) if kind in self.ranks else frozenset()

    def begin(self, keys: tuple[Key, ...]) -> Task:
        ((batch, number),) = keys
        node = self.open.flow.nodes[number]
        return Task(keys, node.call, self.work(batch, node), self.mesh(keys[0]))

    def work(self, batch: int, node: Node) -> Work[None]:
        for number in range(self.actions):
            apart = self.open.apart(node)
            version = self.published if apart else self.version
            if node.kind is CallKind.GENERATE:
                assert self.drawn.setdefault(batch, version) == version, "a sample has two versions"
                self.most_open = max(self.most_open, len(self.drawn) - len(self.trained))
            done = Done(f"{node.call}/{number}", node.kind.name)
            rank = self.ranks.get(node.kind, 9)
            yield from self.clock.take(done, rank, "", self.seconds.get(node.kind, 0.0), lambda: None)
            if node.kind is CallKind.TRAIN:
                self.version = -1  # nobody may draw with weights that are half trained
        if node.kind is CallKind.SCORE:
            self.scored.append((batch, node.id))
        if node.kind is CallKind.TRAIN:
            self.trained.append((batch, self.drawn[batch]))

    def run(self, steps: int) -> None:
        for self.step in range(steps):
            drawn = {(batch, GENERATE) for batch in self.drawn if batch >= self.step}
            Dispatcher(self, self.clock).run(self.open.calls(self.step, drawn | {*self.scored}))
            self.version = self.published = self.step + 1


@dataclass
class Halting(Run):
    """Rollouts of later batches halt with the step, and go on in the next; a sample is a row of actions."""

    said: dict[int, list[int]] = field(default_factory=dict)
    """Batch → the version of each action of its rollout, so far."""
    beside: Beside = field(default_factory=lambda: Beside(0, ()))

    def mesh(self, key: Key) -> frozenset[int]:
        return frozenset() if self.open.halts(self.step, key) else super().mesh(key)

    def begin(self, keys: tuple[Key, ...]) -> Task:
        task = super().begin(keys)
        node = self.open.flow.nodes[keys[0][1]]
        if self.open.halts(self.step, keys[0]) and self.open.beside is not None and not self.open.beside(node):
            task.mesh = super().mesh(keys[0])
        task.work = self.ending(task.work, keys)
        return task

    def ending(self, work: Work[None], keys: tuple[Key, ...]) -> Work[None]:
        yield from work
        self.beside.ended.update(keys)

    def work(self, batch: int, node: Node) -> Work[None]:
        if node.kind is not CallKind.GENERATE:
            yield from super().work(batch, node)
            return
        said = self.said.setdefault(batch, [])
        while len(said) < self.actions:
            if self.beside.stands(batch):
                return
            version = self.published if self.open.apart(node) else self.version
            assert version >= 0, "it was drawn with weights that are half trained"
            done = Done(f"{node.call}/{len(said)}", node.kind.name)
            rank = self.ranks.get(node.kind, 9)
            yield from self.clock.take(done, rank, "", self.seconds.get(node.kind, 0.0), lambda: None)
            said.append(version)
            self.drawn[batch] = said[0]
            self.most_open = max(self.most_open, len(self.drawn) - len(self.trained))

    def run(self, steps: int) -> None:
        for self.step in range(steps):
            whole = {(batch, GENERATE) for batch, said in self.said.items() if len(said) == self.actions}
            keys = self.open.calls(self.step, whole)
            own = [key for key in keys if key[0] == self.step]
            self.beside = Beside(self.step, (), self.open.until(self.step, own))
            Dispatcher(self, self.clock).run(keys)
            assert len(self.said[self.step]) == self.actions, "all samples are there when they are trained on"
            self.version = self.published = self.step + 1


APART = {CallKind.GENERATE: 1, CallKind.SCORE: 0, CallKind.TRAIN: 0}
ALONE = {CallKind.GENERATE: 0, CallKind.SCORE: 0, CallKind.TRAIN: 0}


@given(
    most=st.integers(0, 4),
    steps=st.integers(1, 7),
    apart=st.booleans(),
    generating=st.floats(0.1, 10),
    training=st.floats(0.1, 10),
    scoring=st.floats(0, 3),
    frozen=st.sampled_from([(), ("ref",)]),
)
def test_every_batch_is_trained_once_by_its_version_and_nobody_waits_for_ever(
    most: int, steps: int, apart: bool, generating: float, training: float, scoring: float, frozen: tuple[str, ...]
) -> None:
    seconds = {CallKind.GENERATE: generating, CallKind.TRAIN: training, CallKind.SCORE: scoring}
    run = Run(open_steps(most, steps, apart=apart, frozen=frozen), APART if apart else ALONE, seconds)
    run.run(steps)
    scores = [node.id for node in FLOW.of_kind(CallKind.SCORE)]
    assert sorted(run.scored) == [(batch, node) for batch in range(steps) for node in scores]
    assert run.trained == [(batch, max(0, batch - most)) for batch in range(steps)]
    assert set(run.drawn) == set(range(steps))
    assert run.most_open <= most + 1
    if not apart:  # one rank does all there is to do, and nothing twice
        per_step = 2 * sum(seconds.get(node.kind, 0.0) for node in FLOW.nodes if node.kind in ALONE)
        assert run.clock.now_s == pytest.approx(steps * per_step, rel=1e-6)


@given(
    most=st.integers(1, 4),
    steps=st.integers(1, 7),
    apart=st.booleans(),
    generating=st.floats(0.1, 10),
    training=st.floats(0.1, 10),
    scoring=st.floats(0, 3),
    actions=st.integers(1, 9),
)
def test_samples_that_go_on_are_never_older_than_they_may_be(
    most: int, steps: int, apart: bool, generating: float, training: float, scoring: float, actions: int
) -> None:
    """Whichever side is slower, each action of a rollout is done once, and by weights that are young enough."""
    seconds = {CallKind.GENERATE: generating / actions, CallKind.TRAIN: training, CallKind.SCORE: scoring}
    one = OpenSteps(FLOW, needs_of(FLOW, ["reward"]), most, steps, lambda node: apart, lambda node: apart)
    run = Halting(one, APART if apart else ALONE, seconds, actions)
    run.run(steps)
    assert [batch for batch, _ in run.trained] == list(range(steps))
    assert set(run.said) == set(range(steps))
    for batch, versions in run.said.items():
        assert versions == sorted(versions)
        assert len(versions) == actions
        assert 0 <= batch - versions[0] <= most
        assert versions[-1] <= batch
    assert run.most_open <= most + 1


def test_rollouts_ahead_go_on_beside_what_they_leave_alone() -> None:
    before = needs_of(FLOW, ["reward"])
    apart = OpenSteps(FLOW, before, 1, 6, lambda node: True, lambda node: True)
    shared = OpenSteps(FLOW, before, 1, 6, lambda node: False, lambda node: False)
    own = [(0, node.id) for node in FLOW.nodes]
    assert apart.until(0, own) == frozenset(own)
    assert shared.until(0, own) == {(0, GENERATE)}
    assert apart.needs(0, (1, GENERATE)) == frozenset()
    assert (1, GENERATE) in shared.needs(0, (0, TRAIN))
    for one in (shared, apart):
        assert one.calls(1, done={(1, GENERATE)})[-1] == (2, GENERATE), "which batches are open is no matter of plans"
    rest = [(1, node.id) for node in FLOW.nodes if node.id != GENERATE]
    assert Beside(1, (2,), apart.until(1, rest)).stands(2) is False
    assert Beside(1, (2,), shared.until(1, rest)).stands(2), "nothing to fill where the step has no rollout"
    assert not Beside(1, (1, 2), shared.until(1, [*rest, (1, GENERATE)])).stands(2)
    assert shared.halts(0, (1, GENERATE))
    assert not shared.halts(0, (0, GENERATE))


@pytest.mark.parametrize(("generating", "training"), [(1.0, 1.0), (10.0, 1.0), (1.0, 10.0)])
def test_one_batch_ahead_takes_the_longer_side_alone(generating: float, training: float) -> None:
    steps, seconds = 6, {CallKind.GENERATE: generating, CallKind.TRAIN: training}
    spent = {}
    for most in (0, 1, 2):
        run = Run(open_steps(most, steps, apart=True), APART, seconds)
        run.run(steps)
        spent[most] = run.clock.now_s
    assert spent[0] == pytest.approx(steps * 2 * (generating + training))
    # The first batch is drawn before anything can be trained, the last is trained when there is none left to draw.
    assert spent[1] == pytest.approx(2 * (generating + training + (steps - 1) * max(generating, training)))
    assert spent[2] <= spent[1] + 2 * generating
