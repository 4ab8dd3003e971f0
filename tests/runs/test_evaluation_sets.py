"""Runs that are measured on several sets, each drawn in a way of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.cli.report import print_outcome
from plait.cli.samples import samples
from plait.errors import ConfigError, UserError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import evaluate_model, run
from plait.runtime.prepare import prepare
from tests.data.json_rows import written

MakeRecipe = Callable[..., Recipe]
SCORED = (
    "def length(completions, kind=None, **columns):\n"
    "    assert kind is None or set(kind) == {'word'}\n"
    "    return [float(len(text)) for text in completions]\n"
)


@pytest.fixture
def make(make_recipe: MakeRecipe, tmp_path: Path) -> MakeRecipe:
    (tmp_path / "scored.py").write_text(SCORED)
    rows = [{"prompt": f"{n} + 4 ="} for n in range(12)]
    others = [rows[3], rows[3], *({"prompt": f"word {n}", "kind": "word"} for n in range(2))]
    others = [{"kind": "word", **row} for row in others]
    keys: dict[str, Any] = {
        "data.source": written(tmp_path / "rows.jsonl", rows),
        "evaluation.sets": [
            {"source": written(tmp_path / "words.jsonl", others), "items": "all", "max_response_tokens": 20},
            {
                "name": "drawn",
                "source": written(tmp_path / "again.jsonl", others),
                "items": 3,
                "temperature": 1.0,
                "top_k": 1,
                "samples_per_prompt": 2,
                "max_response_tokens": 20,
                "pass_at": [2],
            },
            {},
        ],
        "evaluation.items": 2,
        "reward.functions": [f"{tmp_path}/scored.py:length"],
        "dtype": "float64",
        "steps": 2,
    }
    return lambda **more: make_recipe(**{**keys, **more})


def test_each_set_is_asked_in_its_own_way(make: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most probable of one token is what greedy answers are made of, in words and log-probs of the whole
    vocabulary."""
    recipe = make(**{"evaluation.every": 1, "evaluation.best_by": "eval/drawn/reward"})
    outcome = run(recipe)
    assert outcome.after is not None
    metrics = outcome.after.metrics()
    assert {name: len(one.samples) for name, one in outcome.after.sets.items()} == {
        "words": 3,
        "drawn": 6,
        "held_out": 2,
    }
    assert {name.split("/")[1] for name in metrics} == {"words", "drawn", "held_out"}
    assert metrics["eval/drawn/reward"] == metrics["eval/words/reward"]
    assert {"eval/drawn/pass@2", "eval/drawn/pass@2_low"} < metrics.keys()
    assert "eval/words/pass@2" not in metrics
    rows = read_rows(recipe.run_dir / "samples" / "eval-000002.jsonl")
    of = {name: [row for row in rows if row["evaluation_set"] == name] for name in outcome.after.sets}
    for greedy, one, two in zip(of["words"], of["drawn"][::2], of["drawn"][1::2], strict=True):
        assert greedy["prompt"] == one["prompt"] == two["prompt"]
        assert greedy["token_ids"] == one["token_ids"] == two["token_ids"]
        assert one["sampling_logprobs"] == pytest.approx(greedy["sampling_logprobs"], abs=1e-9)
        assert min(one["sampling_logprobs"]) < -1e-3, "of all tokens, not of the one that was left"
    most = recipe.sampling.max_response_tokens
    assert max(len(row["token_ids"]) for row in of["held_out"]) <= most < 20
    assert max(len(row["token_ids"]) for row in of["words"]) > most
    asked = {row["data/kind"] for row in of["words"]}
    assert asked == {"word"}
    trained = [
        row["prompt"] for step in (1, 2) for row in read_rows(recipe.run_dir / f"samples/step-00000{step}.jsonl")
    ]
    assert not set(trained) & {row["prompt"] for row in rows}
    assert (recipe.run_dir / "best").is_dir()

    again = run(recipe, resume=True)
    assert (again.before, again.after) == (outcome.before, outcome.after), "read back from the logs"
    capsys.readouterr()
    print_outcome(recipe, outcome)
    said = " ".join(capsys.readouterr().out.split())
    assert "words: 3 held-out items, greedy, 20 tokens at most before after" in said
    assert "drawn: 3 held-out items, temperature 1, top_k 1, 20 tokens at most, 2 answers to each" in said
    assert samples(recipe.run_dir, evaluation=True, of_set="held_out") == 0
    said = capsys.readouterr().out
    assert "2 prompts, 2 samples" in said
    assert " of held_out" in said
    with pytest.raises(ConfigError, match="no evaluation set `none`; it has words, drawn, held_out"):
        samples(recipe.run_dir, evaluation=True, of_set="none")


