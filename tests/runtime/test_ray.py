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
from tests.launch.ray_nodes import addressed
from tests.launch.test_nodes import gone
from tests.runtime.nodes import begin, ends
from tests.runtime.placed_runs import PLANS, where
from tests.runtime.plans import assert_equal_runs

pytestmark = pytest.mark.slow
LIMIT_S = 120
SEVERAL = ["grpo-split-2", "grpo-tp2", "ppo-split-2", "ppo-standalone-4"]


@pytest.mark.parametrize("name", SEVERAL)
def test_ray_computes_what_one_machine_does(name: str, place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = PLANS[name]
    at = where(place, f"ray-{name}", plan)
    here = placed(flow, f"{name}-near", **keys, **at, steps=3)
    assert run(here).finished
    there = placed(flow, f"{name}-ray", **keys, **at, steps=3, launcher="ray")
    with addressed():
        (found,) = ends([begin(there, 0, ["--nodes", "2"])])
    assert found.code == 0, found.text
    assert "connected to the Ray cluster that runs" in found.text
    assert re.search(r"node 1 \(\S+\) has joined \([12] of 2\)", found.text)
    assert_equal_runs(there.run_dir, here.run_dir, tolerance=0.0)
    assert json.loads((there.run_dir / "plan.json").read_text())["nodes"] == 2
    assert not (there.run_dir / "nodes.key").exists(), "nobody needs it"


def test_a_killed_worker_is_named_and_the_run_goes_on(place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = PLANS["grpo-split-2"]
    keys = {**keys, **where(place, "ray-lost", plan), "checkpoint.every": 1}
    whole = placed(flow, "ray-lost-not", **keys)
    assert run(whole).finished
    recipe = placed(flow, "ray-lost", **keys, launcher="ray")
    with addressed():
        command = begin(recipe, 0, ["--nodes", "2"])
        worker = _rank_of(recipe, 1)
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


def test_a_run_must_say_how_many_ranks_it_has(place: Path, placed: Callable[..., Recipe]) -> None:
    recipe = placed("grpo", "ray-unsaid", plan="colocated", devices=0, launcher="ray")
    (found,) = ends([begin(recipe, 0, [])])
    assert found.code == 2
    assert "say with `devices` how many ranks the run has" in found.text


def _rank_of(recipe: Recipe, rank: int) -> int:
    """The process that writes a rank's log, once a step is saved."""
    log = str((recipe.run_dir / "workers" / f"rank{rank}.log").resolve())
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if (recipe.run_dir / "checkpoints" / "step-1").exists():
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    if os.readlink(folder / "fd" / "1") == log:
                        return int(folder.name)
                except OSError:
                    continue
        time.sleep(0.05)
    raise AssertionError(f"no process writes {log}")
