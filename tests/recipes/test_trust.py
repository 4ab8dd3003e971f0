"""Code runs where the user names it: what lies in a run's folder is data, and an export imports nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import plait
from plait.cli import main
from plait.errors import ConfigError
from plait.output import RUN_LOCK
from plait.recipes.recipe_file import load_recipe
from plait.recipes.trust import check_origin, code_of, user_recipe
from tests.runs.test_breaking_off import MakeRecipe

FLOW = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from plait.algorithms.grpo import grpo as flow
"""


@pytest.fixture
def sent(make_recipe: MakeRecipe, tmp_path: Path) -> Path:
    """A run with a flow of its own, of which the folder came from somebody else; the flow has not been imported yet."""
    (tmp_path / "flow.py").write_text(FLOW)
    recipe = make_recipe(algorithm=f"{tmp_path}/flow.py:flow", steps=1)
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(recipe.model_dump(mode="json")))
    assert main(["train", str(mine)]) == 0
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    (tmp_path / "flow.py").rename(tmp_path / "sent.py")  # else this process knows it already
    stored = recipe.run_dir / "recipe.yaml"
    stored.write_text(stored.read_text().replace("flow.py", "sent.py"))
    mine.write_text(mine.read_text().replace("flow.py", "sent.py"))
    (tmp_path / "imported").unlink()
    return recipe.run_dir


@pytest.mark.process
def test_a_recipe_in_a_run_names_no_code(sent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, *options in (
        ("train", "--resume", "--steps", "2"),
        ("train", "--dry-run", "--resume"),
        ("eval", "--evaluation.items", "2"),
    ):
        assert main([command, str(sent / "recipe.yaml"), *options]) == 2
        said = capsys.readouterr().err
        ways_out = "--trust-run-code", "trust_run_code=True"
        for word in ("lies in the folder of a run", "`algorithm`: ", "`reward.functions`: ", *ways_out):
            assert word in said, command
        assert not (sent.parent / "imported").exists(), command


@pytest.mark.process
def test_an_export_imports_nothing(sent: Path) -> None:
    (sent.parent / "reward.py").write_text("raise SystemExit('the reward was imported')")
    assert main(["export", str(sent), "--out", str(sent.parent / "out")]) == 0
    (sent.parent / "sent.py").unlink()
    assert main(["export", str(sent), "--out", str(sent.parent / "out"), "--overwrite"]) == 0
    assert not (sent.parent / "imported").exists()


@pytest.mark.process
def test_the_users_word_is_a_recipe_of_his_own_or_the_keys_or_a_flag(sent: Path) -> None:
    stored, steps = str(sent / "recipe.yaml"), "2"
    assert main(["train", str(sent.parent / "mine.json"), "--resume", "--steps", steps]) == 0
    assert (sent.parent / "imported").exists()
    recipe = load_recipe(sent / "recipe.yaml")
    given = [("algorithm", recipe.algorithm), ("reward.functions", recipe.reward.functions)]
    check_origin(Path(stored), recipe, given)
    with pytest.raises(ConfigError, match=r"\(`reward.functions`: .*/reward.py:count_sevens\)"):
        check_origin(Path(stored), recipe, given[:1])
    with pytest.raises(ConfigError, match="--trust-run-code"):
        plait.train(stored, resume=True, steps=3)
    assert main(["train", stored, "--resume", "--steps", "3", "--trust-run-code"]) == 0
    assert plait.train(stored, resume=True, trust_run_code=True, steps=4).step == 4


def test_a_copy_of_a_run_does_not_go_on_in_the_folder_of_the_first(tmp_path: Path) -> None:
    """Nor clear it, by `overwrite`; what reads a recipe alone takes it as it is."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    first.mkdir()
    (first / RUN_LOCK).touch()
    (first / "recipe.yaml").write_text(f"model: m\ndata: {{source: d}}\nrun_dir: {first}\n")
    shutil.copytree(first, copy)
    says = f"`run_dir` is `{first}`: give --run_dir {copy} to go on with that run"
    for overrides in ([], [("overwrite", True)]):
        with pytest.raises(ConfigError, match=says):
            user_recipe(copy / "recipe.yaml", overrides, trains=True)
    assert user_recipe(copy / "recipe.yaml", [("run_dir", str(copy))], trains=True).run_dir == copy
    assert user_recipe(copy / "recipe.yaml", [("run_dir", str(first))], trains=True).run_dir == first
    assert user_recipe(copy / "recipe.yaml", []).run_dir == first
    assert user_recipe(first / "recipe.yaml", [], trains=True).run_dir == first
    (tmp_path / "link").symlink_to(first)
    assert user_recipe(tmp_path / "link" / "recipe.yaml", [], trains=True).run_dir == first


def test_a_command_says_which_folder_a_copied_recipe_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / RUN_LOCK).touch()
    (path := tmp_path / "recipe.yaml").write_text("model: m\ndata: {source: d}\nrun_dir: elsewhere\n")
    assert main(["train", str(path), "--resume"]) == 2
    assert f"give --run_dir {tmp_path}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"give --run_dir {tmp_path}"):
        plait.train(path, resume=True)


def test_which_names_are_code(make_recipe: MakeRecipe) -> None:
    own = ["a.py:f", "package.module.f"]
    keys = {"evaluation.items": 1, "reward.functions": ["task", "well_formed", *own], "turns.reply": own[0]}
    keys |= {"evaluation.functions": ["plait.rewards.tasks:x"]}
    assert code_of(make_recipe(**keys)) == {"reward.functions": tuple(own), "turns.reply": (own[0],)}
