"""The weights of a model's layers, as what computes with them sees them: all there, or gathered a layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

Settle = Callable[[int | None], None]
"""Told in a backward that the gradients of all layers behind this one are complete; None: nothing is told."""


class LayerWeights(Protocol):
    """Forwards and backwards run within what this makes."""

    is_gathered: ClassVar[bool]
    """Whether ranks of dp gather them from each other: then all go through as many passes, some of them idle."""

    def forward(self) -> AbstractContextManager[None]:
        """Within it the module computes, with a graph for a backward or without one."""
        ...

    def backward(self, settle: Settle) -> AbstractContextManager[None]:
        """Within it a backward of what was computed in `forward` runs."""
        ...

    def idle_forward(self) -> None:
        """Take part in the gathers of a forward for which other ranks have samples and this one has none."""
        ...

    def idle_backward(self, settle: Settle, lowest: int | None) -> None:
        """The same of a backward.

        Args:
            lowest: the first layer that a gradient comes to; None: none comes to any.
        """
        ...

    def having(self, layer: int | None) -> AbstractContextManager[None]:
        """Within the context, the weights of this layer and those outside layers (None) are there. All ranks enter it
        together."""
        ...

    def rest(self) -> None:
        """Nothing is computed for a while, or the weights change."""
        ...


class HeldLayers:
    """This rank holds all that it computes with; see `LayerWeights`."""

    is_gathered: ClassVar[bool] = False

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, settle: Settle) -> AbstractContextManager[None]:
        return nullcontext()

    def idle_forward(self) -> None:
        pass

    def idle_backward(self, settle: Settle, lowest: int | None) -> None:
        pass

    def having(self, layer: int | None) -> AbstractContextManager[None]:
        return nullcontext()

    def rest(self) -> None:
        pass
