"""What one token, or one step, asks of a device for a model of a shape: floating point operations and bytes, by layer.

Layers are averages where a model mixes dense blocks with mixtures of experts: of each kind for itself `layer_kinds`
makes a shape. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.cost.experts import are_whole, fullest, reached
from plait.cost.shape_parameters import adapted_layers, adapter_products, packed_adapter_parameters
from plait.layout.params import Heads
from plait.models.lora_settings import NO_LORA, LoraSettings
from plait.models.shape import ModelShape
from plait.training.memory import BYTES

STATE_PASSES = 6
"""How often a step of decoding reads or writes each number of a sample's states: they are copied out of their slots,
computed with, and put back."""

Tokens = TypeVar("Tokens", float, NDArray[np.float64])
"""The tokens of one forward, or of many at once."""


@dataclass(frozen=True)
class ModelWork:
    """
    outputs: of the head: the vocabulary, or 1 of a scalar model
    lora:    of its adapter, which `products` and `read` leave out
    """

    shape: ModelShape
    dtype: str
    outputs: int
    lora: LoraSettings = NO_LORA

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return BYTES[self.dtype]

    @cached_property
    def dense(self) -> float:
        """Weights of a layer that every token passes: projections, MLP or shared expert, router."""
        shape = self.shape
        mlp = shape.dense_layers * shape.mlp_matrices * shape.hidden * shape.intermediate
        shared = shape.expert_layers * shape.hidden * (shape.mlp_matrices * shape.shared_intermediate + shape.experts)
        return (shape.projections + mlp + shared) / shape.layers

    @cached_property
    def expert(self) -> float:
        """Weights of one routed expert, in the average layer."""
        shape = self.shape
        return shape.expert_layers * shape.mlp_matrices * shape.hidden * shape.expert_intermediate / shape.layers

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.outputs * self.shape.hidden

    @cached_property
    def packed_adapter(self) -> float:
        """The same as a compiled decoder reads them."""
        return packed_adapter_parameters(self.shape, self.lora) / self.shape.layers

    def adapter_s(
        self, tokens: Tokens, tp: int, flops_per_s: float, bytes_per_s: float, *, backward: bool = False
    ) -> Tokens:
        """Seconds of a layer's adapters as plain layers compute them, on the rank of `tp` that has most; those of
        experts for each pair of a token and an expert.

        Their products, or what reading them takes; and what passes memory, as the products are too thin to hide it.
        Forward: A reads its input; what B gives is written, read, scaled and written, and read with what the weights
        give to write their sum. Backward, with twice the products: the gradient is read, scaled and written, and read
        for B's own and for that of what A gave; the input is read for A's own; its gradient is written, and read with
        that by the weights to write their sum.
        """
        layers, each = [whole.cut(tp) for whole in adapted_layers(self.shape, self.lora).values()], self.shape.layers
        passed = adapter_products(self.shape, self.lora, tp) / each
        read: Any = sum(self.lora.rank * (one.inputs + one.outputs) * one.reached(tokens) for one in layers) / each
        products: Any = np.maximum(2 * passed / flops_per_s * tokens, read * self.width / bytes_per_s)
        numbers = sum(
            one.products * (4 * one.outputs + 5 * one.inputs if backward else 6 * one.outputs + one.inputs)
            for one in layers
        )
        moved = self.width * numbers / each / bytes_per_s * tokens
        return (1 + backward) * products + moved

    def share(self, tp: int) -> float:
        """The share of a layer's work on the device that has most of it over tp: heads and columns need not divide, and
        tokens do not choose experts evenly."""
        shape, mixer, is_whole = self.shape, self.shape.mixer, are_whole(self.shape)
        of_mixers = mixer.most(tp) if shape.recurrent else 1 / tp
        divides = shape.kv_heads % tp == 0 and shape.intermediate % tp == 0 and of_mixers * tp == 1
        if tp == 1 or (divides and not is_whole):
            return 1 / tp
        heads = Heads(shape.heads, shape.kv_heads)
        most = max(stop - first for first, stop in (heads.part_range(i, tp) for i in range(tp)))
        attention = shape.attending * shape.attention_parameters / shape.layers
        mixers = len(shape.recurrent) * (mixer.parameters + mixer.scanned) / shape.layers
        experts = shape.experts_per_token * self.expert if is_whole else 0.0
        rest = self.products(1) / 2 - attention - mixers - experts
        widest = shape.intermediate if is_whole else shape.active_intermediate
        inner = max(1, widest)  # an MLP may be a layer of its own
        columns = -(-inner // tp) / inner
        parts = attention * most / shape.heads + mixers * of_mixers + rest * columns + experts * fullest(shape, tp)
        return parts / (self.products(1) / 2)

    def products(self, tokens: float, *, backward: bool = False) -> float:
        """Floating point operations of a layer's matrix products, those of a recurrence among them."""
        weights, scan = weighted(self, tokens), scanned(self.shape, tokens)
        return weight_passes(self, backward=backward) * weights + (1 + backward) * scan

    def attention(self, pairs: float, *, backward: bool = False) -> float:
        """Floating point operations of a layer's attention, over so many pairs of a query and a key. A backward has two
        forwards', whatever gets gradients: it has no weights. (What FlashAttention computes again of the scores, half a
        forward more, is left out.)"""
        width = self.shape.heads * self.shape.head_dim
        return (1 + backward) * 4 * pairs * width * self.shape.attending / self.shape.layers

    def read(self, tokens: Tokens, tp: int = 1) -> Tokens:
        """Bytes of a layer's weights that a forward over so many tokens reads, on the device of `tp` that reads most
        experts."""
        experts = reached(self.shape, tokens, tp) * self.expert if self.expert else 0.0 * tokens
        return (self.dense / tp + experts) * self.width

    def kept(self, tokens: float, tp: int) -> float:
        """Bytes of a layer's keys and values of so many tokens, on one of `tp` devices."""
        heads = -(-self.shape.kv_heads // tp)
        return 2 * tokens * heads * self.shape.head_dim * self.width * self.shape.attending / self.shape.layers

    def states(self, samples: Tokens, tp: int) -> Tokens:
        """Bytes of a layer's states that a step of so many samples reads and writes: of the rank that has most."""
        shape = self.shape
        of_sample = STATE_PASSES * shape.mixer.state_bytes(self.width) * shape.mixer.most(tp)
        return samples * (of_sample * len(shape.recurrent) / shape.layers)


def weighted(work: ModelWork, tokens: float) -> float:
    """Floating point operations of a layer's products with its weights in a forward."""
    return 2 * tokens * (work.dense + work.shape.experts_per_token * work.expert)


def weight_passes(work: ModelWork, *, backward: bool) -> int:
    """Forwards that a pass's products with weights have as many operations as: under an adapter the weights get no
    gradients, only what is before them does."""
    return 2 if backward and not work.lora.rank else 1


def scanned(shape: ModelShape, tokens: float) -> float:
    """Floating point operations of a layer's products in a forward that have no weights: of a recurrence."""
    return 2 * tokens * len(shape.recurrent) * shape.mixer.scanned / shape.layers


def balancing(shape: ModelShape, tokens: float, samples: float, *, backward: bool) -> float:
    """Floating point operations of a layer's part in the loss of routers (`training.router_balance`), on each rank of
    tp: sums over the tokens of every sample of what is chosen, and of probabilities; a backward has one such product.
    """
    return (1 if backward else 2) * 2 * samples * tokens * shape.experts * shape.expert_layers / shape.layers


def balance_bytes(work: ModelWork, samples: float) -> float:
    """Bytes of these sums of all layers, which go from stage to stage."""
    return 2 * samples * work.shape.experts * max(BYTES["float32"], work.width)
