"""Unequal stages that a search finds by itself, and what a run on two processes makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.cost.cluster import ClusterSpec
from plait.cost.hardware import Device, Link, Software
from plait.cost.lengths import Lengths, SampleLengths
from plait.planner.plan_search import Budget
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prediction.choosing import choose
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline
from plait.schedule.plan import Plan
from tests.models.tiny import save_tiny
from tests.runs.plans import assert_equal_runs

FAR = ClusterSpec(
    1,
    2,
    Device("slow", 1e8, 16 << 30, 1e9, 0.0, 1e8),
    Link(5e5, 1e-6),
    Link(5e5, 1e-6),
    Link(1e9, 1e-6),
    software=Software(products=1.0, memory=1.0, links=1.0, layer_s=0.0, hop_s=0.0),
)
"""Two devices between which gradients of a whole model take longer than what passes between two stages."""


@pytest.mark.slow
def test_a_run_follows_the_unequal_stages_that_a_search_finds(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A head that is as much work as two of the four layers: three layers, then one with the head, where the second of
    two equal halves would take longer. Weights and samples are those of one process."""
    sizes = {"num_hidden_layers": 4, "intermediate_size": 16, "layer_types": None}
    model = save_tiny(tmp_path / "model", dtype=torch.float64, **sizes)
    keys = {"optimizer.epsilon": 1e-5}  # or Adam makes steps of the rounding of gradients that are almost zero
    recipe = make_recipe(model=str(model), dtype="float64", prompts_per_step=4, steps=2, **keys)
    known = outline(recipe)
    shape = known.shapes[recipe.model]
    assert 2 < shape.head_in_layers(shape.vocabulary) < 3
    lengths = SampleLengths(Lengths.fixed(12), Lengths.fixed(6))
    planning = Planning(known.recipe, known.flow, known.models, known.shapes, FAR, lengths)
    best = choose(planning, Budget(600), 0).best.plan
    [train] = best.placements_of("actor.train", "train")
    assert (train.pp, train.stages) == (2, (3, 1))
    replace(best, predicted=None).save(tmp_path / "found.json")
    run(alone := recipe.model_copy(update={"run_dir": tmp_path / "alone"}))
    run(cut := recipe.model_copy(update={"run_dir": tmp_path / "cut", "plan": str(tmp_path / "found.json")}))
    [followed] = Plan.load(cut.run_dir / "plan.json").placements_of("actor.train", "train")
    assert (len(followed.ranks), followed.pp, followed.stages) == (2, 2, (3, 1))
    assert_equal_runs(cut.run_dir, alone.run_dir)
