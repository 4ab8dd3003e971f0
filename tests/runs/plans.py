"""What two runs must have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from tests.runs.plan_files import write_plan


def planned(
    make_recipe: Callable[..., Recipe], folder: Path, name: str, plan: Mapping[str, str] | None = None, **keys: Any
) -> Recipe:
    """A run of that name in a folder, in float64, on one process where there is no plan."""
    where = {} if plan is None else {"plan": str(write_plan(folder, f"plan-{name}", dict(plan)))}
    return make_recipe(**{"run_dir": str(folder / name), "dtype": "float64"} | where | keys)


def runs_of_flows(
    flows: str, rows: Sequence[Mapping[str, Any]], model: Path, folder: Path, **usual: Any
) -> Callable[..., Recipe]:
    """Writes a file of flows, and rows of data, into a folder. Returns `make(flow, name of the run, plan, **keys)`: a
    `planned` run of two steps; a key of None is left out.

    Args:
        usual: keys of all of these runs.
    """
    (folder / "flows.py").write_text(flows)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(flow: str, name: str, plan: Mapping[str, str] | None = None, **keys: Any) -> Recipe:
        tree = {
            "model": str(model),
            "algorithm": f"{folder}/flows.py:{flow}",
            "steps": 2,
            "prompts_per_step": 3,
            "data.source": str(folder / "sums.jsonl"),
            "optimizer.learning_rate": 1e-3,
            "threads": 1,
            "samples_per_prompt": 4,
            "sampling.max_response_tokens": 6,
            **usual,
        }

        def loaded(**more: Any) -> Recipe:
            return load_recipe(None, [(key, value) for key, value in {**tree, **more}.items() if value is not None])

        return planned(loaded, folder, name, plan, **keys)

    return make


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """What a run computed, step by step: no times, no memory, and not how the work was divided (ranks that share a
    group compute its prompt each)."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return [
        {k: float(v) for k, v in row.items() if not k.startswith(("timing_", "perf/")) and "tokens_computed" not in k}
        for row in rows
    ]


def tokens_of(run_dir: Path) -> dict[str, list[tuple[str, list[int], str]]]:
    """File of samples → who said what; there is none where a flow reads its samples."""
    files = sorted((run_dir / "samples").glob("*"))
    return {
        path.name: [(row["uid"], row["token_ids"], row["response"]) for row in map(json.loads, path.open())]
        for path in files
    }


def assert_equal_runs(found: Path, expected: Path, tolerance: float = 1e-9) -> None:
    """Identical tokens; every metric and every weight within `tolerance`. A metric without a number is so in both."""
    assert tokens_of(found) == tokens_of(expected)
    mine, theirs = metrics_of(found), metrics_of(expected)
    assert [row.keys() for row in mine] == [row.keys() for row in theirs]
    far = {
        (int(row["step"]), name): (row[name], other[name])
        for row, other in zip(mine, theirs, strict=True)
        for name in row
        if row[name] != pytest.approx(other[name], rel=tolerance, abs=tolerance, nan_ok=True)
    }
    assert not far, far
    weights, others = (load_file(_final(folder)) for folder in (found, expected))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=tolerance)


def assert_equal_columns(found: Path, expected: Path, tolerance: float = 1e-9) -> None:
    """Every number that the files of samples have of each sample, within `tolerance`: log-probs, scores, values,
    advantages."""
    mine, theirs = (sorted((folder / "samples").glob("*.jsonl")) for folder in (found, expected))
    assert [path.name for path in mine] == [path.name for path in theirs] != []
    for path, other in zip(mine, theirs, strict=True):
        for row, of_other in zip(read_rows(path), read_rows(other), strict=True):
            assert row.keys() == of_other.keys()
            for name, value in row.items():
                wanted = of_other[name]
                near = isinstance(value, float) or (isinstance(value, list) and value and isinstance(value[0], float))
                assert value == (pytest.approx(wanted, abs=tolerance, rel=0, nan_ok=True) if near else wanted), name


def _final(run_dir: Path) -> Path:
    """The weights at the end, or the adapters."""
    [path] = (run_dir / "final").glob("*.safetensors")
    return path
