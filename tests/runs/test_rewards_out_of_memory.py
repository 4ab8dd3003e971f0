"""Where the memory of the machine is out, the kernel ends a reward worker and not the run: by a real run in a group of
processes whose memory is bounded (a cgroup), where this machine lets one be made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.folder.stored_recipe import recipe_text
from tests.memory_groups import bounded, inside

LIMIT_BYTES = 2 << 30

REWARD = """
def hoards(completions, prompts, **columns):
    held = []
    if "what is 3 " in str(prompts[0]):
        while True:
            held.append(bytearray(b"x") * (64 << 20))
    return [float(text.count("7")) for text in completions]
"""


@pytest.fixture
def group() -> Iterator[Path]:
    with bounded(LIMIT_BYTES) as folder:
        yield folder


@pytest.mark.slow
def test_the_kernel_ends_a_worker_and_the_run_goes_on(
    group: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    (tmp_path / "hoards.py").write_text(REWARD)
    keys = {"reward.functions": [f"{tmp_path}/hoards.py:hoards"], "reward.on_error": "drop", "reward.workers": 2}
    recipe = make_recipe(steps=4, **keys)
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    command = inside(group, "-m", "plait", "train", str(tmp_path / "recipe.yaml"))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = read_rows(recipe.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    lost = [int(row["reward/dropped"]) for row in rows]
    lines = [json.loads(line) for path in sorted((recipe.run_dir / "samples").iterdir()) for line in path.open()]
    unscored = {line["prompt"] for line in lines if "reward_score" not in line}
    assert len(unscored) == 1, "one prompt's samples have no reward"
    assert "what is 3 " in unscored.pop()
    assert sum(lost) == 4
    assert "SIGKILL" in ended.stderr, "and the user is told why"
