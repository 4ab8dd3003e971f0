"""Calls that a recipe does not let tensor parallelism cut: refused in a plan before anything is loaded, in one form by
runs and predictions, and not looked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from plait.cost import placement
from plait.cost.cluster_file import read_cluster
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_parameters import needs_all_tokens
from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.runtime.prediction.planning import Planning
from plait.runtime.prediction.search_facts import facts_of_roles, joint_pairs
from plait.runtime.prepare import outline
from plait.schedule.plan import Plan
from tests.models.tiny import save_tiny, tiny_config
from tests.runs.plan_files import write_plan

MakeRecipe = Callable[..., Recipe]
LENGTHS = SampleLengths(Lengths.fixed(8), Lengths.fixed(6))
REFUSED = (
    r"actor\.train has tp 2, but `sequence_parallel` is true and Gemma4ForCausalLM has `model\.layers\.\*\.experts` in "
    r"its layers themselves, .* set `sequence_parallel` to false, or tp to 1"
)


BESIDE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
"""Of Gemma 4, whose experts stand in the layer itself, beside router and MLP."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "mixture.json"
    path.write_text(json.dumps(tiny_config("gemma4_text", **BESIDE).to_dict()))
    return str(path)


def planning_of(recipe: Recipe) -> Planning:
    run = outline(recipe)
    return Planning(run.recipe, run.flow, run.models, run.shapes, read_cluster("2xA100-80G"), LENGTHS)


@pytest.mark.parametrize(("train", "is_refused"), [("0,1 tp2", True), ("0,1 pp2", False), ("0,1 dp2", False)])
def test_training_that_parts_tokens_of_a_mixture_by_tp_is_refused(
    make_recipe: MakeRecipe, mixture: str, tmp_path: Path, train: str, is_refused: bool
) -> None:
    """What scores and generates does not part tokens."""
    plan = str(write_plan(tmp_path, "it", {"actor.train": train, "actor.generate": "0,1 tp2", "ref.logprobs": "0"}))
    recipe = make_recipe(model=mixture, plan=plan, sequence_parallel=True)
    run = outline(recipe)
    ways = (
        lambda: placement.resolve_plan(run.recipe, run.flow, run.models, run.shapes),
        lambda: planning_of(recipe).given(plan),
    )
    for way in ways:
        if is_refused:
            with pytest.raises(ConfigError, match=REFUSED):
                way()
        else:
            assert way().num_ranks == 2


@pytest.mark.parametrize(("parts", "most"), [(True, 1), (False, 2)])
def test_no_search_cuts_what_a_run_refuses(make_recipe: MakeRecipe, mixture: str, parts: bool, most: int) -> None:
    planning = planning_of(make_recipe(model=mixture, sequence_parallel=parts))
    facts = facts_of_roles(planning.recipe, planning.models, planning.shapes, planning.parameters)
    assert {role: one.trains_whole for role, one in facts.items()} == {"actor": parts, "ref": False}
    slots = {(slot.role, slot.mode): i for i, slot in enumerate(planning.graph.slots)}
    forms, ranks = planning.space.forms, (0, 1)
    assert max(sizes.tp for sizes in forms.parallelisms(slots["actor", "train"], ranks)) == most
    assert max(sizes.tp for sizes in forms.parallelisms(slots["actor", "decode"], ranks)) == 2


def test_stages_are_looked_for_where_gradients_are_divided(make_recipe: MakeRecipe) -> None:
    """So is an order in which roles train together, with one copy of those whose gradients are divided: several may
    wait for each other."""
    planning = planning_of(make_recipe(algorithm="ppo", options={}, **{"critic.optimizer.shard_gradients": True}))
    slots = {(slot.role, slot.mode): i for i, slot in enumerate(planning.graph.slots)}
    for role in ("actor", "critic"):
        found = planning.space.forms.parallelisms(slots[role, "train"], (0, 1))
        assert max(sizes.pp for sizes in found) == 2
    assert joint_pairs(planning.recipe, planning.flow, planning.models) == (("actor", "critic"),)
    adapted = planning_of(make_recipe(algorithm="ppo", options={}, **{"lora.rank": 2}))
    assert joint_pairs(adapted.recipe, adapted.flow, adapted.models) == (("actor", "critic"),)
    facts = facts_of_roles(planning.recipe, planning.models, planning.shapes, planning.parameters)
    assert {role for role, one in facts.items() if one.one_copy} == {"critic"}


