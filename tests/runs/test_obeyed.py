"""What a plan says is what a run does: counted in its measured timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from plait.models.files.saving import save_pretrained
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.schedule.plan import Plan
from plait.schedule.timeline import Span, Timeline, load_any
from tests.models.tiny import tiny_model
from tests.runs.plan_files import write_plan

FLOW = """
from plait.dataflow import per_group


def flow(prompts, actor, reward):
    samples = actor.generate(prompts)
    before = actor.logprobs(samples)
    advantages = per_group(centred, reward.score(samples), name="advantages")
    actor.train(samples, loss=loss, advantages=advantages, before=before)


def centred(scores):
    return scores - scores.mean()


def loss(batch, advantages, before):
    return batch.aggregate(-advantages * (batch.logprobs - before), "token-mean")
"""


def spans_of(recipe: Recipe, call: str) -> list[Span]:
    return [s for s in load_any(Path(recipe.run_dir) / "trace.json").spans if s.action.startswith(call)]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one device", "two devices"])
def test_scoring_has_micro_batches_of_its_own(make_recipe: Callable[..., Recipe], tmp_path: Path, size: int) -> None:
    """All 12 samples fit one training micro-batch of a device; no two of them one of 8 tokens, prompts included."""
    (tmp_path / "flow.py").write_text(FLOW)
    ranks = ",".join(map(str, range(size))) + (f" dp{size}" if size > 1 else "")
    plan = write_plan(
        tmp_path,
        "sizes",
        {
            "actor.generate": ranks,
            "actor.train": f"{ranks} micro_batch_tokens=10000",
            "actor.logprobs": f"{ranks} micro_batch_tokens=8",
        },
    )
    recipe = make_recipe(algorithm=f"{tmp_path}/flow.py:flow", options={}, plan=str(plan), steps=1)
    run(recipe)
    trained = Counter(span.rank for span in spans_of(recipe, "actor.train/") if span.kind in ("F", "B"))
    scored = Counter(span.rank for span in spans_of(recipe, "actor.logprobs/"))
    assert trained.total() <= 2 * size, trained
    assert scored.total() == 12, scored


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)], ids=str)
def test_stages_have_the_layers_that_the_plan_gives_them(
    make_recipe: Callable[..., Recipe], tmp_path: Path, stages: Sequence[int]
) -> None:
    """Each device generates with all three layers, so it is sent those that it does not train, and no others. The tied
    embedding is on both; the first lacks the last norm of 32 numbers. What the file predicts is for who knows what: the
    run predicts it for itself."""
    save_pretrained(tiny_model("llama", num_hidden_layers=3), tmp_path / "model")
    places = {"actor.generate": "0,1 dp2", "actor.train": "0,1 pp2", "ref.logprobs": "0"}
    plan = Plan.load(write_plan(tmp_path, "stages", places))
    placements = tuple(replace(p, stages=tuple(stages)) if p.mode == "train" else p for p in plan.placements)
    predicted = Timeline((Span("actor.train/0F0", "F", 1, 0.0, 0.5, role="actor"),))
    path = tmp_path / "plan.json"
    Plan("stages", 2, placements, predicted=predicted).save(path)
    recipe = make_recipe(model=str(tmp_path / "model"), plan=str(path), steps=2)
    run(recipe)
    received = {0: 0, 1: 0}
    for span in spans_of(recipe, "actor.weights/"):
        if span.kind == "RECV" and span.step == 1:
            received[span.rank] += span.bytes
    assert received[1] > 0
    assert (received[0] - 4 * 32) * stages[0] == received[1] * stages[1]
    kept = Plan.load(Path(recipe.run_dir) / "plan.json")
    assert kept.predicted not in (None, predicted)
    assert next(p for p in kept.placements if p.mode == "train").stages == tuple(stages)
