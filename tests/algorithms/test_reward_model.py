"""The reward model: its loss by hand and against the oracle, over any split, and what the flow calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.reward_model import RewardModelOptions, reward_model
from tests.algorithms import oracle
from tests.algorithms.batches import Outputs, pair_ids, run_loss
from tests.algorithms.flows import graph_of, loss_of

LN2 = math.log(2)


def test_bradley_terry_by_hand():
    # Scores ln 2 and 0: σ(ln 2) = 2/3.  A tie: 1/2, and no accuracy.
    outputs = Outputs([1, 1, 1, 1], values=np.zeros(4), scores=np.array([LN2, 0, 5, 5]), samples=pair_ids(2))
    found = run_loss(loss_of(reward_model, RewardModelOptions(), "reward"), outputs)
    assert found.loss == pytest.approx((math.log(1.5) + LN2) / 2)
    assert found.gradients["scores"] == pytest.approx([-1 / 6, 1 / 6, -1 / 4, 1 / 4])
    assert found.metrics == pytest.approx(
        {"reward/accuracy": 0.5, "reward/margin": LN2 / 2, "reward/mean_reward": (LN2 / 2 + 5) / 2}
    )


@given(
    st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 5),
    st.booleans(),
)
def test_bradley_terry_equals_the_oracle(pairs, margin, centre, cut, swapped):
    """Over any split between pairs, whichever of the two comes first."""
    expected = [oracle.bradley_terry(c, r, margin, centre) for c, r in pairs]
    order = (1, 0) if swapped else (0, 1)
    outputs = Outputs(
        [1, 2] * len(pairs),
        values=np.zeros(3 * len(pairs)),
        scores=np.array([pair[i] for pair in pairs for i in order]),
        samples=[(uid, i) for uid in range(len(pairs)) for i in order],
    )
    options = RewardModelOptions(margin=margin, center_rewards_coefficient=centre)
    found = run_loss(loss_of(reward_model, options, "reward"), outputs, cut=2 * min(cut, len(pairs)))
    assert found.loss == pytest.approx(sum(loss for loss, _, _ in expected) / len(pairs), rel=1e-9, abs=1e-12)
    slopes = [(chosen, rejected)[i] / len(pairs) for _, chosen, rejected in expected for i in order]
    assert found.gradients["scores"] == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    assert found.metrics["reward/accuracy"] == pytest.approx(
        np.mean([c - r > 1e-6 * (abs(c) + abs(r)) for c, r in pairs])
    )


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(0, 3)), min_size=1, max_size=5))
def test_a_pairs_own_margin_adds_to_that_of_the_options(pairs):
    expected = [oracle.bradley_terry(chosen, rejected, 0.5 + margin, 0.0) for chosen, rejected, margin in pairs]
    outputs = Outputs(
        [1, 2] * len(pairs),
        values=np.zeros(3 * len(pairs)),
        scores=np.array([score for chosen, rejected, _ in pairs for score in (chosen, rejected)]),
        samples=pair_ids(len(pairs)),
    )
    margins = {"margin": np.repeat([margin for *_, margin in pairs], 3)}
    found = run_loss(loss_of(reward_model, RewardModelOptions(margin=0.5), "reward"), outputs, margins)
    assert found.loss == pytest.approx(sum(loss for loss, _, _ in expected) / len(pairs))
    assert found.gradients["scores"] == pytest.approx([s / len(pairs) for _, c, r in expected for s in (c, r)])


def test_a_far_margin_does_not_overflow():
    outputs = Outputs([1, 1], values=np.zeros(2), scores=np.array([-400.0, 400.0]), samples=pair_ids(1))
    found = run_loss(loss_of(reward_model, RewardModelOptions(), "reward"), outputs)
    assert (found.loss, found.gradients["scores"]) == (800.0, [-1.0, 1.0])


def test_calls_of_the_reward_model():
    graph = graph_of(reward_model, RewardModelOptions())
    assert [node.call for node in graph.nodes] == ["pairs", "reward.train"]
    assert graph.nodes[-1].training.whole_groups, "a pair is never split"
    assert graph.call_kinds("reward") == {"train"}
