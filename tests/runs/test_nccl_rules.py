"""Runs on several processes keep NCCL's rules, which gloo does not ask for: see `tests.nccl_rules`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.processes import supervisor
from plait.runtime.processes.worker import Worker
from tests.cases import slow_but
from tests.nccl_rules import played, recording
from tests.runs.placed_runs import GRPO, PLANS, where

QUICK = ("grpo-generates-tp2",)
DIVIDED, DIVIDED_GRPO = "grpo-divided-gradients", ("grpo", GRPO[1] | {"optimizer.shard_gradients": True})
ALL_PLANS = PLANS | {
    f"{DIVIDED}-2": (DIVIDED_GRPO, {"actor.generate": "0", "actor.train": "0,1 dp2", "ref.logprobs": "0"}),
    f"{DIVIDED}-4": (DIVIDED_GRPO, {"actor.generate": "0", "actor.train": "2,0,3,1 dp2 tp2", "ref.logprobs": "0"}),
}
SEVERAL = [
    *(name for name in ALL_PLANS if name.startswith(DIVIDED)),
    *(name for name in PLANS if not name.endswith("-1")),
]


class RecordedWorker(Worker):
    """A rank of a run that leaves its log beside the folder of the run."""

    def __init__(self, context: Any, job: Any) -> None:
        self._entered = recording()
        self._log = self._entered.__enter__()
        super().__init__(context, job)
        self._path = log_path(job.run_dir, context.rank)

    def run(self) -> Any:
        try:
            return super().run()
        finally:
            self._path.write_bytes(pickle.dumps(self._log))


def log_path(run_dir: Path, rank: int) -> Path:
    return run_dir.with_name(f"{run_dir.name}.nccl{rank}")


@pytest.mark.parametrize("name", slow_but(QUICK, SEVERAL))
def test_a_placed_run_keeps_them(
    name: str, place: Path, placed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "Worker", RecordedWorker)
    (flow, keys), plan = ALL_PLANS[name]
    recipe = placed(flow, f"nccl-{name}", **keys | where(place, name, plan) | {"steps": 2})
    assert run(recipe).finished
    found = sorted(recipe.run_dir.parent.glob(f"{recipe.run_dir.name}.nccl*"))
    assert len(found) > 1, "every rank has left its log"
    assert played({rank: pickle.loads(path.read_bytes()) for rank, path in enumerate(found)}) > 0
