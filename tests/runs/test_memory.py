"""Nothing grows with the number of steps."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run


@pytest.mark.slow
def test_resident_memory_is_flat_over_200_steps(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(steps=200, **{"checkpoint.every": 20, "evaluation.items": 3, "evaluation.every": 20})
    run(recipe)
    rows = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    resident = np.array([row["perf/resident_bytes"] for row in rows if "perf/resident_bytes" in row])
    assert len(resident) == 200
    # The allocator's pools settle in the first evaluations and checkpoints; runs of 400 steps are flat from step 60 on.
    growth = np.median(resident[-20:]) - np.median(resident[100:120])
    assert growth < 1 << 20, f"{growth / 2**20:.1f} MiB in 80 steps"
