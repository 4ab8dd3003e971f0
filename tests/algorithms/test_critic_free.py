"""RLOO, REINFORCE++ and ReMax: advantages by hand and against the oracle, and which calls their flows make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.advantages import centred, whitened
from plait.algorithms.kl import reward_to_go
from plait.algorithms.losses import KLEstimator
from plait.algorithms.reinforce_pp import ReinforcePPOptions, at_each_token, reinforce_pp
from plait.algorithms.remax import ReMaxOptions, over_greedy, remax
from plait.algorithms.rloo import RLOOOptions, leave_one_out_advantages, rloo
from plait.dataflow import trace
from plait.errors import FlowError
from tests.algorithms import oracle

ROLES = ("actor", "reward", "ref")
FLOWS = {rloo: RLOOOptions, reinforce_pp: ReinforcePPOptions, remax: ReMaxOptions}
rewards_of_a_group = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


def calls(flow, **options) -> list[str]:
    return [node.call for node in trace(flow, roles=ROLES, options=FLOWS[flow](**options)).nodes]


# RLOO


def test_leave_one_out_by_hand():
    # Baselines: (0 + 2) / 2 = 1, (6 + 2) / 2 = 4, (6 + 0) / 2 = 3.
    assert leave_one_out_advantages(np.array([6.0, 0.0, 2.0])).tolist() == pytest.approx([5, -4, -1])
    assert leave_one_out_advantages(np.array([7.0])).tolist() == [0], "no sibling, no baseline"
    assert leave_one_out_advantages(np.full(7, 0.1)).tolist() == [0] * 7, "exactly, though 0.1 is not binary"


@given(rewards_of_a_group)
def test_leave_one_out_equals_the_oracle(rewards):
    found = leave_one_out_advantages(np.array(rewards))
    assert found.tolist() == pytest.approx(oracle.leave_one_out(rewards), abs=1e-12)
    n = len(rewards)
    if n > 1:  # the identity of verl's code: n / (n − 1) of the deviation from the mean, self included
        assert found.tolist() == pytest.approx(
            (n / (n - 1) * (np.array(rewards) - np.mean(rewards))).tolist(), abs=1e-9
        )


def test_the_baseline_of_a_sample_does_not_depend_on_it():
    """An unbiased gradient needs it; GRPO's mean, self included, does not have it."""
    base = leave_one_out_advantages(np.array([1.0, 2.0, 3.0]))
    moved = leave_one_out_advantages(np.array([11.0, 2.0, 3.0]))
    assert moved[0] - base[0] == 10


def test_calls_of_rloo():
    head = ["actor.generate", "reward.score"]
    assert calls(rloo) == [*head, "advantages", "actor.train"]
    assert calls(rloo, epochs=2) == [*head, "actor.logprobs", "advantages", "actor.train"]
    in_reward = [*head, "ref.logprobs", "actor.logprobs", "rewards", "advantages", "actor.train"]
    assert calls(rloo, kl_coef=0.05) == in_reward
    assert calls(rloo, kl_coef=0.05, mini_batches=2) == in_reward, "the log-probs are computed once"
    in_loss = [*head, "ref.logprobs", "advantages", "actor.train"]
    assert calls(rloo, kl_coef=0.05, kl_in="loss", kl_estimator="k2") == in_loss
    normalised = [*head, "advantages", "normalized_advantages", "actor.train"]
    assert calls(rloo, normalize_advantages=True) == normalised


# REINFORCE++


def test_token_returns_by_hand():
    # Log-ratios 1, −2, 3 and a score of 10, coefficient 1/2: to go 2, 1, 3.
    logprobs, ref = np.array([-1.0, -4.0, -1.0]), np.array([-2.0, -2.0, -4.0])
    assert reward_to_go(10.0, logprobs, ref, 0.5, KLEstimator.K1).tolist() == [9.0, 9.5, 8.5]
    assert at_each_token(10.0, logprobs).tolist() == [10, 10, 10]


@given(st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0)), max_size=6), st.sampled_from(list(KLEstimator)))
def test_token_returns_equal_the_oracle(pairs, how):
    logprobs, ref = [p for p, _ in pairs], [q for _, q in pairs]
    found = reward_to_go(1.5, np.array(logprobs), np.array(ref), 0.1, how)
    assert found.tolist() == pytest.approx(oracle.token_returns(1.5, logprobs, ref, 0.1, how.value), abs=1e-12)


def test_whitening_by_hand():
    # Four tokens with returns 1 | 3, 3, 5: mean 3, variance (4 + 4) / 3. A token counts, not a sample.
    unit = 2 / (8 / 3) ** 0.5
    first, second = whitened([np.array([1.0]), np.array([3.0, 3.0, 5.0])])
    assert first.tolist() == pytest.approx([-unit])
    assert second.tolist() == pytest.approx([0, 0, unit])


