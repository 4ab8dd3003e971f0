"""Rewards for each turn of a sample, from the function that gives them to what is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.algorithms import oracle
from tests.cases import slow_but
from tests.runs.placed_runs import PPO, where
from tests.runs.plans import assert_equal_columns, assert_equal_runs
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.test_turns import PLACES, keys_of
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]

EXAMPLE = f"{Path(__file__).parents[2]}/examples/turn_credit.py:each_turn"
BY_TURN = """
def own(said):
    return [message["content"] for message in said if message["role"] == "assistant"]

def given(turns, **columns):
    return [[len(text) / 8 - 1 for text in own(said)] for said in turns]

def whole(turns, **columns):
    return [float(len(own(said))) for said in turns]

def short(turns, **columns):
    return [scores[:2] for scores in given(turns)]
"""
SUMMED = (
    "import math\nfrom by_turn import given as parts\ndef given(turns):\n    return [*map(math.fsum, parts(turns))]\n"
)


def rewarded(tmp_path: Path, *functions: str, **keys: Any) -> dict[str, Any]:
    (tmp_path / "by_turn.py").write_text(BY_TURN)
    (tmp_path / "summed.py").write_text(SUMMED)
    return keys_of(tmp_path) | {"reward.functions": [f"{tmp_path}/{name}" for name in functions]} | keys


def given_in(row: dict[str, Any]) -> list[float]:
    """What `given` says of a record's turns."""
    turns = row.get("turns", [{"role": "assistant", "content": row["response"]}])
    return [len(said["content"]) / 8 - 1 for said in turns if said["role"] == "assistant"]


def ends_in(row: dict[str, Any]) -> list[int]:
    """The place of the last drawn token of each turn."""
    return [at - 1 for at in (*(at for at, _ in row.get("replies", ())), len(row["token_ids"]))]


