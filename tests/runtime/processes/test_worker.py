"""What a rank asks of NCCL before the first group is made."""

from __future__ import annotations

import os

import pytest
import torch

from plait.runtime.processes.worker import backend


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
