"""What the C libraries of a process keep of the memory that it has used, and what they are told to.

They read their limits once, when they first compute, so `bound` is called before that: where
`models.compute.cpu_linear`, which everything that computes imports, asks for its first product. What the user has set
in the environment stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

NUM_KERNELS = 256
"""Compiled kernels that oneDNN keeps, one for each shape that it meets, 0.25 to 0.6 MB each; 1,024 unless told. Ragged
batches rarely repeat a shape, while a batch asks for its shapes in every layer: about 20 of a decoder that is trained,
and six for each two segments that see each other (`compute.packed_attention`): 100 of 32 samples of 8 prompts. With 64
these were compiled anew in each layer, a tenth of the time of training."""

NUM_PREPARED = 16
"""Products that torch's layer above oneDNN keeps ready, 1,024 unless told: 1 MB for each shape even of a small layer.
One that is not among them is made of the kept kernel, which costs no time that could be measured."""


def bound() -> None:
    """Bound what oneDNN, and torch for it, keep. Has no effect in a process in which it has computed already."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(NUM_KERNELS))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(NUM_PREPARED))


def give_back_freed() -> None:
    """Give memory that is free again back to the system, where the C library can: reading a checkpoint of
    SmolLM2-135M in bfloat16 leaves 160 to 220 MB in the allocator."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
