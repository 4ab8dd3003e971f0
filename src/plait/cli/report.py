"""What a run prints when it ends: the table before and after, and some answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from plait.rewards.statistics import Estimate
    from plait.runtime.controller import Outcome
    from plait.runtime.evaluation import Evaluation
    from plait.runtime.recipes.recipe import Recipe


def print_outcome(recipe: Recipe, outcome: Outcome) -> None:
    """The result of a finished run, or how to go on with a stopped one."""
    from rich.console import Console

    console = Console()
    if not outcome.finished:
        console.print(
            f"\nstopped {_place(recipe, outcome)}; every step done is saved. Continue with the same command and "
            f"[bold]--resume[/] (run_dir {recipe.run_dir})"
        )
        return
    if outcome.after is not None:
        _print_comparison(console, recipe, outcome.before, outcome.after)
    if outcome.doctor:
        console.print(f"\n{outcome.doctor}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nmodel: {recipe.run_dir}/final   metrics: {recipe.run_dir}/metrics.jsonl")


def _place(recipe: Recipe, outcome: Outcome) -> str:
    if outcome.step == 0:
        return "before the first step"
    if outcome.step == recipe.steps:
        return "before the last evaluation"
    return f"after step {outcome.step} of {recipe.steps}"


def _print_comparison(console: Console, recipe: Recipe, before: Evaluation | None, after: Evaluation) -> None:
    from rich.table import Table

    how = "greedy" if recipe.evaluation.temperature == 0 else f"temperature {recipe.evaluation.temperature:g}"
    title = f"{after.num_items} held-out items" + (f", {how}" if after.samples else "")
    table = Table(title, "before", "after", box=None, pad_edge=False, header_style="bold")
    if not after.samples:
        for name in after.metrics():
            table.add_row(name.removeprefix("eval/"), *(_number(one, name) for one in (before, after)))
        console.print("\n", table)
        return
    columns = (before.task if before else None, after.task)
    if after.task is not None:
        table.add_row("exact accuracy [95 % interval]", *(_share(task and task.exact) for task in columns))
        table.add_row("well-formed answers", *(_share(task and task.well_formed) for task in columns))
        table.add_row(
            "accuracy among the well-formed", *(_share(task and task.exact_among_well_formed) for task in columns)
        )
    elif after.rewards:
        table.add_row("mean reward", *(_number(one, "eval/reward") for one in (before, after)))
    for name in after.judged:
        table.add_row(
            "mean cost" if name == "cost" else f"judge: mean {name}",
            *(_number(one, f"eval/{name}") for one in (before, after)),
        )
    if any(one is not None and one.metrics().get("eval/dropped") for one in (before, after)):
        table.add_row(
            "items without a score, left out", *(_number(one, "eval/dropped", ".0f") for one in (before, after))
        )
    console.print("\n", table)
    if before is not None:
        for what, gain, form in _gains(before, after):
            verdict = "excludes zero" if gain.excludes(0) else "includes zero"
            console.print(f"gain in {what}, same items: [bold]{form(gain)}[/] (95 % interval {verdict})")
        if recipe.evaluation.show:
            _print_answers(console, recipe.evaluation.show, before, after)


def _gains(before: Evaluation, after: Evaluation) -> Iterator[tuple[str, Estimate, Callable[[Estimate], str]]]:
    """(what, gain with its paired interval, how it is written)."""
    from plait.rewards.statistics import paired_difference

    if after.task and before.task:
        if (gain := after.task.gain_over(before.task)) is not None:
            yield "exact accuracy", gain, str
    elif (gain := paired_difference(before.rewards, after.rewards)) is not None:
        yield "reward", gain, _plainly
    for name, scores in after.judged.items():
        if name in before.judged and (gain := paired_difference(before.judged[name], scores)) is not None:
            yield name, gain, _plainly


def _plainly(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _print_answers(console: Console, number: int, before: Evaluation, after: Evaluation) -> None:
    from rich.table import Table
    from rich.text import Text

    title = "the first answers that changed"
    has_answers = any(sample.prompt.columns.get("answer") is not None for sample in after.samples)
    heads = ("question", *(("answer",) if has_answers else ()), "before", "after")
    table = Table(*heads, title=title, title_justify="left", header_style="dim")
    changed = [pair for pair in zip(before.samples, after.samples, strict=True) if pair[0].text != pair[1].text]
    if not changed:
        console.print("\nno answer changed")
        return
    for old, new in changed[:number]:
        columns = new.prompt.columns
        right = (columns.get("answer"),) if has_answers else ()
        texts = (columns.get("prompt"), *right, old.text, new.text)
        table.add_row(*(Text(_text(text)) for text in texts))
    console.print("\n", table)


def _share(estimate: Estimate | None) -> str:
    return "-" if estimate is None else str(estimate)


def _number(evaluation: Evaluation | None, name: str, form: str = ".3f") -> str:
    return "-" if evaluation is None else format(evaluation.metrics()[name], form)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else value[-1]["content"] if isinstance(value, list) else str(value)
    return text if len(text) <= 160 else text[:157] + "…"
