"""What would help where a model does not fit in memory."""

from __future__ import annotations


def remedies(what: str, *, more: str = "more devices") -> str:
    """Keys that make it smaller: what takes most of a device's memory, in words of the forecast or of a mode.

    Args:
        more: of what there would be room, too.
    """
    if "decode" in what or "KV cache" in what:
        return f"lower `sampling.max_running` or `sampling.max_response_tokens`, or take {more}"
    if "state" in what or "masters" in what:
        return f"take {more}, a smaller model, `lora.rank` or `optimizer.shard_gradients`"
    if "train" in what:
        keys = "`lora.rank`, `optimizer.shard_gradients`, or lower `micro_batch_tokens`"
        return f"take {more}, a smaller model, {keys}"
    if "weights" in what:
        return f"take {more}, or a smaller model"
    return f"take {more}, a smaller model, or lower `micro_batch_tokens`"


def gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
