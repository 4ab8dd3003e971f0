"""Metrics and columns of a step stand in the order of the graph, whichever call ended first."""

from __future__ import annotations

import numpy as np
import pytest

from plait.data.rows import Rows
from plait.dataflow import CallKind, Level, Node, trace
from plait.dataflow.graph import Column
from plait.runtime.steps.graph_order import GraphOrder
from plait.runtime.steps.step import StepState
from plait.schedule.work import Done, Work, to_the_end
from tests.runtime.samples import sample


def loss(batch):
    return batch


def twice(prompts, actor):
    """Two training calls of one role."""
    samples = actor.generate(prompts)
    actor.train(samples, loss=loss)
    actor.train(samples, loss=loss)


FLOW = trace(twice, roles=["actor"])
ROLLOUT = FLOW.nodes[0]
FIRST, SECOND = FLOW.of_kind(CallKind.TRAIN)
OF_FIRST = {"actor/loss": 0.5, "actor/optimizer_steps": 1.0, "ref/loss": 0.2, "training/coverage": 1.0}
OF_SECOND = {"actor/loss": 0.25, "actor/optimizer_steps": 2.0, "ref/loss": 0.4, "training/coverage": 0.9}
OF_SECOND |= {"training/eos_coverage": 0.8, "actor/own": 0.7}  # where no sample of the first call ended by itself


def calling(state: StepState, name: str) -> Work[None]:
    """A call of one action, which counts something in the step."""
    state.count(name, 1)
    yield Done(name)


def claimed(order: GraphOrder, state: StepState, node: Node, name: str) -> None:
    to_the_end(order.ascribing(node, calling(state, name)))


@pytest.mark.parametrize("ended", [(FIRST, SECOND), (SECOND, FIRST)], ids=["in order", "the other way round"])
def test_a_role_that_trains_twice_adds_up_counts_and_keeps_both_losses(ended: tuple[Node, Node]) -> None:
    """And each number that either call logged, of whatever role its name speaks."""
    state = StepState(0)
    order = GraphOrder(FLOW, state)
    for node in ended:
        order.training_ended(node, {FIRST.id: OF_FIRST, SECOND.id: OF_SECOND}[node.id])
    assert list(state.metrics.items()) == [
        ("actor/loss", 0.5),
        ("actor/optimizer_steps", 3.0),
        ("ref/loss", 0.2),
        ("training/coverage", 1.0),
        (f"{SECOND.call}/loss", 0.25),
        (f"{SECOND.call}/ref/loss", 0.4),
        (f"{SECOND.call}/coverage", 0.9),
        (f"{SECOND.call}/eos_coverage", 0.8),
        ("actor/own", 0.7),
    ]


def test_names_stay_where_the_first_call_had_no_sample() -> None:
    """It has counts alone then, and the second call's loss is not taken for its."""
    state = StepState(0)
    order = GraphOrder(FLOW, state)
    order.training_ended(FIRST, {"training/optimizer_steps": 0, "training/masked_mini_batches": 0})
    order.training_ended(SECOND, {"actor/loss": 0.25, "actor/lr": 0.1, "actor/nll": 2.0, "training/optimizer_steps": 1})
    assert state.metrics == {
        "training/optimizer_steps": 1,
        "training/masked_mini_batches": 0,
        f"{SECOND.call}/loss": 0.25,
        f"{SECOND.call}/lr": 0.1,
        "actor/nll": 2.0,
    }


def test_what_a_later_training_call_returned_waits_for_the_earlier_one() -> None:
    state = StepState(0)
    order = GraphOrder(FLOW, state)
    order.training_ended(SECOND, OF_SECOND)
    assert state.metrics == {}
    order.training_ended(FIRST, None)
    assert state.metrics == OF_SECOND, "the first was not to train in this step"


def test_metrics_are_sorted_by_the_call_that_said_them_first() -> None:
    state = StepState(0, metrics={"before": 1.0})
    order = GraphOrder(FLOW, state)
    claimed(order, state, SECOND, "second")
    claimed(order, state, ROLLOUT, "rollout")
    claimed(order, state, FIRST, "first")
    claimed(order, state, SECOND, "rollout")
    order.restore()
    assert list(state.metrics)[:3] == ["before", "rollout", "first"]
    assert (state.said_by["before"], state.said_by["rollout"], state.said_by["second"]) == (-1, ROLLOUT.id, SECOND.id)
    assert state.metrics["rollout"] == 2


def test_columns_are_sorted_by_the_call_that_made_them() -> None:
    state = StepState(0)
    rows = Rows((sample(1, 0),))
    late, early = (Column(name, Level.SAMPLE, producer, 0) for name, producer in (("a", 7), ("b", 4)))
    state.begin_table(0, rows.with_column(late, np.ones(1)).with_column(early, np.zeros(1)))
    GraphOrder(FLOW, state).restore()
    assert list(state.tables[0].columns) == [early, late]
    assert state.tables[0].columns[late].tolist() == [1.0]
