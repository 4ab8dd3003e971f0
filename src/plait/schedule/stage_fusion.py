"""Whether scoring could begin on ranks that generate, as these have no samples left (RLHFuse, inter-stage fusion)."""

from __future__ import annotations

from collections.abc import Collection

from plait.dataflow import CallKind, Dataflow, Node
from plait.schedule.needs import may_stream
from plait.schedule.plan import Plan


def nothing_to_hide(
    plan: Plan, flow: Dataflow, models: Collection[str], copied: Collection[str], ahead: Collection[int] | None = None
) -> str:
    """Why scoring cannot begin while others on the same ranks generate, in words; empty: it can.

    Args:
        plan: completed.
        models: roles that are models.
        copied: those that score with copies of their weights, which have to be brought before: their calls score all
            samples at once (`OffloadPolicy.scores_with_copies`).
        ahead: ids of the calls that score samples in the step that draws them; None: all do.
    """
    rollouts = [node for node in flow.of_kind(CallKind.GENERATE) if node.role in models]
    if not rollouts:
        return "nothing is generated"
    reasons = []
    for node in rollouts:
        placements = plan.placements_of(node.call, "decode")
        ranks = {rank for p in placements for rank in p.ranks}
        if sum(p.dp for p in placements) < 2:
            reasons.append("one instance generates")
            continue
        scores = [call for call in flow.of_kind(CallKind.SCORE) if call.rows == node.id and call.role in models]
        scores = [call for call in scores if ranks & _ranks(plan, call)]
        in_parts = [call for call in scores if may_stream(call, flow)]
        streaming = [call for call in in_parts if ahead is None or call.id in ahead]
        if any(call.role not in copied for call in streaming):
            return ""
        if streaming:
            roles = " and ".join(dict.fromkeys(str(call.role) for call in streaming))
            reasons.append(f"weights of {roles} are brought from where they train before samples are scored")
        elif in_parts:
            roles = list(dict.fromkeys(str(call.role) for call in in_parts))
            score = f"{' and '.join(roles)} score{'s' * (len(roles) == 1)} them in their own step"
            reasons.append(f"batches are generated ahead, and {score}, when all samples are there")
        elif scores and node.generation.resample is None:
            reasons.append("samples are scored behind other prompts, which are written when all samples are there")
        elif scores:
            reasons.append("samples are drawn in rounds (`resample`), and no model scores any before a round has ended")
        else:
            reasons.append("no model scores samples where they are generated")
    return reasons[0]


def _ranks(plan: Plan, call: Node) -> set[int]:
    return {rank for p in plan.placements_of(call.call, "score") for rank in p.ranks}
