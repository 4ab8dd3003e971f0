"""A dry run: of models that are not there it takes their shapes, where a run refuses them in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli import main
from plait.memory_limits import Limit
from plait.models.files.known_shapes import KNOWN
from plait.recipes.recipe import Recipe
from plait.runtime.prediction import room
from tests.cli.recipes import write_recipe

RECIPE = """
model: {model}
algorithm: {algorithm}
steps: 3
data: {{source: {source}, {longest}}}
reward: {{functions: task}}
run_dir: {folder}/run
"""


def recipe(folder: Path, model: str, algorithm: str = "grpo") -> str:
    source = "reasoning_gym:chain_sum" if algorithm == "grpo" else "nowhere.jsonl"
    longest = "max_prompt_tokens: 128" if algorithm == "grpo" else "max_example_tokens: 512"
    text = RECIPE.format(model=model, algorithm=algorithm, folder=folder, longest=longest, source=source)
    if algorithm != "grpo":
        text = text.replace("reward: {functions: task}\n", "")
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_a_dry_run_of_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe(tmp_path, "qwen2.5-7b"), "--dry-run", "--devices", "2", "--plan", "colocated"]) == 0
    shown = capsys.readouterr().out
    assert "no data is read, as 'qwen2.5-7b' has no tokenizer: prompts count 128 tokens" in shown
    assert "device 0,1" in shown
    assert "14.19 GiB" in shown  # 7,615,616,512 parameters of two bytes
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "mine.json"
    config.write_text(json.dumps({**KNOWN["smollm2-135m"], "num_hidden_layers": 4}))
    assert main(["train", recipe(tmp_path, str(config), "sft"), "--dry-run"]) == 0
    assert "examples count 512 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gib", "devices", "said"),
    [
        (158, "1", None),
        (157, "1", "does not fit: the run is expected to hold 157.23 GiB, and 157.00 GiB is all that the machine has"),
        (158, "2", "does not fit: 2 ranks of a machine are together expected to hold"),
    ],
)
def test_what_has_no_room_is_said_with_what_makes_it_smaller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, gib: int, devices: str, said: str | None
) -> None:
    monkeypatch.setattr(room, "limit", lambda: Limit(gib << 30, None))
    path = recipe(tmp_path, "llama-2-7b")
    assert main(["train", path, "--dry-run", "--devices", devices, "--plan", "colocated"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("does not fit" in shown) == (said is not None)
    if said is not None:
        assert said in shown
        several = "`lora.rank`, `optimizer.shard_gradients` or `optimizer.shard_weights`"
        keys = several if devices == "2" else "or `lora.rank`"
        assert shown.endswith(f"a machine with more memory, a smaller model{', ' if devices == '2' else ' '}{keys}")


def test_another_program_that_draws_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, "smollm2-135m")
    assert main(["train", path, "--dry-run", "--sampling.engine", "vllm"]) == 0
    assert "vLLM draws the tokens, in a process of its own (`sampling.engine`)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["--turns.reply", "tools.py:reply"], "neither rounds of turns nor the seconds of `turns.reply` are predicted"),
        (["--options.dynamic_sampling", "true"], "further ones of actor.generate, 9 at most, are not predicted"),
    ],
)
def test_what_is_not_predicted_of_rounds_is_said(
    keys: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [recipe(tmp_path, "smollm2-135m"), *keys]
    for command in (["train", "--dry-run"], ["simulate", "--plan", "colocated"]):
        assert main([command[0], *arguments, *command[1:]]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert said in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "known by its shape alone, without weights or a tokenizer; forecasts and dry runs take it"),
        (["--dry-run", "--epochs", "1"], "`epochs` counts the rows of data, which 'llama-7b' has no tokenizer for"),
    ],
)
def test_what_needs_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    path = recipe(tmp_path, "llama-7b")
    if arguments:
        Path(path).write_text(Path(path).read_text().replace("steps: 3\n", ""))
    assert main(["train", path, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_on_ray_says_how_many_ranks_it_has(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the run asks for it before anything else."""
    path = str(write_recipe(make_recipe(launcher="ray"), tmp_path / "recipe.json"))
    for nodes in ([], ["--nodes", "2"]):
        assert main(["train", path, "--dry-run", *nodes]) == 2
        assert "error: `launcher` ray: say with `devices` how many ranks the run has" in capsys.readouterr().err
    assert main(["train", path, "--dry-run", "--devices", "2", "--plan", "colocated"]) == 0


def test_dry_run_of_a_run_to_resume(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(make_recipe(), tmp_path / "recipe.json")
    assert main(["train", str(path), "--dry-run"]) == 0
    assert main(["train", str(path), "--dry-run", "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
