"""Run a recipe from Python: `plait.train("recipe.yaml", algorithm=my_flow, reward=my_reward, steps=10)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.launch.nodes.gathered import STOPPED_CODE, Gathered
from plait.observe.loading import loading, loading_shown
from plait.observe.progress import Progress
from plait.observe.screen import say
from plait.paths import at_home
from plait.recipes.recipe import Recipe
from plait.recipes.stages import stage_names
from plait.recipes.trust import user_recipe
from plait.runtime.controller import Outcome
from plait.runtime.controller import train as train_session
from plait.runtime.evaluating.evaluations import Evaluations
from plait.runtime.folder.claim import BEGINS_ANEW, claim
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.history import Origin
from plait.runtime.folder.stored_recipe import as_begun
from plait.runtime.inputs.keys_from_python import overrides_of
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.disk_room import check_disk
from plait.runtime.prediction.kept_plans import kept_for
from plait.runtime.prediction.refinement import conclude
from plait.runtime.prediction.room import warn_of_room
from plait.runtime.prediction.run_planning import with_prediction
from plait.runtime.prediction.spending import is_searched
from plait.runtime.prepare import prepare
from plait.runtime.process import as_in_new_process, set_up
from plait.runtime.processes.alone import Alone
from plait.runtime.processes.left_places import begun_on
from plait.runtime.processes.measured import for_measuring, measured, of_asked
from plait.runtime.processes.nodes import Gathering, gathered_nodes, placed_on, said_of_kinds
from plait.runtime.session import Session
from plait.schedule.plan import Plan
from plait.stop_signals import interrupts_kept, raise_lost
from plait.user_code import refuse_while_importing


def train(
    recipe: str | Path | Recipe | None = None,
    *,
    algorithm: str | Callable[..., Any] | None = None,
    reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | Mapping[str, Any] | None = None,
    resume: bool = False,
    trust_run_code: bool = False,
    **keys: Any,
) -> Outcome:
    """Train as `plait train RECIPE --key value` does.

    Args:
        recipe: a YAML file, a Recipe, or None to give every key here. A file may have several stages: all are run, and
            a key is for every stage, or under a stage's name for that one (`policy={"steps": 20}`).
        algorithm: a built-in name, `FILE.py:FUNCTION`, or a flow.
        reward: `FILE.py:FUNCTION`, `package.module:function`, a function defined at the top level of a file, or a list
            of such; or the section, whose `functions` are any of these.
        resume: continue the run in `run_dir`.
        trust_run_code: run the flow and rewards that a recipe file in a run's own folder names.
        keys: recipe keys; a section is a dict (`sampling={"temperature": 0.9}`) and is laid over the recipe's, as
            `options` are, which may be an object of their class too; beside an `algorithm`, of which the recipe's may
            not be, `options` take their place. A list of sources takes the place of `data`.

    Returns:
        The outcome; of several stages that of the last one that ran.

    Raises:
        UserError: something in the input cannot be used, or the call stands in a file that another run imports;
            nothing was started.
        RunError: the run had to stop.
    """
    refuse_while_importing("`plait.train`")
    with loading_shown(lambda what: say(f"loading {what}", file=sys.stderr)):
        return _train(recipe, overrides_of(keys, algorithm, reward), resume=resume, trust_run_code=trust_run_code)


def _train(
    recipe: str | Path | Recipe | None,
    overrides: Sequence[tuple[str, Any]],
    *,
    resume: bool,
    trust_run_code: bool,
) -> Outcome:
    """As `train`, with the keys that are laid over the recipe."""
    if not isinstance(recipe, str | Path | Recipe | None):
        raise ConfigError(f"expected the path of a recipe, or its keys as arguments, found a {type(recipe).__name__}")
    if isinstance(recipe, Recipe):
        if overrides:
            raise ConfigError(f"give keys in the Recipe itself, found {sorted(key for key, _ in overrides)} beside it")
        loaded = recipe
        file = None
    else:
        file = None if recipe is None else Path(at_home(recipe, "recipe"))
        if file is not None and stage_names(file):
            from plait.runtime.stage_runs import train_stages

            return train_stages(file, overrides, resume=resume, trust_run_code=trust_run_code)
        loaded = user_recipe(file, overrides, trust_run_code=trust_run_code, trains=True)
    return run(loaded, resume=resume, recipe_file=file)


def run(
    recipe: Recipe,
    *,
    resume: bool = False,
    recipe_file: Path | None = None,
    gathering: Gathering = gathered_nodes,
    planned: Plan | None = None,
) -> Outcome:
    """Claim the folder, wait for other nodes if there are to be some, prepare, open, train, close.

    Args:
        recipe_file: that the recipe was read from, of which the folder gets a copy.
        gathering: who says which nodes the run is on; by default this machine, or those that its launcher starts.
        planned: the plan as it was prepared when the recipe was checked; it is followed where the run has that place.

    Raises:
        UserError: something in the input cannot be used; nothing was started.
        RunError: the run had to stop.
    """
    origin = Origin.here(recipe_file)
    with (
        as_in_new_process(recipe.threads),
        interrupts_kept(),
        claim(recipe, resume=resume) as directory,
        gathering(recipe, directory.path, loading) as nodes,
    ):
        if directory.begun:
            recipe = as_begun(directory.files.recipe, recipe)
        elif resume:
            say(BEGINS_ANEW, file=sys.stderr)
        outcome = _run_claimed(recipe, directory, directory.begun, origin, nodes, planned)
        if nodes is not None and (outcome.asked_to_stop or not outcome.finished):
            nodes.end(STOPPED_CODE, "node 0: the run was stopped")
        return outcome


def _run_claimed(
    recipe: Recipe,
    directory: RunDirectory,
    resume: bool,
    origin: Origin,
    nodes: Gathered | None,
    planned: Plan | None,
) -> Outcome:
    def prepared_for(recipe: Recipe) -> Prepared:
        recipe, machines = placed_on(recipe, nodes)
        # Else the plan that is there is that of a run to be replaced.
        begun = directory.files if directory.begun else None
        kept = kept_for(recipe, machines.count, begun, planned)
        prepared = prepare(recipe, kept=kept, machines=machines)
        return replace(prepared, plan=with_prediction(prepared, machines, kept.earlier))

    if nodes is not None and is_searched(recipe) and (unlike := said_of_kinds(nodes, recipe.device)) is not None:
        say(unlike, file=sys.stderr)
    prepared = begun_on(recipe, prepared_for, nodes)
    check_disk(prepared, directory.files, resume=resume)
    warn_of_room(prepared, prepared.plan, prepared.lengths, {} if nodes is None else nodes.joined_bytes)
    raise_lost()
    if prepared.plan.num_ranks > 1 or nodes is not None or recipe.restarts > 0:
        from plait.runtime.processes.restarting import supervised
        from plait.runtime.processes.supervisor import supervise

        of_run = partial(supervise, directory=directory, nodes=nodes)
        return supervised(of_run, prepared, directory, prepared_for, resume=resume, origin=origin, nodes=nodes)
    with Session(prepared, directory, resume=resume, leading=Alone(prepared), origin=origin) as session:
        raise_lost()
        outcome = train_session(session)
    conclude(prepared, directory.path)
    return outcome


def evaluate_model(recipe: Recipe) -> Evaluations:
    """Measure the held-out items with the untrained model: answers to prompts, or losses of examples or pairs.

    Raises:
        UserError: something in the recipe cannot be used.
    """
    set_up(recipe.threads)
    with interrupts_kept():
        prepared = of_asked(prepare(for_measuring(recipe), trains=False))
        raise_lost()
        if prepared.plan.num_ranks > 1:
            from plait.runtime.processes.measured_by_ranks import measured_by_ranks

            return measured_by_ranks(prepared)
        return measured(prepared, Alone(prepared), Progress(0))
