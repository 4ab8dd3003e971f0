"""Recurrent layers that are not one function are refused, however small the error is in a model's logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from plait.errors import ModelError
from plait.models import admission, mixer_proof
from plait.models.compute import recurrent
from plait.models.compute.recurrent import mixers_of
from plait.models.language_loading import from_module
from plait.models.mixer_proof import ALLOWED, LONG, SHORT, dtype_of_proof, largest_error, mixer_fault
from tests.models.tiny import tiny


def without_mask(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of zeros in front of a sequence the bias of the convolution makes something, which the state takes in."""

    def wrong(self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None) -> Tensor:
        return forward(self, hidden_states, cache, None)

    return wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_that_padding_changes_is_refused(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BambaMixer, "forward", without_mask(BambaMixer.forward))
    module = tiny("bamba", dtype=getattr(torch, dtype), weight_scale=0.05)
    with pytest.raises(ModelError, match=r"`model\.layers\.0\.mamba` computes otherwise beside a longer sequence than"):
        from_module(module, None, dtype)
    monkeypatch.setattr(admission, "mixer_fault", lambda module: None)
    from_module(module, None, dtype)  # the logits do not tell


class Narrow(TorchDispatchMode):
    """Products of float32 whose factors are rounded before, as tensor cores of a GPU do."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._bits = bits
        """Of a factor's significand that are left out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.convolution.default"):
            args = [self._rounded(arg) if isinstance(arg, Tensor) else arg for arg in args]
        return func(*args, **(kwargs or {}))

    def _rounded(self, factor: Tensor) -> Tensor:
        if factor.dtype != torch.float32:
            return factor
        half, kept = 1 << (self._bits - 1), -1 << self._bits
        return ((factor.contiguous().view(torch.int32) + half) & kept).view(torch.float32)


TF32, BFLOAT16 = 13, 16
AS_ON_A_GPU = [(torch.float32, TF32), (torch.bfloat16, BFLOAT16)]


@pytest.mark.parametrize(("dtype", "bits"), AS_ON_A_GPU, ids=["float32", "bfloat16"])
def test_roundings_of_a_gpu_are_far_below_what_is_refused(
    dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a library's products. Of faults some are far above."""
    monkeypatch.setattr(mixer_proof, "dtype_of_proof", lambda mixer, device: dtype)
    monkeypatch.setitem(mixer_proof.ALLOWED, dtype, ALLOWED[dtype] / 4)
    with Narrow(bits):
        for family in ("qwen3_5_text", "olmo_hybrid", "bamba", "nemotron_h"):
            assert mixer_fault(tiny(family, dtype=dtype, weight_scale=0.05)) is None
        monkeypatch.setitem(mixer_proof.ALLOWED, dtype, ALLOWED[dtype])
        monkeypatch.setattr(NemotronHMamba2Mixer, "forward", without_mask(NemotronHMamba2Mixer.forward))
        assert "beside a longer sequence" in (mixer_fault(tiny("nemotron_h", dtype=dtype, weight_scale=0.05)) or "")


PROVEN_IN = {
    (): (torch.float64, torch.float64),
    ("mamba_ssm",): (torch.float32, torch.float32),
    ("fla", "causal_conv1d"): (torch.bfloat16, torch.float32),
}
"""Libraries that are installed → the dtypes of linear attention and of Mamba-2, of models in bfloat16."""


@pytest.mark.parametrize("installed", PROVEN_IN, ids=str)
def test_what_a_gpu_proves_in(installed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operators take float64 there, too; libraries do not, and one of them not even float32."""
    monkeypatch.setattr(mixer_proof, "find_spec", lambda name: name if name in installed else None)
    found = []
    for family in ("qwen3_5_text", "bamba"):
        _, mixer = next(mixers_of(tiny(family, dtype=torch.bfloat16)))
        found.append(dtype_of_proof(mixer, torch.device("cuda")))
        assert dtype_of_proof(mixer, torch.device("cpu")) == torch.float64
    assert tuple(found) == PROVEN_IN[installed]


LIMITED = {"time_step_limit": (0.4, 0.6)}
"""Of Mamba-2; most steps of tiny models are outside."""


def test_limits_of_time_steps_hold_for_one_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from_module(tiny("bamba", **LIMITED), None, "float64")
    monkeypatch.setattr(recurrent, "limited", lambda mixer, one: contextlib.nullcontext())
    with pytest.raises(ModelError, match="computes otherwise in parts than all at once"):
        from_module(tiny("bamba", **LIMITED), None, "float64")


def test_errors_by_hand() -> None:
    """A mixer that sums what it has seen: right; the same that starts anew with each part: the second half is wrong."""

    def summing(
        inputs_BLH: Tensor, before: recurrent.States, real_BL: Tensor | None
    ) -> tuple[Tensor, recurrent.States]:
        out_BLH = inputs_BLH.cumsum(1) + before.get(("recurrent", 0), 0)
        return out_BLH, {("recurrent", 0): out_BLH[:, -1:]}

    inputs_TH = torch.ones(LONG + SHORT, 1, dtype=torch.float64)
    assert largest_error(summing, inputs_TH)[0] == 0
    error, case = largest_error(lambda inputs, before, real: summing(inputs, {}, real), inputs_TH)
    assert (error, case) == ((LONG - 1) / LONG, "in parts"), "of the state of the longer one: 1 in place of 9"


@pytest.mark.parametrize(("lost", "case"), [("together", "beside a longer sequence"), ("parts", "in parts")])
def test_what_is_no_number_is_as_wrong_as_can_be(lost: str, case: str) -> None:
    """Of a mixer that sums, the state behind padded sequences, or behind parts of one token, is no number."""

    def summing(
        inputs_BLH: Tensor, before: recurrent.States, real_BL: Tensor | None
    ) -> tuple[Tensor, recurrent.States]:
        out_BLH = inputs_BLH.cumsum(1) + before.get(("recurrent", 0), 0)
        is_lost = real_BL is not None if lost == "together" else bool(before)
        return out_BLH, {("recurrent", 0): out_BLH[:, -1:] * (float("nan") if is_lost else 1)}

    assert largest_error(summing, torch.ones(LONG + SHORT, 1, dtype=torch.float64)) == (float("inf"), case)
