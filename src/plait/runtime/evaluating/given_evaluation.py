"""What training on given samples would log, without training on them: the calls of a step, where those that train
evaluate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from plait.data.records import Prompt
from plait.dataflow import CallKind, Dataflow, Node
from plait.runtime.steps.calls import Calls
from plait.runtime.steps.step import StepState
from plait.schedule.dispatch import Clock, Dispatcher, Key, Task
from plait.schedule.work import Work, nothing


def evaluate_given(flow: Dataflow, calls: Calls, clock: Clock, state: StepState) -> dict[str, float]:
    """The metrics that training on the given samples of `state` would have."""
    program = _Evaluation(flow, calls, state)
    for node in flow.nodes:  # one after another: metrics of a name are those of the last
        dispatcher = Dispatcher(program, clock)
        dispatcher.add([(state.step, node.id)])
        dispatcher.run()
    return program.metrics


@dataclass
class _Evaluation:
    """`schedule.dispatch.Program`, of which one call is run at a time."""

    flow: Dataflow
    calls: Calls
    state: StepState
    metrics: dict[str, float] = field(default_factory=dict)

    def needs(self, key: Key) -> Collection[Key]:
        return ()

    def partners(self, key: Key) -> tuple[Key, ...]:
        return (key,)

    def mesh(self, key: Key) -> frozenset[int]:
        return self.calls.mesh(self.flow.nodes[key[1]], key[0], begins=True)

    def begin(self, keys: tuple[Key, ...]) -> Task:
        node = self.flow.nodes[keys[0][1]]
        task = Task(keys, node.call, nothing(), self.mesh(keys[0]), node.role or "")
        trainer = self.calls.trainer(node)
        task.work = self._work(node, None if trainer is None else trainer.syncing_weights(node.kind), task)
        return task

    def _work(self, node: Node, move: Work[None] | None, task: Task) -> Work[None]:
        assert node.kind is not CallKind.GENERATE, "a flow that generates is evaluated by what it says"
        if move is not None:
            yield from move
        task.mesh = self.calls.mesh(node, self.state.step)  # those that brought weights are free
        if node.kind is CallKind.TRAIN:
            self.metrics |= yield from self.calls.evaluated(node, self.state)
        else:
            yield from self.calls.work(node, self.state, _draws_nothing, task)


def _draws_nothing(count: int) -> Sequence[Prompt]:
    return ()
