"""What is predicted is what a run follows: plans by name, and what memory of GPUs is spent on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost import placement
from plait.cost.cluster_file import read_cluster
from plait.cost.device_memory import memory_by_device
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Facts
from plait.cost.spent_memory import POOL_MARGIN, WAYS, with_pools
from plait.recipes.recipe import Recipe
from plait.runtime.prediction import spending
from plait.runtime.prediction.planning import Planning
from plait.runtime.prediction.spending import settled
from plait.runtime.prepare import outline
from plait.schedule.named_plans import NAMES

LENGTHS = SampleLengths(Lengths.fixed(8), Lengths.fixed(8))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [1e-5, 1e-3, 1.0])
def test_a_named_plan_is_that_of_a_run(
    name: str, device: str, share: float, make_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all has room, where parameters must be cut or what idles must leave, and where nothing helps."""
    whole = read_cluster("2xA100-80G")
    memory = int(share * whole.device.memory_bytes)
    cluster = replace(whole, device=replace(whole.device, memory_bytes=memory))
    for module in (placement, spending):
        monkeypatch.setattr(module, "device_bytes", lambda recipe, devices: memory)
    monkeypatch.setattr(placement, "check_devices", lambda recipe, plan, nodes: None)
    monkeypatch.setattr(spending, "say", lambda text, file: None)
    run = outline(make_recipe(devices=2, plan=name))
    run = replace(run, recipe=run.recipe.model_copy(update={"device": device}))
    planning = Planning(run.recipe, run.flow, run.models, run.shapes, cluster, LENGTHS)
    resolved = placement.resolve_plan(run.recipe, run.flow, run.models, run.shapes)
    assert planning.given(name) == settled(run, resolved, LENGTHS)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], None], ids=str)
def test_a_step_is_predicted_with_what_its_run_spends_memory_on(
    way: tuple[int, bool] | None, make_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GPUs that have just enough room for one of the ways, and of some that have none for any."""
    name = "colocated"
    whole, lengths = read_cluster("2xA100-80G"), SampleLengths(Lengths.fixed(500), Lengths.fixed(3_000))
    foreseen = outline(make_recipe(devices=2, plan=name, prompts_per_step=64, sampling={"max_response_tokens": 3_000}))
    stated = foreseen.recipe.model_dump(exclude_unset=True)
    run = replace(foreseen, recipe=foreseen.recipe.model_validate(stated | {"device": "cuda"}))
    plan = placement.resolve_plan(foreseen.recipe, run.flow, run.models, run.shapes)
    facts = Facts(run.recipe, run.models, run.shapes, parameters_of(run.models), plan, run.flow, lengths)
    memory = 2**30
    if way is not None:
        held = memory_by_device(replace(facts, plan=with_pools(facts)).spending(stating(run.recipe, way)))
        memory = int(max(device.most_bytes for device in held) / (1 - POOL_MARGIN)) + 1
    for module in (placement, spending):
        monkeypatch.setattr(module, "device_bytes", lambda recipe, devices: memory)
    followed = spending.spending(run, plan, lengths).recipe
    assert (followed.micro_batch_tokens, followed.checkpoint_activations) == (way or WAYS[-1])
    settled_plan = settled(replace(run, recipe=followed), plan, lengths)
    cluster = replace(whole, device=replace(whole.device, memory_bytes=memory))
    of_recipe, of_run = (
        Planning(recipe, run.flow, run.models, run.shapes, cluster, lengths) for recipe in (run.recipe, followed)
    )
    assert of_recipe.given(name) == settled_plan
    assert of_recipe.followed(settled_plan).recipe == followed
    assert of_recipe.predict(settled_plan) == of_run.predict(settled_plan)


def stating(recipe: Recipe, way: tuple[int, bool]) -> Recipe:
    return recipe.model_copy(update={"micro_batch_tokens": way[0], "checkpoint_activations": way[1]})
