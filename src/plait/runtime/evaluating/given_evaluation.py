"""What training on given samples would log, without training on them: the calls of a step are run, and a TRAIN call
only evaluates its loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from plait.data.records import Prompt
from plait.dataflow import CallKind, Dataflow, Node
from plait.runtime.folder.moments import Round
from plait.runtime.steps.aside import Aside
from plait.runtime.steps.calls import Calls
from plait.runtime.steps.step import StepState
from plait.schedule.dispatch import Task
from plait.schedule.work import Work, nothing


def evaluate_given(flow: Dataflow, calls: Calls, aside: Aside, state: StepState) -> dict[str, float]:
    """The metrics that training on the given samples of `state` would have, with the numbers for the whole batch that
    the flow makes of them."""
    metrics: dict[str, float] = {}
    for node in flow.nodes:  # one after another: metrics of a name are those of the last
        mesh = calls.mesh(node, state.step, begins=True)
        task = Task(((state.step, node.id),), node.call, nothing(), mesh, node.role or "")
        task.work = _work(node, calls, state, task)
        metrics |= aside.run_task(task)
    return state.metrics | metrics


def _work(node: Node, calls: Calls, state: StepState, task: Task) -> Work[dict[str, float]]:
    """A call; what it measures."""
    assert node.kind is not CallKind.GENERATE, "a flow that generates is evaluated by what it says"
    if (trainer := calls.trainer(node)) is not None:
        yield from trainer.syncing_weights(node.kind)
    task.mesh = calls.mesh(node, state.step)  # those that brought weights are free
    if node.kind is CallKind.TRAIN:
        return (yield from calls.evaluated(node, state))
    yield from calls.work(node, state, _draws_nothing, task)
    return {}


def _draws_nothing(record: Collection[Round] | None, *, is_later: bool) -> Sequence[Prompt] | None:
    """`rollout.Draw` of calls of which none generates."""
    return None
