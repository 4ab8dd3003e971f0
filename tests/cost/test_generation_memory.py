"""Bytes of keys and values, against those of published models."""

from __future__ import annotations

import pytest

from plait.cost.generation_memory import asked_tokens, kv_bytes_per_token
from plait.cost.lengths import Lengths
from plait.cost.shared_root import held_root, shared_root
from plait.models.files.known_shapes import KNOWN
from plait.models.shape import ModelShape
from tests.recipes.test_checks import recipe_of


def test_keys_and_values_of_published_models() -> None:
    """Two bytes of 2 * layers * hidden numbers; 2,097,152 tokens of 13B on 16 GPUs are 107 GB on each."""
    bytes_of = {
        size: kv_bytes_per_token(ModelShape.from_config(KNOWN[f"llama-2-{size}"]), "bfloat16") for size in ("7b", "13b")
    }
    assert bytes_of == {"7b": 524_288, "13b": 819_200}
    assert 1024 * 2048 / 16 * bytes_of["13b"] == pytest.approx(107.4e9, rel=1e-3)


def test_what_all_prompts_begin_with_is_held_once() -> None:
    """84 tokens are five blocks. Eight samples of 126 tokens hold 46 of their own each; with keys and values of older
    weights, or in another program, all of it."""
    prompts = Lengths.recorded((90, 110), root=84)
    assert (shared_root(recipe_of(), prompts), held_root(recipe_of(), prompts)) == (80, 80)
    keeps = recipe_of(partial_rollout="keep", max_staleness=1)
    assert (shared_root(keeps, prompts), held_root(keeps, prompts)) == (80, 0)
    assert shared_root(recipe_of(**{"sampling.engine": "vllm"}), prompts) == 0
    assert (asked_tokens(8, 126, 80), asked_tokens(8, 126, 0), asked_tokens(1, 126, 80)) == (80 + 8 * 46, 8 * 126, 126)
