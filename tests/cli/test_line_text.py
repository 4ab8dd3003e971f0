"""What stands in a line of a table."""

from __future__ import annotations

from plait.cli.line_text import in_a_line, visible


def test_white_space_alone_is_seen_and_lines_are_joined() -> None:
    assert in_a_line("\n \n") == visible("\n \n") == r"'\n \n'"
    assert visible("a\n\n b") == "a\n\n b"
    assert in_a_line("a\n\n b") == "a b"
    assert in_a_line("a" * 20, most=10) == "a" * 7 + "…"
    assert in_a_line("\n" * 500, most=160) == "'" + r"\n" * 78 + "…"
