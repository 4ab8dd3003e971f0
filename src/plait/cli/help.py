"""What `--help` and `--help-all` of a command list. `--help` lists what newcomers need, few over all commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App

USUAL: dict[str, tuple[str, ...]] = {
    "train": (
        "--dry-run",
        "--resume",
        "--model",
        "--algorithm",
        "--steps",
        "--prompts_per_step",
        "--samples_per_prompt",
        "--data.source",
        "--reward.functions",
        "--sampling.temperature",
        "--sampling.max_response_tokens",
        "--optimizer.learning_rate",
        "--evaluation.items",
        "--run_dir",
        "--overwrite",
        "--device",
        "--devices",
        "--plan",
    ),
    "eval": ("--model", "--evaluation.items", "--json"),
    "generate": ("--model", "--prompts", "--out", "--n", "--temperature", "--max-tokens", "--device"),
    "export": ("--out", "--step"),
    "plan": ("--cluster", "--out"),
    "simulate": ("--plan",),
    "schedule": ("--stages", "--microbatches", "--seconds", "--out"),
}
"""Per command the options that `--help` lists. Each counts once per command, and together they stay under 40."""


@dataclass(frozen=True)
class Option:
    """One line of a command's help."""

    name: str
    """`--steps`, or `RUN_DIR` for an argument that is known by its place."""
    default: str
    """As text; empty where there is none worth a word."""
    meaning: str

    @property
    def positional(self) -> bool:
        return not self.name.startswith("-")


def options_of(command: str) -> list[Option]:
    """Every option of a command (`train`, `trace show`), in the order of its help."""
    match command:
        case "train":
            from plait.cli import train

            return list(train.options())
        case "eval":
            from plait.cli import evaluate

            return list(evaluate.options())
    from plait.cli.app import app

    subcommand = app
    for word in command.split():
        subcommand = subcommand[word]
    return list(_of_signature(subcommand))


def usual(command: str) -> list[Option]:
    """Those that `--help` lists: all, where none is chosen."""
    every, chosen = options_of(command), USUAL.get(command, ())
    return [option for option in every if option.positional or option.name in chosen] or every


def commands() -> Iterator[str]:
    """Every command that takes options, by its full name."""
    from plait.cli.app import app

    def below(parent: App, prefix: str) -> Iterator[str]:
        for name in parent:
            if name.startswith("-"):
                continue
            child = parent[name]
            yield from below(child, f"{prefix}{name} ") if child.default_command is None else (f"{prefix}{name}",)

    yield from below(app, "")


def asked_for(argv: list[str]) -> tuple[str, bool] | None:
    """The command whose help `argv` asks for, and whether for all of it."""
    asking = {"--help", "-h", "--help-all"}
    if not asking & set(argv):
        return None
    from plait.cli.app import app

    chain, apps, _ = app.parse_commands([word for word in argv if word not in asking])
    if not chain or apps[-1].default_command is None:
        return None
    return " ".join(chain), "--help-all" in argv


def print_help(command: str, *, everything: bool) -> None:
    """Usage, one sentence, and a table that fits 80 columns."""
    from rich.table import Table
    from rich.text import Text

    from plait.observe.console import SafeConsole

    every = options_of(command)
    listed = every if everything else usual(command)
    console = SafeConsole()
    console.print(Text.assemble(("plait " + command, "bold"), " ", usage_of(command).split(f"{command} ", 1)[-1]))
    console.print(Text(f"\n{summary_of(command)}\n"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for option in listed:
        default = f" ({option.default})" if option.default else ""
        table.add_row(option.name, Text.assemble(option.meaning, (default, "dim")))
    console.print(table)
    if len(listed) < len(every):
        console.print(Text(f"\n`plait {command} --help-all` lists every option.", style="dim"))


def usage_of(command: str) -> str:
    """`plait export RUN_DIR --out OUT [--option value …]`."""
    if command in ("train", "eval"):
        return f"plait {command} RECIPE [--key value …]"
    words = ["plait", command]
    every = options_of(command)
    words += [
        option.name if option.default == "required" else f"[{option.name}]" for option in every if option.positional
    ]
    required = [option.name for option in every if option.default == "required" and not option.positional]
    words += [f"{name} {_as_value(name)}" for name in required]
    if any(option.default != "required" for option in every):
        words.append("[--option value …]")
    return " ".join(words)


def summary_of(command: str) -> str:
    from plait.cli.app import app

    subcommand = app
    for word in command.split():
        subcommand = subcommand[word]
    text = subcommand.help or subcommand.default_command.__doc__ or ""
    return text.strip().splitlines()[0]


def _of_signature(command: App) -> Iterator[Option]:
    for argument in command.assemble_argument_collection(parse_docstring=True):
        if argument.name.startswith("*"):
            continue  # a dataclass whose fields are options of their own
        positional = argument.index is not None
        name = _as_value(argument.name) if positional else argument.name
        default = argument.field_info.default
        unset = default is None or default is False or default is Parameter.empty or default == ()  # empty: of `*files`
        text = "required" if argument.required else "" if unset else str(default)
        yield Option(name, text, " ".join((argument.parameter.help or "").split()).rstrip("."))


def _as_value(option: str) -> str:
    return option.strip("-").upper().replace("-", "_")
