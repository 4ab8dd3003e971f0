"""`restarts`: after a loss a run goes on by itself to the undisturbed result; what comes again ends it. Over several
nodes: `test_nodes.py`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.launch.failures import Ended, Failure
from plait.recipes.recipe import Recipe
from plait.runtime.directory import RunDirectory
from plait.runtime.history import Origin, Restart
from plait.runtime.processes.restarting import RanksLost, Restarts, supervised
from tests.runtime.nodes import left_of
from tests.runtime.plans import assert_equal_runs
from tests.runtime.test_faults import place as place
from tests.runtime.test_faults import plait_train, recipe_of
from tests.runtime.test_faults import undisturbed as undisturbed

KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def lost(what: str, action: str = "actor.train", rank: int = 1, ended: Ended = Ended.DIED) -> RanksLost:
    return RanksLost(what, "the checkpoint of step 1 is good", Failure(ended, rank, action, 1.0, what))


def test_as_often_as_is_said_and_then_the_first_error_comes_first() -> None:
    restarts = Restarts(2)
    restarts.count(lost("first died"), saved=1, places=2)
    restarts.count(lost("second died"), saved=2, places=2)
    assert restarts.done == 2
    with pytest.raises(RanksLost) as caught:
        restarts.count(lost("third died"), saved=3, places=2)
    assert str(caught.value).splitlines() == [
        "first died",
        "this was the first error; the run was restarted 2 times, and then: third died",
        "the checkpoint of step 1 is good",
        "not restarted again: `restarts` is 2",
    ]


def test_without_restarts_the_error_is_as_it_was() -> None:
    error = lost("died")
    with pytest.raises(RanksLost) as caught:
        Restarts(0).count(error, saved=1, places=1)
    assert caught.value is error


def test_what_comes_again_with_no_step_in_between_is_not_restarted() -> None:
    restarts = Restarts(9)
    restarts.count(lost("died"), saved=1, places=2)
    with pytest.raises(RanksLost, match="the same came again, with no step saved in between"):
        restarts.count(lost("died after 3.2 s"), saved=1, places=2)


@pytest.mark.parametrize(
    ("other", "saved", "places"),
    [
        (lost("died"), 2, 2),
        (lost("died"), 1, 1),
        (lost("died", action="actor.generate"), 1, 2),
        (lost("died", rank=0), 1, 2),
        (lost("froze", ended=Ended.FROZEN), 1, 2),
        (RanksLost("node 1 is lost", "no step is saved"), 1, 2),
    ],
    ids=["a step was saved", "fewer nodes", "another action", "another rank", "another end", "a node"],
)
def test_what_is_another_loss(other: RanksLost, saved: int, places: int) -> None:
    restarts = Restarts(9)
    restarts.count(lost("died"), saved=1, places=2)
    restarts.count(other, saved=saved, places=places)
    assert restarts.done == 2


def test_without_a_node_there_is_no_restart() -> None:
    with pytest.raises(RanksLost, match="not restarted again: no node is left"):
        Restarts(9).count(lost("died"), saved=1, places=0)


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


ENDED: Any = object()


def test_a_loss_begins_the_same_plan_again_as_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = SimpleNamespace(num_ranks=2, nodes=1, name="split")
    prepared: Any = SimpleNamespace(recipe=SimpleNamespace(restarts=1, device="cpu"), plan=plan)
    directory = RunDirectory.create(tmp_path / "run", "steps: 3\n")
    stays: list[tuple[bool, Origin]] = []

    def supervise(prepared: Any, *, resume: bool, origin: Origin) -> Any:
        stays.append((resume, origin))
        if len(stays) == 1:
            raise lost("rank 1 was killed")
        return ENDED

    with directory:
        ended = supervised(supervise, prepared, directory, lambda recipe: prepared, resume=False, origin=Origin.here())
    assert ended is ENDED
    assert [resume for resume, _ in stays] == [False, True]
    assert [origin.restart for _, origin in stays] == [None, Restart(1, 1, "rank 1 was killed")]
    assert capsys.readouterr().err.splitlines() == [
        "error: rank 1 was killed",
        "restart 1 of 1: the run goes on from the beginning: no step is saved, on 2 ranks of 1 node, plan split",
    ]
