"""The commands of docs/cluster.md, each on nodes that are processes of this machine, with a small recipe."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.folder.stored_recipe import recipe_text
from tests.launch.nodes.ray_nodes import addressed
from tests.runs.conftest import make_recipe as make_recipe
from tests.runs.conftest import tiny_folder as tiny_folder
from tests.runs.nodes import ends, free_port, left_of, started

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^(?:(\w+) )?\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shown() -> list[tuple[str, str]]:
    """(node, command) of all that the page shows and `test_commands` does not run."""
    text = (ROOT / "docs/cluster.md").read_text()
    found = [pair for kind, block in FENCE.findall(text) if not kind for pair in LINE.findall(block)]
    return [(node, " ".join(command.replace("\\\n", " ").split())) for node, command in found]


def group(word: str) -> list[str]:
    """The commands with a word, which belong together."""
    return [command for _, command in shown() if word in command]


def test_each_command_is_run_by_a_test_here() -> None:
    known = ["--leader", "torchrun", "sbatch", "--launcher ray --devices 16", "--restarts"]
    others = [command for _, command in shown() if not any(word in command for word in known)]
    assert others == []
    assert [len(group(word)) for word in known] == [2, 1, 1, 3, 1]


@pytest.fixture
def folder(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    """With a plan that is stated: before one is searched the machine is measured, which takes minutes if it is busy."""
    (tmp_path / "recipe.yaml").write_text(recipe_text(make_recipe(plan="colocated")))
    return tmp_path


@contextlib.contextmanager
def running(folder: Path, commands: list[str]) -> Iterator[list[str]]:
    """What each printed; all have ended well, and nothing is left."""
    port = free_port()
    lines = [
        re.sub(r"--devices \d+", "--devices 2", command).replace("node0:29500", f"127.0.0.1:{port}")
        for command in commands
    ]
    # `plait` and `torchrun` are those of the tests' own environment.
    environment = {
        "PATH": f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PLAIT_MARK": str(folder),
        "MASTER_PORT": str(port),
    }
    (folder / "plait").write_text(f'#!/bin/sh\nexec {sys.executable} -m plait "$@"\n')
    (folder / "plait").chmod(0o755)
    found = ends([started(shlex.split(line), environment, folder) for line in lines])
    assert [one.code for one in found] == [0] * len(lines), "\n".join(one.text for one in found)
    yield [one.text for one in found]
    assert left_of(folder) == []


def test_two_nodes_by_hand(folder: Path) -> None:
    with running(folder, group("--leader")) as (leader, other):
        assert "step 2/2" in leader
        assert "has joined the run" in other


def test_torchrun(folder: Path) -> None:
    [line] = group("torchrun")
    line = line.replace("--master-addr node0", f"--master-addr 127.0.0.1 --master-port {free_port()}")
    with running(folder, [line, line.replace("--node-rank 0", "--node-rank 1")]) as (leader, _):
        assert "by torchrun's variables" in leader
        assert "step 2/2" in leader


def test_restarts(folder: Path) -> None:
    with running(folder, group("--restarts")) as (text,):
        assert "step 2/2" in text
        assert "restart 1 of" not in text, "nothing was lost"


@pytest.mark.parametrize("nodes", ["", "--nodes 2"])
def test_ray(folder: Path, nodes: str) -> None:
    [line] = [one for one in group("--launcher ray") if one.endswith(nodes or "16") and not one.startswith("ray ")]
    with addressed(), running(folder, [line]) as (text,):
        assert "connected to the Ray cluster that runs" in text
        assert "step 2/2" in text
