"""Runs on several processes keep NCCL's rules, which gloo does not ask for: see `tests.nccl_rules`."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from plait.cost.connections import Connections, Sending, heads_of_keys, sharing
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Placed
from plait.layout.groups import axes
from plait.layout.params import Heads
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from plait.runtime.processes import supervisor
from plait.runtime.processes.worker import Worker
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.nccl_rules import Group, Log, Post, played, recording
from tests.runs import test_prefill
from tests.runs.placed_runs import GRPO, PLANS, where

QUICK = ("grpo-generates-tp2",)
DIVIDED, DIVIDED_GRPO = "grpo-divided-gradients", ("grpo", GRPO[1] | {"optimizer.shard_gradients": True})
ALL_PLANS = PLANS | {
    f"{DIVIDED}-2": (DIVIDED_GRPO, {"actor.generate": "0", "actor.train": "0,1 dp2", "ref.logprobs": "0"}),
    f"{DIVIDED}-4": (DIVIDED_GRPO, {"actor.generate": "0", "actor.train": "2,0,3,1 dp2 tp2", "ref.logprobs": "0"}),
    f"{DIVIDED}-stages": (DIVIDED_GRPO, {"actor.generate": "0", "actor.train": "2,0,3,1 dp2 pp2", "ref.logprobs": "0"}),
}
SHARED, SHARED_GRPO = "grpo-shared-weights", ("grpo", GRPO[1] | {"optimizer.shard_weights": True})
ALL_PLANS |= {
    f"{SHARED}-2": (SHARED_GRPO, {"actor.generate": "0", "actor.train": "0,1 dp2", "ref.logprobs": "0"}),
    f"{SHARED}-4": (SHARED_GRPO, {"actor.generate": "0", "actor.train": "2,0,3,1 dp2 tp2", "ref.logprobs": "0"}),
    f"{SHARED}-stages": (SHARED_GRPO, {"actor.generate": "0", "actor.train": "2,0,3,1 dp2 pp2", "ref.logprobs": "0"}),
    f"{SHARED}-adapted": (
        ("grpo", SHARED_GRPO[1] | {"lora.rank": 2}),
        {"actor.generate": "0,1 tp2", "actor.train": "1,0 dp2", "ref.logprobs": "1,0 dp2"},
    ),
}
MOVED = {"actor.generate": "0,1 pp2", "actor.train": "0,1 tp2", "ref.logprobs": "1,0 dp2"}
OTHERS = {"actor.generate": "0,1 tp2", "actor.train": "1,0 pp2", "ref.logprobs": "1,0 tp2"}
LATER = {
    "adapted": GRPO[1] | {"lora.rank": 2},
    "routed": GRPO[1]
    | {"model": "PLACE/qwen3_moe", "sampling.router_replay": True, "optimizer.router_aux_loss_coef": 0.01},
    "delta": GRPO[1] | {"model": "PLACE/qwen3_5_text"},
    "scanned": GRPO[1] | {"model": "PLACE/bamba"},
}
"""Adapters that are sharded; experts that go from stage to stage, and are balanced; recurrent layers."""
ALL_PLANS |= {f"{name}-moved": (("grpo", keys), MOVED) for name, keys in LATER.items()}
ALL_PLANS |= {f"{name}-others": (("grpo", keys), OTHERS) for name, keys in LATER.items()}
ALL_PLANS |= {f"prefill-{name}": plan for name, plan in test_prefill.PLANS.items()}
SEVERAL = [
    *(name for name in ALL_PLANS if name.partition("-")[0] in (*LATER, "prefill")),
    *(name for name in ALL_PLANS if name.startswith((DIVIDED, SHARED))),
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
    model = place / keys.get("model", "PLACE/").removeprefix("PLACE/")
    if not model.exists():
        save_tiny(model, family=model.name, weight_scale=0.05)
    recipe = placed(flow, f"nccl-{name}", **keys | where(place, name, plan) | {"steps": 2})
    assert run(recipe).finished
    found = sorted(recipe.run_dir.parent.glob(f"{recipe.run_dir.name}.nccl*"))
    assert len(found) > 1, "every rank has left its log"
    logs = {rank: pickle.loads(path.read_bytes()) for rank, path in enumerate(found)}
    assert played(logs) > 0
    _connects_what_is_predicted(recipe, logs)


def _connects_what_is_predicted(recipe: Recipe, logs: Mapping[int, Log]) -> None:
    """Each rank has the groups that a forecast counts; weights and samples take no way that it does not. What the
    leader gathers to write it down goes from host memory to host memory, which gloo does on GPUs."""
    run = prepare(recipe)
    placed = Placed(run.recipe, run.models, run.shapes, parameters_of(run.models), run.plan)
    heads, connects = heads_of_keys({model.role: run.shapes[model.name] for model in run.models}), placed.connects
    connections = Connections(run.plan.cluster, run.plan.num_ranks, heads)
    everyone: Group = (0, tuple(range(run.plan.num_ranks)))
    posts = {rank: [event for event in log if isinstance(event, Post)] for rank, log in logs.items()}
    made = [{post.group for post in posts[rank] if post.is_collective} - {everyone} for rank in sorted(logs)]
    assert [len(groups) for groups in made] == connections.num_groups(connects.placings).tolist()
    gathered = [Sending(place.home.mesh.ranks, (0,)) for place in placed.places.values()]
    ways: dict[Group, Any] = {everyone: connections.ways_of([*connects.sendings, *gathered])[0]}
    for instances in connects.sharing:
        ranks = tuple(sorted(rank for instance in instances for rank in instance.mesh.ranks))
        ways |= {group: connections.ways_between(instances)[0] for group in set().union(*made) if group[1] == ranks}
    for rank in sorted(logs):
        for post in posts[rank]:
            if not post.is_collective and post.pair is None:
                peers: Any = [(rank, op.peer) if op.kind == "send" else (op.peer, rank) for op in post.ops]
                taken = ways[post.group] if post.group in ways else _of_shared_heads(placed, heads, post.group)
                assert all(taken[peer] for peer in peers), f"{post} connects what nobody counts"


def _of_shared_heads(placed: Placed, heads: Mapping[str, Heads], group: Group) -> Mapping[tuple[int, int], bool]:
    """Way → whether it is between ranks of tp that share a head of keys, in a group of tp."""
    found = {}
    for role, place in placed.places.items():
        for axis in () if place.train is None else axes(place.train):
            if axis.name == "tp" and tuple(sorted(axis.ranks)) == group[1]:
                found |= {pair: True for ranks in sharing(axis.ranks, heads[role]) for pair in permutations(ranks, 2)}
    return defaultdict(bool, found)
