"""`plait train RECIPE` where the recipe has several stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli import train
from plait.cli.opening import opening, stages_facts, title_of
from plait.errors import RESUME, ConfigError

if TYPE_CHECKING:
    from plait.launch.nodes.place import Attached, NodeOptions
    from plait.recipes.recipe import Recipe
    from plait.recipes.stages import Stages


def train_stages(path: Path, overrides: Sequence[tuple[str, Any]], place: NodeOptions, flags: Collection[str]) -> int:
    """Run every stage, or print what each will do. All of them are checked before the first begins. A command that does
    not lead serves them all.

    Raises:
        UserError: a stage cannot be run; its name is given.
    """
    from plait.recipes.stages import load_stages

    stages = load_stages(path, overrides, trust_run_code="--trust-run-code" in flags)
    attached = attached_by(stages, place)
    dry_run, resume = "--dry-run" in flags, "--resume" in flags
    if attached is not None and not attached.leads:
        return 0 if dry_run else train.serve(attached, stages.folder, stages.recipes)
    with train.refusals_told(None if dry_run else attached, stages.folder):
        _check_early(stages, resume=resume, dry_run=dry_run)
    num_nodes = place.nodes or 0
    shown = [flag for flag in ("--dry-run", "--resume") if flag in flags]
    with opening(title_of("train", path, *shown), stages_facts(stages)):
        if dry_run:
            return _print_plans(stages, attached.num_nodes if attached else max(1, num_nodes), resume=resume)
        return _run(stages, attached, num_nodes, resume=resume)


def _check_early(stages: Stages, *, resume: bool, dry_run: bool) -> None:
    """See now, and not when torch is there, what `train` sees of a recipe before it runs, of every stage.

    Raises:
        UserError: as of `check_plan`, `train.check_flow`, `train.check_inputs` and `train.check_place`; the stage is
            named.
    """
    from plait.recipes.plan_files import check_plan
    from plait.recipes.stages import in_stage
    from plait.runtime.folder.run_files import RECIPE

    for name in stages.recipes:
        recipe = stages.foreseen(name)
        begun = resume and (recipe.run_dir / RECIPE).is_file()
        with in_stage(name):
            if not begun:
                check_plan(recipe.plan)
                train.check_inputs(train.check_flow(recipe, stages.to_come(name)), recipe)
            if not dry_run:
                train.check_place(recipe, resume=begun)


def attached_by(stages: Stages, place: NodeOptions) -> Attached | None:
    """The part of this command in a run of all stages on several nodes; None where they run on this machine alone, or
    on nodes that a launcher starts.

    Raises:
        ConfigError: as of `train.attached_by`; or the stages name different launchers.
    """
    parts = {name: train.attached_by(recipe, place) for name, recipe in stages.recipes.items()}
    first, *others = parts
    for name in others:
        if parts[name] != parts[first]:
            one, other = (f"{stages.recipes[stage].launcher} for stage `{stage}`" for stage in (first, name))
            raise ConfigError(
                f"`launcher`: the commands of several nodes stay for all stages, but it is {one} and {other}; give one "
                "beside `stages`"
            )
    return parts[first]


def _print_plans(stages: Stages, nodes: int, *, resume: bool) -> int:
    from plait.cli.dry_run import on_machines, print_plan
    from plait.observe.console import SafeConsole
    from plait.runtime.stage_runs import check_stages

    for name, prepared in check_stages(stages, resume=resume, placing=partial(on_machines, nodes=nodes)):
        SafeConsole().rule(name)
        if prepared is None:
            SafeConsole().print(_done_before(stages.recipes[name]))
        else:
            print_plan(prepared, nodes)
    return 0


def _done_before(recipe: Recipe) -> str:
    from plait.recipes.stages import final_folder

    return f"done before: {final_folder(recipe)}"


def _run(stages: Stages, attached: Attached | None, num_nodes: int, *, resume: bool) -> int:
    from plait.cli.report import ended_with, print_outcome
    from plait.observe.console import SafeConsole
    from plait.runtime.processes.nodes import placed_on
    from plait.runtime.stage_runs import checked_stages, nodes_of_stages, run_stages

    console, last = SafeConsole(), [*stages.recipes][-1]
    with nodes_of_stages(stages, attached, resume=resume) as nodes:
        checked = checked_stages(stages, resume=resume, placing=partial(placed_on, nodes=nodes))
        for name, recipe, outcome in run_stages(stages, checked, resume=resume, nodes=nodes, num_nodes=num_nodes):
            console.rule(name)
            if outcome is None:
                console.print(_done_before(recipe))
                continue
            print_outcome(recipe, outcome)
            if outcome.finished and outcome.asked_to_stop and name != last:
                console.print(f"stopped behind stage `{name}`, as was asked; go on with {RESUME}")
            if code := ended_with(outcome):
                return code
    return 0
