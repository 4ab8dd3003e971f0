"""Toys with a known optimum: every algorithm's own flow and loss, on a table of logits, reaches it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plait.algorithms.dpo import DPOOptions, dpo
from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.ppo import PPOOptions, ppo
from plait.algorithms.reinforce_pp import ReinforcePPOptions, reinforce_pp
from plait.algorithms.remax import ReMaxOptions, remax
from plait.algorithms.reward_model import RewardModelOptions, reward_model
from plait.algorithms.rloo import RLOOOptions, rloo
from plait.algorithms.safe_rlhf import SafeRLHFOptions, safe_rlhf
from plait.algorithms.sft import SFTOptions, sft
from tests.algorithms.tabular import TabularRun
from tests.cases import slow_but

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
    "ppo": (ppo, PPOOptions(kl_coef=0)),
    "ppo-reused": (ppo, PPOOptions(kl_coef=0, mini_batches=2, epochs=2, lam=1.0, gamma=0.99, dual_clip=3.0)),
    "ppo-scaled": (ppo, PPOOptions(kl_coef=0, reward_norm="mean-std", reward_clip=2.0, critic_warmup_steps=5)),
    "ppo-whitened": (ppo, PPOOptions(kl_coef=0, whiten_rewards=True, value_clip=None)),
    "safe_rlhf": (safe_rlhf, SafeRLHFOptions(kl_coef=0, cost_threshold=1.0)),
}
CRITICS = {"critic": 1.0, "cost_critic": 1.0}
"""Rates of the value tables. Clipped, a value moves by at most `value_clip` in a step, however high the rate."""


def matches(state: int, response: tuple[int, ...]) -> float:
    return float(response == BEST[state])


@pytest.mark.parametrize("name", slow_but(["grpo", "ppo-scaled"], BANDITS))
def test_two_states_two_arms(name: str) -> None:
    """Reward 1 for one response of four, another one in each state. It begins at probability 0.2 · 0.5."""
    flow, options = BANDITS[name]
    table = np.log([[[0.8, 0.2], [0.5, 0.5]], [[0.2, 0.8], [0.5, 0.5]]])
    scores = {"reward": matches, "cost": lambda state, response: 0.0}
    run = TabularRun(flow, options, table, scores, samples_per_prompt=16, scalar_rates=CRITICS)
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
    "ppo": (ppo, PPOOptions(kl_coef=BETA, whiten_advantages=False)),
    "ppo-whitened": (ppo, PPOOptions(kl_coef=BETA)),
    "ppo-loss": (ppo, PPOOptions(kl_coef=BETA, kl_in="loss", kl_estimator="k2", whiten_advantages=False)),
    "ppo-reused": (ppo, PPOOptions(kl_coef=BETA, whiten_advantages=False, mini_batches=2, epochs=2, lam=1.0)),
}


@pytest.mark.parametrize("name", slow_but(["grpo"], KL))
def test_the_kl_stops_where_it_should(name: str) -> None:
    """The maximum of E r − β KL(π ‖ π_ref) is π ∝ π_ref · exp(r / β): a wrong sign or weight of the KL misses it."""
    flow, options = KL[name]

    run = TabularRun(flow, options, REFERENCE, {"reward": worth}, samples_per_prompt=40, scalar_rates={"critic": 1.0})
    found = run.train(steps=160, rate=1.5)
    optimum = tilted(1 / BETA)
    assert np.abs(optimum - np.exp(REFERENCE)).max() > 0.3, "it is not where it began"
    assert np.abs(found - optimum).max() < 0.03, (name, found, optimum)


def worth(state: int, response: tuple[int, ...]) -> float:
    return float(sum(REWARDS[state, place, token] for place, token in enumerate(response)))


def tilted(strength: float, rewards: np.ndarray = REWARDS) -> np.ndarray:
    """π ∝ π_ref · exp(strength · r)."""
    weights = np.exp(REFERENCE + strength * rewards)
    return weights / weights.sum(-1, keepdims=True)


def kl_of(policy: np.ndarray) -> float:
    """KL of a response to the reference, averaged over the states."""
    return float((policy * (np.log(policy) - REFERENCE)).sum((1, 2)).mean())


def solved(equation: Any, low: float, high: float) -> float:
    """The root of a rising function."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if equation(middle) < 0 else (low, middle)
    return low


