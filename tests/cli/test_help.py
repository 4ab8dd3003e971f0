"""The lists of keys are frozen: a change to them is a change to what users type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from plait.cli.train import BASIC_KEYS, FLAGS, listed_keys

FROZEN = Path(__file__).parent / "keys.txt"


def test_basic_keys_are_few() -> None:
    assert len(BASIC_KEYS) + len(FLAGS) <= 40
    assert len(set(BASIC_KEYS)) == len(BASIC_KEYS)


def test_the_lists_are_frozen() -> None:
    """After a wanted change: `python -m tests.cli.test_help > tests/cli/keys.txt`, and say so in the commit."""
    assert FROZEN.read_text() == frozen_text()


def test_every_key_has_a_meaning() -> None:
    for key, _, text in listed_keys(everything=True):
        assert text, f"`{key}` has no description"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from plait.cli import main\n"
        "for argv in ('--help', 'train --help', 'train --help-all', 'generate --help', 'eval --help'):\n"
        "    main(argv.split())\n"
        "heavy = {'torch', 'transformers', 'numba', 'reasoning_gym', 'ortools'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--optimizer.learning_rate" in done.stdout


def frozen_text() -> str:
    lines = []
    for key, default, _ in listed_keys(everything=True):
        lines.append(f"{'basic   ' if key in BASIC_KEYS else 'advanced'} {key} = {default}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(frozen_text(), end="")
