"""Every exception that plait raises on purpose.

PlaitError
├── UserError            something the user can mend; the command line prints it alone and leaves with code 2
│   ├── ConfigError      a key of the recipe or of the command line
│   ├── DataError        a data set, a prompt, a file of the user's
│   ├── ModelError       a model that cannot be found, read or admitted
│   ├── FlowError        a flow that cannot be traced or bound to its roles
│   ├── LayoutError      a mesh, a parallelism or a placement that the model or the devices do not allow
│   └── CallError        a call of the Python API that cannot be done now, or whose arguments are no choice
└── RunError             a run that had to stop (a reward that failed, a disk that is full, a worker that died)
"""

from __future__ import annotations

import re
from typing import Self

RESUME = "--resume (from Python: resume=True)"
"""What has a run go on, as messages say it: it is no key, which would have one name everywhere."""


class PlaitError(Exception):
    """Root of the tree. The message says what was expected, what was found, and which key to change."""

    frames: str = ""
    """The lines of the user's own code that led to it, as a traceback shows them; empty where none did."""


class UserError(PlaitError, ValueError):
    """The user's input cannot be used; nothing has been started."""

    def worded(self, *said: str) -> Self:
        """The same error in other words."""
        other = type(self)(*said)
        other.frames = self.frames
        return other


class ConfigError(UserError):
    """A key is unknown, missing, or holds a value that does not fit; of several such keys, an argument for each, which
    the command line prints on a line of its own."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class DataError(UserError):
    """A data set or one of its rows cannot be used."""


class ModelError(UserError):
    """A model cannot be found, read, or is refused by an admission check."""


class FlowError(UserError):
    """A flow is not a valid dataflow, or a role that it uses is not filled."""


class NoAttribute(FlowError, AttributeError):
    """A handle of a flow has nothing of this name, which `hasattr`, and `getattr` with a default, are to find out."""


class LayoutError(UserError):
    """A model cannot be spread over these devices in this way."""


class CallError(UserError):
    """A call of the Python API comes at a wrong time, or an argument is none of its choices."""


class RunError(PlaitError, RuntimeError):
    """A run that had started had to stop."""


def first_line(error: BaseException) -> str:
    """The first line of what an error of a library says; its kind where it says nothing, as a bare assertion."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def cause_of(error: BaseException) -> str:
    """What an error of a library says first: one sentence, without the place in its sources that some begin with."""
    text = str(error).splitlines()[0] if str(error) else repr(error)
    return re.sub(r"^\[\S+\] *", "", text).split(". ")[0]


def why_not_through(error: RuntimeError | None, timeout_s: float) -> str:
    """Why nothing came through until a deadline, in words.

    Args:
        error: of torch.distributed; None: the wait was aborted.
    """
    if error is None:
        return "it was aborted"
    cause = cause_of(error)
    return f"nothing in {timeout_s:g} s ({cause})" if re.search("timed out|timeout", cause, re.IGNORECASE) else cause