@pytest.mark.slow
def test_the_weight_of_the_kl_settles_where_the_kl_is_at_its_target() -> None:
    """The best policy for a weight β has a known KL; the controller has to find the β of the KL that it is told."""
    expected = solved(lambda beta: 0.3 - kl_of(tilted(1 / beta)), 0.05, 5.0)
    options = PPOOptions(kl_coef=0.1, target_kl=0.3, kl_horizon=250, whiten_advantages=False)
    run = TabularRun(ppo, options, REFERENCE, {"reward": worth}, samples_per_prompt=40, scalar_rates={"critic": 1.0})
    found = run.train(steps=250, rate=1.5)
    weights = [step["kl_coef"] for step in run.history]
    assert weights[0] == 0.1
    assert np.mean(weights[-40:]) == pytest.approx(expected, rel=0.1)
    assert kl_of(found) == pytest.approx(0.3, rel=0.1)


def test_the_critic_learns_the_values() -> None:
    """The policy does not move: V before the last token is what is left to earn, and explains the returns."""
    options = PPOOptions(kl_coef=0, critic_warmup_steps=80, value_clip=None, lam=0.9)
    run = TabularRun(ppo, options, REFERENCE, {"reward": worth}, samples_per_prompt=60, scalar_rates={"critic": 1.0})
    before = run.probabilities
    assert np.array_equal(run.train(steps=80, rate=1.0), before), "the critic alone is trained"
    means = (np.exp(REFERENCE) * REWARDS).sum(-1)
    critic = run.scalars["critic"].detach().numpy()
    for state in range(2):
        assert critic[state, run.prefix(())] == pytest.approx(means[state].sum(), abs=0.1)
        for first in range(3):
            assert critic[state, run.prefix((first,))] == pytest.approx(
                REWARDS[state, 0, first] + means[state, 1], abs=0.1
            )
    explained = [step["critic/vf_explained_var"] for step in run.history]
    assert explained[0] == pytest.approx(0, abs=0.05)
    assert np.mean(explained[-50:]) > 0.3


COSTS = np.array([[[1.0, 0.2, 0.0], [0.1, 0.6, 0.0]], [[0.0, 0.1, 1.0], [0.5, 0.0, 0.9]]])
"""What a token costs: mostly what it is worth."""
LIMIT = 0.6


@pytest.mark.slow
def test_safe_rlhf_meets_its_limit_with_the_multiplier_that_it_takes() -> None:
    """For a multiplier λ the best policy is π ∝ π_ref exp((r − λ c) / (1 + λ) / (β / 2)); at λ* its mean cost is d."""

    def best(multiplier: float) -> np.ndarray:
        return tilted(2 / BETA, (REWARDS - multiplier * COSTS) / (1 + multiplier))

    def cost_of(policy: np.ndarray) -> float:
        return float((policy * COSTS).sum((1, 2)).mean())

    expected = solved(lambda multiplier: LIMIT - cost_of(best(multiplier)), 0.0, 20.0)
    assert 0.3 < expected < 3
    assert cost_of(best(0.0)) > LIMIT + 0.3, "without the limit it costs more"
    options = SafeRLHFOptions(kl_coef=BETA, cost_threshold=LIMIT, lambda_init=0.2, lambda_lr=0.15, cost_window=160)
    scores = {
        "reward": worth,
        "cost": lambda state, response: float(sum(COSTS[state, place, token] for place, token in enumerate(response))),
    }
    run = TabularRun(safe_rlhf, options, REFERENCE, scores, samples_per_prompt=40, scalar_rates=CRITICS)
    found = run.train(steps=300, rate=3.0)
    multipliers = [step["lambda"] for step in run.history]
    assert multipliers[0] < 0.3
    assert np.mean(multipliers[-50:]) == pytest.approx(expected, rel=0.1)
    assert cost_of(found) == pytest.approx(LIMIT, abs=0.04)
    assert np.abs(found - best(expected)).max() < 0.06
    assert np.mean([step["episode_cost"] for step in run.history[-50:]]) == pytest.approx(LIMIT, abs=0.04)


# Given data: the optimum is a frequency of the data.

ONE_PLACE = np.log([[[0.6, 0.3, 0.1]]])


