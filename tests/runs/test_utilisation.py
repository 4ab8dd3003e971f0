"""How much of their devices the calls of a run use: by hand from the samples that it wrote, and the same work wherever
it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.cost.estimate import model_shape
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.schedule.timeline import load_any
from tests.runs.placed_runs import PPO, SUMMED
from tests.runs.plan_files import write_plan
from tests.runs.profiles import keep_made_up_profile
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]
Row = Mapping[str, Any]

LAYERS = 2 * (32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48)
"""Weights of the tiny model's two layers: projections of four heads of 8 with two of keys and values, and the MLP."""
PAIR = 2 * 4 * 4 * 8
"""Of a pair of a query and a key in two layers."""
HEAD = 32 * 320


def flops(row: Row, call: str, devices: int = 1) -> float:
    """That a step's row says of a call."""
    return row[f"perf/tflops/{call}"] * 1e12 * row[f"timing_s/{call}"] * devices


def work_of(samples: list[dict[str, Any]], last: int = 0) -> tuple[int, int, int]:
    """Tokens, pairs and rows of the head of a forward over a step's samples, each prompt once.

    Args:
        last: tokens at the end of each response that nothing is computed of.
    """
    prompts = {tuple(row["prompt_ids"]) for row in samples}
    tokens = sum(map(len, prompts))
    pairs = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in prompts)
    for row in samples:
        before, said = len(row["prompt_ids"]), len(row["token_ids"]) - last
        tokens += said
        pairs += said * before + said * (said + 1) // 2
    return tokens, pairs, sum(len(row["token_ids"]) for row in samples)


def forward(tokens: int, pairs: int, heads: int) -> int:
    """Of a language model."""
    return 2 * tokens * LAYERS + pairs * PAIR + 2 * heads * HEAD


def test_what_each_call_has_computed(make_recipe: MakeRecipe, tiny_folder: Path) -> None:
    """By hand: a forward of each sample to score, three for each pass of training; nothing is said of a peak that
    nobody knows. Mini-batches part whole groups, so that they compute no prompt a second time."""
    shape = model_shape(str(tiny_folder))
    assert (shape.layers * (shape.attention_parameters + 3 * shape.hidden * shape.intermediate)) == LAYERS
    recipe = make_recipe(options={"kl_coef": 0.05, "mini_batches": 3, "epochs": 2})
    assert run(recipe).finished
    for step, row in enumerate(logged(recipe), start=1):
        samples = samples_of(recipe, step)
        whole = work_of(samples)
        assert flops(row, "actor.generate") == pytest.approx(forward(*work_of(samples, last=1)))
        assert flops(row, "ref.logprobs") == pytest.approx(forward(*whole))
        assert flops(row, "actor.train") == pytest.approx(2 * 3 * forward(*whole))
        assert row["training/tokens_computed"] == 2 * whole[0]
        assert not [name for name in row if name.startswith("perf/mfu/")]
        assert "perf/tflops/reward.score" not in row, "functions are no model"


def test_mini_batches_that_part_a_group_compute_its_prompt_each(make_recipe: MakeRecipe) -> None:
    """Twelve samples of three groups in as many mini-batches: twelve prompts."""
    recipe = make_recipe(options={"kl_coef": 0.0, "mini_batches": 12}, steps=1)
    assert run(recipe).finished
    samples, (row,) = samples_of(recipe, 1), logged(recipe)
    parts = [forward(*work_of([sample])) for sample in samples]
    assert flops(row, "actor.train") == pytest.approx(3 * sum(parts))


def test_the_share_of_a_measured_peak(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """1e9 operations per second, by a kept profile of these layers, this dtype and these threads; another dtype is
    none of them."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    recipe = make_recipe(steps=1)
    keep_made_up_profile(recipe)
    assert run(recipe).finished
    (row,) = logged(recipe)
    for call in ("actor.generate", "ref.logprobs", "actor.train"):
        assert row[f"perf/mfu/{call}"] == pytest.approx(row[f"perf/tflops/{call}"] * 1e12 / 1e9)
    other = make_recipe(steps=1, dtype="float64", run_dir=str(tmp_path / "other"))
    assert run(other).finished
    assert not [name for name in logged(other)[0] if name.startswith("perf/mfu/")]


def test_what_is_drawn_ahead_is_not_told(make_recipe: MakeRecipe) -> None:
    """A step's generation is of other samples than it trains on."""
    recipe = make_recipe(max_staleness=1)
    assert run(recipe).finished
    for row in logged(recipe):
        told = {name for name in row if name.startswith("perf/tflops/")}
        assert "perf/tflops/actor.generate" not in told
        assert "perf/tflops/actor.train" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [
        {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 tp2", "critic.train": "1"},
        {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0", "critic.train": "0,1 pp2"},
    ],
    ids=["dp2", "tp2-pp2"],
)
def test_ranks_that_share_a_call_share_its_work(
    places: dict[str, str], place: Path, placed: MakeRecipe, reference: Callable[..., Path], request: Any
) -> None:
    """The sum over all devices is what one process computes, though ranks that share a group compute its prompt each;
    the critic's head has one output."""
    name = f"utilisation-{request.node.callspec.id}"
    recipe = placed(*PPO[:1], name, **PPO[1], steps=2, plan=str(write_plan(place, f"plan-{name}", places)))
    assert run(recipe).finished
    alone = read_rows(reference(PPO[0], **PPO[1], steps=2) / "metrics.jsonl")
    for step, (row, one) in enumerate(zip(logged(recipe), alone, strict=True), start=1):
        tokens, pairs, heads = work_of(samples_of(recipe, step))
        critic = 2 * tokens * LAYERS + pairs * PAIR + 2 * heads * 32
        assert flops(one, "critic.train") == pytest.approx(3 * critic)
        for call, on in places.items():
            devices = len(on.split()[0].split(","))
            assert flops(row, call, devices) == pytest.approx(flops(one, call)), call


def test_losses_of_the_same_steps_have_one_number(place: Path, placed: MakeRecipe) -> None:
    """The optimizer steps of both are under the name of one."""
    recipe = placed(*SUMMED[:1], "utilisation-summed", **SUMMED[1], steps=1)
    assert run(recipe).finished
    (row,) = logged(recipe)
    told = {name for name in row if name.startswith("perf/tflops/") and "train" in name}
    assert told == {"perf/tflops/actor.train+actor.train#2"}


@pytest.mark.slow
def test_roles_that_train_in_one_pipeline_have_one_number(place: Path, placed: MakeRecipe) -> None:
    both = {
        "actor.generate": "0,1 dp2",
        "actor.train": "0,1 pp2 schedule=fused",
        "ref.logprobs": "0",
        "critic.train": "1,0 pp2 schedule=fused",
    }
    fused = placed(*PPO[:1], "utilisation-fused", **PPO[1], steps=1, plan=str(write_plan(place, "plan-fused", both)))
    assert run(fused).finished
    (row,) = logged(fused)
    told = {name for name in row if name.startswith("perf/tflops/") and "train" in name}
    assert told == {"perf/tflops/critic.train+actor.train"}
    tokens, pairs, heads = work_of(samples_of(fused, 1))
    trained = 3 * (forward(tokens, pairs, heads) + 2 * tokens * LAYERS + pairs * PAIR + 2 * heads * 32)
    spans = [s for s in load_any(fused.run_dir / "trace.json").spans if s.step == 1]
    busy = [sum(s.duration_s for s in spans if s.rank == rank and ".train" in s.action) for rank in (0, 1)]
    assert row["perf/tflops/critic.train+actor.train"] * 1e12 * 2 * max(busy) == pytest.approx(trained, rel=1e-3)
