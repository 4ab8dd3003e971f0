"""What a run prints when it ends: the table before and after, and some answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.rewards.answers import Verdict
from plait.rewards.evaluation import Evaluation as TaskEvaluation

if TYPE_CHECKING:
    from rich.console import Console

    from plait.runtime.controller import Outcome
    from plait.runtime.recipe import Recipe


def print_outcome(recipe: Recipe, outcome: Outcome) -> None:
    """The result of a finished run, or how to go on with a stopped one."""
    from rich.console import Console

    console = Console()
    if not outcome.finished:
        console.print(
            f"\nstopped after step {outcome.step} of {recipe.steps}; everything is saved. Continue with the same "
            f"command and [bold]--resume[/] (run_dir {recipe.run_dir})"
        )
        return
    if outcome.after is not None:
        _print_comparison(console, recipe, outcome)
    console.print(f"\nmodel: {recipe.run_dir}/final   metrics: {recipe.run_dir}/metrics.jsonl")


def _print_comparison(console: Console, recipe: Recipe, outcome: Outcome) -> None:
    from rich.table import Table

    after = outcome.after
    assert after is not None
    table = Table(
        f"{len(after.samples)} held-out items, greedy", "before", "after", box=None, pad_edge=False, header_style="bold"
    )
    if after.task is None:
        table.add_row("mean reward", _number(outcome.before, "eval/reward"), _number(after.metrics(), "eval/reward"))
        console.print("\n", table)
        return
    before = (
        TaskEvaluation(tuple(Verdict(row["verdict"]) for row in outcome.before_rows)) if outcome.before_rows else None
    )
    columns = [before, after.task]
    table.add_row("exact accuracy [95 % interval]", *(str(column.exact) if column else "-" for column in columns))
    table.add_row("well-formed answers", *(str(column.well_formed) if column else "-" for column in columns))
    table.add_row(
        "accuracy among the well-formed",
        *(str(column.exact_among_well_formed or "-") if column else "-" for column in columns),
    )
    console.print("\n", table)
    if before is not None:
        gain = after.task.gain_over(before)
        verdict = "excludes zero" if gain.excludes(0) else "includes zero"
        console.print(f"gain in exact accuracy, same items: [bold]{gain}[/] (95 % interval {verdict})")
    _print_answers(console, recipe, outcome)


def _print_answers(console: Console, recipe: Recipe, outcome: Outcome) -> None:
    from rich.table import Table

    after = outcome.after
    if after is None or not recipe.evaluation.show or not outcome.before_rows:
        return
    table = Table(
        "question", "answer", "before", "after", title="some answers", title_justify="left", header_style="dim"
    )
    for old, sample in list(zip(outcome.before_rows, after.samples, strict=True))[: recipe.evaluation.show]:
        columns = sample.prompt.columns
        table.add_row(
            _text(columns.get("prompt")), _text(columns.get("answer")), _text(old["response"]), _text(sample.text)
        )
    console.print("\n", table)


def _number(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:.3f}" if name in metrics else "-"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else value[-1]["content"] if isinstance(value, list) else str(value)
    return text if len(text) <= 160 else text[:157] + "…"
