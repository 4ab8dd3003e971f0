"""Several reward models in one run, each a role of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.cli import main
from plait.data.packed import pack
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind
from plait.engines import ScoredBy
from plait.errors import ConfigError, FlowError, RunError, UserError
from plait.models.files.saving import save_pretrained
from plait.models.scalar_loading import load_scalar
from plait.recipes.algorithm import traced_flow
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from plait.runtime.steps import calls as calls_of_steps
from plait.runtime.steps.scorer import ModelScorer
from plait.schedule.timeline import load_any
from plait.schedule.work import Work
from tests.algorithms import oracle
from tests.models.tiny import tiny_tokenizer
from tests.runs.placed_runs import GRPO, LONG, PPO, SAFE, where
from tests.runs.plans import assert_equal_columns, assert_equal_runs
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]

NAMES, WEIGHTS = ("helpful", "harmless"), (0.75, -0.25)
TWO: dict[str, Any] = {"reward.model": ["PLACE/scorer", "PLACE/other_scorer"], "reward.model_weight": [0.7, 0.3]}
COSTS: dict[str, Any] = {"cost.model": [*reversed(TWO["reward.model"])], "cost.model_weight": [1.5, -0.5]}
CRITIC = {"critic.model": "PLACE/scorer"}


@pytest.fixture
def two(tiny_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Keys of two models of unlike scale. The second reads another chat template than the policy."""
    for seed, name in enumerate(NAMES):
        scalar = load_scalar(str(tiny_folder), dtype="float32", seed=seed, head_std=1.0 + 9 * seed)
        tokenizer = tiny_tokenizer()
        if seed:
            tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"
        save_pretrained(scalar, tmp_path / name)
        tokenizer.save_pretrained(str(tmp_path / name))
    return {"reward.model": [str(tmp_path / name) for name in NAMES], "reward.model_weight": [*WEIGHTS]}


def test_their_weighted_sum_is_the_reward(make_recipe: MakeRecipe, two: dict[str, Any], tmp_path: Path) -> None:
    """By hand, from the weights of the first, which reads the policy's tokens, and the records."""
    recipe = make_recipe(algorithm="grpo", steps=2, **two, **{"evaluation.items": 2, "reward.weights": [2.0]})
    outcome = run(recipe)
    scorer = load_scalar(str(tmp_path / NAMES[0]), dtype="float32", device="cpu", seed=0)
    rows = samples_of(recipe, 1)
    for sample in rows:
        batch = pack([(sample["prompt_ids"], [sample["token_ids"]])])
        assert sample["rewards/model"] == pytest.approx(float(scorer.values_and_scores(batch)[1][0].detach()), abs=1e-4)
        parts = sample["rewards/model"], sample["rewards/model_2"], sample["rewards/count_sevens"]
        expected = sum(weight * part for weight, part in zip((*WEIGHTS, 2.0), parts, strict=True))
        assert sample["reward_score"] == pytest.approx(expected, abs=1e-6)
    metrics = logged(recipe)[0]
    for name in ("model", "model_2"):
        mean = sum(sample[f"rewards/{name}"] for sample in rows) / len(rows)
        assert metrics[f"rewards/{name}/mean"] == pytest.approx(mean)
    assert abs(metrics["rewards/model/mean"] - metrics["rewards/model_2/mean"]) > 1e-3
    assert not {name for name in metrics if name.startswith("reward_2")}
    assert outcome.after is not None
    assert len(outcome.after[""].rewards) == 2


