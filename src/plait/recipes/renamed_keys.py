"""Keys of recipes that had other names in earlier versions: an unknown key that is one of them is answered with its
name of today, and the recipe in the folder of an older run is read by it. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "turns.most": "turns.max_turns",
    "turns.at_once": "turns.max_concurrency",
    "reward.at_once": "reward.max_concurrency",
    "cost.at_once": "cost.max_concurrency",
    "on_update": "partial_rollout",
    "data.evaluation_source": "evaluation.sets",
}
"""Dotted key as it was → as it is."""
_VALUES: Mapping[str, Mapping[str, str]] = {"partial_rollout": {"wait": "off"}}
"""Key of today → value as it was → as it is, where values have other names, too."""


def renamed_answer(key: str) -> str:
    """What to say of an unknown key that has another name today, to be put behind `unknown key …`; empty of others."""
    name = RENAMED.get(re.sub(r"\bmore\.\d+\.", "", key))
    if name is None:
        return ""
    values = "".join(f", and its value `{was}` is `{now}`" for was, now in _VALUES.get(name, {}).items())
    return f": it is `{name}` now{values}"


def renamed_value(key: str, value: Any) -> str:
    """What to say of a value that a key does not take, where it has another name today; empty of others."""
    now = _VALUES.get(key, {}).get(value) if isinstance(value, str) else None
    return "" if now is None else f"; `{value}` is `{now}` now"


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe of an earlier version, its keys by their names of today."""
    return _renamed(_with_sets(tree), "")


def _with_sets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The source of the held-out items of `data` as one of `evaluation.sets`. Where each of several sources names its
    own, which was measured together, there is nothing that is the same: these stay, and are answered."""
    changed = dict(tree)
    for name in ("data", "pretraining"):
        if isinstance(section := tree.get(name), Mapping):
            changed[name] = _without_unset(section)
    data, evaluation = changed.get("data"), changed.get("evaluation")
    named = data.get("evaluation_source") if isinstance(data, Mapping) and not data.get("more") else None
    if named is not None and isinstance(evaluation, Mapping):
        changed["data"] = {key: value for key, value in data.items() if key != "evaluation_source"}
        changed["evaluation"] = {**evaluation, "sets": [{"source": named}]}
    return changed


def _without_unset(source: Mapping[str, Any]) -> dict[str, Any]:
    """A section of data without the key that says where items are held out from, where it says nothing."""
    kept = {key: value for key, value in source.items() if key != "evaluation_source" or value is not None}
    if isinstance(more := source.get("more"), list):
        kept["more"] = [_without_unset(each) if isinstance(each, Mapping) else each for each in more]
    return kept


def _renamed(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = RENAMED.get(f"{prefix}{name}", f"{prefix}{name}")
        if isinstance(value, Mapping):
            value = _renamed(value, f"{prefix}{name}.")
        elif key != f"{prefix}{name}" and isinstance(value, str):
            value = _VALUES.get(key, {}).get(value, value)
        found.setdefault(key.removeprefix(prefix), value)
    return found
