"""examples/self_distillation.py: whom a teacher is shown, and what is learnt of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.recipes.algorithm import load_flow
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.plans import metrics_of
from tests.runs.written import samples_of

MakeRecipe = Callable[..., Recipe]
EXAMPLE = Path(__file__).parents[2] / "examples/self_distillation.py"
FUNCTIONS: dict[str, Any] = load_flow(f"{EXAMPLE}:sdpo").__globals__


@pytest.mark.parametrize(
    ("scores", "others"),
    [
        ([0.0, 1.0, 1.5, 0.0], [1, 2, 1, 1]),
        ([0.0, 1.0, 0.0], [1, None, 1]),  # what is good itself learns nothing of itself
        ([0.0, 0.5], [None, None]),
    ],
)
def test_each_is_shown_the_first_other_that_is_good(scores: list[float], others: list[int | None]) -> None:
    assert FUNCTIONS["good_others"](np.array(scores), 1.0) == others
    assert FUNCTIONS["is_shown_one"](np.array(scores), 1.0) == [other is not None for other in others]


def test_what_a_prompt_says_more() -> None:
    scores, texts = np.array([0.0, 1.0]), ["a", "b"]
    hinted = FUNCTIONS["with_success"](["why?"] * 2, texts, scores, success=1.0)
    assert hinted == ["why?\n\nThis was a right answer:\n\nb\n\nAnswer the question.", "why?"]
    asked = [[{"role": "system", "content": "s"}, {"role": "user", "content": "why?"}]] * 2
    said = [[{"role": "assistant", "content": text}] for text in texts]
    first, second = FUNCTIONS["with_success"](asked, said, scores, success=1.0)
    assert first == [asked[0][0], {"role": "user", "content": hinted[0]}]
    assert second == asked[1]
    (told,) = FUNCTIONS["with_demonstration"](["why?"], ["so"])
    assert told == "why?\n\nThis is an example of a right answer:\n\nso\n\nAnswer in your own words."


@pytest.mark.parametrize("live", slow_but((True,), (True, False)))
def test_only_samples_that_are_shown_one_are_learnt(make_recipe: MakeRecipe, live: bool, tmp_path: Path) -> None:
    """Before the first update policy and reference are alike, so one step by either is the same."""
    recipe = make_recipe(
        algorithm=f"{EXAMPLE}:sdpo",
        options={"live": live, "top_k": 8, "success": 1.0},
        **{"reward.functions": [reward_of(tmp_path)], "data.prompt_template": "{question}"},
        steps=1,
    )
    assert run(recipe).finished
    rows = samples_of(recipe, 1)
    good = [row["reward_score"] >= 1 for row in rows]
    assert 0 < sum(good) < len(good)
    groups = [{i for i, row in enumerate(rows) if row["uid"].startswith(f"{uid}.")} for uid in range(3)]
    shown = [any(good[j] for g in groups if i in g for j in g - {i}) for i in range(len(rows))]
    assert [row["shown"] for row in rows] == shown
    (metrics,) = metrics_of(recipe.run_dir)
    assert metrics["actor/samples_left_out"] == shown.count(False)
    assert metrics["actor/divergence"] > 0.01


def reward_of(tmp_path: Path) -> str:
    """1 for some responses, by their tokens."""
    path = tmp_path / "some.py"
    path.write_text(
        "def some(completion_ids, **columns):\n    return [float(sum(ids) % 5 == 0) for ids in completion_ids]\n"
    )
    return f"{path}:some"


@pytest.mark.slow
def test_by_demonstrations_it_comes_to_say_what_these_say(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """With a slow average of the policy as the teacher; the divergence of the two falls."""
    (tmp_path / "sevens.jsonl").write_text('{"prompt": "what is 3 plus 4?", "answer": "7 7 7 7"}\n')
    recipe = make_recipe(
        algorithm=f"{EXAMPLE}:sdft",
        steps=30,
        prompts_per_step=2,
        options={"top_k": 8},
        **{
            "reward.functions": [],
            "data.source": str(tmp_path / "sevens.jsonl"),
            "reference.sync_every": 1,
            "reference.mixup": 0.05,
            "optimizer.learning_rate": 5e-3,
        },
    )
    assert run(recipe).finished
    divergences = [row["actor/divergence"] for row in metrics_of(recipe.run_dir)]
    assert np.mean(divergences[-5:]) < 0.5 * np.mean(divergences[:5])
