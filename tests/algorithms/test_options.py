"""Options that say nothing, or the contrary of each other, are refused."""

from __future__ import annotations

from functools import partial

import pytest
from pydantic import ValidationError

from plait.algorithms.reinforce_pp import ReinforcePPOptions
from plait.algorithms.rloo import RLOOOptions


@pytest.mark.parametrize("options", [RLOOOptions, ReinforcePPOptions])
def test_a_kl_without_a_gradient_is_refused(options):
    options = partial(options, kl_coef=0.1)
    with pytest.raises(ValidationError, match=r"set `options\.kl_estimator` to k2"):
        options(kl_in="loss", kl_estimator="k1")
    assert options(kl_in="loss", kl_estimator="k2").kl_in == "loss"
    assert options(kl_in="loss", kl_estimator="k1", weigh_kl_by_ratio=True).weigh_kl_by_ratio
    with pytest.raises(ValidationError, match=r"but kl_in is reward; set `options\.kl_in` to loss"):
        options(kl_in="reward", weigh_kl_by_ratio=True)
    with pytest.raises(ValidationError, match="k2 has it unweighed"):
        options(kl_in="loss", kl_estimator="k2", weigh_kl_by_ratio=True)
