"""Runs whose training weights lie inside the generation's: results, memory and moves against runs with both apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.cost.estimate import model_shape
from plait.cost.held_parameters import parameter_rows
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Placed
from plait.cost.placement import resolve_plan
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES, role_models
from plait.runtime.api import run
from plait.schedule.timeline import load_any
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs

MakeRecipe = Callable[..., Recipe]
FLOW = """
import os

from plait.dataflow import per_group
from plait.cost.aliasing import Aliasing
from plait.workers.rank_state import RankState

nested, own, moving_all = Aliasing.of, Aliasing.own_elements, RankState.moving_all
Aliasing.of = lambda self, role, rank: {} if "APART" in os.environ else nested(self, role, rank)
Aliasing.own_elements = lambda self, role, rank: {} if "APART" in os.environ else own(self, role, rank)


def noted(self, role, numbers):
    if "HELD" in os.environ:
        models = [model for one in self.roles.values() for model in one.parts.values()]
        storages = [p.untyped_storage() for model in models for p in model.module.parameters()]
        held = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
        with open(f"{os.environ['HELD']}-{self.rank}", "w") as file:
            received = sum(self.roles[role].moves[number].traffic.received_bytes(self.rank) for number in numbers)
            file.write(f"{held} {received}")
    return moving_all(self, role, numbers)


RankState.moving_all = noted


def flow(prompts, actor, reward):
    samples = actor.generate(prompts)
    advantages = per_group(above, reward.score(samples), name="advantages")
    logprobs = actor.logprobs(samples)
    actor.train(samples, loss=pushed, mini_batches=2, advantages=advantages, old_logprobs=logprobs)


def above(scores):
    return scores - scores.mean()


def pushed(batch, advantages, old_logprobs):
    return batch.aggregate(-advantages * (batch.logprobs - old_logprobs).exp(), "token-mean")
"""
REWARD = "def lengths(completions, **columns):\n    return [len(text) + text.count('7') for text in completions]\n"
TP = {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "actor.logprobs": "0,1 dp2"}
PP = {"actor.generate": "0,1 dp2", "actor.train": "0,1 pp2 schedule=gpipe", "actor.logprobs": "0,1 tp2"}
REPLICAS = {"actor.generate": "0,1,2,3 dp4", "actor.train": "0,1,2,3 dp2 tp2", "actor.logprobs": "0,2,1,3 dp2 tp2"}
REGROUPED = {"actor.generate": "0,2,1,3 dp2 tp2", "actor.train": "0,1,2,3 tp4", "actor.logprobs": "0,1,2,3 tp4"}
PLAIN = {"actor.generate": "0,1,2,3 dp2 tp2", "actor.train": "0,1,2,3 dp2 pp2", "actor.logprobs": "0,1,2,3 tp4"}
HOSTED = {"actor.generate": "0,1 tp2", "actor.train": "0,1 dp2", "actor.logprobs": "1,0 pp2"}


@pytest.fixture
def recipe_of(make_recipe: MakeRecipe, tmp_path: Path) -> Callable[..., Recipe]:
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "lengths.py").write_text(REWARD)

    def make(name: str, plan: dict[str, str], **keys: Any) -> Recipe:
        own = {"algorithm": f"{tmp_path}/flow.py:flow", "options": {}, "dtype": "bfloat16", "checkpoint.every": 1}
        own["reward.functions"] = [f"{tmp_path}/lengths.py:lengths"]
        where = {"plan": str(write_plan(tmp_path, f"plan-{name}", plan)), "run_dir": str(tmp_path / name)}
        return make_recipe(**own | where | keys)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        pytest.param(TP, "bfloat16", id="tp2"),
        pytest.param(PP, "bfloat16", id="stages"),
        pytest.param(REPLICAS, "bfloat16", id="replicas"),
        pytest.param(REGROUPED, "bfloat16", id="regrouped"),
        pytest.param(PLAIN, "bfloat16", id="halves of stages"),
        pytest.param(HOSTED, "bfloat16", id="training hosts"),
        pytest.param(HOSTED, "float64", id="masters host"),
    ],
)
def test_results_are_those_of_parts_that_lie_apart(
    recipe_of: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, str], dtype: str
) -> None:
    """Bit for bit: tokens, metrics, weights, masters. What passes is the same, and what is planned; nothing is copied.
    On every rank the weights take the bytes of which a dry run speaks."""
    nested, apart = recipe_of("nested", plan, dtype=dtype), recipe_of("apart", plan, dtype=dtype)
    monkeypatch.setenv("HELD", str(tmp_path / "in-one"))
    run(nested)
    expected = weight_rows(nested)
    num_ranks = len(expected)
    in_one = [noted(tmp_path, "in-one", rank) for rank in range(num_ranks)]
    assert [held for held, _ in in_one] == expected
    monkeypatch.setenv("HELD", str(tmp_path / "in-two"))
    monkeypatch.setenv("APART", "1")
    run(apart)
    assert [noted(tmp_path, "in-two", rank) for rank in range(num_ranks)] == [
        (held, received) for held, (_, received) in zip(weight_rows(apart), in_one, strict=True)
    ]
    assert all(one < two for one, two in zip(expected, weight_rows(apart), strict=True))
    assert_equal_runs(nested.run_dir, apart.run_dir, tolerance=0.0)
    assert states(nested.run_dir) == states(apart.run_dir)
    moved, others = moves(nested.run_dir), moves(apart.run_dir)
    assert moved["SEND"] == moved["RECV"] == others["RECV"] == sum(received for _, received in in_one)
    assert moved["COPY"] == 0 < others["COPY"]


@pytest.mark.slow
def test_a_checkpoint_does_not_know_where_weights_lay(
    recipe_of: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved of parts in one memory, resumed with parts that lie apart, and the other way round; bit for bit."""
    run(recipe_of("undisturbed", TP, steps=3))
    run(recipe_of("changed", TP, steps=1))
    with monkeypatch.context() as patched:
        patched.setenv("APART", "1")
        run(recipe_of("changed", TP, steps=2), resume=True)
    run(recipe_of("changed", TP, steps=3), resume=True)
    assert_equal_runs(tmp_path / "changed", tmp_path / "undisturbed", tolerance=0.0)
    assert states(tmp_path / "changed") == states(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [TP, PP], ids=["tp2", "stages"])
