"""Which devices compute, what of plait they do not serve, and how the process of a rank takes one."""

from __future__ import annotations

import importlib.util
import os

from plait.errors import ConfigError
from plait.layout.groups import NCCL_PEER_CHANNELS

NCCL_VARIABLES = {
    "NCCL_MAX_P2P_NCHANNELS": str(NCCL_PEER_CHANNELS),
    "NCCL_GRAPH_REGISTER": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What NCCL and torch read of the environment, where the user has not set it. Channels between two ranks: each takes
memory, and a multiprocessor while it waits. Memory of sums that are captured, which ranks would tell each other of in
the midst of a capture, without a deadline: one that cannot go on would leave the others there. A thread of torch that
ends a process in which a call of CUDA has taken 8 minutes, which may wait for a rank that has more to do: who hangs is
found by the launcher."""


def check_cuda_dtype(dtype: str, key: str) -> None:
    """Whether GPUs compute in this dtype, on whatever machine.

    Args:
        key: of the device, as the user gave it; in messages.

    Raises:
        ConfigError: they do not.
    """
    if dtype == "float64":
        raise ConfigError(
            f"{key} is cuda, where attention is computed in bfloat16 or float32, but the dtype is float64; set the "
            "one to bfloat16, or the other to cpu"
        )


def check_cuda(dtype: str, key: str) -> None:
    """Whether this machine has a GPU that computes in this dtype. Arguments are those of `check_cuda_dtype`.

    Raises:
        ConfigError: it has none, or something that GPUs need is not there; says what, and what to do.
    """
    import torch

    check_cuda_dtype(dtype, key)
    if not torch.cuda.is_available():
        raise ConfigError(f"{key} is cuda, but torch finds no CUDA device; set it to cpu")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"{key} is cuda, where attention is computed by triton, which is not installed; `pip install triton` (it "
            "comes with torch for CUDA on Linux), or set the device to cpu"
        )


def backend(device: str, number: int) -> str:
    """That of the process group. A GPU, by its number on the machine, is the one of this process from now on."""
    if device != "cuda":
        return "gloo"
    import torch

    for name, value in NCCL_VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(number)
    return "cpu:gloo,cuda:nccl"
