"""What a run prints when it ends: the table before and after, and some answers. Narrow terminals get lists."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from plait.cli.evaluation_report import print_comparison
from plait.cost.corrections import with_carried
from plait.cost.estimate import human_bytes
from plait.launch.nodes.gathered import STOPPED_CODE
from plait.observe.console import SafeConsole
from plait.output import write_file
from plait.runtime.folder.run_files import SUMMARY, RunFiles
from plait.runtime.prediction.forecast import STEP, WORTH_SAYING, Beside, Forecast, read_forecast

if TYPE_CHECKING:
    from plait.recipes.recipe import Recipe
    from plait.runtime.controller import Outcome

_KEPT_COLUMNS = 120
_MOST_RANKS = 8


def print_outcome(recipe: Recipe, outcome: Outcome) -> None:
    """The result of a finished run, or how to go on with a stopped one, which stands last; `summary.txt` of its folder
    gets it too."""
    forecast = read_forecast(recipe.run_dir)
    recorded = StringIO()
    for console in (SafeConsole(), SafeConsole(file=recorded, width=_KEPT_COLUMNS, force_terminal=False)):
        if outcome.finished:
            _print_outcome(console, recipe, outcome)
        if forecast is not None:
            _print_forecast(console, forecast)
        if not outcome.finished:
            _print_stopped(console, recipe, outcome)
    with contextlib.suppress(OSError):  # it was said
        write_file(recipe.run_dir / SUMMARY, recorded.getvalue().lstrip("\n"))


def ended_with(outcome: Outcome) -> int:
    """The exit code of a run. One that was asked to stop has that of a stopped one though nothing was left to stop:
    what a shell was to do behind it is not to begin."""
    return STOPPED_CODE if outcome.asked_to_stop or not outcome.finished else 0


def _print_outcome(console: SafeConsole, recipe: Recipe, outcome: Outcome) -> None:
    if outcome.after is not None:
        print_comparison(console, recipe, outcome.before, outcome.after)
    if outcome.ended_early:
        console.print(f"\n{outcome.ended_early}", soft_wrap=True)
    if outcome.doctor:
        console.print(f"\n{outcome.doctor}", soft_wrap=True)
    console.print(f"\nmodel: {recipe.run_dir}/final", soft_wrap=True)
    console.print(f"metrics: {recipe.run_dir}/metrics.jsonl", soft_wrap=True)
    if RunFiles(recipe.run_dir).samples(outcome.step).exists():
        console.print(
            f"samples: `plait samples {shlex.quote(str(recipe.run_dir))}` shows them with their rewards", soft_wrap=True
        )


def _print_stopped(console: SafeConsole, recipe: Recipe, outcome: Outcome) -> None:
    where = f"\nstopped {_place(outcome)}; every step done is saved. Continue with the same command and "
    console.print(Text.assemble(where, ("--resume", "bold"), f" (run_dir {recipe.run_dir})"))


def _print_forecast(console: SafeConsole, forecast: Forecast) -> None:
    """What was predicted of calls, kinds of actions and ranks, and what the run measured."""
    table = Table("seconds of a step", "predicted", "measured", "error", box=None, pad_edge=False, header_style="bold")
    unknown = forecast.not_predicted
    for beside in _worth_a_row(forecast.calls, forecast):
        _add_beside(table, beside.name, beside, _seconds, comparable=beside.name != STEP or not unknown)
    table.add_section()
    for beside in _worth_a_row(forecast.kinds, forecast):
        _add_beside(table, f"all {beside.name}", beside, _seconds)
    table.add_section()
    for beside in _farthest(forecast.memory):
        _add_beside(table, f"memory of rank {beside.name}, at most", beside, _bytes)
    console.print()
    console.print(table)
    console.print(f"predicted by {with_carried(forecast.source, forecast.carried)}", soft_wrap=True)
    if unknown:
        console.print(f"the measured step also has {', '.join(unknown)}, which was not predicted", soft_wrap=True)
    if forecast.cold:
        console.print("measured in a first step alone, which also loads and compiles", soft_wrap=True)


def _worth_a_row(rows: Sequence[Beside], forecast: Forecast) -> list[Beside]:
    """What was predicted, the step, and what else took long."""
    return [row for row in rows if row.predicted is not None or row.name == STEP or forecast.took(row, WORTH_SAYING)]


def _farthest(ranks: Sequence[Beside]) -> list[Beside]:
    """Ranks in their order; of many those whose predictions are farthest off."""
    far = sorted(ranks, key=lambda rank: -abs(rank.error or 0.0))[:_MOST_RANKS]
    return [rank for rank in ranks if rank in far]


def _add_beside(
    table: Table, title: str, beside: Beside, text_of: Callable[[float], str], *, comparable: bool = True
) -> None:
    numbers = ("-" if value is None else text_of(value) for value in (beside.predicted, beside.measured))
    table.add_row(title, *numbers, "-" if beside.error is None or not comparable else f"{beside.error:+.0%}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}"


def _bytes(count: float) -> str:
    return human_bytes(int(count))


def _place(outcome: Outcome) -> str:
    if outcome.step == 0:
        return "before the first step"
    if outcome.step == outcome.steps:
        return "before the last evaluation"
    return f"after step {outcome.step} of {outcome.steps}"
