"""Every built-in flow beyond the critic-free ones, from data to final weights, on a tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from plait.cost.device_memory import memory_of_plan
from plait.cost.lengths import Lengths, SampleLengths
from plait.errors import FlowError, RunError, UserError
from plait.models.files.saving import save_pretrained
from plait.models.scalar_loading import load_scalar
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from plait.workers.loading import build_models
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ["seven", "plus", "four", "is", "eleven", "and", "two", "makes", "nine"]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """Files of examples, of pairs whose chosen responses speak of sevens, of responses that are labelled by that, and a
    cost."""
    files = {
        "examples": [
            {"prompt": f"count {i}", "completion": f" {WORDS[i % 9]} 7 {WORDS[(i * 5) % 9]}"} for i in range(24)
        ],
        "pairs": [
            {"prompt": f"say {i}", "chosen": f" 7 {WORDS[i % 9]} 7", "rejected": f" 4 {WORDS[(i + 2) % 9]}"}
            for i in range(24)
        ],
        "labelled": [
            {"prompt": f"say {i}", "completion": f" {WORDS[i % 9]} {7 if i % 3 else 4}", "label": bool(i % 3)}
            for i in range(24)
        ],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "cost.py").write_text(
        "def long(completions, **columns):\n    return [len(c) / 10 - 1 for c in completions]\n"
    )
    return {name: str(tmp_path / f"{name}.jsonl") for name in files} | {"cost": f"{tmp_path}/cost.py:long"}


def recipe_of(flow: str, make_recipe: MakeRecipe, data: dict[str, str], **keys: Any) -> Recipe:
    given = {
        "reward.functions": [],
        "sampling": {},
        "samples_per_prompt": 8,
        "evaluation.items": 4,
        "prompts_per_step": 4,
    }
    match flow:
        case "sft":
            own = {**given, "data.source": data["examples"], "options": {}}
        case "reward_model" | "dpo":
            own = {**given, "data.source": data["pairs"], "options": {}}
        case "kto":
            own = {**given, "data.source": data["labelled"], "options": {}}
        case "distill":
            teacher = save_tiny(Path(data["examples"]).parent / "teacher", seed=7, hidden_size=48)
            own = {**given, "data.source": data["examples"], "options": {"on_policy": False, "top_k": 16}}
            own["reference.model"] = str(teacher)
        case "ppo":
            own = {"options": {"kl_coef": 0.05, "mini_batches": 2, "target_kl": 0.1, "reward_norm": "mean-std"}}
        case "ppo_ptx":
            options = {"kl_coef": 0.05, "mini_batches": 2, "epochs": 2, "ptx_coef": 0.5, "critic_warmup_steps": 1}
            own = {"options": options, "pretraining.source": data["examples"]}
        case "safe_rlhf":
            own = {
                "options": {"ptx_coef": 0.5, "kl_coef": 0.02, "cost_window": 8},
                "cost.functions": [data["cost"]],
                "pretraining.source": data["examples"],
            }
    return make_recipe(algorithm=flow.removesuffix("_ptx"), **(own | keys))


@pytest.mark.parametrize(
    ("flow", "metric", "better"),
    [
        ("sft", "eval/actor/loss", min),
        ("reward_model", "eval/reward/accuracy", max),
        ("dpo", "eval/rewards/accuracies", max),
        ("kto", "eval/rewards/margins", max),
        ("distill", "eval/actor/divergence", min),
    ],
)
def test_offline_flows_learn(
    make_recipe: MakeRecipe, data: dict[str, str], flow: str, metric: str, better: Any
) -> None:
    recipe = recipe_of(flow, make_recipe, data, steps=12, **{"evaluation.every": 12, "optimizer.learning_rate": 3e-3})
    outcome = run(recipe)
    assert outcome.before is not None
    assert outcome.after is not None
    before, after = outcome.before.metrics(), outcome.after.metrics()
    assert metric in after, sorted(after)
    assert better(before[metric], after[metric]) == after[metric] != before[metric]
    assert (recipe.run_dir / "final" / "model.safetensors").is_file()
    assert all(math.isfinite(value) for row in logged(recipe) for value in row.values())


@pytest.mark.parametrize("flow", ["ppo", "safe_rlhf"])
def test_flows_with_critics(make_recipe: MakeRecipe, data: dict[str, str], flow: str) -> None:
    recipe = recipe_of(flow, make_recipe, data, steps=3)
    run(recipe)
    rows = logged(recipe)
    names = {"critic/vf_loss", "critic/vf_explained_var", "actor/pg_loss", "reward", "critic/grad_norm", "kl"}
    updates = recipe.steps * (4 if flow == "ppo" else 3)
    steps = [row["training/optimizer_steps"] + row["critic/optimizer_steps"] for row in rows]
    assert sum(steps) == updates, "Safe-RLHF's actor is trained twice in a step"
    names |= {"lambda", "episode_cost", "cost", "actor/ptx_loss"} if flow == "safe_rlhf" else {"kl_coef"}
    assert names <= rows[-1].keys(), sorted(names - rows[-1].keys())
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_two_losses_make_each_step_of_the_actor(make_recipe: MakeRecipe, data: dict[str, str]) -> None:
    """PPO-ptx: as many optimizer steps as without the examples, none in the critic's warm-up, counted once."""
    recipe = recipe_of("ppo_ptx", make_recipe, data, steps=2)
    run(recipe)
    first, second = logged(recipe)
    assert "training/optimizer_steps" not in first
    assert "actor/ptx_loss" not in first
    assert second["training/optimizer_steps"] == second["critic/optimizer_steps"] == 4
    assert second["actor/ptx_loss"] == pytest.approx(second["actor.train#2/loss"] / 0.5)
    assert second["training/mask_coverage"] == second["actor.train#2/mask_coverage"] == 1
    assert not {"actor.train#2/grad_norm", "actor.train#2/lr"} & second.keys()
    totals = prepare(recipe).flow.optimizer_steps("actor", recipe.steps)
    assert totals == 4, "the schedule of the learning rate counts each once"


