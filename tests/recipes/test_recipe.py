"""Recipes: what a user may write, and what a wrong key or value is answered with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from plait.algorithms.grpo import GRPOOptions
from plait.algorithms.ppo import PPOOptions
from plait.errors import ConfigError
from plait.recipes.keys import parse_overrides
from plait.recipes.recipe import Recipe, check_read
from plait.recipes.recipe_file import load_recipe, recipe_of, validate_options
from plait.recipes.stages import load_stages

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
BASE = [("model", "m"), ("data.source", "d.jsonl")]


def test_later_values_win(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: m\nsteps: 5\ndata: {source: d.jsonl}\noptimizer: {learning_rate: 1.0e-5}\n")
    recipe = load_recipe(path, [("steps", 7), ("optimizer.warmup_steps", 2)])
    assert (recipe.steps, recipe.optimizer.learning_rate, recipe.optimizer.warmup_steps) == (7, 1e-5, 2)


def override(*tokens: str) -> Recipe:
    return load_recipe(None, BASE + parse_overrides(tokens))


def test_overrides() -> None:
    tokens = ["--steps", "3", "--sampling.stop=[a, b]", "--data.system-prompt", "Be brief."]
    assert parse_overrides(tokens) == [("steps", 3), ("sampling.stop", ["a", "b"]), ("data.system_prompt", "Be brief.")]


def test_a_key_of_a_section_leaves_the_defaults_of_its_others() -> None:
    """A section's default is what its class makes of no keys, however deep it is."""

    def differ(settings: BaseModel, path: str) -> list[str]:
        below = [(name, getattr(settings, name)) for name in type(settings).model_fields]
        sections = [(f"{path}{name}", section) for name, section in below if isinstance(section, BaseModel)]
        found = [name for name, section in sections if not section.model_fields_set <= {"source"}]
        return found + [name for at, section in sections for name in differ(section, f"{at}.")]

    assert differ(override(), "") == []
    assert override("--critic.optimizer.warmup_steps", "2").critic.optimizer.learning_rate == 1e-5


def test_a_gpu_recomputes_activations_unless_told_otherwise() -> None:
    assert not override().checkpoint_activations
    assert override("--device", "cuda").checkpoint_activations
    assert not override("--device", "cuda", "--checkpoint_activations", "false").checkpoint_activations


@pytest.mark.parametrize(
    "text", ["Q: {question}", "{question}", "- {question}?", "[{question}]", "# {question}", "'{question}'"]
)
def test_text_is_taken_as_it_stands(text: str) -> None:
    assert override("--data.prompt_template", text).data.prompt_template == text
    assert override("--data.system_prompt", text).data.system_prompt == text
    assert override(f"--data.system_prompt={text}").data.system_prompt == text


def test_paths_and_names_are_taken_as_they_stand() -> None:
    recipe = override("--run_dir", "7", "--data.source", "1e3", "--model", "yes", "--dtype", "float32")
    assert (recipe.run_dir, recipe.data.source, recipe.model, recipe.dtype) == (Path("7"), "1e3", "yes", "float32")


def test_null_unsets(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: m\ndata: {source: d, system_prompt: brief, size: 3}\nsampling: {stop_token_ids: [1]}\n")
    tokens = ["--data.system_prompt", "null", "--data.size", "null", "--sampling.stop_token_ids", "null"]
    recipe = load_recipe(path, parse_overrides(tokens))
    assert (recipe.data.system_prompt, recipe.data.size, recipe.sampling.stop_token_ids) == (None, None, None)
    assert override("--model", "null").model == "null"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["--sampling.stop", "</answer>"], ("</answer>",)),
        (["--sampling.stop", "7"], ("7",)),
        (["--sampling.stop", "a, b: c"], ("a, b: c",)),
        (["--sampling.stop", "[7, '[END]', yes]"], ("7", "[END]", "yes")),
        (["--sampling.stop", "[]"], ()),
    ],
)
def test_a_list_of_texts(tokens: list[str], expected: tuple[str, ...]) -> None:
    assert override(*tokens).sampling.stop == expected


