"""A process that compiles a kernel and one that finds it compiled give the same bits.

A function that may reorder sums has to be forced into its caller: as a function of its own it is compiled apart, and
differently, in a process where its caller is not found compiled.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import plait

SCRIPT = """
import hashlib, torch
from plait.kernels.draw import draw
from plait.generation.compiled_forward import CompiledForward
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens, ragged
from tests.models.tiny import tiny_model

said = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    model = tiny_model("llama", dtype=dtype, hidden_size=192, num_attention_heads=3, num_key_value_heads=1)
    compiled = CompiledForward.of(model)
    pool = KVPool(16)
    pool.reserve(8, 8)
    ids = list(range(3, 103))
    for start, stop in ((0, 60), (60, 99), (99, 100)):
        logits = compiled.logits(compiled.hidden(ragged([NewTokens(ids[start:stop], start, range(7))], 16), pool))
        said.update(logits.contiguous().view(torch.uint8).numpy().tobytes())
logits = torch.randn(200, 320, generator=torch.Generator().manual_seed(0)) * 3
columns = dict(
    temperature_B=torch.tensor([1.0, 0.7] * 100),
    greedy_B=torch.arange(200) % 5 == 0,
    top_k_B=torch.tensor([320, 9, 30, 320] * 50),
    top_p_B=torch.tensor([1.0, 1.0, 0.9, 0.99] * 50).double(),
)
tokens, logprobs = draw(logits, torch.arange(200), 16, **columns)
said.update(tokens.numpy().tobytes() + logprobs.numpy().tobytes())
print(said.hexdigest())
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


def test_functions_that_reorder_sums_are_forced_into_their_callers() -> None:
    """`njit` functions with `fastmath` that another `njit` function of their file calls."""
    checked = 0
    for path in sorted(Path(plait.__file__).parent.rglob("*.py")):
        compiled = {
            node.name: (node, options)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and (options := _options(node)) is not None
        }
        for caller, _ in compiled.values():
            for call in ast.walk(caller):
                if isinstance(call, ast.Name) and call.id in compiled and call.id != caller.name:
                    options = compiled[call.id][1]
                    assert "fastmath" not in options or "forceinline" in options, f"{path.name}: {call.id}"
                    checked += "fastmath" in options
    assert checked >= 8


def _options(function: ast.FunctionDef) -> set[str | None] | None:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "njit":
            return {keyword.arg for keyword in decorator.keywords}
    return None
