"""A console of rich that shows control characters in place of passing them on; its own, which rich marks, pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from plait.observe.screen import visible


class SafeConsole(Console):
    """`rich.console.Console`, for texts that nobody has looked at. Brackets in a text are no markup: style is given by
    `Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "highlight": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text):  # before its width is taken: an escape has none, its picture has one
            renderable = renderable.copy()
            renderable.plain = visible(renderable.plain)
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)
