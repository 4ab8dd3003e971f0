"""`plait trace show FILE`, `diff A B`, `picture OUT FILES`, `chrome FILE OUT`: look at timelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from plait.cli.app import Whole
from plait.observe.screen import say

if TYPE_CHECKING:
    from plait.schedule.compare import Comparison
    from plait.schedule.timeline import Timeline

trace = App(name="trace", help="Look at a timeline: what ran when, on which rank.")


@trace.command
def show(
    file: Path,
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
    from plait.schedule.gantt import ascii_gantt

    timeline = _load(file, step)
    if as_json:
        say(json.dumps(_summary(timeline)))
        return 0
    summary = _summary(timeline)
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
    a: Path,
    b: Path,
    *,
    step: Whole | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Compare two timelines, predicted and measured say: the same actions, in the same order, in how much time.

    Exit code 0 when both ran the same actions in the same order, else 1.

    Parameters
    ----------
    a
        A timeline or Chrome trace; errors are relative to it.
    b
        Another.
    step
        Only this training step.
    as_json
        Print the comparison as JSON.
    """
    from dataclasses import asdict

    from plait.schedule.compare import compare

    comparison = compare(_load(a, step), _load(b, step))
    if as_json:
        say(json.dumps({**asdict(comparison), "same_rows": comparison.same_rows}))
    else:
        say(_described(comparison), end="")
    return 0 if comparison.same_rows else 1


@trace.command
def picture(out: Path, *files: Path, step: Whole | None = None, overwrite: bool = False) -> int:
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
    from plait.errors import ConfigError
    from plait.output import check_file, write_file
    from plait.schedule.gantt import svg_gantts

    if not files:
        raise ConfigError("FILES: expected at least one timeline, found none")
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
def chrome(file: Path, out: Path, *, overwrite: bool = False) -> int:
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
    from dataclasses import replace

    from plait.errors import DataError
    from plait.schedule.timeline import load_any

    timeline = load_any(path)
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


def _summary(timeline: Timeline) -> dict:
    from plait.schedule.idle import waited_s

    makespan = timeline.makespan_s
    lanes: dict[tuple[int, str], list[float]] = {}
    kinds: dict[str, list] = {}
    for span in timeline.ordered().spans:
        lanes.setdefault((span.rank, span.lane), []).append(span.duration_s)
        kinds.setdefault(span.kind, []).append(span)
    return {
        "source": timeline.source,
        "num_actions": len(timeline.spans),
        "makespan_s": makespan,
        "lanes": [
            {"rank": rank, "lane": lane, "busy": sum(times) / makespan if makespan else 0.0, "actions": len(times)}
            for (rank, lane), times in lanes.items()
        ],
        "kinds": [
            {
                "kind": kind,
                "actions": len(spans),
                "seconds": sum(span.duration_s for span in spans),
                "bytes": sum(span.bytes for span in spans),
                "tokens": sum(span.tokens for span in spans),
            }
            for kind, spans in sorted(kinds.items())
        ],
        "waits": [
            {
                "rank": rank,
                "seconds": seconds,
                "share": seconds / makespan if makespan else 0.0,
                "for_rank": cause[0] if cause else None,
                "for": cause[1] if cause else None,
            }
            for rank, causes in waited_s(timeline).items()
            for cause, seconds in causes.most_common()
        ],
        "peak_memory": {str(rank): timeline.peak_memory(rank) for rank in timeline.ranks if timeline.memory},
    }


def _described(c: Comparison) -> str:
    change = f" ({c.makespan_b / c.makespan_a - 1:+.1%})" if c.makespan_a else ""
    lines = [f"makespan  {c.makespan_a:g} s and {c.makespan_b:g} s{change}", ""]
    lines.append(f"{'kind':<12}{'actions':>8}{'seconds a':>13}{'seconds b':>13}{'mean error':>12}")
    for kind in c.kinds:
        row = (kind.kind, kind.count, kind.seconds_a, kind.seconds_b, kind.mean_error)
        lines.append("{:<12}{:>8}{:>13.6g}{:>13.6g}{:>12.1%}".format(*row))
    lines.append("")
    for name, rows in (("a", c.only_a), ("b", c.only_b)):
        for step, rank, action in rows[:5]:
            where = f"rank {rank}" if step is None else f"step {step}, rank {rank}"
            lines.append(f"only in {name}: {action} ({where})")
        if len(rows) > 5:
            lines.append(f"only in {name}: {len(rows) - 5} more")
    for rank, lane, first, second in c.reordered:
        lines.append(f"rank {rank} {lane}: a runs {first} where b runs {second}")
    if c.same_rows:
        lines.append("the same actions in the same order")
    return "\n".join(lines) + "\n"
