"""A run that Ray places computes what it computes on one machine with as many ranks, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.launch.nodes.ray_nodes import addressed
from tests.processes import gone
from tests.runs.nodes import begin, ends, process_of
from tests.runs.placed_runs import PLANS, where
from tests.runs.plans import assert_equal_runs

pytestmark = pytest.mark.slow
LIMIT_S = 120
SEVERAL = [
    ("grpo-split-2", 2),
    ("grpo-tp2", 2),
    ("grpo-dp2tp2", 2),
    ("grpo-generates-dp2tp2", 2),
    ("ppo-split-2", 2),
    ("ppo-mixed-2", 2),
    ("ppo-standalone-4", 2),
    ("ppo-mixed-4", 2),
    ("grpo-colocated-3", 3),
    ("ppo-scored-while-generating-3", 3),
]
"""(plan, nodes)."""
THREE = {"grpo-colocated-3": (PLANS["grpo-colocated-2"][0], "colocated 3")}


@pytest.mark.parametrize(("name", "nodes"), SEVERAL)
def test_ray_computes_what_one_machine_does(name: str, nodes: int, place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = (PLANS | THREE)[name]
    at = where(place, f"ray-{name}", plan)
    here = placed(flow, f"{name}-near", **keys, **at, steps=3)
    assert run(here).finished
    there = placed(flow, f"{name}-ray", **keys, **at, steps=3, launcher="ray")
    with addressed():
        (found,) = ends([begin(there, 0, ["--nodes", str(nodes)])])
    assert found.code == 0, found.text
    assert "connected to the Ray cluster that runs" in found.text
    assert re.search(rf"node 1 \(\S+\) has joined \(\d of {nodes}\)", found.text)
    assert_equal_runs(there.run_dir, here.run_dir, tolerance=0.0)
    assert json.loads((there.run_dir / "plan.json").read_text())["nodes"] == nodes
    assert not (there.run_dir / "nodes.key").exists(), "nobody needs it"


def test_a_killed_worker_is_named_and_the_run_goes_on(place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = PLANS["grpo-split-2"]
    keys = {**keys, **where(place, "ray-lost", plan), "checkpoint.every": 1}
    whole = placed(flow, "ray-lost-not", **keys)
    assert run(whole).finished
    recipe = placed(flow, "ray-lost", **keys, launcher="ray")
    with addressed():
        command = begin(recipe, 0, ["--nodes", "2"])
        worker = _saved_and_at(recipe, 1)
        os.kill(worker, signal.SIGKILL)
        started = time.monotonic()
        (found,) = ends([command])
        assert time.monotonic() - started < 30
        assert found.code == 1, found.text
        assert re.search(r"rank 1 on node 1 \(\S+\) was killed by SIGKILL", found.text)
        assert re.search(r"the checkpoint of step \d is good \(.*\); go on from it with --resume", found.text)
        assert gone(worker)
        (found,) = ends([begin(recipe, 0, ["--nodes", "1", "--resume"])])
    assert found.code == 0, found.text
    assert_equal_runs(recipe.run_dir, whole.run_dir, tolerance=0.0)


def test_nothing_is_restarted_but_by_the_option_and_then_on_the_nodes_that_are_left(
    place: Path, placed: Callable[..., Recipe]
) -> None:
    """The actor of a node is killed: Ray does not begin it again, the run goes on on the other node."""
    (flow, keys), plan = PLANS["grpo-colocated-2"]
    keys = {**keys, **where(place, "ray-left", plan), "checkpoint.every": 1}
    whole = placed(flow, "ray-left-not", **keys)
    assert run(whole).finished
    recipe = placed(flow, "ray-left", **keys, restarts=1, launcher="ray")
    with addressed():
        command = begin(recipe, 0, ["--nodes", "2"])
        worker = _saved_and_at(recipe, 1)
        os.kill(int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        (found,) = ends([command])
    assert found.code == 0, found.text
    assert re.search(r"error: rank 1 on node 1 \(\S+\) is lost with its node: .*; Ray says: ActorDiedError", found.text)
    assert re.search(r"restart 1 of 1: .* on 1 rank of 1 node, plan colocated", found.text)
    assert_equal_runs(recipe.run_dir, whole.run_dir)
    assert gone(worker)


def test_a_run_must_say_how_many_ranks_it_has(place: Path, placed: Callable[..., Recipe]) -> None:
    recipe = placed("grpo", "ray-unsaid", plan="colocated", devices=0, launcher="ray")
    (found,) = ends([begin(recipe, 0, [])])
    assert found.code == 2
    assert "say with `devices` how many ranks the run has" in found.text


def _saved_and_at(recipe: Recipe, rank: int) -> int:
    """The process of a rank, once a step is saved."""
    end = time.monotonic() + LIMIT_S
    while not (recipe.run_dir / "checkpoints" / "step-1").exists():
        assert time.monotonic() < end, "no step was saved"
        time.sleep(0.05)
    return process_of(recipe.run_dir, rank)
