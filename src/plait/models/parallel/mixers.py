"""How ranks of tensor parallelism divide the mixers of recurrent layers, which no plan of Transformers does.

A linear attention is divided between its key heads, Mamba-2 between its groups, a short convolution between its
channels. A *unit* is a key head with its value heads, a group with its heads, or a channel. A rank has whole units,
and of every parameter what belongs to them: of projections in one their rows in each part, taps of their channels,
their decays, their columns of the output projection. So the family's own code computes the rank's units as if there
were no others; their states are on this rank alone. Mamba-2 with one group has one B and one C for all
heads: it stays whole.

What goes in is copied (f), and what ranks give is summed (g), once for a row, outside the segments that the row is
computed in (`compute.segments`). The norm of heads is whole on every rank, which has a part of its gradient; that of
Mamba-2 has weights of each channel, and takes each group by itself.

    mixer             f before and g behind; the bias of its output projection is added once, after
    mixer_columns     cut along its outputs
    mixer_rows        cut along its inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from plait.models.compute.recurrent import mixers_of
from plait.models.module_names import wildcard
from plait.models.parallel.whole_experts import whole_experts

Widths = tuple[int, ...]
"""See `Param.widths`."""

_NORMS = ("norm", "o_norm")
_OUTPUTS = ("out_proj", "o_proj")
_SHORT_CONV: Mapping[str, Widths] = {"in_proj": (1, 1, 1), "conv": (1,), "out_proj": (1,)}

_ATTENTION = {f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {"self_attn.o_proj": "rowwise"}
_FEED_FORWARD = {f"feed_forward.{name}_proj": "colwise" for name in ("gate", "up")}
_FEED_FORWARD |= {"feed_forward.down_proj": "rowwise"}
_HEAD = {"lm_head": "colwise_gather_output"}
_LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "lfm2": {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.out_proj": "rowwise",
        "self_attn.q_layernorm": "replicated_with_grad_allreduce",
        "self_attn.k_layernorm": "replicated_with_grad_allreduce",
        "feed_forward.w1": "colwise",
        "feed_forward.w3": "colwise",
        "feed_forward.w2": "rowwise",
    },
    "granitemoehybrid": {
        **_ATTENTION,
        "shared_mlp.input_linear": "packed_colwise",
        "shared_mlp.output_linear": "rowwise",
    },
    "bamba": {**_ATTENTION, **_FEED_FORWARD},
    "falcon_h1": {**_ATTENTION, **_FEED_FORWARD},
    "nemotron_h": {
        "mixer.q_proj": "colwise",
        "mixer.k_proj": "colwise",
        "mixer.v_proj": "colwise",
        "mixer.o_proj": "rowwise",
        "mixer.up_proj": "colwise",
        "mixer.down_proj": "rowwise",
        "mixer.shared_experts.up_proj": "colwise",
        "mixer.shared_experts.down_proj": "rowwise",
    },
}
"""By the beginning of a family's name: styles of what its layers have beside mixers, where Transformers has none."""


def tp_plan(module: Any) -> Mapping[str, str]:
    """Style of modules and parameters, by names with `*` for numbers: Transformers' plan of a module, that of its
    experts where ranks have them whole, and that of its mixers, as far as their form is known here; others stay whole,
    or as Transformers says."""
    plan = dict(getattr(module, "tp_plan", None) or {})
    family = str(module.config.get_text_config().model_type)
    for beginning, styles in _LEFT_OUT.items():
        if family.startswith(beginning):
            layers = f"{module.base_model_prefix}.layers.*"
            plan = {f"{layers}.{name}": style for name, style in styles.items()} | _HEAD | plan
    plan |= whole_experts(module)
    for name, (_, widths) in divided_mixers(module).items():
        at = wildcard(name)
        plan[at] = "mixer"
        plan |= {f"{at}.{leaf}": "mixer_rows" if leaf in _OUTPUTS else "mixer_columns" for leaf in widths}
        plan |= {f"{at}.{leaf}": "replicated_with_grad_allreduce" for leaf in _NORMS if leaf not in widths}
    return plan


def widths_of(module: Any) -> dict[str, Widths]:
    """Name of a parameter, or of its layer → the widths that a unit has of it, for all parameters that mixers
    divide."""
    return {
        f"{name}.{leaf}": of_unit
        for name, (_, widths) in divided_mixers(module).items()
        for leaf, of_unit in widths.items()
    }


