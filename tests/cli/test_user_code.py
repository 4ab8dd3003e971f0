"""What the command line says of code of the user's that fails: the error, the user's own lines, and an exit code."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.cli import main

FLOW = """
def flow(prompts, actor, reward):
    samples = actor.generate(prompts)
    helper(samples)

def helper(samples):
    samples.no_such_column
"""


@pytest.mark.parametrize(
    ("source", "said", "lines"),
    [
        (
            FLOW,
            "flow.py:7: AttributeError: ",
            ["in flow", "    helper(samples)", "in helper", "samples.no_such_column"],
        ),
        ("def flow(:\n", "flow.py:1: SyntaxError: invalid syntax", ["    def flow(:"]),
        ("raise SystemExit(0)\n", "flow.py:1: SystemExit: 0", ["    raise SystemExit(0)"]),
    ],
)
def test_the_users_own_lines_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, said: str, lines: list[str]
) -> None:
    (tmp_path / "flow.py").write_text(source)
    algorithm = f"{tmp_path}/flow.py:flow"
    keys = ["--model", "m", "--data.source", "d", "--run_dir", f"{tmp_path}/run", "--algorithm", algorithm]
    try:
        assert main(["train", *keys, "--dry-run"]) == 2
    finally:
        sys.modules.pop("plait_user_flow", None)
    text = capsys.readouterr().err
    error = text[text.index("error: ") :]
    assert said in error.splitlines()[0]
    for line in lines:
        assert line in error
    assert "Traceback" not in error
    assert "src/plait" not in error


LEAVES = """
import sys, threading, time
from plait.cli import leaving, main
leaving.GRACE_S = 0.2
threading.Thread(target=time.sleep, args=(1000,), name="mine").start()
sys.argv = ["plait", "--version"]
sys.exit(main())
"""


def test_a_thread_that_is_left_behind_does_not_keep_the_command() -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begun < 60
    assert (done.returncode, done.stderr) == (0, "left behind threads that do not end: mine\n")
