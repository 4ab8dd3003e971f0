"""The doctor of a run on several ranks: it says what it says on one, and looks for causes where ranks share models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.runs.placed_runs import GRPO, where

pytestmark = pytest.mark.slow

WARM_FLOW = """
import dataclasses
import sys

from plait.dataflow import per_group
from plait.generation.sampler import SamplingRows


def warmer(cls, samplings, *rest):
    return sound(cls, [dataclasses.replace(one, temperature=1.2) for one in samplings], *rest)


if "pytest" not in sys.modules:  # in the processes of a run: its engines do not sample as they are asked to
    sound = SamplingRows.of.__func__
    SamplingRows.of = classmethod(warmer)


def warm(prompts, actor, ref, reward):
    samples = actor.generate(prompts)
    advantages = per_group(above, reward.score(samples), name="advantages")
    actor.train(samples, loss=pushed, advantages=advantages, kept=ref.logprobs(samples))


def above(scores):
    return scores - scores.mean()


def pushed(batch, advantages, kept):
    return batch.aggregate(-advantages * batch.logprobs + (batch.logprobs - kept) ** 2, "token-mean")
"""


def said(run_dir: Path) -> list[dict[str, Any]]:
    """What was found, step by step, without the figures of rounding."""
    rows = read_rows(run_dir / "doctor.jsonl")
    return [{key: row[key] for key in ("step", "rule", "name", "severity", "key")} for row in rows if "rule" in row]


@pytest.mark.parametrize(
    "calls",
    [
        {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 pp2"},
        {"actor.generate": "1", "actor.train": "1", "ref.logprobs": "0"},
    ],
    ids=["parts", "no actor at the leader"],
)
def test_it_says_what_it_says_on_one_rank(
    calls: dict[str, str], place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    name = f"doctor-{calls['actor.train'].split()[-1]}"
    one = reference("grpo", steps=2, **GRPO[1])
    several = placed("grpo", name, steps=2, **GRPO[1], **where(place, name, calls))
    run(several)
    assert said(one), "it has something to say of a model that never ends a response"
    assert said(several.run_dir) == said(one)


def test_a_frozen_model_in_other_parts_has_not_changed(place: Path, placed: Callable[..., Recipe]) -> None:
    """The reference cut by heads, then into stages."""
    keys = GRPO[1] | {"checkpoint.every": 1}
    for step, cut in enumerate(("0,1 tp2", "0,1 pp2"), start=1):
        calls = {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": cut}
        plan = where(place, f"doctor-frozen-{step}", calls)
        recipe = placed("grpo", "doctor-frozen", steps=step, **keys, **plan)
        run(recipe, resume=step > 1)
    assert {row["rule"] for row in said(recipe.run_dir)}.isdisjoint({"stale_reference", "frozen_role_changed"})
    baselines = [name for row in read_rows(recipe.run_dir / "doctor.jsonl") for name in row.get("baseline", ())]
    assert len([name for name in baselines if name.startswith("weights/ref")]) == 2, "each is compared with its own"


@pytest.mark.parametrize(
    ("actors", "sentence"),
    [
        ("0,1 dp2", "the engine samples at temperature 1.2, the recipe says 0.8"),
        ("0,1 tp2", "times the trainer's"),
        ("1", "times the trainer's"),
    ],
    ids=["whole models", "parts", "not the leader's"],
)
def test_a_cause_is_found_on_several_ranks(
    place: Path, placed: Callable[..., Recipe], actors: str, sentence: str
) -> None:
    """With whole models by computing again, on all ranks of the trainer; else by the metrics."""
    (place / "warm.py").write_text(WARM_FLOW)
    plan = {"actor.generate": actors, "actor.train": actors, "ref.logprobs": "0"}
    name = f"warm-{actors.split()[-1]}"
    keys = {"options": {}, "sampling.temperature": 0.8, "optimizer.learning_rate": 1e-6}
    recipe = placed(f"{place}/warm.py:warm", name, steps=1, **keys, **where(place, name, plan))
    run(recipe)
    rows = [row for row in read_rows(recipe.run_dir / "doctor.jsonl") if row.get("rule") == "rollout_mismatch"]
    assert rows
    assert rows[0]["name"] == "temperature"
    assert sentence in rows[0]["sentence"]
