"""Which calls of a flow must have ended before one may begin, so that any order that keeps to it computes the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from plait.dataflow import CallKind, Dataflow, Node
from plait.dataflow.graph import added_scores, texts_of


def needs_of(flow: Dataflow, rewards: Collection[str]) -> dict[int, frozenset[int]]:
    """Id of each node → ids of earlier ones that it waits for.

    A call waits for those that make what it reads; for earlier calls of its role that change weights, and where it
    changes them for all of its role; and of calls on the same samples for those that leave samples out (rewards),
    unless it scores each sample by itself: what it says of samples that are left out meanwhile is dropped.
    Models that score for one reward do not wait for each other; who waits for the reward waits for all of them.

    Args:
        rewards: roles that score samples by functions, by a frozen model, or both.
    """
    needs: dict[int, frozenset[int]] = {}
    for node in flow.nodes:
        makers = {node.rows, *(column.producer for column in node.inputs.values())}
        makers |= {*texts_of(node).values(), *(() if node.prompts is None else (node.prompts,))}
        producers = makers.difference(added_scores(node).values())
        producers |= {other.id for other in flow.nodes[: node.id] if _conflict(other, node, rewards)}
        added = {other for producer in producers for other in added_scores(flow.nodes[producer]).values()}
        needs[node.id] = frozenset((producers | added) - {node.id})
    return needs


def early_scores(flow: Dataflow, needs: Mapping[int, frozenset[int]], frozen: Collection[str]) -> frozenset[int]:
    """Ids of the calls that say the same of a rollout's samples in any step: weights that never change score them, and
    these calls wait for rollouts of the step's prompts, and each other, alone.

    Args:
        frozen: roles of models that are neither trained nor brought towards a trained one, those of rewards among them.
    """
    early: set[int] = set()
    rollouts = {node.id for node in flow.of_step_prompts}
    for node in flow.nodes:
        if node.kind is CallKind.SCORE and node.role in frozen:
            waits = needs[node.id] - early
            if waits.issubset(rollouts):
                early.add(node.id)
    return frozenset(early)


def _conflict(earlier: Node, later: Node, rewards: Collection[str]) -> bool:
    if earlier.role is not None and earlier.role == later.role:
        read_only = (CallKind.GENERATE, CallKind.SCORE)
        if earlier.kind not in read_only or later.kind not in read_only or earlier.role in rewards:
            return True
    if earlier.kind is later.kind is CallKind.GENERATE:  # they draw prompts
        return True
    if not _reads(earlier) & _reads(later):
        return False
    drops = [node.role in rewards for node in (earlier, later)]
    by_sample = [_scores_alone(node, rewards) for node in (earlier, later)]
    return (drops[0] and not by_sample[1]) or (drops[1] and not by_sample[0])


def _reads(node: Node) -> set[int]:
    """Ids of the nodes whose samples it reads."""
    return {node.rows, *texts_of(node).values()} | {column.rows for column in node.inputs.values()}


def _scores_alone(node: Node, rewards: Collection[str]) -> bool:
    """Whether a model says something of each sample by itself."""
    return node.kind is CallKind.SCORE and node.role not in rewards


def may_stream(node: Node, flow: Dataflow) -> bool:
    """Whether a call could score parts of a rollout as its samples are finished: it does where it computes on other
    ranks than those that generate. That is the plan's to say, not the clock's. One that scores behind other prompts
    waits for those, which are written when all samples are there."""
    source = flow.nodes[node.rows]
    scores = node.kind is CallKind.SCORE and source.kind is CallKind.GENERATE and node.prompts is None
    return scores and source.generation.resample is None