@pytest.mark.parametrize("mix", slow_but(["luffy"], ["chord", "luffy"]))
def test_demonstrations_are_learnt_in_the_steps_of_own_samples(make_recipe: MakeRecipe, mix: str) -> None:
    """examples/demonstrated.py. One file gives prompts and demonstrations: they meet, in every epoch over it."""
    rows = str(EXAMPLES / "demonstrations.jsonl")
    keys: dict[str, Any] = {"data.source": rows, "pretraining.source": rows, "prompts_per_step": 3, "steps": 4}
    keys["options"] = {"mix": mix, "mini_batches": 2, **({"weights": "entropy"} if mix == "chord" else {})}
    recipe = make_recipe(algorithm=f"{EXAMPLES}/demonstrated.py:demonstrated", **keys)
    run(recipe)
    steps = logged(recipe)
    assert [row["training/optimizer_steps"] for row in steps] == [2] * 4
    if mix == "luffy":
        assert {row["demonstrated"] for row in steps} == {1 / (1 + recipe.samples_per_prompt)}
        assert all(math.isfinite(row["examples/reward"]) for row in steps)
    else:
        assert [row["mu"] for row in steps] == pytest.approx([0.9, 0.8997903, 0.8991614, 0.8981139], abs=1e-6)
    assert all(row["actor/nll"] > 0 for row in steps)


