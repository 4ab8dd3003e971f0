"""A command line that cannot be understood, explained in one line: which argument, what is wrong, what to do."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from plait.cli.help import options_of, usage_of
from plait.errors import ConfigError

if TYPE_CHECKING:
    from cyclopts import Argument


def explain(error: CycloptsError) -> str:
    """One line for what cyclopts refuses."""
    command = " ".join(error.command_chain or ())
    match error:
        case UnknownCommandError():
            assert error.unused_tokens
            assert error.app is not None
            parent = f"plait {command}".strip()
            return _unknown("command", error.unused_tokens[0], [name for name in error.app if name[0] != "-"], parent)
        case UnknownOptionError():
            found = error.token.keyword or error.token.value
            return _unknown_options((found, *(error.root_input_tokens or ())), command)
        case MissingArgumentError():
            assert error.argument is not None
            return _missing(error, error.argument, command)
        case CoercionError():
            name = (error.token.keyword if error.token else None) or _name(error.argument)
            if isinstance(error.__cause__, ConfigError):
                return f"`{name}`: {error.__cause__}"
            given = f", found `{error.token.value}`" if error.token else ""
            return f"`{name}`: expected {_expected(error)}{given}"
        case UnusedCliTokensError():
            assert error.unused_tokens
            return f"`{error.unused_tokens[0]}` is one argument too many; usage: `{usage_of(command)}`"
        case RepeatArgumentError():
            return f"`{error.token.keyword}` is given twice; give it once"
    error.verbose = False
    return " ".join(str(error).split())


def _unknown_options(tokens: Iterable[str], command: str) -> str:
    """What is said of those among the tokens that the command has not; empty where it has all."""
    known = [option.name for option in options_of(command)]
    names = dict.fromkeys(token.split("=")[0] for token in tokens if token.startswith("-") and not _is_number(token))
    return "; ".join(_unknown("option", name, known, f"plait {command}") for name in names if name not in known)


def _is_number(token: str) -> bool:
    with contextlib.suppress(ValueError):
        float(token)
        return True
    return False


def _unknown(what: str, name: str, names: Iterable[str], parent: str) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    every = "--help" if what == "command" else "--help-all"
    remedy = f"did you mean `{near[0]}`?" if near else f"`{parent} {every}` lists the {what}s"
    return f"unknown {what} `{name}`; {remedy}"


def _missing(error: MissingArgumentError, argument: Argument, command: str) -> str:
    if error.keyword is not None:
        return f"`{error.keyword}` needs a value"
    if said := _unknown_options(error.unused_tokens or (), command):  # a required option may be there, but misspelt
        return said
    name = _name(argument)
    meaning = next((option.meaning for option in options_of(command) if option.name == name), "")
    return f"`{name}` is missing ({meaning}); usage: `{usage_of(command)}`"


def _name(argument: Argument | None) -> str:
    if argument is None:
        return "argument"
    return argument.name.strip("-").upper().replace("-", "_") if argument.index is not None else argument.name


def _expected(error: CoercionError) -> str:
    target: Any = error.target_type or (error.argument.hint if error.argument else str)
    if get_origin(target) in (Union, UnionType):
        target = next(member for member in get_args(target) if member is not NoneType)
    if get_origin(target) is tuple:
        target = get_args(target)[0]
    if get_origin(target) is Annotated:
        target = get_args(target)[0]
    if get_origin(target) is Literal:
        return " or ".join(", ".join(map(str, get_args(target))).rsplit(", ", 1))
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(target, f"a {target}")
