"""A GPU that cannot serve is refused before anything is loaded, with the key to change. What a rank asks of NCCL before
the first group is made."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from plait.errors import ConfigError
from plait.models.devices import backend, check_cuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that has one, and triton."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return monkeypatch


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_that_its_attention_computes_in_are_taken(gpu: pytest.MonkeyPatch, dtype: str) -> None:
    check_cuda(dtype, "`device`")


def test_float64_is_for_a_cpu(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^`device` is cuda, .* but the dtype is float64; set the one to bfloat16"):
        check_cuda("float64", "`device`")


def test_triton_is_needed(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else object())
    with pytest.raises(
        ConfigError, match=r"^--device is cuda, .* triton, which is not installed; `pip install triton`"
    ):
        check_cuda("bfloat16", "--device")


def test_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="`device` is cuda, but torch finds no CUDA device; set it to cpu"):
        check_cuda("bfloat16", "`device`")


def test_a_rank_of_gpus_asks_nccl_for_what_forecasts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(os, "environ", {})
    assert backend("cpu", 3) == "gloo"
    assert not chosen
    assert not os.environ
    os.environ["NCCL_MAX_P2P_NCHANNELS"] = "16"
    assert backend("cuda", 3) == "cpu:gloo,cuda:nccl"
    assert chosen == [3]
    others = {"NCCL_GRAPH_REGISTER": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    assert os.environ == {"NCCL_MAX_P2P_NCHANNELS": "16"} | others, "the user's stays"
