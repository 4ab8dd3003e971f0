"""Which names of the user's metrics and columns may have: those that rewards and losses log, and values of a flow.

Imports the standard library only.
"""

from __future__ import annotations

from typing import Any

MAX_LENGTH = 128
"""Characters; a name is a column of a log and the title of a curve."""

RESERVED = ("step",)
"""Names that a row of a log has already."""

RESERVED_GROUPS = ("timing_s", "perf", "training", "eval", "doctor", "off_policy")
"""First parts of the names that plait gives to what it measures itself, in every run."""


RESERVED_COLUMNS = (
    "rollout",
    "uid",
    "prompt",
    "response",
    "finish_reason",
    "policy_version",
    "token_versions",
    "prompt_ids",
    "token_ids",
    "sampling_logprobs",
)
"""What a record of a sample has already."""

OF_DATA = "data/"
"""With what a record of a sample begins the names of the columns of its row of the data."""


def problem_of(name: Any, *, is_metric: bool = True) -> str | None:
    """What is wrong with the name of a metric, or of a column with samples, in words; None: nothing."""
    if not isinstance(name, str):
        return f"expected a text as the name, found {type(name).__name__} {name!r:.60}"
    if not name.strip() or not name.isprintable():
        return f"expected a name of printable characters, found {name!r:.60}"
    if len(name) > MAX_LENGTH:
        return f"expected a name of at most {MAX_LENGTH} characters, found {len(name)}: {name[:40]!r} …"
    if not is_metric:
        if name.startswith(OF_DATA):
            return f"the name `{name}` is one of a column of the data, as all of `{OF_DATA}…`; take another name"
        return f"a sample has a column `{name}` already; take another name" if name in RESERVED_COLUMNS else None
    group = name.split("/", 1)[0]
    if name in RESERVED or (group in RESERVED_GROUPS and "/" in name):
        use = "a column of every log" if name in RESERVED else f"one of plait's own, as all of `{group}/…`"
        return f"the name `{name}` is {use}; take another, such as `my/{name.rpartition('/')[2]}`"
    return None
