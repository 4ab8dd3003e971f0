"""What a wrong command line is answered with: one line that names the argument and the remedy, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli import main
from plait.errors import ConfigError
from plait.runtime.folder.history import Origin

GENERATE = ["generate", "--model", "m", "--prompts", "p", "--out", "o"]

SPOILT = """
import sys
from plait.cli import main
from plait.errors import ConfigError
from plait.runtime.folder.history import Origin
from plait.cli.app import app

@app.command
def spoil(how: str):
    if how == "disk":
        raise OSError(28, "No space left on device", "out.jsonl")
    if how == "bug":
        raise ZeroDivisionError("ours")
    if how == "pipe":
        raise BrokenPipeError(32, "Broken pipe")
    print("ü" if how == "sign" else "x" * (1 << 20))

sys.exit(main())
"""


def plait(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "plait", *argv], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "error: unknown command `trian`; did you mean `train`?\n"),
        ([*GENERATE, "--temperature", "abc"], "error: `--temperature`: expected a number, found `abc`\n"),
        (
            ["export", "run", "--out", "o/${X}"],
            "error: `--out`: expected a path as it is, in which nothing but a `~` at its beginning is replaced, "
            "found `o/${X}`; write out what it stands for\n",
        ),
        pytest.param(
            ["export", "run", "--out", "o", "--dtype", "int8"],
            "error: `--dtype`: expected float32, bfloat16 or float64, found `int8`\n",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exit_code_2_and_one_line(argv: list[str], message: str) -> None:
    done = plait(*argv)
    assert (done.returncode, done.stderr, done.stdout) == (2, message, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["foo"], "unknown command `foo`; `plait --help` lists the commands"),
        (["--frobnicate"], "unknown command `--frobnicate`"),
        (["trace", "shw"], "unknown command `shw`; did you mean `show`?"),
        (["generate"], "`--model` is missing (smollm2"),
        (["generate"], "usage: `plait generate --model MODEL --prompts PROMPTS --out OUT [--option value …]`"),
        (["generate", "--modle", "m", "--prompts", "p"], "unknown option `--modle`; did you mean `--model`?"),
        (
            ["generate", "--modle", "m", "--promts=p", "--out", "o", "--seed", "-1"],
            "unknown option `--modle`; did you mean `--model`?; unknown option `--promts`; did you mean `--prompts`?\n",
        ),
        (["export"], "`RUN_DIR` is missing (Folder of the run); usage: `plait export RUN_DIR --out OUT"),
        (["export", "run"], "`--out` is missing"),
        (["export", "run", "more", "--out", "o"], "`more` is one argument too many; usage: `plait export RUN_DIR"),
        ([*GENERATE, "--n"], "`--n` needs a value"),
        ([*GENERATE, "--n", "--seed", "1"], "`--n` needs a value"),
        ([*GENERATE, "--stop"], "`--stop` needs a value"),
        ([*GENERATE, "--n", "1.5"], "`--n`: expected a whole number, found `1.5`"),
        ([*GENERATE, "--stop-token-ids", "1", "2.5"], "`--stop-token-ids`: expected a whole number, found `2.5`"),
        (["export", "run", "--out", "o", "--step", "last"], "`--step`: expected a whole number, found `last`"),
        ([*GENERATE, "--n", "1", "--n", "2"], "`--n` is given twice"),
        ([*GENERATE, "--max-token", "5"], "unknown option `--max-token`; did you mean `--max-tokens`?"),
        ([*GENERATE, "--frobnicate", "5"], "`plait generate --help-all` lists the options"),
        (
            [*GENERATE, "--max-token", "5", "--frobnicate"],
            "`--max-token`; did you mean `--max-tokens`?; unknown option `--frobnicate`; `plait generate --help-all`",
        ),
        (["train"], "give a recipe: `plait train RECIPE [--key value …]`"),
        (["eval"], "give a recipe: `plait eval RECIPE [--key value …]`"),
        (["train", "r.yaml", "--resum"], "unknown option `--resum`; did you mean `--resume`?"),
        (["train", "r.yaml", "--nodez", "2"], "unknown option `--nodez`; did you mean `--node`?\n"),
        (["eval", "r.yaml", "--jsn"], "unknown option `--jsn`; did you mean `--json`?"),
        (["export", "x" * 300, "--out", "o"], "its recipe.yaml cannot be read (File name too long)"),
        (["train", "nowhere.yaml"], "recipe `nowhere.yaml` does not exist"),
        (["train", "lr=1e-5.yaml"], "recipe `lr=1e-5.yaml` does not exist"),
        (["train", "runs/lr=1e-5/r"], "recipe `runs/lr=1e-5/r` does not exist"),
        (
            ["train", "algorithm.adv_estimator=grpo"],
            "expected `--key value`, found `algorithm.adv_estimator=grpo`: verl's is `algorithm` here",
        ),
        (
            ["plan", "algorithm.adv_estimator=grpo"],
            "expected `--key value`, found `algorithm.adv_estimator=grpo`: verl's",
        ),
        (["simulate", "steps=3", "--devices", "2"], "found `steps=3`; did you mean `--steps=3`?"),
        (["plan", "nowhere.yaml"], "recipe `nowhere.yaml` does not exist"),
        (["train", "steps=3"], "expected `--key value`, found `steps=3`; did you mean `--steps=3`?"),
        (["train", "/dev/null"], "recipe `/dev/null` is a device, not a file; give the path of a YAML file"),
        (["train", "r.yaml", "--overwrite", "--steps", "1"], "`--overwrite` needs a value (true or false)"),
    ],
)
def test_the_argument_and_the_remedy_are_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            ["plan", "r.yaml", "--clustr", "x", "--stepz", "1"],
            ["unknown option `--clustr`; did you mean `--cluster`?", "unknown key `stepz`; did you mean `steps`?"],
        ),
        (
            ["train", "data.max_response_length=8", "+data.train_batch_size=8"],
            [
                "expected `--key value`, found `data.max_response_length=8`: verl's is `sampling.max_response_tokens` "
                "here (docs/coming-from-verl.md)",
                "expected `--key value`, found `+data.train_batch_size=8`: verl's is `prompts_per_step` here "
                "(docs/coming-from-verl.md)",
            ],
        ),
    ],
    ids=["misspelt", "of verl"],
)
def test_each_wrong_key_has_a_line(argv: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in lines]


def spoil(how: str, **options: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", SPOILT, "spoil", how]
    return subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=60, **options)  # type: ignore[call-overload]


def test_the_system_refuses() -> None:
    done = spoil("disk")
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device: 'out.jsonl'\n")


def test_our_faults_keep_their_traceback() -> None:
    done = spoil("bug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: ours" in done.stderr


def test_nobody_reads_the_output() -> None:
    """As in `plait … | head`. Another pipe that breaks is told."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        silent = spoil("print", stdout=write_end)
    finally:
        os.close(write_end)
    assert (silent.returncode, silent.stderr) == (1, "")
    assert spoil("pipe", stdout=subprocess.PIPE).stderr == "error: [Errno 32] Broken pipe\n"


def test_streams_that_are_closed_or_know_few_signs_end_no_command() -> None:
    known = spoil("sign", stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (known.returncode, known.stdout, known.stderr) == (0, "\\xfc\n", "")
    argv = ["sh", "-c", 'exec "$0" -c "$1" spoil sign <&- >&- 2>&-', sys.executable, SPOILT]
    assert subprocess.run(argv, timeout=60, check=False).returncode == 0


def test_a_working_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MKL would end the process with `Cannot load libtorch_cpu.so`."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["train", str(tmp_path / "r.yaml")]) == 2
    said = "error: the folder in which this command was begun cannot be found any more (No such file or directory); "
    assert capsys.readouterr().err.startswith(said)
    assert main(["train", "--help"]) == 0
    with pytest.raises(ConfigError, match="cannot be found any more"):
        Origin.here()


def test_a_folder_in_place_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path)]) == 2
    assert "give the path of a YAML file" in capsys.readouterr().err
