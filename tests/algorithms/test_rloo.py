"""RLOO: advantages by hand and against the oracle, and which calls its flow makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.rloo import RLOOOptions, leave_one_out_advantages, rloo
from tests.algorithms import oracle
from tests.algorithms.flows import calls_of

rewards_of_a_group = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


def calls(**options) -> list[str]:
    return calls_of(rloo, RLOOOptions(**options))


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
    assert calls() == [*head, "advantages", "actor.train"]
    assert calls(epochs=2) == [*head, "actor.logprobs", "advantages", "actor.train"]
    in_reward = [*head, "ref.logprobs", "actor.logprobs", "rewards", "advantages", "actor.train"]
    assert calls(kl_coef=0.05) == in_reward
    assert calls(kl_coef=0.05, mini_batches=2) == in_reward, "the log-probs are computed once"
    in_loss = [*head, "ref.logprobs", "advantages", "actor.train"]
    assert calls(kl_coef=0.05, kl_in="loss", kl_estimator="k2") == in_loss
    normalised = [*head, "advantages", "normalized_advantages", "actor.train"]
    assert calls(normalize_advantages=True) == normalised
