"""Keys and values of samples that stand still between two versions of the weights (`partial_rollout: keep`), in memory
of the host. Torch-free."""

from __future__ import annotations

from plait.cost.call_memory import cached_bytes, pool_of
from plait.cost.placed import Facts

PARKED = "parked samples"


def parked_bytes(rank: int, facts: Facts) -> int:
    """At most, of the engines of a rank: of all that they run when new weights come, as long as each may be, and its
    prompt in every sample; with `tokens_per_version` of all samples of later batches, as long as these may be by then.
    """
    recipe, total = facts.recipe, 0
    if recipe.partial_rollout != "keep":
        return 0
    for model in facts.models:
        instance = facts.places[model.role].drawing_on(rank)
        pool = None if instance is None else pool_of(facts, model, draws=True)
        if instance is None or pool is None or not model.trained:
            continue
        samples, context = pool.running, pool.context
        if recipe.tokens_per_version:
            said = recipe.sampling.max_response_tokens
            samples = recipe.max_staleness * pool.samples
            context -= said - min(said, recipe.max_staleness * recipe.tokens_per_version)
        total += samples * context * cached_bytes(rank, facts, model, instance)
    return total
