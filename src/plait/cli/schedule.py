"""`plait schedule --stages 8,4 --microbatches 32,16 …`: a fused pipeline schedule of one or two models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from plait.cli.app import Number, Place, Whole
from plait.cli.output_files import files_of
from plait.cli.schedule_report import baselines_of, record, report
from plait.cli.workload_options import WorkloadOptions
from plait.errors import ConfigError
from plait.observe.screen import say

MOST_SECONDS = 86_400
"""The longest search, in seconds."""

if TYPE_CHECKING:
    from collections.abc import Callable

    from plait.planner.search import Progress, SearchResult
    from plait.schedule.pipeline import Workload
    from plait.schedule.timeline import Timeline


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """How to search, and what to write; each field is an option."""

    engine: Literal["search", "exact", "greedy", "1f1b", "gpipe"] = "search"
    """search; exact (search and OR-Tools); or a schedule by rule."""
    seconds: Number = 10.0
    """Time to search; Ctrl-C ends it earlier and shows the best so far."""
    seed: Whole = 0
    """Seed of the search."""
    out: Place | None = None
    """File for the schedule."""
    timeline: Place | None = None
    """File for the predicted timeline."""
    picture: Place | None = None
    """File for a picture, SVG."""
    overwrite: bool = False
    """Replace files that exist."""
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
    """Print the result as JSON."""


DEFAULT = Options()


def schedule(pipelines: WorkloadOptions, options: Options = DEFAULT) -> int:
    """Schedule the pipelines of one or two models, the second in the opposite direction.

    A comma separates the two models, a colon the stages of one: `--forward 5,4` or `--forward 5:5:6:7,4:4`.
    """
    workload = pipelines.workload()
    if not 0 <= options.seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: expected a number from 0 to {MOST_SECONDS}, found {options.seconds:g}")
    files = files_of(options.overwrite, out=options.out, timeline=options.timeline, picture=options.picture)
    from plait.planner.evaluate import score
    from plait.schedule.validate import validate
    from plait.simulator.static import simulate

    result = _solve(workload, options)
    validate(result.schedule, workload)
    scored = score(workload, result.schedule)
    predicted = simulate(result.schedule, workload.duration_s(), holds=workload.holds(), caps=workload.caps)
    _write(result, predicted, files)
    baselines = baselines_of(workload)
    if options.as_json:
        say(json.dumps(record(result, scored, baselines)))
    else:
        say(report(workload, result, scored, baselines, predicted), end="")
    return 0


def _solve(workload: Workload, options: Options) -> SearchResult:
    from plait.planner.bounds import lower_bound
    from plait.planner.evaluate import score, score_order
    from plait.planner.exact import search_exact
    from plait.planner.greedy import greedy
    from plait.planner.search import SearchResult, search
    from plait.planner.tables import schedule_from, tables_of
    from plait.schedule.generators import gpipe, one_f_one_b

    engine, seconds, seed = options.engine, options.seconds, options.seed
    if engine in ("search", "exact"):
        with _progress(seconds) as show:
            if engine == "exact":
                return search_exact(workload, seconds, seed=seed, on_progress=show)
            return search(workload, seconds, seed=seed, on_progress=show)
    bound = lower_bound(workload)
    if engine == "greedy":
        t = tables_of(workload)
        order = greedy(workload, t)
        if order is None:
            raise ConfigError("--cap: the greedy rule runs into a deadlock under this cap; use --engine search")
        result, built = score_order(workload, t, order), schedule_from(workload, t, order, "greedy")
    else:
        built = gpipe(workload) if engine == "gpipe" else one_f_one_b(workload)
        result = score(workload, built)
        over = [v for v, peak in enumerate(result.peak_memory) if peak > workload.caps[v] * (1 + 1e-9)]
        if over:
            raise ConfigError(
                f"--cap: {engine} needs {result.peak_memory[over[0]]:g} on rank {over[0]}; use --engine search"
            )
    return SearchResult(built, result, bound, result.makespan <= bound * (1 + 1e-9), 0.0, 1, "rule")


@contextmanager
def _progress(seconds: float) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr, where that is a terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from plait.observe.console import SafeConsole

    columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = SafeConsole(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing (the first time compiles the search)", total=seconds)

        def show(progress: Progress) -> None:
            text = f"makespan {progress.makespan:g} (bound {progress.lower_bound:g}), memory {progress.peak_memory:g}"
            bar.update(task, completed=min(progress.seconds, seconds), description=text)

        yield show


def _write(result: SearchResult, predicted: Timeline, files: dict[str, Path]) -> None:
    from plait.output import write_file
    from plait.schedule.gantt import svg_gantt

    title = f"{result.schedule.name}: makespan {result.score.makespan:g}, lower bound {result.lower_bound:g}"
    writers = {
        "out": result.schedule.save,
        "timeline": predicted.save,
        "picture": lambda path: write_file(path, svg_gantt(predicted, title)),
    }
    for option, path in files.items():
        try:
            writers[option](path)
        except OSError as error:
            raise ConfigError(f"--{option}: cannot write {path}: {error.strerror}") from error
