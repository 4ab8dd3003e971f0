"""Opens vLLM for a role of this rank: what it is to make room for follows from the recipe and the model."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from plait.cost.estimate import model_shape
from plait.cost.generation_memory import kv_bytes_per_token
from plait.cost.vllm_memory import pool_tokens_of_vllm
from plait.models.files import hub
from plait.models.files.adapter_folder import adapter_of
from plait.models.language_model import LanguageModel
from plait.models.shape import ModelShape
from plait.observe.loading import loading as say_loading
from plait.recipes.length_limits import longest_sample
from plait.recipes.recipe import Recipe
from plait.schedule.placements import WHOLE
from plait.vllm.engine import VllmEngine
from plait.vllm.messages import Loading
from plait.vllm.process import start_vllm
from plait.workers.announcer import Announcer


def open_vllm(announcer: Announcer, role: str, ends: ExitStack) -> VllmEngine:
    """See `VllmEngine`, also for what is raised.

    Args:
        ends: its process ends with it.
    """
    rank_state = announcer.rank_state
    recipe, role_state = rank_state.recipe, rank_state.roles[role]
    model = role_state.parts[WHOLE]
    assert isinstance(model, LanguageModel), f"role {role} generates with a scalar model"
    loading = loading_of(recipe, role_state.role_model.name, model_shape(role_state.role_model.name))

    def weights() -> dict[str, torch.Tensor]:
        return rank_state.gather(role).export(model.dtype).state

    say_loading("vLLM, in a process of its own")
    start = start_vllm(recipe.device, torch.get_num_threads(), recipe.freeze_after_s)
    engine = VllmEngine(role, model, weights, loading, start)
    ends.callback(engine.close)
    return engine


def loading_of(recipe: Recipe, name: str, shape: ModelShape) -> Loading:
    """What vLLM is to make room for. Raises ConfigError: prompt and response do not fit the model."""
    sampling = recipe.sampling
    return Loading(
        folder=str(hub.resolve(name if (adapter := adapter_of(name)) is None else adapter.base)),
        dtype=recipe.dtype.value,
        max_tokens=longest_sample(recipe, shape),
        max_running=sampling.max_running,
        max_prefill_tokens=sampling.max_prefill_tokens,
        kv_bytes=pool_tokens_of_vllm(recipe, shape) * kv_bytes_per_token(shape, recipe.dtype.value),
        device=recipe.device,
    )
