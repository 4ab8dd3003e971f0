"""Where plait calls code of the user's: whatever that raises becomes one error of ours, told by the user's own frames.

A flow, a loss, a function over columns, a reward and the file that any of them stands in may fail in every way that
Python has: it is not found, does not parse, raises, leaves by `sys.exit`, recurses for ever, hangs. `UserCode` is the
one place that turns all of it into an error that says what was called, the file and line, and what was raised there.
Errors that plait raises on purpose pass through and get the user's frames too: they say where it was asked for.

Imports the standard library and `errors`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from plait.errors import ConfigError, PlaitError

IMPORT_LIMIT_S = 120.0
"""For a user's file to be imported, heavy libraries and all."""
TRACE_LIMIT_S = 60.0
"""For a flow to run once on handles."""
CALL_LIMIT_S = 600.0
"""For a loss of one micro-batch, or a function over columns of one row, group or batch."""
MAX_FRAMES_CHARS = 6000
"""Characters of frames that are shown, the last ones."""

_PLAIT = str(Path(__file__).resolve().parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_RAISE = dis.opmap["RAISE_VARARGS"]
_importing: list[str] = []
"""Files and modules of the user's that are being imported, the outermost first."""


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """While inside, a file or module of the user's is imported for what is defined in it."""
    _importing.append(what)
    try:
        yield
    finally:
        _importing.pop()


def refuse_while_importing(what: str) -> None:
    """See that `what` is not called by a file that is only imported: it would begin again in every process.

    Raises:
        ConfigError: it is; says where the call belongs.
    """
    if _importing:
        raise ConfigError(
            f"{what} is called while {_shown(_importing[-1])} is imported, as the processes of a run do to find the "
            'functions in it; put the call under `if __name__ == "__main__":`, or the functions into another file'
        )


class UserCode:
    """Use as a context manager around a call of the user's code.

    Args:
        what: what is called, as the message names it: "the loss `mine`".
        raises: the error that is raised instead: one of the user's input before a run starts, RunError in it.
        users: False where it is a function of plait's own after all (see `is_users`): its errors are ours, and keep
            their traceback.
        limit_s: seconds after which it is broken off (in a main thread); None: no limit.
    """

    def __init__(
        self,
        what: str,
        raises: type[PlaitError],
        *,
        users: bool = True,
        limit_s: float | None = None,
    ) -> None:
        self._what = what
        self._raises = raises
        self._users = users
        self._limit_s = limit_s
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._limit_s is not None and threading.current_thread() is threading.main_thread():
            self._stack.enter_context(_deadline(self._limit_s))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            return
        if isinstance(error, PlaitError):
            error.frames = error.frames or own_frames(error)
            return
        if isinstance(error, KeyboardInterrupt) and not _is_raised_by_code(error):
            return  # the person at the keyboard
        if not self._users:
            return
        raised = self._raises(f"{self._what}: {self._said(error)}")
        raised.frames = own_frames(error)
        raise raised from error

    def _said(self, error: BaseException) -> str:
        if isinstance(error, _TooLong):
            return f"{place_of(error)}has not come back after {self._limit_s:.0f} s"
        return f"{place_of(error)}{said_by(error)}"


def said_by(error: BaseException) -> str:
    """The type of an error and its message, in one line."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    try:
        lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    except Exception:  # an error of the user's whose own text cannot be made
        return type(error).__name__
    text = " ".join(line.strip() for line in lines)
    return text if len(text) <= 1000 else f"{text[:1000]} …"


def place_of(error: BaseException) -> str:
    """`FILE:LINE: ` in the user's code, where the error came from; empty where that is not known."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{_shown(error.filename)}:{error.lineno}: "
    frames = _own(error)
    return f"{_shown(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""


def own_frames(error: BaseException) -> str:
    """The user's own frames of an error, as a traceback shows them; without those of plait and of libraries."""
    text = "".join(traceback.format_list(_own(error)))
    if isinstance(error, SyntaxError):
        text += "".join(traceback.format_exception_only(error)[:-1])
    return text[-MAX_FRAMES_CHARS:].rstrip()


def is_users(function: Callable[..., Any]) -> bool:
    """Whether a function is the user's own, not plait's."""
    module = str(getattr(_inner(function), "__module__", None) or "")
    return module.split(".", 1)[0] != "plait"


def title_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of that which a `partial` is made of; of any other callable its class."""
    inner = _inner(function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def saying_where(error: PlaitError, function: Callable[..., Any]) -> PlaitError:
    """The error about what a function returned, with the function's place in the user's code added. If the function is
    plait's own, the error is left as it is."""
    code = getattr(_inner(function), "__code__", None)
    if code is not None and is_users(function):
        error.frames = f'  File "{code.co_filename}", line {code.co_firstlineno}, in {title_of(function)}'
    return error


def _inner(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _own(error: BaseException) -> traceback.StackSummary:
    """Frames of the user's files: neither plait's nor a library's. If there are none, all frames that are not
    plait's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_plaits(frame.filename)]
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen "))]
    return traceback.StackSummary.from_list(own or frames)


def _is_plaits(file: str) -> bool:
    return file.startswith(_PLAIT + "/") or file == "<string>"


def _shown(file: str) -> str:
    """A path as the user would write it: from where they stand, if it is below."""
    with contextlib.suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


def _is_raised_by_code(error: BaseException) -> bool:
    """Whether a `raise` statement of the user's made this, and not a signal."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or _is_plaits(trace.tb_frame.f_code.co_filename):
        return False
    code = trace.tb_frame.f_code.co_code
    return trace.tb_lasti < len(code) and code[trace.tb_lasti] == _RAISE


class _TooLong(BaseException):
    """Raised in the user's code when its time is over; no `except Exception` of theirs may keep it."""


@contextlib.contextmanager
def _deadline(limit_s: float) -> Iterator[None]:
    """Raise _TooLong inside after so many seconds, and again every second: an `except:` may have swallowed it."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    left_s, every_s = signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    begun_s = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left_s:  # another's timer goes on
            signal.setitimer(signal.ITIMER_REAL, max(left_s - time.monotonic() + begun_s, 1e-3), every_s)
