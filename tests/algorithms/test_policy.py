"""What the flows that train a policy ask of roles alike."""

from __future__ import annotations

import numpy as np
import pytest

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.ppo import PPOOptions, ppo
from plait.algorithms.reinforce_pp import ReinforcePPOptions, reinforce_pp
from plait.algorithms.remax import ReMaxOptions, remax
from plait.algorithms.rloo import RLOOOptions, rloo
from plait.dataflow import trace
from plait.errors import FlowError
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import calls_of, graph_of

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
