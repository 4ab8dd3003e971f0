"""`plait schedule --stages 8,4 --microbatches 32,16 …`: a fused pipeline schedule of one or two models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from plait.cli.app import Number, Whole
from plait.errors import ConfigError
from plait.json_text import whole_number
from plait.observe.screen import say

MOST_TIME = 1e12
"""Of a forward, of a memory: sums of many stay exact to the microsecond."""
MOST_SECONDS = 86_400
"""Of a search."""

if TYPE_CHECKING:
    from collections.abc import Callable

    from plait.planner.evaluate import Score
    from plait.planner.search import Found, Progress
    from plait.schedule.pipeline import Workload
    from plait.schedule.timeline import Timeline


def schedule(
    *,
    stages: str,
    microbatches: str,
    forward: str = "1",
    backward: str | None = None,
    memory: str = "1",
    cap: str | None = None,
    models: str = "actor,critic",
    engine: Literal["search", "exact", "greedy", "1f1b", "gpipe"] = "search",
    seconds: Number = 10.0,
    seed: Whole = 0,
    out: Path | None = None,
    timeline: Path | None = None,
    picture: Path | None = None,
    overwrite: bool = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Schedule the pipelines of one or two models, the second in the opposite direction.

    A comma separates the two models, a colon the stages of one: `--forward 5,4` or `--forward 5:5:6:7,4:4`.

    Parameters
    ----------
    stages
        Pipeline stages of each model, `8,4`; one must divide the other. The shorter runs as 8/4 = 2 copies.
    microbatches
        Micro-batches of each copy, `32,16`.
    forward
        Time of a forward, in any unit.
    backward
        Time of a backward; twice the forward when left out.
    memory
        Activation memory of a micro-batch on a stage, in any unit.
    cap
        Most activation memory that a rank may hold; one value, or one per rank with colons.
    models
        Names of the models.
    engine
        search; exact (search and OR-Tools); or a schedule by rule.
    seconds
        Time to search; Ctrl-C ends it earlier and shows the best so far.
    seed
        Of the search.
    out
        File for the schedule.
    timeline
        File for the predicted timeline.
    picture
        File for a picture, SVG.
    overwrite
        Replace files that exist.
    as_json
        Print the result as JSON.
    """
    workload = read_workload(stages, microbatches, forward, backward, memory, cap, models)
    if not 0 <= seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds: expected a number from 0 to {MOST_SECONDS}, found {seconds:g}")
    files = _files(overwrite, out=out, timeline=timeline, picture=picture)
    from plait.planner.evaluate import score
    from plait.schedule.validate import validate
    from plait.simulator.static import simulate

    found = _solve(workload, engine, seconds, seed)
    validate(found.schedule, workload)
    score_of_it = score(workload, found.schedule)
    predicted = simulate(found.schedule, workload.duration_s(), holds=workload.holds(), caps=workload.caps)
    _write(found, predicted, files)
    baselines = baselines_of(workload)
    if as_json:
        say(json.dumps(_record(found, score_of_it, baselines)))
    else:
        say(report(workload, found, score_of_it, baselines, predicted), end="")
    return 0


def read_workload(
    stages: str, microbatches: str, forward: str, backward: str | None, memory: str, cap: str | None, models: str
) -> Workload:
    """The workload that the options describe. Raises `ConfigError`, naming the option."""
    from plait.schedule.pipeline import fused_workload

    counts = _whole("stages", stages)
    per_model = lambda option, text: _numbers(option, text, len(counts))  # noqa: E731
    caps: float | list[float] = inf
    if cap is not None:
        values = [_number("cap", word) for word in cap.split(":")]
        caps = values[0] if len(values) == 1 else values
    names = [name.strip() for name in models.split(",")]
    if not all(name.isidentifier() for name in names) or len(set(names)) != len(names):
        raise ConfigError(f"--models: expected different plain names such as actor,critic, found {models!r}")
    try:
        return fused_workload(
            counts,
            _whole("microbatches", microbatches),
            per_model("forward", forward),
            None if backward is None else per_model("backward", backward),
            per_model("memory", memory),
            caps,
            names,
        )
    except ConfigError as error:
        raise ConfigError(f"--{error}" if str(error).startswith(_OPTIONS) else str(error)) from error


def baselines_of(workload: Workload) -> dict[str, float]:
    """Makespans to hold a fused schedule against, by name. One that a memory cap rules out is left out."""
    from plait.planner.bounds import data_parallel_ideal
    from plait.planner.evaluate import score, score_order, serial_makespan
    from plait.planner.greedy import greedy
    from plait.planner.tables import tables_of
    from plait.schedule.generators import one_f_one_b, opposite

    alone = {model: one_f_one_b(workload.only(model)) for model in workload.models()}
    baselines = {"1F1B-serial": serial_makespan(workload, alone)}
    both = [score(workload, schedule) for schedule in opposite(workload)]
    fitting = [s.makespan for s in both if all(p <= c for p, c in zip(s.peak_memory, workload.caps, strict=True))]
    if len(alone) > 1 and fitting:
        baselines["1F1B-opposite"] = min(fitting)
    order = greedy(workload)
    if order is not None:
        baselines["greedy"] = score_order(workload, tables_of(workload), order).makespan
    baselines["data-parallel ideal"] = data_parallel_ideal(workload)
    return baselines


