"""The parameters of a model that is known by its shape alone, and of adapters of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from plait.cost.experts import Tokens, are_whole, fullest
from plait.layout.adapters import GROUPED_BYTES
from plait.layout.decoder import decoder_parameters
from plait.layout.mesh import Parallelism
from plait.layout.params import Parameters
from plait.layout.shards import stage_bounds
from plait.models.lora_settings import ALL_LINEAR, LoraSettings
from plait.models.shape import ModelShape

PRODUCTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Layers of one input, which a compiled decoder computes together."""

PANEL_COLUMNS = 32
"""Columns of a panel of weights as it reads them (`kernels.products`)."""

MIXER = "mixer."
"""In front of the names of layers that may be called as those of layers that attend."""


@lru_cache(maxsize=64)
def parameters_of_shape(shape: ModelShape, outputs: int | None = None) -> Parameters:
    """The parameters of a decoder of this shape, but for experts that all tokens pass; `outputs` of a scalar model."""
    mixture = shape.expert_layers > 0
    mixtures = shape.mixtures or range(shape.layers)
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
        dense={layer: shape.intermediate for layer in range(shape.layers) if layer not in mixtures},
        outputs=outputs,
    )


@dataclass(frozen=True)
class LinearLayers:
    """Linear layers of one name, in so many blocks, and their sizes: of heads of so many numbers, where heads stay
    whole."""

    count: int
    inputs: int
    outputs: int
    head: int = 1
    by_inputs: bool = False
    """Tensor parallelism cuts what they read, else what they give."""
    passed: float | None = None
    """How many of them a token passes, where they are experts. None: all."""
    shape: ModelShape | None = None
    """The model's, where they are experts that ranks have whole."""

    @property
    def products(self) -> float:
        """Those that a token passes."""
        return self.count if self.passed is None else self.passed

    def reached(self, tokens: Tokens) -> Tokens:
        """Those that so many tokens read."""
        least: Any = self.count if self.passed is None else np.minimum(self.count, self.passed * tokens)
        return least

    def cut(self, tp: int) -> LinearLayers:
        """The layers as the largest part of `tp` tensor-parallel ranks has them."""
        if self.shape is not None and self.passed is not None:
            blocks, share = self.shape.expert_layers, fullest(self.shape, tp)
            return replace(self, count=blocks * -(-self.shape.experts // tp), passed=self.passed * share)
        part = lambda size: -(-size // self.head // tp) * self.head
        if self.by_inputs:
            return replace(self, inputs=part(self.inputs))
        return replace(self, outputs=part(self.outputs))


def adapted_layers(shape: ModelShape, lora: LoraSettings) -> dict[str, LinearLayers]:
    """Those of one model that have an adapter, by name, as far as its shape says: where a setting names others, of a
    family whose layers are called otherwise, all."""
    if lora.rank == 0:
        return {}
    layers, linear = _linear_layers(shape), lora.linear
    named = {name: name.removeprefix(MIXER) for name in layers}
    takes_all = linear == ALL_LINEAR or {*linear} - {*named.values()}
    experts = {name: of for name, of in _experts(shape).items() if name in lora.experts}
    return experts | {name: of for name, of in layers.items() if of.count and (takes_all or named[name] in linear)}


def adapter_parameters(shape: ModelShape, lora: LoraSettings, tp: int = 1) -> int:
    """Numbers of a model's adapter: A and B of each layer that has one, on the rank of `tp` that has most."""
    layers = [layer.cut(tp) for layer in adapted_layers(shape, lora).values()]
    return sum(layer.count * lora.rank * (layer.inputs + layer.outputs) for layer in layers)


def adapter_by_stage(shape: ModelShape, lora: LoraSettings, sizes: Parallelism) -> tuple[int, ...]:
    """The same on the devices of each pipeline stage, as if each layer had as many."""
    count = adapter_parameters(shape, lora, sizes.tp)
    bounds = stage_bounds(shape.layers, sizes)
    return tuple(-(-count * (stop - start) // shape.layers) for start, stop in pairwise(bounds))


def adapter_inputs(shape: ModelShape, lora: LoraSettings) -> int:
    """What A of all adapters makes of one token: numbers that are kept for the backward of B."""
    return int(lora.rank * sum(layer.products for layer in adapted_layers(shape, lora).values()))


def adapter_copies(shape: ModelShape, lora: LoraSettings, width: int, tp: int = 1) -> int:
    """Numbers of A and B of experts that a forward copies, and keeps for its backward, on the rank of `tp` that has
    most: none where the rank is one that grouped products take as it is (`models.expert_adapters`).

    Args:
        width: bytes of a number.
    """
    beyond = -lora.rank % max(1, GROUPED_BYTES // width)
    layers = [layer.cut(tp) for layer in adapted_layers(shape, lora).values() if layer.passed is not None]
    return sum(layer.count * (lora.rank + beyond) * (layer.inputs + layer.outputs) for layer in layers) if beyond else 0


def adapter_products(shape: ModelShape, lora: LoraSettings, tp: int = 1) -> float:
    """Numbers of a model's adapter that a token passes, on the rank of `tp` that has most."""
    layers = [layer.cut(tp) for layer in adapted_layers(shape, lora).values()]
    return sum(layer.products * lora.rank * (layer.inputs + layer.outputs) for layer in layers)


def trained_readers(shape: ModelShape, lora: LoraSettings) -> int:
    """Attentions, mixers and MLPs of which weights that are trained read what enters them: all; of adapters, those
    whose first products have some. Experts read rows of their own that are taken from it."""
    if lora.rank == 0:
        return shape.attending + len(shape.recurrent) + shape.dense_layers + shape.expert_layers
    attention, _, mlp, _ = PRODUCTS
    counts: dict[tuple[str, ...], int] = {}
    for name, layer in adapted_layers(shape, lora).items():
        block = (MIXER,) if name.startswith(MIXER) else attention if name in attention else mlp
        if not layer.by_inputs and layer.passed is None:
            counts[block] = layer.count
    return sum(counts.values())


def packed_adapter_parameters(shape: ModelShape, lora: LoraSettings) -> int:
    """The same as a compiled decoder lays them out: those of one product together, in whole panels, with B of each
    for all outputs of the product."""
    layers, adapted, total = _linear_layers(shape), adapted_layers(shape, lora), 0
    for names in PRODUCTS:
        ranks = lora.rank * sum(name in adapted for name in names)
        low = PANEL_COLUMNS * -(-ranks // PANEL_COLUMNS)
        first, outputs = layers[names[0]], sum(layers[name].outputs for name in names)
        total += first.count * low * (first.inputs + outputs)
    return total


def _mixer_layers(shape: ModelShape) -> dict[str, LinearLayers]:
    """Those of recurrent layers: the output projection is cut by what it reads; where nothing may be apart, all
    of a layer is one head."""
    mixers, units, layers = len(shape.recurrent), shape.mixer.units or 1, {}
    for name, inputs, outputs in shape.mixer.linear:
        by_inputs = name in ("out_proj", "o_proj")
        head = (inputs if by_inputs else outputs) // units
        layers[f"{MIXER}{name}"] = LinearLayers(mixers, inputs, outputs, head, by_inputs=by_inputs)
    return layers


def _experts(shape: ModelShape) -> dict[str, LinearLayers]:
    """Routed experts by the names of their parameters (`models.lora_targets`). Where gate and up are one product, ranks
    have equally many columns of both."""
    hidden, inner, count = shape.hidden, shape.expert_intermediate, shape.expert_layers * shape.experts
    if not count:
        return {}
    enters = "experts.gate_up_proj" if shape.mlp_matrices == 3 else "experts.up_proj"
    of = {"passed": shape.expert_layers * shape.experts_per_token, "shape": shape if are_whole(shape) else None}
    return {
        enters: LinearLayers(count, hidden, (shape.mlp_matrices - 1) * inner, shape.mlp_matrices - 1, **of),
        "experts.down_proj": LinearLayers(count, inner, hidden, by_inputs=True, **of),
    }


def _linear_layers(shape: ModelShape) -> dict[str, LinearLayers]:
    """That may have adapters, but for routed experts: no MLP of a mixture of experts has any, and where it has an
    expert that all tokens pass, dense MLPs, whose layers have the names of that one's, have none either
    (`models.lora_targets`)."""
    hidden, query, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    blocks, inner = shape.attending, shape.intermediate
    dense = 0 if shape.shared_intermediate else shape.dense_layers
    gated = shape.attention_parameters // hidden - query - 2 * kv if shape.recurrent else query  # queries and gates
    return {
        **_mixer_layers(shape),
        "q_proj": LinearLayers(blocks, hidden, gated, gated // shape.heads),
        "k_proj": LinearLayers(blocks, hidden, kv, shape.head_dim),
        "v_proj": LinearLayers(blocks, hidden, kv, shape.head_dim),
        "o_proj": LinearLayers(blocks, query, hidden, shape.head_dim, by_inputs=True),
        "gate_proj": LinearLayers(dense, hidden, inner),
        "up_proj": LinearLayers(dense, hidden, inner),
        "down_proj": LinearLayers(dense, inner, hidden, by_inputs=True),
    }
