"""What a function of `build_prompts` is called with: arguments by the names of its parameters, as a reward function of
TRL's form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from plait.dataflow.unfit import nearest, unfit_partial

OF_SAMPLES = ("prompts", "completions", "completion_ids", "turns")
"""What it may ask for of any samples, one entry for each."""


def taken(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the given arguments that the function takes; all of them if it takes `**kwargs`, or if its signature is
    not known. Arguments that a `partial` binds are left to it."""
    parameters = _parameters(fn)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {name: value for name, value in given.items() if name not in _bound(fn)}
    return {p.name: given[p.name] for p in parameters if p.name in given and p.kind in _BY_NAME}


def of_data(fn: Callable[..., Any], columns: Collection[str]) -> tuple[str, ...]:
    """The columns of the data that a function cannot do without.

    Args:
        columns: names of those of the flow that it is given.
    """
    known = {*OF_SAMPLES, *columns}
    return tuple(
        p.name for p in _parameters(fn) or () if p.kind in _BY_NAME and p.default is p.empty and p.name not in known
    )


def unfit_prompts(fn: Callable[..., Any], columns: Collection[str]) -> str | None:
    """Why a function cannot be called so, whatever the data have; None: it can, as far as it says what it takes.

    Args:
        columns: as of `of_data`.
    """
    if why := unfit_partial(fn):
        return why
    for name in columns:
        if name in OF_SAMPLES:
            return f"the function gets something else as `{name}`; give the column another name"
    parameters = _parameters(fn)
    if parameters is None:
        return None
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            return f"the function takes `{p.name}` by position only, but arguments are given by name"
    names = [p.name for p in parameters if p.kind in _BY_NAME]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    for name in columns:
        if name not in names:
            return (
                f"the function takes no column `{name}`{nearest(name, names)}; it takes: {', '.join(names) or 'none'}"
            )
    return None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Without those that a `partial` gives it; None: it does not say."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    return [p for p in parameters if p.name not in _bound(fn)]


def _bound(fn: Callable[..., Any]) -> Collection[str]:
    return fn.keywords if isinstance(fn, partial) else ()
