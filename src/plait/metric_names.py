"""Which names the user's metrics and columns may have: those that rewards and losses log, and values of a flow. Where
an own name of plait's is taken only later, it stays, and the user's goes under `logged/NAME`.

Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_LENGTH = 128
"""Characters; a name is a column of a log and the title of a curve."""

RESERVED = ("step",)
"""Names that a row of a log has already."""

RESERVED_GROUPS = ("timing_s", "perf", "training", "eval", "doctor", "off_policy")
"""First parts of the names that plait gives to what it measures itself, in every run."""


RESERVED_COLUMNS = (
    "rollout",
    "evaluation_set",
    "uid",
    "prompt",
    "response",
    "finish_reason",
    "policy_version",
    "token_versions",
    "prompt_ids",
    "token_ids",
    "sampling_logprobs",
    "support_sizes",
    "turns",
    "replies",
    "reply_error",
)
"""What a record of a sample has already, or may have."""

OF_DATA = "data/"
"""With what a record of a sample begins the names of the columns of its row of the data."""

WRITTEN = "prompts/"
"""With what it begins those of other prompts that the flow has written for the sample."""

_LOGGED = "logged/"
_GROUPS_OF_COLUMNS = {
    OF_DATA: "the data",
    WRITTEN: "the prompts that the flow writes",
    "rewards/": "what reward functions gave",
    "costs/": "what cost functions gave",
    _LOGGED: "what reward functions logged",
}
"""First parts of names in a record of a sample, and what they are of."""


def problem_of(name: Any, *, is_metric: bool = True) -> str | None:
    """What is wrong with the name of a metric, or of a column with samples, in words; None: nothing."""
    if not isinstance(name, str):
        return f"expected a text as the name, found {type(name).__name__} {name!r:.60}"
    if not name.strip() or not name.isprintable():
        return f"expected a name of printable characters, found {name!r:.60}"
    if len(name) > MAX_LENGTH:
        return f"expected a name of at most {MAX_LENGTH} characters, found {len(name)}: {name[:40]!r} …"
    if not is_metric:
        for group, of in _GROUPS_OF_COLUMNS.items():
            if name.startswith(group):
                return f"the name `{name}` is one of a column of {of}, as all of `{group}…`; take another name"
        return f"a sample has a column `{name}` already; take another name" if name in RESERVED_COLUMNS else None
    group = name.split("/", 1)[0]
    if name in RESERVED or (group in RESERVED_GROUPS and "/" in name):
        use = "a column of every log" if name in RESERVED else f"one of plait's own, as all of `{group}/…`"
        return f"the name `{name}` is {use}; take another, such as `my/{name.rpartition('/')[2]}`"
    return None


def with_logged(own: Mapping[str, Any], logged: Mapping[str, Any], *, is_metric: bool = True) -> dict[str, Any]:
    """Metrics of plait's own, or a record of a sample, with what the user's code has said beside them. Nothing takes
    the place of something else: what has a name that is taken goes under `logged/NAME`; in a record also what has a
    name that records of other samples have."""
    whole = dict(own)
    for name, value in logged.items():
        if not is_metric and (name in RESERVED_COLUMNS or name.startswith((OF_DATA, WRITTEN))):
            name = _LOGGED + name
        while name in whole:
            name = _LOGGED + name
        whole[name] = value
    return whole
