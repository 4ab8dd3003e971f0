"""A flow that reads numbers of the data: of prompts, of examples and of pairs; on one process and on two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import DataError
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.runtime.api import run
from tests.runs.plans import assert_equal_runs, metrics_of, planned
from tests.runs.written import samples_of

FLOWS = """
from plait.dataflow import Resample, per_batch, per_group


def of_prompts(prompts, actor, reward):
    samples = actor.generate(prompts, resample=Resample(keep=any_at_all, reward=reward, max_rounds=2))
    advantages = per_group(weighed, reward.score(samples), samples.data("weight"), name="advantages")
    actor.train(samples, loss=pushed, advantages=advantages)


def any_at_all(scores):
    return True


def weighed(scores, weights):
    assert (weights == weights[0]).all()
    return weights * (scores - scores.mean() + 0.5)


def of_examples(examples, actor):
    actor.train(examples, loss=pushed, mask=examples.trained, advantages=examples.data("weight"))


def of_pairs(pairs, actor):
    actor.train(pairs, loss=pushed, whole_groups=True, advantages=pairs.data("weight"))


def pushed(batch, advantages):
    batch.log("weight", advantages)
    return batch.aggregate(-advantages * batch.logprobs, "seq-mean-token-mean")
"""


@pytest.fixture
def make(tiny_folder: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """`make("of_prompts", "name of the run", plan)`."""
    (tmp_path / "flows.py").write_text(FLOWS)
    (tmp_path / "reward.py").write_text("def length(completions, **columns):\n    return [*map(len, completions)]\n")
    words = {"completion": "a fox", "chosen": "yes", "rejected": "no"}
    rows = [{"prompt": f"what is {i} plus 4?", "weight": i / 2, **words} for i in range(9)]
    data = tmp_path / "weighed.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def get(flow: str, name: str, plan: dict[str, str] | None = None, **keys: Any) -> Recipe:
        drawn = {
            "samples_per_prompt": 4,
            "reward.functions": [f"{tmp_path}/reward.py:length"],
            "sampling.max_response_tokens": 6,
        }
        tree = {
            "model": str(tiny_folder),
            "algorithm": f"{tmp_path}/flows.py:{flow}",
            "steps": 2,
            "prompts_per_step": 3,
            "data.source": str(data),
            "optimizer.learning_rate": 1e-3,
            "threads": 1,
            **(drawn if flow == "of_prompts" else {}),
        }
        return planned(
            lambda **all_keys: load_recipe(None, list((tree | all_keys).items())), tmp_path, name, plan, **keys
        )

    return get


def test_of_prompts_they_are_those_of_each_samples_row(make: Callable[..., Recipe]) -> None:
    recipe = make("of_prompts", "one")
    run(recipe)
    rows = samples_of(recipe, 1)
    assert len({row["data/weight"] for row in rows}) == 3
    for row in rows:
        of_group = [other for other in rows if other["uid"].split(".")[0] == row["uid"].split(".")[0]]
        mean = sum(other["reward_score"] for other in of_group) / len(of_group)
        assert row["advantages"] == pytest.approx(row["data/weight"] * (row["reward_score"] - mean + 0.5))
    assert metrics_of(recipe.run_dir)[0]["weight"] == pytest.approx(
        sum(row["advantages"] * len(row["token_ids"]) for row in rows) / sum(len(row["token_ids"]) for row in rows)
    )


@pytest.mark.parametrize("flow", ["of_examples", "of_pairs"])
def test_of_given_samples_they_weigh_the_loss(make: Callable[..., Recipe], flow: str) -> None:
    """Rows in the order of the file: 0, 1/2 and 1 in the first batch, of responses that are all as long."""
    recipe = make(flow, "one", **{"data.shuffle": False})
    run(recipe)
    assert [row["weight"] for row in metrics_of(recipe.run_dir)] == pytest.approx([0.5, 2.0])


def test_held_out_samples_have_them_too(make: Callable[..., Recipe], tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(f'{{"prompt": "{w}?", "completion": "a fox", "weight": {w}}}\n' for w in (7, 9)))
    keys = {"evaluation.sets": [str(held_out)], "evaluation.items": 2, "steps": 1}
    outcome = run(make("of_examples", "one", **keys))
    assert outcome.before is not None
    assert outcome.before.metrics()["eval/weight"] == 8.0


def test_held_out_prompts_need_none_as_no_flow_reads_them(make: Callable[..., Recipe], tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "7?"}\n{"prompt": "9?"}\n')
    keys = {"evaluation.sets": [str(held_out)], "evaluation.items": 2, "steps": 1}
    assert run(make("of_prompts", "one", **keys)).after is not None


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["of_prompts", "of_examples", "of_pairs"])
def test_a_plan_does_not_change_them(make: Callable[..., Recipe], flow: str) -> None:
    one = make(flow, "one")
    run(one)
    generates = {"actor.generate": "0,1 dp2"} if flow == "of_prompts" else {}
    two = make(flow, "two", {**generates, "actor.train": "0,1 dp2"})
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)


@pytest.mark.parametrize("flow", ["of_prompts", "of_examples"])
def test_a_row_without_one_is_named_before_the_run(make: Callable[..., Recipe], flow: str, tmp_path: Path) -> None:
    recipe = make(flow, "one")
    path = Path(recipe.data.source)
    path.write_text(path.read_text() + '{"prompt": "b", "weight": null, "completion": "c"}\n')
    with pytest.raises(DataError, match=r"weighed.jsonl:10: the flow reads a number in .*`weight`, found null"):
        run(recipe)
    assert not recipe.run_dir.exists()