def test_weights_under_adapters_are_held_for_each_part_and_never_moved(
    recipe_of: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, str]
) -> None:
    """As a dry run says, with the adapters beside them, of which alone something passes after an update."""
    recipe = recipe_of("adapted", plan, **{"lora.rank": 2})
    monkeypatch.setenv("HELD", str(tmp_path / "adapted"))
    run(recipe)
    adapter = (recipe.run_dir / "final" / "adapter_model.safetensors").stat().st_size
    for rank, expected in enumerate(weight_rows(recipe)):
        held, received = noted(tmp_path, "adapted", rank)
        assert 0 < held - expected < 2 * adapter, "one for each part"
        assert 0 < received < adapter


def noted(tmp_path: Path, name: str, rank: int) -> tuple[int, int]:
    """(bytes of weights that a rank holds, bytes that its plan has it receive)."""
    held, received = map(int, (tmp_path / f"{name}-{rank}").read_text().split())
    return held, received


def weight_rows(recipe: Recipe) -> list[int]:
    """Bytes of weights on each rank, as a dry run says."""
    flow = trace_algorithm(load_flow(recipe.algorithm), recipe.options, (*MODEL_ROLES, *REWARD_ROLES))
    models = role_models(flow, recipe)
    shapes, parameters = {one.name: model_shape(one.name) for one in models}, parameters_of(models)
    plan = resolve_plan(recipe, flow, models, shapes)
    rows = [parameter_rows(rank, Placed(recipe, models, shapes, parameters, plan)) for rank in range(plan.num_ranks)]
    return [dict(one)[f"actor: weights ({recipe.dtype})"] for one in rows]


def states(run_dir: Path) -> dict[str, bytes]:
    """Files of the last checkpoint with masters and moments."""
    last = max((run_dir / "checkpoints").glob("step-*"))
    files = {path.name: path.read_bytes() for path in last.glob("actor.*")}
    assert files, sorted(path.name for path in last.iterdir())
    return files


def moves(run_dir: Path) -> dict[str, int]:
    """Kind → bytes of what was moved of the actor's weights in the last step, on all ranks."""
    found: dict[str, int] = dict.fromkeys(("SEND", "RECV", "COPY", "VIEW"), 0)
    for span in load_any(run_dir / "trace.json").spans:
        if span.action.startswith("actor.weights/") and span.step == 2:
            found[span.kind] += span.bytes
    return found
