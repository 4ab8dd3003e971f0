"""Runs training steps of a dataflow. `calls` says what each call does, `schedule.dispatch` which one goes on next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from plait.dataflow import CallKind, Dataflow, Node
from plait.observe.progress import ProgressSink
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.asking import Beside
from plait.runtime.steps.batches import Batches
from plait.runtime.steps.calls import Calls, ScoringMode
from plait.runtime.steps.graph_order import GraphOrder
from plait.runtime.steps.roles import Roles, rewards_of
from plait.runtime.steps.step import StepState
from plait.schedule.dispatch import Clock, Dispatcher, Key, Task, run_alone
from plait.schedule.needs import needs_of
from plait.schedule.open_steps import OpenSteps
from plait.schedule.work import Work, nothing
from plait.workers.recorder import Recorder


class Executor:
    """Binds a dataflow to the engines of its roles and runs steps of it.

    Which calls a step has is said by `OpenSteps`, in which order they run by the `Dispatcher`, and what each does by
    `Calls`: a call is a generator (`Work`) that does one small action at a time.

    Args:
        roles: name of each role → its model and engines, or its reward functions.
        clock: has a call do its next action, records it, and waits where no call can go on.
    """

    def __init__(
        self,
        prepared: Prepared,
        roles: Roles,
        recorder: Recorder,
        progress: ProgressSink,
        clock: Clock,
    ) -> None:
        self.flow = flow = prepared.flow
        recipe = prepared.recipe
        self._recorder = recorder
        needs = needs_of(flow, rewards_of(roles))
        self.calls = Calls(prepared, roles, recorder, progress)
        beside = None if recipe.update_rule.waits else self.calls.runs_beside
        ahead = self.calls.ahead or frozenset()
        self._open = OpenSteps(flow, needs, recipe.max_staleness, recipe.steps, self.calls.keeps_weights, beside, ahead)
        self._clock = clock
        self._under_way: _StepProgram | None = None

    @property
    def is_training(self) -> bool:
        """Whether a step has begun its first training call, so that weights may have changed since it began."""
        return self._under_way is not None and self._under_way.is_training

    def run_step(self, state: StepState, batches: Batches) -> None:
        """Generate, score, compute and train one batch, and generate the later batches that `max_staleness` allows.

        Args:
            state: the batch of this step, one of `batches`; calls add their results to it. `state.step` counts from 0
                and keys the draws; logs count from 1.

        Raises:
            RunError: every sample of the step lost its reward, or a call failed.
        """
        self._recorder.step = state.step + 1
        self._under_way = program = _StepProgram(self.flow, self.calls, self._open, batches, state.step, self._recorder)
        keys = self._open.calls(state.step, batches.done)
        self.calls.rollout.beside = program.beside = self._beside(state.step, keys, batches)
        Dispatcher(program, self._clock).run(keys)
        program.order(state).restore()
        self._recorder.step = state.step + 1
        self._under_way = None

    def settle(self) -> None:
        """Between steps: wait until reward functions have scored all that they were given, for any batch. Raises
        RunError: a function failed, and its policy is to stop."""
        run_alone(Task(((0, 0),), "rewards", self.calls.rewarding.settling(), frozenset()), self._clock)

    def _beside(self, step: int, keys: Sequence[Key], batches: Batches) -> Beside | None:
        """The rollouts among the calls of a step, if those of later batches halt when it ends; else None.

        All their batches draw their prompts now, so that none waits until another one has drawn further rounds."""
        if self._open.beside is None:
            return None
        for batch, _ in keys:
            batches.at(batch)
        rollouts = [key for key in keys if self.flow.nodes[key[1]].kind is CallKind.GENERATE]
        own = [key for key in keys if key[0] == step]
        return Beside(step, tuple(batch for batch, _ in rollouts), self._open.until(step, own))


@dataclass
class _StepProgram:
    """What the dispatcher runs in one step (`schedule.dispatch.Program`): the calls of the step, and those of later
    batches that run with it. A call is named by its key: the step that trains on its batch, and its node in the flow.

    The dispatcher asks which calls must end before one may begin (`needs`), which ranks it needs (`mesh`) and which
    calls run together with it (`partners`). As soon as all is free, it has them begun as one task (`begin`).
    """

    flow: Dataflow
    calls: Calls
    open: OpenSteps
    batches: Batches
    step: int
    """The step that scores and trains, from 0."""
    recorder: Recorder
    """Records each action under the step that trains on its batch."""
    is_training: bool = False
    """See `Executor.is_training`."""
    beside: Beside | None = None
    """The rollouts of this step, if those of later batches halt with it; else None."""
    _orders: dict[int, GraphOrder] = field(default_factory=dict)
    """Step of a batch → its order of metrics and columns."""
    _begun: dict[int, StepState] = field(default_factory=dict)
    """Step of each batch of which a call has begun → the batch."""
    _drawing: set[Key] = field(default_factory=set)
    """Rollouts that have begun and not ended."""

    def order(self, state: StepState) -> GraphOrder:
        """Puts the metrics and columns of a batch into the order of the graph, whichever call ended first."""
        if state.step not in self._orders:
            self._orders[state.step] = GraphOrder(self.flow, state)
        return self._orders[state.step]

    def needs(self, key: Key) -> Collection[Key]:
        (step, number), needs = key, self.open.needs(self.step, key)
        node, batch = self.flow.nodes[number], self._begun.get(step)
        grows = (step, node.rows) in needs and batch is not None and node.rows in batch.growing
        if grows and self.calls.scoring_mode(node, step) is not ScoringMode.AFTER:
            needs -= {(step, node.rows)}  # it scores samples as they end, and so need not wait for the rollout
        return needs

    def partners(self, key: Key) -> tuple[Key, ...]:
        step, node = key[0], self.flow.nodes[key[1]]
        return tuple((step, partner.id) for partner in self.calls.partners(node, step))

    def mesh(self, key: Key) -> frozenset[int]:
        if self.open.halts(self.step, key) and (self._drawing or self._goes_on_beside(key)):
            return frozenset()  # it begins at once, and shares the ranks of the rollouts that are under way
        return self._takes(key, begins=True)

    def _takes(self, key: Key, *, begins: bool = False) -> frozenset[int]:
        """See `Calls.mesh`; none for a call that adds up what its model has said."""
        return (
            frozenset() if self.batches.asked(key) else self.calls.mesh(self.flow.nodes[key[1]], key[0], begins=begins)
        )

    def _busy(self, key: Key) -> frozenset[int]:
        """The ranks that a call keeps busy once its weights are there: no other call begins on them."""
        return frozenset() if self._goes_on_beside(key) else self._takes(key)

    def _goes_on_beside(self, key: Key) -> bool:
        """Whether a call is a rollout that halts with the step, and goes on beside any calls of it."""
        beside = self.open.beside if self.open.halts(self.step, key) else None
        return beside is not None and beside(self.flow.nodes[key[1]])

    def begin(self, keys: tuple[Key, ...]) -> Task:
        """A task that first moves the weights to where the calls need them, then does the calls: one alone, or training
        calls by one schedule."""
        state = self._begun[keys[0][0]] = self.batches.at(keys[0][0])
        nodes = [self.flow.nodes[number] for _, number in keys]
        mesh = frozenset(rank for key in keys for rank in self.mesh(key))
        task = Task(keys, " + ".join(node.call for node in nodes), nothing(), mesh, nodes[0].role or "")
        self._drawing.update(key for key in keys if self.flow.nodes[key[1]].kind is CallKind.GENERATE)
        asks = [node for node in nodes if not self.batches.asked((state.step, node.id))]
        trainers = {node.role: (node, trainer) for node in asks if (trainer := self.calls.trainer(node)) is not None}
        self.recorder.step = state.step + 1
        moves = [trainer.syncing_weights(node.kind) for node, trainer in trainers.values()]
        task.work = self.recorder.as_of(state.step + 1, self._work(nodes, state, moves, task))
        return task

    def _work(self, nodes: Sequence[Node], state: StepState, moves: Sequence[Work[None]], task: Task) -> Work[None]:
        for move in moves:
            yield from move
        # The weights are there: ranks that only sent them are free.
        task.mesh = frozenset(rank for key in task.keys for rank in self._busy(key))
        task.shares = frozenset(rank for key in task.keys for rank in self._takes(key)) - task.mesh
        self.is_training |= any(node.kind is CallKind.TRAIN and state.step >= node.training.after for node in nodes)
        order = self.order(state)
        if nodes[0].kind is CallKind.TRAIN:
            yield from self._trained(nodes, state, order)
        else:
            is_ahead = state.step > self.step
            work = self.calls.work(nodes[0], state, partial(self.batches.draw, state), task, is_ahead=is_ahead)
            yield from order.ascribing(nodes[0], work)
        self._drawing.difference_update(task.keys)
        if self.beside is not None:
            self.beside.ended.update(task.keys)

    def _trained(self, nodes: Sequence[Node], state: StepState, order: GraphOrder) -> Work[None]:
        """Training calls by one schedule: of one role, or of several. One that does nothing in this step is alone."""
        results: Sequence[dict[str, float] | None] = [None]
        if state.step >= nodes[0].training.after:
            overs = []
            for node in nodes:
                overs.append(self.calls.over(node, state))
                order.ascribe(node)
            results = yield from self.calls.trained(overs, state.step)
        for node, metrics in zip(nodes, results, strict=True):
            order.training_ended(node, metrics)
            order.ascribe(node)
