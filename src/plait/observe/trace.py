"""Chrome traces: what happened when, on which rank and lane, in the JSON that Perfetto opens.

A rank is shown as a process and a lane (compute, a link, host) as a thread of it. Two ways to write:

* `write_trace` writes a whole trace at once;
* `TraceWriter` appends events step by step. Its file is a JSON array whose closing bracket is missing, which
  the viewers accept, with one event per line. So the file may be cut at any `AppendedFile.offset`, as a resumed
  run does, and stays loadable.

`read_trace` reads either form.

Times go in as seconds and are stored in microseconds, the unit of the format.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import DataError
from plait.file_writes import AppendedFile, writing
from plait.json_text import Malformed, parse
from plait.output import write_file

MOST_TORN = 3
"""Lines at the end of a trace that a crash may have left incomplete."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One box of the picture: `name` ran on `lane` of `rank` from `start_s` to `end_s`.

    `category` selects and colours in the viewer; `args` are the named values shown when the box is clicked.
    """

    name: str
    start_s: float
    end_s: float
    rank: int = 0
    lane: str = "compute"
    category: str = ""
    args: tuple[tuple[str, str | int | float], ...] = ()


@dataclass(frozen=True, slots=True)
class TraceCounter:
    """One point of a curve: from `time_s` on the quantity `name` of `rank` is `value`."""

    name: str
    time_s: float
    value: float
    rank: int


class TraceWriter(AppendedFile):
    """Appends events to a trace file; the file is loadable after every `append`. See `AppendedFile`.

    With `resume=True` an existing file is continued (the caller has cut it to a recorded `offset`), and the
    lanes already named in it keep their rows; it is gone through line by line, as a long run's has gigabytes. Without
    it the file is begun anew.

    Lanes appear in the viewer in the order of their first event.

    Raises:
        DataError: the file that is to be continued is damaged.
    """

    def __init__(self, path: str | Path, *, resume: bool = False):
        path, keep = Path(path), False
        self._rows = _Rows()
        try:
            with writing(path):
                if resume and path.exists():
                    self._rows.learn(_named_lines(path))
                    keep = path.stat().st_size > 0
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: its names of ranks and lanes: {error!r}") from error
        super().__init__(path, keep=keep)
        if not keep:
            self._write(b"[\n")

    def append(self, events: Iterable[TraceEvent | TraceCounter]) -> None:
        """Hand the events to the operating system, all of them or, if it refuses, none.

        Raises:
            RunError: it refuses: the disk is full, say.
        """
        self._write("".join(f"{_encoded(row)},\n" for event in events for row in self._rows.of(event)).encode())


class _Rows:
    """Events as rows of the file; a rank and a lane get their names with their first event."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], int] = {}
        self._ranks: set[int] = set()

    def of(self, event: TraceEvent | TraceCounter) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if event.rank not in self._ranks:
            self._ranks.add(event.rank)
            rows.append(_named("process_name", event.rank, 0, f"rank {event.rank}"))
            order = {"sort_index": event.rank}
            rows.append({"name": "process_sort_index", "ph": "M", "pid": event.rank, "tid": 0, "args": order})
        if isinstance(event, TraceCounter):
            rows.append(
                {
                    "name": event.name,
                    "ph": "C",
                    "ts": event.time_s * 1e6,
                    "pid": event.rank,
                    "args": {event.name: event.value},
                }
            )
            return rows
        tid = self._lanes.get((event.rank, event.lane))
        if tid is None:
            tid = sum(rank == event.rank for rank, _ in self._lanes) + 1
            self._lanes[event.rank, event.lane] = tid
            rows.append(_named("thread_name", event.rank, tid, event.lane))
        row: dict[str, Any] = {
            "name": event.name,
            "cat": event.category,
            "ph": "X",
            "ts": event.start_s * 1e6,
            "dur": (event.end_s - event.start_s) * 1e6,
            "pid": event.rank,
            "tid": tid,
        }
        if event.args:
            row["args"] = dict(event.args)
        rows.append(row)
        return rows

    def learn(self, events: Iterable[dict[str, Any]]) -> None:
        """Take up names that stand in a file. Raises KeyError, TypeError: one is not as it was written."""
        for event in events:
            if event.get("name") == "thread_name":
                self._lanes[event["pid"], event["args"]["name"]] = event["tid"]
            elif event.get("name") == "process_name":
                self._ranks.add(event["pid"])


def write_trace(path: str | Path, events: Iterable[TraceEvent | TraceCounter]) -> None:
    """Write a whole trace to `path`, closed, as strict JSON: it appears complete, or not at all.

    Raises:
        OSError: the file system refuses it.
    """
    rows = _Rows()
    write_file(path, "[\n" + ",\n".join(_encoded(row) for event in events for row in rows.of(event)) + "\n]\n")


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The raw events of a trace file, closed or open; a last line that a crash left incomplete is dropped.

    Raises `DataError` when the file is no array of events.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected a Chrome trace, found bytes that are no UTF-8: {error}") from None
    if not text.startswith("["):
        raise DataError(f"{path}: expected a Chrome trace in the JSON array form, which begins with '['")
    try:
        events = _events(text)
    except ValueError as error:
        raise DataError(f"{path}: expected a Chrome trace, found text that does not parse: {error}") from None
    if not all(isinstance(event, dict) for event in events):
        raise DataError(f"{path}: expected a Chrome trace, an array of objects")
    return events


def last_step_behind(path: str | Path, offset: int) -> float:
    """The last step among the actions after `offset` (bytes) of an open trace: −∞ if no action there belongs to a step,
    ∞ if the text cannot be parsed. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(offset)
        lines = file.read().splitlines()
    try:
        events = [parse(line.decode().rstrip(",")) for line in lines]
        return max((event["args"]["step"] for event in events if "step" in event.get("args", {})), default=-math.inf)
    except (AttributeError, TypeError, ValueError):
        return math.inf


def _named_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The events of an open trace that name ranks and lanes; at the end, what a crash left of a last line is cut. Only
    these are parsed; of the others the ends are looked at. Raises DataError: a line is none of a trace, or does not
    parse."""
    kept_bytes = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                os.truncate(path, kept_bytes)
                return
            kept_bytes += len(line)
            is_whole = line.startswith(b"{") and line.endswith(b"},\n") if number > 1 else line == b"[\n"
            if not is_whole:
                raise DataError(f"{path}:{number} is damaged: expected an event of a Chrome trace, found {line[:40]!r}")
            if b'"ph":"M"' in line:
                try:
                    yield parse(line.removesuffix(b",\n"))
                except ValueError as error:
                    raise DataError(f"{path}:{number} is damaged: {error}") from None


def _events(text: str) -> list[Any]:
    """Those of the array, which may lack its end; ValueError where it does not parse."""
    if text.endswith("]"):
        with contextlib.suppress(Malformed):  # the bracket may be one inside a torn line
            return parse(text)
    if text[1:].lstrip()[:1] not in ("", "{"):
        raise ValueError(f"its first value is no object: {text[1:40]!r}")
    complete = text[: text.rfind("}") + 1] if "}" in text else "["
    why = ""
    for _ in range(MOST_TORN):
        try:
            return parse(complete + "]")
        except Malformed as error:
            cut = complete.rfind(",\n")
            if cut < 0:
                return []
            why, complete = str(error), complete[:cut]
    raise ValueError(why)


def _named(kind: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}


def _encoded(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"))
