"""Safe-RLHF: the multiplier and the combined advantage by hand, the cost side of its flow. Its toy is in test_toys."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.safe_rlhf import (
    SafeRLHFOptions,
    combined,
    exponential,
    last_costs,
    safe_rlhf,
    updated_log_lambda,
    window_mean,
)
from plait.dataflow import CallKind, trace
from plait.errors import FlowError
from tests.algorithms.flows import ROLES, graph_of


def test_the_multiplier_by_hand():
    # ln λ' = ln 2 + 0.1 · 2 · (1.5 − 1).
    found = updated_log_lambda(math.log(2), 1.5, threshold=1.0, rate=0.1, largest=math.inf)
    assert found == pytest.approx(math.log(2) + 0.1)
    assert updated_log_lambda(0.0, 0.0, threshold=1.0, rate=0.1, largest=math.inf) == pytest.approx(-0.1), "it falls"
    assert updated_log_lambda(0.0, 9.0, threshold=1.0, rate=1.0, largest=math.log(5)) == pytest.approx(math.log(5))


def test_the_multiplier_ascends_its_lagrangian():
    """The step is the rate times the derivative by ln λ of λ (E[c] − d)."""
    log_lambda, gap, step = 0.7, -0.3, 1e-6
    slope = (math.exp(log_lambda + step) - math.exp(log_lambda - step)) / (2 * step) * gap
    found = updated_log_lambda(log_lambda, gap, threshold=0.0, rate=0.5, largest=math.inf)
    assert found - log_lambda == pytest.approx(0.5 * slope, rel=1e-6)


@pytest.mark.parametrize("largest", [None, 1e300])
def test_a_multiplier_without_a_bound_stays_a_number(largest):
    """Costs far above their limit make it grow as exp(exp(…))."""
    graph = graph_of(safe_rlhf, SafeRLHFOptions(lambda_max=largest, lambda_lr=1.0))
    update = next(node for node in graph.nodes if node.call == "next_log_lambda")
    log_lambda = 0.0
    for _ in range(3):
        log_lambda = updated_log_lambda(log_lambda, 1e3, **update.computing.constants)
    reward_advantages, cost_advantages = np.array([1.0, -2.0]), np.array([1.5, 0.25])
    found = combined(reward_advantages, cost_advantages, exponential(log_lambda))
    assert found.tolist() == (-cost_advantages).tolist()


@given(st.lists(st.lists(st.floats(-5, 5), max_size=5), max_size=6), st.integers(1, 7))
def test_the_window_holds_the_last_costs(batches, size):
    window, seen = np.zeros(size + 1), []
    for batch in batches:
        window = last_costs(window, np.array(batch, dtype=np.float64))
        seen = (seen + batch)[-size:]
    assert window.shape == (size + 1,)
    assert window[0] == len(seen)
    assert window[1 : 1 + len(seen)].tolist() == seen
    assert window_mean(window) == pytest.approx(np.mean(seen) if seen else 0.0)


def test_the_combined_advantage_by_hand():
    assert combined(np.array([3.0, 0.0]), np.array([1.0, -2.0]), 0.5).tolist() == pytest.approx([2.5 / 1.5, 1 / 1.5])
    assert combined(np.array([3.0]), np.array([1.0]), 0.0).tolist() == [3]


def test_half_of_the_kl_is_in_the_cost():
    """(r − β/2 · kl − λ (c + β/2 · kl)) / (1 + λ): the weight of the KL is β/2, whatever λ."""
    graph = graph_of(safe_rlhf, SafeRLHFOptions())
    shares = {n.call: n.computing.constants["share"] for n in graph.nodes if n.call.endswith("_token_rewards")}
    assert shares == {"critic_token_rewards": 0.5, "cost_critic_token_rewards": -0.5}
    rewards, costs = (next(n for n in graph.nodes if n.call == name) for name in shares)
    logprobs, ref = np.array([-1.0, -2.0]), np.array([-3.0, -1.0])
    for multiplier in (0.1, 3.0):
        sides = [n.fn(0.0, logprobs, ref, **n.computing.constants) for n in (rewards, costs)]
        expected = -0.5 * 0.02 * (logprobs - ref)
        assert combined(*sides, multiplier).tolist() == pytest.approx(expected.tolist())


def test_calls_of_safe_rlhf():
    graph = graph_of(safe_rlhf, SafeRLHFOptions())
    asked = [node.call for node in graph.nodes if node.role is not None]
    assert asked == [
        "actor.generate",
        "cost.score",
        "reward.score",
        "ref.logprobs",
        "actor.logprobs",
        "critic.values",
        "critic.train",
        "cost_critic.values",
        "cost_critic.train",
        "actor.train",
    ]
    made = {node.call: [column.name for column in node.inputs.values()] for node in graph.nodes}
    assert made["episode_cost"] == ["next_cost_window"]
    assert made["next_cost_window"] == ["cost_window", "cost_score"], "costs as scored, before the KL"
    assert made["lagrangian_advantages"] == ["critic_advantages", "cost_critic_advantages", "lambda"]
    assert made["lambda"] == ["next_log_lambda"], "the step uses the multiplier that its own costs have moved"
    cost_critic = next(node for node in graph.nodes if node.call == "cost_critic.train")
    assert cost_critic.inputs["returns"].name == "cost_critic_returns"
    assert {node.call for node in graph.of_kind(CallKind.CARRIED)} == {"cost_window", "log_lambda"}


def test_rewards_are_shaped_and_costs_are_not():
    options = SafeRLHFOptions(reward_norm="std", reward_clip=5.0, missing_eos_penalty=1.0)
    graph = graph_of(safe_rlhf, options)
    inputs = {n.call: n.inputs["0"].name for n in graph.nodes if n.call.endswith("_token_rewards")}
    assert inputs == {"critic_token_rewards": "penalised_scores", "cost_critic_token_rewards": "cost_score"}


def test_costs_are_those_of_turns_too_where_credit_is_theirs():
    graph = graph_of(safe_rlhf, SafeRLHFOptions(credit="turn"))
    made = {node.call: [column.name for column in node.inputs.values()] for node in graph.nodes}
    assert made["critic_token_rewards"][0] == "reward_score_by_turn"
    assert made["cost_critic_token_rewards"][0] == "cost_score_by_turn"
    assert made["next_cost_window"] == ["cost_window", "cost_score"], "the limit is on whole responses"


def test_options_are_checked():
    with pytest.raises(ValidationError, match=r"lambda_init is 9\.0, above lambda_max, 5\.0"):
        SafeRLHFOptions(lambda_init=9.0)
    assert SafeRLHFOptions(lambda_init=9.0, lambda_max=None).lambda_max is None
    with pytest.raises(FlowError, match="uses the role `cost_critic`, which nothing fills"):
        trace(safe_rlhf, roles=set(ROLES) - {"cost_critic"}, options=SafeRLHFOptions())