def test_a_batch_of_equal_returns_teaches_nothing():
    # 0.1 cannot be written in binary: their mean need not be 0.1.
    assert [part.tolist() for part in whitened([np.full(3, 0.1), np.full(4, 0.1)])] == [[0] * 3, [0] * 4]
    assert [part.tolist() for part in whitened([np.array([5.0])])] == [[0]]
    assert centred(np.full(7, 0.1)).tolist() == [0] * 7


@given(st.lists(st.lists(st.floats(-5, 5), max_size=4), min_size=1, max_size=6))
def test_whitening_equals_the_oracle(returns):
    found = whitened([np.array(sample, dtype=np.float64) for sample in returns])
    expected = oracle.whiten(returns)
    flat = [x for sample in returns for x in sample]
    spread = max(flat) - min(flat) if flat else 0.0
    if 0 < spread < 1e-6:
        return  # differences near the rounding of the mean
    assert [len(part) for part in found] == [len(part) for part in expected]
    for left, right in zip(found, expected, strict=True):
        assert left.tolist() == pytest.approx(right, rel=1e-6, abs=1e-8)


def test_calls_of_reinforce_pp():
    head = ["actor.generate", "reward.score"]
    tail = ["returns", "advantages", "actor.train"]
    assert calls(reinforce_pp) == [*head, *tail]
    assert calls(reinforce_pp, kl_coef=0.01) == [*head, "ref.logprobs", "actor.logprobs", *tail]
    baseline = {"group_baseline": True, "kl_coef": 0.01, "kl_in": "loss", "kl_estimator": "k2"}
    assert calls(reinforce_pp, **baseline) == [*head, "centred_scores", "ref.logprobs", *tail]
    graph = trace(reinforce_pp, roles=ROLES, options=ReinforcePPOptions(kl_coef=0.01, epochs=2))
    assert graph.calls("actor")[1].call == "actor.logprobs"
    assert set(graph.nodes[-1].inputs) == {"advantages", "old_logprobs", "ref_logprobs"}
    graph = trace(reinforce_pp, roles=ROLES, options=ReinforcePPOptions(**baseline))
    grains = {node.call: node.grain.value for node in graph.nodes}
    assert grains["advantages"] == "batch", "whitening is a barrier"
    assert grains["centred_scores"] == "group"


# ReMax


def test_over_greedy_by_hand():
    assert over_greedy(np.array([1.0, 0.0, 3.0]), np.array([2.0])).tolist() == [-1, -2, 1]
    assert over_greedy(np.array([1.0, 0.0]), np.array([])).tolist() == [0, 0], "no baseline, no lesson"


def test_calls_of_remax():
    head = ["actor.generate", "actor.generate#2", "reward.score", "reward.score#2", "score_over_greedy"]
    assert calls(remax) == [*head, "actor.train"]
    assert calls(remax, kl_coef=0.1) == [*head, "ref.logprobs", "actor.logprobs", "advantages", "actor.train"]
    graph = trace(remax, roles=ROLES, options=ReMaxOptions())
    greedy = graph.nodes[1]
    assert (greedy.generation.greedy, greedy.generation.samples_per_prompt) == (True, 1)
    assert [column.rows for column in graph.nodes[4].inputs.values()] == [0, greedy.id]
    assert graph.nodes[-1].rows == 0, "the greedy response is not trained on"


# All


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_kl_without_a_reference_names_the_role(flow):
    with pytest.raises(FlowError, match="needs the role `ref`"):
        trace(flow, roles=["actor", "reward"], options=FLOWS[flow](kl_coef=0.1))


@pytest.mark.parametrize("options", [RLOOOptions, ReinforcePPOptions])
def test_a_kl_without_a_gradient_is_refused(options):
    with pytest.raises(ValidationError, match=r"set `options\.kl_estimator` to k2"):
        options(kl_in="loss", kl_estimator="k1")
    assert options(kl_in="loss", kl_estimator="k2").kl_in == "loss"
    assert options(kl_in="loss", kl_estimator="k1", weigh_kl_by_ratio=True).weigh_kl_by_ratio
    with pytest.raises(ValidationError, match=r"but kl_in is reward; set `options\.kl_in` to loss"):
        options(kl_in="reward", weigh_kl_by_ratio=True)
    with pytest.raises(ValidationError, match="k2 has it unweighed"):
        options(kl_in="loss", kl_estimator="k2", weigh_kl_by_ratio=True)
