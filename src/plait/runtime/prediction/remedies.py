"""What would help where a model does not fit in memory."""

from __future__ import annotations


def remedies(what: str) -> str:
    """Keys that make it smaller: what takes most of a device's memory, in words of the forecast or of a mode."""
    if "decode" in what:
        return "lower `sampling.max_running` or `sampling.max_response_tokens`, or take more devices"
    if "state" in what:
        return "take more devices, a smaller model, `lora.rank` or `optimizer.shard_gradients`"
    if "train" in what:
        keys = "`lora.rank`, `optimizer.shard_gradients`, or lower `micro_batch_tokens`"
        return f"take more devices, a smaller model, {keys}"
    if "weights" in what:
        return "take more devices, or a smaller model"
    return "take more devices, a smaller model, or lower `micro_batch_tokens`"


def gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
