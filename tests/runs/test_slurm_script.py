"""The example's script for Slurm, with a stand-in of `srun` that starts a task on each of two nodes of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.folder.stored_recipe import recipe_text
from tests.runs.nodes import left_of
from tests.runs.placed_runs import PLANS, where

SCRIPT = Path(__file__).parents[2] / "examples/cluster.sbatch"
SRUN = """#!{python}
import os, subprocess, sys
command = sys.argv[1:]
assert command.pop(0) == "--kill-on-bad-exit=1", command
tasks = [
    subprocess.Popen(command, env=os.environ | {{
        "SLURM_PROCID": str(task), "SLURM_NODEID": str(task), "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost,elsewhere",
    }})
    for task in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.slow
def test_the_script_begins_a_run_and_goes_on_with_it(
    tmp_path: Path, place: Path, placed: Callable[..., Recipe]
) -> None:
    (flow, keys), plan = PLANS["grpo-split-2"]
    recipe = placed(flow, "by-script", **keys, **where(place, "by-script", plan), steps=2)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(recipe))
    for name, text in (
        ("srun", SRUN.format(python=sys.executable)),
        ("plait", f'#!/bin/sh\nexec {sys.executable} -m plait "$@"\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "PLAIT_MARK": str(recipe.run_dir),
    }
    for steps, says in ((2, "step 2/2"), (3, "step 3/3")):
        file.write_text(re.sub(r"^steps: \d+", f"steps: {steps}", file.read_text(), flags=re.MULTILINE))
        done = subprocess.run(
            ["bash", str(SCRIPT), str(file), str(recipe.run_dir)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert says in done.stderr
        assert left_of(recipe.run_dir) == []
