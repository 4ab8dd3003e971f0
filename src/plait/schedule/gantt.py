"""Timelines as pictures: text for a terminal, SVG for a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby

from plait.schedule.idle import Wait, waits
from plait.schedule.timeline import Span, Timeline
from plait.schedule.work import COMPUTE

_COLOURS = (
    ("#4c78a8", "#9ecae9"),
    ("#e45756", "#ff9d98"),
    ("#54a24b", "#b7e2a9"),
    ("#b279a2", "#e0bfd8"),
    ("#f58518", "#ffbf79"),
    ("#439894", "#83bcb6"),
    ("#b79a20", "#f2cf5b"),
    ("#79706e", "#bab0ac"),
)
_INDEX = re.compile(r"(\d+)(?:\.\d+)?$")
_PART = re.compile(r"/p(\d+)(?:/mb(\d+))?$")
_ROW_HEIGHT = 26
_LEAST_WAIT = 4.0
"""Width of a wait that is drawn."""
_LEAST_EDGED = 2.5
"""Width of a box with a white edge: narrower ones would be nothing else."""
_LETTER = 5.6
"""Width of one, about."""
_LETTERS = {"STEP": "o", "SAMPLES": "~", "OFFLOAD": "<", "ONLOAD": ">"}
"""Signs for kinds whose first letter is that of another: the optimizer's step and samples that move beside scoring,
what goes and comes."""


def ascii_gantt(timeline: Timeline, width: int = 100) -> str:
    """One line per lane, one character per slice of time: `width` slices at most, and whole units of time where they
    fit.

    A character stands for the action that fills most of its slice: the first letter of its model, capital for a
    backward, `.` for idle. Other kinds show `letter_of` them.
    """
    end = max((span.end_s for span in timeline.spans), default=0.0)
    if end <= 0:
        return "(nothing)\n"
    slices = int(end) if float(end).is_integer() and end <= width else width
    label = max(len(name) for name, _ in _rows(timeline))
    lines = []
    for name, spans in _rows(timeline):
        cells = ["."] * slices
        filled = [0.0] * slices
        for span in spans:
            first, last = span.start_s / end * slices, span.end_s / end * slices
            for k in range(int(first + 1e-9), min(slices, int(last - 1e-9) + 1)):
                share = min(last, k + 1) - max(first, k)
                if share > filled[k] and share > 1e-9:
                    cells[k], filled[k] = _letter(span), share
        text = "".join(cell if share >= 0.5 else "." for cell, share in zip(cells, filled, strict=True))
        lines.append(f"{name:>{label}} |{text}|")
    lines.append(f"{'':>{label}}  0{f'{end:g}':>{max(slices - 1, 1)}}")
    return "\n".join(lines) + "\n"


def svg_gantt(timeline: Timeline, title: str = "") -> str:
    """The timeline as an SVG picture: a row per lane, a box per action with its micro-batch where it fits.

    Of pipelines the first model is blue, the second red; forwards are light, backwards dark. What else ranks do has a
    colour for each call, and parts of a call their numbers (`3`, or `3.1` for the second micro-batch of one). Grey
    ground is idle. Where it was measured, a dashed box is a rank that waits, with what for (`schedule.idle`).
    """
    return svg_gantts([(title, timeline)])


def svg_gantts(panels: Sequence[tuple[str, Timeline]], width: int = 1200) -> str:
    """Timelines with their titles, one above the other on one scale, `width` pixels wide; see `svg_gantt`."""
    spans = [span for _, timeline in panels for span in timeline.spans]
    end = max((span.end_s for span in spans), default=0.0) or 1.0
    named = list(dict.fromkeys(_named(span) for span in spans))
    left = 72
    scale = (width - left - 12) / end
    drawn: list[str] = []
    waiting = False
    y = 0
    for title, timeline in panels:
        y += 34 if title else 12
        own = max((span.end_s for span in timeline.spans), default=0.0) or 1.0
        if title:
            drawn.append(f'<text x="{left}" y="{y - 14}" font-size="14" fill="#222">{escape(title)}</text>')
        idle = waits(timeline, _LEAST_WAIT / scale) if timeline.source == "measured" else []
        waiting |= bool(idle)
        for name, row in _rows(timeline):
            drawn += _row(name, row, named, (left, y), (own * scale, scale))
            if row[0].lane == COMPUTE:
                mine = [wait for wait in idle if wait.rank == row[0].rank]
                drawn += [part for wait in mine for part in _wait(wait, (left, y), scale)]
            y += _ROW_HEIGHT
        drawn.append(_axis(end, own, left, y, scale))
        y += 22
    lines, last = _legend(spans, named, left, y + 16, width - 12, waiting=waiting)
    drawn += lines
    height = int(last) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    return "\n".join([*parts, *drawn, "</svg>"]) + "\n"


def _row(
    name: str, spans: Sequence[Span], named: Sequence[str], at: tuple[float, float], sizes: tuple[float, float]
) -> list[str]:
    """
    Args:
        at: left upper corner of its ground.
        sizes: width of the ground, and of a second.
    """
    (left, y), (ground, scale) = at, sizes
    parts = [
        f'<text x="{left - 8}" y="{y + _ROW_HEIGHT / 2 + 3}" text-anchor="end" fill="#222">{escape(name)}</text>'
        f'<rect x="{left}" y="{y + 1}" width="{ground:.1f}" height="{_ROW_HEIGHT - 3}" fill="#eeeeee"/>'
    ]
    for span in spans:
        dark, light = _COLOURS[named.index(_named(span)) % len(_COLOURS)]
        fill = light if span.kind == "F" else dark
        x, wide = left + span.start_s * scale, span.duration_s * scale
        edge = ' stroke="white" stroke-width="0.7"' if wide >= _LEAST_EDGED else ""
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 1}" width="{wide:.1f}" height="{_ROW_HEIGHT - 3}" fill="{fill}"{edge}>'
            f"<title>{escape(span.action)} {span.start_s:g} to {span.end_s:g}</title></rect>"
        )
        number = _number(span)
        if number and wide >= 7 * len(number) + 2:
            ink = "#111" if span.kind == "F" else "white"
            parts.append(_text(number, x + wide / 2, y + _ROW_HEIGHT / 2 + 3, ink))
    return parts


def _wait(wait: Wait, at: tuple[float, float], scale: float) -> list[str]:
    (left, y), wide = at, (wait.end_s - wait.start_s) * scale
    x = left + wait.start_s * scale
    parts = [
        f'<rect x="{x + 1:.1f}" y="{y + 2}" width="{wide - 2:.1f}" height="{_ROW_HEIGHT - 5}" fill="none" '
        f'stroke="#888" stroke-dasharray="3 2"><title>{escape(str(wait))}</title></rect>'
    ]
    if wait.until is not None:
        whole = f"for rank {wait.until.rank}: {wait.until.action}"
        text = next((label for label in (whole, f"rank {wait.until.rank}") if _LETTER * len(label) + 4 <= wide), "")
        if text:
            parts.append(_text(text, x + wide / 2, y + _ROW_HEIGHT / 2 + 3, "#555"))
    return parts


def _text(text: str, x: float, y: float, ink: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="{ink}">{escape(text)}</text>'


def _named(span: Span) -> str:
    """What has a colour of its own: in pipelines a model, else a call."""
    call = span.whole
    return span.role if span.kind in ("F", "B") or "." not in call else call.split(" ", 1)[0]


def _number(span: Span) -> str:
    """What is written on a box: its micro-batch, or of a call in parts its part."""
    if (numbers := _PART.search(span.action)) is not None:
        return numbers[1] if numbers[2] in (None, "0") else f"{numbers[1]}.{numbers[2]}"
    index = None if span.kind == "SAMPLES" else _INDEX.search(span.action)
    return "" if index is None else index[1]


def _axis(end: float, own: float, left: float, y: float, scale: float) -> str:
    """Marks up to the end of this timeline, `own`, as far apart as suits the longest, which ends at `end`."""
    step = next(s for m in range(-6, 12) for s in (10.0**m, 2 * 10.0**m, 5 * 10.0**m) if end / s <= 12)
    marks = []
    k = 0
    while k * step <= own * (1 + 1e-9):
        x = left + k * step * scale
        marks.append(f'<text x="{x:.1f}" y="{y + 14}" text-anchor="middle" fill="#555">{k * step:g}</text>')
        k += 1
    return "".join(marks)


def _legend(
    spans: Sequence[Span], named: Sequence[str], x: float, y: float, right: float, *, waiting: bool
) -> tuple[list[str], float]:
    """What the colours mean, in as many lines as that takes, and where the last of them is."""
    parts, left = [], x
    kinds = {name: {span.kind for span in of_name} for name, of_name in groupby(sorted(spans, key=_named), key=_named)}
    entries: list[tuple[str, str]] = []
    for place, name in enumerate(named):
        dark, light = _COLOURS[place % len(_COLOURS)]
        pipelined = kinds[name] <= {"F", "B"}
        entries += [(f"{name} forward", light), (f"{name} backward", dark)] if pipelined else [(name, dark)]
    if waiting:
        entries.append(("waits (for what ended last before it went on)", "none"))
    for text, fill in entries:
        text = text.strip()
        if x > left and x + 15 + 6.2 * len(text) > right:
            x, y = left, y + 18
        edge = ' stroke="#888" stroke-dasharray="3 2"' if fill == "none" else ""
        parts.append(f'<rect x="{x:.0f}" y="{y - 9}" width="11" height="11" fill="{fill}"{edge}/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y}" fill="#222">{escape(text)}</text>')
        x += 34 + 6.2 * len(text)
    return parts, y


def _rows(timeline: Timeline) -> list[tuple[str, list[Span]]]:
    rows: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.ordered().spans:
        if span.duration_s > 0:
            rows.setdefault((span.rank, span.lane), []).append(span)
    return [(f"rank {rank}" + ("" if lane == "compute" else f" {lane}"), spans) for (rank, lane), spans in rows.items()]


def _letter(span: Span) -> str:
    match span.kind:
        case "F":
            return (span.role or "f")[0].lower()
        case "B":
            return (span.role or "b")[0].upper()
        case kind:
            return letter_of(kind)


def letter_of(kind: str) -> str:
    """What stands for actions of a kind other than forwards and backwards."""
    return _LETTERS.get(kind, kind[:1] or "#")
