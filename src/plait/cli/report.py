"""What a run prints when it ends: the table before and after, and some answers. Narrow terminals get lists."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from plait.cli.line_text import in_a_line
from plait.cost.corrections import with_carried
from plait.cost.estimate import human_bytes
from plait.launch.nodes.gathered import STOPPED_CODE
from plait.observe.console import SafeConsole
from plait.output import write_file
from plait.rewards.statistics import item_means, paired_difference
from plait.runtime.evaluating.parts import parts_of
from plait.runtime.folder.run_files import SUMMARY, RunFiles
from plait.runtime.prediction.forecast import STEP, WORTH_SAYING, Beside, Forecast, read_forecast

if TYPE_CHECKING:
    from plait.recipes.recipe import Recipe
    from plait.rewards.statistics import Estimate
    from plait.runtime.controller import Outcome
    from plait.runtime.evaluating.evaluation import Evaluation

_KEPT_COLUMNS = 120
_MOST_RANKS = 8
_ANSWERS_COLUMNS = 72
"""Below, a table of answers would be columns of single words."""


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
        _print_comparison(console, recipe, outcome.before, outcome.after)
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


def how_answered(recipe: Recipe, evaluation: Evaluation) -> str:
    """How the answers of an evaluation were drawn, in words."""
    how = "greedy" if recipe.evaluation.temperature == 0 else f"temperature {recipe.evaluation.temperature:g}"
    return how + (f", {evaluation.per_item} answers to each" if evaluation.per_item > 1 else "")


def _print_comparison(console: SafeConsole, recipe: Recipe, before: Evaluation | None, after: Evaluation) -> None:
    title = held_out_text(recipe, after.num_items) + (f", {how_answered(recipe, after)}" if after.samples else "")
    print_before_after(console, title, list(_rows(before, after)))
    if before is None or not after.samples:
        return
    for what, gain, form in _gains(before, after):
        verdict = "excludes zero" if gain.excludes(0) else "includes zero"
        console.print(
            Text.assemble(f"gain in {what}, same items: ", (form(gain), "bold"), f" (95 % interval {verdict})")
        )
    if recipe.evaluation.show:
        _print_answers(console, recipe.evaluation.show, before, after)


def held_out_text(recipe: Recipe, count: int) -> str:
    """How many items are held out, `count` together; `evaluation.items` is the number of each source."""
    each = f" ({recipe.evaluation.items} of each source)" if recipe.data.more else ""
    return f"{count} held-out items{each}"


def print_before_after(console: SafeConsole, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """(what, before, after) as a table, or where the console is too narrow for it, as a list."""
    table = Table(title, "before", "after", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console.print()
    if console.measure(table, options=console.options.update(max_width=1 << 10)).maximum <= console.width:
        console.print(table)
        return
    console.print(Text(title, style="bold"))
    for what, old, new in rows:
        console.print(what)
        console.print(f"  before  {old}")
        console.print(f"  after   {new}")


def _rows(before: Evaluation | None, after: Evaluation) -> Iterator[tuple[str, str, str]]:
    if not after.samples:
        for name in after.metrics():
            yield _numbers(name.removeprefix("eval/"), name, before, after)
        return
    tasks = (before.task if before else None, after.task)
    if after.task is not None:
        yield "exact accuracy [95 % interval]", *_both(task and _share(task.exact) for task in tasks)
        yield "well-formed answers", *_both(task and _share(task.well_formed) for task in tasks)
        yield "accuracy among the well-formed", *_both(task and _share(task.exact_among_well_formed) for task in tasks)
    tells_reward, further = _telling(before, after)
    if tells_reward:
        yield _numbers("mean reward", "eval/reward", before, after)
    for name in told_parts(after):
        yield _numbers(f"mean {name}", f"eval/{name}/mean", before, after)
    for k in after.pass_at if after.tells_right else ():
        yield (
            f"pass@{k} [95 % interval]",
            *_both(evaluation and _share(evaluation.pass_at_k(k)) for evaluation in (before, after)),
        )
    for name in further:
        yield _numbers(
            "mean cost" if name == "cost" else f"mean {name} (evaluation.functions)", f"eval/{name}", before, after
        )
    if not after.is_scored:
        yield _numbers("mean response length", "eval/response_length", before, after, ".1f")
    if any(evaluation is not None and evaluation.metrics().get("eval/dropped") for evaluation in (before, after)):
        yield _numbers("items without a score, left out", "eval/dropped", before, after, ".0f")
    earlier = before.by_source() if before else {}
    for source, of_source in after.by_source().items():
        for what, *values in _rows(earlier.get(source), of_source):
            yield f"{source}: {what}", *values


def _both(texts: Iterator[str | None]) -> tuple[str, str]:
    old, new = (text or "-" for text in texts)
    return old, new


def _gains(before: Evaluation, after: Evaluation) -> Iterator[tuple[str, Estimate, Callable[[Estimate], str]]]:
    """(what, gain with its paired interval, how it is written)."""
    tells_reward, further = _telling(before, after)
    if after.task and before.task and (gain := after.task.gain_over(before.task)) is not None:
        yield "exact accuracy", gain, str
    if tells_reward and (gain := after.reward_gain(before)) is not None:
        yield "reward", gain, _plainly
    for name in told_parts(after):
        was, now = parts_of(before.extras).get(name), parts_of(after.extras)[name]
        if was and (gain := paired_difference(item_means(was, before.per_item), item_means(now, after.per_item))):
            yield name, gain, _plainly
    for name in further:
        if name in before.further and (gain := after.further_gain(before, name)) is not None:
            yield name, gain, _plainly


def _telling(before: Evaluation | None, after: Evaluation) -> tuple[bool, list[str]]:
    """Whether rewards have a line, and the names of further functions that have: not if they only say once more which
    answers are exact."""
    both = [evaluation for evaluation in (before, after) if evaluation is not None]
    further = [name for name in after.further if not all(each.is_accuracy(each.further.get(name, ())) for each in both)]
    return bool(after.rewards) and not all(each.is_accuracy(each.rewards) for each in both), further


def told_parts(evaluation: Evaluation) -> list[str]:
    """The parts that have a line: those of a reward, or of a cost, that is the sum of several; not one that only says
    once more which answers are exact."""
    parts = parts_of(evaluation.extras)
    kinds = [name.partition("/")[0] for name in parts]
    several = {kind for kind in kinds if kinds.count(kind) > 1}
    return [
        name
        for (name, scores), kind in zip(parts.items(), kinds, strict=True)
        if kind in several and not evaluation.is_accuracy(scores)
    ]


def _plainly(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _print_answers(console: SafeConsole, number: int, before: Evaluation, after: Evaluation) -> None:
    has_answers = any(sample.prompt.columns.get("answer") is not None for sample in after.samples)
    changed = [pair for pair in zip(before.samples, after.samples, strict=True) if pair[0].text != pair[1].text]
    if not changed:
        console.print("\nno answer changed")
        return
    rows = []
    for old, new in changed[:number]:
        columns = new.prompt.columns
        right = (columns.get("answer"),) if has_answers else ()
        rows.append([_text(text) for text in (columns.get("prompt"), *right, old.text, new.text)])
    heads = ("question", *(("answer",) if has_answers else ()), "before", "after")
    print_answers(console, heads, rows)


def print_answers(console: SafeConsole, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Questions with their answers as a table, or in a narrow console as a list."""
    title = "the first answers that changed"
    console.print()
    if console.width >= _ANSWERS_COLUMNS:
        table = Table(*heads, title=title, title_justify="left", header_style="dim")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    console.print(Text(title, style="italic"))
    for row in rows:
        console.print()
        for head, text in zip(heads, row, strict=True):
            console.print(Text.assemble((f"{head}: ", "dim"), text))


def _share(estimate: Estimate | None) -> str:
    return "-" if estimate is None else str(estimate)


def _numbers(
    what: str, name: str, before: Evaluation | None, after: Evaluation, form: str = ".3f"
) -> tuple[str, str, str]:
    values = (None if evaluation is None else evaluation.metrics().get(name) for evaluation in (before, after))
    old, new = ("-" if value is None else format(value, form) for value in values)
    return what, old, new


def _text(value: Any) -> str:
    said = value if isinstance(value, str) else value[-1]["content"] if isinstance(value, list) else str(value)
    return in_a_line(said, most=160)
