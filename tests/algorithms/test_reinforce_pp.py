"""REINFORCE++: returns of tokens by hand and against the oracle, and which calls its flow makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.kl import reward_to_go
from plait.algorithms.losses import KLEstimator
from plait.algorithms.reinforce_pp import ReinforcePPOptions, at_each_token, reinforce_pp
from tests.algorithms import oracle
from tests.algorithms.flows import calls_of, graph_of


def calls(**options) -> list[str]:
    return calls_of(reinforce_pp, ReinforcePPOptions(**options))


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


def test_calls_of_reinforce_pp():
    head = ["actor.generate", "reward.score"]
    tail = ["returns", "advantages", "actor.train"]
    assert calls() == [*head, *tail]
    assert calls(kl_coef=0.01) == [*head, "ref.logprobs", "actor.logprobs", *tail]
    baseline = {"group_baseline": True, "kl_coef": 0.01, "kl_in": "loss", "kl_estimator": "k2"}
    assert calls(**baseline) == [*head, "centred_scores", "ref.logprobs", *tail]
    graph = graph_of(reinforce_pp, ReinforcePPOptions(kl_coef=0.01, epochs=2))
    assert graph.calls("actor")[1].call == "actor.logprobs"
    assert set(graph.nodes[-1].inputs) == {"advantages", "old_logprobs", "ref_logprobs"}
    graph = graph_of(reinforce_pp, ReinforcePPOptions(**baseline))
    grains = {node.call: node.grain.value for node in graph.nodes}
    assert grains["advantages"] == "batch", "whitening is a barrier"
    assert grains["centred_scores"] == "group"
