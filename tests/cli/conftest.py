"""The tiny model and recipes of the runtime's tests. What the machine computes and copies in a second is measured once
for each dtype."""

from __future__ import annotations

import functools
from typing import NoReturn

import pytest

from plait.cost.measured.rates import measure_rates
from tests.runs.conftest import make_recipe, models_are_checked_once, texts_are_parsed_once, tiny_folder

__all__ = [
    "make_recipe",
    "models_are_checked_once",
    "no_model_is_loaded",
    "rates_are_measured_once",
    "texts_are_parsed_once",
    "tiny_folder",
]

_RATES = functools.cache(measure_rates)


@pytest.fixture(autouse=True)
def rates_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what `plait generate` computes for a tiny model."""
    monkeypatch.setattr("plait.runtime.evaluating.generate.measure_rates", _RATES)


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `plait generate`, as long as a test runs."""

    def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("plait.runtime.evaluating.generate.load_model", never)
