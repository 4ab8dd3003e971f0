"""Which numbers a flow compares siblings by, and in how many groups these are equal."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plait.data.rows import Rows
from plait.dataflow import Dataflow, parse_grades, per_batch, per_group, per_sample, trace
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.runtime.health.compared import comparison_facts
from plait.runtime.steps.step import StepState
from tests.runtime.samples import sample

SAMPLES = [sample(uid, index) for uid in (0, 1) for index in (0, 1)]
"""Two groups of two."""
APART, EQUAL = np.array([0.0, 1.0, 2.0, 4.0]), np.array([1.0, 1.0, 2.0, 4.0])


def reads(completions):
    return [None for _ in completions]


def loss(batch, advantages):
    return batch.logprobs * advantages


def judged(prompts, actor):
    samples = actor.generate(prompts)
    halved = per_sample(abs, parse_grades(samples, reads, name="grade"), name="halved")
    actor.train(samples, loss=loss, advantages=per_group(np.sort, halved, name="advantages"))


def judged_beside(prompts, actor, reward):
    """The reward is looked at, and nothing is compared by it."""
    samples = actor.generate(prompts)
    reward.score(samples)
    grades = parse_grades(samples, reads, name="grade")
    actor.train(samples, loss=loss, advantages=per_group(np.sort, grades, name="advantages"))


def of_both(prompts, actor, reward):
    samples = actor.generate(prompts)
    grades = parse_grades(samples, reads, name="grade")
    actor.train(samples, loss=loss, advantages=per_group(np.add, reward.score(samples), grades, name="advantages"))


def over_the_batch(prompts, actor):
    samples = actor.generate(prompts)
    actor.train(samples, loss=loss, advantages=per_batch(np.sort, parse_grades(samples, reads, name="grade"), name="a"))


def facts_of(flow: Dataflow, **columns: np.ndarray) -> dict[str, float]:
    rows = Rows(SAMPLES)
    for node in flow.nodes:
        for column in node.outputs:
            if column.name in columns:
                rows = rows.with_column(column, columns[column.name])
    state = StepState(0)
    state.tables[flow.main_rows.id] = rows
    return comparison_facts(flow, state)


def test_rewards_of_a_group_are_compared_as_the_reward_gave_them() -> None:
    """Before what the flow takes off them."""
    options = {"overlong_buffer_tokens": 4}
    flow = trace_algorithm(load_flow("grpo"), options, ("actor", "reward"))
    facts = facts_of(flow, reward_score=EQUAL, shaped_rewards=APART)
    assert facts == {"uses_groups": 1.0, "equal_groups": 0.5, "mean_compared": 2.0}


def test_rewards_are_known_where_nothing_compares_siblings() -> None:
    flow = trace_algorithm(load_flow("remax"), {}, ("actor", "reward"))
    facts = facts_of(flow, reward_score=APART)
    assert facts == {"uses_groups": 0.0, "equal_groups": 0.0, "mean_compared": 1.75}


@pytest.mark.parametrize("flow", [judged, judged_beside])
def test_grades_are_compared(flow) -> None:
    traced = trace(flow, roles=("actor", "reward"))
    grades = np.array([1.0, math.nan, 2.0, 4.0])
    facts = facts_of(traced, grade=grades, reward_score=APART)
    expected = {"uses_groups": 1.0, "equal_groups": 0.5, "mean_compared": 7 / 3, "compares_grades": 1.0}
    assert facts == expected, "a group of which one number was read tells nothing apart"


def test_a_group_is_dead_where_none_of_its_numbers_differ() -> None:
    facts = facts_of(trace(of_both, roles=("actor", "reward")), grade=APART, reward_score=EQUAL)
    assert facts == {"uses_groups": 1.0, "equal_groups": 0.0, "mean_compared": 2.0}
    unread = np.full(4, math.nan)
    assert facts_of(trace(of_both, roles=("actor", "reward")), grade=unread, reward_score=EQUAL)["equal_groups"] == 0.5


def test_grades_that_are_all_missing_have_no_mean() -> None:
    facts = facts_of(trace(over_the_batch, roles=("actor",)), grade=np.full(4, math.nan))
    assert facts == {"uses_groups": 0.0, "equal_groups": 1.0, "compares_grades": 1.0}
