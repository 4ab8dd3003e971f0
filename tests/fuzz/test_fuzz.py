"""Wrong inputs of every kind, each answered in one message and in time; see `frame` for how to add some."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from plait.data import chat
from tests.fuzz import cases_checkpoints, cases_data, cases_keys, cases_options, cases_plans, cases_recipes
from tests.fuzz.frame import Case, Place, run_case

TABLES: dict[str, Callable[[], Iterable[Case]]] = {
    "keys": cases_keys.cases,
    "recipes": cases_recipes.cases,
    "data": cases_data.cases,
    "checkpoints": cases_checkpoints.cases,
    "plans": cases_plans.cases,
    "options": cases_options.cases,
}
DEFAULT_CASES = 120
"""How many the default suite takes, together."""

ALL = {name: list(cases()) for name, cases in TABLES.items()}


def _chosen() -> frozenset[tuple[str, str]]:
    """Each table's share of the default suite: those that are always run, then by a hash of the name."""
    total = sum(map(len, ALL.values()))
    chosen: set[tuple[str, str]] = set()
    for table, cases in ALL.items():
        share = max(1, len(cases) * DEFAULT_CASES // total)
        ranked = sorted(cases, key=lambda c: (not c.always, c.alone, hashlib.sha1(c.name.encode()).digest()))
        chosen |= {(table, case.name) for case in ranked[: max(share, sum(case.always for case in cases))]}
    return frozenset(chosen)


def _params() -> Iterable[Any]:
    chosen = _chosen()
    for table, cases in ALL.items():
        for case in cases:
            marks = () if (table, case.name) in chosen else (pytest.mark.slow,)
            yield pytest.param(case, id=f"{table}: {case.name}", marks=marks)


@pytest.fixture(autouse=True)
def _templates_without_end_are_broken_off_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "RENDER_LIMIT_S", 0.4)


@pytest.mark.parametrize("case", list(_params()))
def test_every_input_is_answered(case: Case, place: Place) -> None:
    run_case(case, place)


def test_names_are_unique_and_the_default_suite_has_its_size() -> None:
    for table, cases in ALL.items():
        names = [case.name for case in cases]
        assert len(set(names)) == len(names), f"{table}: {sorted({n for n in names if names.count(n) > 1})[:5]}"
    assert len(_chosen()) >= min(DEFAULT_CASES * 0.8, sum(map(len, ALL.values())))
