"""`plait plan RECIPE` finds the plan whose step takes least; `plait simulate RECIPE` foretells a given one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from plait.cli.app import Number, Whole
from plait.errors import ConfigError
from plait.observe.screen import say

if TYPE_CHECKING:
    from plait.runtime.planning import Planning

MOST_SECONDS = 86_400


def plan(
    recipe: Path,
    /,
    *,
    cluster: str | None = None,
    devices: Whole | None = None,
    lengths: str | None = None,
    seconds: Number = 5.0,
    seed: Whole = 0,
    out: Path | None = None,
    overwrite: bool = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Find the plan of a recipe whose step takes least time and fits in memory. Nothing is run or loaded.

    Parameters
    ----------
    recipe
        A recipe; its models may be known by their shapes alone.
    cluster
        A file, or a name such as 16xH100; the recipe's own devices when left out.
    devices
        As many, in place of the cluster's.
    lengths
        Response tokens: 512, or MEDIAN~SIGMA, either after PROMPT: tokens (128:300~0.8), or a run's folder. Without
        PROMPT: the data's prompts are read.
    seconds
        Time to search; Ctrl-C ends it earlier and shows the best so far.
    seed
        Of the search.
    out
        File for the plan, which `--plan` of `plait train` takes.
    overwrite
        Replace files that exist.
    as_json
        Print the result as JSON.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: expected a number above 0, at most {MOST_SECONDS}, found {seconds:g}")
    _check_files(overwrite, out=out)
    planning = _planning(recipe, cluster, devices, lengths)
    from dataclasses import replace

    from plait.cli.plan_report import Report
    from plait.planner.plan_search import Budget
    from plait.planner.search import interruptible
    from plait.runtime.planning import misfit

    with interruptible() as interrupted:
        found = planning.search(Budget(10**9, seconds, time.monotonic, interrupted), seed)
    if found.best is None:
        raise ConfigError(misfit(planning, found))
    best = planning.plan_of(found.best.places, "found")
    prediction = planning.predict(best)
    report = Report(planning, best, prediction, found, found.baselines)
    if out is not None:
        replace(best, predicted=prediction.timeline).save(out)
    say(json.dumps(report.record()) if as_json else report.text(), end="\n" if as_json else "")
    return 0


def simulate(
    recipe: Path,
    /,
    *,
    plan: str | None = None,
    cluster: str | None = None,
    devices: Whole | None = None,
    lengths: str | None = None,
    timeline: Path | None = None,
    picture: Path | None = None,
    overwrite: bool = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Foretell the steps of a recipe on a plan: seconds, memory, a timeline. Nothing is run or loaded.

    Parameters
    ----------
    recipe
        A recipe; its models may be known by their shapes alone.
    plan
        A plan file, or colocated, split, standalone; the recipe's own when left out.
    cluster
        A file, or a name such as 16xH100; the recipe's own devices when left out.
    devices
        As many, in place of the cluster's.
    lengths
        Response tokens: 512, or MEDIAN~SIGMA, either after PROMPT: tokens (128:300~0.8), or a run's folder. Without
        PROMPT: the data's prompts are read.
    timeline
        File for the predicted timeline.
    picture
        File for a picture, SVG.
    overwrite
        Replace files that exist.
    as_json
        Print the result as JSON.
    """
    _check_files(overwrite, timeline=timeline, picture=picture)
    planning = _planning(recipe, cluster, devices, lengths, plan)
    from plait.cli.plan_report import Report
    from plait.output import write_file
    from plait.schedule.gantt import svg_gantt

    whole = planning.given(plan or planning.recipe.plan)
    prediction = planning.predict(whole)
    report = Report(planning, whole, prediction)
    if timeline is not None:
        prediction.timeline.save(timeline)
    if picture is not None:
        title = f"{whole.name}: {prediction.seconds_per_step:.4g} s a step, predicted"
        write_file(picture, svg_gantt(prediction.timeline, title))
    say(json.dumps(report.record()) if as_json else report.text(), end="\n" if as_json else "")
    return 0


def _planning(
    path: Path, cluster: str | None, devices: int | None, lengths: str | None, plan: str | None = None
) -> Planning:
    """Raises UserError where the recipe, the cluster or the lengths cannot be used."""
    from plait.recipes.trust import user_recipe

    if devices is not None and devices < 1:
        raise ConfigError(f"--devices: expected at least 1, found {devices}")
    recipe = user_recipe(path, [], trust_run_code=False)
    from plait.cost.calibration import VENDORS
    from plait.cost.cluster import read_cluster
    from plait.runtime.lengths import lengths_of
    from plait.runtime.machine import machine_of
    from plait.runtime.planning import Planning, ranks_of
    from plait.runtime.prepare import outline, prompt_lengths

    found = outline(recipe)
    count = devices or ranks_of(plan or recipe.plan) or max(1, recipe.devices)
    if cluster is None:
        spec, source = machine_of(recipe, found.shapes[recipe.model], count)
    else:
        spec, source = read_cluster(cluster, devices), VENDORS
    sizes = lengths_of(lengths, found.recipe, lambda: prompt_lengths(found))
    return Planning(found.recipe, found.flow, found.models, found.shapes, spec, sizes, source)


def _check_files(overwrite: bool, **paths: Path | None) -> None:
    """Raises ConfigError where a file may not be written."""
    from plait.output import check_file

    files = {option: path for option, path in paths.items() if path is not None}
    for option, path in files.items():
        if not path.parent.is_dir():
            raise ConfigError(f"--{option}: expected a file in an existing folder, found {path}")
        check_file(path, f"--{option}", overwrite=overwrite)
    if len({path.resolve() for path in files.values()}) < len(files):
        raise ConfigError(f"expected a file each for {', '.join(f'--{option}' for option in files)}, found one twice")
