"""What predictions ask of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from plait.dataflow import Dataflow
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, ToCome

Coming = Mapping[str, ToCome]
"""Key of a recipe → the model that an earlier stage is still to make for it; one of its shape stands there."""


class Predictable(Protocol):
    """A run whose recipe has been read (`prepared.Outline`, `prepared.Prepared`), as predictions ask for it."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def flow(self) -> Dataflow: ...

    @property
    def models(self) -> Sequence[RoleModel]: ...

    @property
    def shapes(self) -> Mapping[str, ModelShape]: ...
