"""Runs in which a rank is killed, stopped or raises at an action that a file names: the flow that does it, and what
must then be said, left and resumed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.runtime.api import run
from plait.runtime.folder.stored_recipe import recipe_text
from tests.runs.nodes import folder_of, left_of
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs

LIMIT_S = 600
"""For a run that is broken off, also where the machine has much else to do."""
FAULTS = {
    # By then the other rank has come to where it waits for this one.
    "kill": ("import time; time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    "stop": ("os.kill(os.getpid(), signal.SIGSTOP)", "froze: no heartbeat"),
    "stall": ("import time; time.sleep(1000)", "stalled: no progress for"),
    "raise": ("raise ZeroDivisionError('planted')", "raised ZeroDivisionError: planted"),
}
LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""
SUM = "sum"
"""Any of a team, in place of an action."""
FLOW = """
    import contextlib, os, signal
    from pathlib import Path

    from plait.algorithms.grpo import grpo as grpo
    from plait.workers.status_file import StatusFile

    # The file names a rank, an action, what it does when it begins that, and the checkpoint that must be there then.
    plant = Path(__file__).with_name("fault")
    lines = plant.read_text().splitlines() if plant.exists() else []
    doing = StatusFile.doing

    def fault():
        if Path(lines[3]).exists():
            # The table is not read at one moment: a line of it may be missed.
            ports = {port for _ in range(5) for port in listening()}
            plant.with_name("ports").write_text(" ".join(ports))
            exec(lines[2])

    def listening():
        sockets = {os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")}
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]

    @contextlib.contextmanager
    def watched(self, action):
        with doing(self, action):
            if self.rank == int(lines[0]) and action == lines[1]:
                fault()
            yield

    if lines and lines[1] == "sum":
        from plait.models.parallel.team import Peers

        summed = Peers.all_reduce

        def all_reduce(self, tensor, op="sum"):
            if self.ranks[self.index] == int(lines[0]):
                fault()
            return summed(self, tensor, op)

        Peers.all_reduce = all_reduce
    elif lines:
        StatusFile.doing = watched
"""


def filled(folder: Path, flow: str, plans: Mapping[str, dict[str, str]]) -> Path:
    """The folder, with this flow, a reward, prompts and plans."""
    (folder / "flow.py").write_text(flow)
    (folder / "reward.py").write_text(
        "def sevens(completions, **columns):\n    return [text.count('7') + 0.01 * len(text) for text in completions]\n"
    )
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "what is {i} plus 4?"}}\n' for i in range(12)))
    for name, places in plans.items():
        write_plan(folder, name, places)
    return folder


def recipe_of(place: Path, tiny_folder: Path, name: str, **keys: Any) -> Recipe:
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
    return load_recipe(None, list((tree | keys).items()))


def patience(fault: str) -> dict[str, int]:
    """Only a rank that is stopped has to be seen soon: one that imports lets no other thread run for seconds."""
    return {"freeze_after_s": 10 if fault == "stop" else 60}


def whole(recipe: Recipe) -> Path:
    """The folder of the run, to its end."""
    assert run(recipe).finished
    return recipe.run_dir


def plait_train(recipe: Recipe) -> subprocess.CompletedProcess[str]:
    """`plait train` in a process of its own, in a folder that shows what it leaves."""
    path = recipe.run_dir.with_suffix(".yaml")
    path.write_text(recipe_text(recipe))
    command = [sys.executable, "-m", "plait", "train", str(path)]
    return subprocess.run(command, cwd=folder_of(recipe.run_dir), capture_output=True, text=True, timeout=LIMIT_S)


def broken_off(
    recipe: Recipe, fault: str, action: str, rank: int, undisturbed: Path, *, named: str = "", waits: bool = True
) -> None:
    """Run with a fault in a rank's action of step 2, and resume.

    Args:
        named: how the error begins to call the action, where that is not its name.
        waits: whether the other rank has to wait for this one then.
    """
    code, says = FAULTS[fault]
    plant, other = Path(recipe.algorithm.rpartition(":")[0]).with_name("fault"), 1 - rank
    plant.write_text(f"{rank}\n{action}\n{code}\n{recipe.run_dir}/checkpoints/step-1\n")
    try:
        broken = plait_train(recipe)
    finally:
        plant.unlink()
    assert broken.returncode == 1, broken.stderr
    assert f"rank {rank} {says}" in broken.stderr
    named = named or ("actor.generate" if action == SUM else action)
    assert re.search(rf"in `{re.escape(named)}(/[^`]*)?`(?! after)", broken.stderr), "how long it did that is not known"
    meanwhile = next(line for line in broken.stderr.splitlines() if line.startswith(f"  meanwhile rank {other}"))
    assert not re.search(r"` for \d", meanwhile), meanwhile
    assert not waits or f"rank {rank}" in meanwhile, meanwhile  # whom it waited for, or whose connection broke
    # A leader that is stopped goes on while it writes its stack, and may get through with what it was saving.
    good = "[12]" if (fault, action, rank) == ("stop", "save", 0) else "1"
    assert re.search(f"the checkpoint of step {good} is good", broken.stderr), broken.stderr
    if fault == "raise":
        assert "exec(lines[2])" in broken.stderr, "the worker's own traceback"
    assert left_of(recipe.run_dir) == []
    ports = set(plant.with_name("ports").read_text().split())
    assert ports, "those of the store, or of the connections to peers"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert not [row for row in rows if row[1] in ports and row[3] == LISTENS]
    assert run(recipe, resume=True).finished
    assert_equal_runs(recipe.run_dir, undisturbed)
