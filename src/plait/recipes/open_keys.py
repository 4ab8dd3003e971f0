"""Keys of a recipe that it may leave open: then a run on GPUs finds them, by the memory that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from plait.settings import Settings

MEMORY_KEYS = "micro_batch_tokens", "checkpoint_activations"
"""What a GPU's memory is spent on in training."""


class OpenKeys(Settings):
    """A recipe, as far as it is stated or left open."""

    if TYPE_CHECKING:  # keys of the recipe, which stand in its own order
        device: Literal["cpu", "cuda"]
    _found: frozenset[str] = frozenset()
    """Keys that were left open, and found for the devices and the plan of a run."""

    @model_validator(mode="after")
    def _spare_memory(self) -> Self:
        """Activations of a long micro-batch are most of what a GPU holds in training."""
        if self.device == "cuda" and not self.states("checkpoint_activations"):
            self.__dict__["checkpoint_activations"] = True
        return self

    @property
    def finds_lengths(self) -> bool:
        """Whether micro-batches are as long as there is room for."""
        return self.device == "cuda" and not self.states("micro_batch_tokens")

    def states(self, key: str) -> bool:
        """Whether a key was set, or found."""
        return key in self.model_fields_set

    def by_default(self, **values: Any) -> Self:
        """The same, of which keys that are not stated have these values, and remain so."""
        recipe = self.model_copy()
        recipe.__dict__.update({key: value for key, value in values.items() if not self.states(key)})
        return recipe

    def with_found(self, **values: Any) -> Self:
        """The same, which states these values as far as it has left them open."""
        values = {key: value for key, value in values.items() if not self.states(key)}
        recipe = self.model_copy(update=values)
        recipe._found = self._found | frozenset(values)
        return recipe

    def reopened(self) -> Self:
        """The same, with what was found left open again: for other devices, or another plan."""
        recipe = self.model_copy()
        recipe.__dict__.update({key: type(self).model_fields[key].default for key in self._found})
        recipe.__pydantic_fields_set__ = self.model_fields_set - self._found
        recipe._found = frozenset()
        return recipe._spare_memory()  # type: ignore[operator]
