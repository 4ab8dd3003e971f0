"""Runs of a mixture of experts whose tokens are trained by the experts that they were drawn with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.plans import assert_equal_runs, planned
from tests.runs.test_resume import kill_and_resume
from tests.runs.written import logged

MakeRecipe = Callable[..., Recipe]
REPLAY: dict[str, Any] = {"sampling.router_replay": True}
UPDATES: dict[str, Any] = {"options": {"kl_coef": 0.05, "mini_batches": 2}, "optimizer.learning_rate": 0.02}
"""Several of them, which move routers: so what is replayed is not what routers choose."""


REWARD = "def variety(completions, **columns):\n    return [float(len(set(text))) for text in completions]\n"


@pytest.fixture
def experts(make_recipe: MakeRecipe, tmp_path: Path) -> MakeRecipe:
    """`make_recipe` of a tiny mixture of experts, with a reward that differs from sample to sample."""
    folder = save_tiny(tmp_path / "experts", family="qwen3_moe")
    (tmp_path / "variety.py").write_text(REWARD)
    tree = {"model": str(folder), "dtype": "float64", "reward.functions": [f"{tmp_path}/variety.py:variety"]}
    return lambda **keys: make_recipe(**(tree | REPLAY | keys))


def test_engine_and_trainer_agree(experts: MakeRecipe, tmp_path: Path) -> None:
    """With one update all is as without it; with two, the second one would have sent tokens elsewhere."""
    once = experts(run_dir=str(tmp_path / "once"))
    plain = experts(**{"run_dir": str(tmp_path / "plain"), "sampling.router_replay": False})
    assert run(once).finished
    assert run(plain).finished
    for row, other in zip(logged(once), logged(plain), strict=True):
        assert row.pop("actor/routed_otherwise") == 0
        assert row["training/rollout_logprobs_diff_max"] < 1e-9
        assert row["actor/loss"] == pytest.approx(other["actor/loss"], rel=1e-9)
        assert "actor/routed_otherwise" not in other
    twice = experts(run_dir=str(tmp_path / "twice"), **UPDATES)
    assert run(twice).finished
    assert all(0 < row["actor/routed_otherwise"] < 0.5 for row in logged(twice))


def test_rounding_sends_tokens_elsewhere(experts: MakeRecipe, tmp_path: Path) -> None:
    """In bfloat16 routers of an engine and a trainer choose otherwise for one token in a hundred; where they are told,
    the largest difference of a log-prob is a twentieth of what it was."""
    folder = save_tiny(tmp_path / "sixteen", family="qwen3_moe", num_local_experts=16, num_hidden_layers=4)
    keys = {"model": str(folder), "dtype": "bfloat16", "steps": 1, "sampling.max_response_tokens": 24}
    rows = {}
    for replays in (True, False):
        recipe = experts(**keys, **{"run_dir": str(tmp_path / f"{replays}"), "sampling.router_replay": replays})
        assert run(recipe).finished
        rows[replays] = logged(recipe)[0]
    assert 0 < rows[True]["actor/routed_otherwise"] < 0.1
    for key in ("training/rollout_logprobs_diff_max", "training/rollout_kl"):
        assert rows[True][key] < 0.2 * rows[False][key], (rows[True][key], rows[False][key])


WAYS: list[dict[str, Any]] = [
    {"max_staleness": 2, "partial_rollout": "recompute"},
    {"max_staleness": 2, "partial_rollout": "keep"},
    {"algorithm": "ppo", "options": {"old_logprobs": "engine"}, "critic.optimizer.router_aux_loss_coef": 0.01},
    {"algorithm": "remax"},
    {"options": {"dynamic_sampling": True}, "optimizer.router_aux_loss_coef": 0.01},
    {"lora.rank": 4},
]


@pytest.mark.parametrize("keys", slow_but(WAYS[:1], WAYS), ids=str)
def test_any_way_to_draw_and_train(experts: MakeRecipe, keys: dict[str, Any]) -> None:
    recipe = experts(steps=3, **keys)
    assert run(recipe).finished
    rows = logged(recipe)
    assert rows[0]["training/rollout_logprobs_diff_max"] < 1e-9
    assert all("actor/routed_otherwise" in row for row in rows)
    assert not any("ref/routed_otherwise" in row or "critic/routed_otherwise" in row for row in rows)


def test_turns(experts: MakeRecipe, tmp_path: Path) -> None:
    """Replies are read by the experts that the engine read them with."""
    (tmp_path / "reply.py").write_text(
        'GO_ON = {"role": "user", "content": "go on"}\n\n'
        "def reply(messages, **columns):\n    return GO_ON if len(messages) < 5 else None\n"
    )
    keys = {"turns.reply": f"{tmp_path}/reply.py:reply", "sampling.max_response_tokens": 60}
    recipe = experts(**keys, **{"sampling.stop_token_ids": [*range(3, 300, 8)]}, **UPDATES)
    assert run(recipe).finished
    for row in logged(recipe):
        assert row["training/rollout_logprobs_diff_max"] < 1e-9
        assert row["actor/routed_otherwise"] > 0


def test_greedy_samples_that_are_trained_on(experts: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "def flow(prompts, actor, reward):\n"
        "    samples = actor.generate(prompts, greedy=True)\n"
        "    actor.train(samples, loss=loss, mini_batches=2, advantages=reward.score(samples))\n\n\n"
        "def loss(batch, advantages):\n"
        "    return batch.aggregate(-advantages * batch.logprobs, 'token-mean')\n"
    )
    recipe = experts(**UPDATES | {"algorithm": f"{tmp_path}/flow.py:flow", "options": {}, "steps": 1})
    assert run(recipe).finished
    assert logged(recipe)[0]["actor/routed_otherwise"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
def test_prompts_that_begin_alike_and_were_read_by_several_versions(
    experts: MakeRecipe, tmp_path: Path, partial_rollout: str
) -> None:
    """Each group is trained by the experts that it was read with itself, whichever share a forward, on any plan."""
    questions = [f"the quick brown fox jumps over the lazy dog and asks: what is {i} plus 4?" for i in range(12)]
    (tmp_path / "alike.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    keys = UPDATES | {"steps": 5, "max_staleness": 2, "partial_rollout": partial_rollout, "tokens_per_version": 3}
    keys |= {"data.source": str(tmp_path / "alike.jsonl"), "sampling.max_response_tokens": 12}
    keys |= {"sampling.stop_token_ids": [*range(3, 300, 30)]}
    alone, small = (planned(experts, tmp_path, f"of{n}", **keys, micro_batch_tokens=n) for n in (4096, 60))
    apart = planned(experts, tmp_path, "apart", {"actor.generate": "1 | 2", "actor.train": "0,1 dp2"}, **keys)
    for recipe in (alone, small, apart):
        assert run(recipe).finished
    for recipe in (small, apart):
        assert_equal_runs(Path(recipe.run_dir), Path(alone.run_dir))


PLANS: dict[str, dict[str, str]] = {
    "stages and tensors": {
        "actor.generate": "0,1 pp2 | 2,3 tp2",
        "actor.train": "0,1,2,3 dp2 tp2",
        "ref.logprobs": "2",
    },
    "a stage each": {"actor.generate": "0 | 1", "actor.train": "0,1 pp2", "ref.logprobs": "1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_any_plan(experts: MakeRecipe, tmp_path: Path, name: str) -> None:
    """Samples that move between instances bring where their tokens went; stages say it of their own layers."""
    keys = UPDATES | {"samples_per_prompt": 6}
    alone = planned(experts, tmp_path, "alone", **keys)
    parted = planned(experts, tmp_path, "parted", PLANS[name], **keys)
    assert run(alone).finished
    assert run(parted).finished
    assert_equal_runs(Path(parted.run_dir), Path(alone.run_dir))
    assert all(row["actor/routed_otherwise"] > 0 for row in logged(parted))


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(experts: MakeRecipe, tmp_path: Path) -> None:
    """With batches that were generated ahead, whose experts are in the checkpoint."""
    keys = {"max_staleness": 1, "checkpoint.every": 1, "optimizer.learning_rate": 0.02}
    kill_and_resume(experts, tmp_path, points=range(6), seed=3, steps=3, **keys)


def test_a_dense_model_is_refused(make_recipe: MakeRecipe) -> None:
    with pytest.raises(ConfigError, match=r"`sampling.router_replay` is true, but .* is no mixture of experts; set it"):
        run(make_recipe(**REPLAY))
