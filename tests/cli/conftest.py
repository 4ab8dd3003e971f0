"""The tiny model and recipes of the runtime's tests."""

from tests.runtime.conftest import make_recipe, models_are_checked_once, tiny_folder

__all__ = ["make_recipe", "models_are_checked_once", "tiny_folder"]