def test_samples_that_one_gives_no_number_are_left_out(
    make_recipe: MakeRecipe, two: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward is a mean of those of which all say something; that of each model is one of what it says."""
    of_call = ModelScorer.call

    def call(self: ModelScorer, rows: Rows, name: str, by: ScoredBy | None = None) -> Work[FloatArray]:
        scores = np.array((yield from of_call(self, rows, name, by)))
        lost = [self.key == "reward.model[1]" and sample.index == 1 for sample in rows.samples]
        return np.where(lost, np.nan, scores)

    monkeypatch.setattr(ModelScorer, "call", call)
    keys = {"algorithm": "grpo", "steps": 1, "reward.functions": [], **two}
    with pytest.raises(RunError, match=r"`reward.model\[1\]` gives sample 0.1 the score nan .*`reward.on_error: drop`"):
        run(make_recipe(**keys))
    run(recipe := make_recipe(**keys, **{"reward.on_error": "drop", "overwrite": True}))
    rows, (metrics, *_) = samples_of(recipe, 1), logged(recipe)
    lost = [row for row in rows if row["rewards/model_2"] is None]
    assert {row["uid"] for row in lost} == {"0.1", "1.1", "2.1"}
    assert metrics["reward/dropped"] == len(lost)
    whole = [row for row in rows if row not in lost]
    assert metrics["rewards/model/mean"] == pytest.approx(sum(row["rewards/model"] for row in rows) / len(rows))
    assert metrics["rewards/model_2/mean"] == pytest.approx(sum(row["rewards/model_2"] for row in whole) / len(whole))
    sums = [WEIGHTS[0] * row["rewards/model"] + WEIGHTS[1] * row["rewards/model_2"] for row in whole]
    assert metrics["reward"] == pytest.approx(sum(sums) / len(sums))


@pytest.mark.slow
def test_each_is_compared_by_itself(make_recipe: MakeRecipe, two: dict[str, Any]) -> None:
    """GDPO: scores of unlike scale count alike, by their weights."""
    options = {"options": {"multi_objective_aggregation": "normalize_then_sum"}, "samples_per_prompt": 4}
    run(recipe := make_recipe(algorithm="grpo", steps=1, **options, **two, **{"reward.functions": []}))
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in samples_of(recipe, 1):
        groups.setdefault(row["uid"].split(".")[0], []).append(row)
    for members in groups.values():
        scores = [[row[f"rewards/{name}"] for row in members] for name in ("model", "model_2")]
        sums = oracle.decoupled(scores, list(WEIGHTS))
        assert [row["reward_score_decoupled"] for row in members] == pytest.approx(list(sums), abs=1e-9)


@pytest.mark.slow
def test_all_decide_which_groups_stay(make_recipe: MakeRecipe, two: dict[str, Any], tmp_path: Path) -> None:
    """Dynamic sampling keeps the prompts of whose samples the weighted sum is high."""
    (tmp_path / "flow.py").write_text(
        "from plait.dataflow import Resample, per_batch\n\n\n"
        "def flow(prompts, actor, reward):\n"
        "    samples = actor.generate(prompts, resample=Resample(keep=high, reward=reward, max_rounds=3))\n"
        "    scores = reward.score(samples)\n"
        "    alone = scores.of('model'), scores.of('model_2')\n"
        "    actor.train(samples, loss=loss, advantages=per_batch(added, scores, *alone, name='advantages'))\n\n\n"
        "def high(scores):\n    return bool(scores.mean() > SO_MUCH)\n\n\n"
        "def added(*columns):\n    return sum(columns)\n\n\n"
        "def loss(batch, advantages):\n"
        "    return batch.aggregate(-advantages * batch.logprobs, 'token-mean')\n\n\n"
        "SO_MUCH = -1e9\n"
    )
    keys = {"algorithm": f"{tmp_path}/flow.py:flow", "options": {}, "steps": 1, "reward.functions": []}
    run(every := make_recipe(**keys, **two, run_dir=str(tmp_path / "every")))
    means = sorted(_means_of_groups(samples_of(every, 1)))
    limit = (means[0] + means[-1]) / 2
    flow = (tmp_path / "flow.py").read_text()
    (tmp_path / "flow.py").write_text(flow.replace("SO_MUCH = -1e9", f"SO_MUCH = {limit}"))
    run(some := make_recipe(**keys, **two, run_dir=str(tmp_path / "some")))
    rows = [row for row in samples_of(some, 1) if "reward_score" in row]
    assert len(_means_of_groups(samples_of(some, 1))) > len(_means_of_groups(rows)), "some were refused"
    assert all(mean > limit for mean in _means_of_groups(rows))
    for row in rows:
        parts = row["rewards/model"], row["rewards/model_2"]
        assert row["reward_score"] == pytest.approx(sum(w * part for w, part in zip(WEIGHTS, parts, strict=True)))
        assert row["advantages"] == pytest.approx(row["reward_score"] + sum(parts))


def _means_of_groups(rows: list[dict[str, Any]]) -> list[float]:
    groups: dict[str, list[float]] = {}
    for row in rows:
        scores = zip(WEIGHTS, (row["rewards/model"], row["rewards/model_2"]), strict=True)
        groups.setdefault(row["uid"].split(".")[0], []).append(sum(weight * score for weight, score in scores))
    return [sum(scores) / len(scores) for scores in groups.values()]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(make_recipe: MakeRecipe, two: dict[str, Any], tmp_path: Path) -> None:
    keys = {"algorithm": "grpo", "steps": 3, "checkpoint.every": 1, "evaluation.items": 2, **two}
    run(undisturbed := make_recipe(run_dir=str(tmp_path / "undisturbed"), **keys))
    killed = make_recipe(run_dir=str(tmp_path / "killed"), **keys)
    kill_in_step(killed, 1)
    run(killed, resume=True)
    assert result_of(killed.run_dir) == result_of(undisturbed.run_dir)


def test_each_is_a_call_of_its_own(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(algorithm="remax", options={}, **{"reward.model": ["a", "b", "c"]})
    flow = traced_flow(recipe)
    names = ["reward_2.score", "reward_3.score", "reward.score"]
    assert [node.call for node in flow.of_kind(CallKind.SCORE)] == [*names, *(f"{name}#2" for name in names)]
    one, alone = (make_recipe(algorithm="remax", options={}, **{"reward.model": name}) for name in (["a"], "a"))
    assert one == alone
    assert "reward_2" not in str(traced_flow(one))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"reward.model": ["A", "A"]}, r"`model` names `.*scorer` twice; name it once, with the sum of its weights"),
        ({"reward.model": ["A", "B"], "reward.model_weight": 0.5}, "`model_weight` has 1 numbers for 2 models"),
        ({"reward.model": ["A", "B"], "reward.model_weight": [1, 2, 3]}, "`model_weight` has 3 numbers for 2 models"),
        (
            {"reward.model": ["A", "LANGUAGE"]},
            r"key `reward.model\[1\]`: `.*` is a language model .* does not train the role `reward_2`; give a reward",
        ),
        ({"reward.model": ["A", "/nowhere"]}, r"key `reward.model\[1\]`: "),
        (
            {"algorithm": "ppo", "options": {}, "reward.model": ["A", "B"]},
            r"`critic.model` is not set, .* `reward.model` names 2; set `critic.model`, such as to `.*scorer` \(with",
        ),
        (
            {"algorithm": "reward_model", "options": {}, "data.source": "PAIRS", "reward.functions": [], "sampling": {}}
            | {"samples_per_prompt": 8, "reward.model": ["A", "B"]},
            "`reward.model` names 2 models, but the flow `reward_model` trains the role `reward` as a model; give one",
        ),
    ],
    ids=str,
)
def test_what_is_refused(
    keys: dict[str, Any], said: str, make_recipe: MakeRecipe, place: Path, tiny_folder: Path
) -> None:
    stands_for = {
        "A": str(place / "scorer"),
        "B": str(place / "other_scorer"),
        "LANGUAGE": str(tiny_folder),
        "PAIRS": str(place / "pairs.jsonl"),
    }
    put = lambda value: [stands_for.get(one, one) for one in value] if isinstance(value, list) else value
    placed = {key: stands_for.get(str(value), put(value)) for key, value in keys.items()}
    with pytest.raises(UserError, match=said):
        prepare(make_recipe(**placed))


def test_scores_that_there_are_not_are_named(make_recipe: MakeRecipe, place: Path, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "def flow(prompts, actor, reward):\n"
        "    samples = actor.generate(prompts)\n"
        "    actor.train(samples, loss=loss, advantages=reward.score(samples).of('model_3'))\n\n\n"
        "def loss(batch, advantages):\n"
        "    return batch.aggregate(-advantages * batch.logprobs, 'token-mean')\n"
    )
    models = [str(place / "scorer"), str(place / "other_scorer")]
    said = r"the scores of `model_3` alone .*; it has those of: count_sevens, model, model_2 \(.*, `model_2` and so on"
    with pytest.raises(FlowError, match=said):
        prepare(make_recipe(algorithm=f"{tmp_path}/flow.py:flow", options={}, **{"reward.model": models}))


PPO_TWO = PPO[1] | TWO | CRITIC
PLANS: dict[str, tuple[tuple[str, dict[str, Any]], str | dict[str, str]]] = {
    "two-apart-3": (
        ("ppo", PPO_TWO),
        {
            "actor.generate": "0",
            "actor.train": "0",
            "ref.logprobs": "0",
            "critic.train": "0",
            "critic.values": "0",
            "reward.score": "1,2 tp2",
            "reward_2.score": "2",
        },
    ),
    "two-fused-4": (("ppo", PPO_TWO | LONG | {"fusion": 0.5, "reward.functions": None}), "colocated 4"),
    "two-mixed-2": (
        ("ppo", PPO_TWO | {"reward.functions": None}),
        {
            "actor.generate": "0,1 dp2",
            "actor.train": "0,1 tp2",
            "ref.logprobs": "0",
            "critic.train": "1,0 dp2",
            "critic.values": "1",
            "reward.score": "0,1 pp2 after=offload",
            "reward_2.score": "0,1 dp2",
        },
    ),
    "two-drawn-again-3": (
        ("grpo", TWO | {"options": {"dynamic_sampling": True, "max_sampling_rounds": 2}, "reward.functions": None}),
        {"actor.generate": "0", "actor.train": "0", "reward.score": "1", "reward_2.score": "2,1 tp2 after=offload"},
    ),
    "two-costs-2": (
        ("safe_rlhf", SAFE[1] | TWO | COSTS | CRITIC | {"cost_critic.model": "PLACE/other_scorer"}),
        "split 2",
    ),
    "two-ahead-2": (("grpo", GRPO[1] | TWO | {"max_staleness": 1, "reward.functions": None}), "split 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_changes_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    """Beside generation or where it generates, together or apart, as samples end or when all have."""
    (flow, keys), plan = PLANS[name]
    recipe = placed(flow, name, **keys, **where(place, name, plan))
    run(recipe)
    one = reference(flow, **keys)
    assert_equal_runs(recipe.run_dir, one)
    assert_equal_columns(recipe.run_dir, one)


AHEAD = GRPO[1] | TWO | {"max_staleness": 1, "steps": 3}


def test_with_samples_drawn_ahead_all_are_asked_as_they_are_drawn(
    place: Path, placed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first as those behind it, and as a reference. What they say is what they would say in the batch's own step;
    functions are added there."""
    calls = ("ref.logprobs", "reward.score", "reward_2.score")
    plan = {"actor.generate": "1", "actor.train": "0", **dict.fromkeys(calls, "1")}
    recipe = placed("grpo", "asked", **AHEAD, **where(place, "asked", plan))
    run(recipe)
    spans = load_any(recipe.run_dir / "trace.json").spans
    for call in calls:
        scored = [span for span in spans if span.kind == "SCORE" and span.action.startswith(call)]
        assert {span.step for span in scored} == {1, 2, 3}
        drawn = min(span.start_s for span in spans if span.step == 3 and span.kind == "PREFILL")
        assert max(span.end_s for span in scored if span.step == 2) < drawn
    monkeypatch.setattr(calls_of_steps, "scores_ahead", lambda flow, recipe: frozenset())
    late = placed("grpo", "asked-late", **AHEAD)
    run(late)
    assert_equal_runs(recipe.run_dir, late.run_dir)
    assert_equal_columns(recipe.run_dir, late.run_dir)


@pytest.mark.slow
def test_a_run_that_was_killed_with_scores_ahead_ends_as_one_that_was_not(
    make_recipe: MakeRecipe, two: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"algorithm": "grpo", "steps": 4, "max_staleness": 2, "checkpoint.every": 1, **two}
    run(whole := make_recipe(**keys, run_dir=str(tmp_path / "whole")))
    cut = make_recipe(**keys, run_dir=str(tmp_path / "cut"))
    kill_in_step(cut, 2)
    assert run(cut, resume=True).finished
    assert result_of(cut.run_dir) == result_of(whole.run_dir)


def test_a_plan_may_place_those_that_there_are(place: Path, placed: Callable[..., Recipe]) -> None:
    plan = {"actor.generate": "0", "actor.train": "0", "ref.logprobs": "0", "reward.score": "0", "reward_3.score": "1"}
    said = r"has no call `reward_3.score` \(did you mean `reward_2.score`\?\); it has: .*reward_2.score, reward.score"
    with pytest.raises(ConfigError, match=said):
        prepare(placed("grpo", "unknown", **GRPO[1], **TWO, **where(place, "unknown", plan)))


def test_a_dry_run_and_a_plan_show_each(
    place: Path, placed: Callable[..., Recipe], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = placed("grpo", "shown", **GRPO[1], **TWO)
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude={"epochs"})))
    assert main(["train", str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "reward.score  per sample  (model_2=1) -> reward_score[sample]" in shown
    assert "reward_2: weights (float64)" in shown
    assert re.search("reward_2.score +score +0 ", shown)
    assert main(["plan", str(path), "--devices", "4", "--seconds", "1"]) == 0
    assert re.search(r"reward_2.score +[0-3,-]+ .*launching", capsys.readouterr().out)
