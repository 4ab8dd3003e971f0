"""How many logits exist at a time where log-probs are computed, and how many stay for a backward. Imports no torch."""

from __future__ import annotations

HEAD_CHUNK_ROWS = 256
"""Rows that pass the head at a time on a CPU, where log-probs are computed: the logits of so many exist at once."""

DEVICE_CHUNK_ROWS, DEVICE_CHUNK_BYTES = 4096, 2 << 30
"""Rows at most, and bytes of their logits, on other devices: each chunk reads the head's weights and adds up their
gradient once more, and products of few rows leave most of a GPU idle. A head that one kernel does not serve takes the
same memory, with fewer rows."""

KEPT_LOGITS_BYTES, DEVICE_KEPT_LOGITS_BYTES = 256 << 20, 5 << 30
"""Logits of a micro-batch that stay for the backward at most, on a CPU and on other devices: there those of 16,000 rows
of 152 thousand. It computes the others again, up to a twelfth of a training of small models."""


def head_chunk_rows(vocabulary: int, width: int, device: str, *, is_fused: bool = False) -> int:
    """Rows of logits that exist at once where log-probs are computed.

    Args:
        vocabulary: tokens that the head knows, on this rank.
        width: bytes of a number in the compute dtype.
        device: `cpu`, or another kind.
        is_fused: one kernel does all with the logits, so nothing else of their size exists. On a CPU it changes
            nothing.
    """
    if device == "cpu":
        return HEAD_CHUNK_ROWS
    fitting = min(DEVICE_CHUNK_BYTES // (vocabulary * width), DEVICE_CHUNK_ROWS)
    return max(HEAD_CHUNK_ROWS, fitting if is_fused else fitting * vocabulary * width // _row_bytes(vocabulary, width))


def kept_logits_bytes(device: str) -> int:
    """Bytes of logits that a forward leaves for its backward at most, where activations are kept."""
    return KEPT_LOGITS_BYTES if device == "cpu" else DEVICE_KEPT_LOGITS_BYTES


def head_chunk_bytes(vocabulary: int, width: int, device: str) -> int:
    """Bytes of the logits that exist at once, and of what is computed of them. Arguments: see `head_chunk_rows`."""
    return head_chunk_rows(vocabulary, width, device) * _row_bytes(vocabulary, width)


def _row_bytes(vocabulary: int, width: int) -> int:
    """Logits of one row, and their exponentials and gradient in float32."""
    return vocabulary * (width + 8)
