"""Why a backend cannot be had for a model."""

from __future__ import annotations


class Refused(Exception):
    """A backend cannot be had for a model; says why. Caught by `Forward`."""


def require(holds: bool, otherwise: str) -> None:
    """Raises `Refused`, which says `otherwise`, unless it holds."""
    if not holds:
        raise Refused(otherwise)
