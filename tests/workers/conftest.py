"""Tiny models and recipes, as runs have them; and processes that run what they are told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.launch.group import Group
from tests.launch.groups import group_of
from tests.models.parallel.team_workers import TeamWorker
from tests.runs.conftest import make_recipe as make_recipe
from tests.runs.conftest import models_are_checked_once as models_are_checked_once
from tests.runs.conftest import place as place
from tests.runs.conftest import placed as placed
from tests.runs.conftest import texts_are_parsed_once as texts_are_parsed_once
from tests.runs.conftest import tiny_folder as tiny_folder


@pytest.fixture(scope="module")
def two() -> Iterator[Group]:
    yield from group_of(TeamWorker, 2)


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    yield from group_of(TeamWorker, 4)
