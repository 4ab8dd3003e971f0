"""Means of a step over groups that come in any order."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.dataflow import grades_from, per_sample, trace
from plait.rewards.scores import GroupScores
from plait.runtime.step_metrics import by_function, exact_mean, grade_metrics

GROUPS = [GroupScores(ticket, (), {"a": (0.1 * ticket, 0.7)}, (0.0, 0.0)) for ticket in range(1, 5)]


def test_the_mean_of_a_function_does_not_depend_on_which_group_came_first() -> None:
    means = {exact_mean(by_function(order)["a"]) for order in itertools.permutations(GROUPS)}
    assert means == {(0.1 + 0.2 + 0.3 + 0.4 + 4 * 0.7) / 8}
    naive = {sum(by_function(order)["a"]) for order in itertools.permutations(GROUPS)}
    assert len(naive) > 1, "these numbers tell orders apart"


def test_a_mean_is_exactly_rounded_and_0_of_none() -> None:
    assert exact_mean([1e16, 1.0, -1e16]) == 1 / 3
    assert exact_mean([]) == 0.0
    assert math.isnan(exact_mean([math.nan, 1.0]))


def graded(prompts, actor):
    samples = actor.generate(prompts)
    grades = grades_from(samples, lambda completions: [None for _ in completions], name="grade")
    actor.train(samples, loss=lambda batch, grades: grades, grades=per_sample(abs, grades, name="size"))


@pytest.mark.parametrize(
    ("grades", "metrics"),
    [([3, math.nan, 1, math.nan], {"grade/mean": 2.0, "grade/unread": 0.5}), ([math.nan] * 2, {"grade/unread": 1.0})],
    ids=["half", "none"],
)
def test_grades_of_which_none_was_read_have_no_mean(grades: list[float], metrics: dict[str, float]) -> None:
    """A mean of 0 would look like the worst grade."""
    flow = trace(graded, roles=("actor",))
    [node] = (node for node in flow.nodes if node.call == "grade")
    state: Any = SimpleNamespace(tables={node.rows: SimpleNamespace(columns={node.outputs[0]: np.array(grades)})})
    assert grade_metrics(flow, state) == metrics
