"""What a model said, in the room of a line."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text; white space that is all there is as escapes."""
    return text if text.strip() else repr(text)


def in_a_line(text: str) -> str:
    """`visible`, all on one line."""
    return " ".join(visible(text).split())
