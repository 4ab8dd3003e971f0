"""Records of samples and metrics of a step: nothing that a user's code names takes the place of something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.dataflow import CallKind, Dataflow, Level, carried, per_batch, per_sample, trace
from plait.rewards.scores import GroupScores
from plait.runtime.records import sample_rows
from plait.runtime.step_metrics import step_metrics
from plait.runtime.steps.step import StepState
from tests.runtime.samples import whole_batch


def loss(batch: Any, advantages: Any) -> Any:
    return batch


def flow(prompts: Any, actor: Any, reward: Any, cost: Any) -> None:
    samples = actor.generate(prompts)
    rewards, costs = reward.score(samples), cost.score(samples)
    carried("reward", 5.0)
    first, second = (per_sample(min, column, name="shaped") for column in (rewards, costs))
    per_batch(np.mean, second, name="cost_std", level=Level.BATCH)
    actor.train(samples, loss=loss, advantages=first)


@pytest.fixture
def dataflow() -> Dataflow:
    return trace(flow, roles=["actor", "reward", "cost"])


@pytest.fixture
def state(dataflow: Dataflow) -> StepState:
    """A step of two samples; functions of both roles log `note`, the first of them names of columns as well."""
    state = whole_batch(1, 0, 7)
    rows = state.generated[0]
    for place, node in enumerate(dataflow.of_kind(CallKind.SCORE)):
        extras = {"note": (place, place)} | ({} if place else {"replies": (1, 1), "shaped": (2, 2), "costs/f": (3, 3)})
        metrics = {"shared": (float(place),), "reward": (9.0,)}
        scores = {"f": (10.0 + place, 20.0 + place)}
        state.scores[node.id] = [GroupScores(1, rows.samples, scores, (0.0, 0.0), extras=extras, metrics=metrics)]
        state.add(node.outputs[0], np.array([0.0, 2.0]))
    for place, node in enumerate(node for node in dataflow.nodes if node.outputs and node.outputs[0].name == "shaped"):
        state.add(node.outputs[0], np.array([place, place], dtype=np.float64))
    return replace(state, metrics={"reward": 5.0, "cost_std": 6.0, "kl": 7.0})


def test_in_a_record_nothing_takes_the_place_of_something_else(dataflow: Dataflow, state: StepState) -> None:
    record, _ = sample_rows(dataflow, state)
    expected = {
        "rewards/f": 10.0,
        "costs/f": 11.0,
        "shaped": 0.0,
        "shaped#2": 1.0,
        "note": 0,
        "logged/note": 1,
        "logged/shaped": 2,
        "logged/costs/f": 3,
        "logged/replies": 1,
    }
    assert {name: record.get(name) for name in expected} == expected
    assert "replies" not in record


def test_in_metrics_nothing_takes_the_place_of_something_else(dataflow: Dataflow, state: StepState) -> None:
    """What the functions of two roles log under one name is one mean, as of two functions of one role."""
    metrics = step_metrics(dataflow, state)
    expected = {
        "reward": 1.0,
        "cost_std": 1.0,
        "logged/reward": 5.0,
        "logged/logged/reward": 9.0,
        "logged/cost_std": 6.0,
        "kl": 7.0,
        "shared": 0.5,
    }
    assert {name: metrics.get(name) for name in expected} == expected
