"""Escape sequences of data are shown, never obeyed, whatever prints them."""

from __future__ import annotations

import ast
import contextlib
import io
import os
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from plait.observe.console import SafeConsole
from plait.observe.progress import Progress
from plait.observe.screen import one_line, outliving, say, visible

EVIL = "a\x1b[31mred\x1b]0;title\x07\r\x9b2Jb\x7f"
SHOWN = "a␛[31mred␛]0;title␇␍\ufffd2Jb␡"
SOURCES = Path(__file__).parents[2] / "src/plait"


def test_control_characters_become_signs_of_the_same_number() -> None:
    assert visible(EVIL) == SHOWN
    assert visible(visible(EVIL)) == SHOWN
    assert visible("é\t\n“ü” 你好 🙂") == "é\t\n“ü” 你好 🙂"
    assert visible("half \udc80 name") == "half \ufffd name"
    assert one_line("a \n\t b\x1b") == "a b␛"


def test_say() -> None:
    stream = io.StringIO()
    say(EVIL, file=stream)
    assert stream.getvalue() == SHOWN + "\n"


@pytest.mark.parametrize("pipes", [True, False])
def test_what_is_said_when_nobody_reads_goes_nowhere(*, pipes: bool) -> None:
    read_end, write_end = os.pipe()
    with open(write_end, "w") as writing, open(read_end) as reading:
        stream = outliving(writing, pipes=pipes)
        say("first", file=stream)
        assert reading.readline() == "first\n"
        reading.close()
        for text in ("second", "third"):
            with contextlib.nullcontext() if pipes else pytest.raises(BrokenPipeError):
                say(text, file=stream)
        assert os.path.samestat(os.fstat(write_end), os.stat(os.devnull)) == pipes, "for processes that it starts, too"
        with open(os.devnull, "w") as nowhere:  # what is buffered is tried again
            os.dup2(nowhere.fileno(), write_end)


def test_tables_rules_and_lines_show_them() -> None:
    """And a cell that they are in stays as wide as it looks."""
    stream = io.StringIO()
    console = SafeConsole(file=stream, width=60)
    table = Table(EVIL, "x", box=None, title=EVIL)
    table.add_row(EVIL, "1")
    table.add_row(Text(EVIL), "2")
    console.print(table)
    console.print(EVIL, Text(EVIL))
    console.rule(EVIL)
    printed = stream.getvalue()
    assert not set("\x1b\x07\r\x9b\x7f") & set(printed)
    assert printed.count("␛[31mred") >= 6
    one, two = printed.splitlines()[2:4]
    assert (one.rstrip()[-1], two.rstrip()[-1]) == ("1", "2")
    assert len(one.rstrip()) == len(two.rstrip())


def test_brackets_are_no_markup() -> None:
    stream = io.StringIO()
    SafeConsole(file=stream).print("[bold]runs/a[/] :smile:")
    assert stream.getvalue() == "[bold]runs/a[/] :smile:\n"


def test_a_live_display_keeps_its_own_sequences_and_shows_those_of_others() -> None:
    stream = io.StringIO()
    with Live(EVIL, console=SafeConsole(file=stream, force_terminal=True, width=60), auto_refresh=False) as live:
        live.refresh()
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is given back"
    assert "\x1b[31m" not in stream.getvalue()
    assert "␛[31mred" in stream.getvalue()


def test_progress_shows_them() -> None:
    for live in (False, True):
        stream = io.StringIO()
        with Progress(2, stream=stream, live=live) as progress:
            progress.start()
            progress.phase("generate", 2, "samples")
            progress.advance(note=EVIL)
            progress.message(EVIL)
        assert "\x1b[31m" not in stream.getvalue()
        assert "␛[31mred" in stream.getvalue()


def test_nothing_prints_past_the_screen() -> None:
    """`plait.compiled` and `plait.orphan_guard` lie below it, and print a text of their own."""
    apart = {"observe/screen.py", "observe/console.py", "compiled.py", "orphan_guard.py"}
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).as_posix() not in apart
        if "print" in (text := path.read_text()) or "Console" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "Console")
    ]
    assert not found
