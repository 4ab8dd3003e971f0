"""The lists of options are frozen: a change to them is a change to what users type."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from plait.algorithms.dpo import DPOLoss
from plait.cli import main
from plait.cli.help import USUAL, commands, options_of, usual

FROZEN = Path(__file__).parent / "keys.txt"


def test_usual_options_are_few() -> None:
    """Over all commands together, with what each of them, or `plait` itself, understands besides."""
    everywhere = ("--help", "--help-all", "--version")
    assert sum(map(len, USUAL.values())) + len(everywhere) <= 40


@pytest.mark.parametrize("command", [*commands()])
def test_usual_options_exist(command: str) -> None:
    names = [option.name for option in options_of(command)]
    assert len(set(names)) == len(names)
    assert set(USUAL.get(command, ())) <= set(names)
    assert usual(command), "the help would be empty"
    required = {option.name for option in options_of(command) if option.default == "required"}
    assert required <= {option.name for option in usual(command)}


def test_every_list_of_usual_options_is_a_command() -> None:
    assert USUAL.keys() <= set(commands())


def test_the_lists_are_frozen() -> None:
    """After a wanted change: `python -m tests.cli.test_help > tests/cli/keys.txt`, and say so in the commit."""
    assert FROZEN.read_text() == frozen_text()


@pytest.mark.parametrize("command", [*commands()])
def test_every_option_has_a_meaning(command: str) -> None:
    for option in options_of(command):
        assert option.meaning, f"`{option.name}` of `{command}` has no description"
        assert option.meaning == " ".join(option.meaning.split()), "lines of a docstring are one text in a table"


def test_an_option_says_what_it_means_to_each_algorithm() -> None:
    """To the default one where that has it, and to those where it takes other values; those that mean the same by it as
    one before them are left out."""
    meanings = {option.name: option.meaning for option in options_of("train")}
    of_policies, of_dpo, of_kto = meanings["--options.loss_type"].split("; ")
    assert of_policies.startswith("clip, cispo, sapo, gmpo or vespo: ")
    assert (of_dpo, of_kto) == (f"dpo (sigmoid): {', '.join(DPOLoss)}", "kto (kto): kto or apo_zero_unpaired")
    assert meanings["--options.beta"].startswith(
        "dpo: weight of the KL to the reference that is implied; for ipo its τ"
    )
    assert "; distill (1.0): divergence of the policy" in meanings["--options.beta"]
    assert (
        meanings["--options.clip_high"] == "upper clip of the probability ratio (DAPO: 0.28), in gmpo of its logarithm"
    )


@pytest.mark.parametrize("command", [*commands()])
def test_help_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help-all"]) == 0
    every = capsys.readouterr().out
    assert main([*command.split(), "--help"]) == 0
    few = capsys.readouterr().out
    assert all(len(line) <= 80 for line in (every + few).splitlines())
    first_words = {line.split()[0] for line in every.splitlines() if line and not line.startswith(" ")}
    assert {option.name for option in options_of(command)} <= first_words, "a name is cut or broken"
    first_words = {line.split()[0] for line in few.splitlines() if line and not line.startswith(" ")}
    assert {word for word in first_words if word.startswith("--")} == {
        option.name for option in usual(command) if not option.positional
    }


@pytest.mark.parametrize("group", [[], ["trace"]])
def test_of_several_commands_all_help_is_the_help(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*group, "--help"]) == 0
    listed = capsys.readouterr().out
    assert main([*group, "--help-all"]) == 0
    assert capsys.readouterr().out == listed


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from plait.cli import main\n"
        "from plait.cli.help import commands\n"
        "assert main(['--help']) == 0\n"
        "for command in commands():\n"
        "    assert main([*command.split(), '--help']) == main([*command.split(), '--help-all']) == 0\n"
        "heavy = {'torch', 'transformers', 'numba', 'reasoning_gym', 'ortools'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--optimizer.learning_rate" in done.stdout


def test_plait_help_reads_no_command() -> None:
    code = (
        "import sys\n"
        "from plait.cli import main\n"
        "assert main(['--help']) == 0\n"
        "read = {'pydantic', 'yaml', 'numpy', 'plait.runtime', 'plait.cli.train'} & sys.modules.keys()\n"
        "assert not read, read\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_plait_help_comes_in_a_blink() -> None:
    """CPU seconds of the best of a few tries: other work on the machine is not ours."""

    def spent_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "plait", "--help"]
        subprocess.run(command, env=os.environ | {"COLD": "1"}, stdout=subprocess.DEVNULL, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(spent_s() < 0.5 for _ in range(5))


def frozen_text() -> str:
    lines = []
    for command in commands():
        few = usual(command)
        for option in options_of(command):
            kind = "usual" if option in few else ""
            lines.append(f"{command:<14}{kind:<7}{option.name} = {option.default}".rstrip(" ="))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(frozen_text(), end="")
