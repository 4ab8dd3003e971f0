"""Timelines: actions with start, end and bytes, predicted by the simulator or measured by a run, in the same rows.

A timeline is a value: it is written as a JSON file with a version, one span per line, so that two of them can be
compared by `diff` and by `plait trace diff`. `trace_events` turns it into a picture for Perfetto.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from plait.errors import DataError
from plait.file_form import FileForm
from plait.observe.trace import TraceCounter, TraceEvent, read_trace, write_trace
from plait.output import Filed
from plait.paths import at_home
from plait.schedule.work import Done

Source = Literal["predicted", "measured"]
_Row = TypeVar("_Row", "Span", "MemoryPoint")


@dataclass(frozen=True, slots=True)
class Span:
    """One action that ran, or is predicted to run.

    action: text id of the action (`actor:2F0`); with `step` and `rank` it names the action uniquely
    kind:   kind of the action (`F`, `DECODE`, `STEP` …), the unit in which prediction errors are reported
    rank, lane: where it ran; a lane is one resource of the rank (`compute`, `link`, `host`), busy with one action at
            a time
    start_s, end_s: seconds since the start of the timeline
    bytes:  bytes that it moved or wrote, 0 where that says nothing
    tokens: tokens that it processed, draft tokens among them, 0 where that says nothing
    role:   actor, critic, ref, reward, cost, or empty
    step:   training step of the run, None outside one
    samples, drawn: of a DECODE the samples that its instance runs, and the tokens that these got by it: one for each
            that it computed, and one for each draft token that was accepted; else 0
    """

    action: str
    kind: str
    rank: int
    start_s: float
    end_s: float
    bytes: int = 0
    tokens: int = 0
    lane: str = "compute"
    role: str = ""
    step: int | None = None
    samples: int = 0
    drawn: int = 0

    @classmethod
    def of(cls, done: Done, rank: int, start_s: float, end_s: float, role: str, step: int | None = None) -> Span:
        """An action that ran; `role`: whose it is, unless it says that itself."""
        return cls(
            done.action,
            done.kind,
            rank,
            start_s,
            end_s,
            done.bytes,
            done.tokens,
            done.lane,
            done.role or role,
            step,
            done.samples,
            done.drawn,
        )

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def whole(self) -> str:
        """What it is a part of, a call or a move: `actor.train` of `actor.train/b0/mb3`; itself, if of nothing."""
        return self.action.partition("/")[0]


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """From `time_s` on, `rank` holds `held` bytes (or the unit in which the schedule gave its memory)."""

    rank: int
    time_s: float
    held: float


@dataclass(frozen=True, slots=True)
class Timeline(Filed):
    """Spans of all ranks, and optionally the course of the memory ledger.

    `source` says whether the times were predicted or measured.
    """

    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...] = ()
    source: Source = "predicted"

    form: ClassVar = FileForm("timeline")

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end; 0 for an empty timeline."""
        if not self.spans:
            return 0.0
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({span.rank for span in self.spans}))

    def peak_memory(self, rank: int) -> float:
        """The most that `rank` held at any time; 0 where the ledger was not kept."""
        return max((point.held for point in self.memory if point.rank == rank), default=0.0)

    def ordered(self) -> Timeline:
        """The same timeline with spans by rank, lane, start and end; ties keep their order."""
        spans = sorted(self.spans, key=lambda span: (span.rank, span.lane, span.start_s, span.end_s))
        return replace(self, spans=tuple(spans))

    def shifted(self, seconds: float) -> Timeline:
        """The same timeline, `seconds` later."""
        spans = tuple(replace(span, start_s=span.start_s + seconds, end_s=span.end_s + seconds) for span in self.spans)
        memory = tuple(replace(point, time_s=point.time_s + seconds) for point in self.memory)
        return replace(self, spans=spans, memory=memory)

    def to_json(self) -> str:
        """The file form: a header, then one span and one memory point per line."""
        spans = ",\n".join(json.dumps(astuple(span)) for span in self.spans)
        memory = ",\n".join(json.dumps(astuple(point)) for point in self.memory)
        return (
            f'{{"format": "{self.form.format}", "version": {self.form.version}, "source": "{self.source}",\n'
            f'"span_fields": {json.dumps([field.name for field in fields(Span)])},\n'
            f'"memory_fields": {json.dumps([field.name for field in fields(MemoryPoint)])},\n'
            f'"spans": [\n{spans}\n],\n"memory": [\n{memory}\n]}}\n'
        )

    @classmethod
    def from_json(cls, text: str, name: str = "timeline") -> Timeline:
        """Read the file form. `name` is used in messages. Raises `DataError` when the text is no such timeline."""
        record = cls.form.parse(text, name)
        try:
            spans = tuple(_row(Span, zip(record["span_fields"], row, strict=True)) for row in record["spans"])
            points = record["memory"]
            memory = tuple(_row(MemoryPoint, zip(record["memory_fields"], row, strict=True)) for row in points)
            source = record["source"]
            if source not in ("predicted", "measured"):
                raise ValueError(f"source {source!r}")
            return cls(spans, memory, source)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"{name}: a row of the timeline does not fit its fields: {error}") from error


