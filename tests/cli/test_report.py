"""The closing tables at any width."""

from __future__ import annotations

import io

import pytest

from plait.cli.evaluate import opening_facts
from plait.cli.evaluation_report import held_out_text, print_answers, print_before_after
from plait.cli.report import print_outcome
from plait.data.records import FinishReason, Prompt, Sample
from plait.observe.console import SafeConsole
from plait.recipes.recipe_file import load_recipe, recipe_of, with_sections
from plait.rewards.answers import Verdict
from plait.rewards.evaluation import Evaluation as TaskEvaluation
from plait.runtime.controller import Outcome
from plait.runtime.evaluating.evaluation import Evaluation
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.prediction.forecast import Beside, Forecast

ROWS = [
    ("exact accuracy [95 % interval]", "40.0% [33.5%, 46.9%]", "70.0% [63.3%, 75.9%]"),
    ("well-formed answers", "-", "100.0% [98.1%, 100.0%]"),
]


def printed(columns: int, show, *values) -> str:
    stream = io.StringIO()
    show(SafeConsole(file=stream, width=columns), *values)
    return stream.getvalue()


def test_a_wide_console_gets_a_table() -> None:
    assert printed(80, print_before_after, "200 held-out items, greedy", ROWS).splitlines() == [
        "",
        "200 held-out items, greedy      before                after                 ",
        "exact accuracy [95 % interval]  40.0% [33.5%, 46.9%]  70.0% [63.3%, 75.9%]  ",
        "well-formed answers             -                     100.0% [98.1%, 100.0%]",
    ]


@pytest.mark.parametrize("columns", [40, 60])
def test_a_narrow_console_gets_a_list(columns: int) -> None:
    assert printed(columns, print_before_after, "200 held-out items, greedy", ROWS).splitlines() == [
        "",
        "200 held-out items, greedy",
        "exact accuracy [95 % interval]",
        "  before  40.0% [33.5%, 46.9%]",
        "  after   70.0% [63.3%, 75.9%]",
        "well-formed answers",
        "  before  -",
        "  after   100.0% [98.1%, 100.0%]",
    ]


KEYS = {"model": "m", "data.source": "x.jsonl", "evaluation.items": 2}


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_answers_are_whole_at_any_width(columns: int) -> None:
    rows = [("What is 17 + 25?", "42", "I think that it is \x1b[2J41, [bold]certainly[/].", "42")]
    text = printed(columns, print_answers, ("question", "answer", "before", "after"), rows)
    assert max(map(len, text.splitlines())) <= columns
    assert "\x1b" not in text
    for word in ("17", "certainly[/].", "␛[2J41,"):
        assert word in text, word


def test_items_of_several_sources_are_told_as_what_they_are() -> None:
    """`evaluation.items` is the number of each."""
    tree = {"model": "m", "evaluation": {"items": 8}}
    of_set = {"items": 8, "sets": "held.jsonl"}
    one = recipe_of({**tree, "data": {"source": "a.jsonl"}, "evaluation": of_set})
    two = recipe_of(with_sections({**tree, "data": [{"source": "a.jsonl"}, {"source": "b.jsonl"}]}))
    assert held_out_text(one, {"": 8}) == "8 held-out items"
    assert held_out_text(two, {"": 16}) == "16 held-out items (8 of each source)"
    assert {name: opening_facts(one)[name] for name in ("data", "items")} == {"data": "held.jsonl", "items": "8"}
    facts = {"data": "a.jsonl, b.jsonl", "items": "8 of each of 2 sources"}
    assert {name: opening_facts(two)[name] for name in facts} == facts


