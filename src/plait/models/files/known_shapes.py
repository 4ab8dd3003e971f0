"""Models by shape alone: the configurations of well-known families, for plans and forecasts without any weights.

A configuration has the keys of a `config.json`, with the numbers that the models' publishers state. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import ModelError
from plait.models.files.claims import check_config, read_configuration
from plait.paths import at_home

_ROWS: Mapping[str, tuple[tuple[str, int, int, int, int, int], ...]] = {
    # name, layers, hidden, intermediate, heads, key-value heads
    "llama": (
        ("llama-7b", 32, 4096, 11008, 32, 32),
        ("llama-13b", 40, 5120, 13824, 40, 40),
        ("llama-33b", 60, 6656, 17920, 52, 52),
        ("llama-65b", 80, 8192, 22016, 64, 64),
    ),
    "llama-2": (
        ("llama-2-7b", 32, 4096, 11008, 32, 32),
        ("llama-2-13b", 40, 5120, 13824, 40, 40),
        ("llama-2-70b", 80, 8192, 28672, 64, 8),
    ),
    "codellama": (("codellama-34b", 48, 8192, 22016, 64, 8),),
    "llama-3": (
        ("llama-3-8b", 32, 4096, 14336, 32, 8),
        ("llama-3-70b", 80, 8192, 28672, 64, 8),
    ),
    "qwen2.5-small": (
        ("qwen2.5-0.5b", 24, 896, 4864, 14, 2),
        ("qwen2.5-1.5b", 28, 1536, 8960, 12, 2),
        ("qwen2.5-3b", 36, 2048, 11008, 16, 2),
    ),
    "qwen2.5": (
        ("qwen2.5-7b", 28, 3584, 18944, 28, 4),
        ("qwen2.5-14b", 48, 5120, 13824, 40, 8),
        ("qwen2.5-32b", 64, 5120, 27648, 40, 8),
        ("qwen2.5-72b", 80, 8192, 29568, 64, 8),
    ),
    "qwen3-small": (
        ("qwen3-0.6b", 28, 1024, 3072, 16, 8),
        ("qwen3-1.7b", 28, 2048, 6144, 16, 8),
        ("qwen3-4b", 36, 2560, 9728, 32, 8),
    ),
    "qwen3": (
        ("qwen3-8b", 36, 4096, 12288, 32, 8),
        ("qwen3-14b", 40, 5120, 17408, 40, 8),
        ("qwen3-32b", 64, 5120, 25600, 64, 8),
    ),
    "smollm2": (
        ("smollm2-135m", 30, 576, 1536, 9, 3),
        ("smollm2-360m", 32, 960, 2560, 15, 5),
        ("smollm2-1.7b", 24, 2048, 8192, 32, 32),
    ),
}

_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048},
    "llama-2": {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096},
    "codellama": {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 16384},
    "llama-3": {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192},
    "qwen2.5-small": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen2.5": {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 32768},
    "qwen3-small": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "head_dim": 128,
    },
    "qwen3": {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128},
    "smollm2": {
        "model_type": "llama",
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def _config(family: str, row: tuple[str, int, int, int, int, int]) -> dict[str, Any]:
    _, layers, hidden, intermediate, heads, kv_heads = row
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return {"tie_word_embeddings": False, **_FAMILIES[family], **sizes}


KNOWN: Mapping[str, Mapping[str, Any]] = {
    row[0]: _config(family, row) for family, rows in _ROWS.items() for row in rows
}
"""Name → configuration."""


def is_shape(name: str) -> bool:
    """Whether a model's name means its shape alone: one of KNOWN, or the file `config.json` itself, of any name.

    Raises:
        ConfigError: as of `paths.at_home`.
    """
    return name in KNOWN or (name.endswith(".json") and os.path.isfile(at_home(name, "model")))


def shape_config(name: str) -> dict[str, Any]:
    """The configuration of a name for which `is_shape` holds.

    Raises:
        ModelError: the file cannot be read, or is none of a model.
    """
    if name in KNOWN:
        return dict(KNOWN[name])
    config = read_configuration(Path(at_home(name, "model")))
    check_config(config, name)
    return config


def no_weights(name: str, key: str = "model") -> ModelError:
    """The error of a shape that is asked for weights or a tokenizer.

    Args:
        key: of the recipe, where the name stands.
    """
    what = "a configuration file" if name.endswith(".json") else "known by its shape alone"
    beside = "" if key == "model" else ", where `model` is such a one, too"
    return ModelError(
        f"{key}: {name!r} is {what}, without weights or a tokenizer; forecasts and dry runs take it{beside}, anything "
        f"that computes needs a model: set `{key}` to a local folder or a hub id"
    )
