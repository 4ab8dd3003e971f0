"""The header comes before torch, tells what will run, and fits the terminal; then what is loaded is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli import main
from plait.cli.opening import header, opening, recipe_facts
from plait.errors import RESUME
from plait.observe.loading import loading
from plait.recipes.recipe import Recipe

FACTS = {"model": "smollm2-135m-instruct", "run_dir": "runs/of/a/folder/with/a/name/that/is/long"}


@pytest.mark.parametrize(
    ("keys", "package", "said"),
    [
        (["--trackers", "[wandb]"], "wandb", "pip install wandb"),
        (["--lora.rank", "8"], "peft", "install plait[lora]"),
    ],
)
def test_a_package_that_is_not_installed_is_told_before_torch_is_imported(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys, monkeypatch, keys: list[str], package: str, said: str
) -> None:
    recipe = make_recipe()
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    monkeypatch.setitem(sys.modules, "plait.runtime.api", None)  # an import fails
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["train", str(path), *keys]) == 2
    assert said in capsys.readouterr().err
    assert not Path(recipe.run_dir).exists()


def test_header_lines() -> None:
    assert header("plait train r.yaml", FACTS, 80) == [
        "plait train r.yaml",
        "  model    smollm2-135m-instruct",
        "  run_dir  runs/of/a/folder/with/a/name/that/is/long",
    ]


@pytest.mark.parametrize("columns", [40, 60])
def test_header_fits_a_narrow_terminal(columns: int) -> None:
    facts = FACTS | {"data": "reasoning_gym:basic_arithmetic with words to break at", "empty": ""}
    lines = header("plait train a/very/long/folder/name/recipe.yaml --resume", facts, columns)
    assert max(map(len, lines)) <= columns
    assert "".join("".join(lines).split()).count("smollm2-135m-instruct") == 1


def test_loading_is_shown_while_it_is_listened_to(capsys: pytest.CaptureFixture[str]) -> None:
    loading("nobody listens")
    with opening("plait train", {"a": "b"}):
        loading("model \x1b[31mred")
    loading("nobody listens any more")
    assert capsys.readouterr().err.splitlines() == [
        "plait train",
        "  a  b",
        "loading torch and transformers",
        "loading model ␛[31mred",
    ]


def test_what_a_recipe_says(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    facts = recipe_facts(make_recipe())
    assert list(facts) == ["model", "algorithm", "data", "steps", "device", "run_dir"]
    assert facts["steps"] == "2 of 3 prompts x 4 samples"
    assert facts["device"] == "cpu, float32"
    assert recipe_facts(make_recipe(), resume=True)["run_dir"].endswith(" (to be continued)")
    for epochs, said in ((1, "1 epoch takes"), (2.5, "2.5 epochs take")):
        of_epochs = make_recipe().model_copy(update={"epochs": epochs})
        assert recipe_facts(of_epochs)["steps"].startswith(f"as many as {said}, of 3 prompts")
    given = make_recipe(algorithm="sft", options={}, devices=2, plan="split")
    assert recipe_facts(given)["steps"] == "2 of 3 examples"
    for algorithm, options, rows in (
        ("kto", {}, "labelled responses"),
        ("distill", {"on_policy": False}, "examples"),
        ("distill", {"on_policy": True}, "prompts x 4 samples"),
    ):
        assert recipe_facts(make_recipe(algorithm=algorithm, options=options))["steps"] == f"2 of 3 {rows}"
    beside = recipe_facts(make_recipe(options={"ptx_coef": 0.1}, pretraining={"source": "texts.jsonl"}))
    assert (beside["data"], beside["pretraining"]) == (facts["data"], "texts.jsonl")
    own = make_recipe(algorithm="own.py:flow", samples_per_prompt=8)
    assert recipe_facts(own)["steps"] == "2 of 3 rows", "the flow says of what, and may state a number of samples"
    own = make_recipe(algorithm="own.py:flow", samples_per_prompt=4)
    assert recipe_facts(own)["steps"] == "2 of 3 rows x 4 samples"
    assert recipe_facts(given)["device"] == "cpu, 2 processes, float32, plan split"


BEFORE_TORCH = """
import sys

class Heavy:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "numba"):
            sys.stderr.write(f"importing {name}\\n")
            raise SystemExit(3)

