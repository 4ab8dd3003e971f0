"""A compiled forward whose weights are not those of its model."""

from __future__ import annotations

from collections.abc import Callable

from plait.generation.compiled_forward import CompiledForward


def change_weights(compiled: CompiledForward, how: Callable[[CompiledForward], None]) -> None:
    """Whenever they have been laid out anew."""
    pack = compiled.prepare

    def wrong() -> None:
        fresh = not compiled.is_prepared
        pack()
        if fresh:
            how(compiled)

    compiled.prepare = wrong  # type: ignore[method-assign]
