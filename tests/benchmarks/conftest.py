"""The benchmarks as modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """`imported("placed.runs")`: a module in the folder of the benchmarks, which may import others there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
