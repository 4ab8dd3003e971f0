"""`restarts`: after a loss a run goes on by itself to the undisturbed result; what comes again ends it. Over several
nodes: `test_nodes.py`; what is counted, by hand: `runtime/processes/test_restarting.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.processes.launching import LOADS
from tests.runs.faulty_runs import plait_train, recipe_of
from tests.runs.nodes import left_of
from tests.runs.plans import assert_equal_runs
from tests.runs.test_breaking_off import tree
from tests.runs.test_faults import place as place
from tests.runs.test_faults import undisturbed as undisturbed

KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def planted(recipe: Recipe, rank: int, action: str, code: str, step: int = 1) -> Path:
    plant = Path(recipe.algorithm.rpartition(":")[0]).with_name("fault")
    plant.write_text(f"{rank}\n{action}\n{code}\n{recipe.run_dir}/checkpoints/step-{step}\n")
    return plant


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_told_and_the_run_goes_on_to_the_undisturbed_result(
    rank: int, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    recipe = recipe_of(place, tiny_folder, f"goes-on-{rank}", restarts=2)
    planted(recipe, rank, "actor.train", f"plant.unlink(); {KILL}")
    done = plait_train(recipe)
    assert done.returncode == 0, done.stderr
    error = done.stderr.index(f"error: rank {rank} was killed by SIGKILL in `actor.train`")
    told = done.stderr.index("restart 1 of 2: the run goes on from the checkpoint of step 1, on 2 ranks of 1 node")
    assert error < told < done.stderr.index("step 3/3")
    assert "Traceback" not in done.stderr
    assert left_of(recipe.run_dir) == []
    assert_equal_runs(recipe.run_dir, undisturbed, tolerance=0.0)
    first, second = json.loads((recipe.run_dir / "run.json").read_text())["stays"]
    assert "restart" not in first
    assert first["how"].startswith(f"RanksLost: rank {rank} was killed by SIGKILL")
    assert (second["restart"]["number"], second["restart"]["most"], second["from_step"]) == (1, 2, 1)
    assert second["restart"]["error"].startswith(f"rank {rank} was killed by SIGKILL")
    assert second["how"] == "finished"


@pytest.mark.slow
def test_one_process_goes_on_too(place: Path, tiny_folder: Path) -> None:
    keys = {"plan": "colocated", "devices": 1}
    whole = recipe_of(place, tiny_folder, "alone-not-lost", **keys)
    assert plait_train(whole).returncode == 0
    recipe = recipe_of(place, tiny_folder, "alone-lost", restarts=1, **keys)
    planted(recipe, 0, "actor.train", f"plant.unlink(); {KILL}")
    done = plait_train(recipe)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1: the run goes on from the checkpoint of step 1, on 1 rank of 1 node" in done.stderr
    assert_equal_runs(recipe.run_dir, whole.run_dir, tolerance=0.0)


@pytest.mark.slow
def test_a_run_that_is_lost_before_it_has_replaced_another_does_not_go_on_with_that(
    place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    """The first was to have two steps with another seed. A start that may not be repeated leaves it as it was."""
    old = recipe_of(place, tiny_folder, "replaced", steps=2, seed=7)
    assert plait_train(old).returncode == 0
    before = tree(old.run_dir)
    kept = recipe_of(place, tiny_folder, "replaced", overwrite=True)
    planted(kept, 0, LOADS, f"plant.unlink(); {KILL}", step=2)
    lost = plait_train(kept)
    assert lost.returncode == 1, lost.stderr
    assert "no step is saved; begin the run again" in lost.stderr
    assert tree(old.run_dir) == before
    recipe = recipe_of(place, tiny_folder, "replaced", overwrite=True, restarts=1)
    planted(recipe, 0, LOADS, f"plant.unlink(); {KILL}", step=2)
    done = plait_train(recipe)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1: the run goes on from the beginning: no step is saved" in done.stderr
    assert_equal_runs(recipe.run_dir, undisturbed, tolerance=0.0)


@pytest.mark.slow
def test_a_loss_that_comes_again_ends_the_run(place: Path, tiny_folder: Path) -> None:
    recipe = recipe_of(place, tiny_folder, "comes-again", restarts=5)
    plant = planted(recipe, 1, "actor.train", KILL)
    done = plait_train(recipe)
    plant.unlink()
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("restart 1 of 5") == 1
    assert "restart 2" not in done.stderr
    assert "this was the first error; the run was restarted once, and then: rank 1 was killed by SIGKILL" in done.stderr
    assert "not restarted again: the same came again, with no step saved in between" in done.stderr
    assert left_of(recipe.run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        ("raise ZeroDivisionError('planted')", 1, "rank 1 raised ZeroDivisionError: planted"),
        ("from plait.errors import DataError; raise DataError('planted: look at the key')", 2, "look at the key"),
    ],
    ids=["the user's code", "the input"],
)
def test_an_error_is_not_restarted(code: str, exit_code: int, says: str, place: Path, tiny_folder: Path) -> None:
    recipe = recipe_of(place, tiny_folder, f"an-error-{exit_code}", restarts=5)
    plant = planted(recipe, 1, "actor.train", code)
    done = plait_train(recipe)
    plant.unlink()
    assert done.returncode == exit_code, done.stderr
    assert says in done.stderr
    assert "restart" not in done.stderr
