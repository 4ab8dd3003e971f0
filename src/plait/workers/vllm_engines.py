"""Opens vLLM for a role of this rank: what it is to make room for follows from the recipe and the model."""

from __future__ import annotations

import torch

from plait.cost.estimate import model_shape
from plait.cost.generation_memory import kv_bytes_per_token
from plait.models.files import hub
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape
from plait.observe.loading import loading as say_loading
from plait.policy.blocks import BLOCK_TOKENS as OWN_BLOCK_TOKENS
from plait.recipes.checks import prompt_limit
from plait.recipes.recipe import Recipe
from plait.schedule.placements import WHOLE
from plait.vllm.engine import VllmEngine, start_vllm
from plait.vllm.messages import Loading
from plait.workers.rank_state import RankState

PROMPT_TOKENS = 512
"""Expected of a prompt when room is made, where the recipe sets no limit. Longer ones fit, too."""
BLOCK_TOKENS = 128
"""Of a block of vLLM on a CPU; the last one of a sample is half empty."""


def open_vllm(rank_state: RankState, role: str) -> VllmEngine:
    """See `VllmEngine`, also for what is raised."""
    recipe, part = rank_state.recipe, rank_state.roles[role]
    model = part.parts[WHOLE]
    assert isinstance(model, LanguageModel), f"role {role} generates with a scalar model"
    loading = loading_of(recipe, part.role_model.name, model_shape(part.role_model.name))

    def weights() -> dict[str, torch.Tensor]:
        return rank_state.gather(role).export(model.dtype).state

    say_loading("vLLM, in a process of its own")
    start = start_vllm(torch.get_num_threads(), recipe.freeze_after_s)
    return VllmEngine(role, model, weights, loading, start)


def loading_of(recipe: Recipe, name: str, shape: ModelShape) -> Loading:
    """What vLLM makes room for: the longest prompt with its response, and all samples that run at a time, as long as
    they are expected to be; no more than `sampling.kv_tokens`.

    Raises:
        ConfigError: prompt and response do not fit the model, or its keys and values.
    """
    sampling = recipe.sampling
    longest = prompt_limit(recipe, shape) + sampling.max_response_tokens
    expected = (recipe.data.max_prompt_tokens or PROMPT_TOKENS) + sampling.max_response_tokens
    held = sampling.num_blocks(shape.max_positions) * OWN_BLOCK_TOKENS
    tokens = max(longest, min(held, sampling.max_running * expected))
    blocks = -(-tokens // BLOCK_TOKENS) + sampling.max_running + 1
    return Loading(
        folder=str(hub.resolve(name)),
        dtype=recipe.dtype.value,
        max_tokens=longest,
        max_running=sampling.max_running,
        max_prefill_tokens=sampling.max_prefill_tokens,
        kv_bytes=blocks * BLOCK_TOKENS * kv_bytes_per_token(shape, recipe.dtype.value),
        device=recipe.device,
    )
