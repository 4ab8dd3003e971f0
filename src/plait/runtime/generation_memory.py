"""Bytes that generation takes, before anything is loaded. Imports no torch."""

from __future__ import annotations

from plait.models.shape import ModelShape
from plait.training.memory import BYTES

FIXED_BYTES = 140 << 20
"""Measured with SmolLM2-135M: 133 to 150 MiB."""


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]


def generation_rows(
    shape: ModelShape, dtype: str, *, kv_tokens: int, prefill_tokens: int, running: int, packed: bool
) -> list[tuple[str, int]]:
    """(what, bytes) of a process that generates, beside its imports and the model's weights: an estimate of the peak.

    Args:
        kv_tokens: that are held at most at a time.
        prefill_tokens: computed at a time at most.
        running: samples that draw in one step.
        packed: whether the weights are held once more, in the order in which the products read them.
    """
    width = BYTES[dtype]
    kv_bytes = kv_tokens * kv_bytes_per_token(shape, dtype)
    rows = [
        ("tokenizer, compiled kernels, what the allocator keeps", FIXED_BYTES),
        (f"KV cache ({kv_tokens} tokens)", kv_bytes),
        # It grows by half of what there is, so it is 1.25 times what is asked on average; and the old one, whose layers
        # are too small for the allocator to give back, is two thirds of it.
        ("KV cache: room to grow, and the one before it", int(kv_bytes * (1.25 * (1 + 2 / 3) - 1))),
    ]
    if packed:
        rows.append(("weights packed for decoding", packed_bytes(shape, dtype)))
    # Of a layer at its widest: its input, the norm of it in float32 and in the compute dtype, and either queries, keys,
    # values and their rotated copies, or gate, up and their product.
    projected = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    inner = max(projected, 3 * shape.active_intermediate)
    rows.append(
        (f"activations ({prefill_tokens} tokens)", prefill_tokens * (shape.hidden * (3 * width + 8) + inner * width))
    )
    # The logits, and in float32 the noise and the sum of both.
    rows.append((f"logits ({running} samples)", running * shape.vocabulary * (width + 12)))
    return rows


def packed_bytes(shape: ModelShape, dtype: str) -> int:
    """Of the linear layers and the head once more."""
    return (_linear_parameters(shape) + shape.hidden * shape.vocabulary) * BYTES[dtype]


def _linear_parameters(shape: ModelShape) -> int:
    dense = (shape.layers - shape.expert_layers) * 3 * shape.hidden * shape.intermediate
    return shape.layers * shape.attention_parameters + dense
