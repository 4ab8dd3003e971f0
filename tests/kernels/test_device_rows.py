"""Norms and gates by liger-kernel against torch: on a GPU where there is one, else by Triton's interpreter. Without
triton and liger-kernel these are skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.kernels import device_rows
from plait.models.compute import row_kernel_proof
from plait.models.compute.layer_forms import GEMMA, GPT_OSS, LLAMA, Gate, Norm, NormForm, activated, normalised
from plait.models.compute.row_kernel_proof import RowKernel, error_of, is_proven
from tests import warm

pytest.importorskip("triton", reason="triton is not installed: norms and gates of GPUs are not tested")
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: norms and gates of GPUs are not tested")

pytestmark = [pytest.mark.cuda] if warm.HAS_GPU else []
WHERE = "cuda" if warm.HAS_GPU else "cpu"
FORMS = [LLAMA, GEMMA, GPT_OSS, Gate.SILU, Gate.GELU_TANH]


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are of a GPU, where there is one. Without, kernels are interpreted, which takes what the interpreter lacks:
    functions of CUDA's library, numbers that a kernel may convert, and arithmetic of bfloat16."""
    if warm.HAS_GPU:
        return
    from liger_kernel.ops import geglu, rms_norm
    from triton import language as tl
    from triton.runtime import interpreter

    builder_of, converted = interpreter.InterpreterBuilder, interpreter._implicit_cvt
    computed, cast = builder_of.binary_op, builder_of.cast_impl

    def with_numbers(argument: Any) -> Any:
        if not isinstance(argument, float):
            return converted(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    def with_bfloat16(builder: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return computed(builder, left, right, operation)
        wide = [builder.cast_impl(one, tl.float32) for one in (left, right)]
        return builder.cast_impl(computed(builder, *wide, operation), tl.bfloat16)

    def rounded(builder: Any, given: Any, dtype: Any) -> Any:
        """To the nearest, as a GPU does; the interpreter cuts off."""
        if (given.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, given, dtype)
        bits = torch.from_numpy(np.ascontiguousarray(given.data)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(bits.view(np.uint16).reshape(given.data.shape), tl.bfloat16)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_numbers)
    monkeypatch.setattr(builder_of, "binary_op", with_bfloat16)
    monkeypatch.setattr(builder_of, "cast_impl", rounded)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))  # which is another while a kernel runs
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(WHERE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [40, 128])
@pytest.mark.parametrize("form", FORMS)
def test_they_say_what_torch_says(
    form: NormForm | Gate, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if not warm.HAS_GPU:
        monkeypatch.setattr(row_kernel_proof, "PROOF_ROWS", 7)
    kind = RowKernel(torch.device(WHERE), dtype, size, form)
    assert is_proven.__wrapped__(kind), capsys.readouterr().err
    assert error_of(kind) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("form", [LLAMA, GEMMA, GPT_OSS])
def test_a_norm_rounds_where_its_family_rounds(form: NormForm) -> None:
    """In bfloat16 next to no number differs, of small and large rows."""
    x = drawn(50, 64, dtype=torch.bfloat16) * torch.logspace(-3, 3, 50, device=WHERE)[:, None]
    x, weight = x.bfloat16(), drawn(64, dtype=torch.bfloat16, seed=1)
    found = device_rows.normalised(x, weight, 1e-5, *form)[0]
    differ = found != normalised(x, weight, Norm(form, 1e-5))
    assert differ.float().mean() < 2e-3


@pytest.mark.parametrize("gate", list(Gate))
def test_a_gate_rounds_where_its_family_rounds(gate: Gate) -> None:
    x, up = drawn(50, 64, dtype=torch.bfloat16), drawn(50, 64, dtype=torch.bfloat16, seed=1)
    computes = device_rows.gated_silu if gate is Gate.SILU else device_rows.gated_gelu
    differ = computes(x, up) != activated(gate, x) * up
    assert differ.float().mean() < 1e-2


def test_a_token_has_the_same_bits_in_any_company() -> None:
    rows = 40_000 if warm.HAS_GPU else 30
    x, weight = drawn(rows, 128, dtype=torch.bfloat16), drawn(128, dtype=torch.bfloat16, seed=1)
    whole = device_rows.normalised(x, weight, 1e-5, *LLAMA)[0]
    assert whole[5:12].equal(device_rows.normalised(x[5:12].contiguous(), weight, 1e-5, *LLAMA)[0])
