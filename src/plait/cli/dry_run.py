"""`plait train RECIPE --dry-run`: what a run will do and take."""

from __future__ import annotations

from contextlib import ExitStack

from plait.runtime.estimate import Arithmetic, human_bytes, memory_table
from plait.runtime.prepare import Prepared, prepare
from plait.runtime.recipe import Recipe
from plait.runtime.session import claim, open_pools


def dry_run(recipe: Recipe, *, resume: bool = False) -> int:
    """Resolve everything that needs no weights, as a run does, and print it. Leaves nothing behind.

    Raises:
        UserError: the run would be refused: the folder, a tracker, the data, the flow, a reward or the model.
    """
    with claim(recipe, resume=resume):
        prepared = prepare(recipe)
        with ExitStack() as stack:
            open_pools(prepared, stack)
    print_plan(prepared)
    return 0


def print_plan(prepared: Prepared) -> None:
    """The graph, the batch in prompts, samples, tokens and optimizer steps, and an estimate of the memory."""
    from rich.console import Console
    from rich.table import Table

    recipe, console = prepared.recipe, Console()
    console.print(f"[bold]flow[/] {prepared.flow.name}")
    console.print(str(prepared.flow), markup=False, highlight=False)
    console.print()
    console.print(_batch_table(prepared))
    table = Table("memory (estimate)", "", box=None, pad_edge=False, header_style="bold")
    rows = memory_table(recipe, prepared.flow, prepared.models, prepared.shapes, prepared.longest_tokens)
    for what, count in rows:
        table.add_row(what, human_bytes(count))
    table.add_row("together, at most", human_bytes(sum(count for _, count in rows)), style="bold")
    console.print(table)


def _batch_table(prepared: Prepared):
    from rich.table import Table

    recipe, train_set = prepared.recipe, prepared.train_set
    batch = Arithmetic.of(recipe, prepared.flow, prepared.longest_tokens)
    table = Table("batch", "per step", f"run of {batch.steps} steps", box=None, pad_edge=False, header_style="bold")
    data = train_set or next(iter(prepared.given.values()))
    what = "prompts" if train_set is not None else next(iter(prepared.given))
    rows = (
        (what, batch.prompts_per_step),
        ("samples", batch.samples_per_step),
        ("tokens, at most", batch.max_tokens_per_step),
    )
    for name, count in rows:
        table.add_row(name, f"{count:,}", f"{count * batch.steps:,}")
    for role in prepared.flow.roles:
        if steps := prepared.flow.optimizer_steps(role, batch.steps):
            table.add_row(f"optimizer steps of {role}", f"{steps / batch.steps:,.4g}", f"{steps:,}")
    epochs = batch.prompts_per_step * batch.steps / len(data)
    dropped = f", {data.num_dropped} left out" if data.num_dropped else ""
    table.caption = (
        f"{len(data):,} training {what}{dropped} ({epochs:.2f} epochs), longest {data.longest_tokens} tokens; "
        f"{prepared.num_held_out} held out"
    )
    table.caption_justify = "left"
    return table
