"""Several ranks against one: the same metrics, scores and weights, whatever dp, tp and pp."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from plait.launch.group import Group
from plait.layout.mesh import Parallelism
from plait.schedule.generators import gpipe, one_at_a_time
from tests.cases import slow_but
from tests.training.worker import STEPS, build, reference, run, trainer_of

RANKS = range(4)
OWN = ("tokens_computed",)
"""Metrics that say how much was computed, not what: cutting a group pays its prompt again."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> Any:
    """The reference of a case, made once: its metrics and its file."""
    made: dict[Any, tuple[list[dict[str, float]], Path]] = {}
    folder = tmp_path_factory.mktemp("alone")

    def of(case: str, model: str, dtype: str, **options: Any) -> tuple[list[dict[str, float]], Path]:
        key = (case, model, dtype, *sorted(options.items()))
        if key not in made:
            path = folder / f"{len(made)}.pt"
            made[key] = reference(case, model, dtype, path, **options), path
        return made[key]

    return of


def check(four: Group, alone: Any, sizes: Parallelism, case: str, model: str, dtype: str, near: float, **options: Any):
    expected, path = alone(case, model, dtype)
    handle = four.submit(RANKS, "compare", sizes, case, model, dtype, str(path), options)
    found = [answer for answer in handle.result(120.0) if answer is not None]
    assert len(found) == sizes.size
    for metrics, scores_off, weights_off in found:
        assert metrics == found[0][0], "every rank says the same, bit for bit"
        assert scores_off <= near
        assert weights_off <= near
    for mine, theirs in zip(found[0][0], expected, strict=True):
        assert_near(mine, theirs, near)


def assert_near(found: dict[str, float], expected: dict[str, float], near: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not name.endswith(OWN):
            assert found[name] == pytest.approx(value, rel=near, abs=near), name


def test_data_parallel_adapters(four, alone):
    """Their buffers are the adapter's alone."""
    check(four, alone, Parallelism(dp=2), "grpo", "adapter", "float64", 1e-9)


def test_float32(four, alone):
    check(four, alone, Parallelism(dp=2), "grpo", "tied", "float32", 1e-5)


def test_working_weights_of_bfloat16_are_the_masters(four, alone):
    """Which are float32, and only on the rank that updates them. To rounding the step is that of one rank."""
    check(four, alone, Parallelism(dp=2), "scores", "tied", "bfloat16", 0.2)


SAVED = [Parallelism(dp=2), Parallelism(tp=2, pp=2), Parallelism(), Parallelism(dp=2, pp=2)]


@pytest.fixture(scope="module")
def straight() -> list[dict[str, float]]:
    """Twice as many steps as others take, on one rank."""
    return run("grpo", trainer_of("grpo", build("grpo", "tied", "float64")), range(2 * STEPS))[0]


@pytest.mark.parametrize(("before", "after"), slow_but([(SAVED[0], SAVED[1])], pairwise([*SAVED, SAVED[0]])), ids=str)
def test_state_that_one_layout_saves_any_other_loads(four, straight, tmp_path, before, after):
    """Half of the steps under one layout, half under another: as if all were under the first."""
    asked = ("grpo", "tied", "float64", str(tmp_path))
    first = four.submit(RANKS, "state_files", before, *asked, load=False, options={}).result(120.0)
    second = four.submit(RANKS, "state_files", after, *asked, load=True, options={}).result(120.0)
    assert all(metrics == second[0] for metrics in second[: after.size])
    for mine, theirs in zip([*first[0], *second[0]], straight, strict=True):
        assert_near(mine, theirs, 1e-9)


@pytest.mark.parametrize(
    ("dp", "case"),
    slow_but([(4, "pairs")], [(2, "grpo"), (2, "critic"), (4, "grpo"), (4, "pairs"), (4, "scores")]),
)
def test_data_parallel(four, alone, dp, case):
    """Some ranks get nothing of some mini-batches: three pairs that stay whole are spread over four."""
    check(four, alone, Parallelism(dp=dp), case, "tied", "float64", 1e-9)


SKIPS = [Parallelism(dp=2), Parallelism(dp=2, pp=2), Parallelism(tp=2)]


@pytest.mark.parametrize("sizes", slow_but([SKIPS[1]], SKIPS), ids=str)
def test_all_ranks_skip_a_step_that_is_not_finite(four, sizes):
    found = [answer for answer in four.submit(RANKS, "skip", sizes).result(60.0) if answer is not None]
    assert len(found) == sizes.size
    metrics, unchanged, refusal = found[0]
    assert (metrics["training/skipped_steps"], metrics["training/nonfinite_losses"]) == (1, 1)
    assert unchanged
    assert refusal.startswith("2 optimizer steps in a row")
    assert found == [found[0]] * sizes.size


PARTS = [
    Parallelism(tp=2),
    Parallelism(pp=2),
    Parallelism(tp=4),
    Parallelism(pp=4),
    Parallelism(pp=2, stages=(1, 3)),
    Parallelism(dp=2, tp=2),
    Parallelism(dp=2, pp=2),
    Parallelism(tp=2, pp=2),
]


@pytest.mark.parametrize("sizes", slow_but([PARTS[7]], PARTS), ids=str)
def test_parts_of_a_model(four, alone, sizes):
    check(four, alone, sizes, "grpo", "tied", "float64", 1e-9)


OTHERS = [("pairs", "biased"), ("critic", "tied")]


@pytest.mark.parametrize(
    ("sizes", "case", "model"),
    slow_but(
        [(Parallelism(tp=2), *OTHERS[0]), (Parallelism(pp=2), *OTHERS[1])],
        [(sizes, *other) for other in OTHERS for sizes in (*PARTS[:3], PARTS[-1])],
    ),
    ids=str,
)
def test_parts_of_other_models(four, alone, sizes, case, model):
    """An untied head, biases of keys that two ranks share; a scalar model."""
    check(four, alone, sizes, case, model, "float64", 1e-9)


ADAPTED = [(Parallelism(tp=2), "adapter"), (Parallelism(dp=2, tp=2), "biased adapter"), (PARTS[7], "adapter")]


@pytest.mark.parametrize(
    ("sizes", "model", "case"),
    slow_but(
        [(*ADAPTED[1], "pairs"), (*ADAPTED[2], "critic")],
        [(*of, case) for of in ADAPTED for case in ("grpo", "pairs", "critic")],
    ),
    ids=str,
)
def test_adapters_on_parts(four, alone, sizes, model, case):
    """A and B are cut with their layers; biases of keys are frozen, and B of those that ranks share has a sum."""
    check(four, alone, sizes, case, model, "float64", 1e-9)


BALANCED = [
    (Parallelism(tp=2, pp=2), "experts", "grpo", {"splits_tokens": True}),
    (Parallelism(dp=2, pp=2), "experts", "pairs", {"checkpoint_activations": True}),
    (Parallelism(pp=4), "experts", "critic", {"pipeline": gpipe}),
    (Parallelism(dp=4), "experts", "grpo", {"shard_gradients": True, "micro_batch_tokens": 40}),
    (Parallelism(dp=2, pp=2), "experts", "grpo", {"shard_gradients": True, "micro_batch_tokens": 40}),
    (Parallelism(tp=2), "experts", "critic", {"checkpoint_activations": True}),
    (Parallelism(pp=4), "adapter of experts", "grpo", {}),
    (Parallelism(dp=2, tp=2), "adapter of experts", "pairs", {"splits_tokens": True}),
    (Parallelism(tp=2, pp=2), "experts", "critic", {}),
]


def named(value):
    """The same in every process that collects tests; a dict by its keys."""
    return " ".join(value) or "plain" if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("sizes", "model", "case", "options"), slow_but(BALANCED[:2], BALANCED), ids=named)
