"""A run over several nodes computes what it computes on one machine with as many ranks, bit for bit; what is lost is
named; nothing is left."""

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
from tests.cases import slow_but
from tests.runs.nodes import begin, begin_nodes, ends, free_port, left_of, process_of, wait_for
from tests.runs.placed_runs import PLANS, where
from tests.runs.plans import assert_equal_runs

SEVERAL = [
    "grpo-colocated-2",
    "grpo-split-2",
    "grpo-pp2",
    "grpo-tp2",
    "ppo-split-2",
    "ppo-mixed-2",
    "ppo-standalone-4",
    "ppo-mixed-4",
]
QUICK = ["grpo-split-2"]


@pytest.mark.parametrize("name", slow_but(QUICK, SEVERAL))
def test_two_nodes_compute_what_one_machine_does(name: str, place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = PLANS[name]
    steps = {} if name not in QUICK else {"steps": 2}
    at = where(place, name, plan)
    here = placed(flow, f"{name}-here", **keys, **at, **steps)
    assert run(here).finished
    there = placed(flow, f"{name}-there", **keys, **at, **steps)
    leader, other = ends(begin_nodes(there, 2))
    assert leader.code == 0, leader.text
    assert other.code == 0, other.text
    assert re.search(r"node 1 \(\S+\) has joined the run", other.text)
    assert_equal_runs(there.run_dir, here.run_dir, tolerance=0.0)
    kept = json.loads((there.run_dir / "plan.json").read_text())
    assert kept["nodes"] == 2
    assert {path.name for path in (there.run_dir / "workers").iterdir()} >= {"rank0.log", "rank1.log"}
    assert not (there.run_dir / "nodes.key").exists()
    assert left_of(there.run_dir) == []


@pytest.mark.slow
def test_a_lost_node_is_named_and_the_run_goes_on_elsewhere(place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = PLANS["grpo-split-2"]
    keys = {**keys, **where(place, "lost", plan), "checkpoint.every": 1}
    whole = placed(flow, "lost-not", **keys)
    assert run(whole).finished
    recipe = placed(flow, "lost", **keys)
    commands = begin_nodes(recipe, 2)
    wait_for(recipe.run_dir / "checkpoints" / "step-2", commands)
    commands[1].kill()
    started = time.monotonic()
    leader, _ = ends(commands)
    assert time.monotonic() - started < 30
    assert leader.code == 1, leader.text
    assert re.search(r"rank 1 on node 1 \(\S+\) is lost with its node: its connection was closed", leader.text)
    assert re.search(r"the checkpoint of step \d is good \(.*\); go on from it with --resume", leader.text)
    assert left_of(recipe.run_dir) == []
    assert run(recipe, resume=True).finished, "on one machine"
    assert_equal_runs(recipe.run_dir, whole.run_dir, tolerance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo-split-2", "grpo-colocated-2"])
def test_a_run_goes_on_by_itself_on_the_node_that_is_left(
    name: str, place: Path, placed: Callable[..., Recipe]
) -> None:
    """Split needs two ranks, so on one a plan is found; colocated fits one too."""
    (flow, keys), plan = PLANS[name]
    keys = {**keys, **where(place, f"left-{name}", plan), "checkpoint.every": 1}
    whole = placed(flow, f"left-not-{name}", **keys)
    assert run(whole).finished
    recipe = placed(flow, f"left-{name}", **keys, restarts=1)
    commands = begin_nodes(recipe, 2)
    wait_for(recipe.run_dir / "checkpoints" / "step-2", commands)
    commands[1].kill()
    leader, _ = ends(commands)
    assert leader.code == 0, leader.text
    error = re.search(r"error: rank 1 on node 1 \(\S+\) is lost with its node: its connection was closed", leader.text)
    told = re.search(r"restart 1 of 1: .* from the checkpoint of step \d+, on 1 rank of 1 node, plan \w+", leader.text)
    assert error is not None, leader.text
    assert told is not None, leader.text
    assert error.start() < told.start()
    assert left_of(recipe.run_dir) == []
    assert_equal_runs(recipe.run_dir, whole.run_dir)
    assert json.loads((recipe.run_dir / "run.json").read_text())["stays"][-1]["restart"]["number"] == 1


@pytest.mark.slow
def test_a_killed_rank_of_another_node_is_restarted_there(place: Path, placed: Callable[..., Recipe]) -> None:
    """All nodes are left: who watches the other one reads why it begins again, and that it has ended."""
    (flow, keys), plan = PLANS["ppo-standalone-4"]
    keys = {**keys, **where(place, "stays", plan), "checkpoint.every": 1, "steps": 4}
    whole = placed(flow, "stays-not", **keys)
    assert run(whole).finished
    recipe = placed(flow, "stays", **keys, restarts=2)
    commands = begin_nodes(recipe, 2)
    wait_for(recipe.run_dir / "checkpoints" / "step-1", commands)
    os.kill(process_of(recipe.run_dir, 3), signal.SIGKILL)
    leader, other = ends(commands)
    assert (leader.code, other.code) == (0, 0), leader.text + other.text
    assert re.search(r"error: rank 3 on node 1 \(\S+\) was killed by SIGKILL", leader.text)
    for text in (leader.text, other.text):
        assert re.search(r"restart 1 of 2: .* on 4 ranks of 2 nodes, plan standalone", text), text
    assert re.search(r"node 0: rank 3 on node 1 \(\S+\) was killed by SIGKILL", other.text)
    assert_equal_runs(recipe.run_dir, whole.run_dir, tolerance=0.0)
    assert left_of(recipe.run_dir) == []


@pytest.mark.slow
def test_a_dead_leader_ends_the_other_node(place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = PLANS["grpo-split-2"]
    recipe = placed(flow, "headless", **keys, **where(place, "headless", plan), **{"checkpoint.every": 1})
    commands = begin_nodes(recipe, 2)
    wait_for(recipe.run_dir / "checkpoints" / "step-1", commands)
    commands[0].kill()
    _, other = ends(commands)
    assert other.code == 1
    assert "the leader is lost: its connection was closed; the ranks of this node are ended" in other.text
    assert left_of(recipe.run_dir) == []


@pytest.mark.slow
def test_a_signal_to_another_node_ends_the_step_and_saves(place: Path, placed: Callable[..., Recipe]) -> None:
    (flow, keys), plan = PLANS["grpo-split-2"]
    recipe = placed(flow, "asked", **keys, **where(place, "asked", plan), steps=200, **{"checkpoint.every": 0})
    commands = begin_nodes(recipe, 2)
    wait_for(recipe.run_dir / "metrics.jsonl", commands)
    ranks = [process_of(recipe.run_dir, rank) for rank in (1, 0)]
    for pid in (*ranks, *(command.pid for command in reversed(commands))):  # as Slurm does: all processes of a job
        os.kill(pid, signal.SIGTERM)
    leader, other = ends(commands)
    assert (leader.code, other.code) == (130, 130), leader.text + other.text
    assert "node 0 is asked to stop the run; once more to end the ranks of this node at once" in other.text
    assert "--resume" in leader.text
    assert "node 0: the run was stopped" in other.text
    assert list((recipe.run_dir / "checkpoints").glob("step-*"))
    assert left_of(recipe.run_dir) == []


@pytest.mark.slow
def test_a_signal_to_another_node_while_data_are_read_ends_the_run(place: Path, placed: Callable[..., Recipe]) -> None:
    """As one while a plan is searched: no rank is there to hear of it. `test_a_signal_to_one_that_has_come_…` of
    `launch/nodes/test_nodes.py` is about the wait for others."""
    (flow, keys), plan = PLANS["grpo-split-2"]
    recipe = placed(flow, "asked first", **keys, **where(place, "asked first", plan), steps=2000)
    commands = begin_nodes(recipe, 2)
    assert commands[0].stdout is not None
    assert any("loading tokenizer" in line for line in iter(commands[0].stdout.readline, ""))
    os.kill(commands[1].pid, signal.SIGINT)
    leader, other = ends(commands, limit_s=60)
    assert (leader.code, other.code) == (130, 130), leader.text + other.text
    assert leader.text.splitlines()[-1] == "interrupted"
    assert other.text.splitlines()[-1] == "node 0: interrupted"
    assert not recipe.run_dir.exists()
    assert left_of(recipe.run_dir) == []


@pytest.mark.slow
def test_a_node_lost_before_ranks_are_started_is_told_and_the_run_goes_on_without_it(
    place: Path, placed: Callable[..., Recipe]
) -> None:
    """Its ranks are not left to the others without a word."""
    recipe = placed("grpo", "lost first", plan="colocated", devices=2, steps=2, restarts=1)
    commands = begin_nodes(recipe, 2)
    assert commands[0].stdout is not None
    assert any("loading tokenizer" in line for line in iter(commands[0].stdout.readline, ""))
    commands[1].kill()
    leader = ends(commands)[0]
    assert leader.code == 0, leader.text
    lost = r"node 1 \(\S+\) is lost: its connection was closed"
    told = [line for line in leader.text.splitlines() if re.search(lost, line)]
    assert [line.startswith("error: ") for line in told] == [False, True], leader.text
    assert "restart 1 of 1: the run goes on from the beginning: no step is saved, on 1 rank of 1 node" in leader.text
    assert left_of(recipe.run_dir) == []


@pytest.mark.slow
def test_a_signal_to_another_node_while_ranks_are_loading_ends_the_run(
    place: Path, placed: Callable[..., Recipe]
) -> None:
    (flow, keys), plan = PLANS["grpo-split-2"]
    recipe = placed(flow, "asked early", **keys, **where(place, "asked early", plan), steps=2000)
    commands = begin_nodes(recipe, 2)
    wait_for(recipe.run_dir / "workers", commands)
    os.kill(commands[1].pid, signal.SIGINT)
    leader, other = ends(commands, limit_s=60)
    assert (leader.code, other.code) == (130, 130), leader.text + other.text
    assert not recipe.run_dir.exists()
    assert left_of(recipe.run_dir) == []


def test_an_error_of_the_input_is_said_on_all_nodes(place: Path, placed: Callable[..., Recipe]) -> None:
    recipe = placed("grpo", "uneven", plan="colocated", devices=3)
    leader, other = ends(begin_nodes(recipe, 2))
    assert leader.code == 2, leader.text
    assert "3 ranks cannot be divided among the 2 nodes of this run" in leader.text
    assert other.code == 2
    assert "3 ranks cannot be divided among the 2 nodes" in other.text
    assert left_of(recipe.run_dir) == []


@pytest.mark.slow
def test_torchrun_and_slurm_begin_it_too(place: Path, placed: Callable[..., Recipe]) -> None:
    """By stand-ins of their variables: two tasks on each of two nodes."""
    (flow, keys), _ = PLANS["ppo-standalone-4"]
    here = placed(flow, "by-here", **keys, plan="standalone", devices=4, steps=2)
    assert run(here).finished
    port = free_port()
    torchrun = [
        {
            "RANK": str(task),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(task % 2),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(task // 2),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for task in range(4)
    ]
    job = str(free_port())
    slurm = [
        {
            "SLURM_PROCID": str(task),
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_NODEID": str(task % 2),
            "SLURM_LOCALID": str(task // 2),
            "SLURM_STEP_NODELIST": "localhost,otherhost",
            "SLURM_JOB_ID": job,
        }
        for task in range(4)
    ]
    for name, tasks in (("torchrun", torchrun), ("slurm", slurm)):
        recipe = placed(flow, f"by-{name}", **keys, plan="standalone", devices=4, steps=2)
        found = ends([begin(recipe, task, [], variables) for task, variables in enumerate(tasks)])
        assert [one.code for one in found] == [0] * 4, [one.text for one in found]
        assert_equal_runs(recipe.run_dir, here.run_dir, tolerance=0.0)