sys.meta_path.insert(0, Heavy())
from plait.cli import main
sys.exit(main(sys.argv[1:]))
"""


def started(*argv: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", BEFORE_TORCH, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_the_header_stands_before_torch_is_imported(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(make_recipe(**{"evaluation.items": 2}).model_dump(mode="json")))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    model = ("--model", "smollm2-135m-instruct")
    generate = ("generate", *model, "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "o.jsonl"))
    for title, *argv in (
        (f"plait train {path}", "train", str(path)),
        (f"plait eval {path}", "eval", str(path)),
        ("plait generate", *generate),
    ):
        first, *facts, last, heavy = started(*argv)
        assert first == title
        assert any(line.split()[:1] == ["model"] for line in facts)
        assert last == "loading torch and transformers"
        assert heavy.startswith("importing ")


@pytest.mark.parametrize("command", [(), ("--dry-run",)])
def test_what_an_algorithm_cannot_do_is_told_before_torch_is_imported(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, command
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(make_recipe().model_dump(mode="json")))
    for module in ("plait.runtime.api", "plait.cli.dry_run"):
        monkeypatch.setitem(sys.modules, module, None)  # an import fails
    for key, value, said in (
        ("algorithm", "ppoo", "did you mean `ppo`?"),
        ("options.aggregation", "mean", "found 'mean'"),
        ("options.mini_batches", "500", "lower the former"),
        ("sampling.temperature", "0", "give a value above 0"),
    ):
        assert main(["train", str(path), *command, f"--{key}", value]) == 2
        assert said in (line := capsys.readouterr().err)
        assert key in line


@pytest.mark.parametrize("command", [(), ("--dry-run",)])
def test_a_function_that_a_file_does_not_have_is_told_before_torch_is_imported(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, command
) -> None:
    (tmp_path / "mine.py").write_text("def scored(completions, **_):\n    return [0.0 for _ in completions]\n")
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(make_recipe().model_dump(mode="json")))
    for module in ("plait.runtime.api", "plait.cli.dry_run"):
        monkeypatch.setitem(sys.modules, module, None)  # an import fails
    named = f"{tmp_path}/mine.py:scores"
    assert main(["train", str(path), *command, "--reward.functions", named]) == 2
    assert "`reward.functions`: `" in (line := capsys.readouterr().err)
    assert "has no `scores`; did you mean `scored`?" in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data.source", "nowhere.jsonl", "`data.source`: `nowhere.jsonl` does not exist"),
        ("model", "nowhere", "model: 'nowhere' is neither a known name"),
    ],
)
@pytest.mark.parametrize("command", [("train",), ("train", "--dry-run"), ("eval",)], ids=" ".join)
def test_what_is_not_there_is_told_before_torch_is_imported(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
    command,
    key,
    value,
    said,
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(make_recipe(**{"evaluation.items": 2}).model_dump(mode="json")))
    for module in ("plait.runtime.api", "plait.cli.dry_run"):
        monkeypatch.setitem(sys.modules, module, None)  # an import fails
    assert main([command[0], str(path), *command[1:], f"--{key}", value]) == 2
    assert said in (line := capsys.readouterr().err)
    assert line.count("\n") == 1


@pytest.mark.parametrize("command", [(), ("--dry-run",)])
def test_what_a_stage_lacks_is_told_before_torch_is_imported(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch, command
) -> None:
    recipe = make_recipe()
    stages = {"first": {}, "second": {"model": "@first"}}
    keys = recipe.model_dump(mode="json", exclude_unset=True)
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**keys, "stages": stages}))
    for module in ("plait.runtime.stage_runs", "plait.cli.dry_run"):
        monkeypatch.setitem(sys.modules, module, None)  # an import fails
    for key, value, said in (
        ("second.data.source", "nowhere.jsonl", "stage `second`: `data.source`: `nowhere.jsonl` does not exist"),
        ("second.options.mini_batches", "500", "stage `second`: "),
        ("first.reward.functions", "nowhere.py:f", "stage `first`: `reward.functions`: the file `nowhere.py`"),
    ):
        assert main(["train", str(path), *command, f"--{key}", value]) == 2
        assert said in (line := capsys.readouterr().err)
        assert line.count("\n") == 1
    assert not recipe.run_dir.exists()
    taken = recipe.run_dir / "second"
    taken.mkdir(parents=True)
    for name in ("recipe.yaml", "run.lock"):
        (taken / name).touch()
    if not command:
        assert main(["train", str(path)]) == 2
        assert "error: stage `second`: key `run_dir`: " in capsys.readouterr().err


def test_a_run_folder_that_is_taken_is_told_before_torch_is_imported(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    recipe = make_recipe()
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    monkeypatch.setitem(sys.modules, "plait.runtime.api", None)  # an import fails
    assert main(["train", str(path), "--resume"]) == 2
    assert f"holds no run to resume; leave {RESUME} out to begin one" in capsys.readouterr().err
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text("")
    (run_dir / "run.lock").write_text("")
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    begins = f"of which no step is saved; begin again in it with {RESUME} or `overwrite: true`"
    assert f"{begins}, by the same keys or others, or give another `run_dir`" in said
    (run_dir / "checkpoints/step-1").mkdir(parents=True)
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"continue it with {RESUME}, replace it with `overwrite: true`, or give another `run_dir`" in said
    assert (run_dir / "recipe.yaml").exists()
