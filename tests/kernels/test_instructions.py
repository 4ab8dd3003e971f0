"""Which instructions kernels are made of, and that those of lesser CPUs compute the same; a slow test for each kind of
CPU that this one could be.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from plait.compiled import AVAILABLE, njit
from plait.generation.panels import lay_out, panels_of
from plait.kernels import paged_attention, products
from plait.kernels.paged_attention import array_of

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is not installed")

if AVAILABLE:
    from numba.core.codegen import get_host_cpu_features

    from plait.kernels import scalar_intrinsics
    from plait.kernels.scalar_intrinsics import narrow

AVX2, AVX512 = {"avx", "avx2", "fma"}, {"avx512f", "avx512vl", "avx512bw"}
AMX = {"amx-tile", "amx-bf16"}

LESSER = {
    "AVX2": ("haswell", ("avx512", "avx10", "amx")),
    "AVX-512 without bfloat16": ("skylake-avx512", ("avx512bf16", "avx512fp16", "avx10", "amx")),
}
"""Kinds of CPU: LLVM's name for one, and how names of instructions begin that it lacks."""


@pytest.mark.parametrize(
    ("features", "supported", "wide", "bfloat16", "matrix"),
    [
        ({"avx", "avx2"}, False, False, False, False),
        (AVX2, True, False, False, False),
        (AVX2 | {"avx512f"}, True, False, False, False),
        (AVX2 | AVX512, True, True, False, False),
        (AVX2 | AVX512 | {"avx512bf16"}, True, True, True, False),
        (AVX2 | AVX512 | {"avx512bf16"} | AMX, True, True, True, True),
    ],
)
def test_what_a_cpu_has(
    monkeypatch: pytest.MonkeyPatch, features: set[str], supported: bool, wide: bool, bfloat16: bool, matrix: bool
) -> None:
    monkeypatch.setattr(scalar_intrinsics, "features", lambda: frozenset(features))
    assert scalar_intrinsics.supported() == supported
    assert scalar_intrinsics.has_wide_registers() == wide
    assert scalar_intrinsics.has_bfloat16() == bfloat16
    assert scalar_intrinsics.has_matrix_units() == matrix


@njit()
def narrowed(numbers_N, out_N):
    for n in range(len(numbers_N)):
        out_N[n] = narrow(out_N, numbers_N[n])


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds() -> None:
    """By vectors (biases of a product of zeros) and one by one; denormal numbers apart, which instructions may drop."""
    bits = torch.randint(-(2**31), 2**31, (1024,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7F800001])
    numbers = torch.cat([bits, ties, ties + 2**31]).to(torch.int32).view(torch.float32)
    numbers = numbers[~(numbers.abs() < 2.0**-125)]
    expected = numbers.bfloat16()
    one_by_one = torch.empty_like(expected)
    narrowed(numbers.numpy(), array_of(one_by_one))
    torch.testing.assert_close(one_by_one, expected, rtol=0, atol=0, equal_nan=True)
    if not paged_attention.fast(torch.bfloat16):
        return
    parts = [(torch.zeros(len(numbers), 2).bfloat16(), numbers)]
    laid_out = torch.zeros(panels_of(parts), dtype=torch.uint32)
    lay_out(parts, laid_out)
    x, out = torch.zeros(1, 2).bfloat16(), torch.empty(1, laid_out.shape[0] * products.TILE_COLUMNS).bfloat16()
    products.product(array_of(x), array_of(x), laid_out.data_ptr(), (2, len(numbers)), array_of(out), 1, 0, 1, False)
    torch.testing.assert_close(out[0, : len(numbers)], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LESSER)
def test_kernels_as_lesser_cpus_have_them(kind: str) -> None:
    """numba compiles for the CPU that is named, and keeps its code apart from this one's."""
    name, lacking = LESSER[kind]
    names = get_host_cpu_features().split(",")
    wanted = [f"-{feature[1:]}" if feature[1:].startswith(lacking) else feature for feature in names]
    needed = AVX2 | AVX512 if "avx512" not in lacking else AVX2
    if wanted == names or not {f"+{feature}" for feature in needed} <= set(wanted):
        pytest.skip("this CPU has no more, or less")
    files = ["kernels/test_instructions.py", "kernels/test_paged_attention.py", "generation/test_compiled_forward.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", *(f"tests/{file}" for file in files)],
        env={**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ",".join(wanted)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
