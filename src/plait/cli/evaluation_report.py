"""What evaluations come to, for people: the table before and after, the gains, and some answers. Narrow terminals get
lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from plait.cli.line_text import in_a_line
from plait.observe.console import SafeConsole
from plait.recipes.evaluation_sets import Answering, EvaluationSet, evaluation_sets
from plait.rewards.statistics import item_means, paired_difference
from plait.runtime.evaluating.parts import parts_of

if TYPE_CHECKING:
    from plait.recipes.recipe import Recipe
    from plait.rewards.statistics import Estimate
    from plait.runtime.evaluating.evaluation import Evaluation
    from plait.runtime.evaluating.evaluations import Evaluations

_ANSWERS_COLUMNS = 72
"""Below, a table of answers would be columns of single words."""


def print_comparison(console: SafeConsole, recipe: Recipe, before: Evaluations | None, after: Evaluations) -> None:
    """A table for each set, and the first answers that changed, of all sets together."""
    for of_set in evaluation_sets(recipe):
        old, new = before and before[of_set.label], after[of_set.label]
        print_before_after(console, set_text(recipe, of_set, new), list(_rows(old, new)))
        if old is None or not new.samples:
            continue
        for what, gain, form in _gains(old, new):
            verdict = "excludes zero" if gain.excludes(0) else "includes zero"
            console.print(
                Text.assemble(f"gain in {what}, same items: ", (form(gain), "bold"), f" (95 % interval {verdict})")
            )
    if recipe.evaluation.show and before is not None and after.samples:
        _print_answers(console, recipe.evaluation.show, before, after)


def set_text(recipe: Recipe, of_set: EvaluationSet, evaluation: Evaluation) -> str:
    """How many items a set has, and how its answers were drawn, in words."""
    name = f"{of_set.label}: " if of_set.label else ""
    each = f" ({of_set.items} of each source)" if of_set.source is None and recipe.data.more else ""
    text = f"{name}{evaluation.num_items} held-out items{each}"
    return f"{text}, {how_answered(recipe, of_set.answering)}" if evaluation.samples else text


def how_answered(recipe: Recipe, answering: Answering) -> str:
    """How answers of an evaluation are drawn, in words."""
    words = ["greedy" if answering.temperature == 0 else f"temperature {answering.temperature:g}"]
    if answering.filters:
        plain = Answering()
        values = {key: getattr(answering, key) for key in ("top_p", "top_k", "min_p")}
        words += [f"{key} {value:g}" for key, value in values.items() if value != getattr(plain, key)]
    if answering.max_response_tokens != recipe.sampling.max_response_tokens:
        words.append(f"{answering.max_response_tokens} tokens at most")
    if answering.samples_per_prompt > 1:
        words.append(f"{answering.samples_per_prompt} answers to each")
    return ", ".join(words)


def held_out_text(recipe: Recipe, counts: Mapping[str, int]) -> str:
    """How many items are held out, of all sets and of each; `counts`: label of each set → how many."""
    sets = evaluation_sets(recipe)
    of_each = [f"{one.label} {counts[one.label]}" for one in sets if one.label]
    if len(sets) == 1 and sets[0].source is None and recipe.data.more:
        of_each = [f"{sets[0].items} of each source"]
    return f"{sum(counts.values())} held-out items" + (f" ({', '.join(of_each)})" if of_each else "")


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
        for what, old, new in _rows(earlier.get(source), of_source):
            yield f"{source}: {what}", old, new


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


def _print_answers(console: SafeConsole, number: int, before: Evaluations, after: Evaluations) -> None:
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
