"""What the flows that train a policy ask of roles alike."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.losses import policy_loss
from plait.algorithms.ppo import PPOOptions, ppo
from plait.algorithms.reinforce_pp import ReinforcePPOptions, reinforce_pp
from plait.algorithms.remax import ReMaxOptions, remax
from plait.algorithms.rloo import RLOOOptions, rloo
from plait.algorithms.safe_rlhf import SafeRLHFOptions, safe_rlhf
from plait.dataflow import CallKind, trace
from plait.errors import FlowError
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import calls_of, graph_of, loss_of

FLOWS = {rloo: RLOOOptions, reinforce_pp: ReinforcePPOptions, remax: ReMaxOptions}
POLICIES = {**FLOWS, grpo: GRPOOptions, ppo: PPOOptions}


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_kl_without_a_reference_names_the_role(flow):
    with pytest.raises(FlowError, match="needs the role `ref`"):
        trace(flow, roles=["actor", "reward"], options=FLOWS[flow](kl_coef=0.1))


@pytest.mark.parametrize("flow", POLICIES, ids=lambda flow: flow.__name__)
def test_the_cross_entropy_of_examples_is_added_to_each_step(flow):
    """PPO-ptx (InstructGPT, eq. 2): gamma times the mean of -log pi over the tokens that are to be learnt."""
    options = POLICIES[flow](ptx_coef=0.25, mini_batches=2, epochs=3)
    graph = graph_of(flow, options)
    ((first, second),) = graph.updates("actor")
    assert (first.training.with_next, second.training.with_next) == (True, False)
    assert graph.nodes[second.rows].call == "examples"
    assert second.mask.name == "trained"
    assert graph.optimizer_steps("actor") == 6
    found = run_loss(second.fn, Outputs([2, 1], logprobs=np.array([-1.0, -3.0, -2.0])))
    assert (found.loss, found.metrics) == (pytest.approx(0.25 * 2), {"actor/ptx_loss": pytest.approx(2)})
    assert "examples" not in calls_of(flow, POLICIES[flow]()), "without it none are read"


def test_the_flow_of_another_that_has_no_examples_is_refused():
    def mine(prompts, actor, reward, options):
        grpo(prompts, actor, reward, options)

    assert trace(mine, roles=["actor", "reward"], options=GRPOOptions()).optimizer_steps("actor") == 1
    with pytest.raises(FlowError, match=r"ptx_coef > 0 needs examples; set options\.ptx_coef to 0, or call the flow"):
        trace(mine, roles=["actor", "reward"], options=GRPOOptions(ptx_coef=0.1))


KL_IN_LOSS = {"kl_in": "loss", "kl_estimator": "k2"}
ADAPTIVE = {"kl_coef": 0.05, "target_kl": 6.0}


@pytest.mark.parametrize("flow", [*POLICIES, safe_rlhf], ids=lambda flow: flow.__name__)
def test_the_adaptive_weight_reaches_the_reward(flow):
    """Carried from step to step, from the KL of the policy that a step begins with."""
    place = {} if flow is remax else {"kl_in": "reward"}
    make = {**POLICIES, safe_rlhf: SafeRLHFOptions}[flow]
    graph = graph_of(flow, make(**ADAPTIVE, **place))
    assert next(node for node in graph.of_kind(CallKind.CARRIED) if node.call == "kl_coef").start == 0.05
    assert "next_kl_coef" in [node.next_value.name for node in graph.of_kind(CallKind.BECOMES)]
    assert calls_of(flow, make(**ADAPTIVE, **place)).count("actor.logprobs") == 1
    (train,) = [node for node in graph.updates("actor")[0] if node.fn.func is policy_loss]
    assert "kl_coef" not in train.inputs
    readers = [node for node in graph.nodes if "kl_coef" in {column.name for column in node.inputs.values()}]
    assert {"next_kl_coef"} < {node.call for node in readers}, "and what takes the KL off"


@pytest.mark.parametrize("flow", [flow for flow in POLICIES if flow is not remax], ids=lambda flow: flow.__name__)
def test_the_adaptive_weight_reaches_the_loss(flow):
    graph = graph_of(flow, POLICIES[flow](**ADAPTIVE, **KL_IN_LOSS))
    assert graph.nodes[-1].inputs["kl_coef"].name == "kl_coef"
    assert "actor.logprobs" in calls_of(flow, POLICIES[flow](**ADAPTIVE, **KL_IN_LOSS)), (
        "it is measured before training"
    )
    rng = np.random.default_rng(0)
    outputs = Outputs([2, 3], logprobs=-2 + rng.normal(size=5))
    columns = {"advantages": rng.normal(size=5), "ref_logprobs": -2 + rng.normal(size=5)}
    fixed = loss_of(flow, POLICIES[flow](kl_coef=0.3, **KL_IN_LOSS))
    adaptive = loss_of(flow, POLICIES[flow](**ADAPTIVE, **KL_IN_LOSS))
    expected = run_loss(fixed, outputs, columns)
    found = run_loss(adaptive, outputs, {**columns, "kl_coef": np.float64(0.3)})
    assert found.loss == pytest.approx(expected.loss)
    assert found.gradients["logprobs"] == pytest.approx(expected.gradients["logprobs"])
    assert run_loss(adaptive, outputs, columns).loss != pytest.approx(expected.loss)


@pytest.mark.parametrize("flow", POLICIES, ids=lambda flow: flow.__name__)
def test_a_target_without_a_weight_is_refused(flow):
    with pytest.raises(ValidationError, match=r"target_kl needs a weight .*; set `options\.kl_coef` above 0 or"):
        POLICIES[flow](kl_coef=0, target_kl=6.0)
    with pytest.raises(ValueError, match="kl_horizon is set, but has no effect without target_kl"):
        POLICIES[flow](kl_coef=0.1, kl_horizon=50).check_read()
