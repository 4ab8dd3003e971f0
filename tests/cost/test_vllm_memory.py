"""Room that vLLM makes, by hand."""

from __future__ import annotations

from dataclasses import replace

from plait.cost.estimate import model_shape
from plait.cost.vllm_memory import longest_sample, pool_tokens_of_vllm
from tests.recipes.test_engine_checks import recipe_of


def test_room_for_all_that_run_or_for_the_longest_alone() -> None:
    shape = replace(model_shape("llama-7b"), max_positions=4096)
    keys = {"sampling.max_running": 4, "sampling.max_response_tokens": 100}
    assert longest_sample(recipe_of(**keys), shape) == 4096
    assert pool_tokens_of_vllm(recipe_of(**keys), shape) == (32 + 4 + 1) * 128, "the longest takes 32 blocks"
    short = keys | {"data.max_prompt_tokens": 300}
    assert longest_sample(recipe_of(**short), shape) == 400
    assert pool_tokens_of_vllm(recipe_of(**short), shape) == (13 + 4 + 1) * 128, "4 samples of 400 take 13"
    on_gpu = recipe_of(**short, device="cuda")
    assert pool_tokens_of_vllm(on_gpu, shape) == (50 + 4 + 1) * 32, "in blocks of 32 tokens"
    bounded = short | {"sampling.kv_tokens": 640}
    assert pool_tokens_of_vllm(recipe_of(**bounded), shape) == (5 + 4 + 1) * 128
