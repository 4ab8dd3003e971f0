"""What GPUs do not do is refused, be there one or not; and a number of ranks that machines cannot share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.recipes.device_checks import check_divided, check_served
from tests.recipes.test_checks import recipe_of
from tests.runs.plan_files import write_plan


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device": "cuda", "sampling.exact": True}, r"`sampling.exact` promises .* `device` is cuda"),
        ({"device": "cuda", "dtype": "float64"}, r"`device` is cuda, .* but the dtype is float64"),
    ],
)
def test_what_is_for_a_cpu_alone_is_refused_on_a_gpu(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_served(recipe_of(**keys))
    check_served(recipe_of(**{**keys, "device": "cpu"}))


def test_ranks_that_nodes_cannot_have_equally_many_of_are_refused_before_these_are_waited_for(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"3 ranks cannot be divided among the 2 nodes .* a multiple of 2")
    with refused:
        check_divided(recipe_of(devices=3), 2, 2)
    with refused:
        check_divided(recipe_of(plan=str(write_plan(tmp_path, "three", {"actor.train": "0,1,2 dp3"}))), 2, 2)
    with pytest.raises(ConfigError, match=r"4 ranks .* the 8 commands \(on 2 nodes\) .* a multiple of 8"):
        check_divided(recipe_of(devices=4), 2, 8)  # a command starts its own ranks
    check_divided(recipe_of(devices=4), 2, 2)
    check_divided(recipe_of(), 2, 8)  # each brings what it has
