"""What a recipe asks of its engine beyond what that can do is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from plait.cost.engine_memory import POOL_TOKENS
from plait.dataflow import trace
from plait.errors import ConfigError
from plait.generation.settings import SamplingSettings
from plait.recipes.engine_checks import (
    ABILITIES,
    check_engine,
    check_engine_calls,
    check_engine_plan,
    of_engines,
    said_of_no_drafts,
    speculates,
)
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prepare import SET_UP
from plait.workers.worker_group import OPENS


def recipe_of(**keys: Any):
    return load_recipe(None, list({"model": "a", "data.source": "b", "sampling.engine": "vllm", **keys}.items()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sampling.exact", True),
        ("sampling.speculation", "adaptive"),
        ("sampling.speculation", 4),
        ("sampling.decode_groups", 2),
        ("sampling.top_p", 0.95),
        ("sampling.top_k", 40),
        ("sampling.min_p", 0.05),
        ("sampling.router_replay", True),
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


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "vLLM takes no drafts"),
        ({"sampling.engine": "plait", "dtype": "float64"}, "in float64 kernels may round by the number of rows"),
        ({"sampling.engine": "plait", "device": "cuda"}, "kernels of a GPU may round by the number of rows"),
        (
            {"sampling.engine": "plait", "max_staleness": 1, "partial_rollout": "keep", "sampling.exact": True},
            "drafts would change where samples stand when new weights come (`partial_rollout` keep)",
        ),
    ],
)
def test_auto_drafts_nothing_where_a_bit_might_change_and_says_why(keys: dict[str, Any], why: str) -> None:
    """What is asked for by name is done, or refused."""
    recipe = recipe_of(**keys)
    check_engine(recipe)
    assert not speculates(recipe)
    assert of_engines(recipe) == recipe.sampling.model_copy(update={"speculation": "off"})
    said = said_of_no_drafts(recipe)
    assert said is not None
    assert said.startswith(f"none by `sampling.speculation` auto, as {why}")
    assert said.endswith("; `adaptive` drafts all the same") == ("sampling.engine" in keys)
    for how in ("adaptive", 3):
        asked = recipe_of(**{**keys, "sampling.speculation": how})
        assert speculates(asked)
        assert of_engines(asked) == asked.sampling
        assert said_of_no_drafts(asked) is None
    if "sampling.engine" in keys:
        with pytest.raises(
            ConfigError, match=r"`sampling.draft_model` is d, but `sampling.speculation` is auto, which"
        ):
            check_engine(recipe_of(**{**keys, "sampling.draft_model": "d"}))


@pytest.mark.parametrize("keys", [{"dtype": "float32"}, {}, {"dtype": "float64", "sampling.exact": True}])
def test_auto_drafts_where_a_row_has_the_same_bits_in_any_company(keys: dict[str, Any]) -> None:
    """As far as the recipe says; of a model that is not compiled its engine does."""
    recipe = recipe_of(**{"sampling.engine": "plait", **keys})
    assert speculates(recipe)
    assert of_engines(recipe) == recipe.sampling
    assert said_of_no_drafts(recipe) is None
    by_layers = said_of_no_drafts(recipe, "its layers have further weights")
    assert (by_layers is None) == ("sampling.exact" in keys)


def test_a_draft_model_is_refused_where_nobody_takes_drafts() -> None:
    with pytest.raises(
        ConfigError, match=r"^`sampling.draft_model` is d, but `sampling.engine` is vllm, which takes no"
    ):
        check_engine(recipe_of(**{"sampling.draft_model": "d"}))


def test_samples_of_weights_that_the_step_has_trained_are_refused() -> None:
    """That program gets new weights between steps. What the reference draws then, and what is drawn before, may be."""

    def loss(batch): ...

    def again(prompts, actor, ref):
        samples = actor.generate(prompts)
        actor.train(samples, loss=loss)
        ref.generate(prompts)
        actor.generate(prompts)

    flow = trace(again, roles=("actor", "ref"))
    before = replace(flow, nodes=flow.nodes[:-1])
    check_engine_calls(before, recipe_of())
    check_engine_calls(flow, recipe_of(**{"sampling.engine": "plait"}))
    with pytest.raises(ConfigError, match=r"^actor\.generate#2 of the flow `.*again` comes after actor\.train, but"):
        check_engine_calls(flow, recipe_of())


def test_plans_of_several_devices_are_refused() -> None:
    for num_ranks in (1, 2):
        plan = ("mine", num_ranks)
        if num_ranks == 1:
            check_engine_plan(recipe_of(), *plan)
            continue
        with pytest.raises(ConfigError, match=r"^the plan `mine` .* is of 2 devices, but `sampling.engine` is vllm"):
            check_engine_plan(recipe_of(), *plan)
        check_engine_plan(recipe_of(**{"sampling.engine": "plait"}), *plan)


def test_what_is_known_of_an_engine_is_known_of_all() -> None:
    """Tables by `sampling.engine`: what opens each, and of other programs what they hold and whether they are there."""
    (names,) = (get_args(field.annotation) for name, field in SamplingSettings.model_fields.items() if name == "engine")
    programs = {name for name, can in ABILITIES.items() if can.program is not None}
    assert set(ABILITIES) == set(OPENS) == set(names)
    assert programs == set(POOL_TOKENS) == set(SET_UP)


def test_auto_drafts_where_the_recipe_says_how_far_samples_are_when_new_weights_come() -> None:
    keys = {"max_staleness": 1, "partial_rollout": "keep", "sampling.exact": True}
    assert speculates(recipe_of(**{"sampling.engine": "plait", **keys, "tokens_per_version": 8}))