@pytest.mark.slow
def test_a_score_is_the_sum_of_those_of_turns(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """To the bit, wherever a score is one number: in training, records and evaluations."""
    written = []
    for name in ("by_turn", "summed"):
        keys = rewarded(tmp_path, f"{name}.py:given", run_dir=str(tmp_path / name))
        run(recipe := make_recipe(**keys, **{"evaluation.items": 3}))
        folder = recipe.run_dir
        files = [*sorted((folder / "samples").iterdir()), folder / "final/model.safetensors"]
        written.append([path.read_bytes() for path in files])
        rewards = [row["reward_score"] for row in samples_of(recipe, 1)]
        assert logged(recipe)[0]["rewards/given/mean"] == pytest.approx(np.mean(rewards))
        assert len(read_rows(folder / "evaluations.jsonl")) == 2
    assert written[0] == written[1]


@pytest.mark.parametrize("kl_coef", slow_but([0.1], [0.1, 0]))
def test_advantages_see_the_reward_of_each_turn(make_recipe: MakeRecipe, tmp_path: Path, kl_coef: float) -> None:
    """By hand, with replies between: one function scores each turn and one the response, each has a weight; truncated
    samples lose something."""
    gamma, lam = 0.9, 0.8
    options = {"kl_coef": kl_coef, "gamma": gamma, "lam": lam, "whiten_advantages": False, "credit": "turn"}
    options |= {"missing_eos_penalty": 0.25}
    keys = {"algorithm": "ppo", "options": options, "reward.weights": [0.5, 3.0]}
    keys |= {"critic.optimizer.learning_rate": 1e-2, "sampling.max_response_tokens": 90}
    run(recipe := make_recipe(**rewarded(tmp_path, "by_turn.py:given", "by_turn.py:whole", **keys)))
    rows = samples_of(recipe, 2)
    assert {len(row.get("replies", ())) for row in rows} >= {0, 2}
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        given, ends, zeros = given_in(row), ends_in(row), [0.0] * len(row["token_ids"])
        by_turn = np.zeros(len(row["token_ids"]))
        by_turn[ends] = [0.5 * score for score in given]
        by_turn[-1] += 3.0 * len(given)
        assert row["reward_score_by_turn"] == pytest.approx(by_turn)
        assert row["reward_score"] == pytest.approx(sum(by_turn))
        rewards = by_turn - kl_coef * np.subtract(row.get("actor_logprobs", zeros), row.get("ref_logprobs", zeros))
        rewards[-1] -= 0.25 * (row["finish_reason"] == "length")
        assert row["critic_token_rewards" if kl_coef else "penalised_scores"] == pytest.approx(rewards)
        expected = oracle.gae(rewards.tolist(), row["critic_values"], 0.0, gamma, lam)
        assert row["critic_advantages"] == pytest.approx(expected, rel=1e-5, abs=1e-7)
        returns = np.add(row["critic_advantages"], row["critic_values"])
        assert row["critic_returns"] == pytest.approx(returns, rel=1e-5, abs=1e-7)


def test_where_turns_are_scored_wrongly_their_samples_are_left_out(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = {"algorithm": EXAMPLE, "options": {}, "reward.on_error": "drop"}
    run(recipe := make_recipe(**rewarded(tmp_path, "by_turn.py:short", **keys)))
    rows = samples_of(recipe, 1)
    lost = [len(given_in(row)) > 2 for row in rows]
    assert ["reward_score" not in row for row in rows] == lost
    assert logged(recipe)[0]["reward/dropped"] == sum(lost) > 0
    for row in (row for row, is_lost in zip(rows, lost, strict=True) if not is_lost):
        assert [row["reward_score_by_turn"][end] for end in ends_in(row)] == pytest.approx(given_in(row))


@pytest.mark.slow
def test_the_example_compares_turns_with_the_same_turns(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """By hand, from the records: one advantage for each turn, of what follows it."""
    run(recipe := make_recipe(**rewarded(tmp_path, "by_turn.py:given", algorithm=EXAMPLE, options={})))
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in samples_of(recipe, 2):
        groups.setdefault(row["uid"].split(".")[0], []).append(row)
    several = 0
    for rows in groups.values():
        to_go = [[sum(given_in(row)[k:]) for k in range(len(given_in(row)))] for row in rows]
        for row, own in zip(rows, to_go, strict=True):
            starts = [0, *(end + 1 for end in ends_in(row))]
            for k, value in enumerate(own):
                others = [of_other[k] for of_other in to_go if len(of_other) > k]
                expected = (value - np.mean(others)) / (np.std(others, ddof=1) + 1e-4) if len(others) > 1 else 0.0
                found = row["advantages"][starts[k] : starts[k + 1]]
                assert found == pytest.approx([expected] * len(found))
                several += k > 0 and expected != 0
    assert several > 2


CASES: dict[str, tuple[tuple[str, dict[str, Any]], str | dict[str, str]]] = {
    "turn-rewards-mixed-2": (PPO, PLACES["turns-mixed-2"][1]),
    "turn-rewards-example-2": ((EXAMPLE, {"options": {}}), "split 2"),
    "turn-rewards-model-2": (PLACES["turns-model-split-2"][0], "split 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_changes_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    (flow, keys), plan = CASES[name]
    options = keys["options"] | ({"credit": "turn"} if flow == "ppo" else {})
    functions = () if "reward.functions" in keys else ("by_turn.py:given",)
    keys = rewarded(place, *functions, **(keys | {"options": options, "sampling.max_response_tokens": 60}))
    recipe = placed(flow, name, **keys, **where(place, name, plan))
    run(recipe)
    rows = samples_of(recipe, 1)
    assert any("turns" in row for row in rows)
    for row in rows:
        assert sum(row["reward_score_by_turn"]) == pytest.approx(row["reward_score"])
        assert functions or row["reward_score_by_turn"][-1] == row["reward_score"], "a model scores the whole response"
    one = reference(flow, **keys)
    assert_equal_runs(recipe.run_dir, one)
    assert_equal_columns(recipe.run_dir, one)


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """With a batch that was generated ahead: the turns of its tokens are told again, and its scores are asked for
    again."""
    keys = {"algorithm": EXAMPLE, "options": {}, "steps": 4, "max_staleness": 1, "partial_rollout": "off"}
    keys = rewarded(tmp_path, "by_turn.py:given", **keys, **{"checkpoint.every": 1, "evaluation.items": 2})
    whole, killed = (make_recipe(**keys, run_dir=str(tmp_path / name)) for name in ("whole", "killed"))
    run(whole)
    kill_in_step(killed, 2)
    run(killed, resume=True)
    assert result_of(killed.run_dir) == result_of(whole.run_dir)