def load_any(path: str | Path) -> Timeline:
    """Read a timeline file, or the Chrome trace that a run writes.

    Raises:
        ConfigError: as of `paths.at_home`.
        DataError: it cannot be read, or is neither.
    """
    path = at_home(path, "timeline")
    try:
        with open(path, encoding="utf-8-sig") as file:
            is_trace = file.read(64).lstrip().startswith("[")
        return _from_trace(read_trace(path)) if is_trace else Timeline.load(path)
    except OSError as error:
        raise DataError(f"{path}: expected a timeline file that can be read: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: expected a timeline or a Chrome trace of a run: {error!r:.200}") from error


_SHOWN = ("kind", "bytes", "tokens", "samples", "drawn", "role")
"""Fields of a span that a Chrome trace has as arguments, where they say something; and the step."""
_TEXTS = ("action", "kind", "lane", "role")
_WHOLE = ("rank", "step")
_MOST_S = 1e12
"""The latest time: tens of thousands of years."""


def _row(cls: type[_Row], values: Iterable[tuple[str, Any]]) -> _Row:
    """A span or a memory point of what a file says, each value of its kind. Raises ValueError."""
    row = dict(values)
    for name, value in row.items():
        if name in _TEXTS:
            fits = isinstance(value, str)
        elif name in _WHOLE:
            fits = (type(value) is int and 0 <= value < 2**31) or (name == "step" and value is None)
        else:
            fits = type(value) in (int, float) and abs(value) < (_MOST_S if name.endswith("_s") else 2.0**63)
        if not fits:
            raise ValueError(f"{name} {value!r:.80}")
    return cls(**row)


def _from_trace(events: list[dict[str, Any]]) -> Timeline:
    """The inverse of `trace_events`."""
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = []
    for event in events:
        if event["ph"] == "X":
            args = event.get("args", {})
            start_s = event["ts"] / 1e6
            spans.append(
                _row(
                    Span,
                    {
                        "action": event["name"],
                        "kind": args.get("kind", event["cat"]),
                        "rank": event["pid"],
                        "start_s": start_s,
                        "end_s": start_s + event["dur"] / 1e6,
                        "bytes": args.get("bytes", 0),
                        "tokens": args.get("tokens", 0),
                        "lane": lanes[event["pid"], event["tid"]],
                        "role": args.get("role", ""),
                        "step": args.get("step"),
                        "samples": args.get("samples", 0),
                        "drawn": args.get("drawn", 0),
                    }.items(),
                )
            )
    return Timeline(tuple(spans), source="measured")


def trace_events(spans: Iterable[Span]) -> Iterator[TraceEvent]:
    """The spans as events of a Chrome trace, for `observe.trace.TraceWriter.append` step by step."""
    for span in spans:
        args: list[tuple[str, str | int | float]] = [] if span.step is None else [("step", span.step)]
        args += [(name, value) for name in _SHOWN if (value := getattr(span, name))]
        category = span.role or span.kind
        yield TraceEvent(span.action, span.start_s, span.end_s, span.rank, span.lane, category, tuple(args))


def write_chrome_trace(path: str | Path, timeline: Timeline) -> None:
    """Write the timeline, with its memory curves, as a Chrome trace that Perfetto opens.

    Raises:
        ConfigError: as of `paths.at_home`.
        OSError: it cannot be written.
    """
    counters = (TraceCounter("memory held", point.time_s, point.held, point.rank) for point in timeline.memory)
    write_trace(at_home(path, "trace"), [*trace_events(timeline.spans), *counters])


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in at least one of some intervals (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
