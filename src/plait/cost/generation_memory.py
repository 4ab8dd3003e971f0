"""Bytes that generation takes, before anything is loaded. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cost.shape_parameters import packed_adapter_parameters
from plait.models.lora_settings import NO_LORA, LoraSettings
from plait.models.shape import ModelShape
from plait.training.memory import BYTES


@dataclass(frozen=True)
class EngineBytes:
    """Bytes of an engine. held: all the time; widened: more, where a draft model's packed weights are widened"""

    held: int = 0
    widened: int = 0


NO_ENGINE = EngineBytes()


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


def packed_bytes(shape: ModelShape, dtype: str, lora: LoraSettings = NO_LORA) -> int:
    """Bytes of the linear layers and the head once more, and of their adapters."""
    linear = _linear_parameters(shape) + packed_adapter_parameters(shape, lora)
    return (linear + shape.hidden * shape.vocabulary) * BYTES[dtype]


def widened_bytes(packed: int, dtype: str) -> int:
    """What `packed_bytes` may take on top: a CPU without AVX-512 packs bfloat16 as float32 where the model's own layers
    compute, and whether they do is known only when the model is loaded."""
    return packed if dtype == "bfloat16" else 0


def _linear_parameters(shape: ModelShape) -> int:
    dense = (shape.layers - shape.expert_layers) * 3 * shape.hidden * shape.intermediate
    return shape.layers * shape.attention_parameters + dense
