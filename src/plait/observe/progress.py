"""The live display of a run on stderr: what a person watches while a model learns.

On a terminal: the run's bar with the time left, the bar of the phase within the step (samples finished while
generating, micro-batches while training), the last steps' watched numbers (reward, KL, response length, tokens/s; or
loss and accuracy), and the seconds of each stage. Where stderr is no terminal: one plain line per step. A number that
the run does not have takes no room.

Nothing here decides anything: the numbers come in as metrics.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from plait.observe.beside_steps import NONE_BESIDE, stage_text
from plait.observe.screen import outliving, say

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN_STEPS = 8
_AVERAGED_STEPS = 10
_DRAWS_PER_S = 4
_BAR_COLUMNS, _LEAST_BAR_COLUMNS = 32, 8


@dataclass(frozen=True, slots=True)
class Watched:
    """A number that a person watches."""

    title: str
    metrics: tuple[str, ...]
    """Its names among a step's metrics; the first that a step has is shown."""
    form: str
    """Format specification."""

    def text(self, metrics: Mapping[str, Any]) -> str | None:
        """The number of a step; None: the step has none."""
        found = next((metrics[name] for name in self.metrics if metrics.get(name) is not None), None)
        return None if found is None else format(float(found), self.form)


@dataclass(frozen=True, slots=True)
class _Row:
    """A step that is done."""

    step: str
    numbers: Mapping[str, str]
    """Title → what it has of the watched numbers."""
    seconds: str


class ProgressSink(Protocol):
    """What a run tells of its progress: to `Progress` in this process, or to another process that shows it."""

    def start(self, steps_done: int = 0) -> None: ...

    def phase(self, name: str, total: int = 0, unit: str = "") -> None: ...

    def advance(self, count: int = 1) -> None: ...

    def step_done(
        self, step: int, metrics: Mapping[str, Any], beside: Mapping[str, float] = NONE_BESIDE, once_s: float = 0.0
    ) -> None: ...

    def message(self, text: str) -> None: ...


