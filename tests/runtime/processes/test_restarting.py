"""Which losses a run goes on after, how often, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.checkpoint.store import CheckpointStore
from plait.launch.failures import Ended, Failure
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.history import Origin, Restart
from plait.runtime.processes import supervisor
from plait.runtime.processes.restarting import RanksLost, Restarts, supervised
from plait.schedule.plan import Placement, Plan

ENDED: Any = SimpleNamespace(finished=True)


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


@pytest.mark.parametrize(("most", "reads"), [(0, 0), (2, 2)])
def test_a_checkpoint_is_read_through_once_for_each_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, reads: int
) -> None:
    """To know that it is whole takes minutes of a large model's."""
    read, losses = [], [lost("rank 1 died", action=f"step {number}") for number in range(3)]
    monkeypatch.setattr(CheckpointStore, "latest", lambda store: read.append(store))
    plan = SimpleNamespace(num_ranks=2, nodes=1, name="split")
    prepared: Any = SimpleNamespace(recipe=SimpleNamespace(restarts=most, device="cpu"), plan=plan)

    def supervise(prepared: Any, **_: Any) -> Any:
        raise losses.pop()

    with RunDirectory.claim(tmp_path / "run") as directory:
        directory.begin("steps: 3\n")
        with pytest.raises(RanksLost):
            supervised(supervise, prepared, directory, lambda recipe: prepared, resume=False, origin=Origin.here())
    assert len(read) == reads


def test_a_loss_begins_the_same_plan_again_as_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = SimpleNamespace(num_ranks=2, nodes=1, name="split")
    prepared: Any = SimpleNamespace(recipe=SimpleNamespace(restarts=1, device="cpu"), plan=plan)
    directory = RunDirectory.claim(tmp_path / "run")
    directory.begin("steps: 3\n")
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


@pytest.mark.slow
def test_the_plan_of_a_run_that_was_to_be_replaced_is_not_taken_for_the_places_that_are_left(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That was for two ranks, as many as are left of four, and had no critic."""
    folder = make_recipe().run_dir
    with RunDirectory.claim(folder) as directory:
        directory.begin("model: m\n")
        Plan("split", 2, (Placement("actor.train", "train", (0,)),)).save(directory.files.plan)
    place = SimpleNamespace(node=0, cores=1, devices=0, own_devices=False)
    nodes: Any = SimpleNamespace(
        nodes=[place, place],
        num_nodes=1,
        num_joined=2,
        links=[],
        joined_bytes={},
        tell=lambda text: None,
        drop_lost=lambda: None,
        reach=lambda: None,
    )
    tried: list[Any] = []

    def supervise(prepared: Any, **_: Any) -> Any:
        tried.append(prepared)
        nodes.nodes.pop()
        if nodes.nodes:
            raise lost("a rank died")
        return ENDED

    monkeypatch.setattr(supervisor, "supervise", supervise)
    ppo = {"algorithm": "ppo", "options": {}, "devices": 4, "plan": "auto", "restarts": 1, "overwrite": True}
    assert run(make_recipe(steps=1, **ppo), gathering=lambda *_: nullcontext(nodes)) is ENDED
    assert [prepared.plan.num_ranks for prepared in tried] == [4, 2]
    assert "critic.train" in {placement.call for placement in tried[1].plan.placements}