def test_experts_are_balanced_alike(four, alone, sizes, model, case, options):
    """Sums of the layers of all stages, of which one has no router, meet on the last, and their gradients go back."""
    check(four, alone, sizes, case, model, "float64", 1e-9, **options)


REPLAYED = [
    (Parallelism(tp=2, pp=2), "experts", {"splits_tokens": True, "checkpoint_activations": True}),
    (Parallelism(tp=2, pp=2), "experts", {}),
    (Parallelism(dp=2, pp=2), "experts", {"checkpoint_activations": True}),
    (Parallelism(dp=2, tp=2), "experts", {"micro_batch_tokens": 40}),
    (Parallelism(pp=4), "adapter of experts", {"pipeline": gpipe}),
]


@pytest.mark.parametrize(("sizes", "model", "options"), slow_but(REPLAYED[:1], REPLAYED), ids=named)
def test_tokens_go_to_the_same_experts(four, alone, sizes, model, options):
    """Each stage is told those of its layers, the first of which has none; how often routers would have chosen others
    is counted over all of them."""
    check(four, alone, sizes, "replayed", model, "float64", 1e-9, **options)


DIVIDED = [
    (sizes, case, model, run_elements)
    for sizes, case, model in (
        (Parallelism(dp=2), "grpo", "tied"),
        (Parallelism(dp=4), "pairs", "tied"),
        (Parallelism(dp=2, tp=2), "grpo", "tied"),
        (Parallelism(dp=2, tp=2), "grpo", "biased"),
        (Parallelism(dp=4), "grpo", "adapter"),
        (Parallelism(dp=2, tp=2), "grpo", "biased adapter"),
        (Parallelism(dp=2), "critic", "tied"),
        (Parallelism(tp=2), "grpo", "tied"),
        (Parallelism(dp=2, pp=2), "grpo", "tied"),
        (Parallelism(dp=2, pp=2), "pairs", "biased"),
        (Parallelism(dp=2, pp=2), "critic", "tied"),
        (Parallelism(dp=2, pp=2), "summed", "adapter"),
    )
    for run_elements in (5000, 1 << 23)
]


