"""Every built-in algorithm through the whole engine: what a run writes, a known optimum, exact resume after a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.recipes.algorithm import BUILT_IN, load_flow
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"kl_coef": 0.05}),
    "dapo": ("grpo", {"clip_high": 0.28, "aggregation": "token-mean", "overlong_buffer_tokens": 2, "epochs": 2}),
    "gspo": ("grpo", {"ratio": "sequence-mean", "clip_low": 3e-4, "clip_high": 4e-4, "mini_batches": 2}),
    "rloo": ("rloo", {"kl_coef": 0.05}),
    "rloo-loss": ("rloo", {"kl_coef": 0.05, "kl_in": "loss", "kl_estimator": "k2", "normalize_advantages": True}),
    "reinforce_pp": ("reinforce_pp", {"kl_coef": 0.05, "mini_batches": 2}),
    "reinforce_pp-baseline": (
        "reinforce_pp",
        {"group_baseline": True, "kl_coef": 0.05, "kl_in": "loss", "kl_estimator": "k2"},
    ),
    "remax": ("remax", {"kl_coef": 0.05}),
}


def test_every_algorithm_is_run_here() -> None:
    from tests.runs.test_flows import FLOWS

    assert {algorithm for algorithm, _ in VARIANTS.values()} | set(FLOWS) == BUILT_IN.keys()
    for name in BUILT_IN:
        assert load_flow(name).__name__ == name


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_of_each(make_recipe: MakeRecipe, name: str) -> None:
    algorithm, options = VARIANTS[name]
    recipe = make_recipe(algorithm=algorithm, options=options)
    outcome = run(recipe)
    assert outcome.finished
    expected = {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy", "actor/grad_norm", "actor/loss"}
    expected |= {"reward", "reward_std", "frac_reward_zero_std", "response_length/mean", "timing_s/actor.generate"}
    expected |= {"kl", "timing_s/ref.logprobs"} if "kl_coef" in options else set()
    for row in logged(recipe):
        assert expected <= row.keys()
        assert row["training/skipped_steps"] == 0
        assert row["training/optimizer_steps"] == options.get("mini_batches", 1) * options.get("epochs", 1)
    first = logged(recipe)[0]
    if "kl_coef" in options:
        assert first["kl"] == pytest.approx(0, abs=1e-9 if "mini_batches" not in options else 1e-2)
    for sample in samples_of(recipe, 1):
        assert "finished" not in sample, "the sample says `finish_reason` already"
        assert ("advantages" in sample or "score_over_greedy" in sample) == (
            sample.get("rollout") != "actor.generate#2"
        )


def test_remax_keeps_the_greedy_rollout_apart(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(algorithm="remax", options={})
    run(recipe)
    row, samples = logged(recipe)[0], samples_of(recipe, 1)
    greedy = [s for s in samples if s["rollout"] == "actor.generate#2"]
    drawn = [s for s in samples if s["rollout"] == "actor.generate"]
    assert (len(greedy), len(drawn)) == (3, 12)
    assert row["reward"] == pytest.approx(sum(s["reward_score"] for s in drawn) / 12)
    assert row["greedy/reward"] == pytest.approx(sum(s["reward_score"] for s in greedy) / 3)
    assert {"rewards/count_sevens/mean", "greedy/rewards/count_sevens/mean"} <= row.keys()
    baseline = {s["uid"].split(".")[0]: s["reward_score"] for s in greedy}
    for sample in drawn:
        assert sample["score_over_greedy"] == sample["reward_score"] - baseline[sample["uid"].split(".")[0]]


AGAINST_THE_REFERENCE = """
def against(prompts, actor, ref, reward):
    theirs, mine = ref.generate(prompts, samples_per_prompt=2), actor.generate(prompts)
    better = per_group(over_the_mean, reward.score(mine), reward.score(theirs), name="advantages")
    actor.train(mine, loss=loss, advantages=better)

def over_the_mean(mine, theirs):
    return mine - theirs.mean()

