"""Recurrent layers: their numbers and those of MLPs beside them, read from a model's configuration.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEEPS_STATE = "some of its layers are recurrent"
"""Why a compiled forward does not serve a model, in words for a person."""

DELTA_RULE_LIBRARY = "fla"
"""The module by which Transformers computes the delta rule on GPUs, where it is installed (flash-linear-attention). Its
kernel refuses float32."""

CHUNK_TOKENS = 64
"""Tokens of a sequence that the delta rule takes together: within them it computes as attention does."""

_SCANS = (
    (
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_conv",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_proj_bias",
    ),
    (
        "mamba_num_heads",
        "mamba_head_dim",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
        "chunk_size",
        "use_conv_bias",
        "use_bias",
    ),
)
"""Keys of Mamba-2 by families: heads, their dims, groups of them, dims of a state, taps, tokens that are taken
together, whether the convolution and whether the projections have biases."""


@dataclass(frozen=True)
class MixerShape:
    """Sizes are in elements."""

    parameters: int
    """Weights of one layer's projections."""
    linear: tuple[tuple[str, int, int], ...] = ()
    """(name, inputs, outputs) of each of these; none: nobody says."""
    extras: int = 0
    """Weights of its convolution, of its gates, and of its norm; biases of its projections."""
    channels: int = 0
    """The convolution's."""
    taps: int = 0
    """The convolution's: so many numbers of each channel are kept of a sequence, in the compute dtype."""
    heads: int = 0
    """Value heads of the delta rule, heads of Mamba-2; 0: there are none."""
    key_heads: int = 0
    """Key heads, groups of Mamba-2, each with as many of these: what tensor parallelism divides, as it divides channels
    where there are none."""
    key_dim: int = 0
    value_dim: int = 0
    """Dims of a head: so many by so many numbers are kept of a sequence for each, in float32 or wider."""
    chunk: int = 0
    """Tokens of a sequence that Mamba-2 takes together; 0: it is no Mamba-2."""

    @property
    def by_delta_rule(self) -> bool:
        """Whether it is a linear attention, not Mamba-2, nor a convolution alone."""
        return bool(self.heads) and not self.chunk

    @property
    def units(self) -> int:
        """Parts of a layer that ranks of tensor parallelism have whole; 0: such a layer is whole on each of them. So is
        Mamba-2 with one group: all of its heads read what that has."""
        if self.chunk:
            return self.key_heads if self.key_heads > 1 else 0
        return self.key_heads or self.channels

    def most(self, tp: int) -> float:
        """The share of a layer on the rank of `tp` that has most of it."""
        return -(-self.units // tp) / self.units if self.units else 1.0

    @property
    def scanned(self) -> int:
        """Products that the delta rule takes for a token, or Mamba-2, beside those with weights."""
        if self.chunk:
            within = self.chunk * (self.key_dim + self.value_dim)
            return self.heads * (within + 2 * self.key_dim * self.value_dim)
        within = CHUNK_TOKENS * (3 * self.key_dim + 2 * self.value_dim)
        return self.heads * (within + 3 * self.key_dim * self.value_dim)

    def kept_bytes(self, width: int) -> int:
        """Bytes of one token that its plain operators keep for the backward; measured, within a seventh.

        Args:
            width: bytes of a number of the compute dtype.
        """
        if self.chunk:
            states = 2 * self.key_dim * self.value_dim // self.chunk
            of_heads = 3 * self.chunk + 5 * self.key_dim + 8 * self.value_dim + states
            return width * 6 * self.channels + max(4, width) * self.heads * of_heads
        of_heads = 4 * CHUNK_TOKENS + 6 * (self.key_dim + self.value_dim)
        return width * (6 * self.channels + 4 * self.heads * self.value_dim) + max(4, width) * self.heads * of_heads

    def state_bytes(self, width: int) -> int:
        """Bytes that one layer keeps of a sequence.

        Args:
            width: bytes of a number of the compute dtype.
        """
        return width * self.channels * self.taps + max(4, width) * self.heads * self.key_dim * self.value_dim


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
    keys = next((keys for keys in _SCANS if config.get(keys[0])), None)
    return MixerShape(attention_parameters) if keys is None else _scan(config, hidden, keys)


def _scan(config: Mapping[str, Any], hidden: int, keys: Sequence[str]) -> MixerShape:
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 7): each group of heads has its B and C."""
    heads, dim, groups, state, taps, chunk, conv_bias, bias = (config.get(key) for key in keys)
    heads, groups, state = int(heads), int(groups), int(state)
    dim = int(config["mamba_expand"]) * hidden // heads if dim == "auto" else int(dim)
    inner = heads * dim
    channels = inner + 2 * groups * state
    projected = inner + channels + heads
    norm = inner if config.get("mamba_rms_norm", True) else 0  # Falcon-H1 says whether it has one
    return MixerShape(
        parameters=hidden * projected + inner * hidden,
        linear=(("in_proj", hidden, projected), ("out_proj", inner, hidden)),
        extras=channels * (int(taps) + bool(conv_bias)) + 3 * heads + norm + bool(bias) * (projected + hidden),
        channels=channels,
        taps=int(taps),
        heads=heads,
        key_heads=groups,
        key_dim=state,
        value_dim=dim,
        chunk=int(chunk),
    )


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
    """Inner elements of a dense MLP: of LFM2, which states more (`block_auto_adjust_ff_dim`), as it makes them; of
    Granite without experts those of the one that all tokens pass."""
    if "shared_intermediate_size" in config and not config.get("num_local_experts"):
        return int(config["shared_intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim"):
        return stated
    width, multiple = int(2 * stated / 3), int(config.get("block_multiple_of") or 1)
    factor = config.get("block_ffn_dim_multiplier")
    return width if factor is None else -(-int(factor * width) // multiple) * multiple
