"""What a command printed."""

from __future__ import annotations

import pytest

from plait.cli import main


def is_one_error(printed: str) -> bool:
    """Whether the last line, and it alone, is an error; above it may stand the header and what was loaded."""
    *before, last = printed.splitlines()
    return last.startswith("error: ") and not any(line.startswith("error: ") or "Traceback" in line for line in before)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """`plait` with these words: its exit code, and what it printed on stdout and stderr."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
