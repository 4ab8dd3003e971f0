"""What the command line says of code of the user's that fails: the error, the user's own lines, and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

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
            "samples have no column `no_such_column`",
            ["in flow", "    helper(samples)", "in helper", "samples.no_such_column"],
        ),
        (
            FLOW.replace("samples.no_such_column", "samples + 1"),
            "flow.py:7: TypeError: ",
            ["in flow", "    helper(samples)", "in helper", "samples + 1"],
        ),
        ("def flow(:\n", "flow.py:1: SyntaxError: invalid syntax", ["    def flow(:"]),
        ("raise SystemExit(0)\n" + FLOW, "flow.py:1: SystemExit: 0", ["    raise SystemExit(0)"]),
    ],
)
def test_the_users_own_lines_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, said: str, lines: list[str]
) -> None:
    (tmp_path / "flow.py").write_text(source)
    algorithm, data = f"{tmp_path}/flow.py:flow", tmp_path / "data.jsonl"
    data.touch()
    (tmp_path / "config.json").write_text("{}")  # looked for before the flow is read, as are weights
    save_file({}, tmp_path / "model.safetensors")
    keys = [
        "--model",
        str(tmp_path),
        "--data.source",
        str(data),
        "--run_dir",
        f"{tmp_path}/run",
        "--algorithm",
        algorithm,
    ]
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
