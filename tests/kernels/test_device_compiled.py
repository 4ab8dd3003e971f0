"""What computes on GPUs is compiled by Triton for GPUs that are not here, as it would be launched, and fits them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.kernels import device_rows
from tests.cases import slow_but
from tests.kernels.test_device_sizes import A100, H100, RTX_4090

pytest.importorskip("triton", reason="triton is not installed: kernels of GPUs are not compiled")

ROWS = {
    *("_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
    *("_swiglu_forward_kernel", "_swiglu_backward_kernel", "_geglu_tanh_forward_kernel", "_geglu_tanh_backward_kernel"),
}
"""liger-kernel's, where it is installed."""


KINDS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from plait.kernels import device_attention, device_kernels
from plait.kernels.paged_call import PagedCall
from tests.kernels.test_paged_attention import work

kernel, kinds = device_kernels.attend, set()
bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

class Launched:
    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **constants):
        kinds.add(tuple(map(tuple, bind(*arguments, debug=False, **constants)[1])))

device_kernels.attend = Launched()
query, key_pool, value_pool, tables, starts, held = work(torch.bfloat16, (12, 2, 128, 128), [90] * 9, [20] * 9, seed=0)
for first in range(8):
    said = tables[first:], starts[first:] - starts[first], held[first:]
    call = PagedCall(query[starts[first] :], key_pool, value_pool, *said, scale=0.1, lengths=(20, 110))
    device_attention.paged_attention(call)
print(len(kinds))
"""


OTHERS = [(80, A100), (89, RTX_4090), (100, H100), (120, RTX_4090)]
"""The last two are B200 and RTX 5090, which have as much memory."""


@pytest.mark.process
@pytest.mark.parametrize(("capability", "shared_bytes"), slow_but([(90, H100)], [(90, H100), *OTHERS]))
def test_each_kernel_is_compiled_and_fits_a_multiprocessor(capability: int, shared_bytes: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.compiled_for_gpus", str(capability), str(shared_bytes)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = [line.split() for line in done.stdout.splitlines()]
    of_draw = {"tops", "choose", "weigh", "decide"}
    rows = [name for name, _ in taken if name.startswith("_")]
    own = of_draw | {"attend", "merge", "store", "logprobs", "logprobs_backward", "rotate", "gather", "fold"}
    assert {name for name, _ in taken} - set(rows) == own
    assert set(rows) == (ROWS if device_rows.AVAILABLE else set())
    assert sum(name == "attend" for name, _ in taken) == 30
    assert sum(name in ("gather", "fold") for name, _ in taken) == 8, "both dtypes, two numbers of heads"
    assert sum(name.startswith("logprobs") for name, _ in taken) == 8, "both dtypes, and each gradient there may be"
    assert sum(name in of_draw for name, _ in taken) == 24, "both dtypes, three kinds of batches"
    assert sum(name == "rotate" for name, _ in taken) == 12, "both dtypes, both ways, three sizes"
    assert max(int(num_bytes) for _, num_bytes in taken) <= shared_bytes


@pytest.mark.process
def test_chunks_of_prompts_are_one_program_wherever_they_begin() -> None:
    """Behind rows their tables and contexts begin anywhere: a program for each place modulo 16 bytes would be compiled
    while samples wait."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KINDS],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1"]
