"""What does not go with models whose layers are recurrent (`ModelShape.recurrent`): refused before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError
from plait.models.mixer_shape import DELTA_RULE_LIBRARY, KEEPS_STATE
from plait.models.shape import ModelShape
from plait.observe.loading import loading
from plait.recipes.engine_checks import none_by_layers
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.plan import Plan


def with_states(
    recipe: Recipe, flow: Dataflow, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]
) -> Recipe:
    """The recipe, of which nothing is drafted by itself where such a model draws samples.

    Args:
        shapes: by the model's name.

    Raises:
        ConfigError: it asks for what such a model cannot do.
    """
    if not flow.of_kind(CallKind.GENERATE):
        return recipe
    sampling = recipe.sampling
    drafts = sampling.draft_model
    if drafts is not None and shapes[drafts].recurrent:
        said = _said(drafts, shapes)
        raise ConfigError(
            f"key `sampling.draft_model`: {said}: their states cannot be rolled back where draft tokens are rejected; "
            "give another"
        )
    drawing = [m for m in models if "generate" in flow.call_kinds(m.role) and shapes[m.name].recurrent]
    if not drawing:
        return recipe
    taken_back = "whose states cannot be rolled back where draft tokens are rejected"
    demands = (
        ("sampling.draft_model", drafts, None, taken_back, "leave it out"),
        ("sampling.speculation", sampling.speculation, ("auto", "off"), taken_back, "set it to auto or off"),
        ("sampling.prefix_cache_tokens", sampling.prefix_cache_tokens, 0, "whose states are not cached", "set it to 0"),
        (
            "partial_rollout",
            recipe.partial_rollout,
            ("off", "recompute"),
            "whose states cannot be kept for other weights",
            "set it to recompute",
        ),
        ("rebalance", recipe.rebalance, "off", "whose states cannot migrate", "set it to off"),
    )
    for key, value, allowed, why, remedy in demands:
        if value != allowed and value not in (allowed if isinstance(allowed, tuple) else ()):
            said = _said(drawing[0].name, shapes)
            raise ConfigError(f"`{key}` is {value}, but {said}, {why}; {remedy}, or set `{drawing[0].key}` to another")
    if sampling.speculation == "auto":
        loading(f"speculative decoding: {none_by_layers('sampling.speculation', KEEPS_STATE)}")
    return recipe.model_copy(update={"sampling": sampling.model_copy(update={"speculation": "off"})})


def check_kernels(recipe: Recipe, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]) -> None:
    """Raises ConfigError where a GPU would compute a model's linear attention by a library that takes no float32.

    Args:
        shapes: by the model's name.
    """
    if recipe.device == "cpu" or recipe.dtype != "float32" or find_spec(DELTA_RULE_LIBRARY) is None:
        return
    for model in models:
        if shapes[model.name].recurrent and shapes[model.name].mixer.by_delta_rule:
            raise ConfigError(
                f"`dtype` is float32, but flash-linear-attention, which is installed, computes the linear attention of "
                f"`{model.name}` on GPUs, and takes no float32; set it to bfloat16, or uninstall flash-linear-attention"
            )


def check_prompts(plan: Plan, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape], label: str) -> None:
    """Raises ConfigError, which begins with `label`, where a completed plan computes the prompts of such a model
    elsewhere than its samples."""
    names = {model.role: model.name for model in models}
    for placement in plan.placements:
        name = names[placement.role]
        if placement.mode == "prefill" and shapes[name].recurrent:
            raise ConfigError(
                f"{label}: {placement.call} computes its prompts on other ranks (`mode` prefill) than its samples, but "
                f"{_said(name, shapes)}, which does not move; leave prefill out of the plan"
            )


def _said(name: str, shapes: Mapping[str, ModelShape]) -> str:
    shape = shapes[name]
    return f"{len(shape.recurrent)} of the {shape.layers} layers of `{name}` are recurrent"
