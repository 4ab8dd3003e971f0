"""What a process that generates on a CPU takes, line by line: the prediction that the benchmark holds against what it
finds."""

from __future__ import annotations

from plait.cost.generation_memory import kv_bytes_per_token, packed_bytes
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

LOADED_BYTES = 105_000_000
"""Measured with SmolLM2-135M: 104 to 109 MB, of which 45 are pages of libraries that nothing had touched before."""
KERNEL_BYTES = 50_000_000
"""Measured: 35 to 60 MB, most of it freed and kept by the allocator; 190 MB in a process that has to compile them."""


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
