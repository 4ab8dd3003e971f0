"""What a step would take with another value of a key that no search may choose: how old samples may be changes what is
learnt, and what drafts gain is known from runs alone. Predicted beside the recipe's own, which stays as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from plait.errors import UserError
from plait.recipes.engine_checks import speculates
from plait.recipes.recipe import Recipe
from plait.runtime.prediction.choosing import PredictedPlan
from plait.runtime.prediction.draft_forecast import known_draft_forecast
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline

SHARE = 4
"""A variant is searched so many times shorter than the recipe itself."""
Keys = Mapping[str, Any]


def variants(planning: Planning, predict: Callable[[Planning], PredictedPlan]) -> tuple[PredictedPlan, ...]:
    """By title; those are left out that the flow, the engine or the memory does not allow.

    Args:
        predict: a variant's plan.
    """
    allowed = []
    for title, keys in _changes(planning):
        with contextlib.suppress(UserError):
            allowed.append(replace(predict(_changed(planning, keys)), name=title))
    return tuple(allowed)


def _changes(planning: Planning) -> Iterator[tuple[str, Keys]]:
    """Title → the keys with their values. Of samples that may be older than one version a step takes as long."""
    recipe, profile = planning.recipe, planning.calibration.profile
    if recipe.max_staleness == 0:
        yield "with max_staleness 1", {"max_staleness": 1}
    else:
        yield "with max_staleness 0", {"max_staleness": 0, "partial_rollout": "off", "tokens_per_version": 0}
    sampling = recipe.sampling.model_dump(mode="json")
    if known_draft_forecast(recipe.sampling, profile, planning.drafts, planning.acceptance) is None:
        return
    if recipe.sampling.speculation == "off":
        with_auto = recipe.model_copy(update={"sampling": recipe.sampling.model_copy(update={"speculation": "auto"})})
        length = "auto" if speculates(with_auto) else "adaptive"
        yield f"with sampling.speculation {length}", {"sampling": sampling | {"speculation": length}}
    elif not speculates(recipe):
        yield "with sampling.speculation adaptive", {"sampling": sampling | {"speculation": "adaptive"}}
    else:
        yield "with sampling.speculation off", {"sampling": sampling | {"speculation": "off", "draft_model": None}}


def _changed(planning: Planning, keys: Keys) -> Planning:
    """Raises UserError where the recipe does not go with them."""
    stated = planning.recipe.model_dump(mode="json", exclude_unset=True)
    recipe = Recipe.model_validate(stated | dict(keys))
    memory = planning.cluster.device.memory_bytes
    run = outline(recipe, to_come=planning.to_come, device_memory=memory)
    return replace(planning, recipe=run.recipe, flow=run.flow, models=run.models, shapes=run.shapes)