def loss(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")
"""


@pytest.mark.parametrize("max_staleness", slow_but([1], [0, 1]))
def test_samples_to_compare_with_do_not_stand_for_those_that_train(
    make_recipe: MakeRecipe, tmp_path: Path, max_staleness: int
) -> None:
    """What a frozen reference draws has its first version always, which makes nobody stale."""
    flow, reward = tmp_path / "against.py", tmp_path / "letters.py"
    reward.write_text("def letters(completions, **columns):\n    return [len(set(text)) for text in completions]\n")
    flow.write_text("from plait.dataflow import per_group\n" + AGAINST_THE_REFERENCE)
    keys = {"algorithm": f"{flow}:against", "reward.functions": [f"{reward}:letters"], "doctor.stop_on": "error"}
    recipe = make_recipe(**keys, options={}, steps=4, max_staleness=max_staleness)
    run(recipe)
    row, samples = logged(recipe)[-1], samples_of(recipe, 4)
    for prefix, call, count in (("", "actor.generate", 12), ("ref.generate/", "ref.generate", 6)):
        scores = [s["reward_score"] for s in samples if s["rollout"] == call]
        assert len(scores) == count
        assert 0 <= row[f"{prefix}frac_reward_zero_std"] <= 1
        assert row[f"{prefix}reward"] == row[f"{prefix}rewards/letters/mean"] == pytest.approx(sum(scores) / count)
    drawn = [len(s["token_ids"]) for s in samples if s["rollout"] == "actor.generate"]
    assert row["response_length/mean"] == pytest.approx(sum(drawn) / 12)
    assert row.get("off_policy/max", 0) == max_staleness


def test_remax_without_a_greedy_reward_teaches_nothing(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The reward function answers None for one prompt's greedy response, and for one sample of another prompt."""
    recipe = make_recipe(algorithm="remax", options={}, steps=1)
    (tmp_path / "reward.py").write_text(
        "def count_sevens(prompts, completions, **columns):\n"
        "    if len(completions) == 1 and not hasattr(count_sevens, 'refused'):\n"
        "        count_sevens.refused = True\n"
        "        return [None]\n"
        "    rewards = [1.0 + len(text) for text in completions]\n"
        "    if len(completions) > 1 and not hasattr(count_sevens, 'left_out'):\n"
        "        count_sevens.left_out = True\n"
        "        return [None, *rewards[1:]]\n"
        "    return rewards\n"
    )
    outcome = run(recipe)
    assert outcome.metrics["reward/dropped"] == 2
    taught = {}
    for sample in samples_of(recipe, 1):
        if sample["rollout"] == "actor.generate" and "score_over_greedy" in sample:
            taught.setdefault(sample["uid"].split(".")[0], []).append(sample["score_over_greedy"])
    assert sorted(any(values) for values in taught.values()) == [False, True, True]
    assert sum(map(len, taught.values())) == 11


def test_the_baseline_of_remax_is_greedy(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Another seed draws other samples, but has the same greedy responses."""
    said: dict[str, list[list[list[int]]]] = {"actor.generate": [], "actor.generate#2": []}
    for seed in (0, 1):
        keys = {"seed": seed, "data.shuffle": False, "run_dir": str(tmp_path / f"seed-{seed}")}
        recipe = make_recipe(algorithm="remax", options={}, steps=1, **keys)
        run(recipe)
        for rollout, responses in said.items():
            responses.append([s["token_ids"] for s in samples_of(recipe, 1) if s["rollout"] == rollout])
    assert said["actor.generate#2"][0] == said["actor.generate#2"][1]
    assert said["actor.generate"][0] != said["actor.generate"][1]


def test_reinforce_pp_takes_the_mean_of_the_group_not_of_the_batch(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(algorithm="reinforce_pp", options={"group_baseline": True}, steps=1)
    (tmp_path / "reward.py").write_text(
        "def count_sevens(completions, **columns):\n"
        "    return [len(completions[0]) * 10.0 + len(text) for text in completions]\n"
    )
    run(recipe)
    samples = samples_of(recipe, 1)
    groups: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(sample["uid"].split(".")[0], []).append(sample)
    means = [sum(s["reward_score"] for s in group) / 4 for group in groups.values()]
    assert max(means) - min(means) > 1, "the groups differ"
    for group, mean in zip(groups.values(), means, strict=True):
        assert [s["centred_scores"] for s in group] == pytest.approx([s["reward_score"] - mean for s in group])
    tokens = [advantage for sample in samples for advantage in sample["advantages"]]
    assert sum(tokens) == pytest.approx(0, abs=1e-9)
    assert sum(a * a for a in tokens) / (len(tokens) - 1) == pytest.approx(1, rel=1e-6)


def test_overlong_responses_pay(make_recipe: MakeRecipe) -> None:
    """The limit is 6 tokens, the last 4 of them cost up to 1; a tiny random model uses nearly always all."""
    options = {"overlong_buffer_tokens": 4, "overlong_penalty": 1.0}
    recipe = make_recipe(options=options, steps=1, prompts_per_step=12)
    run(recipe)
    for sample in samples_of(recipe, 1):
        cost = sample["reward_score"] - sample["shaped_rewards"]
        assert cost == pytest.approx(max(0, len(sample["token_ids"]) - 2) / 4)


TRUNCATED = """
def ends_early(completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]
"""


def test_truncated_responses_are_not_trained_on(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A few of 96 responses end by themselves (the stop string `7`); only these reach the loss."""
    keys = {"steps": 1, "prompts_per_step": 12, "samples_per_prompt": 8, "sampling.stop": ["7", "1", "a", "e", "i"]}
    (tmp_path / "reward.py").write_text(TRUNCATED)
    keys |= {"reward.functions": [f"{tmp_path}/reward.py:ends_early"]}
    recipe = make_recipe(options={"mask_truncated": True, "aggregation": "token-mean"}, **keys)
    outcome = run(recipe)
    samples = samples_of(recipe, 1)
    truncated = [sample for sample in samples if sample["finish_reason"] == "length"]
    kept = [sample for sample in samples if sample["finish_reason"] == "stop"]
    assert 5 < len(kept) < 91, "both kinds are there"
    assert outcome.metrics["actor/samples_left_out"] == len(truncated)
    assert outcome.metrics["training/tokens_unshared"] == sum(len(s["prompt_ids"]) + len(s["token_ids"]) for s in kept)
    # On-policy the ratio is 1, so the loss is minus the mean advantage over the tokens of those kept, no others.
    tokens = sum(len(sample["token_ids"]) for sample in kept)
    mean = sum(sample["advantages"] * len(sample["token_ids"]) for sample in kept) / tokens
    assert outcome.metrics["actor/loss"] == pytest.approx(-mean, rel=1e-4)
    groups: dict[str, float] = {}
    for sample in samples:
        groups[sample["uid"].split(".")[0]] = groups.get(sample["uid"].split(".")[0], 0.0) + sample["advantages"]
    assert max(map(abs, groups.values())) < 1e-6, "truncated responses count in the baseline of their group"


def test_all_truncated_is_no_step(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(options={"mask_truncated": True}, steps=1, **{"sampling.max_response_tokens": 1})
    outcome = run(recipe)
    assert outcome.metrics["response_length/clip_ratio"] == 1, "no first token of these ends a response"
    assert outcome.metrics["actor/samples_left_out"] == 12
    assert outcome.metrics["training/optimizer_steps"] == 0


TWO_ARMS = """
def even(completions, completion_ids, **columns):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""


@pytest.mark.parametrize("name", slow_but(("rloo",), VARIANTS))
def test_two_arms(make_recipe: MakeRecipe, tmp_path: Path, name: str) -> None:
    """One token per response, reward 1 for an even id: from one half to nearly always."""
    algorithm, options = VARIANTS[name]
    (tmp_path / "reward.py").write_text(TWO_ARMS)
    keys: dict[str, Any] = {
        "steps": 20,
        "prompts_per_step": 6,
        "samples_per_prompt": 8,
        "sampling.max_response_tokens": 1,
        "optimizer.learning_rate": 0.01,
        "reward.functions": [f"{tmp_path}/reward.py:even"],
    }
    # No KL, and no price on the limit that every response reaches: the optimum is then to be always right.
    options = {key: value for key, value in options.items() if not key.startswith(("kl_", "overlong_"))}
    recipe = make_recipe(algorithm=algorithm, options=options, **keys)
    run(recipe)
    rewards = [row["reward"] for row in logged(recipe)]
    assert 0.3 < rewards[0] < 0.7
    assert sum(rewards[-3:]) / 3 > 0.95, rewards


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "reinforce_pp", "remax", "gspo"])
def test_a_killed_run_resumes_exactly(make_recipe: MakeRecipe, tmp_path: Path, name: str) -> None:
    """Killed in the middle of the fourth step of five, with a checkpoint every two."""
    algorithm, options = VARIANTS[name]
    keys = {"steps": 5, "checkpoint.every": 2, "algorithm": algorithm, "options": options}
    whole = make_recipe(run_dir=str(tmp_path / "whole"), **keys)
    run(whole)
    killed = make_recipe(run_dir=str(tmp_path / "killed"), **keys)
    kill_in_step(killed, 3)
    assert run(killed, resume=True).finished
    assert result_of(killed.run_dir) == result_of(whole.run_dir)


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (
            "rloo",
            {"normalise_advantages": True},
            r"unknown key `options\.normalise_adv.*`; did you mean `options\.normal",
        ),
        ("rloo", {"kl_in": "loss", "kl_coef": 0.1}, r"kl_in: loss with kl_estimator: k1 has no effect"),
        ("remax", {"kl_in": "loss"}, r"unknown key `options\.kl_in`"),
        ("grpo", {"ratio": "sequence"}, r"`options\.ratio`.*sequence-mean"),
        ("grpo", {"overlong_buffer_tokens": -1}, r"`options\.overlong_buffer_tokens`"),
        ("reinforce_p", {}, r"no algorithm `reinforce_p`.*did you mean `reinforce_pp`"),
    ],
)
def test_wrong_options_are_refused(
    make_recipe: MakeRecipe, algorithm: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_recipe(algorithm=algorithm, options=options))


PRORL: dict[str, Any] = {
    "group_baseline": True,
    "dynamic_sampling": True,
    "max_sampling_rounds": 3,
    "clip_high": 0.27,
    "kl_coef": 0.05,
    "target_kl": 0.5,
    "kl_horizon": 20,
    "kl_in": "loss",
    "kl_estimator": "k2",
    "correction": "icepop",
    "stop_properly_penalty_coef": 0.25,
    "overlong_buffer_tokens": 2,
}


@pytest.mark.slow
def test_prorl_is_options_of_reinforce_pp(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """ProRL v2, and a KL that steers its weight: what is written, and a run that is killed ends alike."""
    (tmp_path / "some.py").write_text(
        "def some(prompts, completions, **columns):\n"
        "    return [float(i) if int(p.split()[2]) % 2 else 1.0 for i, p in enumerate(prompts)]\n"
    )
    keys: dict[str, Any] = {"algorithm": "reinforce_pp", "options": PRORL, "steps": 4, "checkpoint.every": 2}
    keys |= {"max_staleness": 1, "reward.functions": [f"{tmp_path}/some.py:some"], "data.chat_template": False}
    recipe = make_recipe(run_dir=str(tmp_path / "whole"), **keys)
    assert run(recipe).finished
    rows = logged(recipe)
    coefs = [row["kl_coef"] for row in rows]
    assert coefs[0] == 0.05
    for (coef, row), following in zip(zip(coefs, rows, strict=True), coefs[1:], strict=False):
        error = min(max(row["objective/kl"] / 0.5 - 1, -0.2), 0.2)
        assert following == pytest.approx(coef * (1 + error * 12 / 20))
    for step, row in enumerate(rows, 1):
        assert row["frac_reward_zero_std"] == 0
        assert {"actor/correction_weight", "actor/correction_cut", "kl"} <= row.keys()
        for sample in samples_of(recipe, step):
            if "scores_of_stopped" in sample:
                truncated = sample["finish_reason"] == "length"
                assert sample["scores_of_stopped"] == sample["reward_score"] * (0.25 if truncated else 1)
    assert any("scores_of_stopped" in sample for sample in samples_of(recipe, 1))
    killed = make_recipe(run_dir=str(tmp_path / "killed"), **keys)
    kill_in_step(killed, 3)
    assert run(killed, resume=True).finished
    assert result_of(killed.run_dir) == result_of(recipe.run_dir)
