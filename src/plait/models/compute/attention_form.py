"""How queries and keys of one layer become weights of its values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionForm:
    """The attention of one layer, as its family states it."""

    scale: float
    """Scores are multiplied by it."""
    window: int | None = None
    """A token sees itself and the window − 1 tokens before it; None: all before it."""
    softcap: float | None = None
    """Scores become softcap · tanh(scores / softcap)."""
    sinks: Tensor | None = None
    """[Hq] one further score per head that takes part in the softmax and attends to nothing."""
