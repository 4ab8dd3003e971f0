"""PPO: advantages, rewards, KL controller and value loss by hand and against the oracle; what its flow calls."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plait.algorithms.advantages import explained_variance, gae, scaled, token_mean, whitened
from plait.algorithms.critic import (
    at_last_token,
    if_finished,
    if_truncated,
    response_mean,
    returns_of,
    score_less_kl,
    turns_less_kl,
    value_loss,
)
from plait.algorithms.kl import adapted_kl_coef, mean_kl
from plait.algorithms.losses import KLEstimator
from plait.algorithms.ppo import (
    PPOOptions,
    clipped,
    less_if_truncated,
    normalised,
    ppo,
    turns_less_if_truncated,
    updated_moments,
)
from plait.dataflow import trace
from plait.errors import FlowError
from tests.algorithms import oracle
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import calls_of, graph_of, loss_of

numbers = st.floats(-3, 3)
steps = st.lists(st.tuples(numbers, numbers), max_size=6)
unit = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def calls(**options) -> list[str]:
    return calls_of(ppo, PPOOptions(**options))


# GAE


def test_gae_by_hand():
    # Rewards 0, 0, 4; values 1, 2, 3; γ = 1/2, λ = 1/2.
    # δ = 0 + 1 − 1, 0 + 1.5 − 2, 4 − 3 = 0, −0.5, 1; A_3 = 1, A_2 = −0.5 + 1/4, A_1 = 0 − 1/16.
    found = gae(np.array([0.0, 0, 4]), np.array([1.0, 2, 3]), gamma=0.5, lam=0.5)
    assert found.tolist() == [-0.0625, -0.25, 1.0]
    # A truncated response whose end is worth 6 adds γ · 6 to the last δ, and (γλ)^l of it before.
    found = gae(np.array([0.0, 0, 4]), np.array([1.0, 2, 3]), 6.0, gamma=0.5, lam=0.5)
    assert found.tolist() == [-0.0625 + 3 / 16, -0.25 + 3 / 4, 4.0]


@given(steps, unit, unit, st.sampled_from([0.0, 2.5]))
def test_gae_equals_the_oracle(pairs, gamma, lam, after):
    rewards, values = [r for r, _ in pairs], [v for _, v in pairs]
    found = gae(np.array(rewards), np.array(values), after, gamma=gamma, lam=lam)
    assert found.tolist() == pytest.approx(oracle.gae(rewards, values, after, gamma, lam), abs=1e-12)


@given(steps, st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 2.5]))
def test_gae_with_lambda_1_is_monte_carlo_minus_value(pairs, gamma, after):
    """Then the returns are what was really collected, whatever the critic says."""
    rewards, values = [r for r, _ in pairs], [v for _, v in pairs]
    advantages = gae(np.array(rewards), np.array(values), after, gamma=gamma, lam=1.0)
    expected = oracle.monte_carlo(rewards, after, gamma)
    assert returns_of(advantages, np.array(values)).tolist() == pytest.approx(expected, abs=1e-12)


@given(steps)
def test_gae_with_lambda_0_is_one_step(pairs):
    rewards, values = np.array([r for r, _ in pairs]), np.array([v for _, v in pairs])
    expected = rewards + 0.9 * np.append(values[1:], 0.0)[: len(values)] - values
    assert gae(rewards, values, gamma=0.9, lam=0.0).tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_nothing_follows_an_end_and_the_limit_is_no_end():
    """After EOS the bootstrap is 0. A truncated response has its end's value, and its score is not given as well."""
    assert (if_truncated(6.0, finished=1.0), if_truncated(6.0, finished=0.0)) == (0.0, 6.0)
    assert (if_finished(4.0, finished=1.0), if_finished(4.0, finished=0.0)) == (4.0, 0.0)
    off, on = graph_of(ppo, PPOOptions()), graph_of(ppo, PPOOptions(bootstrap_truncated=True))
    assert "critic.score" not in [node.call for node in off.nodes], "off: the limit is treated as an end"
    advantages = next(node for node in on.nodes if node.call == "critic_advantages")
    assert [str(column) for column in advantages.inputs.values()] == [
        "critic_token_rewards[token]",
        "critic_values[token]",
        "critic_value_after[sample]",
    ]
    rewards = next(node for node in on.nodes if node.call == "critic_token_rewards")
    assert str(rewards.inputs["0"]) == "critic_scores_of_finished[sample]"