def keep_units(mixer: Any, count: int) -> None:
    """Tell a mixer, whose parameters are this rank's blocks by now, how many units it has."""
    conv = mixer.conv1d if hasattr(mixer, "conv1d") else mixer.conv
    conv.in_channels = conv.out_channels = conv.groups = len(conv.weight)
    if hasattr(mixer, "num_k_heads"):
        mixer.num_v_heads = count * mixer.num_v_heads // mixer.num_k_heads
        mixer.num_k_heads = count
        mixer.key_dim, mixer.value_dim = count * mixer.head_k_dim, mixer.num_v_heads * mixer.head_v_dim
        mixer.conv_dim = 2 * mixer.key_dim + mixer.value_dim
    elif hasattr(mixer, "ssm_state_size"):
        sections = [of_unit * count for of_unit in _of_group(mixer)["in_proj"]]
        if hasattr(mixer, "mup_vector"):  # of Falcon-H1: one factor for each part of the projection
            factors = mixer.mup_vector.split([width * mixer.n_groups // count for width in sections], dim=-1)
            parts = [of_part[..., :width] for of_part, width in zip(factors, sections, strict=True)]
            mixer.mup_vector = torch.cat(parts, dim=-1)
        if hasattr(mixer.norm, "n_groups"):
            mixer.norm.n_groups = count
        mixer.num_heads = count * mixer.num_heads // mixer.n_groups
        mixer.n_groups = count
        mixer.intermediate_size = mixer.num_heads * mixer.head_dim
        mixer.conv_dim = mixer.intermediate_size + 2 * count * mixer.ssm_state_size


def output_of(mixer: Any) -> Any:
    """Its output projection."""
    return mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj


def divided_mixers(module: Any) -> dict[str, tuple[Any, Mapping[str, Widths]]]:
    """Name of a mixer that is divided → itself, and what a unit has of each of its layers and parameters."""
    found = {}
    for name, mixer in mixers_of(module):
        widths = _widths(mixer)
        leaves = set(_leaves(mixer))
        if leaves <= {*widths, *_NORMS} and leaves & {*_OUTPUTS}:
            found[name] = mixer, {leaf: of_unit for leaf, of_unit in widths.items() if leaf in leaves}
    return found


def _leaves(mixer: nn.Module) -> Iterator[str]:
    """Parameters, and layers that have some."""
    yield from (name for name, _ in mixer.named_parameters(recurse=False))
    yield from (name for name, layer in mixer.named_children() if next(layer.parameters(), None) is not None)


def _widths(mixer: Any) -> Mapping[str, Widths]:
    """By the names that families give; empty: of none that is known."""
    if hasattr(mixer, "ssm_state_size"):
        return _of_group(mixer)
    if not hasattr(mixer, "num_k_heads"):
        return _SHORT_CONV if hasattr(mixer, "conv") else {}
    values, rest = divmod(mixer.num_v_heads, mixer.num_k_heads)
    if rest:
        return {}
    key, value = mixer.head_k_dim, values * mixer.head_v_dim
    joined, of_heads = (key, key, value), (values,)
    return {
        "conv1d": joined,
        "in_proj_qkv": joined,
        "in_proj_z": (value,),
        "in_proj_b": of_heads,
        "in_proj_a": of_heads,
        "in_proj_qkvz": (2 * (key + value),),
        "in_proj_ba": (2 * values,),
        "q_proj": (key,),
        "k_proj": (key,),
        "v_proj": (value,),
        "g_proj": (value,),
        "b_proj": of_heads,
        "a_proj": of_heads,
        "A_log": of_heads,
        "dt_bias": of_heads,
        "out_proj": (value,),
        "o_proj": (value,),
    }


def _of_group(mixer: Any) -> Mapping[str, Widths]:
    """What a group of Mamba-2 has, where there are several."""
    groups = getattr(mixer, "n_groups", 1)
    if groups == 1 or mixer.num_heads % groups:
        return {}
    heads = mixer.num_heads // groups
    inner, state = heads * mixer.head_dim, mixer.ssm_state_size
    return {
        "in_proj": (inner, inner, state, state, heads),
        "conv1d": (inner, state, state),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm": (inner,),
        "out_proj": (inner,),
    }
