"""Where the calls of a flow run changes nothing of what is computed: tokens, metrics, weights. float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.observe.run_log import read_rows
from plait.policy import packing
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import GRPO, LONG, PLANS, PPO, SUMMED, Flow, where
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_columns, assert_equal_runs

QUICK_STEPS = {"grpo-followed-2": 3, "kept-tp2": 2}
"""In the third step the reference has followed."""


@pytest.mark.parametrize("name", slow_but(tuple(QUICK_STEPS), PLANS))
def test_a_plan_changes_nothing(
    name: str,
    place: Path,
    placed: Callable[..., Recipe],
    reference: Callable[..., Path],
) -> None:
    (flow, keys), plan = PLANS[name]
    if name in QUICK_STEPS:
        keys = {**keys, "steps": QUICK_STEPS[name]}
    recipe = placed(flow, name, **keys, **where(place, name, plan))
    outcome = run(recipe)
    assert outcome.finished
    assert_equal_runs(recipe.run_dir, reference(flow, **keys))
    if "fusion" in keys:
        assert sum(row.get("perf/samples_moved", 0) for row in read_rows(recipe.run_dir / "metrics.jsonl")) > 0
        assert_equal_columns(recipe.run_dir, reference(flow, **keys))
        assert scored_early(recipe.run_dir) >= SCORED[flow] - TOO_LATE.get(name, set())


def test_what_all_prompts_begin_with_is_computed_once(
    place: Path, placed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one process, and by two that have a share of the rows each; the result is that of prompts computed whole."""
    (flow, keys), plan = PLANS["grpo-nothing-stays-2"]
    keys = {
        **keys,
        "steps": 2,
        "micro_batch_tokens": 400,
        "data.prompt_template": "say what it is, as well as you can say it: {question}",
    }
    computed = {}
    for name, on in {"root-1": {}, "root-2": where(place, "root-2", plan), "no-root-1": {}}.items():
        if name == "no-root-1":
            monkeypatch.setattr(packing, "LEAST_ROOT", 1 << 20)
        recipe = placed(flow, name, **keys, **on)
        assert run(recipe).finished
        rows = read_rows(recipe.run_dir / "metrics.jsonl")
        computed[name] = [row["training/tokens_computed"] for row in rows if "training/tokens_computed" in row]
    for name in ("root-1", "root-2"):
        assert_equal_runs(place / name, place / "no-root-1")
        assert all(few < many for few, many in zip(computed[name], computed["no-root-1"], strict=True))


SCORED = {
    "ppo": {"ref.logprobs", "actor.logprobs", "critic.values", "reward.score"},
    "safe_rlhf": {
        "ref.logprobs",
        "actor.logprobs",
        "critic.values",
        "reward.score",
        "cost_critic.values",
        "cost.score",
    },
    "distill": {"ref.top_logprobs"},
}
"""Calls of models that score what is generated."""
TOO_LATE = {"ppo-fused-mixed-4": {"critic.values", "reward.score"}}
"""Of plans, calls whose weights are brought when all is generated, and one whose two ranks are seldom free together."""


def scored_early(run_dir: Path) -> set[str]:
    """Calls of which, in some step, samples were scored while others were still generated."""
    spans = load_any(run_dir / "trace.json").spans
    ends: dict[int | None, float] = {}
    for span in spans:
        if span.whole == "actor.generate":
            ends[span.step] = max(span.end_s, ends.get(span.step, 0.0))
    return {span.whole for span in spans if span.kind == "SCORE" and span.start_s < ends[span.step]}


SHARED: dict[str, tuple[Flow, dict[str, str], dict[str, float]]] = {
    "grpo-2": (
        ("grpo", GRPO[1] | LONG | {"steps": 2}),
        {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "1,0 dp2"},
        {"actor": 0.05, "ref": 3.0},
    ),
    "ppo-4": (
        ("ppo", PPO[1] | LONG),
        {
            "actor.generate": "0,1,2,3 dp4",
            "actor.train": "0,1,2,3 dp2 pp2",
            "ref.logprobs": "0,1,2,3 dp4",
            "critic.train": "0,1,2,3 dp4",
            "critic.values": "0,1,2,3 dp2 tp2",
        },
        {},
    ),
}
"""What a pair of a query and a key takes in tokens, where the plan says other than what follows from shapes."""


@pytest.mark.parametrize("name", slow_but(["grpo-2"], SHARED))
def test_samples_that_are_divided_by_predicted_time_change_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    (flow, keys), plan, pair_tokens = SHARED[name]
    path = write_plan(place, f"shared-{name}", plan, policies={"shares": pair_tokens})
    recipe = placed(flow, f"shared-{name}", **keys, plan=str(path))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference(flow, **keys))


