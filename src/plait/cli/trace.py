"""`plait trace show FILE`, `diff A B`, `picture OUT FILES`, `chrome FILE OUT`: look at timelines."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from plait.cli.app import Place, Whole
from plait.observe.screen import say

if TYPE_CHECKING:
    from plait.schedule.plan import Plan
    from plait.schedule.timeline import Timeline

_HEAD = 1024
"""Characters in which a file says what it is."""

trace = App(name="trace", help="Look at a timeline: what ran when, on which rank.")


@trace.command
def show(
    file: Place,
    *,
    step: Whole | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Print how busy every lane was, where the time went, how long ranks waited and for whom, and a chart.

    Parameters
    ----------
    file
        A timeline, or the Chrome trace of a run.
    step
        Only this training step.
    as_json
        Print the figures as JSON.
    """
    from plait.cli.trace_text import summary_of
    from plait.schedule.gantt import ascii_gantt

    timeline = _load(file, step)
    if as_json:
        say(json.dumps(summary_of(timeline)))
        return 0
    summary = summary_of(timeline)
    say(f"{summary['source']} timeline: {summary['num_actions']} actions, {summary['makespan_s']:g} s\n")
    say(f"{'lane':<20}{'busy':>8}{'actions':>9}")
    for lane in summary["lanes"]:
        say(f"rank {lane['rank']} {lane['lane']:<13}{lane['busy']:>8.1%}{lane['actions']:>9}")
    say(f"\n{'kind':<12}{'actions':>8}{'seconds':>12}{'bytes':>14}{'tokens':>12}")
    for kind in summary["kinds"]:
        row = (kind["kind"], kind["actions"], kind["seconds"], kind["bytes"], kind["tokens"])
        say("{:<12}{:>8}{:>12.6g}{:>14}{:>12}".format(*row))
    if summary["waits"]:
        say(f"\n{'waiting':<12}{'seconds':>10}{'share':>8}  for")
    for wait in summary["waits"]:
        whom = "nothing on another rank" if wait["for_rank"] is None else f"rank {wait['for_rank']}: {wait['for']}"
        say(f"rank {wait['rank']:<7}{wait['seconds']:>10.4g}{wait['share']:>8.1%}  {whom}")
    say("\n" + ascii_gantt(timeline.shifted(-min((s.start_s for s in timeline.spans), default=0.0))), end="")
    return 0


