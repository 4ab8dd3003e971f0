"""What the flows that train a policy ask of roles alike."""

from __future__ import annotations

import pytest

from plait.algorithms.reinforce_pp import ReinforcePPOptions, reinforce_pp
from plait.algorithms.remax import ReMaxOptions, remax
from plait.algorithms.rloo import RLOOOptions, rloo
from plait.dataflow import trace
from plait.errors import FlowError

FLOWS = {rloo: RLOOOptions, reinforce_pp: ReinforcePPOptions, remax: ReMaxOptions}


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_kl_without_a_reference_names_the_role(flow):
    with pytest.raises(FlowError, match="needs the role `ref`"):
        trace(flow, roles=["actor", "reward"], options=FLOWS[flow](kl_coef=0.1))
