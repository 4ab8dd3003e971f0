"""`plait train RECIPE --dry-run`: what a run will do and take."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from plait.cli.evaluation_report import held_out_text
from plait.cli.ranks_text import ranks_text
from plait.cli.staleness_report import staleness_text
from plait.cost.device_memory import memory_of_plan
from plait.cost.estimate import Arithmetic, human_bytes
from plait.cost.placement import num_devices, resolve_plan
from plait.cost.rank_order import BetterOrder, better_orders
from plait.dataflow import CallKind, CallName
from plait.errors import ConfigError
from plait.models.files.known_shapes import is_shape
from plait.observe.screen import say
from plait.recipes.algorithm import rows_of
from plait.recipes.device_checks import check_device, ranks_on_ray
from plait.recipes.engine_checks import said_of_program
from plait.recipes.plan_files import plan_file, ranks_of
from plait.recipes.recipe import Recipe
from plait.recipes.turn_checks import said_of_made, said_of_rounds
from plait.runtime.folder.claim import BEGINS_ANEW, check_packages, claim
from plait.runtime.folder.progressed import last_step
from plait.runtime.folder.stored_recipe import as_begun, check_left
from plait.runtime.inputs.held_out import num_items
from plait.runtime.inputs.prepared import Outline, Prepared
from plait.runtime.prediction.choosing import auto_plan
from plait.runtime.prediction.disk_room import KeptFiles, check_disk
from plait.runtime.prediction.forecast import STEP, predicted_seconds
from plait.runtime.prediction.kept_plans import kept_for
from plait.runtime.prediction.machine import machine_of
from plait.runtime.prediction.network import Machines
from plait.runtime.prediction.room import said_of_room
from plait.runtime.prediction.run_planning import planning_for_run
from plait.runtime.prediction.spending import is_searched, settled, spending, why_no_fusion
from plait.runtime.prepare import outline, prepare
from plait.runtime.steps.reward_pools import open_pools
from plait.schedule.named_plans import AUTO, NAMES
from plait.schedule.plan import POOL, Plan

_PLAIN: dict[str, Any] = {"box": None, "pad_edge": False, "header_style": "bold"}
"""How a plain table of rich is drawn."""


def dry_run(recipe: Recipe, *, resume: bool = False, nodes: int = 1) -> int:
    """Resolve everything that needs no weights, as a run does, and print it. Leaves nothing behind. That another run
    has the folder is said last: nothing is written here, and it is the quickest to mend.

    Args:
        nodes: machines that the run would be on; no other is asked.

    Raises:
        UserError: the run would be refused: the folder, a tracker, the data, the flow, a reward or the model.
    """
    if recipe.launcher == "ray":
        ranks_on_ray(recipe)
    recipe, machines = on_machines(recipe, nodes)
    check_packages(recipe)
    with claim(recipe, resume=True) if resume else nullcontext() as directory:
        begun = directory.files if directory is not None and directory.begun else None
    stated = recipe
    if begun is not None:
        recipe = as_begun(begun.recipe, recipe)
    elif resume:
        say(BEGINS_ANEW, file=sys.stderr)
    if (shape := shape_of(recipe)) is not None:
        foreseen = outline(recipe)
        claim(stated, resume=resume).close()
        print_shape(foreseen, shape, nodes)
        return 0
    prepared = prepare(recipe, kept=kept_for(recipe, machines.count, begun), machines=machines)
    if begun is not None:
        of_run = partial(last_step, recipe.run_dir, recipe.evaluation, prepared.recipe.steps)
        check_left(begun.recipe, prepared.recipe, lambda: of_run() is not None)
    with ExitStack() as stack:
        open_pools(prepared, stack)
    with claim(stated, resume=resume) as directory:
        check_disk(prepared, directory.files, resume=begun is not None)
    print_plan(prepared, nodes)
    return 0


def on_machines(recipe: Recipe, nodes: int) -> tuple[Recipe, Machines]:
    """A recipe that says on how many devices of so many machines it would run, and these machines: no other is asked,
    and nothing is measured."""
    if nodes > 1 and recipe.devices == 0 and ranks_of(recipe.plan) == 0:
        recipe = recipe.model_copy(update={"devices": nodes * num_devices(recipe)})
    return recipe, Machines(nodes, measures=False)


def shape_of(recipe: Recipe) -> str | None:
    """The model that the run is for, where it has no weights and no tokenizer. Others may then have none either."""
    return recipe.model if is_shape(recipe.model) else None


def print_shape(foreseen: Outline, name: str, nodes: int) -> None:
    """As `print_plan`, of models that are not there: prompts count as long as they may be.

    Raises:
        ConfigError: the length of the run depends on data, which only a tokenizer could read.
    """
    if foreseen.recipe.epochs is not None:
        raise ConfigError(f"`epochs` counts the rows of data, which {name!r} has no tokenizer for; set `steps`")
    check_device(foreseen.recipe)
    if is_searched(foreseen.recipe):
        plan = auto_plan(planning_for_run(foreseen, foreseen.lengths, Machines(nodes, measures=False)))
    else:
        plan = resolve_plan(foreseen.recipe, foreseen.flow, foreseen.models, foreseen.shapes, nodes=nodes)
    foreseen = spending(foreseen, plan, foreseen.lengths)
    plan = settled(foreseen, plan, foreseen.lengths)
    generates = bool(foreseen.flow.of_kind(CallKind.GENERATE))
    tokens = foreseen.lengths.prompts.longest if generates else foreseen.lengths.longest
    counted = f"{rows_of(foreseen.flow).noun} count {tokens} tokens"
    data = f"no data is read, as {name!r} has no tokenizer: {counted}"
    _print(foreseen, plan, data, nodes)


def print_plan(prepared: Prepared, nodes: int) -> None:
    """The graph, the batch in prompts, samples, tokens and optimizer steps, the files that are kept, where calls run,
    and an estimate of the memory of each device, with what has no room."""
    data = f"{_data_text(prepared)}\non disk, at most: {KeptFiles.of(prepared)}"
    _print(prepared, prepared.plan, data, nodes)


def _print(prepared: Outline | Prepared, plan: Plan, data: str, nodes: int) -> None:
    from rich.text import Text

    from plait.observe.console import SafeConsole

    console = SafeConsole()
    console.print(Text.assemble(("flow", "bold"), f" {prepared.flow.name}"))
    for line in str(prepared.flow).splitlines():
        console.print(_hanging(line, console.width))
    console.print()
    console.print(_batch_table(prepared))
    console.print(data)
    if prepared.flow.of_kind(CallKind.GENERATE) and (program := said_of_program(prepared.recipe)) is not None:
        console.print(program)
    console.print()
    console.print(_placement_table(plan, _named_by(prepared.recipe)))
    if plan.predicted is not None:
        console.print(_predicted_text(prepared, plan))
    for text in filter(None, (said_of_rounds(prepared.flow, prepared.recipe), said_of_made(prepared.flow))):
        console.print(text)
    if plan.keeps_pools:
        console.print(f"pools of keys and values, and CUDA graphs, stay on GPUs between rollouts (policy `{POOL}`)")
    if prepared.recipe.max_staleness:
        predicted = _predicted(prepared, plan, nodes)
        console.print(staleness_text(prepared.recipe, prepared.flow, prepared.models, plan, predicted))
    is_stated = prepared.recipe.fusion_rule.is_stated
    if plan.num_ranks > 1 and not is_stated and (why := why_no_fusion(prepared, plan)):
        console.print(f"fusion has nothing to hide: {why}")
    for better in better_orders(prepared.recipe, prepared.models, plan):
        console.print(_order_text(better))
    console.print()
    console.print(_memory_table(prepared, plan))
    if (lacking := said_of_room(prepared, plan, prepared.lengths)) is not None:
        console.print(Text(lacking, "bold"))


def _predicted_text(prepared: Outline | Prepared, plan: Plan) -> str:
    assert plan.predicted is not None, "a plan without a prediction"
    recipe = prepared.recipe
    _, source = machine_of(recipe, prepared.shapes[recipe.model], plan.num_ranks)
    return f"predicted: {predicted_seconds(plan.predicted)[STEP]:.3g} s a step, by {source.source}"


def _predicted(prepared: Outline | Prepared, plan: Plan, nodes: int) -> tuple[float, float] | None:
    """Seconds of a step of a plan as the recipe has it, and with nothing generated ahead; None: nobody can say."""
    try:
        planning = planning_for_run(prepared, prepared.lengths, Machines(nodes, measures=False))
        alone = replace(planning, recipe=planning.recipe.model_copy(update={"max_staleness": 0}))
        return planning.predict(plan).seconds_per_step, alone.predict(plan).seconds_per_step
    except ConfigError:
        return None


def _hanging(line: str, columns: int) -> str:
    """A node of the graph; what does not fit on its line stands below it, indented."""
    return textwrap.fill(line, max(columns, 24), subsequent_indent=" " * 6, break_on_hyphens=False)


def _named_by(recipe: Recipe) -> frozenset[str] | None:
    """Calls that the recipe's plan file places; None: the plan is none of a file."""
    if recipe.plan in (*NAMES, AUTO):
        return None
    return frozenset(p.call for p in plan_file(recipe.plan).placements)


