"""Runs over several sources: their shares, their evaluation, exact resume, and the same on two devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.data.json_rows import written
from tests.runs.plans import assert_equal_runs

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def two_sources(make_recipe: MakeRecipe, tmp_path: Path) -> MakeRecipe:
    (tmp_path / "by_source.py").write_text(
        "def length(completions, kind, log_metric, **columns):\n"
        "    log_metric('reward', 7.0 if kind[0] == 'word' else 3.0)\n"
        "    return [len(text) + (100.0 if one == 'word' else 0.0) for text, one in zip(completions, kind)]\n"
    )
    sums = written(tmp_path / "sums.jsonl", [{"prompt": f"{n} + 4 =", "total": n + 4} for n in range(12)])
    words = written(tmp_path / "words.jsonl", [{"prompt": f"word {n}", "kind": "word"} for n in range(8)])

    def make(**keys: Any) -> Recipe:
        return make_recipe(
            **{
                "data.source": sums,
                "data.weight": 2,
                "data.more": [{"source": words, "weight": 1}],
                "reward.functions": [f"{tmp_path}/by_source.py:length"],
                "evaluation.items": 2,
                "evaluation.every": 2,
                "dtype": "float64",
                **keys,
            }
        )

    return make


def test_a_run_over_two_sources(two_sources: MakeRecipe, tmp_path: Path) -> None:
    """4 steps of 3 prompts: 8 sums and 4 words, of 10 and 6 that are not held out."""
    assert run(two_sources(run_dir=str(tmp_path / "straight"), steps=4)).finished
    rows = read_rows(tmp_path / "straight" / "metrics.jsonl")
    assert [rows[-1][f"training/epoch{name}"] for name in ("", "/sums", "/words")] == pytest.approx(
        [12 / 16, 8 / 10, 4 / 6]
    )
    for row in read_rows(tmp_path / "straight" / "evaluations.jsonl"):
        assert row["eval/words/reward"] > 100 > row["eval/sums/reward"]
        assert row["eval/reward"] == pytest.approx((row["eval/words/reward"] + row["eval/sums/reward"]) / 2)
        assert row["eval/words/dropped"] == 0
        logged = [row[f"eval/{source}logged/reward"] for source in ("", "words/", "sums/")]
        assert logged == [5.0, 7.0, 3.0], "what functions log is of each source, too"


@pytest.mark.slow
def test_a_run_over_two_sources_goes_on_on_two_devices(two_sources: MakeRecipe, tmp_path: Path) -> None:
    """Two steps, then the others on two devices: the same prompts, tokens and weights."""
    straight, resumed = (two_sources(run_dir=str(tmp_path / name), steps=4) for name in ("straight", "resumed"))
    run(straight)
    run(resumed.model_copy(update={"steps": 2}))
    placed = resumed.model_copy(update={"plan": "colocated", "devices": 2})
    outcome = run(placed, resume=True)
    assert outcome.finished
    assert_equal_runs(tmp_path / "resumed", tmp_path / "straight")
    assert outcome.after is not None
    assert outcome.after[""].by_source().keys() == {"sums", "words"}


def test_pairs_of_two_sources(two_sources: MakeRecipe, tmp_path: Path) -> None:
    """The loss on held-out pairs of each, and of both together: half the pairs are of each."""
    sources = [
        written(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"{name} {n}", "chosen": " 7" * n, "rejected": " 4"} for n in range(1, 9)],
        )
        for name in ("left", "right")
    ]
    recipe = two_sources(
        algorithm="dpo",
        steps=1,
        options={},
        **{
            "data.source": sources[0],
            "data.weight": None,
            "data.more": [{"source": sources[1]}],
            "reward.functions": [],
            "sampling.max_response_tokens": 256,
            "samples_per_prompt": 8,
            "run_dir": str(tmp_path / "pairs"),
        },
    )
    outcome = run(recipe)
    assert outcome.after is not None
    metrics = outcome.after.metrics()
    for name in ("actor/loss", "rewards/margins", "logps/chosen"):
        halves = [metrics[f"eval/{source}/{name}"] for source in ("left", "right")]
        assert metrics[f"eval/{name}"] == pytest.approx(sum(halves) / 2)
        assert halves[0] != halves[1]
