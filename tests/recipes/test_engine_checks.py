"""What a recipe asks of its engine beyond what that can do is refused by name."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from plait.cost.engine_memory import POOL_TOKENS
from plait.errors import ConfigError
from plait.generation.settings import SamplingSettings
from plait.recipes.engine_checks import ABILITIES, check_engine, check_engine_plan
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prepare import SET_UP
from plait.schedule.plan import Placement, Plan
from plait.workers.worker_group import OPENS


def recipe_of(**keys: Any):
    return load_recipe(None, list({"model": "a", "data.source": "b", "sampling.engine": "vllm", **keys}.items()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sampling.exact", True),
        ("sampling.speculation", "auto"),
        ("sampling.speculation", 4),
        ("sampling.decode_groups", 2),
        ("sampling.prefix_cache_tokens", 64),
        ("max_staleness", 1),
        ("rebalance", "auto"),
        ("dtype", "float64"),
    ],
)
def test_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^`{key}` is {value}, but `sampling.engine` is vllm, which "):
        check_engine(recipe_of(**{key: value}))
    check_engine(recipe_of(**{key: value, "sampling.engine": "plait"}))


def test_what_it_can_do_passes() -> None:
    check_engine(recipe_of(**{"sampling.kv_tokens": 4096, "sampling.stop": "7", "dtype": "float32"}))


def test_plans_of_several_devices_are_refused() -> None:
    for ranks in ((0,), (0, 1)):
        plan = Plan("mine", len(ranks), (Placement("actor.generate", "decode", ranks, dp=len(ranks)),))
        if len(ranks) == 1:
            check_engine_plan(recipe_of(), plan)
            continue
        with pytest.raises(ConfigError, match=r"^the plan `mine` .* is of 2 devices, but `sampling.engine` is vllm"):
            check_engine_plan(recipe_of(), plan)
        check_engine_plan(recipe_of(**{"sampling.engine": "plait"}), plan)


def test_what_is_known_of_an_engine_is_known_of_all() -> None:
    """Tables by `sampling.engine`: what opens each, and of other programs what they hold and whether they are there."""
    (names,) = (get_args(field.annotation) for name, field in SamplingSettings.model_fields.items() if name == "engine")
    programs = {name for name, can in ABILITIES.items() if can.program is not None}
    assert set(ABILITIES) == set(OPENS) == set(names)
    assert programs == set(POOL_TOKENS) == set(SET_UP)
