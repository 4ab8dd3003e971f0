"""A model, where it does not matter which of the two it is: both have the methods that are asked for."""

from __future__ import annotations

from typing import TypeVar

from plait.models.language_model import LanguageModel
from plait.models.scalar_model import ScalarModel

Model = LanguageModel | ScalarModel

AnyModel = TypeVar("AnyModel", LanguageModel, ScalarModel)
"""One of the two, of which the same comes back."""
