"""How fast instances decode, by what their steps took: seconds until each sample has a token more.

A step computes rows: one for each of its samples, and one for each token that is drafted behind it. Its samples get a
token each, and one more for each draft token that is accepted. Where samples go round the stages of a model in groups,
each step computes a part of those that run. So a token of each sample takes a share of a step, one step, or several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from plait.schedule.timeline import Timeline


def decode_pace(timeline: Timeline) -> tuple[float, float, float] | None:
    """What steps that only decode took, of all ranks; None: there were none.

    Returns:
        fixed_s, each_s: seconds until each sample of an instance has a token more, and more for each sample that runs.
        tokens: that a sample gets in a step that computes it; where steps compute a part of the samples, one.
    """
    steps = [span for span in timeline.spans if span.kind == "DECODE" and span.drawn]
    if not steps:
        return None
    fixed_s, row_s = decode_line((step.tokens, step.duration_s) for step in steps)
    sums: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for step in steps:
        for place, number in enumerate((1, step.tokens, step.drawn)):
            sums[step.samples][place] += number
    points = [
        (samples, samples * (count * fixed_s + rows * row_s) / drawn)
        for samples, (count, rows, drawn) in sums.items()
        for _ in range(count)
    ]
    drawn, computed = sum(step.drawn for step in steps), sum(step.samples for step in steps)
    return (*line_through(points), max(1.0, drawn / computed))


def decode_line(steps: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """(seconds of a decode step, more for each row of it), from (rows, seconds) of steps, one at least: the line
    through the medians of steps with as many rows, so that a few that were held up do not count."""
    by_count: defaultdict[int, list[float]] = defaultdict(list)
    for count, seconds in steps:
        by_count[count].append(seconds)
    return line_through([(count, median(seconds)) for count, seconds in by_count.items() for _ in seconds])


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(value at 0, slope) of the straight line through (count, seconds) with the least squares, neither below 0."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread > 0 else 0.0
    slope = min(max(0.0, slope), mean_y / mean_x if mean_x > 0 else 0.0)
    return mean_y - slope * mean_x, slope