class Progress:
    """Shows a run of `total_steps` steps (0: only phases, as in an evaluation by itself). Use as a context manager, so
    that the terminal is given back.

    watched: the numbers shown of a step, as far as it has them, what matters most first; stream: stderr unless given,
    which may be closed meanwhile; live: a terminal's display or plain lines, by default what the stream is; clock:
    seconds. A redraw takes a millisecond or two, so there are at most four in any second.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        watched: Sequence[Watched] = (),
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._watched = tuple(watched)
        self._stream = outliving(sys.stderr) if stream is None else stream
        self._is_live = (self._stream.isatty() and os.environ.get("TERM") != "dumb") if live is None else live
        self._clock = clock
        self._live: Any = None
        self._draws_s: deque[float] = deque(maxlen=_DRAWS_PER_S)
        self._started_s = self._step_started_s = clock()
        self._steps_done = 0
        self._step_seconds: deque[float] = deque(maxlen=_AVERAGED_STEPS)
        self._rows: deque[_Row] = deque(maxlen=_SHOWN_STEPS)
        self._had: set[str] = set()
        """Titles of the numbers that a step has had."""
        self._stages = ""
        self._phase, self._phase_unit, self._phase_done, self._phase_total = "", "", 0, 0
        self._note = ""

    def start(self, steps_done: int = 0) -> None:
        """Begin to show; a resumed run starts with `steps_done` steps behind it."""
        self._steps_done = steps_done
        self._started_s = self._step_started_s = self._clock()
        if self._is_live:
            from rich.live import Live

            from plait.observe.console import SafeConsole

            console = SafeConsole(file=self._stream, force_terminal=True)
            self._live = Live(console=console, auto_refresh=False, transient=False)
            self._live.update(self.picture())
            self._live.start(refresh=True)

    def phase(self, name: str, total: int = 0, unit: str = "") -> None:
        """Enter a phase of the step, such as ("generate", 64, "samples"); total 0: unknown how much it is."""
        changed = name != self._phase
        self._phase, self._phase_unit, self._phase_done, self._phase_total = name, unit, 0, total
        self._draw(soon=changed)

    def advance(self, count: int = 1, *, note: str = "") -> None:
        """`count` more units of the phase are done; `note`: what is to be said of it now, a line under its bar."""
        self._phase_done += count
        self._note = note
        self._draw()

    def step_done(
        self, step: int, metrics: Mapping[str, Any], beside: Mapping[str, float] = NONE_BESIDE, once_s: float = 0.0
    ) -> None:
        """Training step `step` (1 …) has ended with these metrics.

        Args:
            beside, once_s: see `BesideSteps.take`; what comes once does not count for the steps that are left.
        """
        now = self._clock()
        seconds = now - self._step_started_s
        self._step_seconds.append(max(0.0, seconds - once_s))
        self._step_started_s = now
        self._steps_done = step
        self._phase, self._phase_done, self._phase_total = "", 0, 0
        self._stages = stage_text(metrics, beside)
        numbers = {each.title: text for each in self._watched if (text := each.text(metrics)) is not None}
        self._had |= numbers.keys()
        self._rows.append(_Row(str(step), numbers, f"{seconds:.1f}"))
        if self._is_live:
            self._draw(soon=True)
            return
        shown = "".join(f"{title} {number}  " for title, number in numbers.items())
        self._print(
            f"step {step}/{self._total_steps}  {shown}{seconds:.1f} s "
            f"({self._stages or 'no stage times'})  left {self._left_text()}"
        )

    def message(self, text: str) -> None:
        """Show a line that stays, above the live display."""
        if self._live is not None:
            self._live.console.print(text)
        else:
            self._print(text)

    def stop(self) -> None:
        """Draw the last state and give the terminal back. May be called twice."""
        if self._live is not None:
            self._phase = ""
            self._live.update(self.picture())
            self._live.stop()  # draws once more
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def left_s(self) -> float | None:
        """Seconds to the run's end by the mean of the last steps, without what came once in them; None before the first
        step has ended."""
        if not self._step_seconds:
            return None
        mean = sum(self._step_seconds) / len(self._step_seconds)
        running = self._clock() - self._step_started_s
        steps_left = self._total_steps - self._steps_done
        return max(0.0, steps_left * mean - min(running, mean)) if steps_left > 0 else 0.0

    def _print(self, text: str) -> None:
        say(text, file=self._stream)

    def _draw(self, soon: bool = False) -> None:
        """Redraw if it is time to; `soon`: something changed that may stand for long, so use what the second allows."""
        if self._live is None:
            return
        now, draws = self._clock(), self._draws_s
        if len(draws) == _DRAWS_PER_S and now - draws[0] < 1.0:
            return
        if not soon and draws and now - draws[-1] < 1.25 / _DRAWS_PER_S:
            return
        draws.append(now)
        self._live.update(self.picture(), refresh=True)

    def _left_text(self) -> str:
        left_s = self.left_s
        return "?" if left_s is None else clock_text(left_s)

    def picture(self) -> RenderableType:
        """What the terminal shows now."""
        from rich.console import Group
        from rich.text import Text

        columns = self._live.console.width
        parts: list[RenderableType] = [*self._bars(columns)]
        if self._phase and self._note:
            parts.append(Text(self._note, style="dim"))
        if self._rows:
            parts.append(self._numbers(columns))
        if self._stages:
            parts.append(Text(f"seconds per stage: {self._stages}", style="dim"))
        return Group(*parts)

    def _bars(self, columns: int) -> Iterator[RenderableType]:
        """The bar of the run and that of the phase. In a narrow terminal the bars go, the numbers stay."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rows: list[tuple[Text, ProgressBar, Text]] = []
        if self._total_steps:
            elapsed = clock_text(self._clock() - self._started_s)
            steps = f"{self._steps_done}/{self._total_steps} steps  {elapsed}, left {self._left_text()}"
            bar = ProgressBar(total=self._total_steps, completed=self._steps_done)
            rows.append((Text("run", style="bold"), bar, Text(steps)))
        if self._phase:
            is_counted = self._phase_total > 0
            counts = f"{self._phase_done}/{self._phase_total}" if is_counted else f"{self._phase_done}"
            total = self._phase_total if is_counted else None
            bar = ProgressBar(total, self._phase_done, pulse=not is_counted, animation_time=self._clock())
            running = clock_text(self._clock() - self._step_started_s)
            rows.append((Text(self._phase, style="cyan"), bar, Text(f"{counts} {self._phase_unit}  {running}")))
        name_columns = max((10, *(len(name) for name, _, _ in rows)))
        text_columns = max((22, *(len(text) for _, _, text in rows)))
        room = min(_BAR_COLUMNS, columns - name_columns - text_columns - 6)
        if room < _LEAST_BAR_COLUMNS:
            for name, _, text in rows:
                yield Text.assemble(name, "  ", text)
            return
        bars = Table.grid(padding=(0, 2))
        bars.add_column(min_width=10)
        bars.add_column(width=room)
        bars.add_column(min_width=22)
        for name, bar, text in rows:
            bar.width = room
            bars.add_row(name, bar, text)
        yield bars

    def _numbers(self, columns: int) -> RenderableType:
        """The last steps, with a column for all that a step has had. In a narrow terminal the last columns go, those
        that are watched first stay."""
        from rich.table import Table

        had = [each.title for each in self._watched if each.title in self._had]
        rows = [(row.step, *(row.numbers.get(title, "-") for title in had), row.seconds) for row in self._rows]
        titles = ("step", *had, "seconds")
        widths = [max(map(len, cells)) for cells in zip(titles, *rows, strict=True)]
        padding = 2 if sum(widths) + 4 * len(widths) <= columns else 1
        shown, used = 0, 0
        for width in widths:
            used += width + 2 * padding
            if used > columns and shown > 1:
                break
            shown += 1
        table = Table(box=None, padding=(0, padding), header_style="dim")
        for title in titles[:shown]:
            table.add_column(title, justify="right", no_wrap=True)
        for index, row in enumerate(rows):
            table.add_row(*row[:shown], style="bold" if index == len(rows) - 1 else "")
        return table


def clock_text(seconds: float) -> str:
    """`75.2` seconds as `1:15`, `4000` as `1:06:40`."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
