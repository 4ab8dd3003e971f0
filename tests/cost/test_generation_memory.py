"""Bytes of keys and values, against those of published models."""

from __future__ import annotations

import pytest

from plait.cost.generation_memory import kv_bytes_per_token
from plait.models.files.known_shapes import KNOWN
from plait.models.shape import ModelShape


def test_keys_and_values_of_published_models() -> None:
    """Two bytes of 2 * layers * hidden numbers; 2,097,152 tokens of 13B on 16 GPUs are 107 GB on each."""
    bytes_of = {
        size: kv_bytes_per_token(ModelShape.from_config(KNOWN[f"llama-2-{size}"]), "bfloat16") for size in ("7b", "13b")
    }
    assert bytes_of == {"7b": 524_288, "13b": 819_200}
    assert 1024 * 2048 / 16 * bytes_of["13b"] == pytest.approx(107.4e9, rel=1e-3)
