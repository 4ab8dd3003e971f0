"""Evaluations of a run: each is recorded, the best one's weights are kept, failures are counted; what rewards log."""

from __future__ import annotations

import datetime
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.cli.report import print_outcome
from plait.data.records import FinishReason, Prompt, Sample
from plait.errors import FlowError, RunError
from plait.observe.run_log import read_rows
from plait.observe.trackers import Trackers
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.evaluating.evaluation import Evaluation, data_columns
from plait.runtime.folder.export import export_checkpoint
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.data.json_rows import written

MakeRecipe = Callable[..., Recipe]


def write_reward(folder: Path, body: str) -> None:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / "reward.py").write_text(
        "import pathlib\nhere = pathlib.Path(__file__).parent\n"
        f"def count_sevens(prompts, completions, log_extra, log_metric, **columns):\n{lines}"
    )


# A step's groups have four samples, an evaluation's one. VALUES has one score per evaluation, of two items each.
SCRIPTED = """
if len(completions) > 1: return [float(i) for i in range(len(completions))]
done = here / 'done'
number = len(done.read_text()) if done.exists() else 0
done.write_text('x' * (number + 1))
return [VALUES[number // 2]]
"""


BEST: dict[str, tuple[list[float | None], int, str | None]] = {
    "the last": ([9, 1, 2, 3], 3, None),
    "the first of equals": ([0, 3, 3, 1], 1, None),
    "nothing at first": ([0, None, 2, 1], 2, None),
    "nothing later": ([None, 1, None, None], 1, None),
    "the lowest": ([0, None, 1, 2], 2, "-eval/rewards/count_sevens/mean"),
}
"""Values of the evaluations, the step whose weights are kept, and `evaluation.best_by`."""


