"""Numbers of what functions read from texts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.data.rows import Rows
from plait.dataflow import parse_grades, per_sample, trace
from plait.runtime.steps.grading import exact_mean, grade_metrics
from tests.runtime.samples import sample


def test_a_mean_is_exactly_rounded_and_0_of_none() -> None:
    assert exact_mean([1e16, 1.0, -1e16]) == 1 / 3
    assert exact_mean([]) == 0.0
    assert math.isnan(exact_mean([math.nan, 1.0]))


def graded(prompts, actor):
    samples = actor.generate(prompts)
    grades = parse_grades(samples, lambda completions: [None for _ in completions], name="grade")
    actor.train(samples, loss=lambda batch, grades: grades, grades=per_sample(abs, grades, name="size"))


@pytest.mark.parametrize(
    ("grades", "metrics"),
    [
        ([3, math.nan, 1, math.nan], {"grade/mean": 2.0, "grade/unread": 0.5, "frac_grade_zero_std": 1.0}),
        ([3, 1, 2, math.nan], {"grade/mean": 2.0, "grade/unread": 0.25, "frac_grade_zero_std": 0.5}),
        ([math.nan] * 4, {"grade/unread": 1.0, "frac_grade_zero_std": 1.0}),
    ],
    ids=["half", "most", "none"],
)
def test_grades_of_which_none_was_read_have_no_mean(grades: list[float], metrics: dict[str, float]) -> None:
    """A mean of 0 would look like the worst grade. The first two samples are of one prompt, and the last two."""
    flow = trace(graded, roles=("actor",))
    [node] = (node for node in flow.nodes if node.call == "grade")
    rows = Rows([sample(uid, index) for uid in (0, 1) for index in (0, 1)])
    state: Any = SimpleNamespace(tables={node.rows: rows.with_column(node.outputs[0], np.array(grades))})
    assert grade_metrics(flow, state) == metrics