def test_layers_that_keep_a_state_are_cut_as_a_run_cuts_them(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Between their two key heads, and in stages."""
    model = str(save_tiny(tmp_path / "states", family="qwen3_5_text"))
    planning = planning_of(make_recipe(model=model))
    facts = facts_of_roles(planning.recipe, planning.models, planning.shapes, planning.parameters)
    assert {one.max_tp for one in facts.values()} == {2}
    slots = {(slot.role, slot.mode): i for i, slot in enumerate(planning.graph.slots)}
    for slot in slots.values():
        sizes = {(size.dp, size.tp, size.pp) for size in planning.space.forms.parallelisms(slot, (0, 1))}
        assert sizes == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}


@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1", "granitemoehybrid"])
def test_layers_with_mamba_2_are_planned_by_their_configuration_alone(
    make_recipe: MakeRecipe, tmp_path: Path, family: str
) -> None:
    """By all of their parameters, of which groups (here two, or three) are cut; mixers of one group are whole."""
    config = tiny_config(family).to_dict() | {"time_step_limit": [0.0, math.inf]}
    (tmp_path / "shape.json").write_text(json.dumps(config))
    planning = planning_of(make_recipe(model=str(tmp_path / "shape.json")))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(tiny_config(family))
    parameters = planning.parameters["actor"]
    assert {param.name for param in parameters.params} == {name for name, _ in module.named_parameters()}
    facts = facts_of_roles(planning.recipe, planning.models, planning.shapes, planning.parameters)
    assert {one.max_tp for one in facts.values()} == {3 if family == "falcon_h1" else 2}
    found = planning.space.forms.parallelisms(0, (0, 1))
    assert {(size.dp, size.tp, size.pp) for size in found} == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("llama", ""),
        ("qwen3_5_text", ""),
        ("lfm2", ""),
        ("bamba", ""),
        ("falcon_h1", ""),
        ("nemotron_h", ""),
        ("olmo_hybrid", ""),
        ("gemma2", ""),
        ("mixtral", ""),
        ("deepseek_v2", ""),
        ("gemma4_text", "Gemma4ForCausalLM has `model.layers.*.experts`"),
    ],
)
def test_families_are_known_before_they_are_read(tmp_path: Path, family: str, why: str) -> None:
    """By the file `config.json` alone, too; one that says no family is not known."""
    path = tmp_path / "config.json"
    config = tiny_config(family, **(BESIDE if family == "gemma4_text" else {})).to_dict()
    path.write_text(json.dumps(config))
    assert needs_all_tokens(RoleModel("actor", str(path), False, True, "model")).startswith(why)
    assert bool(needs_all_tokens(RoleModel("actor", str(path), False, True, "model"))) == bool(why)
    scalar = RoleModel("critic", str(path), True, True, "critic.model")
    assert bool(needs_all_tokens(scalar)) == bool(why)
    path.write_text(json.dumps({**config, "model_type": "unheard_of"}))
    assert needs_all_tokens(RoleModel("actor", str(path), False, True, "model")) == ""


def test_a_named_plan_that_is_cut_for_room_is_checked_as_it_is_then(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = outline(make_recipe(plan="colocated", devices=4, sampling={"exact": True, "max_response_tokens": 6}))
    assert {p.tp for p in placement.resolve_plan(run.recipe, run.flow, run.models, run.shapes).placements} == {1}
    monkeypatch.setattr(placement, "with_room", lambda flow, planned, placed, device_bytes: cut_in_two(placed.plan))
    with pytest.raises(ConfigError, match=r"`sampling\.exact` needs unsharded layers, .* of the actor have tp 2"):
        placement.resolve_plan(run.recipe, run.flow, run.models, run.shapes)


def cut_in_two(plan: Plan) -> Plan:
    return replace(plan, placements=tuple(replace(p, dp=p.dp // 2, tp=2) for p in plan.placements))
