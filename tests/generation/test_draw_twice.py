"""A process that compiles the kernel of the draw and one that finds it compiled give the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, torch
from plait.generation.draw_kernel import draw

logits = torch.randn(200, 320, generator=torch.Generator().manual_seed(0)) * 3
tokens, logprobs = draw(logits, torch.arange(200), None, None, 16)
print(hashlib.sha256(tokens.numpy().tobytes() + logprobs.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_compiled_or_found(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert "compiling" in runs[0].stderr
    assert "compiling" not in runs[1].stderr
    assert runs[0].stdout == runs[1].stdout != ""
