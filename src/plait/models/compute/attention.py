"""The attention function that every Transformers family calls, and what it means for a packed batch.

Transformers hands the queries, keys and values of one layer to a registered function together with the keyword
arguments of `model(...)`. Ours passes them to the `context` of this forward: a packed batch here, the KV pool of the
generation engine elsewhere. So masks, caches and packing are ours and no family needs code of its own.

Shapes: T tokens of this forward, Hq query heads, Hkv key heads, D head size of queries and keys, E head size of values
(another one under multi-head latent attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.data.packed import PackedBatch
from plait.errors import ModelError
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.recurrent import Mixer
from plait.models.compute.row_attention import RowPlan, row_plan
from plait.models.compute.segments import SegmentPlan, segment_plan

ATTENTION = "plait"
"""Name under which the function is registered; no mask function has that name, so Transformers builds no mask."""


class AttentionContext(Protocol):
    """What the tokens of one forward may attend to."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention of one layer.

        Args:
            layer: index of the decoder layer.
            query: [Hq, T, D], compute dtype, rope applied.
            key, value: [Hkv, T, D] and [Hkv, T, E]: of the tokens of this forward.

        Returns:
            [T, Hq, E].
        """
        ...


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    context: AttentionContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with Transformers: query [1, Hq, T, D], key [1, Hkv, T, D] → ([1, T, Hq, E], None).

    Raises:
        ModelError: the family's layer does not pass on what to attend to, or adds a mask or bias of its own.
    """
    if context is None:
        raise _refusal(module, "it does not get the keyword arguments of the forward, which say what to attend to")
    if attention_mask is not None or position_bias is not None:
        raise _refusal(module, "it adds a mask or bias of its own to the scores")
    assert dropout == 0.0, "dropout is off"
    assert query.shape[0] == 1, f"one packed row, got {query.shape[0]}"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    form = AttentionForm(scale, sliding_window, softcap, s_aux)
    out_TE = context.attend(module.layer_idx, query[0], key[0], value[0], form)  # type: ignore[arg-type]
    return out_TE.unsqueeze(0), None


def _refusal(module: torch.nn.Module, cause: str) -> ModelError:
    name = type(module).__name__
    return ModelError(f"model: {name} is refused by the self-check: {cause}. Set `model` to another family.")


def register() -> None:
    """Make `attn_implementation="plait"` known to Transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention_forward)


class PackedContext:
    """Attention over a packed batch: each prompt sees itself, each continuation its prompt and itself; differentiable.

    Pieces and masks are made once per batch (and window), not per layer.

    Args:
        kv_sink: receives (layer, key [Hkv, T, D], value [Hkv, T, E]) of every layer, e.g. to fill a KV pool.
        planned: makes the plans.
    """

    def __init__(
        self,
        batch: PackedBatch,
        kv_sink: Callable[[int, Tensor, Tensor], None] | None = None,
        *,
        planned: Callable[[PackedBatch, Tensor, Tensor, Tensor, AttentionForm], RowPlan] = row_plan,
    ) -> None:
        self.batch = batch
        self.kv_sink = kv_sink
        self.by_kernels = planned is row_plan
        """Whether kernels of training may compute the row; else nothing is compiled for it."""
        self._planned = planned
        self._plans: dict[int | None, RowPlan] = {}
        self._segments: SegmentPlan | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `AttentionContext.attend`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, E] to [T, Hq, E]."""
        assert query.shape[1] == self.batch.num_tokens, "the context was built for another batch"
        if self.kv_sink is not None:
            self.kv_sink(layer, key, value)
        if form.window not in self._plans:
            self._plans[form.window] = self._planned(self.batch, query, key, value, form)
        return self._plans[form.window].attend(query, key, value, form)

    def mix(self, layer: int, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """See `RecurrentContext.mix`: [T, H] → [T, H], differentiable."""
        if self._segments is None:
            self._segments = segment_plan(self.batch)
        return self._segments.mix(hidden_TH, mixer)
