"""What a command printed on stderr."""

from __future__ import annotations


def is_one_error(printed: str) -> bool:
    """Whether the last line, and it alone, is an error; above it may stand the header and what was loaded."""
    *before, last = printed.splitlines()
    return last.startswith("error: ") and not any(line.startswith("error: ") or "Traceback" in line for line in before)
