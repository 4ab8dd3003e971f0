"""Layers that keep a state: which they are, and their numbers and those of MLPs beside them. Read from a model's
configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEEPS_STATE = "some of its layers keep a state"
"""Why a compiled forward does not serve a model, in words for a person."""

RECURRENT_LAYERS = frozenset({"linear_attention", "conv"})
"""Kinds of layers (`layer_types`) that keep a state of one size in place of keys and values."""

_ATTENDS_EVERY = ("qwen3_next", "qwen3_5", "olmo_hybrid")
"""Families of which every fourth layer attends (`full_attention_interval`) and the others keep a state, where the
configuration names no kinds."""

CHUNK_TOKENS = 64
"""Tokens of a sequence that the delta rule takes together: within them it computes as attention does."""


@dataclass(frozen=True)
class MixerShape:
    """Sizes are in elements."""

    parameters: int
    """Weights of one layer's projections."""
    linear: tuple[tuple[str, int, int], ...] = ()
    """(name, inputs, outputs) of each of these; none: nobody says."""
    extras: int = 0
    """Weights of its convolution, of its gates, and of its norm."""
    channels: int = 0
    """The convolution's."""
    taps: int = 0
    """The convolution's: so many numbers of each channel are kept of a sequence, in the compute dtype."""
    heads: int = 0
    """Value heads of the delta rule; 0: there is none."""
    key_heads: int = 0
    """Key heads, each with as many of these: what tensor parallelism divides, as it divides channels where there are
    none."""
    key_dim: int = 0
    value_dim: int = 0
    """Dims of a head: so many by so many numbers are kept of a sequence for each, in float32 or wider."""

    @property
    def units(self) -> int:
        """Parts of a layer that ranks of tensor parallelism have whole; 0: such a layer is whole on each of them."""
        return self.key_heads or self.channels

    def most(self, tp: int) -> float:
        """The share of a layer on the rank of `tp` that has most of it."""
        return -(-self.units // tp) / self.units if self.units else 1.0

    @property
    def scanned(self) -> int:
        """Products that the delta rule takes for a token, beside those with weights."""
        within = CHUNK_TOKENS * (3 * self.key_dim + 2 * self.value_dim)
        return self.heads * (within + 3 * self.key_dim * self.value_dim)

    def kept_bytes(self, width: int) -> int:
        """Bytes of one token that its plain operators keep for the backward; measured, within a seventh.

        Args:
            width: bytes of a number of the compute dtype.
        """
        of_heads = 4 * CHUNK_TOKENS + 6 * (self.key_dim + self.value_dim)
        return width * (6 * self.channels + 4 * self.heads * self.value_dim) + max(4, width) * self.heads * of_heads

    def state_bytes(self, width: int) -> int:
        """Bytes that one layer keeps of a sequence.

        Args:
            width: bytes of a number of the compute dtype.
        """
        return width * self.channels * self.taps + max(4, width) * self.heads * self.key_dim * self.value_dim


def kinds_of_layers(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The kind of each layer of a `config.json`; where it names none, of families with layers that keep a state the
    kinds that Transformers gives them. Empty: nobody says."""
    if kinds := config.get("layer_types"):
        return tuple(kinds)
    family = str(config.get("model_type"))
    if family.startswith(_ATTENDS_EVERY):
        every = int(config.get("full_attention_interval") or 4)
        attending = set(range(every - 1, layers, every))
        if family == "olmo_hybrid" and not attending:
            attending = {layers - 1}
        state = "linear_attention"
    elif family == "lfm2" and (stated := config.get("full_attn_idxs")) is not None:
        attending, state = set(stated), "conv"
    else:
        return ()
    return tuple("full_attention" if layer in attending else state for layer in range(layers))


def recurrent_layers(kinds: Sequence[str] | None) -> tuple[int, ...]:
    """Those of the layers of these kinds that keep a state in place of keys and values."""
    return tuple(layer for layer, kind in enumerate(kinds or ()) if kind in RECURRENT_LAYERS)


def mixer_shape(config: Mapping[str, Any], hidden: int, attention_parameters: int) -> MixerShape:
    """Those layers of a `config.json` that keep a state. Where a family's keys are not known here they count as its
    layers that attend, with these parameters, and have no state.
    """
    if heads := int(config.get("linear_num_value_heads") or 0):
        key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
        taps = int(config["linear_conv_kernel_dim"])
        keys, values = int(config["linear_num_key_heads"]) * key_dim, heads * value_dim
        channels = 2 * keys + values
        return MixerShape(
            parameters=hidden * (channels + values + 2 * heads) + values * hidden,
            linear=_linear(str(config.get("model_type")), hidden, keys, values, heads),
            extras=channels * taps + 2 * heads + value_dim,
            channels=channels,
            taps=taps,
            heads=heads,
            key_heads=int(config["linear_num_key_heads"]),
            key_dim=key_dim,
            value_dim=value_dim,
        )
    if taps := int(config.get("conv_L_cache") or 0):
        biases = 5 * hidden if config.get("conv_bias") else 0
        linear = ("in_proj", hidden, 3 * hidden), ("out_proj", hidden, hidden)
        return MixerShape(4 * hidden * hidden, linear, hidden * taps + biases, hidden, taps)
    return MixerShape(attention_parameters)


def _linear(family: str, hidden: int, keys: int, values: int, heads: int) -> tuple[tuple[str, int, int], ...]:
    """Those of the delta rule, as families divide them."""
    if family == "olmo_hybrid":
        outputs = {"q": keys, "k": keys, "v": values, "a": heads, "b": heads, "g": values}
        return (*((f"{name}_proj", hidden, count) for name, count in outputs.items()), ("o_proj", values, hidden))
    if family == "qwen3_next":
        outputs = {"qkvz": 2 * (keys + values), "ba": 2 * heads}
    else:
        outputs = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return (*((f"in_proj_{name}", hidden, count) for name, count in outputs.items()), ("out_proj", values, hidden))


def mlp_width(config: Mapping[str, Any], stated: int) -> int:
    """Inner elements of a dense MLP: of LFM2, which states more (`block_auto_adjust_ff_dim`), as it makes them."""
    if not config.get("block_auto_adjust_ff_dim"):
        return stated
    width, multiple = int(2 * stated / 3), int(config.get("block_multiple_of") or 1)
    factor = config.get("block_ffn_dim_multiplier")
    return width if factor is None else -(-int(factor * width) // multiple) * multiple
