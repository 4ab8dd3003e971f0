"""What `make test` takes of many cases, and `make test-all` takes whole."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: those in `quick` as they are, the others marked slow. Tuples are several arguments."""
    found = [case if case in quick else pytest.param(*_arguments(case), marks=pytest.mark.slow) for case in cases]
    assert any(case in quick for case in found), "none of them is quick"
    return found


def examples(quick: int, all_of_them: int) -> int:
    """How many random examples a test takes: the second number where new ones are tried."""
    return all_of_them if os.environ.get("HYPOTHESIS_PROFILE") == "random" else quick


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
