"""A recipe of three stages on two nodes: one command on each runs them all, and has the bits of one machine. What is
lost in a stage is taken up in that stage."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from plait.cli import main
from plait.cli.train_stages import attached_by
from plait.errors import ConfigError
from plait.launch.nodes.place import NodeOptions
from plait.recipes.stages import load_stages
from tests.runs.nodes import ends, folder_of, free_port, left_of, process_of, started, wait_for
from tests.runs.plans import assert_equal_runs
from tests.runs.test_stages import recipe_in

STAGES = ("sft", "reward_model", "policy")
KEYS = ["--devices", "2", "--plan", "colocated"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return recipe_in(tmp_path_factory.mktemp("stages"), tiny_folder)


@pytest.fixture(scope="module")
def alone(recipe: Path) -> Path:
    """The folder of the stages on two devices of one machine."""
    folder = recipe.with_name("alone")
    assert main(["train", str(recipe), *KEYS, "--run_dir", str(folder)]) == 0
    return folder


def begun(recipe: Path, run_dir: Path, *more: str) -> list[subprocess.Popen[str]]:
    """A command on each of two nodes."""
    leader = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "plait", "train", str(recipe), *KEYS, "--run_dir", str(run_dir)]
    return [
        started([*command, "--nodes", "2", "--node", node, "--leader", leader, *more], {}, folder_of(run_dir))
        for node in ("0", "1")
    ]


def nothing_is_left(run_dir: Path) -> None:
    assert left_of(run_dir) == []
    assert not (run_dir / "nodes.key").exists()


@pytest.mark.slow
def test_all_stages_on_two_nodes_have_the_bits_of_one_machine(recipe: Path, alone: Path) -> None:
    run_dir = recipe.with_name("there")
    leader, other = ends(begun(recipe, run_dir))
    assert (leader.code, other.code) == (0, 0), leader.text + other.text
    said = [f"stage `{name}` ({number} of 3) begins" for number, name in enumerate(STAGES, start=1)]
    assert [line for line in other.text.splitlines() if line.startswith("stage")] == said
    for stage in STAGES:
        assert_equal_runs(run_dir / stage, alone / stage, tolerance=0.0)
        assert json.loads((run_dir / stage / "plan.json").read_text())["nodes"] == 2
    nothing_is_left(run_dir)
    again = ends(begun(recipe, run_dir, "--resume"))
    assert [one.code for one in again] == [0, 0], again[0].text
    assert again[0].text.count("done before: ") == 3


@pytest.mark.slow
def test_a_node_lost_in_the_second_stage_restarts_that_and_the_third_goes_on_without_it(
    recipe: Path, alone: Path
) -> None:
    run_dir = recipe.with_name("lost")
    keys = ("--checkpoint.every", "1", "--checkpoint.keep_last", "40", "--reward_model.steps", "40")
    commands = begun(recipe, run_dir, "--restarts", "1", *keys)
    wait_for(run_dir / "reward_model" / "checkpoints" / "step-1", commands)
    commands[1].kill()
    leader = ends(commands)[0]
    assert leader.code == 0, leader.text
    assert re.search(r"error: rank 1 on node 1 \(\S+\) is lost with its node: its connection was closed", leader.text)
    assert re.search(r"restart 1 of 1: .* from the checkpoint of step \d+, on 1 rank of 1 node", leader.text)
    ranks = {stage: json.loads((run_dir / stage / "plan.json").read_text())["num_ranks"] for stage in STAGES}
    assert ranks == {"sft": 2, "reward_model": 1, "policy": 1}
    stays = {stage: json.loads((run_dir / stage / "run.json").read_text())["stays"] for stage in STAGES}
    assert {stage: len(of_stage) for stage, of_stage in stays.items()} == {"sft": 1, "reward_model": 2, "policy": 1}
    assert_equal_runs(run_dir / "sft", alone / "sft", tolerance=0.0)
    nothing_is_left(run_dir)


@pytest.mark.slow
def test_what_ended_in_the_second_stage_is_resumed_there_on_both_nodes(recipe: Path, alone: Path) -> None:
    """First a rank is killed, which without `restarts` ends all; then a node is asked to stop; then it goes on."""
    run_dir = recipe.with_name("resumed")
    keys = ("--checkpoint.every", "1", "--checkpoint.keep_last", "200", "--reward_model.steps", "200")
    commands = begun(recipe, run_dir, *keys)
    wait_for(run_dir / "reward_model" / "checkpoints" / "step-1", commands)
    os.kill(process_of(run_dir / "reward_model", 1), signal.SIGKILL)
    leader, other = ends(commands)
    assert (leader.code, other.code) == (1, 1), leader.text
    assert re.search(r"rank 1 on node 1 \(\S+\) was killed by SIGKILL", leader.text)
    assert re.search(r"node 0: rank 1 on node 1 \(\S+\) was killed by SIGKILL", other.text)
    nothing_is_left(run_dir)
    sft = (run_dir / "sft" / "metrics.jsonl").read_bytes()

    commands = begun(recipe, run_dir, *keys, "--resume")
    before = len(list((run_dir / "reward_model" / "checkpoints").glob("step-*")))
    wait_until_resumed(run_dir / "reward_model", commands)
    commands[1].send_signal(signal.SIGINT)
    leader, other = ends(commands)
    assert (leader.code, other.code) == (130, 130), leader.text + other.text
    assert before
    assert "done before: " in leader.text
    assert "node 0: the run was stopped" in other.text
    nothing_is_left(run_dir)
    assert not (run_dir / "policy").exists()
    assert (run_dir / "sft" / "metrics.jsonl").read_bytes() == sft


def wait_until_resumed(run_dir: Path, commands: list[subprocess.Popen[str]]) -> None:
    """Until the second stay at a run has begun."""
    while len(json.loads((run_dir / "run.json").read_text())["stays"]) < 2:
        assert commands[0].poll() is None, commands[0].communicate()[0]
        time.sleep(0.05)


def test_commands_of_several_nodes_have_one_launcher(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    whole = attached_by(load_stages(recipe), NodeOptions())
    assert whole is not None
    assert (whole.task, whole.tasks) == (1, 2)
    assert attached_by(load_stages(recipe, [("launcher", "local")]), NodeOptions()) is None
    with pytest.raises(ConfigError, match="but it is auto for stage `sft` and local for stage `policy`; give one"):
        attached_by(load_stages(recipe, [("policy.launcher", "local")]), NodeOptions())


def test_a_folder_that_is_taken_is_refused_before_anybody_is_waited_for(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But to be told so."""
    monkeypatch.setattr("plait.launch.nodes.refusing.TELLS_S", 0.2)
    tree = yaml.safe_load(recipe.read_text()) | {"run_dir": str(tmp_path / "taken")}
    path = tmp_path / "taken.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    (tmp_path / "taken" / "reward_model").mkdir(parents=True)
    (tmp_path / "taken" / "reward_model" / "mine").touch()
    options = ["--nodes", "2", "--node", "0", "--leader", f"127.0.0.1:{free_port()}"]
    assert main(["train", str(path), *options]) == 2
    assert "stage `reward_model`: key `run_dir`" in capsys.readouterr().err
    assert sorted(entry.name for entry in (tmp_path / "taken").iterdir()) == ["reward_model"]


def test_a_dry_run_of_stages_is_for_as_many_nodes_as_are_said(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run_dir", str(tmp_path / "dry"), "--nodes", "2", "--leader", "node0:29500", "--dry-run"]
    assert main(["train", str(recipe), "--plan", "colocated", *options, "--node", "0"]) == 0
    assert len(re.findall(r"\.train +train +0,1 +2 ", capsys.readouterr().out)) == 4, "on CPUs, a rank of each node"
    assert main(["train", str(recipe), "--plan", "colocated", *options, "--node", "1"]) == 0
    assert not (tmp_path / "dry").exists()
