"""Runs the stages of a recipe, one after the other: all are checked before the first begins, and run by
the plans that were found then.

Where they run on several nodes, the commands of these join once, before the checks, and stay for all stages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, DataError
from plait.launch.nodes.gathered import Gathered
from plait.launch.nodes.place import Attached
from plait.launch.nodes.refusing import refusals_told
from plait.observe.loading import loading
from plait.observe.run_log import read_steps
from plait.observe.screen import say
from plait.output import marked
from plait.recipes.device_checks import check_divided
from plait.recipes.recipe import Recipe
from plait.recipes.stages import Stages, final_folder, in_stage, load_stages
from plait.runtime.api import run
from plait.runtime.controller import Outcome
from plait.runtime.folder.claim import claim
from plait.runtime.folder.export import export_whole
from plait.runtime.folder.progressed import last_step
from plait.runtime.folder.run_files import METRICS, RECIPE, RunFiles
from plait.runtime.folder.stored_recipe import as_begun, check_left
from plait.runtime.inputs.prepared import NOTHING_KEPT, Kept, Prepared
from plait.runtime.prediction.kept_plans import kept_for
from plait.runtime.prediction.network import Machines
from plait.runtime.prepare import prepare
from plait.runtime.processes.nodes import commands_joined, gathered_nodes, placed_on
from plait.runtime.steps.reward_pools import open_pools
from plait.schedule.plan import Plan


@contextmanager
def nodes_of_stages(stages: Stages, attached: Attached | None, *, resume: bool) -> Iterator[Gathered | None]:
    """The nodes on which all stages run, while inside; at the end they are told how it ended, and leave. None: this
    machine alone, or those that the launcher of each stage starts.

    Args:
        attached: the part of this command in a run on several nodes, which it leads.

    Raises:
        UserError: the folder of a stage cannot be taken, or as of `commands_joined`.
        RunError: nodes have not come in time.
    """
    if attached is None:
        yield None
        return
    folder = stages.folder
    with ExitStack() as stack, ExitStack() as waiting:
        stack.enter_context(_made(folder))
        with refusals_told(attached, folder, loading):
            for name in stages.recipes:  # held while the others come: no other command takes one
                with in_stage(name):
                    recipe = stages.resolved(name)
                    if not (resume and _is_done_anyway(recipe)):
                        check_divided(recipe, attached.num_nodes, attached.tasks)
                    waiting.enter_context(claim(recipe, resume=resume and _has_begun(recipe)))
        nodes = stack.enter_context(commands_joined(stages.recipes, attached, folder, loading))
        waiting.close()
        yield nodes


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder exists within the context. Afterwards it is removed, unless it existed before or is not empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


Placing = Callable[[Recipe], tuple[Recipe, Machines]]
"""The recipe of a stage → the same with the devices that it runs on, and the machines of these."""
UNJOINED: Placing = partial(placed_on, nodes=None)
"""Where no command of another node has joined."""


@dataclass(frozen=True)
class Checked:
    """What a stage was found to do before the first one begins: how many steps, and by which plan; None: it is done."""

    steps: int
    plan: Plan | None


def checked_stages(stages: Stages, *, resume: bool, placing: Placing = UNJOINED) -> dict[str, Checked]:
    """By name, all stages as they were found to be able to run; see `check_stages`. Their folders come first."""
    for name in stages.recipes:
        with in_stage(name):
            recipe = stages.resolved(name)
            claim(recipe, resume=resume and _has_begun(recipe)).close()
    return {
        name: Checked(stages.recipes[name].steps, None)
        if prepared is None
        else Checked(prepared.recipe.steps, prepared.plan)
        for name, prepared in check_stages(stages, resume=resume, placing=placing)
    }


def check_stages(stages: Stages, *, resume: bool, placing: Placing = UNJOINED) -> Iterator[tuple[str, Prepared | None]]:
    """Check the stages one by one as a run of each would, each (name, what it will do). Their models need not be there
    yet, and nothing is left behind. A stage that has begun has the plan that it began with. One that is done (None)
    need only be that of the recipe: its data, its devices and what its functions import may be gone.

    Raises:
        UserError: a stage cannot be run, or with `resume` was begun with another recipe; its name is given.
    """
    steps: dict[str, int] = {}
    say("all stages are checked before the first begins", file=sys.stderr)
    for name in stages.recipes:
        with in_stage(name):
            recipe, foreseen = stages.resolved(name), stages.foreseen(name)
            begun = RunFiles(recipe.run_dir) if resume and _has_begun(recipe) else None
            if begun is not None:
                _check_sources(stages, name, steps)
                with claim(recipe, resume=True) as directory:
                    begun = begun if directory.begun else None
            if begun is not None and _is_done_anyway(recipe):
                check_left(begun.recipe, recipe, lambda: True)
                steps[name] = recipe.steps
                yield name, None
                continue
            if begun is not None:
                foreseen = as_begun(begun.recipe, foreseen)
            foreseen, machines = placing(foreseen)
            kept, damage = _kept_of(foreseen, machines.count, begun)
            prepared = prepare(foreseen, to_come=stages.to_come(name), kept=kept, machines=machines)
            steps[name] = prepared.recipe.steps
            if damage is not None and not _is_done(recipe, steps[name]):
                raise damage
            if begun is not None:
                check_left(begun.recipe, recipe, partial(_is_done, recipe, steps[name]))
            with ExitStack() as stack:
                open_pools(prepared, stack)
            claim(recipe, resume=resume and _has_begun(recipe)).close()
        yield name, prepared


def _kept_of(recipe: Recipe, nodes: int, begun: RunFiles | None) -> tuple[Kept, DataError | None]:
    """As of `kept_for`; or nothing, and what is wrong with the plan of the folder, which a stage that is done needs no
    more."""
    try:
        return kept_for(recipe, nodes, begun), None
    except DataError as damage:
        return NOTHING_KEPT, damage


def run_stages(
    stages: Stages,
    checked: Mapping[str, Checked],
    *,
    resume: bool,
    nodes: Gathered | None = None,
    num_nodes: int = 0,
) -> Iterator[tuple[str, Recipe, Outcome | None]]:
    """Run the stages in order, each (name, recipe, outcome) as it ends; stop after one in which that was asked for.

    With `resume`, stages that are done are left as they are (outcome None), and one that was begun goes on.

    Args:
        checked: see `checked_stages`; a stage runs by that plan.
        nodes: as of `nodes_of_stages`.
        num_nodes: as of `gathered_nodes`.
    """
    gathering = partial(gathered_nodes, num_nodes=num_nodes) if nodes is None else lambda *_: nullcontext(nodes)
    for number, name in enumerate(stages.recipes, start=1):
        recipe = stages.resolved(name)
        if resume and _is_done(recipe, checked[name].steps):
            yield name, recipe, None
            continue
        text = f"stage `{name}` ({number} of {len(stages.recipes)}) begins"
        say(text, file=sys.stderr)
        if nodes is not None:
            nodes.tell(text)
        begun = resume and _has_begun(recipe)
        planned = checked[name].plan
        outcome = run(recipe, resume=begun, recipe_file=stages.file, gathering=gathering, planned=planned)
        if outcome.finished and recipe.lora.rank > 0:  # later stages begin with whole weights
            export_whole(recipe.run_dir, final_folder(recipe))
        yield name, recipe, outcome
        if outcome.asked_to_stop or not outcome.finished:
            return


def train_stages(path: Path, overrides: Sequence[tuple[str, Any]], *, resume: bool, trust_run_code: bool) -> Outcome:
    """Check all stages of a recipe file, run them, and return the outcome of the last one that ran.

    Raises:
        UserError: a stage cannot be run; nothing was started.
    """
    stages = load_stages(path, overrides, trust_run_code=trust_run_code)
    checked = checked_stages(stages, resume=resume)
    ran = [outcome for _, _, outcome in run_stages(stages, checked, resume=resume) if outcome is not None]
    if ran:
        return ran[-1]
    last = [*stages.recipes][-1]
    return run(stages.resolved(last), resume=True, planned=checked[last].plan)


def _has_begun(recipe: Recipe) -> bool:
    return (recipe.run_dir / RECIPE).is_file()


def _check_sources(stages: Stages, name: str, steps: Mapping[str, int]) -> None:
    """Raises ConfigError where a stage has begun with weights that a stage before it would now train further.

    Args:
        steps: of all stages before it.
    """
    for source in stages.sources(name):
        recipe = stages.recipes[source]
        path = recipe.run_dir / METRICS
        rows = read_steps(path) if path.is_file() else []
        done = rows[-1]["step"] if rows else 0
        if done < steps[source] and not _is_done(recipe, steps[source]):
            raise ConfigError(
                f"it has begun with what `{source}` ended with after {done} steps, and `{source}` would now be trained "
                f"to step {steps[source]}; leave `steps` of `{source}` as they were, or begin again in another "
                "`run_dir`"
            )


def _is_done_anyway(recipe: Recipe) -> bool:
    """Whether a stage is done whatever its data hold, which say how many steps epochs take."""
    return recipe.epochs is None and _is_done(recipe, recipe.steps)


def _is_done(recipe: Recipe, steps: int) -> bool:
    """Whether a stage has as many steps as it is to have, or has ended early, and its final weights are of the last
    one."""
    # A run that was made to go on has not replaced the final weights of its fewer steps yet.
    last = last_step(recipe.run_dir, recipe.evaluation, steps)
    return last is not None and marked(final_folder(recipe)).get("step") == last
