"""The parameters of a model that is known by its shape alone, and of adapters of it."""

from __future__ import annotations

from functools import lru_cache

from plait.layout.decoder import decoder_parameters
from plait.layout.params import Parameters
from plait.models.shape import ModelShape


@lru_cache(maxsize=64)
def parameters_of_shape(shape: ModelShape, outputs: int | None = None) -> Parameters:
    """The parameters of a decoder of this shape, experts as dense layers' equals; `outputs` of a scalar model."""
    mixture = shape.expert_layers > 0
    return decoder_parameters(
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.expert_intermediate if mixture else shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocabulary,
        tied=shape.tied,
        experts=shape.experts if mixture else 0,
        outputs=outputs,
    )


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters of all seven linear layers of a block; fewer where `lora.target_modules` names some of
    them.
    """
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + heads) + 2 * (shape.hidden + kv)
    return shape.layers * rank * (attention + 3 * (shape.hidden + shape.active_intermediate))