def test_single_values_become_lists_of_one(tmp_path: Path) -> None:
    recipe = override("--reward.functions", "my.py:f", "--reward.weights", "2", "--sampling.stop_token_ids", "5")
    assert (recipe.reward.functions, recipe.reward.weights) == (("my.py:f",), (2.0,))
    assert recipe.sampling.stop_token_ids == (5,)
    path = tmp_path / "r.yaml"
    path.write_text("model: m\ndata: {source: d}\nsampling: {stop: </answer>}\nreward: {functions: my.py:f}\n")
    recipe = load_recipe(path)
    assert (recipe.sampling.stop, recipe.reward.functions) == (("</answer>",), ("my.py:f",))


@pytest.mark.parametrize("number", ["1e-5", "1E-5", "1.e-5", "+1e-5", "0.00001", "1.0e-5"])
def test_numbers_with_an_exponent(tmp_path: Path, number: str) -> None:
    """Where nobody parses them after YAML, too: task parameters."""
    recipe = override("--optimizer.learning_rate", number, "--data.parameters.scale", number)
    assert recipe.optimizer.learning_rate == 1e-5
    assert recipe.data.parameters == {"scale": 1e-5}
    path = tmp_path / "r.yaml"
    path.write_text(f"model: m\ndata: {{source: d, parameters: {{scale: {number}}}}}\n")
    assert load_recipe(path).data.parameters == {"scale": 1e-5}


