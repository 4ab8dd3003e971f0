"""What is imported of heavy packages before anything needs them: nothing, so that commands which do not compute answer
at once. One process imports group after group, and says after each what has come with it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "pyarrow", "pandas", "reasoning_gym", "sympy", "rich", "accelerate")
GROUPS = {
    "the vocabulary of flows": (("plait.dataflow",), (*HEAVY, "numpy")),
    "what is observed": (
        (
            *("plait.observe.progress", "plait.observe.run_log", "plait.observe.trackers"),
            "plait.runtime.folder.directory",
        ),
        (*HEAVY, "numpy"),
    ),
    "data": (
        (
            *("plait.data.examples", "plait.data.files", "plait.data.movie_reviews", "plait.data.package_file"),
            *("plait.data.prompts", "plait.data.settings", "plait.data.sources", "plait.data.tasks"),
        ),
        (*HEAVY, "numpy"),
    ),
    "rewards": (
        ("plait.rewards.evaluation", "plait.rewards.functions", "plait.rewards.pool", "plait.rewards.settings"),
        (*HEAVY, "numpy"),
    ),
    "layouts": (("plait.layout.params",), HEAVY),
    "algorithms": (
        tuple(
            f"plait.algorithms.{name}"
            for name in ("grpo", "rloo", "reinforce_pp", "remax", "sft", "reward_model", "dpo", "ppo", "safe_rlhf")
        ),
        HEAVY,
    ),
    "batching": (("plait.policy.batching", "plait.generation.settings"), HEAVY),
    "settings of training": (("plait.training.settings", "plait.training.memory"), HEAVY),
    "what `plait generate` reads": (("plait.cli.generate", "plait.cli.kept"), ("torch", "transformers")),
}
"""By a name: modules, and what is not imported when they are, nor by those before them."""
IMPORTS = """
import importlib, json, sys
found = {}
for name, (modules, heavy) in json.loads(sys.argv[1]).items():
    for module in modules:
        importlib.import_module(module)
    found[name] = [package for package in heavy if package in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """By the name of a group: what of the heavy packages was imported."""
    command = [sys.executable, "-c", IMPORTS, json.dumps(GROUPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.process
@pytest.mark.parametrize("group", GROUPS)
def test_nothing_heavy_is_imported_before_it_is_needed(group: str, found: dict[str, list[str]]) -> None:
    assert found[group] == []
