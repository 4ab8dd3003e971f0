"""`plait eval`: greedy unless the recipe says how its evaluations answer, and of every run what these say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli import main
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cli.recipes import write_recipe
from tests.models.tiny import save_tiny
from tests.processes import gone, until


def test_eval_is_greedy_whatever_the_recipe_samples(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that applies to no sample is NaN, which JSON does not have."""
    (tmp_path / "none.py").write_text("def none(completions, **columns):\n    return [None] * len(completions)\n")
    keys = {"evaluation.items": 2, "sampling.top_p": 0.9, "sampling.top_k": 5, "sampling.temperature": 0.0}
    recipe = make_recipe(**keys, **{"reward.functions": [f"{tmp_path}/none.py:none"]})
    path = write_recipe(recipe, tmp_path / "recipe.json")
    assert main(["eval", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (figures["items"], figures["eval/reward"]) == (2, None)


def test_eval_prints_a_table(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(make_recipe(), tmp_path / "recipe.json")
    assert main(["eval", str(path)]) == 2
    assert "`evaluation.items` is 0" in capsys.readouterr().err
    assert main(["eval", str(path), "--evaluation.items", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 held-out items, greedy, model ")
    assert "mean reward                     0." in printed


def test_eval_answers_as_the_evaluations_of_the_run(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "judge.py").write_text(
        "def length(completions, **columns):\n    return [len(c) for c in completions]\n"
    )
    keys = {"evaluation.items": 3, "evaluation.temperature": 1.0}
    path = write_recipe(
        make_recipe(**keys, **{"evaluation.functions": [f"{tmp_path}/judge.py:length"]}), tmp_path / "recipe.json"
    )
    assert main(["eval", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3 held-out items, temperature 1, model ")
    assert "mean length" in printed


@pytest.mark.parametrize(
    ("flow", "figure"),
    [
        ("sft", "actor/nll"),
        ("dpo", "rewards/accuracies"),
        ("kto", "objective/kl"),
        ("distill", "actor/divergence"),
    ],
)
def test_eval_of_what_learns_from_examples_or_pairs(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str], flow: str, figure: str
) -> None:
    row = {"completion": " 7"} if flow in ("sft", "distill") else {"chosen": " 7", "rejected": " 8"}
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row | {"prompt": f"count {i}"}) + "\n" for i in range(6)))
    own = {"reward.functions": [], "sampling": {}, "samples_per_prompt": 8, "options": {}}
    teacher = str(save_tiny(tmp_path / "teacher", seed=7)) if flow == "distill" else ""
    if teacher:
        own |= {"options": {"on_policy": False}, "reference.model": teacher}
    keys = {"data.source": str(tmp_path / "given.jsonl"), **own}
    path = write_recipe(make_recipe(algorithm=flow, **keys, **{"evaluation.items": 2}), tmp_path / "recipe.json")
    assert main(["eval", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 held-out items, model ")
    assert figure in printed
    assert main(["eval", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["items"] == 2
    assert f"{figure} {figures[f'eval/{figure}']:.3f}" in " ".join(printed.split())
    if teacher:  # it may be measured, too, by what it says itself
        assert main(["eval", str(path), "--json", "--model", teacher]) == 0
        assert json.loads(capsys.readouterr().out)["eval/actor/divergence"] == pytest.approx(0, abs=1e-6)


def test_eval_compares_what_was_trained_with_what_training_began_with(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--model` for both, each log-ratio was 0."""
    rows = [{"prompt": f"count {i}", "chosen": " 7", "rejected": " 8"} for i in range(6)]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"reward.functions": [], "sampling": {}, "samples_per_prompt": 8, "options": {}}
    keys = {"algorithm": "dpo", "data.source": str(tmp_path / "given.jsonl"), "evaluation.items": 2, **own}
    recipe = make_recipe(**keys, steps=2)
    measured = run(recipe).after
    assert measured is not None
    path = write_recipe(make_recipe(**keys), tmp_path / "recipe.json")
    assert main(["eval", str(path), "--json", "--model", str(recipe.run_dir / "final")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["eval/rewards/margins"] == pytest.approx(measured.metrics()["eval/rewards/margins"], rel=1e-3)
    assert figures["eval/rewards/margins"] != 0


@pytest.mark.process
def test_eval_on_several_devices_measures_the_same(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.py").write_text(
        "def some(completions, **columns):\n    return [sum(map(ord, c)) % 7 for c in completions]\n"
    )
    keys = {"evaluation.items": 5, "reward.functions": [f"{tmp_path}/some.py:some"], "dtype": "float64"}
    path = write_recipe(make_recipe(**keys), tmp_path / "recipe.json")
    figures = []
    for devices in ("1", "2"):
        assert main(["eval", str(path), "--devices", devices, "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0] == figures[1]
    assert figures[0]["items"] == 5


@pytest.mark.process
def test_eval_on_several_devices_says_what_went_wrong_as_one_does(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(
        "def bad(prompts, completions, **columns):\n"
        "    if '8 plus 4' in str(prompts):\n"  # of one item alone: of several any may be the first on two devices
        "        raise ValueError('no such answer')\n"
        "    return [0.0] * len(completions)\n"
    )
    keys = {"evaluation.items": 2, "reward.functions": [f"{tmp_path}/bad.py:bad"], "reward.on_error": "stop"}
    path = write_recipe(make_recipe(**keys), tmp_path / "recipe.json")
    said = []
    for devices in ("1", "2"):
        assert main(["eval", str(path), "--devices", devices]) == 1
        error = capsys.readouterr().err.partition("error:")[2]
        said.append(re.sub(r"sample \d+\.0 \(item \d", "sample", error))  # each device numbers those it has
    assert said[0] == said[1]
    assert "no such answer" in said[0]


@pytest.mark.slow
def test_what_a_killed_eval_has_left_is_removed_by_the_next(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks end with it."""
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        "def slow(completions, **columns):\n"
        "    busy = pathlib.Path(__file__).with_name('busy')\n"
        "    if not busy.exists():\n"
        "        busy.write_text(str(os.getpid()))\n"
        "        time.sleep(600)\n"
        "    return [0.0] * len(completions)\n"
    )
    place, busy = tmp_path / "tmp", tmp_path / "busy"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    keys = {"evaluation.items": 2, "devices": 2, "reward.functions": [f"{tmp_path}/slow.py:slow"]}
    path = write_recipe(make_recipe(**keys), tmp_path / "recipe.json")
    command = [sys.executable, "-m", "plait", "eval", str(path)]
    with subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(place), "COLD": "1"}, stdout=subprocess.DEVNULL
    ) as process:
        assert until(lambda: busy.exists() and busy.read_text(), 300.0)
        process.kill()
    assert gone(int(busy.read_text()))
    assert len(list(place.glob("plait.eval.*"))) == 1
    assert main(["eval", str(path)]) == 0
    assert list(place.glob("plait.*")) == []
