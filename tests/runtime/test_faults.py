"""A worker that is killed, stopped or raises in any phase: an error that says who, in what and who waited; nothing is
left; and --resume continues to the undisturbed result."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from plait.runtime.api import run
from plait.runtime.prepare import recipe_text
from plait.runtime.recipe import Recipe
from plait.runtime.recipe_file import load_recipe
from tests.runtime.plans import assert_equal_runs, write_plan

LIMIT_S = 240
PHASES = {
    "generate": "actor.generate",
    "score": "ref.logprobs",
    "train": "actor.train",
    "move": "actor.weights (move)",
    "save": "save",
}
FAULTS = {
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL"),
    "stop": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 froze: no heartbeat"),
    "raise": ("raise ZeroDivisionError('planted')", "rank 1 raised ZeroDivisionError: planted"),
}
FLOW = """
    import contextlib, os, signal
    from pathlib import Path

    from plait.algorithms.grpo import grpo as grpo
    from plait.runtime.board import Board

    # The second time that rank 1 begins the action that the file names, it does what the file says.
    plant = Path(__file__).with_name("fault")
    lines = plant.read_text().splitlines() if plant.exists() else []
    begun, doing = [], Board.doing

    @contextlib.contextmanager
    def watched(self, action):
        with doing(self, action):
            if lines and self.rank == 1 and action == lines[0]:
                begun.append(action)
                if len(begun) == 2:
                    exec(lines[1])
            yield

    if lines:
        Board.doing = watched
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "flow.py").write_text(textwrap.dedent(FLOW))
    (folder / "reward.py").write_text(
        "def sevens(completions, **columns):\n    return [text.count('7') + 0.01 * len(text) for text in completions]\n"
    )
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "what is {i} plus 4?"}}\n' for i in range(12)))
    write_plan(folder, "plan", {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 dp2"})
    return folder


def recipe_of(place: Path, tiny_folder: Path, name: str) -> Recipe:
    tree: dict[str, Any] = {
        "model": str(tiny_folder),
        "algorithm": f"{place}/flow.py:grpo",
        "options": {"kl_coef": 0.05},
        "steps": 3,
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "data.source": str(place / "prompts.jsonl"),
        "reward.functions": [f"{place}/reward.py:sevens"],
        "sampling.max_response_tokens": 6,
        "optimizer.learning_rate": 1e-3,
        "checkpoint.every": 1,
        "dtype": "float64",
        "threads": 1,
        "plan": str(place / "plan.json"),
        "freeze_after_s": 3,
        "run_dir": str(place / name),
    }
    return load_recipe(None, list(tree.items()))


@pytest.fixture(scope="module")
def undisturbed(place: Path, tiny_folder: Path) -> Path:
    recipe = recipe_of(place, tiny_folder, "undisturbed")
    run(recipe)
    return recipe.run_dir


def plait_train(recipe: Recipe, *flags: str) -> subprocess.CompletedProcess[str]:
    """`plait train` in a process of its own, with an environment that marks all its children."""
    path = recipe.run_dir.with_suffix(".yaml")
    path.write_text(recipe_text(recipe))
    environment = os.environ | {"PLAIT_MARK": str(recipe.run_dir)}
    command = [sys.executable, "-m", "plait", "train", str(path), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def left_of(recipe: Recipe) -> list[str]:
    """Processes that carry the mark."""
    mark, found = f"PLAIT_MARK={recipe.run_dir}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(folder.name)
            except OSError:
                continue
    return found


QUICK = (("kill", "train"), ("stop", "move"), ("raise", "generate"), ("kill", "save"))


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        (fault, phase) if (fault, phase) in QUICK else pytest.param(fault, phase, marks=pytest.mark.slow)
        for fault in FAULTS
        for phase in PHASES
    ],
)
def test_a_fault_is_named_and_the_run_goes_on_from_its_checkpoint(
    fault: str, phase: str, place: Path, tiny_folder: Path, undisturbed: Path
) -> None:
    recipe = recipe_of(place, tiny_folder, f"{fault}-{phase}")
    code, says = FAULTS[fault]
    (place / "fault").write_text(f"{PHASES[phase]}\n{code}\n")
    try:
        broken = plait_train(recipe)
    finally:
        (place / "fault").unlink()
    assert broken.returncode == 1, broken.stderr
    assert says in broken.stderr
    assert f"in `{PHASES[phase]}` after" in broken.stderr
    meanwhile = next(line for line in broken.stderr.splitlines() if line.startswith("  meanwhile rank 0"))
    assert "rank 1" in meanwhile, meanwhile  # whom it waited for, or whose connection broke
    assert "--resume" in broken.stderr
    if fault == "raise":
        assert "exec(lines[1])" in broken.stderr, "the worker's own traceback"
    assert left_of(recipe) == []
    resumed = plait_train(recipe, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(recipe.run_dir, undisturbed)
