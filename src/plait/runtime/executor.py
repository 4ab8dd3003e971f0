"""Runs training steps of a dataflow: `calls` says what each call does, `schedule.dispatch` which goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.data.rows import Rows
from plait.dataflow import CallKind, Dataflow, Node
from plait.engines import Workers
from plait.observe.progress import Progress
from plait.recipes.recipe import Recipe
from plait.runtime.calls import Calls
from plait.runtime.order import needs_of
from plait.runtime.roles import RewardRole, RoleRuntime
from plait.runtime.rollout import Draw
from plait.runtime.step import StepState
from plait.schedule.dispatch import Dispatcher, Key, Task
from plait.schedule.work import Work
from plait.training.results import COUNTS
from plait.workers.recorder import Recorder


class Executor:
    """Binds a dataflow to the engines of its roles and runs steps of it.

    Args:
        workers: all ranks.
    """

    def __init__(
        self,
        flow: Dataflow,
        roles: Mapping[str, RoleRuntime],
        recipe: Recipe,
        recorder: Recorder,
        progress: Progress,
        workers: Workers,
    ) -> None:
        self.flow = flow
        self.progress = progress
        self._recorder = recorder
        self._needs = needs_of(flow, roles)
        self._calls = Calls(flow, roles, recipe, recorder, progress)
        pools = [role.pool for role in roles.values() if isinstance(role, RewardRole) and role.pool is not None]
        self._clock = workers.clock(pools, progress)
        self._under_way: _Steps | None = None

    @property
    def is_training(self) -> bool:
        """Whether a step is beyond its first training call, so that weights are no longer those before it."""
        return self._under_way is not None and self._under_way.is_training

    def run_step(self, state: StepState, draw: Draw) -> None:
        """Generate, score, compute and train.

        Args:
            state: with the data of the step; the calls add to it. Its step keys the draws; logs count from 1.
            draw: gives further prompts to a flow that asks for them.

        Raises:
            RunError: every sample of the step lost its reward, or a call failed.
        """
        self._recorder.step = state.step + 1
        self._under_way = program = _Steps(self.flow, self._calls, self._needs, {state.step: state}, draw)
        dispatcher = Dispatcher(program, self._clock)
        dispatcher.add((state.step, node.id) for node in self.flow.nodes)
        dispatcher.run()
        program.in_order(state)
        self._under_way = None

    def evaluate_given(self, state: StepState) -> dict[str, float]:
        """The metrics that training on the given samples of `state` would have, without training on them."""
        program = _Evaluation(self.flow, self._calls, {}, {state.step: state}, lambda count: ())
        for node in self.flow.nodes:  # one after another: metrics of a name are those of the last
            dispatcher = Dispatcher(program, self._clock)
            dispatcher.add([(state.step, node.id)])
            dispatcher.run()
        return program.metrics


@dataclass
class _Steps:
    """`schedule.dispatch.Program`: the calls of steps, by (step, node)."""

    flow: Dataflow
    calls: Calls
    before: Mapping[int, frozenset[int]]
    """`order.needs_of` the flow."""
    states: Mapping[int, StepState]
    draw: Draw
    is_training: bool = False
    said: dict[int, dict[str, int]] = field(default_factory=dict)
    """Step → metric → the call that said it."""
    trained: dict[int, dict[int, dict[str, float] | None]] = field(default_factory=dict)
    """Step → training call → its metrics, until those before it have ended."""

    def needs(self, key: Key) -> Collection[Key]:
        step, node = key[0], self.flow.nodes[key[1]]
        needs = self.before[node.id]
        if node.rows in needs and node.rows in self.states[step].growing and self.calls.streams(node):
            needs -= {node.rows}  # it scores the rollout's samples as they end
        return {(step, one) for one in needs}

    def partners(self, key: Key) -> tuple[Key, ...]:
        return (key,)

    def mesh(self, key: Key) -> frozenset[int]:
        return self.calls.mesh(self.flow.nodes[key[1]], begins=True)

    def begin(self, keys: tuple[Key, ...]) -> Task:
        """Have weights brought to where they are not as they are; then the call."""
        ((step, number),) = keys
        node = self.flow.nodes[number]
        trainer = self.calls.trainer(node)
        moves = _nothing() if trainer is None else trainer.syncing_weights(node.kind)
        task = Task(keys, node.call, _nothing(), self.mesh(keys[0]), node.role or "")
        task.work = self._work(node, self.states[step], moves, task)
        return task

    def _work(self, node: Node, state: StepState, moves: Work[None], task: Task) -> Work[None]:
        yield from moves
        task.mesh = self.calls.mesh(node)  # those that brought weights are free again
        said = self.said.setdefault(state.step, dict.fromkeys(state.metrics, -1))
        work = self._call(node, state, task)
        while True:
            try:
                done = next(work)
            except StopIteration as end:
                if node.kind is CallKind.TRAIN:
                    self._training_ended(node, end.value, state)
                said |= {name: node.id for name in state.metrics if name not in said}
                return
            said |= {name: node.id for name in state.metrics if name not in said}
            yield done

    def _call(self, node: Node, state: StepState, task: Task) -> Work[Any]:
        if node.kind is CallKind.TRAIN and state.step >= node.training.after:
            self.is_training = True
        return self.calls.work(node, state, self.draw, task.release)

    def _training_ended(self, node: Node, metrics: dict[str, float] | None, state: StepState) -> None:
        """Merge what training calls said in the order of the graph, whichever ended first."""
        ended = self.trained.setdefault(state.step, {})
        ended[node.id] = metrics
        for first in self.flow.of_kind(CallKind.TRAIN):
            if first.id not in ended:
                return
            if (found := ended[first.id]) is not None:
                _merge(found, first, state)
                ended[first.id] = None

    def in_order(self, state: StepState) -> None:
        """Columns and metrics as graph order has them, whatever ended first."""
        for table, rows in state.tables.items():
            columns = sorted(rows.columns.items(), key=lambda item: item[0].producer)
            state.tables[table] = Rows(rows.samples, dict(columns))
        said = self.said[state.step]
        state.metrics = dict(sorted(state.metrics.items(), key=lambda item: said[item[0]]))


@dataclass
class _Evaluation(_Steps):
    """The same calls, where those that train evaluate."""

    metrics: dict[str, float] = field(default_factory=dict)

    def needs(self, key: Key) -> Collection[Key]:
        return ()

    def _call(self, node: Node, state: StepState, task: Task) -> Work[Any]:
        assert node.kind is not CallKind.GENERATE, "a flow that generates is evaluated by what it says"
        if node.kind is CallKind.TRAIN:
            return self.calls.evaluated(node, state)
        return super()._call(node, state, task)

    def _training_ended(self, node: Node, metrics: dict[str, float] | None, state: StepState) -> None:
        self.metrics |= metrics or {}


def _nothing() -> Work[None]:
    """A work that has ended."""
    return
    yield


def _merge(metrics: dict[str, float], node: Node, state: StepState) -> None:
    """A role that is trained twice in a step: counts add up, the second's other numbers stand under its call's name."""
    for name, value in metrics.items():
        if name in state.metrics and name.rpartition("/")[2] in COUNTS:
            state.metrics[name] += value
        else:
            state.metrics[f"{node.call}/{name.rpartition('/')[2]}" if name in state.metrics else name] = value
