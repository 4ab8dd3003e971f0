"""Toys with a known optimum: every algorithm's own flow and loss, on a table of logits, reaches it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.reinforce_pp import ReinforcePPOptions, reinforce_pp
from plait.algorithms.remax import ReMaxOptions, remax
from plait.algorithms.rloo import RLOOOptions, rloo
from tests.algorithms.tabular import TabularRun

BEST = ((1, 0), (0, 1))
"""State → its best response; the first arm that the table prefers is the wrong one in both states."""

BANDITS = {
    "grpo": (grpo, GRPOOptions()),
    "dapo": (grpo, GRPOOptions(clip_high=0.28, aggregation="token-mean", mini_batches=2, epochs=2)),
    "dr_grpo": (grpo, GRPOOptions(scale_rewards=False, aggregation="seq-mean-token-sum-norm")),
    "gspo": (grpo, GRPOOptions(ratio="sequence-mean", clip_low=0.1, clip_high=0.1, mini_batches=2, epochs=2)),
    "rloo": (rloo, RLOOOptions()),
    "rloo-reused": (rloo, RLOOOptions(normalize_advantages=True, mini_batches=2, epochs=2)),
    "rloo-token": (rloo, RLOOOptions(ratio="token", aggregation="seq-mean-token-sum-norm")),
    "reinforce_pp": (reinforce_pp, ReinforcePPOptions()),
    "reinforce_pp-baseline": (reinforce_pp, ReinforcePPOptions(group_baseline=True, epochs=2)),
    "remax": (remax, ReMaxOptions()),
}


def matches(state: int, response: tuple[int, ...]) -> float:
    return float(response == BEST[state])


@pytest.mark.parametrize("name", BANDITS)
def test_two_states_two_arms(name: str) -> None:
    """Reward 1 for one response of four, another one in each state. It begins at probability 0.2 · 0.5."""
    flow, options = BANDITS[name]
    table = np.log([[[0.8, 0.2], [0.5, 0.5]], [[0.2, 0.8], [0.5, 0.5]]])
    run = TabularRun(flow, options, table, matches, samples_per_prompt=16)
    probabilities = run.train(steps=120, rate=3.0)
    for state, (first, second) in enumerate(BEST):
        assert probabilities[state, 0, first] * probabilities[state, 1, second] > 0.95, (name, state)


BETA = 0.5
REWARDS = np.array([[[1.0, 0.0, 0.3], [0.0, 0.5, 0.0]], [[0.0, 0.2, 0.9], [0.4, 0.0, 0.8]]])
"""[states, places, tokens]: what a token is worth; a response is worth the sum of its tokens."""
REFERENCE = np.log([[[0.2, 0.5, 0.3], [0.6, 0.2, 0.2]], [[0.3, 0.4, 0.3], [0.1, 0.8, 0.1]]])

KL: dict[str, tuple[Any, Any]] = {
    "grpo": (grpo, GRPOOptions(kl_coef=BETA, kl_in="reward", kl_estimator="k1", scale_rewards=False)),
    "rloo": (rloo, RLOOOptions(kl_coef=BETA)),
    "rloo-token": (rloo, RLOOOptions(kl_coef=BETA, ratio="token", aggregation="seq-mean-token-sum-norm")),
    "rloo-loss": (rloo, RLOOOptions(kl_coef=BETA, kl_in="loss", kl_estimator="k2")),
    "reinforce_pp": (reinforce_pp, ReinforcePPOptions(kl_coef=BETA)),
    "remax": (remax, ReMaxOptions(kl_coef=BETA)),
}


@pytest.mark.parametrize("name", KL)
def test_the_kl_stops_where_it_should(name: str) -> None:
    """The maximum of E r − β KL(π ‖ π_ref) is π ∝ π_ref · exp(r / β): a wrong sign or weight of the KL misses it."""
    flow, options = KL[name]

    def worth(state: int, response: tuple[int, ...]) -> float:
        return float(sum(REWARDS[state, place, token] for place, token in enumerate(response)))

    run = TabularRun(flow, options, REFERENCE, worth, samples_per_prompt=40)
    found = run.train(steps=160, rate=1.5)
    optimum = np.exp(REFERENCE + REWARDS / BETA)
    optimum /= optimum.sum(-1, keepdims=True)
    assert np.abs(optimum - np.exp(REFERENCE)).max() > 0.3, "it is not where it began"
    assert np.abs(found - optimum).max() < 0.03, (name, found, optimum)
