"""The way of text to the user's terminal: what data say is shown there, never obeyed.

Prompts, responses, names of files and messages of other people's code may hold escape sequences, which move the cursor,
change colours or retitle the window. Everything that plait prints goes through `say`, or through the console of
`plait.observe.console`; both make such characters visible, one for one.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

_SHOWN = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},  # escape becomes the picture ␛
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),  # 0x9b is escape and [ in one
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),  # half characters, as in names of files that are no UTF-8
}


def visible(text: str) -> str:
    """The text with a visible sign in place of each control character but tab and line end; as long as before."""
    return text.translate(_SHOWN)


def one_line(text: str) -> str:
    """`visible`, and every run of white space one space."""
    return visible(" ".join(text.split()))


def say(text: str = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print a text, at once.

    Args:
        file: stdout unless given.
    """
    print(visible(text), file=sys.stdout if file is None else file, end=end, flush=True)


class _Terminal(io.FileIO):
    """A terminal: what is written to it once it is closed goes nowhere, as who writes may go on without it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outliving(stream: TextIO) -> TextIO:
    """The same stream, or one to the same terminal that may be closed."""
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    raw = _Terminal(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)
