"""The benchmarks, run as their users run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MOST_S = 900


def ended(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A benchmark that has run; variables stand beside those of this process."""
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
        env=os.environ | environment,
    )


def output_of(script: str, *arguments: str) -> str:
    """What a benchmark that ends well has printed."""
    done = ended(script, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
