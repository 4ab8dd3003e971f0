"""What the small files of a checkpoint claim, held against each other and against the tensors that are stored.

A config.json that claims fewer layers than there are weights for would cut the model without a word, a token that ends
responses and is none of the vocabulary would never come, and a size out of all reason would take the machine's memory
before anything is loaded. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plait.errors import ModelError
from plait.json_text import Malformed, kind_of, parse
from plait.models.files.tensor_file import read_header

SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Which a checkpoint may have beside its config.json, each an object."""

_MOST = {
    ("num_hidden_layers", "n_layer", "num_layers"): 2048,
    ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "moe_intermediate_size"): 1 << 20,
    ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "head_dim"): 1 << 16,
    ("vocab_size",): 1 << 26,
    ("max_position_embeddings", "n_positions", "max_sequence_length"): 1 << 31,
    ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"): 1 << 16,
}
_OF_LAYERS = frozenset({"intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"})
"""Keys of which some families state one number for each layer."""
_KINDS: dict[str, tuple[str, type]] = {
    "model_type": ("the name of a family", str),
    "architectures": ("a list of names of classes", list),
    "text_config": ("a map of keys", dict),
    "rope_scaling": ("a map of keys", dict),
    "rope_parameters": ("a map of keys", dict),
    "quantization_config": ("a map of keys", dict),
}
UNDONE = ("fp8", "mxfp4", "mxfp8")
"""Quantisations (`quant_method`) that Transformers undoes while it reads the weights."""
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings)\.weight")
_LAYER = re.compile(r"((?:[a-z_]+\.)*?(?:layers|h|blocks))\.(\d+)\.")


def check_config(config: Mapping[str, Any], name: str) -> None:
    """Raises ModelError where what config.json states is not of its kind, a size is beyond reason, heads are in groups
    of unequal sizes, the weights are quantised for good, or they are in a file of another name."""
    for key, (expected, kind) in _KINDS.items():
        value = config.get(key)
        if value is not None and not (isinstance(value, kind) and (kind is not list or _all_texts(value))):
            raise ModelError(
                f"model: the config.json of {name!r} states `{key}` {value!r:.80}; expected {expected}; fetch or copy "
                "it again, or set `model` to another."
            )
    if (file := config.get("transformers_weights")) is not None:
        raise ModelError(
            f"model: the config.json of {name!r} states that its weights are in {file!r:.80} (`transformers_weights`); "
            "expected model.safetensors or its index; name it so and leave the key out, or set `model` to another."
        )
    if (quantised := config.get("quantization_config")) and (method := quantised.get("quant_method")) not in UNDONE:
        raise ModelError(
            f"model: the weights of {name!r} are quantised (`quantization_config` of its config.json: "
            f"{method or 'of no stated method'}); plait computes with unquantised weights, which it can read from "
            f"{' and '.join(UNDONE)} only. Set `model` to the checkpoint that these weights were made from."
        )
    for part in _parts(config):
        for keys, most in _MOST.items():
            for key in keys:
                value = part.get(key)
                sizes = value if isinstance(value, list) and value and key in _OF_LAYERS else [value]
                if value is not None and not all(type(size) is int and 0 <= size <= most for size in sizes):
                    raise ModelError(
                        f"model: the config.json of {name!r} states `{key}` {value!r:.80}; expected a whole number up "
                        f"to {most:,}; fetch or copy it again, or set `model` to another."
                    )
        heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if heads and groups is not None and (groups == 0 or heads % groups):
            raise ModelError(
                f"model: the config.json of {name!r} states {heads} heads (`num_attention_heads`) and {groups} for keys"
                " and values (`num_key_value_heads`), which should divide them; correct it, or set `model` to another."
            )


def check_files(folder: Path, files: Iterable[str], config: Mapping[str, Any], name: str) -> None:
    """Hold what the folder's files say against each other.

    Args:
        files: those that hold tensors.
        config: its config.json, which `check_config` has seen.
        name: of the model, for messages.

    Raises:
        ModelError: a file is no object in JSON; an end token is none of the vocabulary; the tensors are of more layers,
            or of another vocabulary or width, than config.json says.
    """
    small = {file: read_object(folder / file) for file in SMALL_FILES if (folder / file).is_file()}
    text = _parts(config)[-1]
    vocabulary = text.get("vocab_size")
    for file, settings in (("config.json", text), ("generation_config.json", small.get("generation_config.json", {}))):
        _check_end(folder / file, settings.get("eos_token_id"), vocabulary)
    shapes = {key: entry["shape"] for file in files for key, entry in read_header(folder / file).items()}
    _check_layers(text, shapes, name)
    _check_embedding(text, shapes, name)


