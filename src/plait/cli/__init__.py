"""The command line. Thin: a command reads its arguments, calls the floor below, prints, and returns an exit code.

Each command lives in a module of its own and is imported when it is called, so `plait --help` needs no torch.

* `app` lists the commands: `train` (`train_stages`, `opening`, `dry_run`), `evaluate`, `generate` (`generate_options`,
  `kept`), `samples`, `doctor`, `export`, `plan` (also `plait simulate`: `plan_options`), `schedule`
  (`workload_options`), `profile`, `trace`, `completion`.
* What they print: `report` at the end of a run, `evaluation_report` of what it was measured on, `plan_report`,
  `plan_text`, `plan_variants`, `plan_following`, `placement_text`, `ranks_text`, `schedule_report`, `staleness_report`,
  `trace_text`, each answer by `line_text`; `help` and `usage` of options.
* `output_files` are checked before work, `leaving` ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
from typing import TextIO

from plait.cli.leaving import leave_behind
from plait.errors import ConfigError, PlaitError, UserError
from plait.observe.screen import one_line, outliving, say
from plait.stop_signals import STOP_SIGNALS, interrupt

MOST_SHOWN = 2000
"""Characters of a message."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 the run failed, 2 the input cannot be used, 130 interrupted.

    What nobody foresaw keeps its traceback: it is our fault.
    """
    if argv is not None:
        return _run(argv)
    # This process is the command.
    _open_streams()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)  # so that what was begun is taken back
    code = _run(sys.argv[1:])
    leave_behind(code)
    return code


def _open_streams() -> None:
    """Where the command was begun without a stream, what goes there goes nowhere, and no file gets its number; what a
    terminal's encoding has no signs for is written as escapes. Who reads what a command reports may leave; who reads
    its result ends it so (`plait report … | head`), but no run and no generation, whose results are files."""
    sys.stdin = sys.stdin or _nowhere("r")
    sys.stdout = sys.stdout or _nowhere("w")
    sys.stderr = sys.stderr or _nowhere("w")
    writes = sys.argv[1:2] in (["train"], ["generate"])
    sys.stdout, sys.stderr = outliving(sys.stdout, pipes=writes), outliving(sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # Python looks for its place in it, which a file that became a pipe has not
            sys.stdout.reconfigure(errors="backslashreplace")


def _nowhere(mode: str) -> TextIO:
    stream = open(os.devnull, mode, errors="backslashreplace")  # noqa: SIM115
    os.set_inheritable(stream.fileno(), True)  # as streams are
    return stream


def _run(argv: list[str]) -> int:
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(error, 2)
    except PlaitError as error:
        say(f"error: {error}", file=sys.stderr)
        _show_frames(error)
        return 1
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:  # else a run has said what is good
            say("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            # `head`, say, has what it wanted. What is still buffered must not be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        # A path that no file system could hold is no failure of a run.
        return _fail(error, 2 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else 1)


def _dispatch(argv: list[str]) -> int:
    from cyclopts.exceptions import CycloptsError

    from plait.cli.app import app
    from plait.cli.help import asked_for, print_help
    from plait.paths import working_folder

    _check(argv)
    try:
        if (asked := asked_for(argv)) is not None:
            print_help(asked[0], everything=asked[1])
            return 0
        working_folder()
        groups = ["--help" if word == "--help-all" else word for word in argv]  # of several commands, which list these
        result = app(groups, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        from plait.cli.usage import explain

        raise ConfigError(explain(error)) from None
    return result if isinstance(result, int) else 0


def _check(argv: list[str]) -> None:
    """Raises ConfigError where an argument is no text that could be shown or looked up."""
    for word in argv:
        if "\0" in word or any(0xD800 <= ord(c) < 0xE000 for c in word):
            raise ConfigError(f"the argument {word[:80]!a} is not UTF-8, or holds a NUL character; give a text")


def _nobody_reads() -> bool:
    """Whether the broken pipe is the one we print to."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _fail(error: Exception, code: int) -> int:
    for said in error.args if isinstance(error, ConfigError) else (error,):
        say(f"error: {_shortened(one_line(str(said)))}", file=sys.stderr)
    _show_frames(error)
    return code


def _show_frames(error: Exception) -> None:
    """The lines of the user's own code that led to it."""
    if isinstance(error, PlaitError) and error.frames:
        say(error.frames, file=sys.stderr)


def _shortened(message: str) -> str:
    """Without the middle where it is too long to be read: it shows a value then."""
    if len(message) <= MOST_SHOWN:
        return message
    return f"{message[: MOST_SHOWN // 2]} … {message[-MOST_SHOWN // 2 :]}"
