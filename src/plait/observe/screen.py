"""The way of text to the user's terminal: what data say is shown there, never obeyed.

Prompts, responses, names of files and messages of other people's code may hold escape sequences, which move the cursor,
change colours or retitle the window. Everything that plait prints goes through `say`, or through the console of
`plait.observe.console`; both make such characters visible, one for one.
"""

from __future__ import annotations

import errno
import io
import os
import stat
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


class _Outlived(io.FileIO):
    """A terminal, or a pipe: what is written once the one is closed, or nobody reads the other, goes nowhere, as who
    writes may go on without it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outliving(stream: TextIO, *, pipes: bool = True) -> TextIO:
    """The same stream, or one to the same terminal that may be closed.

    Args:
        pipes: so also one to a pipe or socket that nobody may read any more.
    """
    if not isinstance(stream, io.TextIOWrapper) or not (stream.isatty() or (pipes and _is_read(stream))):
        return stream
    raw = _Outlived(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)


def _is_read(stream: TextIO) -> bool:
    """Whether what is written there is for another process."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # of no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
