"""Which calls of a step wait for which others."""

from __future__ import annotations

from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES
from plait.schedule.needs import needs_of


def test_calls_on_disjoint_ranks_wait_for_what_they_need_alone() -> None:
    """PPO: reference and critic score beside the reward; actor and critic train side by side."""
    flow = trace_algorithm(load_flow("ppo"), {"kl_coef": 0.05}, (*MODEL_ROLES, *REWARD_ROLES))
    named = {node.id: node.call for node in flow.nodes}
    needs = {named[node]: {named[one] for one in before} for node, before in needs_of(flow, ["reward"]).items()}
    assert needs["ref.logprobs"] == needs["critic.values"] == {"actor.generate"}
    assert "actor.train" not in needs["critic.train"]
    assert "critic.train" not in needs["actor.train"]
    assert {"critic.values", "reward.score"} <= needs["critic.train"]
    assert "reward.score" in needs["actor.train"], "it leaves samples out"


def test_models_of_one_reward_wait_for_no_other_and_who_reads_it_for_all() -> None:
    """ReMax: of either rollout the sum leaves samples out, not the call of the second model."""
    roles = {"actor": {}, "reward": {"model_2": "reward_2"}}
    flow = trace_algorithm(load_flow("remax"), {}, roles)
    named = {node.id: node.call for node in flow.nodes}
    needs = {named[node]: {named[one] for one in before} for node, before in needs_of(flow, ["reward"]).items()}
    assert needs["reward.score"] == needs["reward_2.score"] == {"actor.generate"}
    assert needs["reward_2.score#2"] == {"actor.generate#2"}
    both = {"reward.score", "reward_2.score"}
    assert needs["reward.score#2"] == {"actor.generate#2", *both}, "one after the other, as it leaves samples out"
    assert {*both, "reward.score#2", "reward_2.score#2"} <= needs["score_over_greedy"]
    assert both <= needs["actor.train"]
