"""What a step does for batches that are generated ahead of their own (`max_staleness`)."""

from __future__ import annotations

from plait.dataflow import Dataflow
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import role_models, unchanging
from plait.schedule.needs import early_scores, needs_of


def scores_ahead(flow: Dataflow, recipe: Recipe) -> frozenset[int] | None:
    """Ids of the calls whose models score samples in the step that draws them; None: all do, as nothing is generated
    ahead. The others have all samples when their step begins. Where samples may go on with new weights, that is all of
    them. What functions say is added to what models say in the batch's own step."""
    if recipe.max_staleness == 0:
        return None
    if not recipe.update_rule.waits:
        return frozenset()
    models = role_models(flow, recipe)
    rewards = {*flow.roles} - {model.role for model in models if not model.is_reward}
    return early_scores(flow, needs_of(flow, rewards), unchanging(models))
