"""What a plan's policy `fusion` is told: seconds that decide in each step whether samples are scored in parts."""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import replace
from typing import Protocol

from plait.cost.costs import Costs
from plait.cost.workload import Workload
from plait.dataflow import CallKind, Dataflow, Node
from plait.layout.mesh import Layout
from plait.policy.early_scores import APART
from plait.schedule.fusion_times import FusionTimes
from plait.schedule.needs import may_stream
from plait.schedule.plan import FUSION, Placement, Plan, PolicyChoice


class StepCosts(Costs, Protocol):
    """Costs of the calls of a flow, and of a decode step; see `ModelCosts`."""

    @property
    def flow(self) -> Dataflow: ...

    @property
    def workload(self) -> Workload: ...

    @property
    def shapes(self) -> Container[str]:
        """Roles that are models."""
        ...

    def step_line(self, call: str, layout: Layout, instances: int) -> tuple[float, float, float]:
        """Seconds of an instance with one sample until that has a token more, and more for each further one; tokens
        that a sample gets in a decode step. So many instances share the samples."""
        ...


def with_fusion_times(plan: Plan, costs: StepCosts, copied: Collection[str] = ()) -> Plan:
    """A completed plan whose policy `fusion`, where it names that without settings, has those that are predicted.

    Args:
        copied: roles that score with copies of their weights, which begin when all samples have ended.
    """
    return replace(plan, policies=tuple(_told(policy, plan, costs, copied) for policy in plan.policies))


def _told(policy: PolicyChoice, plan: Plan, costs: StepCosts, copied: Collection[str]) -> PolicyChoice:
    if policy.name != FUSION or policy.settings:
        return policy
    rollouts = [node for node in costs.flow.of_kind(CallKind.GENERATE) if plan.placements_of(node.call, "decode")]
    return PolicyChoice(FUSION, _times(rollouts[0], plan, costs, copied).settings()) if rollouts else policy


def _times(rollout: Node, plan: Plan, costs: StepCosts, copied: Collection[str]) -> FusionTimes:
    """The times of the first rollout of a flow, and of the models that score its samples on the same ranks."""
    generating = plan.placements_of(rollout.call, "decode")
    ranks = frozenset(rank for placement in generating for rank in placement.ranks)
    instances = sum(placement.dp for placement in generating)
    step_s, more_s, step_tokens = costs.step_line(rollout.call, generating[0].layout, instances)
    lengths, samples = costs.workload.lengths, costs.workload.samples_of(costs.flow, rollout)
    prompt_tokens = lengths.prompts.mean - lengths.prompts.root
    tokens = samples.prompts * prompt_tokens + samples.count * lengths.responses.mean
    # Seconds of an instance that generates: a score on more ranks, or fewer, counts by its ranks.
    wide = len(ranks) / instances
    scores = [
        (costs.call(placement.call, "score", placement.layout, micro_batch_tokens=placement.micro_batch_tokens), by)
        for placement in _scoring(rollout, plan, costs, ranks)
        if placement.role not in copied
        for by in (len(placement.ranks) / wide,)
    ]
    scores_s = sum(cost.seconds for cost, _ in scores)
    apart_s = APART * sum(cost.seconds**2 * by for cost, by in scores) / scores_s if scores_s else 0.0
    return FusionTimes(
        step_s,
        more_s,
        token_s=sum(cost.seconds * by for cost, by in scores) / tokens,
        parts_s=sum(cost.in_parts_s * by for cost, by in scores) + apart_s,
        prompt_tokens=prompt_tokens,
        step_tokens=step_tokens,
    )


def _scoring(rollout: Node, plan: Plan, costs: StepCosts, ranks: frozenset[int]) -> list[Placement]:
    """Placements of the calls whose scores can begin on these ranks, as they have no samples left."""
    calls = [node for node in costs.flow.of_kind(CallKind.SCORE) if node.rows == rollout.id]
    if (ahead := costs.workload.scores_ahead) is not None:
        calls = [node for node in calls if node.id in ahead]
    return [
        placement
        for node in calls
        if may_stream(node, costs.flow) and str(node.role) in costs.shapes
        for placement in plan.placements_of(node.call, "score")
        if ranks & set(placement.ranks)
    ]