def report(workload: Workload, found: Found, result: Score, baselines: dict[str, float], predicted: Timeline) -> str:
    """What a person reads: makespan, bound, baselines, memory and bubbles of each rank, a Gantt chart."""
    from plait.schedule.gantt import ascii_gantt

    gap = result.makespan / found.lower_bound - 1 if found.lower_bound else 0.0
    verdict = "optimal" if found.proven else f"at most {gap:.1%} above the optimum"
    idle = sum(result.bubble) / len(result.bubble)
    lines = [
        f"makespan     {result.makespan:g}   ({verdict})",
        f"lower bound  {found.lower_bound:g}",
        f"bubbles      {idle:.1%} of the ranks' time",
        f"peak memory  {result.worst_peak:g}",
    ]
    if found.stopped_by != "rule":
        ending = {"bounds": "nothing left to gain", "interrupted": "interrupted"}.get(found.stopped_by, "time is up")
        lines.append(f"search       {found.seconds:.1f} s, {found.moves} schedules tried: {ending}")
    lines += [
        "",
        "baseline                makespan   this is",
    ]
    for name, makespan in baselines.items():
        lines.append(f"{name:<22}{makespan:>10g}   {makespan / result.makespan:.2f}x as fast")
    lines.append("(the ideal has no pipeline and no all-reduce: it bounds any placement, fused or not)")
    lines += ["", "rank   busy   peak memory" + ("   cap" if max(workload.caps) < inf else "")]
    for rank, (bubble, peak) in enumerate(zip(result.bubble, result.peak_memory, strict=True)):
        limit = f"   {workload.caps[rank]:g}" if workload.caps[rank] < inf else ""
        lines.append(f"{rank:>4}  {1 - bubble:>5.1%}   {peak:>11g}{limit}")
    names = ", ".join(f"{model[0].lower()} {model[0].upper()} {model}" for model in workload.models())
    lines += ["", f"forward backward of each model: {names}; . idle", ascii_gantt(predicted)]
    return "\n".join(lines)


_OPTIONS = ("stages", "microbatches", "forward", "backward", "memory", "cap")


def _solve(workload: Workload, engine: str, seconds: float, seed: int) -> Found:
    from plait.planner.bounds import lower_bound
    from plait.planner.evaluate import score, score_order
    from plait.planner.exact import search_exact
    from plait.planner.greedy import greedy
    from plait.planner.search import Found, search
    from plait.planner.tables import schedule_from, tables_of
    from plait.schedule.generators import gpipe, one_f_one_b

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
    return Found(built, result, bound, result.makespan <= bound * (1 + 1e-9), 0.0, 1, "rule")


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


def _files(overwrite: bool, **paths: Path | None) -> dict[str, Path]:
    """The files that are asked for, by option. Raises ConfigError where one may not be written, or two are the same."""
    from plait.output import check_file

    files = {option: path for option, path in paths.items() if path is not None}
    for option, path in files.items():
        if not path.parent.is_dir():
            raise ConfigError(f"--{option}: expected a file in an existing folder, found {path}")
        check_file(path, f"--{option}", overwrite=overwrite)
    if len({path.resolve() for path in files.values()}) < len(files):
        raise ConfigError(f"expected a file each for {', '.join(f'--{option}' for option in files)}, found one twice")
    return files


def _write(found: Found, predicted: Timeline, files: dict[str, Path]) -> None:
    from plait.output import write_file
    from plait.schedule.gantt import svg_gantt

    title = f"{found.schedule.name}: makespan {found.score.makespan:g}, lower bound {found.lower_bound:g}"
    writers = {
        "out": found.schedule.save,
        "timeline": predicted.save,
        "picture": lambda path: write_file(path, svg_gantt(predicted, title)),
    }
    for option, path in files.items():
        try:
            writers[option](path)
        except OSError as error:
            raise ConfigError(f"--{option}: cannot write {path}: {error.strerror}") from error


def _record(found: Found, result: Score, baselines: dict[str, float]) -> dict[str, object]:
    return {
        "makespan": result.makespan,
        "lower_bound": found.lower_bound,
        "proven": found.proven,
        "peak_memory": list(result.peak_memory),
        "bubbles": list(result.bubble),
        "baselines": baselines,
        "seconds": round(found.seconds, 3),
        "stopped_by": found.stopped_by,
        "actions": [list(row) for row in found.schedule.ids()],
    }


def _whole(option: str, text: str) -> list[int]:
    try:
        return [whole_number(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option}: expected whole numbers such as 8,4, found {text!r:.80}") from None


def _number(option: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ConfigError(f"--{option}: expected a number, found {word!r:.80}") from None
    if not 0 <= value <= MOST_TIME:
        raise ConfigError(f"--{option}: expected a number from 0 to {MOST_TIME:g}, found {word!r:.80}")
    return value


def _numbers(option: str, text: str, num_models: int) -> list[float | list[float]]:
    """One value or list of stages per model; a single value serves all models."""
    parts = text.split(",")
    if len(parts) == 1 and ":" not in text:
        parts *= num_models
    values = [[_number(option, word) for word in part.split(":")] for part in parts]
    return [value[0] if len(value) == 1 else value for value in values]
