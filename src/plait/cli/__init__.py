"""The command line. Thin: a command reads its arguments, calls the floor below, prints, and returns an exit code.

Each command lives in a module of its own and is imported when it is called, so `plait --help` needs no torch.
"""

from __future__ import annotations

import sys

from plait.errors import PlaitError, UserError


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 the run failed, 2 the input cannot be used, 130 interrupted."""
    from plait.cli.app import app

    try:
        result = app(argv if argv is not None else sys.argv[1:], exit_on_error=False, result_action="return_value")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PlaitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else 0