@pytest.mark.parametrize("which", slow_but(["the lowest"], BEST))
def test_the_best_weights_are_kept(make_recipe: MakeRecipe, tmp_path: Path, which: str) -> None:
    """Evaluations: before, after steps 1 and 2 (due), and after step 3, where none is due."""
    values, best, best_by = BEST[which]
    write_reward(tmp_path, SCRIPTED.replace("VALUES", repr(values)))
    keys = {"evaluation.items": 2, "checkpoint.every": 1, "checkpoint.keep_last": 5}
    keys |= {} if best_by is None else {"evaluation.best_by": best_by}
    first = run(make_recipe(steps=2, **keys, **{"evaluation.every": 1}))
    recipe = make_recipe(steps=3, **keys, **{"evaluation.every": 2})
    outcome = run(recipe, resume=True)
    assert first.finished
    assert outcome.finished
    rows = read_rows(recipe.run_dir / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["eval/reward"] for row in rows] == ["NaN" if value is None else value for value in values]
    for step in range(4):
        items = read_rows(recipe.run_dir / f"samples/eval-{step:06d}.jsonl")
        assert len(items) == 2
        assert {"uid", "prompt", "response", "reward", "token_ids"} <= items[0].keys()
    kept = (recipe.run_dir / "best/model.safetensors").read_bytes()
    if best == 3:
        assert kept == (recipe.run_dir / "final/model.safetensors").read_bytes()
    else:
        export_checkpoint(recipe.run_dir, tmp_path / "out", step=best, dtype="float32")
        assert kept == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_metric_that_evaluations_do_not_have_is_no_measure_of_the_best(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """The evaluation before the first step tells what there is; a resumed run may name another."""
    write_reward(tmp_path, "return [1.0] * len(completions)")
    keys = {"evaluation.items": 2, "evaluation.every": 1}
    recipe = make_recipe(steps=1, **keys, **{"evaluation.best_by": "-eval/rewards/count_seven/mean"})
    said = r"no evaluation has a metric `eval/rewards/count_seven/mean`; they have .*; did you mean `eval/rewards/count"
    with pytest.raises(RunError, match=said):
        run(recipe)
    assert not list(recipe.run_dir.glob("samples/step-*"))
    named = make_recipe(steps=1, **keys, **{"evaluation.best_by": "-eval/rewards/count_sevens/mean"})
    assert run(named, resume=True).finished
    assert (recipe.run_dir / "best/model.safetensors").exists()
    wrong = make_recipe(steps=2, **keys, **{"evaluation.best_by": "eval/count_sevens"})
    with pytest.raises(RunError, match=r"no evaluation has a metric `eval/count_sevens`; they have `eval/dropped`, "):
        run(wrong, resume=True)
    assert not (recipe.run_dir / "samples/step-000002.jsonl").exists(), "told by earlier evaluations, before a step"


def test_items_on_which_the_reward_fails_are_dropped_and_said(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reward(
        tmp_path,
        "if len(completions) == 1 and (here / 'first').exists(): (here / 'first').unlink(); raise ValueError('judge')\n"
        "return [2.0] * len(completions)",
    )
    (tmp_path / "first").touch()
    recipe = make_recipe(steps=1, **{"evaluation.items": 4, "reward.on_error": "drop"})
    outcome = run(recipe)
    before, after = read_rows(recipe.run_dir / "evaluations.jsonl")
    assert (before["eval/dropped"], after["eval/dropped"]) == (1, 0)
    assert before["eval/reward"] == 2, "over the other three"
    assert [row["reward"] for row in read_rows(recipe.run_dir / "samples/eval-000000.jsonl")].count("NaN") == 1
    said = r"reward `count_sevens` failed on sample [1-4]\.0 of the evaluation: raised ValueError"
    assert re.search(said, capsys.readouterr().err)
    assert outcome.before is not None
    assert sum(math.isnan(reward) for reward in outcome.before[""].rewards) == 1


def test_what_reward_functions_log(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    write_reward(
        tmp_path,
        "log_extra('length', [len(text) for text in completions])\n"
        "log_extra('uid', ['mine'] * len(completions))\n"
        "log_extra('replies', [[[1, [2]]]] * len(completions))\n"
        "log_metric('share', len(completions))\n"
        "log_metric('reward', 7)\n"
        "return [None] + [float(i) for i in range(len(completions) - 1)] if len(completions) > 1 else [1.0]",
    )
    recipe = make_recipe(steps=1, **{"evaluation.items": 2})
    outcome = run(recipe)
    assert (outcome.metrics["share"], outcome.metrics["reward"], outcome.metrics["logged/reward"]) == (4, 1, 7)
    for name in ("step-000001", "eval-000000"):
        for row in read_rows(recipe.run_dir / f"samples/{name}.jsonl"):
            assert row["length"] == len(row["response"]), "of samples that got no reward too"
            assert (row["logged/uid"], row["logged/replies"]) == ("mine", [[1, [2]]])
            assert "replies" not in row, "of a sample of one turn too"
            assert row["rewards/count_sevens"] == (1 if name == "eval-000000" else row.get("reward_score")), "None too"
    assert outcome.after is not None
    assert outcome.after.metrics()["eval/share"] == 1
    again = run(recipe, resume=True)
    assert again.after is not None
    assert again.after.metrics() == outcome.after.metrics(), "read back from the logs"


def test_samples_have_the_columns_of_their_row_of_the_data(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Whatever these are named."""
    rows = [
        {
            "prompt": f"what is {i}?",
            "answer": i,
            "uid": "mine",
            "meta": {"tags": ["x"], "level": None},
            "verdict": "exact",
        }
        for i in range(12)
    ]
    written(tmp_path / "rows.jsonl", rows)
    recipe = make_recipe(steps=1, **{"evaluation.items": 2, "data.source": str(tmp_path / "rows.jsonl")})
    outcome = run(recipe)
    for name in ("step-000001", "eval-000001"):
        for sample in read_rows(recipe.run_dir / f"samples/{name}.jsonl"):
            told = {key: value for key, value in sample.items() if key.startswith("data/")}
            row = next(row for row in rows if row["answer"] == told["data/answer"])
            assert told == {f"data/{key}": value for key, value in row.items() if key != "prompt"}
            assert row["prompt"] in sample["prompt"]
            assert sample["uid"] != "mine"
    again = run(recipe, resume=True)
    assert again.after is not None
    assert outcome.after is not None
    assert again.after.metrics() == outcome.after.metrics(), "the data's `verdict` is none"


def test_shown_an_evaluation_says_its_figures_and_no_answer() -> None:
    sample = Sample(Prompt(1, "asked", (1, 2)), 0, (3, 4), (-0.5, -0.5), "answered", FinishReason.STOP)
    shown = repr(Evaluation((sample,), (0.5,), None, ({"rewards/brief": 0.5},)))
    expected = "'eval/response_length': 2.0, 'eval/rewards/brief/mean': 0.5, 'eval/reward': 0.5, 'eval/dropped': 0"
    assert shown == f"Evaluation(num_items=1, metrics={{{expected}}})"


def test_each_part_of_a_reward_is_measured_before_its_weight(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of six items, three have no score of `of_one`; they are in no mean of it, and too few are left for its gain."""
    write_reward(tmp_path, "return [2.0] * len(completions)")
    (tmp_path / "one.py").write_text(
        "def of_one(completions, answer, **columns):\n"
        "    return [4.0 if int(known) % 2 else None for known in answer]\n"
    )
    rows = [{"prompt": f"what is {i}?", "answer": i} for i in range(18)]
    written(tmp_path / "rows.jsonl", rows[6:])
    written(tmp_path / "held.jsonl", rows[:6])
    functions = [f"{tmp_path}/reward.py:count_sevens", f"{tmp_path}/one.py:of_one"]
    data = {"data.source": str(tmp_path / "rows.jsonl"), "evaluation.sets": [str(tmp_path / "held.jsonl")]}
    reward = {"reward.functions": functions, "reward.weights": [1.0, 0.5]}
    recipe = make_recipe(steps=1, **{"evaluation.items": 6}, **data, **reward)
    outcome = run(recipe)
    assert outcome.after is not None
    metrics = outcome.after.metrics()
    assert metrics["eval/rewards/count_sevens/mean"] == 2
    assert metrics["eval/rewards/of_one/mean"] == 4
    assert metrics["eval/reward"] == (6 * 2 + 3 * 0.5 * 4) / 6
    again = run(recipe, resume=True)
    assert again.after is not None
    assert again.after.metrics() == metrics, "read back from the logs"
    capsys.readouterr()
    print_outcome(recipe, outcome)
    said = capsys.readouterr().out
    assert re.search(r"mean rewards/of_one +4.000 +4.000", said)
    gain = "gain in rewards/count_sevens, same items: 0.000 [0.000, 0.000]"
    assert gain in " ".join(said.split()), "whatever the width"
    assert "gain in rewards/of_one" not in said


def test_what_a_sample_says_of_its_row() -> None:
    """What is long, the prompt, and what no log can hold as it is."""
    day = datetime.date(2026, 1, 2)
    columns = {"prompt": "x", "short": "é" * 9_998, "long": "é" * 9_999, "set": {3}, "days": [day], "pair": {(1, 2): 3}}
    asked = Prompt(4, "<x>", (1,), columns)
    samples = [Sample(asked, index, (2,), (0.0,), "", FinishReason.STOP) for index in range(2)]
    told = {"data/short": "é" * 9_998, "data/set": "{3}", "data/days": ["2026-01-02"], "data/pair": "{(1, 2): 3}"}
    assert data_columns(samples) == {4: told}


def test_of_a_long_value_no_more_is_made_than_a_sample_may_say() -> None:
    """A step of a thousand prompts with a megabyte of tests each would take seconds and gigabytes."""
    made = 0

    class Line:
        def __str__(self) -> str:
            nonlocal made
            made += 1
            return "x" * 98

    asked = Prompt(4, "", (1,), {"tests": [Line()] * 100_000, "short": [Line()]})
    assert data_columns([Sample(asked, 0, (2,), (0.0,), "", FinishReason.STOP)]) == {4: {"data/short": ["x" * 98]}}
    assert made < 110


@pytest.mark.parametrize("every", slow_but([0], [0, 1]))
def test_trackers_get_each_step_once_and_the_last_evaluation_with_the_last_step(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    logged: list[tuple[int, bool, bool]] = []
    monkeypatch.setattr(
        Trackers, "log", lambda self, step, row: logged.append((step, "reward" in row, "eval/reward" in row))
    )
    run(make_recipe(steps=2, **{"evaluation.items": 2, "evaluation.every": every}))
    assert logged == [(0, False, True), (1, True, every == 1), (2, True, True)]


FLOWS = """
def loss(batch):
    return -batch.logprobs.sum()
def off_policy(prompts, actor, ref, reward):
    samples = ref.generate(prompts)
    scores = reward.score(samples)
    actor.train(samples, loss=loss)
def idle(prompts, actor, reward):
    samples = actor.generate(prompts)
    scores = reward.score(samples)
"""


def test_an_actor_that_does_not_generate_is_evaluated(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOWS)
    keys = {"algorithm": f"{tmp_path}/flow.py:off_policy", "options": {}, "evaluation.items": 2, "checkpoint.every": 1}
    recipe = make_recipe(steps=1, **keys)
    run(recipe)
    run(make_recipe(steps=2, **keys), resume=True)
    for step in (1, 2):
        samples = read_rows(recipe.run_dir / f"samples/step-{step:06d}.jsonl")
        assert {sample["policy_version"] for sample in samples} == {0}, "the reference does not move, resumed or not"
    versions = [
        {row["policy_version"] for row in read_rows(recipe.run_dir / f"samples/eval-{step:06d}.jsonl")}
        for step in (0, 1, 2)
    ]
    assert versions == [{0}, {1}, {2}]
    assert run(make_recipe(steps=1, **keys | {"evaluation.items": 0, "overwrite": True})).finished


def test_the_cost_of_answers_is_evaluated(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A constraint is on answers that were not trained on too; a judge of the same name is told apart."""
    (tmp_path / "cost.py").write_text("def cost(completions, **columns):\n    return [len(c) for c in completions]\n")
    function = f"{tmp_path}/cost.py:cost"
    keys = {"evaluation.items": 2, "cost.functions": [function], "evaluation.functions": [function]}
    recipe = make_recipe(algorithm="safe_rlhf", **keys, **{"cost.weights": [0.5]})
    outcome = run(recipe)
    for step in (0, 2):
        row = next(row for row in read_rows(recipe.run_dir / "evaluations.jsonl") if row["step"] == step)
        items = read_rows(recipe.run_dir / f"samples/eval-{step:06d}.jsonl")
        mean = sum(len(item["response"]) for item in items) / 2
        assert (row["eval/cost"], row["eval/cost#2"]) == (pytest.approx(mean / 2), pytest.approx(mean))
    again = run(recipe, resume=True)
    assert (again.before, again.after) == (outcome.before, outcome.after)


def test_what_functions_call_as_plait_calls_its_own_is_told_apart(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A judge `reward` beside the reward, and a metric `response_length` that the reward logs, beside what no JSON file
    can hold: the run is resumed all the same."""
    write_reward(
        tmp_path,
        "log_metric('response_length', 7)\n"
        "log_extra('odd', [(10**400, chr(0xDC80), None)[len(text) % 3] for text in completions])\n"
        "return [1.0 for _ in completions]",
    )
    (tmp_path / "judge.py").write_text("def reward(completions, **columns):\n    return [-2.0 for _ in completions]\n")
    keys = {"evaluation.items": 2, "evaluation.functions": [f"{tmp_path}/judge.py:reward"]}
    recipe = make_recipe(steps=1, **keys)
    outcome = run(recipe)
    row = read_rows(recipe.run_dir / "evaluations.jsonl")[-1]
    assert (row["eval/reward"], row["eval/reward#2"]) == (1.0, -2.0)
    assert (row["eval/response_length"], row["eval/logged/response_length"]) == (6.0, 7.0)
    again = run(recipe, resume=True)
    assert again.after is not None
    assert outcome.after is not None
    assert again.after.metrics() == outcome.after.metrics()


def test_a_flow_that_trains_nothing(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOWS)
    with pytest.raises(FlowError, match="`idle` trains nothing"):
        run(make_recipe(algorithm=f"{tmp_path}/flow.py:idle", options={}))


NO_REWARD = """
def quieter(prompts, actor):
    samples = actor.generate(prompts)
    actor.train(samples, loss=lambda batch: batch.aggregate(batch.logprobs, "token-mean"))
"""


def test_an_evaluation_without_a_reward_says_none(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(NO_REWARD)
    recipe = make_recipe(
        algorithm=f"{tmp_path}/flow.py:quieter", steps=1, options={}, **{"reward.functions": [], "evaluation.items": 3}
    )
    outcome = run(recipe)
    assert outcome.after is not None
    assert outcome.after[""].rewards == ()
    assert outcome.after.metrics().keys() == {"eval/response_length"}
    assert {row["reward"] for row in read_rows(recipe.run_dir / "samples/eval-000001.jsonl")} == {None}
    again = run(recipe, resume=True)
    assert again.after is not None
    assert again.after.metrics() == outcome.after.metrics()


VERDICTS = """
def knows(completions, log_extra, **columns):
    log_extra("verdict", ["exact" if len(text) % 2 else "wrong" for text in completions])
    return [float(len(text)) for text in completions]
"""


@pytest.mark.parametrize("source", slow_but(["rows"], ["rows", "task"]))
def test_functions_of_evaluations_say_the_accuracy_where_nothing_rewards(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    """As a reward does that has verdicts: in metrics, in pass@k, in the closing table and in what is read back."""
    (tmp_path / "flow.py").write_text(NO_REWARD)
    (tmp_path / "judge.py").write_text(VERDICTS)
    written(tmp_path / "rows.jsonl", [{"prompt": f"what is {i}?", "answer": "7"} for i in range(12)])
    rows, functions = f"{tmp_path}/rows.jsonl", [f"{tmp_path}/judge.py:knows"]
    keys: dict[str, Any] = {"data.source": rows, "evaluation.functions": functions}
    if source == "task":
        keys = {"data.source": "reasoning_gym:chain_sum", "data.size": 8, "evaluation.answer": "whole"}
        keys |= {"evaluation.functions": ["task", "well_formed"], "evaluation.pass_at": [1, 2]}
    keys |= {"evaluation.items": 3, "evaluation.temperature": 1.0, "evaluation.samples_per_prompt": 2}
    recipe = make_recipe(
        algorithm=f"{tmp_path}/flow.py:quieter", steps=1, options={}, **{"reward.functions": []} | keys
    )
    outcome = run(recipe)
    assert outcome.after is not None
    metrics = outcome.after.metrics()
    items = read_rows(recipe.run_dir / "samples/eval-000001.jsonl")
    verdicts = [item["verdict"] for item in items]
    assert metrics["eval/accuracy"] == verdicts.count("exact") / 6
    assert metrics["eval/well_formed"] == 1 - verdicts.count("malformed") / 6
    assert outcome.after[""].rewards == ()
    print_outcome(recipe, outcome)
    table = capsys.readouterr().out
    assert "exact accuracy" in table
    if source == "task":
        assert metrics["eval/task"] == metrics["eval/accuracy"] == metrics["eval/pass@1"]
        assert "mean task" not in table, "the same once more"
        assert {item["judged"]["well_formed#2"] for item in items} <= {0.0, 1.0}
    else:
        assert "mean knows (evaluation.functions)" in table
    again = run(recipe, resume=True)
    assert again.after is not None
    assert again.after.metrics() == metrics, "read back from the logs"


def test_its_actions_are_in_the_trace_and_in_no_step(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Evaluations before the first step, after the second (due) and after the third (the last), of two items each."""
    write_reward(tmp_path, "return [float(len(completion)) for completion in completions]")
    recipe = make_recipe(steps=3, **{"evaluation.items": 2, "evaluation.every": 2})
    run(recipe)
    spans = load_any(recipe.run_dir / "trace.json").spans
    of_evaluation = [span for span in spans if span.action.startswith("evaluate/")]
    assert {span.step for span in of_evaluation} == {None}
    assert sum(span.action == "evaluate/prefill" for span in of_evaluation) >= 3
    assert {(span.kind, span.role) for span in of_evaluation if span.lane == "compute"} == {
        ("PREFILL", "actor"),
        ("DECODE", "actor"),
    }
    scored = [span for span in of_evaluation if span.kind == "SCORE"]
    assert [(span.action, span.lane) for span in scored] == [("evaluate/count_sevens", "reward worker 0")] * 6
    updates = sorted(span.end_s for span in spans if span.kind == "STEP")
    # Before all updates, between that of step 2 and that of step 3, and behind all: two items of each.
    by_number = Counter(sum(end <= span.start_s for end in updates) for span in scored)
    assert by_number == {0: 2, 2: 2, 3: 2}
    rows = read_rows(recipe.run_dir / "metrics.jsonl")
    assert not any("evaluate" in name for row in rows for name in row)


def test_in_short_an_evaluation_measures_the_same() -> None:
    """What goes from one process to another: a message has 256 MiB."""
    samples = tuple(
        Sample(
            Prompt(item, "what?" * 100, (7,) * 100, {"tests": "x" * 1000}, source="ab"[item % 2]),
            index,
            tuple(range(300, 1300 + item)),
            tuple(-position / 7 for position in range(1000 + item)),
            "word " * 1000,
            FinishReason.LENGTH,
        )
        for item in range(4)
        for index in range(2)
    )
    whole = Evaluation(
        samples,
        (0.0, 1.0) * 4,
        None,
        further={"long": (2.0, math.nan) * 4},
        per_item=2,
        pass_at=(2,),
        logged={"a": 1.0},
    )
    short = whole.in_short()
    assert short.metrics() == pytest.approx(whole.metrics(), nan_ok=True)
    assert short.metrics()["eval/b/response_length"] == 1002
    assert (short.num_items, list(short.by_source())) == (4, ["a", "b"])
    assert 6 * len(pickle.dumps(short)) < len(pickle.dumps(whole))