def _placement_table(plan: Plan, named: frozenset[str] | None):
    from rich.table import Table

    filled = [p.call for p in plan.placements if named is not None and not named & {p.call, CallName.of(p.call).plain}]
    caption = "* not in the file: as other calls of the role, or on all ranks" if filled else None
    table = Table(f"plan {plan.name}", "mode", "ranks", "dp", "tp", "pp", "after", caption=caption, **_PLAIN)
    for p in plan.placements:
        stages = f" ({'+'.join(map(str, p.stages))} layers)" if p.stages else ""
        table.add_row(
            f"{p.call}{' *' * (p.call in filled)}",
            p.mode,
            ranks_text(p.ranks),
            str(p.dp),
            str(p.tp),
            f"{p.pp}{stages}",
            p.after,
        )
    return table


def _order_text(better: BetterOrder) -> str:
    stated, received = map(human_bytes, (better.stated_bytes, better.received_bytes))
    return (
        f"hint: with `ranks` {list(better.ranks)} for {better.placement.call} in the plan file, all devices together "
        f"would receive {received} of new weights after each training, not {stated}"
    )


def _memory_table(prepared: Outline | Prepared, plan: Plan):
    """One column for each device, or for several that hold as much of everything."""
    from rich.table import Table

    columns = memory_of_plan(prepared.recipe, prepared.flow, prepared.models, prepared.shapes, plan, prepared.lengths)
    names = [f"device {ranks_text(device.ranks)}" for device in columns] if plan.num_ranks > 1 else [""]
    table = Table("memory (estimate)", *names, **_PLAIN)
    _add_rows(table, "", [dict(device.rows) for device in columns])
    table.add_section()
    _add_rows(table, "all of it during ", [dict(device.during) for device in columns])
    expected = (human_bytes(device.expected_bytes) for device in columns)
    table.add_row("the most of these", *expected, style="bold")
    table.add_section()
    _add_rows(table, "", [dict(device.slack) for device in columns])
    table.add_row("at most", *(human_bytes(device.most_bytes) for device in columns), style="bold")
    table.add_section()
    _add_rows(table, "of host memory: ", [dict(device.host) for device in columns])
    return table