def test_stop_token_ids_reach_the_request() -> None:
    assert override("--sampling.stop_token_ids", "[5, 2]").sampling.sampling(temperature=0.0).stop_token_ids == (5, 2)
    assert override().sampling.sampling().stop_token_ids is None
    with pytest.raises(ConfigError, match=r"sampling\.stop_token_ids\.0.*greater than or equal to 0"):
        override("--sampling.stop_token_ids", "-1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [("optimizer.learnig_rate", 1)],
            "unknown key `optimizer.learnig_rate`; did you mean `optimizer.learning_rate`?",
        ),
        ([("learning_rate", 1)], "TRL's is `optimizer.learning_rate` here"),
        ([("judge.modle", "m")], "`judge.modle`; did you mean `judge.model`?"),  # TRL has a `judge`, too
        ([("temperature", 1)], "TRL's is `sampling.temperature` here"),
        ([("steps", "many")], "key `steps`: expected a whole number, found 'many'"),
        ([("steps", None)], "key `steps`: expected a whole number, found null"),
        ([("steps", 1.5)], r"key `steps`: expected a whole number, found 1\.5"),
        ([("optimizer.learning_rate", None)], "key `optimizer.learning_rate`: expected a number, found null"),
        ([("overwrite", None)], "key `overwrite`: expected true or false, found null"),
        ([("model", None)], "key `model`: expected a text, found null"),
        ([("run_dir", None)], "key `run_dir`: expected a path, found null"),
        ([("steps", 0)], "key `steps`: input should be greater than or equal to 1, found 0"),
        ([("stalled_after_s", -1)], "key `stalled_after_s`: input should be greater than or equal to 0, found -1"),
        ([("freeze_after_s", 0.5)], "key `freeze_after_s`: input should be greater than or equal to 1, found 0.5"),
        ([("sampling", 3)], "`sampling` is a section of keys, such as `sampling.engine`, found 3"),
        ([("data.more", {"0": {"source": "e.jsonl"}})], "key `data.more`: expected a list, found {'0'"),
        ([("optimizer.betas", [0.9])], r"key `optimizer.betas`: expected 2 values, found \[0.9\]$"),
        ([("optimizer.betas", [])], r"key `optimizer.betas`: expected 2 values, found \[\]$"),
        ([("optimizer.betas", [0.9] * 3)], r"key `optimizer.betas`: expected 2 values, found \[0.9, 0.9, 0.9\]$"),
        (
            [("data.examples", [["q", "a"], ["q"]])],
            r"key `data.examples.1`: expected 2 values, found \['q'\]$",
        ),
        ([("reward.functions", ["a", "b"]), ("reward.weights", [1])], "key `reward`: `weights` has 1 .* 2 functions$"),
    ],
)
def test_wrong_keys_are_named(overrides: list[tuple[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, BASE + overrides)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "trackers",
            ["wandb", "mlflow"],
            r"`trackers\.1`: .* 'tensorboard' or 'wandb', found 'mlflow'; leave it out: `metrics\.jsonl` in",
        ),
        ("partial_rollout", "wait", r"`partial_rollout`: .* 'off', .*, found 'wait'; `wait` is `off` now$"),
        ("partial_rollout", "weight", r"`partial_rollout`: .* found 'weight'$"),
    ],
    ids=str,
)
def test_a_value_that_there_is_elsewhere_or_was_is_answered(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^key {message}"):
        load_recipe(None, [*BASE, (key, value)])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optimiser.lr": 1}, r"`optimiser`: verl's .* is `optimizer.learning_rate` here"),
        ({"critic.optimiser.lr": 1}, r"`critic.optimiser`: verl's .* is `critic.optimizer.learning_rate` here"),
        ({"optimiser.power": 1}, r"`optimiser`; did you mean `optimizer.power`\?"),
        ({"optimiser.lr": 1, "optimiser.wd": 1}, r"`optimiser`; did you mean the section `optimizer`\?"),
        ({"optimiser": None}, r"`optimiser`; did you mean the section `optimizer`\?"),
        (
            {"tp": 2},
            r"`tp`; how calls are sharded and placed is said by a plan: `--devices N` .* states `tp` of each call",
        ),
        ({"num_gpus": 2}, r"`num_gpus`; did you mean `devices`\?"),
        ({"cp_size": 2}, r"`cp_size`; a sample is not divided by its tokens; `--devices N` finds a plan"),
        ({"ep_size": 2}, r"`ep_size`; a mixture's experts are divided with `tp`; `--devices"),
        ({"mlflow": True}, r"`mlflow`; did you mean `trackers`\? They are `tensorboard` and `wandb`"),
        ({"early_stopping_patience": 3}, r"`early_stopping_patience`; did you mean `evaluation.patience`\?"),
        ({"patience": 3}, r"`patience`; did you mean `evaluation.patience`\? With `evaluation.best_by`"),
        ({"stepz": 1}, r"`stepz`; did you mean `steps`\?"),
        ({"optimizer.wd": 1}, r"`optimizer.wd`; did you mean `optimizer.weight_decay`\?"),
        ({"critic.lr": 1}, r"`critic.lr`; did you mean `critic.optimizer.learning_rate`\?"),
        ({"sampling.temp": 1}, r"`sampling.temp`; did you mean `sampling.temperature`\?"),
        ({"sampling.max_tokens": 1}, r"`sampling.max_tokens`; did you mean `sampling.max_response_tokens`\?"),
        ({"ckpt.every": 1}, r"`ckpt`; did you mean `checkpoint.every`\?"),
        ({"kl": 1}, r"`kl`; did you mean `doctor.kl`\?"),
        ({"eval.every": 1}, r"`eval`; did you mean `evaluation.every`\?"),
        ({"Lora.rank": 1}, r"`Lora`; did you mean `lora.rank`\?"),
        ({"sampling.learning_rate": 1}, r"`sampling.learning_rate`; did you mean `optimizer.learning_rate`\?"),
        ({"data.max_response_tokens": 5}, r"`data.max_response_tokens`; did you mean `sampling.max_response_tokens`\?"),
        ({"optimizer.samples_per_prompt": 4}, r"`optimizer.samples_per_prompt`; did you mean `samples_per_prompt`\?"),
        ({"optimizer.momentum": 1}, r"`optimizer.momentum`; `plait train --help-all` lists every key"),
    ],
    ids=str,
)
def test_what_is_meant_by_a_shortened_or_misspelt_key(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key {message}"):
        load_recipe(None, [*BASE, *overrides.items()])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data.source: d", "unknown key `data.source`; in a file a section holds its keys: `data: {source: …}`"),
        (
            "critic.optimizer.learning_rate: 1",
            "unknown key `critic.optimizer.learning_rate`; in a file a section holds its keys: `critic: {optimizer: "
            "{learning_rate: …}}`",
        ),
        (
            "critic: {optimizer.learning_rate: 1}",
            "unknown key `critic.optimizer.learning_rate`; in a file a section holds its keys: `critic: {optimizer: "
            "{learning_rate: …}}`",
        ),
        ("options.x.y: 1", "unknown key `options.x.y`; in a file a section holds its keys: `options: {x: {y: …}}`"),
        ("model.x: 1", "unknown key `model.x`; did you mean"),
        ("data.sorce: d", "unknown key `data.sorce`; did you mean `data.source`?"),
        ("on_update: wait", "unknown key `on_update`: it is `partial_rollout` now, and its value `wait` is `off`"),
        ("turns: {most: 3}", "unknown key `turns.most`: it is `turns.max_turns` now"),
        ("cost: {at_once: 3}", "unknown key `cost.at_once`: it is `cost.max_concurrency` now"),
    ],
)
def test_a_dotted_key_in_a_file_is_answered_with_its_section(tmp_path: Path, text: str, says: str) -> None:
    (path := tmp_path / "r.yaml").write_text(f"{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(says)


def test_a_recipe_in_the_folder_of_a_run_may_have_the_names_of_an_earlier_version(tmp_path: Path) -> None:
    """Nobody has written them: a run stores all keys. What is given beside it has today's."""
    (path := tmp_path / "recipe.yaml").write_text(
        "model: m\ndata: {source: d.jsonl}\nmax_staleness: 1\non_update: wait\nturns: {most: 3}\ncost: {at_once: 5}\n"
    )
    with pytest.raises(ConfigError, match=r"^unknown key `on_update`"):
        load_recipe(path)
    (tmp_path / "run.lock").touch()
    recipe = load_recipe(path, [("turns.max_turns", 4)])
    assert (recipe.partial_rollout, recipe.turns.max_turns, recipe.cost.max_concurrency) == ("off", 4, 5)
    with pytest.raises(ConfigError, match=r"^unknown key `turns\.most`: it is `turns\.max_turns` now$"):
        load_recipe(path, [("turns.most", 4)])


def test_sections_that_are_given_as_one_value_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_of({"model": {"name": "m"}, "data": "d.jsonl", "reward": "r.py:f", "steps": 1})
    assert [line.split(";")[0].split(", found")[0] for line in caught.value.args] == [
        "`model` is no section of keys",
        "`data` is a section of keys, such as `data.source`",
        "`reward` is a section of keys, such as `reward.functions`",
    ]


def test_a_recipe_that_is_not_there_offers_the_nearest_beside_it(tmp_path: Path) -> None:
    for name in ("my_recipe.yaml", "my_recipes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"my_recip\.yaml` does not exist \(did you mean `my_recipe\.yaml`\?\); give"):
        load_recipe(tmp_path / "my_recip.yaml")
    with pytest.raises(ConfigError, match=r"my_recipe\.yml` does not exist \(did you mean `my_recipe\.yaml`\?\); give"):
        load_recipe(tmp_path / "my_recipe.yml")


def test_missing_key_and_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"key `model` is missing; set it in the recipe or with --model$"):
        load_recipe(None, [("data.source", "d")])
    with pytest.raises(ConfigError, match=r"key `data` is missing; set it in the recipe or with --data\.source$"):
        load_recipe(None, [("model", "m")])
    with pytest.raises(ConfigError, match=r"recipe `nowhere\.yaml` does not exist"):
        load_recipe(Path("nowhere.yaml"))
    with pytest.raises(ConfigError, match=r"recipe `x+` cannot be read \(File name too long\)"):
        load_recipe(Path("x" * 300))


def test_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    tree: dict[str, Any] = {
        "model": "~/m",
        "critic": {"model": "~/critic"},
        "reference": {"model": "~/teacher"},
        "sampling": {"draft_model": "~/small"},
        "plan": "~/plan.json",
        "algorithm": "~/flows.py:mine",
        "data": {"source": "~/a.jsonl", "rows": "~/r.py:h", "more": [{"source": "~/c.jsonl"}]},
        "reward": {"model": "~/judge", "functions": ["~/r.py:f", "task"]},
        "evaluation": {"items": 1, "functions": "~/r.py:g", "sets": ["~/b.jsonl", {"source": "~/d.jsonl"}]},
        "run_dir": "~/runs/one",
    }
    recipe = recipe_of(tree)
    assert recipe.algorithm == "/home/me/flows.py:mine"
    assert [source.source for source in recipe.data.sources] == ["/home/me/a.jsonl", "/home/me/c.jsonl"]
    assert [one.source for one in recipe.evaluation.sets] == ["/home/me/b.jsonl", "/home/me/d.jsonl"]
    assert recipe.data.rows == "/home/me/r.py:h"
    assert recipe.reward.functions == ("/home/me/r.py:f", "task")
    assert recipe.evaluation.functions == ("/home/me/r.py:g",)
    assert (recipe.run_dir, recipe.plan) == (Path("/home/me/runs/one"), "/home/me/plan.json")
    assert recipe.models_named() == {
        "model": "/home/me/m",
        "reward.model": "/home/me/judge",
        "critic.model": "/home/me/critic",
        "reference.model": "/home/me/teacher",
        "sampling.draft_model": "/home/me/small",
    }


@pytest.mark.parametrize(
    "key", ["run_dir", "plan", "model", "data.source", "reward.functions", "algorithm", "sampling.draft_model"]
)
def test_what_other_programs_replace_in_a_path_is_refused(key: str) -> None:
    said = f"^key `{key}`: expected a path as it is, in which .*, found `runs/\\$\\{{oc.env:X\\}}/a`; write out"
    with pytest.raises(ConfigError, match=said):
        override(f"--{key}", "runs/${oc.env:X}/a")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("sampling.temperature", "1e-9", "expected 0 (greedy) or at least 0.01, found 1e-09: so small a one overflows"),
        ("data.prompt_template", "Q:", "expected {question}, the place of the prompt, in it, found 'Q:'"),
        ("data.chat_template", "chatml", "expected auto, true or false, found 'chatml'; the template itself is"),
        ("run_dir", "", "expected a folder, found an empty text"),
        ("sampling.stop", "['']", "expected non-empty stop strings, found an empty one, which every text contains"),
    ],
)
def test_a_check_of_ours_is_said_in_its_own_words(key: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'key `{key}`: {said}')}"):
        override(f"--{key}", value)


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("# to come\n")
    with pytest.raises(ConfigError, match="must be a mapping of keys, found nothing in it"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [", ""),
        ("- a\n- b\n", ""),
        ("model: m\n---\nsteps: 1\n", "expected a single document .*, but found another document .line 2, column 1"),
        ("data:\n\tsource: d\n", "found a tab, where spaces are expected .line 2, column 1"),
        ("steps:\t3\n", "found a tab, where spaces are expected .line 1, column 7"),
    ],
)
def test_malformed_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"r\.yaml` .*{said}"):
        load_recipe(path)


