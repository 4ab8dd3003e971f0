"""What a user wrote that does not fit, in words."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any


def nearest(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def unfit_partial(fn: Callable[..., Any]) -> str:
    """What a `functools.partial` gives its function that this does not take, in words; empty where all of it fits, and
    of any other callable."""
    if not isinstance(fn, partial):
        return ""
    try:
        signature = inspect.signature(fn.func)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind_partial(*fn.args, **fn.keywords)
    except TypeError as error:
        unknown = next((name for name in fn.keywords if name not in signature.parameters), "")
        return f"its `partial` does not fit: {error}{nearest(unknown, signature.parameters)}"
    return ""