# Rewards of tokens


def test_token_rewards_by_hand():
    # d = 1, −2, 0 with coefficient 1/2: −1/2, +1, 0, and the score of 10 at the last token alone.
    logprobs, ref = np.array([-1.0, -4.0, -1.0]), np.array([-2.0, -2.0, -1.0])
    assert score_less_kl(10.0, logprobs, ref, 0.5, KLEstimator.K1).tolist() == [-0.5, 1.0, 10.0]
    assert score_less_kl(10.0, logprobs, ref, 0.5, KLEstimator.K1, share=-0.5).tolist() == [0.25, -0.5, 10.0]
    assert at_last_token(10.0, logprobs).tolist() == [0, 0, 10]
    assert score_less_kl(10.0, np.array([]), np.array([]), 0.5, KLEstimator.K1).tolist() == []
    assert at_last_token(10.0, np.array([])).tolist() == []


def test_rewards_of_turns_by_hand():
    """Two turns of two tokens, worth 2 and 4; the reply between them takes no step. The KL costs 1/2 at each token."""
    logprobs, ref, values = np.full(4, -1.0), np.full(4, -1.5), np.array([1.0, 2, 3, 4])
    rewards = turns_less_kl(np.array([0.0, 2, 0, 4]), logprobs, ref, 1.0, KLEstimator.K1)
    assert rewards.tolist() == [-0.5, 1.5, -0.5, 3.5]
    # γ = λ = 1/2: δ = −0.5 + 1 − 1, 1.5 + 1.5 − 2, −0.5 + 2 − 3, 3.5 − 4 = −0.5, 1, −1.5, −0.5.
    # A_4 = −0.5, A_3 = −1.5 − 0.5/4, A_2 = 1 − 1.625/4, A_1 = −0.5 + 0.59375/4.
    advantages = gae(rewards, values, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.3515625, 0.59375, -1.625, -0.5]
    assert returns_of(advantages, values).tolist() == [0.6484375, 2.59375, 1.375, 3.5]
    one_turn = turns_less_kl(np.array([0.0, 0, 0, 6]), logprobs, ref, 1.0, KLEstimator.K1)
    assert one_turn.tolist() == score_less_kl(6.0, logprobs, ref, 1.0, KLEstimator.K1).tolist()
    assert turns_less_if_truncated(np.array([2.0, 4.0]), 0.0, 3.0).tolist() == [2, 1]
    assert turns_less_if_truncated(np.array([2.0, 4.0]), 1.0, 3.0).tolist() == [2, 4]


def test_rewards_are_those_of_turns_where_credit_is_theirs():
    graph = graph_of(ppo, PPOOptions(credit="turn", missing_eos_penalty=1.0))
    made = {node.call: [str(column) for column in node.inputs.values()] for node in graph.nodes}
    assert made["penalised_scores"] == ["reward_score_by_turn[token]", "finished[sample]"]
    assert made["critic_token_rewards"][0] == "penalised_scores[token]"
    made = {node.call: node for node in graph_of(ppo, PPOOptions(credit="turn", kl_coef=0)).nodes}
    assert made["critic_advantages"].inputs["0"].name == "reward_score_by_turn"
    assert "reward_score_by_turn" not in str(graph_of(ppo, PPOOptions()))


def test_the_kl_of_a_token_costs_reward():
    """Where the policy is more sure of its token than the reference, the reward is lower."""
    assert score_less_kl(0.0, np.array([-0.1]), np.array([-2.0]), 1.0, KLEstimator.K1)[0] == pytest.approx(-1.9)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), st.sampled_from(list(KLEstimator)))
def test_token_rewards_sum_to_the_score_less_the_kl(pairs, how):
    logprobs, ref = [p for p, _ in pairs], [q for _, q in pairs]
    rewards = score_less_kl(1.5, np.array(logprobs), np.array(ref), 0.1, how)
    expected = oracle.token_returns(1.5, logprobs, ref, 0.1, how.value)
    assert oracle.monte_carlo(rewards.tolist(), 0.0, 1.0) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.lists(numbers, max_size=4), min_size=1, max_size=5))
