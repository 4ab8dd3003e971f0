"""Which devices compute, and what of plait they do not serve."""

from __future__ import annotations

import importlib.util

from plait.errors import ConfigError


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
