"""What `plait plan` and `plait simulate` say of keys that no search may choose: staleness, drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli import main
from tests.cli.recipes import write_with_reward

PLACE = ("--cluster", "4xA100-80G", "--lengths", "64:256", "--json")
RECIPE = """
model: llama-2-7b
algorithm: grpo
prompts_per_step: 64
samples_per_prompt: 4
options: {kl_coef: 0.01}
data: {source: prompts.jsonl}
reward: {functions: [rewards.py:brief]}
sampling: {max_response_tokens: 256}
device: cuda
"""
DRAFTED = {
    "perf/spec/mean_acceptance_length": 3.0,
    "perf/spec/drafted_steps": 0.5,
    "perf/spec/draft_tokens": 400,
    "perf/spec/accepted_tokens": 200,
}
"""In half of the steps 4 more tokens computed, 2 of which are accepted: in the mean 2 tokens and 3 rows."""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write_with_reward(RECIPE, tmp_path / "grpo.yaml")


def told(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    assert main([str(word) for word in words]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    answer["by_key"] = {one["name"]: one for one in answer["variants"]}  # type: ignore[attr-defined]
    return answer


@pytest.mark.parametrize("plan", ["split", "colocated"])
def test_a_given_plan_takes_with_other_staleness_what_it_is_told_to(
    plan: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On split devices generation goes on beside training; on shared ones there is nothing to gain."""
    ask = ("simulate", recipe, *PLACE, "--plan", plan)
    now, ahead = told(capsys, *ask), told(capsys, *ask, "--max_staleness", 1)
    assert now["by_key"]["with max_staleness 1"]["seconds_per_step"] == ahead["seconds_per_step"]  # type: ignore[index]
    assert ahead["by_key"]["with max_staleness 0"]["seconds_per_step"] == now["seconds_per_step"]  # type: ignore[index]
    gain = now["seconds_per_step"] / ahead["seconds_per_step"]  # type: ignore[operator]
    assert gain > 1.2 if plan == "split" else gain < 1.01


def test_a_recipe_may_state_epochs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its `steps` are not stated then, in no variant either."""
    found = told(capsys, "simulate", recipe, *PLACE, "--plan", "split", "--epochs", 2)
    assert found["by_key"].keys() == {"with max_staleness 1"}  # type: ignore[attr-defined]


def test_a_search_weighs_plans_by_the_overlapped_step(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With samples that may be older it takes no plan that is slower than split devices, which overlap."""
    ask = ("plan", recipe, *PLACE, "--evaluations", 100, "--model", "smollm2-135m")
    ahead = told(capsys, *ask, "--max_staleness", 1)
    named = {one["name"]: one["seconds_per_step"] for one in ahead["baselines"] if one["feasible"]}  # type: ignore[attr-defined]
    assert ahead["seconds_per_step"] <= min(named.values())  # type: ignore[operator]
    now = told(capsys, *ask)
    other = now["by_key"]["with max_staleness 1"]  # type: ignore[index]
    assert other["feasible"]
    assert other["why"]
    assert "max_staleness" not in json.dumps(now["baselines"])


def test_drafts_are_predicted_where_a_run_has_made_some(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = tmp_path / "run" / "samples"
    samples.mkdir(parents=True)
    (samples / "step-000001.jsonl").write_text(json.dumps({"prompt_ids": [1] * 64, "token_ids": [1] * 256}) + "\n")
    rows = [{"step": step, "timing_s/step": 1.0, **DRAFTED} for step in (1, 2, 3)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ask = ("simulate", recipe, *PLACE[:2], "--lengths", "run", "--json", "--plan", "colocated")
    now, drafting = told(capsys, *ask), told(capsys, *ask, "--sampling.speculation", "adaptive")
    by_key = now["by_key"], drafting["by_key"]
    title = "with sampling.speculation {}"
    assert by_key[0][title.format("adaptive")]["seconds_per_step"] == drafting["seconds_per_step"]  # type: ignore[index]
    assert by_key[1][title.format("off")]["seconds_per_step"] == now["seconds_per_step"]  # type: ignore[index]
    assert drafting["seconds_per_step"] < now["seconds_per_step"]  # type: ignore[operator]
    unknown = told(capsys, "simulate", recipe, *PLACE, "--plan", "colocated")
    assert list(unknown["by_key"]) == ["with max_staleness 1"]  # type: ignore[call-overload]


def test_acceptance_may_be_stated(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe that drafts takes it; of one that does not, what drafts would bring is shown beside. Of 64 samples at
    a time: to 256, as a GPU runs by itself, they bring nothing here."""
    few = ("--sampling.max_running", 64)
    ask = ("simulate", recipe, *PLACE, "--plan", "colocated", *few)
    stated = ("--acceptance-rate", 0.5, "--acceptance-length", 3)
    off, unknown = told(capsys, *ask), told(capsys, *ask, "--sampling.speculation", "adaptive")
    assert off["speculation"] is None
    assert unknown["speculation"]["source"].startswith("plain steps, as nothing is known of what")  # type: ignore[index]
    assert unknown["seconds_per_step"] == off["seconds_per_step"]
    auto = told(capsys, *ask, "--sampling.speculation", "adaptive", *stated)
    assert auto["speculation"] == {"source": "as stated", "tokens": 3.0, "rows": 5.0, "passes": 0.0}
    fixed = told(capsys, *ask, "--sampling.speculation", 4, "--acceptance-rate", 0.5)
    assert fixed["speculation"] == auto["speculation"]
    assert fixed["seconds_per_step"] == auto["seconds_per_step"] < off["seconds_per_step"]  # type: ignore[operator]
    beside = told(capsys, *ask, *stated)["by_key"]["with sampling.speculation adaptive"]  # type: ignore[index]
    assert beside["seconds_per_step"] == auto["seconds_per_step"]
    searched = told(capsys, "plan", recipe, *PLACE, "--evaluations", 40, *few, "--sampling.speculation", 4, *stated[:2])
    assert searched["speculation"] == auto["speculation"]
    words = [*map(str, ask), "--sampling.speculation", "4", "--acceptance-rate", "0.5"]
    words.remove("--json")
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "speculation 3 tokens of a sample in a decode step, for 5 rows, as stated" in shown


def test_acceptance_that_cannot_be_is_refused(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sft.yaml").write_text(
        "model: llama-2-7b\nalgorithm: sft\nsteps: 2\ndata: {source: pairs.jsonl}\ndevice: cuda\n"
    )
    for name, words, message in (
        (recipe, ("--sampling.speculation", "adaptive", "--acceptance-rate", "0.5"), "--acceptance-length is missing"),
        (recipe, ("--sampling.speculation", "4", "--acceptance-rate", "2"), "expected a share of the draft tokens"),
        ("sft.yaml", ("--acceptance-rate", "0.5"), "this recipe generates nothing"),
    ):
        assert main(["simulate", name, *PLACE, *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_flow_that_draws_nothing_has_no_other_staleness(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sft.yaml").write_text(
        "model: llama-2-7b\nalgorithm: sft\nsteps: 2\ndata: {source: pairs.jsonl}\ndevice: cuda\n"
    )
    answer = told(capsys, "simulate", "sft.yaml", "--cluster", "2xA100-80G", "--lengths", "64:64", "--json")
    assert answer["variants"] == []
