"""`plait train RECIPE --dry-run`: what a run will do and take."""

from __future__ import annotations

from plait.runtime.estimate import Arithmetic, human_bytes, memory_table
from plait.runtime.prepare import Prepared, prepare
from plait.runtime.recipe import Recipe
from plait.runtime.session import claim, open_pool


def dry_run(recipe: Recipe, *, resume: bool = False) -> int:
    """Resolve everything that needs no weights, as a run does, and print it. Leaves nothing behind.

    Raises:
        UserError: the run would be refused: the folder, a tracker, the data, the flow, a reward or the model.
    """
    from rich.console import Console
    from rich.table import Table

    with claim(recipe, resume=resume):
        prepared = prepare(recipe)
        open_pool(prepared).close()
    console = Console()
    console.print(f"[bold]flow[/] {prepared.flow.name}")
    console.print(str(prepared.flow), markup=False, highlight=False)
    console.print()
    console.print(_batch_table(prepared))
    table = Table("memory (estimate)", "", box=None, pad_edge=False, header_style="bold")
    rows = memory_table(recipe, prepared.flow, prepared.shape, prepared.train_set.longest_tokens)
    for what, count in rows:
        table.add_row(what, human_bytes(count))
    table.add_row("together, at most", human_bytes(sum(count for _, count in rows)), style="bold")
    console.print(table)
    return 0


def _batch_table(prepared: Prepared):
    from rich.table import Table

    recipe = prepared.recipe
    batch = Arithmetic.of(recipe, prepared.flow, prepared.train_set.longest_tokens)
    table = Table("batch", "per step", f"run of {batch.steps} steps", box=None, pad_edge=False, header_style="bold")
    rows = (
        ("prompts", batch.prompts_per_step),
        ("samples", batch.samples_per_step),
        ("tokens, at most", batch.max_tokens_per_step),
        ("optimizer steps", batch.optimizer_steps_per_step),
    )
    for what, count in rows:
        table.add_row(what, f"{count:,}", f"{count * batch.steps:,}")
    epochs = batch.prompts_per_step * batch.steps / len(prepared.train_set)
    dropped = f", {prepared.train_set.num_dropped} too long and dropped" if prepared.train_set.num_dropped else ""
    table.caption = (
        f"{len(prepared.train_set):,} training prompts{dropped} ({epochs:.2f} epochs), longest "
        f"{prepared.train_set.longest_tokens} tokens; {len(prepared.held_out)} held out"
    )
    table.caption_justify = "left"
    return table
