"""Plans by the words of a recipe's `plan`: names, or files that hold one."""

from __future__ import annotations

import os
from pathlib import Path

from plait.errors import ConfigError
from plait.recipes.keys import nearest
from plait.schedule.named_plans import AUTO, BASELINES, NAMES
from plait.schedule.plan import Plan


def plan_file(name: str) -> Plan:
    """Raises ConfigError where there is no such file."""
    path = Path(os.path.expanduser(name))
    if not os.path.isfile(path):
        words = (AUTO, *NAMES, *BASELINES)
        raise ConfigError(f"`plan`: expected {', '.join(words)} or a plan file, found `{name}`{nearest(name, words)}")
    return Plan.load(path)


def ranks_of(name: str) -> int:
    """Ranks of a plan file; 0 for a named plan."""
    return 0 if name in (*NAMES, AUTO, *BASELINES) else plan_file(name).num_ranks
