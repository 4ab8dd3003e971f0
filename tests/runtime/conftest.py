"""Tiny models and recipes, as runs have them."""

from tests.runs.conftest import make_recipe as make_recipe
from tests.runs.conftest import models_are_checked_once as models_are_checked_once
from tests.runs.conftest import place as place
from tests.runs.conftest import placed as placed
from tests.runs.conftest import texts_are_parsed_once as texts_are_parsed_once
from tests.runs.conftest import tiny_folder as tiny_folder
