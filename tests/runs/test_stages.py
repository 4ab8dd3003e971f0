"""A recipe of three stages: supervised fine-tuning, a reward model, PPO with both."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

import plait
from plait.cli import main
from plait.errors import ConfigError
from plait.launch.nodes.place import Attached
from plait.observe.run_log import read_rows
from plait.recipes.keys import parse_overrides
from plait.recipes.stages import load_stages
from plait.runtime import prepare, stage_runs
from plait.runtime.prediction.choosing import auto_plan
from plait.runtime.session import Session
from plait.schedule.plan import Plan
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs

WORDS = ["seven", "plus", "four", "is", "eleven", "and", "two", "makes", "nine"]


@pytest.fixture
def recipe(tmp_path: Path, tiny_folder: Path) -> Path:
    return recipe_in(tmp_path, tiny_folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A recipe whose stages are done, and stay so."""
    recipe = recipe_in(tmp_path_factory.mktemp("trained"), tiny_folder)
    assert main(["train", str(recipe)]) == 0
    return recipe


def recipe_in(tmp_path: Path, tiny_folder: Path) -> Path:
    """A recipe of three stages, with its data and its judge."""
    examples = [{"prompt": f"count {i}", "completion": f" {WORDS[i % 9]} 7"} for i in range(12)]
    pairs = [
        {"prompt": f"count {i}", "chosen": f" 7 {WORDS[i % 9]}", "rejected": f" 4 {WORDS[-i % 9]}"} for i in range(12)
    ]
    prompts = [{"prompt": f"count {i}"} for i in range(12)]
    for name, rows in (("examples", examples), ("pairs", pairs), ("prompts", prompts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(
        "def sevens(completions, **columns):\n    return [c.count('7') for c in completions]\n"
    )
    tree = {
        "run_dir": str(tmp_path / "run"),
        "model": str(tiny_folder),
        "dtype": "float32",
        "threads": 1,
        "steps": 2,
        "prompts_per_step": 3,
        "data": {"chat_template": False},
        "evaluation": {"items": 3},
        "stages": {
            "sft": {"algorithm": "sft", "data": {"source": str(tmp_path / "examples.jsonl")}},
            "reward_model": {
                "algorithm": "reward_model",
                "model": "@sft",
                "epochs": 0.5,  # of the 9 pairs that are not held out: 2 steps of 3
                "data": {"source": str(tmp_path / "pairs.jsonl")},
            },
            "policy": {
                "algorithm": "ppo",
                "model": "@sft",
                "reward": {"model": "@reward_model"},
                "data": {"source": str(tmp_path / "prompts.jsonl")},
                "samples_per_prompt": 1,
                "sampling": {"max_response_tokens": 6},
                "evaluation": {"temperature": 1.0, "functions": [f"{tmp_path}/judge.py:sevens"]},
            },
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def test_three_stages_in_one_command(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--policy.steps", "3"]) == 0
    run = tmp_path / "run"
    assert [len(read_rows(run / name / "metrics.jsonl")) for name in ("sft", "reward_model", "policy")] == [2, 2, 3]
    config = json.loads((run / "reward_model" / "final" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    stored = yaml.safe_load((run / "policy" / "recipe.yaml").read_text())
    assert stored["model"] == str(run / "sft" / "final")
    assert stored["reward"]["model"] == [str(run / "reward_model" / "final")]
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if line.startswith(("all stages", "stage `"))]
    begins = [
        f"stage `{name}` ({number} of 3) begins" for number, name in enumerate(("sft", "reward_model", "policy"), 1)
    ]
    assert told == ["all stages are checked before the first begins", *begins]
    assert "mean sevens (evaluation.functions)" in out
    assert "gain in reward, same items" in out or "mean reward" in out
    evaluations = read_rows(run / "policy" / "evaluations.jsonl")
    assert {"eval/reward", "eval/sevens"} <= evaluations[0].keys()


def test_stages_from_python(recipe: Path, tmp_path: Path) -> None:
    outcome = plait.train(recipe, policy={"steps": 3})
    assert (outcome.finished, outcome.step) == (True, 3)
    rows = (tmp_path / "run" / "sft" / "metrics.jsonl").read_bytes()
    again = plait.train(recipe, resume=True, policy={"steps": 3})
    assert (again.finished, again.step) == (True, 3)
    assert (tmp_path / "run" / "sft" / "metrics.jsonl").read_bytes() == rows
    with pytest.raises(ConfigError, match="stage `policy`: "):
        plait.train(recipe, run_dir=str(tmp_path / "other"), policy={"options": {"no_such": 1}})
    assert not (tmp_path / "other").exists()


def test_a_wish_to_stop_at_the_end_of_a_stage_leaves_the_next_alone(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are all done, so it finishes; what comes behind could take hours."""
    export = Session.export_final

    def signalled(session: Session) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        export(session)

    monkeypatch.setattr(Session, "export_final", signalled)
    assert main(["train", str(recipe)]) == 130
    assert "stopped behind stage `sft`, as was asked; go on with --resume" in capsys.readouterr().out
    assert (tmp_path / "run" / "sft" / "final" / "config.json").is_file()
    assert not (tmp_path / "run" / "reward_model").exists()


@pytest.mark.slow
def test_resume_skips_stages_that_are_done(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe)]) == 0
    before = (tmp_path / "run" / "sft" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["train", str(recipe), "--resume", "--policy.steps", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("done before") == 2
    assert (tmp_path / "run" / "sft" / "metrics.jsonl").read_bytes() == before
    assert len(read_rows(tmp_path / "run" / "policy" / "metrics.jsonl")) == 4
    assert main(["train", str(recipe)]) == 2, "a run is there already"


@pytest.mark.slow
def test_a_stage_that_failed_before_it_saved_begins_again_by_other_keys(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those before it are done, and stay; no other key of theirs may change."""
    judge = (tmp_path / "judge.py").read_text()
    (tmp_path / "judge.py").write_text("def sevens(completions, **columns):\n    raise ValueError('a mistake')\n")
    assert main(["train", str(recipe)]) == 1
    assert "no step is saved; --resume" in capsys.readouterr().err
    (tmp_path / "judge.py").write_text(judge)
    final = tmp_path / "run/reward_model/final/model.safetensors"
    before = final.read_bytes()
    others = ["--policy.sampling.max_response_tokens", "5", "--resume"]
    assert main(["train", str(recipe), *others, "--dry-run"]) == 0
    capsys.readouterr()
    assert main(["train", str(recipe), *others]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("keys have other values: the run begins anew") == 1
    assert shown.out.count("done before") == 2
    assert final.read_bytes() == before
    assert [row["step"] for row in read_rows(tmp_path / "run/policy/metrics.jsonl")] == [1, 2]
    assert main(["train", str(recipe), "--sft.seed", "1", "--resume"]) == 2
    assert "begun with other values of `seed`" in capsys.readouterr().err


def test_a_stage_that_is_done_needs_neither_its_data_nor_its_plan(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can its ranks be too few or many for the nodes that are there now. Of one that takes epochs, the data say
    whether it is done."""
    examples = trained.with_name("examples.jsonl")
    examples.rename(away := trained.with_name("away.jsonl"))
    try:
        assert main(["train", str(trained), "--resume", "--dry-run", "--sft.plan", "gone.json"]) == 0
        assert capsys.readouterr().out.count("done before: ") == 2
    finally:
        away.rename(examples)

    def joined(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(stage_runs, "commands_joined", joined)
    attached = Attached(0, 2, 0, ("127.0.0.1", 0), None, "the test")
    for stage, expected in (("sft", LookupError), ("reward_model", ConfigError)):
        stages = load_stages(trained, parse_overrides([f"--{stage}.devices", "3"], stages=("sft", "reward_model")))
        with pytest.raises(expected), stage_runs.nodes_of_stages(stages, attached, resume=True):
            pass


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ["--sft.optimizer.learning_rate", "3e-4"],
            "stage `sft`: key `run_dir`: .* other values of `optimizer.learning_rate`",
        ),
        (["--policy.options.kl_coef", "0.3"], "stage `policy`: key `run_dir`: .* other values of `options.kl_coef`"),
        (["--sft.steps", "3"], "stage `reward_model`: it has begun with what `sft` ended with after 2 steps"),
        (["--reward_model.steps", "3"], "stage `policy`: it has begun with what `reward_model` ended with after 2"),
    ],
)
def test_a_resumed_recipe_is_that_of_the_stages_that_are_done(
    trained: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], message: str
) -> None:
    """Neither ignored, nor trained further under a later stage that has begun with what there was."""
    before = {path: path.read_bytes() for path in trained.with_name("run").rglob("metrics.jsonl")}
    assert len(before) == 3
    assert main(["train", str(trained), "--resume", *tokens]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert {path: path.read_bytes() for path in before} == before
    assert main(["train", str(trained), "--resume", "--dry-run"]) == 0, "the recipe as it was"


@pytest.mark.parametrize("keys", [[], pytest.param(["--lora.rank", "2"], marks=pytest.mark.slow)])
def test_final_weights_of_fewer_steps_are_not_taken_for_done(recipe: Path, tmp_path: Path, keys: list[str]) -> None:
    """A stage that is made to go on, and is killed between its last step and the export of its weights."""
    assert main(["train", str(recipe), *keys]) == 0
    folder = tmp_path / "run" / "policy" / ("merged" if keys else "final")
    kept = tmp_path / "older"
    folder.rename(kept)
    assert main(["train", str(recipe), *keys, "--resume", "--policy.steps", "3"]) == 0
    whole = (folder / "model.safetensors").read_bytes()
    shutil.rmtree(folder)
    shutil.copytree(kept, folder, copy_function=shutil.copy)  # newer than the checkpoint, as a copied run may be
    assert main(["train", str(recipe), *keys, "--resume", "--policy.steps", "3"]) == 0
    assert (folder / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--policy.reward.model", "@sft"], "stage `policy`: key `reward.model`: `@sft` is a language model without"),
        (["--policy.model", "@reward_model"], "stage `policy`: key `model`: `@reward_model` is a reward model"),
    ],
)
def test_what_a_stage_will_end_with_is_checked_before_the_first(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], message: str
) -> None:
    for flags in (["--dry-run"], []):
        assert main(["train", str(recipe), *tokens, *flags]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_adapters_are_merged_for_the_stages_after(recipe: Path, tmp_path: Path) -> None:
    assert main(["train", str(recipe), "--lora.rank", "2"]) == 0
    run = tmp_path / "run"
    assert (run / "sft" / "final" / "adapter_model.safetensors").is_file()
    assert (run / "sft" / "merged" / "model.safetensors").is_file()
    assert yaml.safe_load((run / "policy" / "recipe.yaml").read_text())["model"] == str(run / "sft" / "merged")
    assert main(["train", str(recipe), "--overwrite", "true", "--steps", "1"]) == 0
    assert not (run / "sft" / "merged").exists(), "an earlier run's"


def test_dry_run_prints_every_stage(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for what in ("9 training examples", "9 training pairs", "critic: weights (float32)", "optimizer steps of critic"):
        assert what in out, what
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"stages.policy.model": "@stf"},
            r"stage `policy`: key `model` is `@stf`.* \(did you mean `sft`\?\); stages",
        ),
        ({"stages.sft.model": "@policy"}, r"stage `sft`: key `model` is `@policy`, but no stage before it"),
        ({"stages.sft.stepss": 3}, r"stage `sft`: unknown key `stepss`; did you mean `steps`"),
        ({"stages.sft.run_dir": "x"}, "stage `sft` is a mapping of keys without `run_dir`"),
        ({"run_dir": ""}, "stages `sft`, `reward_model`, `policy`: key `run_dir`: expected a folder, found an"),
        ({"stages": []}, "`stages` is a mapping of names to recipes"),
        (
            {"stages.model": {}},
            "stage `model` has the name of a key of recipes, so that `--model` would be of the stage",
        ),
        ({"stages.judge": {}}, "stage `judge` has the name of a key of recipes.*such as `judge_stage`"),
        ({"stages.a/b": {}}, "stage `a/b` needs the name of a folder, of letters"),
    ],
)
def test_a_mistake_is_named(recipe: Path, change: dict, message: str) -> None:
    tree = yaml.safe_load(recipe.read_text())
    for key, value in change.items():
        *parents, leaf = key.split(".")
        place = tree
        for parent in parents:
            place = place[parent]
        place[leaf] = value
    recipe.write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(ConfigError, match=message):
        load_stages(recipe)


@pytest.mark.parametrize("stages", [[{"name": "sft"}], {}, None])
def test_stages_that_are_no_mapping_are_named_by_the_command(
    recipe: Path, capsys: pytest.CaptureFixture[str], stages: Any
) -> None:
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "stages": stages}))
    assert main(["train", str(recipe), "--dry-run"]) == 2
    assert "`stages` is a mapping of names to recipes, found" in capsys.readouterr().err


def test_a_key_on_the_command_line_is_for_all_stages_whatever_they_say_themselves(recipe: Path) -> None:
    tokens = ["--policy.steps", "3", "--steps", "7", "--model", "base", "--optimizer.warmup_steps", "2"]
    stages = load_stages(recipe, parse_overrides(tokens, stages=("policy",)))
    assert [stage.steps for stage in stages.recipes.values()] == [7, 7, 3]
    assert [stage.model for stage in stages.recipes.values()] == ["base", "@sft", "@sft"]
    assert {stage.epochs for stage in stages.recipes.values()} == {None}
    assert {stage.optimizer.warmup_steps for stage in stages.recipes.values()} == {2}


def test_one_of_several_reward_models_may_be_of_a_stage(recipe: Path, tmp_path: Path, tiny_folder: Path) -> None:
    models = ["other", "@reward_model"]
    stages = load_stages(recipe, [("policy.reward.model", models), ("policy.critic.model", "@reward_model")])
    assert stages.resolved("policy").reward.model == ("other", str(tmp_path / "run" / "reward_model" / "final"))
    assert stages.foreseen("policy").reward.model == ("other", str(tiny_folder))
    assert {key: (to_come.name, to_come.scalar) for key, to_come in stages.to_come("policy").items()} == {
        "model": ("@sft", False),
        "reward.model[1]": ("@reward_model", True),
        "critic.model": ("@reward_model", True),
    }


def test_a_later_stage_is_checked_before_the_first_runs(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--policy.data.source", "nowhere.jsonl"]) == 2
    assert "stage `policy`: `data.source`: `nowhere.jsonl` does not exist" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_three_stages_on_two_devices_are_those_on_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64; each stage begins with what the one before wrote under its own plan, which was searched once."""
    found: list[Plan] = []
    monkeypatch.setattr(prepare, "auto_plan", lambda planning: found.append(auto_plan(planning)) or found[-1])
    critic = dict.fromkeys(("critic.train", "critic.values"), "1,0 pp2")
    plan = {"actor.generate": "0,1 tp2", "actor.train": "0,1 pp2", "reward.score": "1", "ref.logprobs": "0", **critic}
    several = ["--devices", "2", "--policy.plan", str(write_plan(tmp_path, "policy", plan))]
    for folder, more in (("one", []), ("two", several)):
        assert main(["train", str(recipe), "--dtype", "float64", "--run_dir", str(tmp_path / folder), *more]) == 0
    for stage in ("sft", "reward_model", "policy"):
        assert_equal_runs(tmp_path / "two" / stage, tmp_path / "one" / stage)
        assert json.loads((tmp_path / "two" / stage / "plan.json").read_text())["num_ranks"] == 2
    followed = [Plan.load(tmp_path / "two" / stage / "plan.json") for stage in ("sft", "reward_model")]
    assert [plan.placements for plan in followed] == [plan.placements for plan in found]
    more = ["--run_dir", str(tmp_path / "two"), "--dtype", "float64", "--resume"]
    assert main(["train", str(recipe), *several, *more, "--policy.steps", "3"]) == 0
    assert len(found) == 2, "a resumed stage has its plan"
    damaged = tmp_path / "two" / "sft" / "plan.json"
    damaged.write_text("{")
    assert main(["train", str(recipe), *several, *more, "--policy.steps", "4"]) == 0
    assert damaged.read_text() == "{", "a stage that is done needs it no more"
    assert main(["train", str(recipe), *several, *more, "--policy.steps", "4", "--sft.steps", "3"]) == 2
