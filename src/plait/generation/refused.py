"""Why a backend cannot be had for a model."""

from __future__ import annotations

from dataclasses import dataclass

LAYERS_ROUND = "the model's own layers may round by the number of rows"
"""Why steps are not steady where the Transformers module computes."""


@dataclass(frozen=True)
class Refusals:
    """Why an engine does not compute in its best way, in words; None: it does, or that is not known yet."""

    compiled: str | None = None
    """Why its model's own layers compute."""
    steady: str | None = None
    """Why the bits of a sample may depend on what is drawn beside it."""


class Refused(Exception):
    """A backend cannot be had for a model; says why. Caught by `Forward`."""


def require(holds: bool, otherwise: str) -> None:
    """Raises `Refused`, which says `otherwise`, unless it holds."""
    if not holds:
        raise Refused(otherwise)
