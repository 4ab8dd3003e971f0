"""What a command waits for before its work begins: torch, data, a model. Who loads says so; who listens shows it.

Processes that nobody watches, those of other ranks, have no listener, and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[tuple[Callable[[str], None], set[str]] | None] = ContextVar("listener", default=None)
"""Who listens, and what was said."""


def loading(what: str, *, once: bool = False) -> None:
    """Say that `what` is loaded from now on: `model smollm2-135m-instruct`.

    Args:
        once: not if it was said before: it is read again and again, and quickly.
    """
    if (listener := _listener.get()) is None:
        return
    show, said = listener
    if not once or what not in said:
        said.add(what)
        show(what)


@contextmanager
def loading_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Hand every `loading` in here to `show`."""
    token = _listener.set((show, set()))
    try:
        yield
    finally:
        _listener.reset(token)
