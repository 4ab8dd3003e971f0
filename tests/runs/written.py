"""What a run has written, as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe


def logged(recipe: Recipe) -> list[dict[str, Any]]:
    """Its metrics, step by step; all of them, times included."""
    return read_rows(recipe.run_dir / "metrics.jsonl")


def samples_of(recipe: Recipe, step: int) -> list[dict[str, Any]]:
    """Those that a step, from 1, trained on."""
    return read_rows(recipe.run_dir / f"samples/step-{step:06d}.jsonl")


def samples_by_step(run_dir: Path) -> list[list[dict[str, Any]]]:
    """Those that each step trained on."""
    return [read_rows(path) for path in sorted((run_dir / "samples").glob("step-*"))]
