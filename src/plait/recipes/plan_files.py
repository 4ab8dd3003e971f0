"""Plans by what a recipe's `plan` says: names, or files that hold one. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from plait.data.files import why_no_file
from plait.errors import ConfigError
from plait.paths import at_home
from plait.recipes.keys import nearest
from plait.schedule.named_plans import AUTO, BASELINES, NAMES
from plait.schedule.plan import Plan

EVERY_NAME = (AUTO, *NAMES, *BASELINES)
"""Names of plans that are foretold; a run takes those of others (`BASELINES`) by file alone."""


def plan_file(name: str, words: Sequence[str] = (AUTO, *NAMES)) -> Plan:
    """The plan that a file holds.

    Args:
        words: names of plans that could stand in its place, for messages.

    Raises:
        ConfigError: there is no such file; says what is there. Or as of `paths.at_home`.
        DataError: it cannot be read, or holds no plan.
    """
    path = Path(at_home(name, "`plan`"))
    if not os.path.isfile(path):
        is_word = not path.suffix and path.name == name and not os.path.lexists(path)
        why = nearest(name, words) if is_word else f", which {why_no_file(path)}"
        raise ConfigError(f"`plan`: expected {', '.join(words)} or a plan file, found `{name}`{why}")
    return Plan.load(path)


def check_plan(name: str) -> None:
    """See that a run can read its plan. Raises as `plan_file` does."""
    if name not in (AUTO, *NAMES):
        plan_file(name)


def ranks_of(name: str) -> int:
    """Ranks of a plan file; 0 for a named plan. Raises as `plan_file` does."""
    return 0 if name in EVERY_NAME else plan_file(name, EVERY_NAME).num_ranks
