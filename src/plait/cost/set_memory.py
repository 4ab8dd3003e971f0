"""What the samples of a plan were drawn from, on each of its ranks. Torch-free."""

from __future__ import annotations

from plait.cost.kept_sets import NO_SETS, reads_sets
from plait.cost.placed import Facts
from plait.cost.sample_sets import share_bytes
from plait.cost.workload import Samples
from plait.dataflow import CallKind, Node
from plait.dataflow.made_rows import prompts_each


def held_sets(rank: int, facts: Facts) -> int:
    """Bytes of a CPU's memory (a GPU's samples are in its host's): the first rank, which runs the flow, has all
    samples, every other one its share of those that it draws, scores or trains on."""
    recipe, flow = facts.recipe, facts.flow
    if recipe.device != "cpu" or not (recipe.sampling.filters or recipe.sampling.router_replay):
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


def _held(facts: Facts, node: Node, copies: int) -> int:
    """Bytes of what one of so many copies or instances has of a call."""
    rows, recipe, sets = facts.flow.nodes[node.rows], facts.recipe, facts.sets_of(node)
    if sets == NO_SETS:
        return 0
    count, most = recipe.samples_per_prompt, rows.generation.limit(recipe.sampling.max_response_tokens)
    prompts = recipe.prompts_per_step * prompts_each(facts.flow, rows, count)
    samples = Samples(prompts, rows.generation.num_samples(count))
    longest = facts.lengths_of[node.id].prompts.longest, most
    return share_bytes(node, samples, sets, copies, longest)