def test_whitened_rewards_keep_their_mean(rewards):
    found = scaled([np.array(sample, dtype=np.float64) for sample in rewards])
    flat = np.array([x for sample in rewards for x in sample])
    if len(flat) < 2 or np.ptp(flat) < 1e-6:
        assert [part.tolist() for part in found] == rewards or np.ptp(flat) > 0
        return
    result = np.concatenate(found)
    assert result.mean() == pytest.approx(flat.mean(), abs=1e-9)
    deviation = flat.std(ddof=1)
    assert result.std(ddof=1) == pytest.approx(deviation / (deviation + 1e-8), rel=1e-7)
    centred = np.concatenate(whitened([np.array(sample, dtype=np.float64) for sample in rewards]))
    assert result - centred == pytest.approx(flat.mean(), abs=1e-9)


@given(st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=6), st.booleans())
def test_running_moments_are_those_of_all_scores(batches, centre):
    moments, seen = np.zeros(3), []
    for batch in batches:
        moments = updated_moments(moments, np.array(batch, dtype=np.float64))
        seen += batch
    assert moments[0] == len(seen)
    if len(seen) < 2 or np.ptp(seen) < 1e-3:
        return
    assert moments[1] == pytest.approx(np.mean(seen), abs=1e-12)
    assert moments[2] == pytest.approx(((np.array(seen) - np.mean(seen)) ** 2).sum(), rel=1e-9)
    expected = (1.3 - (np.mean(seen) if centre else 0.0)) / (np.std(seen, ddof=1) + 1e-8)
    assert normalised(1.3, moments, centre) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_scores_of_one_size_are_not_divided():
    moments = updated_moments(np.zeros(3), np.full(4, 2.0))
    assert moments.tolist() == [4, 2, 0]
    assert normalised(2.0, moments, centre=False) == 2
    assert normalised(2.0, moments, centre=True) == 0
    assert updated_moments(moments, np.array([])).tolist() == [4, 2, 0]


def test_scores_are_normalised_then_clipped_then_penalised():
    assert [clipped(score, 2.0) for score in (-3.0, -2.0, 0.5, 7.0)] == [-2, -2, 0.5, 2]
    assert (less_if_truncated(1.0, 1.0, 3.0), less_if_truncated(1.0, 0.0, 3.0)) == (1.0, -2.0)
    graph = graph_of(ppo, PPOOptions(reward_norm="std", reward_clip=5.0, missing_eos_penalty=1.0))
    shaped = [node for node in graph.nodes if node.call.endswith("_scores")]
    assert [node.call for node in shaped] == ["normalised_scores", "clipped_scores", "penalised_scores"]
    assert [node.inputs["0"].name for node in shaped] == ["reward_score", "normalised_scores", "clipped_scores"]
    assert shaped[0].inputs["1"].name == "next_reward_moments", "a batch counts in what it is normalised by"


# The controller


def test_the_controller_by_hand():
    coef = partial(adapted_kl_coef, 0.1, responses=[np.zeros(1)] * 50, target=6.0, horizon=1000)
    assert coef(6.0) == pytest.approx(0.1)
    assert coef(6.6) == pytest.approx(0.1 * (1 + 0.1 * 0.05)), "10 % above its target"
    assert coef(60.0) == pytest.approx(0.1 * (1 + 0.2 * 0.05)), "at most 20 %"
    assert coef(-1.0) == pytest.approx(0.1 * (1 - 0.2 * 0.05))
    assert coef(0.0, horizon=10) == pytest.approx(0.1 * 0.8**5), "a batch of five horizons: no weight of 0 or below it"
    assert coef(60.0, horizon=1) == pytest.approx(0.1 * 1.2**10), "fifty horizons count as ten"


@pytest.mark.parametrize("measured", [0.0, 1e6])
def test_the_weight_of_the_kl_stays_finite_and_above_0(measured):
    """Where thousands of responses are as many horizons, and where the KL stays off its target for long."""
    coef = 0.05
    for _ in range(1000):
        coef = adapted_kl_coef(coef, measured, [np.zeros(1)] * 4096, target=6.0, horizon=1)
        assert 0 < np.float32(coef) < np.inf


