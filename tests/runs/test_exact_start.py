"""A role that trains in bfloat16 begins with the numbers of its checkpoint, not with what bfloat16 makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.export import export_checkpoint
from tests.cases import slow_but
from tests.runs.placed_runs import GRPO, PPO_MODEL, Flow
from tests.runs.plans import write_plan

STILL = {"dtype": "bfloat16", "optimizer.learning_rate": 1e-12, "steps": 1}
"""Nothing is learned: what is saved is what the masters began as."""
CASES: dict[str, tuple[Flow, str, str | dict[str, str] | None]] = {
    "one process": (GRPO, "actor", None),
    "dp2": (GRPO, "actor", {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"}),
    "tp2": (GRPO, "actor", {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0"}),
    "pp2": (GRPO, "actor", {"actor.generate": "0,1 dp2", "actor.train": "0,1 pp2", "ref.logprobs": "0"}),
    "a critic": (("ppo", PPO_MODEL[1] | {"critic.optimizer.learning_rate": 1e-12}), "critic", None),
    "followed": (("grpo", GRPO[1] | {"reference.sync_every": 1, "reference.mixup": 1.0}), "actor", None),
}


@pytest.mark.parametrize("name", slow_but(("one process", "tp2"), CASES))
def test_masters_begin_as_what_is_stored(name: str, place: Path, placed: Callable[..., Recipe], tmp_path: Path) -> None:
    flow, role, places = CASES[name]
    keys: dict[str, Any] = flow[1] | STILL
    if places is not None:
        keys["plan"] = str(write_plan(place, f"exact-{name}", places))
    recipe = placed(flow[0], f"exact {name}", **keys)
    assert run(recipe).finished
    export_checkpoint(recipe.run_dir, tmp_path / "out", role=role, dtype="float32")
    begun, stored = (load_file(Path(folder) / "model.safetensors") for folder in (tmp_path / "out", recipe.model))
    compared = begun.keys() & stored.keys()
    assert compared >= {name for name in stored if name.startswith("model.layers")}
    for tensor in compared:
        torch.testing.assert_close(begun[tensor], stored[tensor], rtol=1e-6, atol=1e-9)
        if stored[tensor].dim() > 1:
            assert not torch.equal(stored[tensor].bfloat16().float(), stored[tensor]), "they have more digits"