BALANCED = {"model": "PLACE/mixture", "optimizer.router_aux_loss_coef": 0.1}
"""A mixture of experts, and the loss of its routers."""
PARTED: dict[str, tuple[Flow, dict[str, str]]] = {
    "grpo-2": (
        ("grpo", GRPO[1] | {"checkpoint_activations": True, "steps": 2}),
        {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 pp2"},
    ),
    "grpo-divided-gradients-4": (
        ("grpo", GRPO[1] | {"optimizer.shard_gradients": True, "steps": 3}),
        {"actor.generate": "0,1 dp2", "actor.train": "0,1,2,3 dp2 tp2", "ref.logprobs": "0"},
    ),
    "grpo-divided-gradients-8": (
        ("grpo", GRPO[1] | {"optimizer.shard_gradients": True, "steps": 3}),
        {"actor.generate": "0,1 dp2", "actor.train": "0,1,2,3,4,5,6,7 dp2 tp2 pp2", "ref.logprobs": "0"},
    ),
    "ppo-4": (
        PPO,
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1,2,3 tp2 pp2",
            "ref.logprobs": "0,1,2,3 dp2 tp2",
            "critic.train": "0,1,2,3 tp4",
            "critic.values": "0,1,2,3 dp2 tp2",
        },
    ),
}


@pytest.mark.parametrize("name", slow_but(["grpo-2"], PARTED))
def test_tokens_that_ranks_part_between_layers_change_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    (flow, keys), plan = PARTED[name]
    recipe = placed(flow, f"parted-{name}", **keys, **where(place, f"parted-{name}", plan), sequence_parallel=True)
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference(flow, **keys))


CHANGED = {
    "a divided one, then stages": ({}, "0,1 dp2", "0,1 pp2"),
    "sharded tokens, then a divided one": ({}, "0,1 tp2", "0,1 dp2"),
    "divided stages, then sharded tokens": ({}, "0,1,2,3 dp2 pp2", "1,0 tp2"),
    "sharded tokens, then divided stages": ({}, "0,1 tp2", "2,0,3,1 dp2 pp2"),
    "a mixture, parted, then divided stages": (BALANCED, "0,1 tp2", "0,1,2,3 dp2 pp2"),
    "a mixture, divided stages, then parted ones": (BALANCED, "0,1,2,3 dp2 pp2", "0,1,2,3 tp2 pp2"),
}
"""What is trained, by which layout a run begins, and by which it goes on."""


@pytest.mark.parametrize("name", slow_but(tuple(CHANGED)[:1], CHANGED))
def test_what_ranks_divide_may_change_where_a_run_goes_on(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    """Gradients over dp, tokens over tp: each key is set where it divides something."""
    (what, begun, then), run_name = CHANGED[name], f"changed-{tuple(CHANGED).index(name)}"
    keys = {**GRPO[1], "steps": 2, **what}
    save_mixture(place)

    def recipe(steps: int, train: str) -> Recipe:
        plan = {"actor.generate": "0,1 dp2", "actor.train": train, "ref.logprobs": "0"}
        divides = {"optimizer.shard_gradients": "dp2" in train, "sequence_parallel": "tp2" in train}
        return placed("grpo", run_name, **keys | {"steps": steps}, **divides, **where(place, run_name, plan))

    assert run(recipe(1, begun)).finished
    assert run(recipe(2, then), resume=True).finished
    assert_equal_runs(place / run_name, reference("grpo", **keys))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "train"),
    [(SUMMED[1], "0,1,2,3 dp2 pp2"), (GRPO[1] | BALANCED | {"sampling.router_replay": True}, "0,1 tp2")],
    ids=["divided stages", "a mixture, parted"],
)
def test_a_run_that_divides_goes_on_to_the_bit(
    what: dict[str, Any], train: str, place: Path, placed: Callable[..., Recipe]
) -> None:
    save_mixture(place)
    plan = {"actor.generate": "0,1 dp2", "actor.train": train, "ref.logprobs": "0"}
    divides = {"optimizer.shard_gradients": "dp2" in train, "sequence_parallel": "tp2" in train}

    def recipe(name: str, steps: int) -> Recipe:
        keys = what | {"dtype": "float32", "steps": steps} | divides
        return placed("grpo", f"{name}-{train[-3:]}", **keys, **where(place, f"bits-{train[-3:]}", plan))

    for going_on, steps in ((False, 1), (True, 3)):
        assert run(recipe("parts", steps), resume=going_on).finished
    whole = recipe("whole", 3)
    assert run(whole).finished
    assert_equal_runs(recipe("parts", 3).run_dir, whole.run_dir, tolerance=0.0)


def save_mixture(place: Path) -> None:
    """The model of BALANCED."""
    if not (place / "mixture").exists():
        save_tiny(place / "mixture", family="qwen3_moe", weight_scale=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["auto", 1, 3])
def test_stages_in_exact_mode_generate_what_one_process_does_to_the_bit(
    groups: str | int, placed: Callable[..., Recipe], place: Path
) -> None:
    """Steps in flight have other samples in them, and the rest of the step is the same program."""
    keys = {**GRPO[1], "steps": 3, "dtype": "float32", "sampling.exact": True}
    name, plan = f"exact-{groups}", {"actor.generate": "0,1 pp2", "actor.train": "0", "ref.logprobs": "0"}
    ring = placed("grpo", name, **keys, **{"sampling.decode_groups": groups}, **where(place, name, plan))
    alone = placed("grpo", f"{name}-alone", **keys)
    for recipe in (ring, alone):
        assert run(recipe).finished
    assert bits_of(ring.run_dir) == bits_of(alone.run_dir)


def bits_of(run_dir: Path) -> dict[str, bytes]:
    """Samples with their log-probs, and the weights."""
    files = [*sorted((run_dir / "samples").iterdir()), run_dir / "final/model.safetensors"]
    return {file.name: file.read_bytes() for file in files}
