"""What is imported is there, also where a function imports it that runs seldom. And of heavy packages nothing is before
it is needed, so that commands which do not compute answer at once."""

from __future__ import annotations

import ast
import json
import subprocess
import symtable
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.parsed import tree

ROOT = Path(__file__).parents[1]

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
            for name in (
                "grpo",
                "rloo",
                "reinforce_pp",
                "remax",
                "sft",
                "reward_model",
                "dpo",
                "kto",
                "distill",
                "ppo",
                "safe_rlhf",
            )
        ),
        HEAVY,
    ),
    "batching": (("plait.policy.batching", "plait.generation.settings"), HEAVY),
    "settings of training": (("plait.training.settings", "plait.training.memory"), HEAVY),
    "what is checked of a flow": (("plait.recipes.flow_checks",), ("torch", "transformers")),
    "what is checked of files": (
        ("plait.runtime.inputs.reading", "plait.runtime.inputs.opened_rows"),
        ("torch", "transformers"),
    ),
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


def file_of(module: str) -> Path | None:
    """Of a module or a package of ours; None: there is none."""
    path = (ROOT / "src" if module.startswith("plait") else ROOT).joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def bound_in(file: Path) -> frozenset[str]:
    """All names that a module has."""
    module = symtable.symtable(file.read_text(), str(file), "exec")
    return frozenset(name.get_name() for name in module.get_symbols() if name.is_assigned() or name.is_imported())


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """These and those within them. Nine tenths of a tree are expressions."""
    for one in body:
        yield one
        for part in ("body", "orelse", "finalbody"):
            yield from statements(getattr(one, part, ()))
        for branch in (*getattr(one, "handlers", ()), *getattr(one, "cases", ())):
            yield from statements(branch.body)


def missing_in(path: Path) -> Iterator[str]:
    """What a file imports of ours, at its top or in functions, and is not there."""
    for node in statements(tree(path).body):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("plait", "tests"):
            file = file_of(node.module)
            known = frozenset() if file is None else bound_in(file)
            for alias in node.names:
                if alias.name not in known and file_of(f"{node.module}.{alias.name}") is None:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no `{alias.name}`"


def test_what_is_imported_is_there() -> None:
    """No type checker reads tests, and slow ones run seldom."""
    paths = [path for folder in ("tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [line for path in paths for line in missing_in(path)] == []


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """By the name of a group: what of the heavy packages was imported. One process imports group after group."""
    command = [sys.executable, "-c", IMPORTS, json.dumps(GROUPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.process
@pytest.mark.parametrize("group", GROUPS)
def test_nothing_heavy_is_imported_before_it_is_needed(group: str, found: dict[str, list[str]]) -> None:
    assert found[group] == []