@pytest.mark.parametrize("content", [b"model: caf\xe9\n", b"\xff\xfem\x00"])
def test_a_file_that_is_not_utf8(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"r\.yaml` is not UTF-8 .* at byte \d+\); save it as UTF-8"):
        load_recipe(path)


def test_messages_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: m\ndata: {source: [}\n")
    with pytest.raises(ConfigError, match=r"r\.yaml` is not valid YAML: .*line 2, column \d+") as error:
        load_recipe(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["steps", "3"], "expected `--key value`, found `steps`"),
        (["--steps"], "`--steps` needs a value"),
        (["--overwrite", "--steps", "1"], "`--overwrite` needs a value .true or false."),
        (["--overwrite"], "`--overwrite` needs a value .true or false."),
        (["--run_dir", "--steps", "1"], "`--run_dir` needs a value"),
        (["--model", "--steps", "1"], "`--model` needs a value .*`--model=--steps`"),
        (["--stepz", "--steps", "1"], "unknown key `stepz`; did you mean `steps`"),
        (
            ["--stepz", "1", "--overwrite", "--dry-rum", "--num_generations=8", "trainer.epochs=3", "--seed", "["],
            "^unknown key `stepz`; did you mean `steps`.; `--overwrite` needs a value .true or false.; unknown option "
            "`--dry-rum`; did you mean `--dry-run`.; unknown key `num_generations`: TRL's is `samples_per_prompt` here "
            r"\(.*\); expected `--key value`, found `trainer.epochs=3`; did you mean .*; `--seed`: `\[` is not valid",
        ),
        (["--model", "--- {q}", "--stepz", "1"], r"^`--model` needs a value \(.*: `--model=--- \{q\}`\)$"),
        (["--dry-rum"], "unknown option `--dry-rum`; did you mean `--dry-run`"),
        (["--steps", "[1"], "`--steps`: `\\[1` is not valid YAML"),
        (["--prompts_per_step", "1000000"], "key `prompts_per_step`: expected at most 131,072 in size"),
        (["--steps.more", "1"], "`steps` is no section of keys"),
        (["--device", "cuda:1"], "^key `device`: expected cpu or cuda, found 'cuda:1'; the variable CUDA_VISIBLE_DEV"),
    ],
)
def test_malformed_options(tokens: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_recipe(None, BASE + parse_overrides(tokens, flags=("--dry-run",)))
    assert "\n" not in str(error.value)


def test_an_unknown_key_of_a_stage_is_said_with_its_stage() -> None:
    tokens = ["--sft.steps", "3", "--sft.stepz=1", "--stepz", "1", "--ppo.sft.steps", "1"]
    with pytest.raises(ConfigError) as refused:
        parse_overrides(tokens, stages=("sft", "ppo"))
    of_stage, of_all, twice = str(refused.value).split("; did you mean `steps`?")[:3]
    assert of_stage == "stage `sft`: unknown key `stepz`"
    assert of_all == "; unknown key `stepz`"
    assert twice.startswith("; stage `ppo`: unknown key `sft.steps`")


def test_algorithm_options_are_checked_against_their_class() -> None:
    assert validate_options(GRPOOptions, {"clip_high": 0.28}).clip_high == 0.28
    with pytest.raises(ConfigError, match=r"unknown key `options\.clip_hihg`; did you mean `options\.clip_high`"):
        validate_options(GRPOOptions, {"clip_hihg": 0.28})
    with pytest.raises(ConfigError, match=r"^unknown key `options\.beam`; unknown key `options\.clip_hihg`; did"):
        validate_options(GRPOOptions, {"beam": 4, "clip_high": 0.2, "clip_hihg": 0.28})
    with pytest.raises(ConfigError, match=r"key `options\.kl_estimator`"):
        validate_options(GRPOOptions, {"kl_estimator": "k9"})

    class Own(BaseModel):
        depth: int

    with pytest.raises(ConfigError, match=r"options\.depth` is missing"):
        validate_options(Own, {})


def test_options_of_other_places_and_unlike_ones_are_answered_so() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key `options\.beam`$"):
        validate_options(GRPOOptions, {"beam": 4})
    with pytest.raises(
        ConfigError, match=r"^unknown key `options\.estimator`; did you mean `options\.kl_estimator`\?$"
    ):
        validate_options(GRPOOptions, {"estimator": "k3"})
    with pytest.raises(
        ConfigError, match=r"^unknown key `options\.steps`; `steps` stands beside `options`, not in it$"
    ):
        validate_options(GRPOOptions, {"steps": 100})


@pytest.mark.parametrize(
    ("key", "value", "switch"),
    [
        ("lora.alpha", 16, "lora.rank"),
        ("evaluation.every", 5, "evaluation.items"),
        ("evaluation.show", 3, "evaluation.items"),
        ("reference.mixup", 0.5, "reference.sync_every"),
    ],
)
def test_a_key_without_its_switch_is_refused_unless_that_is_said_to_be_off(key: str, value: int, switch: str) -> None:
    section, name = key.split(".")

    def check(*stated: tuple[str, int]) -> None:
        check_read(section, getattr(load_recipe(None, [*BASE, (key, value), *stated]), section))

    said = f"^key `{section}`: {name} is set, but has no effect without .*; set `{switch}` above 0$"
    with pytest.raises(ConfigError, match=said):
        check()
    check((switch, 0))
    check((switch, 4))


def test_the_best_evaluation_is_chosen_where_there_are_several_to_choose_from() -> None:
    """`best/` is of evaluations between the steps; their metrics are those of `evaluations.jsonl`, or these negated."""

    def check(**stated: Any) -> None:
        named = [(f"evaluation.{name}", value) for name, value in stated.items()]
        check_read("evaluation", load_recipe(None, [*BASE, *named]).evaluation)

    with pytest.raises(ConfigError, match="best_by is set, but has no effect without items"):
        check(best_by="eval/reward")
    with pytest.raises(ConfigError, match="best_by is set, but has no effect without every"):
        check(best_by="eval/reward", items=4)
    check(best_by="-eval/actor/loss", items=4, every=2)
    check(best_by="eval/reward", items=0)
    with pytest.raises(ConfigError, match=r"evaluation\.best_by`: expected eval/NAME .*, found 'reward'"):
        check(best_by="reward", items=4, every=2)


def test_an_option_without_its_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kl_in is set, but has no effect without kl_coef; set `options\.kl_coef`"):
        validate_options(GRPOOptions, {"kl_in": "reward"})
    with pytest.raises(ConfigError, match="overlong_penalty is set, but has no effect without overlong_buffer_tokens"):
        validate_options(GRPOOptions, {"overlong_penalty": 2.0})
    with pytest.raises(ConfigError, match="correction_high is set, but has no effect without correction; set `options"):
        validate_options(GRPOOptions, {"correction_high": 3.0})
    validate_options(GRPOOptions, {"correction_high": 3.0, "correction": "off"})
    validate_options(GRPOOptions, {"kl_in": "reward", "kl_coef": 0})
    validate_options(GRPOOptions, {"kl_in": "reward"}, lets_be=True)
    validate_options(PPOOptions, {"kl_in": "loss", "kl_estimator": "k3"})


def test_options_that_exclude_each_other_are_named_alone() -> None:
    with pytest.raises(ConfigError, match=r"^key `options`: kl_in: loss with .* or `options.kl_in` to reward$"):
        validate_options(PPOOptions, {"kl_in": "loss", "kl_estimator": "k1"})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_short_and_valid(path: Path) -> None:
    import yaml

    def leaves(tree: object) -> int:
        return sum(map(leaves, tree.values())) if isinstance(tree, dict) else 1

    tree = yaml.safe_load(path.read_text())
    tree.get("data", {}).pop("parameters", None)  # the task's keys, not ours
    stages = tree.pop("stages", {})
    assert all(leaves(one) <= 20 for one in (tree, *stages.values()))
    if stages:
        assert list(load_stages(path).recipes) == list(stages)
    else:
        load_recipe(path)


@pytest.mark.parametrize(("plan", "found"), [(None, "null"), (3, "a number"), (["split"], "a list")])
def test_a_plan_that_is_no_text_is_told_what_it_may_be(plan: object, found: str) -> None:
    said = rf"key `plan`: expected auto, colocated, split, standalone or the path of a plan file, found {found}$"
    with pytest.raises(ConfigError, match=said):
        load_recipe(None, [("model", "m"), ("data.source", "d.jsonl"), ("plan", plan)])
