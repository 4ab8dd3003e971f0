"""What the samples of a plan were drawn from, on each of its ranks. Torch-free."""

from __future__ import annotations

from plait.cost.kept_sets import NO_SETS, Filters, KeptSets, held_set_bytes, reads_sets, sets_of
from plait.cost.micro_batch import share_of
from plait.cost.placed import Facts
from plait.dataflow import CallKind, Node
from plait.recipes.role_models import RoleModel
from plait.schedule.plan import Mode


def held_sets(rank: int, facts: Facts) -> int:
    """Bytes of a CPU's memory (a GPU's samples are in its host's): the first rank, which runs the flow, has all
    samples, every other one its share of those that it draws, scores or trains on."""
    recipe, flow = facts.recipe, facts.flow
    if recipe.device != "cpu" or not recipe.sampling.filters:
        return 0
    drawn = [_held(facts, node, 1) for node in flow.of_kind(CallKind.GENERATE)]
    shares = [0, (1 + recipe.max_staleness) * sum(drawn)] if rank == 0 else [0]
    for model in facts.models:
        place = facts.places[model.role]
        for node in flow.calls(model.role):
            if node.kind is CallKind.GENERATE and place.drawing_on(rank) is not None:
                shares.append(_held(facts, node, len(place.drawing)))
            layout = place.train if node.kind is CallKind.TRAIN else place.score if reads_sets(node) else None
            if layout is not None and rank in layout.mesh.ranks:
                shares.append(_held(facts, node, layout.parallelism.dp))
    return max(shares)


def sets_read(facts: Facts, model: RoleModel, mode: Mode) -> KeptSets:
    """Of the calls of a role that train or score those of the largest."""
    kind = CallKind.TRAIN if mode == "train" else CallKind.SCORE
    calls = [node for node in facts.flow.calls(model.role) if node.kind is kind and not model.scalar]
    sets = [_sets(facts, node) for node in calls if mode == "train" or reads_sets(node)]
    return max(sets, key=lambda kept: kept.tokens, default=NO_SETS)


def _sets(facts: Facts, node: Node) -> KeptSets:
    names = {model.role: model.name for model in facts.models}
    vocabulary = lambda role: facts.shapes[names[role]].vocabulary
    return sets_of(facts.flow, node, Filters.of(facts.recipe.sampling), vocabulary)


def _held(facts: Facts, node: Node, copies: int) -> int:
    """Of one of so many copies or instances."""
    rows, recipe, sets = facts.flow.nodes[node.rows], facts.recipe, _sets(facts, node)
    if sets == NO_SETS:
        return 0
    per_prompt = rows.generation.num_samples(recipe.samples_per_prompt)
    together = per_prompt if node.kind is CallKind.GENERATE else 1
    share = share_of(recipe.prompts_per_step * per_prompt, 1, copies, together)
    return held_set_bytes(sets, share, recipe.sampling.max_response_tokens)
