"""What `plait trace` says of timelines, as text and by names."""

from __future__ import annotations

from plait.schedule.compare import Busy, CallComparison, Comparison
from plait.schedule.idle import waited_s
from plait.schedule.timeline import Timeline


def summary_of(timeline: Timeline) -> dict:
    """How busy lanes were, where the time went, for whom ranks waited, by names."""
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


def calls_text(c: CallComparison) -> str:
    """A table of calls by rank and of kinds, and what stands on one side only."""
    title = f"busy seconds of a step ({c.whole} has calls whole)"
    step = f"{c.step_b / c.step_a - 1:+.1%}" if c.step_a else "-"
    lines = [f"{title:<44}{'a':>12}{'b':>12}{'error':>10}", f"{'step':<44}{c.step_a:>12.4g}{c.step_b:>12.4g}{step:>10}"]
    for rows in (c.calls, c.kinds):
        lines.append("")
        for busy in rows:
            numbers = ("-" if value is None else f"{value:.4g}" for value in (busy.seconds_a, busy.seconds_b))
            error = "-" if busy.error is None else f"{busy.error:+.1%}"
            lines.append("{:<44}{:>12}{:>12}{:>10}".format(_title_of_busy(busy), *numbers, error))
    lines.append("")
    rows = (*c.calls, *c.kinds)
    for side, alone in (
        ("a", [_title_of_busy(busy) for busy in rows if busy.seconds_b is None]),
        ("b", [_title_of_busy(busy) for busy in rows if busy.seconds_a is None]),
    ):
        lines += [f"only in {side}: {', '.join(alone)}"] if alone else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _title_of_busy(busy: Busy) -> str:
    return f"all {busy.name}" if busy.rank is None else f"{busy.name} (rank {busy.rank})"


def actions_text(c: Comparison) -> str:
    """A table of kinds, what stands on one side only, and where the order differs."""
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
