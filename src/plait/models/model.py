"""The type of a model, for code that takes language models and scalar models alike."""

from __future__ import annotations

from typing import TypeVar

from plait.models.language_model import LanguageModel
from plait.models.scalar_model import ScalarModel

Model = LanguageModel | ScalarModel

AnyModel = TypeVar("AnyModel", LanguageModel, ScalarModel)
"""One of the two, of which the same comes back."""
