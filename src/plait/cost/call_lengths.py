"""Numbers of tokens of what each call of a flow makes or reads, those included that nobody knows before. Torch-free."""

from __future__ import annotations

from plait.cost.lengths import SampleLengths
from plait.dataflow import CallKind, Dataflow
from plait.dataflow.graph import texts_of
from plait.dataflow.made_rows import samples_each


def lengths_by_call(flow: Dataflow, lengths: SampleLengths, samples_per_prompt: int) -> dict[int, SampleLengths]:
    """Id of each call → lengths of the samples that it makes or reads.

    Args:
        lengths: of what answers the prompts of a step, or of the samples that are given; with those of other calls, by
            name, where they are known.
        samples_per_prompt: of the recipe.
    """
    found: dict[int, SampleLengths] = {}
    for node in flow.nodes:
        if node.rows != node.id:
            found[node.id] = found[node.rows]
            continue
        own = lengths.of(node.call)
        if node.kind is CallKind.GENERATE:
            if node.prompts is not None and node.call not in lengths.beside:
                rows, texts = flow.nodes[node.prompts].rows, texts_of(flow.nodes[node.prompts]).values()
                given = {made: samples_each(flow, rows, made, samples_per_prompt) for made in texts}
                read = [(found[made].responses, count) for made, count in given.items()]
                own = found[rows].answered(lengths.responses, read)
            own = own.cut(node.generation.max_tokens)
        found[node.id] = own
    return found
