"""The pages on algorithms and on correctness name tests and options that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.recipes.algorithm import BUILT_IN, load_flow, options_class

ROOT = Path(__file__).parents[2]
NAMES = re.compile(r"`(test_\w+)`")


def all_tests() -> set[str]:
    return {name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}


@pytest.mark.parametrize("page", ["algorithms.md", "correctness.md"])
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    named = set(NAMES.findall((ROOT / "docs" / page).read_text()))
    assert len(named) > 4
    assert named <= all_tests(), named - all_tests()


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_every_algorithm_and_option_is_on_the_page(algorithm: str) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    options = options_class(load_flow(algorithm))
    assert options is not None
    assert f"`{algorithm}`" in page
    tables = page[page.index("## Options") : page.index("## What the tests show")]
    missing = [name for name in options.model_fields if f"`{name}`" not in tables]
    assert not missing, missing