def test_what_a_loss_logged_in_one_evaluation_alone_is_told(tmp_path, capsys) -> None:
    """A loss of the user's may log a number only where there is something to say."""
    (tmp_path / "run").mkdir()
    keys = {"model": "m", "data.source": "x.jsonl", "algorithm": "sft", "run_dir": str(tmp_path / "run")}
    keys |= {"evaluation.items": 3}
    before, after = (
        Evaluations({"": Evaluation((), (), None, logged=told, num_given=3)}) for told in ({"nll": 2.0}, {"odd": 0.5})
    )
    print_outcome(load_recipe(None, list(keys.items())), Outcome(True, 1, {}, before, after))
    assert ["odd", "-", "0.500"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_answers_that_nothing_scores_have_a_length(tmp_path, capsys) -> None:
    """Distillation has no reward, and its table had no line."""
    (tmp_path / "run").mkdir()
    keys = {"model": "m", "data.source": "x.jsonl", "algorithm": "distill", "run_dir": str(tmp_path / "run")}
    evaluation = {"evaluation.items": 1, "evaluation.show": 0}
    answers = ((Sample(Prompt(0, "q", (1,)), 0, (5,) * length, (), "", FinishReason.STOP),) for length in (3, 4))
    before, after = (Evaluations({"": Evaluation(samples, (), None)}) for samples in answers)
    print_outcome(load_recipe(None, list((keys | evaluation).items())), Outcome(True, 1, {}, before, after))
    assert "mean response length 3.0 4.0" in " ".join(capsys.readouterr().out.split())


def test_parts_of_a_reward_have_lines_where_it_is_a_sum_and_samples_a_command(tmp_path, capsys) -> None:
    """Not the part that is the accuracy once more."""
    run_dir = tmp_path / "my run"
    (run_dir / "samples").mkdir(parents=True)
    recipe = load_recipe(None, list({**KEYS, "run_dir": str(run_dir)}.items()))
    samples = tuple(Sample(Prompt(i, "q", (1,)), 0, (5,), (), "", FinishReason.STOP) for i in range(2))
    verdicts = TaskEvaluation((Verdict.EXACT, Verdict.WRONG))
    parts = [{"rewards/task": 1.0, "rewards/brief": 0.25}, {"rewards/task": 0.0, "rewards/brief": None}]
    whole = Evaluation(samples, (1.25, 0.0), verdicts, tuple(parts))
    print_outcome(recipe, Outcome(True, 1, {}, Evaluations({"": whole}), Evaluations({"": whole})))
    said = capsys.readouterr().out
    assert "mean rewards/brief 0.250 0.250" in " ".join(said.split())
    assert "rewards/task" not in said
    assert "plait samples" not in said
    (run_dir / "samples/step-000001.jsonl").touch()
    one = Evaluation(samples, (0.25, 0.5), None, ({"rewards/brief": 0.25}, {"rewards/brief": 0.5}))
    print_outcome(recipe, Outcome(True, 1, {}, Evaluations({"": one}), Evaluations({"": one})))
    said = capsys.readouterr().out
    assert "rewards/brief" not in said
    assert f"samples: `plait samples '{run_dir}'` shows them with their rewards\n" in said


@pytest.mark.parametrize(("rewards", "told"), [((1.0, 0.0), False), ((0.7, 0.0), True)])
def test_what_is_the_accuracy_once_more_has_no_line(tmp_path, capsys, rewards: tuple[float, ...], told: bool) -> None:
    """Where a judge has the verdicts, or a task's reward has parts of its own, the reward says something else."""
    (tmp_path / "run").mkdir()
    keys = {**KEYS, "run_dir": str(tmp_path / "run")}
    samples = tuple(Sample(Prompt(i, "q", (1,)), 0, (5,), (), "", FinishReason.STOP) for i in range(2))
    verdicts = TaskEvaluation((Verdict.EXACT, Verdict.WRONG))
    same = Evaluation(samples, rewards, verdicts, further={"task": (1.0, 0.0), "length": (4.0, 5.0)})
    print_outcome(
        load_recipe(None, list(keys.items())), Outcome(True, 1, {}, Evaluations({"": same}), Evaluations({"": same}))
    )
    out = capsys.readouterr().out
    assert ("mean reward" in out, "mean length" in out, "mean task" in out) == (told, True, False)


def test_how_to_go_on_with_a_stopped_run_stands_last(tmp_path, capsys) -> None:
    """Under the forecast, which may fill a screen."""
    step = Beside("step", 1.0, 2.0)
    (tmp_path / "forecast.json").write_text(Forecast("auto", "a profile", [step], [], []).to_json())
    recipe = recipe_of({"model": "m", "data": {"source": "d.jsonl"}, "steps": 3, "run_dir": str(tmp_path)})
    print_outcome(recipe, Outcome(False, 2, {}, steps=3))
    printed, kept = capsys.readouterr().out, (tmp_path / "summary.txt").read_text()
    for text in (printed, kept):
        words = " ".join(text.split())
        assert words.index("predicted by a profile") < words.index(
            "stopped after step 2 of 3; every step done is saved"
        )
        assert words.endswith(f"Continue with the same command and --resume (run_dir {tmp_path})")


def test_what_cannot_be_compared_has_no_error(tmp_path, capsys) -> None:
    """A step that has what was not predicted, which is named; what only a first step measured is said to be that."""
    recipe = recipe_of({"model": "m", "data": {"source": "d.jsonl"}, "steps": 3, "run_dir": str(tmp_path)})
    calls = [Beside("actor.train", 0.5, 1.0), Beside("reward.score", None, 3.0), Beside("step", 0.5, 4.0)]
    for forecast, error, ends in (
        (Forecast("auto", "a profile", calls, [], []), "-", "step also has reward.score, which was not predicted"),
        (Forecast("auto", "a profile", [calls[0], calls[2]], [], []), "-88%", "predicted by a profile"),
        (
            Forecast("auto", "a profile", calls[:1], [], [], cold=True),
            "",
            "first step alone, which also loads and compiles",
        ),
    ):
        (tmp_path / "forecast.json").write_text(forecast.to_json())
        print_outcome(recipe, Outcome(True, 3, {}, steps=3))
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["actor.train", "0.5", "1", "-50%"] in lines
        assert (["step", "0.5", "4", error] in lines) == bool(error)
        assert " ".join(lines[-1]).endswith(ends)
