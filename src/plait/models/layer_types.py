"""What each decoder layer of a model is, by its configuration: attention, a recurrent layer, an MLP alone;
with which window it attends, and whether it is a mixture of experts. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers (`layer_types`) that keep a state of one size, most of them in place of keys and values."""

ATTENDING_LAYERS = frozenset({"full_attention", "sliding_attention", "hybrid"})
"""Kinds that have keys and values; the layers of Falcon-H1 are of both."""

MLP_LAYERS = frozenset({"mlp", "moe"})
"""Kinds that are an MLP, or a mixture of experts, alone: where there are such (Nemotron-H), no other layer has any."""

_ATTENDS_EVERY = ("qwen3_next", "qwen3_5", "olmo_hybrid")
"""Families of which every fourth layer attends (`full_attention_interval`) and the others keep a state, where the
configuration names no kinds."""

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Kinds by the letters that Nemotron-H gave them before."""

_LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds by the names that configurations gave them before."""

_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4}
"""Family → of so many layers the last one sees all, the others have a window."""
_WINDOWED = ("ministral", "mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2")
"""Families whose layers all have the window."""


def kinds_of_layers(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The kind of each layer of a `config.json`; where it names none, of families with recurrent layers the
    kinds that Transformers gives them. Empty: nobody says."""
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return tuple(_LEGACY.get(kind, kind) for kind in kinds)
    family = str(config.get("model_type"))
    if family.startswith(_ATTENDS_EVERY):
        every = int(config.get("full_attention_interval") or 4)
        attending = set(range(every - 1, layers, every))
        if family == "olmo_hybrid" and not attending:
            attending = {layers - 1}
        state = "linear_attention"
    elif family == "lfm2" and (stated := config.get("full_attn_idxs")) is not None:
        attending, state = set(stated), "conv"
    elif family == "falcon_h1":
        return ("hybrid",) * layers
    elif pattern := config.get("hybrid_override_pattern"):
        return tuple(_PATTERN.get(letter, letter) for letter in pattern)
    elif family == "bamba":
        attending, state = set(config.get("attn_layer_indices") or ()), "linear_attention"
    else:
        return ()
    return tuple("full_attention" if layer in attending else state for layer in range(layers))


def stating_kinds(family: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Keys by which a configuration of this family states that its layers are of these kinds."""
    if family == "bamba":
        return {"attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind in ATTENDING_LAYERS]}
    return {} if family == "falcon_h1" else {"layer_types": list(kinds)}


def recurrent_layers(kinds: Sequence[str] | None) -> tuple[int, ...]:
    """Those of the layers of these kinds that are recurrent."""
    return tuple(layer for layer, kind in enumerate(kinds or ()) if kind in RECURRENT_LAYERS)


def attending_layers(kinds: Sequence[str] | None, layers: int) -> tuple[int, ...]:
    """Those of so many layers that have keys and values; all, where nobody says what they are."""
    others = (RECURRENT_LAYERS | MLP_LAYERS) - ATTENDING_LAYERS
    return tuple(layer for layer in range(layers) if not kinds or kinds[layer] not in others)


def layers_without_mlp(kinds: Sequence[str]) -> tuple[int, ...]:
    """Those of the layers of these kinds that have no MLP, ascending."""
    if not MLP_LAYERS.intersection(kinds):
        return ()
    return tuple(layer for layer, kind in enumerate(kinds) if kind not in MLP_LAYERS)


def mixtures_of(config: Mapping[str, Any], layers: int, kinds: Sequence[str]) -> tuple[int, ...]:
    """Layers whose MLP is a mixture of experts, of a family that has any."""
    if "moe" in kinds:
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "moe")
    if kinds := config.get("mlp_layer_types"):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    first = int(config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0)
    step = int(config.get("decoder_sparse_step") or 1)
    dense = config.get("mlp_only_layers") or ()
    return tuple(layer for layer in range(layers) if layer >= first and (layer + 1) % step == 0 and layer not in dense)


def windows_of(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Where the configuration does not say which layers have its window, those to which Transformers gives it; none of
    a family whose rule is not known here, so that no more is counted out than is out of sight."""
    family, window = str(config.get("model_type")), int(config.get("sliding_window") or 0)
    if not window or not config.get("use_sliding_window", not family.startswith("qwen")):
        return ()
    if kinds := config.get("layer_types"):
        has_window = [kinds[layer] == "sliding_attention" for layer in range(layers)]
    elif step := _FULL_EVERY.get(family):
        step = int(config.get("sliding_window_pattern") or step)
        has_window = [(layer + 1) % step != 0 for layer in range(layers)]
    elif family in ("qwen2", "qwen3"):
        has_window = [layer >= _first_window(config) for layer in range(layers)]
    elif family == "qwen2_moe":
        has_window = [layer % 2 == 0 and layer < _first_window(config) for layer in range(layers)]
    else:
        has_window = [family in _WINDOWED] * layers
    return tuple(window * has for has in has_window) if any(has_window) else ()


def _first_window(config: Mapping[str, Any]) -> int:
    return int(config.get("max_window_layers", 28))