@pytest.mark.slow
def test_a_critic_says_what_follows_truncated_responses(make_recipe: MakeRecipe, data: dict[str, str]) -> None:
    """Their score is left out of what the critic learns, and its value of their end stands there."""
    keys = {"options": {"kl_coef": 0, "bootstrap_truncated": True}, "reward.functions": [data["cost"]]}
    keys |= {"sampling.stop": ["1", "a", "e"], "optimizer.learning_rate": 1e-9, "critic.optimizer.learning_rate": 0.1}
    recipe = recipe_of("ppo", make_recipe, data, steps=2, **keys)
    run(recipe)
    samples = samples_of(recipe, 2)
    cut = [sample["finish_reason"] == "length" for sample in samples]
    assert {*cut} == {False, True}
    assert [sample["critic_value_after"] != 0 for sample in samples] == cut
    scores = [0.0 if is_cut else sample["reward_score"] for is_cut, sample in zip(cut, samples, strict=True)]
    assert [sample["critic_scores_of_finished"] for sample in samples] == scores
    assert all(math.isfinite(value) for row in logged(recipe) for value in row.values())


@pytest.mark.parametrize("flow", ["sft", "ppo"])
def test_an_evaluation_leaves_training_as_it_was(
    make_recipe: MakeRecipe, data: dict[str, str], tmp_path: Path, flow: str
) -> None:
    """No draw, no order of the data and no weight depends on whether held-out items were looked at in between."""
    keys = {"steps": 2, "evaluation.items": 3}
    seldom = recipe_of(flow, make_recipe, data, run_dir=str(tmp_path / "seldom"), **keys)
    often = recipe_of(flow, make_recipe, data, run_dir=str(tmp_path / "often"), **keys, **{"evaluation.every": 1})
    run(seldom)
    run(often)
    weights = [recipe.run_dir / "final" / "model.safetensors" for recipe in (seldom, often)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert "eval/reward" in logged(often)[0] or "eval/actor/loss" in logged(often)[0]


TWO_LOSSES = """
from functools import partial

from plait.algorithms.losses import cross_entropy

def two_losses(examples, actor):
    actor.train(examples, loss=partial(cross_entropy, name="nll/first"), mask=examples.trained, with_next=True)
    actor.train(examples, loss=partial(cross_entropy, coef=0.5, name="nll/second"), mask=examples.trained)
"""


def test_an_evaluation_names_both_losses_as_a_step_does(
    make_recipe: MakeRecipe, data: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "flow.py").write_text(TWO_LOSSES)
    recipe = recipe_of("sft", make_recipe, data, steps=1, **{"evaluation.every": 1})
    run(recipe.model_copy(update={"algorithm": f"{tmp_path}/flow.py:two_losses"}))
    [row] = logged(recipe)
    assert {"actor/loss", "actor.train#2/loss", "nll/first", "nll/second"} <= row.keys()
    assert row["eval/actor/loss"] == pytest.approx(row["eval/nll/first"])
    assert row["eval/actor.train#2/loss"] == pytest.approx(0.5 * row["eval/nll/second"])


GRADED = """
from plait.dataflow import parse_grades

def graded(examples, actor):
    grades = parse_grades(examples, long, name="length")
    actor.train(examples, loss=weighed, mask=examples.trained, grades=grades)

def long(completions):
    return [float(len(text)) if "e" in text.split()[0] else None for text in completions]

def weighed(batch, grades):
    return batch.aggregate(-batch.logprobs * (grades == grades), "token-mean")
"""


def test_an_evaluation_of_given_samples_has_their_grades(
    make_recipe: MakeRecipe, data: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "flow.py").write_text(GRADED)
    recipe = recipe_of("sft", make_recipe, data, steps=1, **{"evaluation.every": 1, "evaluation.items": 8})
    recipe = recipe.model_copy(update={"algorithm": f"{tmp_path}/flow.py:graded"})
    held_out = [given.sample.text for given in prepare(recipe).held_out[0].given["examples"]]
    read = [len(text) for text in held_out if "e" in text.split()[0]]
    assert 0 < len(read) < len(held_out) == 8
    run(recipe)
    [row] = logged(recipe)
    assert row["eval/length/mean"] == pytest.approx(sum(read) / len(read))
    assert row["eval/length/unread"] == 1 - len(read) / 8
    assert {"length/unread", "frac_length_zero_std", "eval/actor/loss"} <= row.keys()


OFFLINE = ["sft", "reward_model", "dpo", "kto", "distill"]
FLOWS = [*OFFLINE, "ppo", "safe_rlhf"]


@pytest.mark.parametrize("flow", slow_but(["safe_rlhf"], [*FLOWS, "ppo_ptx"]))
def test_a_killed_run_resumes_exactly(make_recipe: MakeRecipe, data: dict[str, str], tmp_path: Path, flow: str) -> None:
    """Killed in the middle of the last of four steps, with a checkpoint every two; carried values go on too."""
    keys = {"steps": 4, "checkpoint.every": 2}
    whole = recipe_of(flow, make_recipe, data, run_dir=str(tmp_path / "whole"), **keys)
    run(whole)
    killed = recipe_of(flow, make_recipe, data, run_dir=str(tmp_path / "killed"), **keys)
    kill_in_step(killed, 3)
    assert run(killed, resume=True).finished
    assert result_of(killed.run_dir) == result_of(whole.run_dir)


@pytest.mark.parametrize("flow", slow_but(["ppo"], ["ppo", "sft", "kto", "distill"]))
def test_adapters_alone_are_trained_and_saved(
    make_recipe: MakeRecipe, data: dict[str, str], tmp_path: Path, flow: str
) -> None:
    keys = {"lora": {"rank": 4}, "steps": 4, "checkpoint.every": 2, "optimizer.learning_rate": 1e-2}
    recipe = recipe_of(flow, make_recipe, data, run_dir=str(tmp_path / "whole"), **keys)
    run(recipe)
    final = recipe.run_dir / "final"
    assert (final / "adapter_model.safetensors").is_file()
    assert not (final / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, final)
    changed = [tensor.abs().max() for name, tensor in loaded.state_dict().items() if "lora_B" in name]
    assert min(changed) > 0
    rows = logged(recipe)
    if flow == "ppo":
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-6), "the reference is the base without the adapter"
        assert rows[-1]["kl"] > 0
    if flow == "kto":
        assert (rows[0]["objective/kl"], rows[0]["rewards/margins"]) == pytest.approx((0, 0), abs=1e-6)
        assert rows[-1]["rewards/margins"] != 0
    killed = recipe_of(flow, make_recipe, data, run_dir=str(tmp_path / "killed"), **keys)
    kill_in_step(killed, 3)
    assert run(killed, resume=True).finished
    weights = [run_dir / "final" / "adapter_model.safetensors" for run_dir in (recipe.run_dir, killed.run_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [row["actor/loss"] for row in logged(killed)] == [row["actor/loss"] for row in rows]


def test_roles_with_adapters_share_one_base(make_recipe: MakeRecipe, data: dict[str, str]) -> None:
    recipe = recipe_of("ppo", make_recipe, data, lora={"rank": 2})
    prepared = prepare(recipe)
    models = build_models(prepared.models, recipe)
    assert set(models) == {"actor", "ref", "critic"}
    assert len({model.weights.data_ptr() for model in models.values()}) == 1
    of_run = prepared.flow, prepared.models, prepared.shapes, prepared.plan
    (alone,) = memory_of_plan(recipe, *of_run, SampleLengths(Lengths.fixed(20), Lengths.fixed(1)))
    table = dict(alone.rows)
    assert len([what for what in table if what.endswith("weights (float32)")]) == 1
    assert table["actor: adapter, its masters, moments and gradients"] > 0


def test_dynamic_sampling_draws_until_groups_differ(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = {"steps": 4, "checkpoint.every": 2, "prompts_per_step": 3, "options": {"dynamic_sampling": True}}
    (tmp_path / "some.py").write_text(
        "def some(prompts, completions, **columns):\n"
        "    return [float(i) if int(p.split()[2]) % 2 else 1.0 for i, p in enumerate(prompts)]\n"
    )
    keys |= {"reward.functions": [f"{tmp_path}/some.py:some"], "data.chat_template": False}
    recipe = make_recipe(run_dir=str(tmp_path / "whole"), **keys)
    run(recipe)
    for step, row in enumerate(logged(recipe), 1):
        assert row["frac_reward_zero_std"] == 0
        drawn, refused = row["dynamic/groups_drawn"], row["dynamic/groups_refused"]
        assert drawn - refused >= 3
        assert (row["dynamic/rounds"] == 1) == (drawn == 3)
        samples = read_rows(recipe.run_dir / "samples" / f"step-{step:06d}.jsonl")
        assert len(samples) == 4 * row["dynamic/groups_drawn"]
        taught = {sample["uid"].split(".")[0] for sample in samples if "advantages" in sample}
        assert len(taught) == 3
    killed = make_recipe(run_dir=str(tmp_path / "killed"), **keys)
    kill_in_step(killed, 3)
    assert run(killed, resume=True).finished
    assert result_of(killed.run_dir) == result_of(recipe.run_dir)


def test_dynamic_sampling_gives_up(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def count_sevens(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    recipe = make_recipe(options={"dynamic_sampling": True, "max_sampling_rounds": 2})
    with pytest.raises(RunError, match=r"drew 6 groups in 2 rounds and kept none.*options\.max_sampling_rounds"):
        run(recipe)


PICKY = """
from plait.algorithms.grpo import group_advantages
from plait.dataflow import Resample, per_group

def loss(batch, advantages):
    return batch.aggregate(-batch.logprobs * advantages, "token-mean")

def picky(rewards):
    return False

def unscored(prompts, actor, reward):
    samples = actor.generate(prompts, resample=Resample(keep=picky, reward=reward, max_rounds=2))
    actor.train(samples, loss=loss, advantages=samples.finished)

def scored(prompts, actor, reward):
    samples = actor.generate(prompts, resample=Resample(keep=picky, reward=reward, max_rounds=2))
    actor.train(samples, loss=loss, advantages=per_group(group_advantages, reward.score(samples), name="advantages"))
"""


def test_who_decides_which_groups_stay_has_to_score_them(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(PICKY)
    with pytest.raises(FlowError, match=r"asks `reward` which groups stay, but .* call `reward\.score\(samples\)`"):
        run(make_recipe(algorithm=f"{tmp_path}/picky.py:unscored", options={}))
    with pytest.raises(RunError, match=r"kept none; `picky` refuses the rewards .* \(`max_rounds` of its `Resample`\)"):
        run(make_recipe(algorithm=f"{tmp_path}/picky.py:scored", options={}))


@pytest.mark.parametrize(
    ("flow", "keys", "message"),
    [
        ("sft", {"reward.functions": ["x.py:f"]}, "`reward` is set, but the flow `sft` has no role `reward`"),
        ("sft", {"samples_per_prompt": 2}, "`samples_per_prompt` is set, but the flow `sft` draws none; remove it"),
        ("sft", {"sampling.temperature": 0.5}, "`sampling` is set, but the flow `sft` generates nothing"),
        ("ppo", {"pretraining.source": "x.jsonl"}, "reads no examples beside its prompts"),
        (
            "safe_rlhf",
            {"pretraining": None},
            r"`pretraining` is not set; set `pretraining\.source` to their data, or `options\.ptx_coef` to 0",
        ),
        ("safe_rlhf", {"cost.functions": []}, r"role `cost`, which nothing fills: set `cost\.functions`"),
        (
            "dpo",
            {"evaluation.functions": ["json:dumps"]},
            r"`evaluation\.functions` is set, but .* generates nothing",
        ),
        ("dpo", {"data.source": "reasoning_gym:chain_sum"}, "pairs"),
        ("sft", {"evaluation.temperature": 1.0}, r"`evaluation\.temperature` is set, but .* generates nothing"),
        ("ppo", {"data.max_example_tokens": 9}, r"`data\.max_example_tokens` is set, but the flow `ppo` reads prompts"),
        ("reward_model", {"reward.functions": ["x.py:f"]}, r"`reward\.functions` is set, but .* as a model; remove it"),
        ("ppo", {"reward.answer": "number"}, r"`reward\.answer` is set, but neither `task` nor `well_formed` is among"),
        (
            "ppo",
            {"evaluation.items": 1, "evaluation.functions": ["no.py:f"]},
            r"`evaluation\.functions`: the file `no\.py` does not exist",
        ),
        ("ppo", {"reward.model_weight": 2.0}, r"`reward\.model_weight` is set, but `reward\.model` is not"),
        (
            "ppo",
            {"reward.functions": [], "reward.model": "m", "reward.weights": [1.0]},
            r"`reward\.weights` is set, but they are of `reward\.functions`",
        ),
        ("ppo", {"options": {"critic_warmup_steps": 2}}, r"`steps` is 2, but actor\.train does nothing in"),
        (
            "ppo",
            {"options": {"mini_batches": 13}},
            r"13 mini-batches \(`options\.mini_batches`\), but .* has 12 samples",
        ),
        ("kto", {"prompts_per_step": 1}, r"`prompts_per_step` is 1, but the flow `kto` estimates the KL"),
        ("kto", {"evaluation.items": 1}, r"`evaluation\.items` is 1, but the flow `kto` estimates the KL"),
        (
            "distill",
            {"reference.model": None},
            r"learns from a teacher, but `reference\.model` is not set, so that .* itself",
        ),
        (
            "distill",
            {"options": {"top_k": 321, "on_policy": False}},
            r"ref\.top_logprobs .* the 321 likeliest tokens \(`options\.top_k` .*\(key `model`\) has 320",
        ),
        ("dpo", {"options": {"mini_batches": 5}}, r"5 mini-batches .*, but a step has 4 groups"),
    ],
)
def test_what_a_flow_has_no_use_for_is_refused(
    make_recipe: MakeRecipe, data: dict[str, str], flow: str, keys: dict[str, Any], message: str
) -> None:
    recipe = recipe_of(flow, make_recipe, data, **keys)
    with pytest.raises(UserError, match=message):
        run(recipe)
    assert not recipe.run_dir.exists()


def test_what_generates_nothing_has_no_functions_of_evaluations(make_recipe: MakeRecipe, data: dict[str, str]) -> None:
    """Of a stage, beside which they stand for another one."""
    recipe = recipe_of("sft", make_recipe, data, **{"evaluation.functions": ["task"]})
    assert prepare(recipe.letting_be()).eval_functions == ()


@pytest.mark.parametrize(
    ("flow", "key", "kind", "message"),
    [
        ("ppo", "model", "reward_model", "key `model`: `.*` is a reward model .*, but the role `actor` begins as"),
        ("dpo", "model", "reward_model", "key `model`: `.*` is a reward model"),
        ("ppo", "reward.model", "language_model", "key `reward.model`: `.*` is a language model .* without a head"),
        ("safe_rlhf", "cost.model", "language_model", "key `cost.model`: `.*` is a language model"),
        ("ppo", "reward.model", "adapter", "key `reward.model`: `.*` is a language model .* without a head"),
    ],
)
def test_a_model_that_does_not_fit_its_role_is_refused(
    make_recipe: MakeRecipe,
    data: dict[str, str],
    tiny_folder: Path,
    tmp_path: Path,
    flow: str,
    key: str,
    kind: str,
    message: str,
) -> None:
    """Before weights are read: a head made up on the way would train, and mean nothing."""
    folder = tmp_path / "other"
    match kind:
        case "reward_model":
            save_pretrained(load_scalar(str(tiny_folder), dtype="float32"), folder)
        case "adapter":
            folder.mkdir()
            config = {"base_model_name_or_path": str(tiny_folder), "task_type": "CAUSAL_LM"}
            (folder / "adapter_config.json").write_text(json.dumps(config))
        case _:
            folder = tiny_folder
    keys = {key: str(folder)} | ({key.replace("model", "functions"): []} if key != "model" else {})
    with pytest.raises(UserError, match=message):
        prepare(recipe_of(flow, make_recipe, data, **keys))