@pytest.mark.parametrize(
    ("sizes", "case", "model", "run_elements"),
    slow_but([DIVIDED[3], DIVIDED[4], DIVIDED[16]], DIVIDED),
    ids=str,
)
def test_gradients_that_are_divided(four, alone, sizes, case, model, run_elements):
    """Every rank holds those of its share alone. Some have fewer micro-batches than others, some none; runs of a few
    parameters, cut ones, and one run of all; biases that ranks of tp share; with one rank of dp there is one share."""
    options = {"shard_gradients": True, "run_elements": run_elements, "micro_batch_tokens": 40}
    check(four, alone, sizes, case, model, "float64", 1e-9, **options)


SHARED = [
    (Parallelism(dp=2), "grpo", "tied", {}),
    (Parallelism(dp=4), "pairs", "tied", {"run_elements": 5000}),
    (Parallelism(dp=2), "critic", "tied", {}),
    (Parallelism(dp=2), "grpo", "biased", {"checkpoint_activations": True}),
    (Parallelism(dp=4), "grpo", "experts", {"run_elements": 5000}),
    (Parallelism(dp=4), "scores", "biased", {"run_elements": 5000, "checkpoint_activations": True}),
    (Parallelism(dp=2, tp=2), "grpo", "tied", {}),
    (Parallelism(dp=2, tp=2), "summed", "biased", {"splits_tokens": True}),
    (Parallelism(dp=2, pp=2), "grpo", "tied", {"run_elements": 5000}),
    (Parallelism(dp=2, pp=2), "pairs", "biased", {"checkpoint_activations": True}),
    (Parallelism(dp=2, pp=2), "critic", "tied", {"pipeline": gpipe}),
    (Parallelism(dp=2, pp=2), "replayed", "experts", {"pipeline": one_at_a_time}),
    (Parallelism(dp=4), "grpo", "adapter", {}),
    (Parallelism(dp=2, tp=2), "pairs", "biased adapter", {}),
    (Parallelism(dp=2, pp=2), "summed", "adapter", {"checkpoint_activations": True}),
    (Parallelism(dp=2, pp=2), "critic", "adapter of experts", {}),
    (Parallelism(tp=2), "grpo", "tied", {}),
]


def test_gradients_that_are_divided_and_activations_that_are_computed_again(four, alone):
    """As on a GPU, where the second is the default: each gradient still comes once."""
    options = {"shard_gradients": True, "run_elements": 5000, "checkpoint_activations": True}
    check(four, alone, Parallelism(dp=2), "grpo", "tied", "float64", 1e-9, **options)


@pytest.mark.parametrize(
    ("sizes", "case", "model", "options"),
    slow_but([SHARED[8]], SHARED),
    ids=named,
)
def test_weights_that_are_shared(four, alone, sizes, case, model, options):
    """Every rank holds its share of them and gathers a layer at a time, those that have fewer micro-batches, too."""
    check(four, alone, sizes, case, model, "float64", 1e-9, shard_weights=True, micro_batch_tokens=40, **options)


SUMMED = [
    (Parallelism(dp=2, pp=2), "tied", {}),
    (Parallelism(dp=4), "tied", {"shard_gradients": True, "micro_batch_tokens": 40}),
    (Parallelism(tp=2, pp=2), "experts", {}),
    (Parallelism(pp=4), "adapter", {"pipeline": gpipe}),
    (Parallelism(pp=2), "biased", {"micro_batches": 1, "checkpoint_activations": True}),
    (Parallelism(dp=4), "experts", {"shard_gradients": True, "run_elements": 5000}),
    (Parallelism(dp=2, pp=2), "tied", {"shard_gradients": True, "micro_batch_tokens": 40, "pipeline": gpipe}),
    (Parallelism(dp=2, pp=2), "tied", {"shard_gradients": True, "micro_batch_tokens": 40, "pipeline": one_at_a_time}),
    (Parallelism(dp=2, tp=2), "biased adapter", {"micro_batch_tokens": 40}),
]


@pytest.mark.parametrize(("sizes", "model", "options"), slow_but(SUMMED[:2], SUMMED), ids=named)
def test_losses_add_up_alike(four, alone, sizes, model, options):
    """Two losses in each step. Of the three samples of the second some ranks have none; one pipeline computes both."""
    check(four, alone, sizes, "summed", model, "float64", 1e-9, **options)


HOW: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline": gpipe},
    "one at a time": {"pipeline": one_at_a_time, "micro_batches": 1},
    "checkpoints": {"checkpoint_activations": True},
}


@pytest.mark.parametrize("how", slow_but(["gpipe"], HOW))
def test_the_result_does_not_depend_on_the_schedule(four, alone, how):
    check(four, alone, Parallelism(dp=2, pp=2), "grpo", "tied", "float64", 1e-9, **HOW[how])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [Parallelism(tp=2), Parallelism(pp=2)], ids=str)
def test_parts_in_float32(four, alone, sizes):
    check(four, alone, sizes, "grpo", "tied", "float32", 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [Parallelism(dp=2), *PARTS], ids=str)
@pytest.mark.parametrize("model", ["tied", "biased"])
@pytest.mark.parametrize("case", ["grpo", "pairs", "critic", "scores"])
def test_every_case_under_every_layout(four, alone, sizes, case, model):
    check(four, alone, sizes, case, model, "float64", 1e-9)