def test_the_kl_is_measured_over_whole_responses():
    # Σ k1: 1 + 2 and −1; the mean of 3 and −1 is 1, whatever their lengths.
    logprobs, ref = [np.array([-1.0, -1.0]), np.array([-3.0])], [np.array([-2.0, -3.0]), np.array([-2.0])]
    assert mean_kl(logprobs, ref, KLEstimator.K1) == 1
    assert mean_kl([], [], KLEstimator.K1) == 0


@pytest.mark.parametrize("target", [1.0, 8.0])
def test_the_controller_finds_the_weight_of_its_target(target):
    """Where the KL falls with its weight, as 4 / β² does in the toy of this test, β settles at the target."""
    coef = 1.0
    for _ in range(800):
        coef = adapted_kl_coef(coef, 4 / coef**2, [np.zeros(1)] * 64, target=target, horizon=500)
    assert 4 / coef**2 == pytest.approx(target, rel=1e-3)


# The value loss


def test_the_value_loss_by_hand():
    # Old value 0, clip 1/2. Value 2, return 3: the clipped 1/2 is further off, (1/2 − 3)² = 6.25, and flat.
    # Value 2, return 1: 1 against (1/2 − 1)² = 1/4: the value has overshot and is pulled back. Value 1/4: not clipped.
    outputs = Outputs([1, 2], values=np.array([2.0, 2.0, 0.25]))
    columns = {"old_values": np.zeros(3), "returns": np.array([3.0, 1.0, 1.25])}
    found = run_loss(partial(value_loss, value_clip=0.5), outputs, columns)
    assert found.loss == pytest.approx((6.25 + 1 + 1) / 2 / 3)
    assert found.gradients["values"] == pytest.approx([0, 1 / 3, -1 / 3])
    assert found.metrics == pytest.approx({"critic/vf_loss": 8.25 / 6, "critic/vf_clipfrac": 1 / 3})


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    st.sampled_from([None, 0.2, 1.0]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_value_loss_equals_the_oracle(lengths, clip, masked, seed):
    """Global token mean, ½, clipping: over any split of the samples and under a mask."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    values, old, returns = (rng.normal(size=total) for _ in range(3))
    mask = rng.integers(0, 2, total).astype(float) if masked else np.ones(total)
    mask[0] = 1.0
    expected, slopes, clips = oracle.value_loss(*(x.tolist() for x in (values, old, returns, mask)), clip)
    outputs = Outputs(lengths, values=values, mask=mask if masked else None)
    loss = partial(value_loss, value_clip=clip, role="cost_critic")
    found = run_loss(loss, outputs, {"old_values": old, "returns": returns}, cut=int(rng.integers(0, len(lengths) + 1)))
    assert found.loss == pytest.approx(expected, rel=1e-12)
    assert found.gradients["values"] == pytest.approx(slopes, abs=1e-14)
    assert found.metrics["cost_critic/vf_loss"] == pytest.approx(expected)
    if clip is not None:
        assert found.metrics["cost_critic/vf_clipfrac"] == pytest.approx(clips)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_explained_variance_equals_the_oracle(pairs):
    returns, values = [g for g, _ in pairs], [v for _, v in pairs]
    parts = [[np.array(x[:1]), np.array(x[1:])] for x in (returns, values)]
    assert explained_variance(*parts) == pytest.approx(oracle.explained_variance(returns, values), rel=1e-9, abs=1e-9)


def test_what_an_explained_variance_says():
    returns = [np.array([1.0, 2.0]), np.array([5.0])]
    assert explained_variance(returns, returns) == pytest.approx(1)
    assert explained_variance(returns, [np.full(2, 3.0), np.full(1, 3.0)]) == pytest.approx(0, abs=1e-5)
    assert explained_variance([np.array([1.0])], [np.array([2.0])]) == 0
    assert explained_variance([], []) == 0


def test_means_of_the_batch():
    assert token_mean([np.array([1.0]), np.array([2.0, 6.0])]) == 3, "over tokens"
    assert response_mean([np.array([1.0]), np.array([2.0, 6.0])]) == 4.5, "of sums, over responses"
    assert token_mean([]) == response_mean([]) == 0


def test_returns_are_made_before_whitening():
    graph = graph_of(ppo, PPOOptions())
    made = {node.call: [column.name for column in node.inputs.values()] for node in graph.nodes}
    assert made["critic_returns"] == ["critic_advantages", "critic_values"]
    assert made["advantages"] == ["critic_advantages"]
    assert graph.nodes[-1].inputs["advantages"].name == "advantages"
    critic = next(node for node in graph.nodes if node.call == "critic.train")
    assert {name: column.name for name, column in critic.inputs.items()} == {
        "old_values": "critic_values",
        "returns": "critic_returns",
    }


# The flow


def test_calls_of_ppo():
    roles = [call for call in calls() if "." in call]
    head = ["actor.generate", "reward.score"]
    assert roles == [*head, "ref.logprobs", "actor.logprobs", "critic.values", "critic.train", "actor.train"]
    assert [call for call in calls(kl_coef=0) if "." in call] == [*head, "critic.values", "critic.train", "actor.train"]
    reused = [call for call in calls(kl_coef=0, epochs=4, mini_batches=2) if "." in call]
    assert reused == [*head, "actor.logprobs", "critic.values", "critic.train", "actor.train"]
    for epochs in (1, 2):
        engine = graph_of(ppo, PPOOptions(old_logprobs="engine", epochs=epochs))
        assert "actor.logprobs" not in {node.call for node in engine.nodes}, "those of the sampling stand in"
        train = next(node for node in engine.nodes if node.call == "actor.train")
        assert train.inputs["old_logprobs"].name == "sampling_logprobs", "also of a batch that is used once"
    metrics = {"vf_explained_var", "values/mean", "returns/mean", "rewards/mean", "advantages/mean"}
    assert {f"critic/{name}" for name in metrics} <= set(calls())
    assert "advantages" not in calls(whiten_advantages=False)
    assert "whitened_rewards" in calls(whiten_rewards=True)


def test_the_critic_warms_up_alone():
    graph = graph_of(ppo, PPOOptions(critic_warmup_steps=7, epochs=3, mini_batches=2))
    critic, actor = (next(n for n in graph.nodes if n.call == f"{role}.train") for role in ("critic", "actor"))
    assert (critic.training.after, actor.training.after) == (0, 7)
    for node in (critic, actor):
        assert (node.training.epochs, node.training.mini_batches) == (3, 2)
    assert set(actor.inputs) == {"advantages", "old_logprobs", "ref_logprobs"}
    assert (graph.optimizer_steps("critic", 10), graph.optimizer_steps("actor", 10)) == (60, 18)


def test_the_dual_clip_is_an_option():
    outputs = Outputs([1, 1], logprobs=np.array([np.log(8.0), np.log(8.0)]))
    columns = {"advantages": np.array([-1.0, 1.0]), "old_logprobs": np.zeros(2)}
    found = run_loss(loss_of(ppo, PPOOptions(dual_clip=3.0, epochs=2)), outputs, columns)
    assert found.loss == pytest.approx((3 - 1.2) / 2)
    assert found.gradients["logprobs"] == [0, 0]
    assert run_loss(loss_of(ppo, PPOOptions(epochs=2)), outputs, columns).loss == pytest.approx((8 - 1.2) / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_in": "loss"}, r"set `options\.kl_estimator` to k2"),
        ({"whiten_rewards": True, "reward_norm": "std"}, r"set `options\.whiten_rewards` to false or"),
        ({"lam": 1.5}, "less than or equal to 1"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"missing_eos_penalty": 1.0, "bootstrap_truncated": True}, r"set `options\.missing_eos_penalty` to 0 or"),
        (
            {"credit": "turn", "reward_norm": "std"},
            r"reward_norm is about the one score of a response; set",
        ),
        ({"credit": "turn", "reward_clip": 1.0}, r"set `options\.credit` to response or remove `options\.reward_clip`"),
        ({"credit": "turn", "bootstrap_truncated": True}, r"response or remove `options\.bootstrap_truncated`"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        PPOOptions(**options)


def test_kl_without_a_reference_names_the_role():
    with pytest.raises(FlowError, match="needs the role `ref`"):
        trace(ppo, roles=["actor", "critic", "reward"], options=PPOOptions())
    with pytest.raises(FlowError, match="uses the role `critic`, which nothing fills"):
        trace(ppo, roles=["actor", "ref", "reward"], options=PPOOptions())
