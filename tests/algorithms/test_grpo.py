"""GRPO: advantages by hand and against the oracle, KL in the reward, and which calls its flow makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.grpo import GRPOOptions, batch_advantages, group_advantages, grpo
from plait.algorithms.kl import KLPlace, subtract_kl
from plait.algorithms.losses import KLEstimator
from plait.dataflow import trace
from plait.errors import FlowError
from tests.algorithms import oracle
from tests.algorithms.flows import calls_of


def test_advantages_by_hand():
    # Rewards 1, 0, 0, 1: mean 1/2, sample variance 4 · (1/4) / 3 = 1/3.
    scaled = 0.5 / (1 / 3**0.5 + 1e-4)
    assert group_advantages(np.array([1.0, 0, 0, 1])).tolist() == pytest.approx([scaled, -scaled, -scaled, scaled])
    assert group_advantages(np.array([1.0, 0, 0, 1]), scale=False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_equal_rewards_and_single_samples_have_no_advantage():
    # 0.1 + 0.2 is not 0.3 in floating point: a mean of equal rewards may differ from them in the last bit.
    assert group_advantages(np.full(3, 0.1)).tolist() == [0, 0, 0]
    assert group_advantages(np.full(3, 0.1), scale=False).tolist() == [0, 0, 0]
    assert group_advantages(np.array([5.0])).tolist() == [0]


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), min_size=1, max_size=8), st.booleans())
def test_advantages_equal_the_oracle(rewards, scale):
    found = group_advantages(np.array(rewards), scale=scale)
    assert found.tolist() == pytest.approx(oracle.advantages(rewards, scale), rel=1e-12, abs=1e-12)


def test_advantages_over_the_batch_by_hand():
    # Groups 1, 0 and 9, 8: within each half a unit from its mean; all four vary by (16 · 4 + 1) / 3 around 4.5.
    unit = 0.5 / ((4.5**2 * 2 + 3.5**2 * 2) / 3) ** 0.5
    found = batch_advantages(np.array([0.5, -0.5, 0.5, -0.5]), np.array([1.0, 0, 9, 8]))
    assert found.tolist() == pytest.approx([unit, -unit, unit, -unit], rel=1e-4)
    assert batch_advantages(np.zeros(2), np.full(2, 0.1)).tolist() == [0, 0]
    assert batch_advantages(np.zeros(1), np.ones(1)).tolist() == [0]


@pytest.mark.parametrize(("value", "said"), [("group", "; TRL's `group` is true"), ("batchh", ""), (2, ""), (None, "")])
def test_what_rewards_are_scaled_by_is_told(value, said):
    with pytest.raises(ValueError, match=rf"expected true, batch or false, found {value!r}{said}"):
        GRPOOptions(scale_rewards=value)


@pytest.mark.parametrize("how", list(KLEstimator))
def test_kl_in_the_reward(how):
    logprobs, ref = np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -1.0, -0.5])
    expected = 3.0 - 0.1 * sum(oracle.kl(float(d), how.value)[0] for d in logprobs - ref)
    assert subtract_kl(3.0, logprobs, ref, kl_coef=0.1, estimator=how) == pytest.approx(expected)


def test_kl_in_the_reward_lowers_it():
    """A policy that has moved toward its own samples pays: log π > log π_ref there."""
    assert subtract_kl(0.0, np.array([-0.1]), np.array([-2.0]), kl_coef=1.0, estimator=KLEstimator.K1) < 0


def calls(**options) -> list[str]:
    return calls_of(grpo, GRPOOptions(**options))


def test_several_rewards_are_standardised_one_by_one():
    flow = trace(grpo, roles={"actor", "reward"}, options=GRPOOptions(multi_objective_aggregation="normalize_then_sum"))
    _, score, advantages, train = flow.nodes
    assert [str(column) for column in score.outputs] == ["reward_score[sample]", "reward_score_decoupled[sample]"]
    assert advantages.inputs == {"0": score.outputs[1]}
    assert train.loss_columns["advantages"] == advantages.outputs[0]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"scale_rewards": False}, "scale_rewards: False"),
        ({"scale_rewards": "batch"}, "scale_rewards: batch"),
        ({"dynamic_sampling": True}, "dynamic_sampling: True"),
        ({"stop_properly_penalty_coef": 0.5}, "stop_properly_penalty_coef: 0.5"),
        ({"overlong_buffer_tokens": 20}, "overlong_buffer_tokens: 20"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, "kl_in: reward"),
    ],
)
def test_what_is_about_the_sum_of_rewards_is_refused_where_each_is_standardised(options, key):
    with pytest.raises(
        ValueError, match=rf"{key} is about the sum of rewards, but .*; remove `options\.{key.split(':')[0]}`"
    ):
        GRPOOptions(multi_objective_aggregation="normalize_then_sum", **options)
    GRPOOptions(**options)


def test_the_flow_calls_what_it_needs():
    assert calls(scale_rewards="batch") == [
        "actor.generate",
        "reward.score",
        "centred_rewards",
        "advantages",
        "actor.train",
    ]
    assert calls() == ["actor.generate", "reward.score", "advantages", "actor.train"]
    assert calls(kl_coef=0.1) == ["actor.generate", "reward.score", "ref.logprobs", "advantages", "actor.train"]
    assert calls(epochs=2) == ["actor.generate", "reward.score", "actor.logprobs", "advantages", "actor.train"]
    assert calls(kl_coef=0.1, kl_in=KLPlace.REWARD) == [
        "actor.generate",
        "reward.score",
        "ref.logprobs",
        "actor.logprobs",
        "rewards",
        "advantages",
        "actor.train",
    ]
    assert calls(kl_coef=0.1, kl_in=KLPlace.REWARD, mini_batches=2).count("actor.logprobs") == 1


def test_columns_reach_the_loss():
    graph = trace(grpo, roles=["actor", "reward", "ref"], options=GRPOOptions(kl_coef=0.1, mini_batches=4, epochs=2))
    train = graph.nodes[-1]
    assert set(train.inputs) == {"advantages", "old_logprobs", "ref_logprobs"}
    assert (train.training.mini_batches, train.training.epochs) == (4, 2)


def test_kl_without_a_reference_names_the_role():
    with pytest.raises(FlowError, match="needs the role `ref`"):
        trace(grpo, roles=["actor", "reward"], options=GRPOOptions(kl_coef=0.1))
