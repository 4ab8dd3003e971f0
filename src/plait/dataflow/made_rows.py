"""Samples that are drawn from prompts which are made of other samples: where they come from, and how many there are."""

from __future__ import annotations

from math import prod

from plait.dataflow.graph import CallKind, Dataflow, Node


def made_from(nodes: list[Node] | tuple[Node, ...], rows: int) -> list[int]:
    """Ids of the calls whose samples lead to those of a call, the last first."""
    found: list[int] = []
    while (prompts := nodes[rows].prompts) is not None:
        rows = nodes[prompts].rows
        found.append(rows)
    return found


def source_of(flow: Dataflow, rows: int) -> Node:
    """The GENERATE or READ call whose prompts are of the data, and whose samples lead to those of a call; the call
    itself where its own are."""
    return flow.nodes[[rows, *made_from(flow.nodes, rows)][-1]]


def samples_of_prompt(node: Node, samples_per_prompt: int) -> int:
    """Samples of each prompt of a GENERATE or READ call.

    Args:
        samples_per_prompt: of the recipe.
    """
    if node.kind is CallKind.GENERATE:
        return node.generation.num_samples(samples_per_prompt)
    return 2 if node.call == "pairs" else 1


def prompts_each(flow: Dataflow, node: Node, samples_per_prompt: int) -> int:
    """Prompts of a GENERATE or READ call for each one that a step has: 1, or as many as there are samples that its
    prompts are made of.

    Args:
        samples_per_prompt: of the recipe.
    """
    count = 1
    for rows in made_from(flow.nodes, node.id):
        count *= samples_of_prompt(flow.nodes[rows], samples_per_prompt)
    return count


def samples_each(flow: Dataflow, rows: int, made: int, samples_per_prompt: int) -> int:
    """Samples of call `made` for each sample of call `rows` that they were made of, perhaps through others; 0 where
    they were not made of these.

    Args:
        samples_per_prompt: of the recipe.
    """
    between = made_from(flow.nodes, made)
    if rows not in between:
        return 0
    calls = (made, *between[: between.index(rows)])
    return prod(samples_of_prompt(flow.nodes[call], samples_per_prompt) for call in calls)
