"""SmolLM2-135M's sizes, as its configuration says them."""

from __future__ import annotations

from plait.models.shape import ModelShape

SIZES = {"layers": 30, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64}
SHAPE = ModelShape(
    **SIZES, vocabulary=49152, tied=True, max_positions=8192, attention_parameters=576 * 64 * (2 * 9 + 2 * 3)
)
