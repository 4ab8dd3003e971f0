"""Numbers of a step: means over groups that come in any order, and the few of them that a person watches."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from plait.dataflow import parse_grades, per_sample, trace
from plait.recipes.algorithm import traced_flow
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import role_models
from plait.rewards.scores import GroupScores
from plait.runtime.step_metrics import by_function, watched
from plait.runtime.steps.grading import exact_mean
from tests import golden

RECORD = Path(golden.__file__).with_name("record.json")
"""What whole runs of the built-in flows recorded."""

GROUPS = [GroupScores(ticket, (), {"a": (0.1 * ticket, 0.7)}, (0.0, 0.0)) for ticket in range(1, 5)]


def test_the_mean_of_a_function_does_not_depend_on_which_group_came_first() -> None:
    means = {exact_mean(by_function(order)["a"]) for order in itertools.permutations(GROUPS)}
    assert means == {(0.1 + 0.2 + 0.3 + 0.4 + 4 * 0.7) / 8}
    naive = {sum(by_function(order)["a"]) for order in itertools.permutations(GROUPS)}
    assert len(naive) > 1, "these numbers tell orders apart"


@pytest.mark.parametrize(
    ("case", "algorithm", "options", "shown"),
    [
        ("sft", "sft", {}, ["loss", "accuracy", "eval loss", "eval accuracy"]),
        ("reward_model", "reward_model", {}, ["loss", "accuracy", "margin", "eval loss", "eval accuracy"]),
        ("dpo", "dpo", {}, ["loss", "accuracy", "margin", "eval loss", "eval accuracy"]),
        ("kto", "kto", {}, ["loss", "margin", "eval loss"]),
        ("distill", "distill", {}, ["loss"]),
        ("grpo", "grpo", {"kl_coef": 0.05}, ["reward", "kl", "eval reward"]),
        ("dr_grpo", "grpo", {}, ["reward", "eval reward"]),
        ("ppo", "ppo", {}, ["reward", "kl", "eval reward"]),
        (
            "safe_rlhf",
            "safe_rlhf",
            {"ptx_coef": 0.5},
            ["reward", "cost", "examples loss", "kl", "eval reward", "eval cost"],
        ),
    ],
    ids=["sft", "reward_model", "dpo", "kto", "distill", "grpo", "grpo without kl", "ppo", "safe_rlhf"],
)
def test_a_run_shows_what_its_flow_has(case: str, algorithm: str, options: dict[str, Any], shown: list[str]) -> None:
    """Of the second step, which evaluates; of lengths and pace only what a record holds."""
    recipe = Recipe.model_validate({"model": "it", "data": {"source": "x"}, "algorithm": algorithm, "options": options})
    flow = traced_flow(recipe)
    recorded = json.loads(RECORD.read_text())["runs"][f"{case}.float64"]["folders"]["."]["metrics"]
    metrics = {name: values[1] for name, values in recorded.items()}
    texts = {each.title: each.text(metrics) for each in watched(flow, role_models(flow, recipe))}
    assert [title for title, text in texts.items() if text is not None] == [*shown, "length"]
    if algorithm == "safe_rlhf":
        assert texts["examples loss"] == format(metrics["actor/ptx_loss"], ".4f"), "in nats, before its coefficient"


def taught(prompts, examples, actor):
    samples = actor.generate(prompts)
    grades = parse_grades(samples, lambda completions: [None for _ in completions], name="grade")
    actor.train(samples, loss=lambda batch, grades: grades, grades=per_sample(abs, grades, name="size"))
    actor.train(examples, loss=lambda batch: batch.logprobs)


def test_a_flow_of_ones_own_shows_grades_how_many_are_missing_and_what_it_learns_beside() -> None:
    flow = trace(taught, roles=("actor",))
    recipe = Recipe.model_validate({"model": "it", "data": {"source": "x"}})
    metrics = {
        "actor/loss": 7.0,
        "actor.train#2/loss": 2.0,
        "grade/mean": 0.5,
        "grade/unread": 0.25,
        "eval/grade/mean": 1,
    }
    texts = [(each.title, each.text(metrics)) for each in watched(flow, role_models(flow, recipe))]
    assert [(title, text) for title, text in texts if text is not None] == [
        ("grade", "0.500"),
        ("grade unread", "25%"),
        ("examples loss", "2.0000"),
        ("eval grade", "1.000"),
    ]
