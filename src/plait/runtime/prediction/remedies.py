"""What would help where a model does not fit in memory."""

from __future__ import annotations


def remedies(what: str, devices: int, *, more: str | None = None, adapted: bool = False) -> str:
    """Keys that make it smaller: what takes most of a device's memory, in words of the forecast or of a mode.

    Args:
        devices: of the plan.
        more: of what there would be room, too; None: devices.
        adapted: whether adapters are trained already.
    """
    more = more or "more devices"
    trained = [more, "a smaller model", *(() if adapted else ("`lora.rank`",))]
    if devices > 1:
        trained += (
            ["`optimizer.shard_weights`"] if adapted else ["`optimizer.shard_gradients`", "`optimizer.shard_weights`"]
        )
    if what.startswith("engine"):
        lower = "`sampling.max_running` or `sampling.max_response_tokens`, with drafts `sampling.draft_pool_bytes`"
        return f"lower {lower}, or take {more}"
    if "brought back" in what and "train" not in what:
        return f"take {more}, or a smaller model"
    if "drawn from" in what:
        return f"lower `sampling.top_k` or `sampling.top_p`, or take {more}"
    if "texts that drafts" in what:
        return f"lower `sampling.draft_pool_bytes`, or take {more}"
    if "draft model: weights" in what:
        return f"take {more}, or a smaller `sampling.draft_model`"
    if "packed" in what:
        return f"take {more}, a smaller model, or `sampling.exact`, which needs no such copy and is many times slower"
    if "on their way" in what:
        return f"lower `sampling.max_prefill_tokens`, or take {more}"
    if "decode" in what or "KV cache" in what:
        lower = "`sampling.max_running`, `sampling.max_response_tokens` or a stated `sampling.kv_tokens`"
        return f"lower {lower}, or take {more}"
    if "graphs" in what:
        return f"lower `sampling.max_running`, set `sampling.speculation` to off, or take {more}"
    if "head" in what and not adapted:
        return f"take {more}, a smaller model or {trained[2]}"
    if "state" in what or "masters" in what:
        return f"take {', '.join(trained[:-1])} or {trained[-1]}"
    if "train" in what:
        return f"take {', '.join(trained)}, or lower `micro_batch_tokens`"
    if "weights" in what and devices > 1:
        return f"take {more}, a smaller model or, if it is trained there, `optimizer.shard_weights`"
    if "weights" in what or "logits" in what:
        return f"take {more}, or a smaller model"
    return f"take {more}, a smaller model, or lower `micro_batch_tokens`"


def gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