def _add_rows(table: Any, label: str, cells: Sequence[Mapping[str, int]]) -> None:
    for name in dict.fromkeys(name for column in cells for name in column):
        table.add_row(f"{label}{name}", *(human_bytes(column[name]) if name in column else "-" for column in cells))


def _batch_table(prepared: Outline | Prepared):
    from rich.table import Table

    recipe = prepared.recipe
    batch = Arithmetic.of(recipe, prepared.flow, prepared.lengths)
    table = Table("batch", "per step", f"run of {batch.steps} steps", **_PLAIN)
    rows = (
        (rows_of(prepared.flow).noun, batch.prompts_per_step),
        ("samples", batch.samples_per_step),
        ("tokens, at most", batch.max_tokens_per_step),
    )
    for name, count in rows:
        table.add_row(name, f"{count:,}", f"{count * batch.steps:,}")
    for role in prepared.flow.roles:
        if steps := prepared.flow.optimizer_steps(role, batch.steps):
            table.add_row(f"optimizer steps of {role}", f"{steps / batch.steps:,.4g}", f"{steps:,}")
    return table


def _data_text(prepared: Prepared) -> str:
    recipe = prepared.recipe
    data = prepared.train_set or next(iter(prepared.given.values()))
    epochs = recipe.prompts_per_step * recipe.steps / len(data)
    dropped = f", {data.num_dropped} left out" if data.num_dropped else ""
    return (
        f"{len(data):,} training {rows_of(prepared.flow).noun}{dropped} ({epochs:.2f} epochs), longest "
        f"{data.longest_tokens} tokens; {held_out_text(recipe, num_items(prepared.held_out))}"
    )