def test_a_set_alone_has_the_metrics_of_no_set_unless_it_has_a_name(make: MakeRecipe, tmp_path: Path) -> None:
    """The greedy answers of a set are the same beside others and alone."""
    words = str(tmp_path / "words.jsonl")
    whole = evaluate_model(make()).metrics()
    alone = evaluate_model(make(**{"evaluation.sets": words, "evaluation.max_response_tokens": 20})).metrics()
    named = {"source": words, "name": "mine", "items": "all", "max_response_tokens": 20}
    of_name = evaluate_model(make(**{"evaluation.sets": [named]})).metrics()
    assert "eval/reward" in alone, "two of its three items"
    assert {name.replace("mine", "words"): value for name, value in of_name.items()} == {
        name: value for name, value in whole.items() if name.startswith("eval/words/")
    }


@pytest.mark.slow
def test_sets_are_measured_alike_on_two_devices(make: MakeRecipe) -> None:
    one, two = (evaluate_model(make(devices=devices)) for devices in (1, 2))
    assert two.metrics() == pytest.approx(one.metrics(), abs=1e-9)


def test_given_samples_are_measured_set_by_set(make: MakeRecipe, tmp_path: Path) -> None:
    def examples(name: str, first: int) -> str:
        rows = [{"prompt": f"{n} + 4 =", "completion": f" {n + 4}"} for n in range(first, first + 6)]
        return written(tmp_path / f"{name}.jsonl", rows)

    keys = {"algorithm": "sft", "options": {}, "reward.functions": [], "samples_per_prompt": 8, "sampling": {}}
    keys |= {"data.source": examples("train", 0)}
    sets = [{"source": examples("near", 4), "items": "all"}, {"source": examples("far", 80), "items": 3}]
    recipe = make(**keys, **{"evaluation.sets": sets})
    prepared = prepare(recipe)
    assert [one.num_items for one in prepared.held_out] == [6, 3]
    assert sum(map(len, prepared.given["examples"].sets)) == 4, "two of six are among the near ones"
    both = evaluate_model(recipe).metrics()
    for one in sets:
        alone = evaluate_model(make(**keys, **{"evaluation.sets": [{**one, "name": "alone"}]})).metrics()
        name = Path(one["source"]).stem
        assert both[f"eval/{name}/actor/loss"] == pytest.approx(alone["eval/alone/actor/loss"], abs=1e-12)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"evaluation.sets": [{"source": "words.jsonl", "items": 9}]},
            "`evaluation.sets.0.items` asks for 9",
        ),
        (
            {"evaluation.sets": ["rows.jsonl"], "evaluation.items": "all"},
            "no row is left to train on after 12",
        ),
        (
            {
                "reward.functions": ["asks.py:f"],
                "data.source": "words.jsonl",
                "evaluation.sets": [{"source": "rows.jsonl", "name": "plain"}],
            },
            "evaluation set `plain`: .*`f` needs `kind`",
        ),
        ({"evaluation.max_response_tokens": 5000}, r"`evaluation.sets.2.max_response_tokens` \(5000\) .* exceed the"),
        (
            {"evaluation.sets": [{"source": "reasoning_gym:chain_sum", "items": "all"}]},
            "`evaluation.sets.0.items` is all, but the task `chain_sum` has no end",
        ),
    ],
)
def test_what_is_wrong_with_a_set_is_told_by_its_key_before_work_starts(
    make: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asks.py").write_text("def f(completions, kind, **columns):\n    return [0.0] * len(completions)\n")
    recipe = make(**keys)
    with pytest.raises(UserError, match=said):
        run(recipe)
    assert not recipe.run_dir.exists() or not (recipe.run_dir / "metrics.jsonl").exists()
