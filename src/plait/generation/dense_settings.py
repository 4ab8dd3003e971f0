"""What a decoder of the classic shape computes around its weights, found by watching its Transformers module compute.

Shapes: H hidden size, P positions, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.generation.dense_layers import (
    ROPE_TYPES,
    Layer,
    activation,
    decoder_layers,
    factor_between,
    input_of,
    norm_kind,
    watched_calls,
)
from plait.generation.refused import require
from plait.kernels import paged_attention
from plait.kernels.decoder import OFFSET, Sizes
from plait.models.language_model import LanguageModel


@dataclass(eq=False)
class DenseSettings:
    """Sizes and factors of the layers of one module."""

    sizes: Sizes
    hidden: int
    """H."""
    scales: list[float]
    """What scores are multiplied by in each layer."""
    windows: list[int]
    """How many keys a token sees in each layer; 0: all."""
    embedding_scale: float | None
    """What embeddings are multiplied by; None: nothing."""
    residual: float
    """What each layer's attention and MLP are multiplied by before they are added."""
    eps: float
    """The epsilon of all norms."""
    last_norm: Any
    """The module of the final norm; of a stage that is not the last any norm, whose product nobody reads."""
    adapter_scale: float
    """What the products of adapters are multiplied by."""
    max_positions: int
    rotary: Any
    """The module that computes the angles."""
    dtype: torch.dtype
    """The dtype that angles are computed for, before they are float32."""

    @classmethod
    def of(cls, model: LanguageModel, layers: Sequence[Layer]) -> Self:
        """
        Args:
            layers: those of this stage, in their order.

        Raises:
            Refused: a setting is of another kind than the compiled layers have.
        """
        config, module = model.config.get_text_config(), model.module.base_model
        first = layers[0]
        rotary = getattr(module, "rotary_emb", None)
        require(getattr(rotary, "rope_type", None) in ROPE_TYPES, "its angles are not a function of the position alone")
        entry: list[Tensor] = []
        layer = next(iter(decoder_layers(module).values()))
        hook = layer.register_forward_pre_hook(
            lambda _, args, kwargs: entry.append(input_of(args, kwargs)), with_kwargs=True
        )
        ids = torch.arange(1, 5)
        try:
            calls = watched_calls(model, ids)
        finally:
            hook.remove()
        require(all(call.plain for call in calls), "its attention has a softcap or sinks")
        require(len({call.shape for call in calls}) == 1, "its layers are of several shapes")
        embedding_scale = None
        if model.team.is_first_stage:
            embedded = F.embedding(ids, module.embed_tokens.weight.detach())
            embedding_scale = factor_between(embedded, entry[0][0])
        last_norm = module.norm if model.team.is_last_stage else first.norms[0]
        eps, norm = _norm_of(layers, last_norm)
        adapter_scale = _adapter_scale_of(layers)
        return cls(
            _sizes_of(calls[0].shape, first, norm, layer.mlp, model.dtype),
            first.attention_in[0].linear.in_features,
            [call.scale for call in calls],
            [call.window or 0 for call in calls],
            embedding_scale,
            float(getattr(layer, "residual_multiplier", 1.0)),
            eps,
            last_norm,
            adapter_scale,
            int(config.max_position_embeddings),
            rotary,
            model.dtype,
        )

    def norm_weight(self, norm: Any) -> Tensor:
        """What a norm multiplies by, float32 [H], or [D] of a head's."""
        weight = norm.weight.detach().float()
        return weight + 1 if self.sizes.norm == OFFSET else weight

    def angles(self, num_positions: int) -> tuple[Any, Any]:
        """cos and sin of the first half of a head, float32 [P, D / 2] each, for at least so many positions.

        Raises:
            Refused: rope turns a part of each head, or other pairs.
        """
        num_positions = min(max(1024, 1 << (num_positions - 1).bit_length()), max(self.max_positions, num_positions))
        like = torch.empty(0, dtype=self.dtype)
        cos, sin = self.rotary(like, torch.arange(num_positions)[None])
        half = cos.shape[-1] // 2
        require(cos.shape[-1] == self.sizes.head_size, "rope turns a part of each head")
        require(bool((cos[..., :half] == cos[..., half:]).all()), "rope turns other pairs")
        return tuple(angles[0, :, :half].float().contiguous().numpy() for angles in (cos, sin))  # type: ignore[return-value]


def _norm_of(layers: Sequence[Layer], last_norm: Any) -> tuple[float, int]:
    """Epsilon and kind of all norms. Raises Refused where they differ."""
    kinds = {norm_kind(norm) for layer in layers for norm in (*layer.norms, last_norm)}
    require(len(kinds) == 1, "its norms are of several kinds")
    return next(iter(kinds))


def _adapter_scale_of(layers: Sequence[Layer]) -> float:
    """The factor of all adapters, 1 where there are none. Raises Refused where they differ."""
    adapters = [part.adapter for layer in layers for product in layer.products for part in product]
    scales = {adapter.scale for adapter in adapters if adapter is not None}
    require(len(scales) <= 1, "its adapters have several scales")
    return next(iter(scales), 1.0)


def _sizes_of(shape: tuple[int, int, int], first: Layer, norm: int, mlp: Any, dtype: torch.dtype) -> Sizes:
    """
    Args:
        shape: query heads, key heads and head size.
        norm: kind of the norms, as `kernels.decoder` numbers them.

    Raises:
        Refused: heads are of several sizes, a width is odd, or the activation is another one.
    """
    num_heads, num_key_heads, head_size = shape
    hidden, intermediate = first.attention_in[0].linear.in_features, first.mlp_out[0].linear.in_features
    widths = (hidden, head_size, num_heads * head_size, intermediate)
    require(all(width % 2 == 0 for width in widths), "a width is odd")
    all_heads = (num_heads + 2 * num_key_heads) * head_size
    require(sum(part.linear.out_features for part in first.attention_in) == all_heads, "its heads are not of one size")
    return Sizes(
        num_heads,
        num_key_heads,
        head_size,
        intermediate,
        norm,
        activation(mlp),
        int(len(first.norms) == 4),
        int(head_size % 32 == 0),
        int(paged_attention.by_matrix_unit(dtype)),
    )
