"""Scripts that shells complete by: written where a shell reads them, without torch, with all that a user may type."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli import main
from plait.cli.completion import completed_app
from plait.cli.help import commands, options_of

SHELLS = ("bash", "zsh", "fish")

INSTALL = """
import sys
from plait.cli import main
for _ in range(2):
    assert main(["--install-completion", "--shell", "bash"]) == 0
heavy = {"torch", "transformers", "numba", "ortools"} & sys.modules.keys()
assert not heavy, heavy
"""

TAB = """
. "$HOME/.bashrc"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_plait
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which a user of bash had it installed twice."""
    home = tmp_path_factory.mktemp("home")
    (home / ".bashrc").write_text("alias ll='ls -l'")
    for _ in range(2):
        command = [sys.executable, "-c", INSTALL]
        done = subprocess.run(
            command, env=os.environ | {"HOME": str(home)}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    return home


def completed(home: Path, *words: str) -> list[str]:
    """What bash offers where the tab key is pressed behind `words`."""
    done = subprocess.run(
        ["bash", "--norc", "-c", TAB, "bash", *words],
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_reads_it_and_is_told_once(home: Path) -> None:
    lines = (home / ".bashrc").read_text().splitlines()
    script = home / ".local/share/bash-completion/completions/plait"
    assert lines == ["alias ll='ls -l'", "# Load plait completion", f'[ -f "{script}" ] && . "{script}"']


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("tra",), ["trace", "train"]),
        (("trace", ""), ["chrome", "diff", "picture", "show"]),
        (("train", "my.yaml", "--optimizer.learning"), ["--optimizer.learning_rate"]),
        (("train", "my.yaml", "--dry"), ["--dry-run"]),
        (("train", "my.yaml", "--resume", "--partial_rollout", ""), ["keep", "off", "recompute"]),
        (("train", "my.yaml", "--overwrite", "="), ["false", "true"]),
        (("train", "my.yaml", "--options.clip_h"), ["--options.clip_high"]),
        (("eval", "my.yaml", "--js"), ["--json"]),
        (("simulate", "my.yaml", "--json", "--sampling.max_res"), ["--sampling.max_response_tokens"]),
        (("plan", "my.yaml", "--evaluation.sh"), ["--evaluation.show"]),
        (("plan", "my.yaml", "--evaluations"), ["--evaluations"]),
        (("generate", "--temp"), ["--temperature"]),
        (("train", "my.yaml", "--steps", ""), []),
        (("train", "my.yaml", "--node"), ["--node", "--nodes"]),
    ],
)
def test_bash_offers(home: Path, words: tuple[str, ...], offered: list[str]) -> None:
    assert sorted(completed(home, "plait", *words)) == offered


def test_files_are_left_to_bash(home: Path) -> None:
    """It goes on into folders, where `compgen -f` would end the word with a space."""
    ask = '. "$HOME/.bashrc"; complete -p plait'
    environment = os.environ | {"HOME": str(home)}
    done = subprocess.run(["bash", "--norc", "-c", ask], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "complete -o default -F _plait plait\n"
    assert "compgen -f" not in (home / ".local/share/bash-completion/completions/plait").read_text()
    for words in (("train", "re"), ("train", "my.yaml", "--model", "smol"), ("generate", "--prompts", "pro")):
        assert completed(home, "plait", *words) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_every_option(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZSH", raising=False)
    monkeypatch.delenv("ZSH_CUSTOM", raising=False)
    assert main(["--install-completion", "--shell", shell]) == 0
    said = capsys.readouterr().out
    path = Path(said.removeprefix("completion is written to ").split(",")[0].split(";")[0])
    assert path.is_relative_to(tmp_path)
    script = path.read_text()
    for command in commands():
        for option in options_of(command):
            if not option.positional:
                assert option.name.removeprefix("--") in script, f"{command} {option.name}"


def test_a_shell_that_is_none_of_these_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--install-completion", "--shell", "powershell"]) == 2
    assert "`--shell`: expected bash, zsh or fish, found `powershell`" in capsys.readouterr().err


def test_what_is_completed_are_the_commands() -> None:
    """With the recipe's keys as options of their own."""
    whole = completed_app()
    assert {name for name in whole if not name.startswith("-")} == {name.split()[0] for name in commands()}
    names = {argument.name for argument in whole["simulate"].assemble_argument_collection()}
    assert {"--plan", "--cluster", "--optimizer.learning_rate", "--steps"} <= names
    assert "--dry-run" not in names


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main(["--install-completion", "--shell", "bash"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: completion of bash: {tmp_path / 'home'}/")
    assert said.endswith("cannot be written: Not a directory\n")
