"""Layers that keep a state and are not one function are refused, however small the error is in a model's logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba.modeling_bamba import BambaMixer

from plait.errors import ModelError
from plait.models import admission
from plait.models.compute import recurrent
from plait.models.language_loading import from_module
from plait.models.mixer_proof import LONG, SHORT, largest_error
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