@trace.command
def diff(
    a: Place,
    b: Place,
    *,
    step: Whole | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Compare two timelines: whether they have the same actions in the same order, and how long these take. A predicted
    timeline has one action for each call; it is compared with a measured one by busy seconds of calls, ranks and kinds
    of actions. Steps that the run did by another plan are left out.

    Exit code 0 when both ran the same actions in the same order, or every whole call on the same ranks; else 1.

    Parameters
    ----------
    a
        A timeline, a Chrome trace, the folder of a run or a plan with a prediction; errors are relative to it.
    b
        Another.
    step
        Only this training step; of calls that are predicted whole, which are the same in every step, all.
    as_json
        Print the comparison as JSON.
    """
    from dataclasses import asdict

    from plait.cli.trace_text import actions_text, calls_text
    from plait.schedule.compare import compare, compare_calls, whole_side

    left, right = _timeline_of(a), _timeline_of(b)
    whole = whole_side(left, right)
    if whole != "a":
        left = _of_step(left, step, a) if step is not None or whole is None else _by_plan(left, a, b)
    if whole != "b":
        right = _of_step(right, step, b) if step is not None or whole is None else _by_plan(right, b, a)
    if whole is not None:
        by_call = compare_calls(left, right, whole)
        record = {**asdict(by_call), "same_calls": by_call.same_calls}
        say(json.dumps(record) if as_json else calls_text(by_call), end="\n" if as_json else "")
        return 0 if by_call.same_calls else 1
    comparison = compare(left, right)
    if as_json:
        say(json.dumps({**asdict(comparison), "same_rows": comparison.same_rows}))
    else:
        say(actions_text(comparison), end="")
    return 0 if comparison.same_rows else 1


@trace.command
def picture(out: Place, *files: Place, step: Whole | None = None, overwrite: bool = False) -> int:
    """Draw timelines, one above the other on one scale: a row for each rank and lane, a box for each action.

    Parameters
    ----------
    out
        The picture to write, SVG.
    files
        Timelines, or Chrome traces of runs.
    step
        Only this training step.
    overwrite
        Replace a picture that exists.
    """
    from plait.cli.output_files import check_picture
    from plait.errors import ConfigError
    from plait.output import check_file, write_file
    from plait.schedule.gantt import svg_gantts

    if not files:
        raise ConfigError("FILES: expected at least one timeline, found none")
    check_picture(out, "OUT")
    check_file(out, "OUT", overwrite=overwrite, inputs=files)
    timelines = [_load(file, step) for file in files]
    begins = [min((span.start_s for span in timeline.spans), default=0.0) for timeline in timelines]
    from_zero = [timeline.shifted(-first) for timeline, first in zip(timelines, begins, strict=True)]
    titles = [_title_of(file, timeline, step) for file, timeline in zip(files, timelines, strict=True)]
    try:
        write_file(out, svg_gantts(list(zip(titles, from_zero, strict=True))))
    except OSError as error:
        raise ConfigError(f"OUT: cannot write {out}: {error.strerror}") from error
    return 0


def _title_of(path: Path, timeline: Timeline, step: int | None) -> str:
    """The run's folder, or the file; the step, and how long it took."""
    name = path.parent.name if path.name == "trace.json" and path.parent.name else path.stem
    of_step = "" if step is None else f", step {step}"
    return f"{name}{of_step}: {timeline.source}, {timeline.makespan_s:.3g} s"


@trace.command
def chrome(file: Place, out: Place, *, overwrite: bool = False) -> int:
    """Write a timeline as a Chrome trace, for ui.perfetto.dev.

    Parameters
    ----------
    file
        A timeline.
    out
        The trace to write.
    overwrite
        Replace a file that exists.
    """
    from plait.errors import ConfigError
    from plait.output import check_file
    from plait.schedule.timeline import write_chrome_trace

    check_file(out, "OUT", overwrite=overwrite, inputs=(file,))
    timeline = _load(file, None)
    try:
        write_chrome_trace(out, timeline)
    except OSError as error:
        raise ConfigError(f"OUT: cannot write {out}: {error.strerror}") from error
    return 0


def _load(path: Path, step: int | None) -> Timeline:
    return _of_step(_timeline_of(path), step, path)


def _timeline_of(path: Path) -> Timeline:
    """What a file holds; of a run's folder what it measured, of a plan what was predicted for it."""
    from plait.errors import DataError
    from plait.runtime.folder.run_files import RunFiles
    from plait.schedule.timeline import load_any

    if os.path.isdir(path):
        path = RunFiles(path).trace
        if not path.is_file():
            raise DataError(f"{path}: expected the trace of a run in its folder, found none; give a run's folder")
    if (plan := _plan_of(path)) is None:
        return load_any(path)
    if plan.predicted is None:
        raise DataError(f"{path}: this plan has no predicted timeline; give that of a run, or of `plait plan`")
    return plan.predicted


def _plan_of(path: Path) -> Plan | None:
    """The plan that a file is; None: it is none, or cannot be read."""
    from plait.schedule.plan import Plan

    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        if f'"{Plan.form.format}"' in file.read(_HEAD):
            return Plan.load(path)
    return None


def _by_plan(measured: Timeline, folder: Path, path: Path) -> Timeline:
    """The steps of a run that followed the plan in a file; all steps if none is known to have followed it."""
    from dataclasses import replace

    from plait.runtime.folder.history import History, plan_digest

    if (plan := _plan_of(path)) is None or not os.path.isdir(folder):
        return measured
    history, digest = History(folder, resume=True), plan_digest(plan)
    spans = tuple(s for s in measured.spans if s.step is not None and history.plan_of(s.step) == digest)
    return replace(measured, spans=spans) if spans else measured


def _of_step(timeline: Timeline, step: int | None, path: Path) -> Timeline:
    from dataclasses import replace

    from plait.errors import DataError

    if step is None:
        return timeline
    spans = tuple(span for span in timeline.spans if span.step == step)
    if not spans:
        steps = sorted({span.step for span in timeline.spans if span.step is not None})
        recorded = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        raise DataError(f"--step: {path} has {recorded}, not {step}")
    first, last = min(s.start_s for s in spans), max(s.end_s for s in spans)
    memory = tuple(point for point in timeline.memory if first <= point.time_s <= last)
    return replace(timeline, spans=spans, memory=memory)