def read_configuration(path: Path) -> dict[str, Any]:
    """A config.json, in which the limits of Mamba-2's time steps (`time_step_limit`) may be infinite: as Python writes
    it, or as Transformers does, which JSON knows.

    Raises:
        ModelError: it is no object in JSON, or holds another number that is not finite.
    """
    values = read_object(path, finite=False)
    for part in (values, values.get("text_config")):
        if isinstance(part, dict) and isinstance(limits := part.get(_LIMITS), list):
            part[_LIMITS] = [_TAGGED.get(str(limit), limit) for limit in limits]
    if (key := _not_finite(values)) is not None:
        raise ModelError(f"model: {path} should hold a finite number in `{key}`; fetch or copy it again.")
    return values


_LIMITS = "time_step_limit"
_TAGGED = {str({"__float__": word}): float(word) for word in ("Infinity", "-Infinity")}
"""As Transformers writes them."""


def _not_finite(values: Any, key: str = "") -> str | None:
    """The key of a number that is not finite, other than those limits."""
    if isinstance(values, float):
        return None if math.isfinite(values) else key
    items = values.items() if isinstance(values, dict) else [(key, value) for value in values or ()]
    parts = ((name, value) for name, value in items if name != _LIMITS and isinstance(value, float | dict | list))
    return next((found for name, value in parts if (found := _not_finite(value, name)) is not None), None)


def read_object(path: Path, *, finite: bool = True) -> dict[str, Any]:
    """Raises ModelError where a file of a checkpoint is no object in JSON. finite: see `json_text.parse`."""
    try:
        values = parse(path.read_bytes(), finite=finite)
    except OSError as error:
        raise ModelError(f"model: {path.parent} should hold a readable {path.name}: {error.strerror}") from error
    except Malformed as error:
        raise ModelError(f"model: {path} should hold a JSON object: {error}; fetch or copy it again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"model: {path} should hold a JSON object, found {kind_of(values)}.")
    return values


def _all_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configuration and, of a composite model, the text model's part of it."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, Mapping) else [config]


def _check_end(path: Path, ends: Any, vocabulary: Any) -> None:
    for end in ends if isinstance(ends, list) else [ends]:
        if end is None:
            continue
        if type(end) is not int or end < 0 or (type(vocabulary) is int and end >= vocabulary):
            raise ModelError(
                f"model: {path} states the end token (`eos_token_id`) {end!r:.80}; expected the id of a token, "
                f"from 0 to below the {vocabulary} of the vocabulary; correct the file, or set `model` to another."
            )


def _check_layers(text: Mapping[str, Any], shapes: Mapping[str, Any], name: str) -> None:
    stated = next((text[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if text.get(key)), None)
    layers = [match for key in shapes if (match := _LAYER.match(key))]
    # With several stacks of layers (an encoder of images) the names do not say which the configuration means.
    if stated is None or len({match[1] for match in layers}) != 1:
        return
    num_layers = 1 + max(int(match[2]) for match in layers)
    further = text.get("num_nextn_predict_layers") or 0  # which only predict tokens ahead
    if num_layers > stated + (further if type(further) is int else 0):
        raise ModelError(
            f"model: the config.json of {name!r} states {stated} layers, but its weights have {num_layers}: "
            "layers would be dropped. Correct `num_hidden_layers`, or set `model` to another."
        )


def _check_embedding(text: Mapping[str, Any], shapes: Mapping[str, Any], name: str) -> None:
    embeddings = [shape for key, shape in shapes.items() if _EMBEDDING.fullmatch(key)]
    width = text.get("hidden_size") or text.get("n_embd") or text.get("d_model")
    stated = [text.get("vocab_size"), width]
    if len(embeddings) != 1 or len(embeddings[0]) != 2 or None in stated:
        return
    if text.get("word_embed_proj_dim") or text.get("embedding_size"):
        return  # families that embed in a width of its own
    if embeddings[0] != stated:
        raise ModelError(
            f"model: the config.json of {name!r} states a vocabulary of {stated[0]} and a width of {stated[1]}, but "
            f"its weights embed {embeddings[0][0]} tokens in a width of {embeddings[0][1]}; correct one of "
            "them, or set `model` to another."
        )
