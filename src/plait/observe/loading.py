"""What a command waits for before its work begins: torch, data, a model. Who loads says so; who listens shows it.

Processes that nobody watches, those of other ranks, have no listener, and nothing is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def loading(what: str) -> None:
    """Say that `what` is loaded from now on: `model smollm2-135m-instruct`."""
    if (show := _listener.get()) is not None:
        show(what)


@contextmanager
def loading_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Hand every `loading` in here to `show`."""
    token = _listener.set(show)
    try:
        yield
    finally:
        _listener.reset(token)
