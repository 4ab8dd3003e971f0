"""What an evaluation measures: answers to held-out prompts, or the losses of held-out examples or pairs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from plait.data.examples import Given
from plait.data.records import Prompt
from plait.dataflow import CallKind, Dataflow, Node
from plait.metric_names import with_logged
from plait.rewards.pool import RewardPool
from plait.runtime.evaluating.answering import Scorers, answer
from plait.runtime.evaluating.evaluation import Evaluation
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.folder.moments import Round
from plait.runtime.inputs.held_out import HeldOut
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.between_steps import BetweenSteps
from plait.runtime.steps.calls import Calls
from plait.runtime.steps.grading import grade_metrics
from plait.runtime.steps.graph_order import GraphOrder
from plait.runtime.steps.roles import Roles, models_of, rewards_of
from plait.runtime.steps.step import StepState
from plait.schedule.dispatch import Task
from plait.schedule.work import Work, nothing


def measure(
    prepared: Prepared,
    roles: Roles,
    eval_functions: RewardPool | None,
    calls: Calls,
    between_steps: BetweenSteps,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluations:
    """An evaluation of all sets: answers to held-out prompts (`answering.answer`), or the losses of held-out examples
    or pairs.

    Args:
        calls: of the flow.

    Raises:
        RunError: a reward function failed and its policy is to stop.
        EvaluationStopped: `stop` said so.
    """
    held_out = prepared.held_out
    if not any(one.prompts for one in held_out):
        losses_of = partial(evaluate_given, prepared.flow, calls, between_steps)
        return Evaluations({one.label: _measured(one, losses_of) for one in held_out})
    actor, rewards = models_of(roles)["actor"], rewards_of(roles)
    scorers = Scorers(rewards.get("reward"), rewards.get("cost"), eval_functions)
    return answer(actor, held_out, prepared.recipe, scorers, between_steps, stop=stop)


def _measured(held_out: HeldOut, losses_of: Callable[[StepState], dict[str, float]]) -> Evaluation:
    """The losses of a set of examples or pairs; and where the data have several sources, of each as `SOURCE/…`."""
    logged = dict(losses_of(StepState(0, given=held_out.given)))
    for source, of_source in _by_source(held_out.given).items():
        measured = losses_of(StepState(0, given=of_source))
        logged |= {f"{source}/{name}": value for name, value in measured.items()}
    return Evaluation((), (), None, logged=logged, num_given=held_out.num_items)


def evaluate_given(flow: Dataflow, calls: Calls, between_steps: BetweenSteps, state: StepState) -> dict[str, float]:
    """The metrics that training on the given samples of `state` would have, with the numbers for the whole batch that
    the flow makes of them, under the names that they have in a step: its calls are run, one after another, and a TRAIN
    call only evaluates its loss. And the numbers of what functions read from the samples' texts."""
    order = GraphOrder(flow, state)
    for node in flow.nodes:
        mesh = calls.mesh(node, state.step, begins=True)
        task = Task(((state.step, node.id),), node.call, nothing(), mesh, node.role or "")
        task.work = _evaluated(node, calls, state, task)
        measured = between_steps.run_task(task)
        if node.kind is CallKind.TRAIN:
            order.training_ended(node, measured)
    grades = grade_metrics(flow, state)
    of_calls = {name: value for name, value in with_logged(grades, state.metrics).items() if name not in grades}
    return of_calls | grades


def _evaluated(node: Node, calls: Calls, state: StepState, task: Task) -> Work[dict[str, float]]:
    """A call; what it measures."""
    assert node.kind is not CallKind.GENERATE, "a flow that generates is evaluated by what it says"
    if (trainer := calls.trainer(node)) is not None:
        yield from trainer.syncing_weights(node.kind)
    task.mesh = calls.mesh(node, state.step)  # those that brought weights are free
    if node.kind is CallKind.TRAIN:
        return (yield from calls.evaluated(node, state))
    yield from calls.work(node, state, _draws_nothing, task)
    return {}


def _draws_nothing(count: int, record: Collection[Round] | None, *, is_later: bool) -> Sequence[Prompt] | None:
    """`rollout.Draw` of calls of which none generates."""
    return None


def _by_source(held_out: Mapping[str, Sequence[Given]]) -> dict[str, dict[str, list[Given]]]:
    """Label of each source → its held-out examples or pairs; empty where the data have but one source."""
    by_source: dict[str, dict[str, list[Given]]] = {}
    for name, samples in held_out.items():
        for given in samples:
            if label := given.sample.prompt.source:
                by_source.setdefault(label, {}).setdefault(name, []).append(given)
    return by_source
