"""What a model said, in the room of a line."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text; white space that is all there is as escapes."""
    return text if text.strip() else repr(text)


def in_a_line(text: str, *, most: int | None = None) -> str:
    """`visible`, all on one line, of a long one the first `most` characters or somewhat less."""
    line = " ".join(visible(text).split())
    return line if most is None or len(line) <= most else f"{line[: most - 3]}…"
