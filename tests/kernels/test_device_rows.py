"""Norms and gates by liger-kernel against torch: on a GPU where there is one, else by Triton's interpreter. Without
triton and liger-kernel these are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.kernels import device_rows
from plait.models.compute import row_kernel_proof
from plait.models.compute.layer_forms import GEMMA, GPT_OSS, LLAMA, Gate, Norm, NormForm, activated, normalised
from plait.models.compute.row_kernel_proof import RowKernel, error_of, is_proven
from tests import warm
from tests.kernels.interpreted_liger import interpret_liger

pytest.importorskip("triton", reason="triton is not installed: norms and gates of GPUs are not tested")
pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: norms and gates of GPUs are not tested")

pytestmark = [pytest.mark.cuda] if warm.HAS_GPU else []
WHERE = "cuda" if warm.HAS_GPU else "cpu"
FORMS = [LLAMA, GEMMA, GPT_OSS, Gate.SILU, Gate.GELU_TANH]


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are of a GPU, where there is one. Without, kernels are interpreted."""
    if not warm.HAS_GPU:
        interpret_liger(monkeypatch)


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