def preferences(counts: dict[tuple[int, int], int]) -> list[tuple[int, int, int, tuple[int, ...], tuple[float, ...]]]:
    """(chosen token, rejected token) → pairs of it."""
    pairs = [pair for pair, count in counts.items() for _ in range(count)]
    return [(0, uid, index, (pair[index],), (1.0,)) for uid, pair in enumerate(pairs) for index in (0, 1)]


def test_sft_learns_the_frequencies_of_trained_tokens() -> None:
    """First tokens 0 1 1 2 in state 0; the second token is trained in the last two alone, where it is 1 and 2."""
    firsts, seconds = (0, 1, 1, 2), (0, 0, 1, 2)
    given = [(0, i, 0, (a, b), (1.0, float(i > 1))) for i, (a, b) in enumerate(zip(firsts, seconds, strict=True))]
    run = TabularRun(sft, SFTOptions(), np.zeros((1, 2, 3)), given=given)
    found = run.train(steps=400, rate=6.0)
    assert found[0, 0] == pytest.approx([0.25, 0.5, 0.25], abs=1e-3)
    assert found[0, 1] == pytest.approx([0, 0.5, 0.5], abs=0.02)
    entropies = 4 * 1.5 * np.log(2) + 2 * np.log(2)  # of six trained tokens
    assert run.history[-1]["actor/nll"] == pytest.approx(entropies / 6, abs=0.02)
    # Token 1 is the likeliest of the first tokens; of the second ones 1 and 2 are nearly as likely as each other.
    assert 3 / 6 <= run.history[-1]["actor/mean_token_accuracy"] <= 4 / 6


def test_a_reward_model_learns_the_odds() -> None:
    """3 : 1, 2 : 1 and 6 : 1 among three responses: strengths of 6, 2 and 1, their logarithms up to a constant."""
    given = preferences({(0, 1): 3, (1, 0): 1, (1, 2): 2, (2, 1): 1, (0, 2): 6, (2, 0): 1})
    for centre, shift in ((0.0, 5.0), (0.1, 0.0)):
        run = TabularRun(
            reward_model,
            RewardModelOptions(center_rewards_coefficient=centre, mini_batches=1),
            ONE_PLACE,
            given=given,
            scalar_rates={"reward": 6.0},
        )
        with torch.no_grad():
            run.scalars["reward"] += 5.0
        run.train(steps=250, rate=1.0)
        scores = run.scalars["reward"].detach()[0, 1:].numpy()
        if not centre:
            assert scores - scores.mean() == pytest.approx(np.log([6, 2, 1]) - np.log([6, 2, 1]).mean(), abs=1e-3)
        assert scores.mean() == pytest.approx(shift, abs=0.1), "only the centring term moves all scores together"
        assert run.history[-1]["reward/accuracy"] == pytest.approx(11 / 14)


P = 0.75
DPO: dict[str, tuple[DPOOptions, float]] = {
    "sigmoid": (DPOOptions(beta=0.5), np.log(P / (1 - P))),
    "smoothed": (DPOOptions(beta=0.5, label_smoothing=0.1), np.log((P * 0.9 + 0.25 * 0.1) / (0.25 * 0.9 + P * 0.1))),
    "robust": (DPOOptions(beta=0.5, loss_type="robust", label_smoothing=0.1), np.log((P - 0.1) / (0.9 - P))),
    "hinge": (DPOOptions(beta=0.5, loss_type="hinge"), 1.0),
    "ipo": (DPOOptions(beta=0.5, loss_type="ipo"), (2 * P - 1) / 2),
}


@pytest.mark.parametrize("name", slow_but(list(DPO)[::6], DPO))
def test_dpo_learns_the_odds_over_the_reference(name: str) -> None:
    """Response 1 is preferred to 0 in three pairs of four: β times the gap of log-ratios has a closed form."""
    options, gap = DPO[name]
    run = TabularRun(dpo, options, ONE_PLACE, given=preferences({(1, 0): 3, (0, 1): 1}))
    ratios = np.log(run.train(steps=400, rate=2.0)[0, 0]) - ONE_PLACE[0, 0]
    assert options.beta * (ratios[1] - ratios[0]) == pytest.approx(gap, abs=0.01)
    assert run.history[-1]["rewards/accuracies"] == 0.75
