"""Bytes that generation takes, before anything is loaded. Imports no torch."""

from __future__ import annotations

from plait.models.shape import ModelShape
from plait.training.memory import BYTES

LOADED_BYTES = 105_000_000
"""Measured with SmolLM2-135M: 104 to 109 MB, of which 45 are pages of libraries that nothing had touched before."""
KERNEL_BYTES = 50_000_000
"""Measured: 35 to 60 MB, most of it freed and kept by the allocator; 190 MB in a process that has to compile them."""


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]


def held_tokens(running: int, context_tokens: int, kv_tokens: int | None) -> int:
    """Whose keys and values are held at most at a time.

    Args:
        context_tokens: of the longest prompt with its response.
        kv_tokens: of the pool; None: as many as are asked for.
    """
    asked = running * context_tokens
    return asked if kv_tokens is None else min(asked, kv_tokens)


def pool_tokens(running: int, context_tokens: int, kv_tokens: int, device: str) -> int:
    """For which a pool takes memory: on a CPU page by page as they come, on a GPU all that it may hold at once."""
    return kv_tokens if device == "cuda" else held_tokens(running, context_tokens, kv_tokens)


def generation_rows(
    shape: ModelShape, dtype: str, *, kv_tokens: int, prefill_tokens: int, running: int, packed: bool
) -> list[tuple[str, int]]:
    """(what, bytes) of a process that generates on a CPU, beside its imports and the model's weights; the peak, about.

    Args:
        kv_tokens: that are held at most at a time.
        prefill_tokens: computed at a time at most.
        running: samples that draw in one step.
        packed: whether the weights are held once more, in the order in which the products read them.
    """
    width = BYTES[dtype]
    rows = [
        ("libraries that loading needs, tokenizer, configuration", LOADED_BYTES),
        ("compiled kernels, and what proving the forward leaves", KERNEL_BYTES),
        (f"KV cache ({kv_tokens} tokens)", kv_tokens * kv_bytes_per_token(shape, dtype)),
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
    # Rows are put together from those of the forward; the noise and the sums are of one row at a time.
    rows.append((f"logits ({running} samples)", running * shape.vocabulary * 2 * width + shape.vocabulary * 28))
    return rows


def packed_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of the linear layers and the head once more."""
    return (_linear_parameters(shape) + shape.hidden * shape.vocabulary) * BYTES[dtype]


def _linear_parameters(shape: ModelShape) -> int:
    dense = (shape.layers - shape.expert_layers) * 3 * shape.hidden * shape.intermediate
    return shape.layers * shape.attention_parameters + dense
