"""What is said of a flow before it runs."""

from __future__ import annotations

import numpy as np
import pytest

from plait.dataflow import parse_grades, per_group, trace
from plait.recipes.flow_checks import said_of_ungraded
from plait.recipes.recipe import Recipe


def reads(completions):
    return [None for _ in completions]


def graded(prompts, actor):
    samples = actor.generate(prompts)
    grades = parse_grades(samples, reads, name="grade")
    actor.train(samples, loss=lambda batch, a: a, a=per_group(np.sort, grades, name="advantages"))


def rewarded(prompts, actor, reward):
    samples = actor.generate(prompts)
    grades = parse_grades(samples, reads, name="grade")
    actor.train(samples, loss=lambda batch, a: a, a=per_group(np.add, grades, reward.score(samples), name="advantages"))


def given(examples, actor):
    grades = parse_grades(examples, reads, name="grade")
    actor.train(examples, loss=lambda batch, grades: grades, grades=grades)


@pytest.mark.parametrize(
    ("flow", "evaluation", "says"),
    [
        (graded, {"items": 2}, True),
        (graded, {"items": 0}, False),
        (graded, {"items": 2, "functions": ["mine.py:good"]}, False),
        (rewarded, {"items": 2}, False),
        (given, {"items": 2}, False),
    ],
    ids=["no function", "no items", "functions of evaluations", "a reward", "given samples are graded"],
)
def test_evaluations_that_no_judge_is_asked_in_are_told(flow, evaluation, says) -> None:
    recipe = Recipe.model_validate({"model": "it", "data": {"source": "x"}, "evaluation": evaluation})
    said = list(said_of_ungraded(trace(flow, roles=("actor", "reward")), recipe))
    assert len(said) == says
    assert all("`grade` is read in training steps alone" in text for text in said)
