"""`plait --install-completion`: the shell completes commands, options and the keys of recipes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import App, Parameter

from plait.cli.app import app
from plait.cli.evaluate import FLAGS as EVAL_FLAGS
from plait.cli.help import Option, commands, options_of
from plait.cli.train import FLAGS, NODE_OPTIONS
from plait.errors import ConfigError
from plait.file_writes import why_not_written
from plait.observe.screen import say
from plait.recipes.keys import alternatives, annotation_of

Shell = Literal["bash", "zsh", "fish"]
SHELLS = ", ".join(get_args(Shell))
FLAG_NAMES = {*FLAGS, *EVAL_FLAGS}
"""Options of `train` and `eval` without a value."""


def install_completion(*, shell: Shell | None = None) -> int:
    """Have your shell complete commands, options and recipe keys.

    Parameters
    ----------
    shell
        Which shell; the one that runs this command when left out.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    try:
        found = shell or detect_shell()
    except ShellDetectionError:
        found = "none that is known"
    if found not in get_args(Shell):
        raise ConfigError(f"--shell: expected {SHELLS}, found {found} running this command; name one of them")
    try:
        path = completed_app().install_completion(shell=found)
        if found == "bash":
            path.write_text(_by_readline(path.read_text()))
    except OSError as error:
        place = Path(error.filename or Path.home())
        raise ConfigError(
            f"completion of {found}: {place} cannot be written: {why_not_written(place, error)}"
        ) from error
    say(f"completion is written to {path}{_READ_BY[found]}; a {found} that is opened from now on has it")
    return 0


_READ_BY = {"bash": ", which ~/.bashrc reads", "zsh": ", where `compinit` of your ~/.zshrc finds it", "fish": ""}
_FILES = '$(compgen -f -- "${cur}")'


def _by_readline(script: str) -> str:
    """A script for bash in which files are completed by bash itself: it goes on into folders, and escapes spaces."""
    return script.replace(f"COMPREPLY=( {_FILES} )", "COMPREPLY=()").replace("complete -F", "complete -o default -F")


def completed_app() -> App:
    """The commands with all that they take as parameters, from which cyclopts writes a shell's script: `train` and
    others read the keys of a recipe by themselves. Nothing of it is run."""
    whole = App(name="plait", help=app.help, default_parameter=app.default_parameter)
    groups = {"": whole}
    for name in commands():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = App(name=group, help=app[group].help)
            whole.command(groups[group])
        groups[group].command(_with_keys(name), name=last, help_flags=["--help", "--help-all"], version_flags=[])
    whole.command(install_completion, name="--install-completion")
    return whole


def _with_keys(command: str) -> Callable[..., Any]:
    """A command's function, which takes each key of a recipe as an option where it takes such keys at all."""
    found = app
    for word in command.split():
        found = found[word]
    function = found.default_command
    assert function is not None, f"{command} is no command"
    hints = get_type_hints(function, include_extras=True)
    own = [each.replace(annotation=hints[name]) for name, each in inspect.signature(function).parameters.items()]
    others = [each for each in own if each.name not in ("tokens", "keys")]
    if len(others) == len(own):
        return function
    if not others:  # `train` and `eval`
        recipe = inspect.Parameter("recipe", inspect.Parameter.POSITIONAL_ONLY, default=None, annotation=Path | None)
        others, options = [recipe], options_of(command)
    else:
        taken = {*FLAGS, *NODE_OPTIONS, *(option.name for option in options_of(command))}
        options = [option for option in options_of("train") if option.name not in taken]

    def completed() -> None:
        raise AssertionError("only its signature is read")

    completed.__doc__ = function.__doc__
    signature = inspect.Signature([*others, *_parameters(options)])
    completed.__signature__ = signature  # type: ignore[attr-defined]
    return completed


def _parameters(options: list[Option]) -> Iterator[inspect.Parameter]:
    for place, option in enumerate(options):
        kind = bool if option.name in FLAG_NAMES else _completed(option.name.removeprefix("--"))
        annotation = Annotated[kind, Parameter(name=option.name, help=option.meaning)]
        yield inspect.Parameter(f"key{place}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _completed(key: str) -> Any:
    """What cyclopts completes a value of a key by: some words, the files where it may be a text, or nothing."""
    if f"--{key}" in NODE_OPTIONS:
        return str
    members = alternatives(annotation_of(key))
    if bool in members:
        return Literal["true", "false"]
    elements = [get_args(member)[0] if get_origin(member) is tuple else member for member in members]
    words = [word for element in elements for word in _words(element)]
    if any(isinstance(element, type) and element in (str, Path) for element in elements):
        return Path
    return Literal[tuple(words)] if words else str


def _words(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return [member.value for member in annotation]
    return []
