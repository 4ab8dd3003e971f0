"""The order of roles that train together, where the plan says `fused` and states none: searched for once, by what their
stages take on this machine, as far as that was measured, and with the memory that devices have left. Equal numbers find
the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from plait.cost.call_memory import ACTIVATIONS, logits_of_stages, micro_batch_bytes
from plait.cost.device_memory import memory_by_device
from plait.cost.layer_kinds import stage_counts
from plait.cost.micro_batch import share_of
from plait.cost.placed import Facts
from plait.cost.placement import device_bytes, planned_models
from plait.cost.working_memory import is_fused, stage_activations
from plait.dataflow import Node
from plait.dataflow.made_rows import prompts_each, samples_of_prompt
from plait.errors import ConfigError
from plait.layout.mesh import Layout
from plait.planner.search import search
from plait.recipes.role_models import RoleModel
from plait.schedule.completion import complete
from plait.schedule.fused import FUSED, shared_rows
from plait.schedule.pipeline import MICRO_BATCHES_OF_A_STAGE, Pipeline, Workload
from plait.schedule.placements import to_be_found
from plait.schedule.plan import Placement, Plan
from plait.schedule.schedule import Schedule

MOST_MOVES = 100_000
"""Schedules that are tried. A number, not seconds, so that every machine finds the same."""
MOST_S = 86_400.0


class StageCosts(Protocol):
    """See `ModelCosts`."""

    def stage_seconds(self, call: str, layout: Layout, micro_batches: int) -> Sequence[tuple[float, float]]:
        """Forward and backward of a micro-batch, of each stage."""
        ...


def with_order(facts: Facts, costs: Callable[[], StageCosts], schedules: Sequence[Schedule] = ()) -> Plan:
    """The completed plan of `facts`, with the order that it leaves open; as it is where it leaves none.

    Args:
        costs: asked for where an order is searched.
        schedules: orders of earlier plans: one that was found before and fits is taken.
    """
    plan = facts.plan
    if not to_be_found(plan):
        return plan
    for schedule in (earlier for earlier in schedules if earlier.name == FUSED):
        try:
            return _completed(schedule, facts)
        except ConfigError:
            continue  # the plan was another
    best = search(workload_of(facts, costs()), MOST_S, max_moves=MOST_MOVES)
    if best.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return _completed(replace(best.schedule, name=FUSED), facts)


def _completed(schedule: Schedule, facts: Facts) -> Plan:
    # What was predicted of it was what such an order takes at least.
    plan = replace(facts.plan, schedules=(*facts.plan.schedules, schedule), predicted=None)
    return complete(
        plan, facts.flow, planned_models(facts.recipe, facts.models, facts.shapes), f"plan `{facts.recipe.plan}`"
    )


def workload_of(facts: Facts, costs: StageCosts) -> Workload:
    """What the order is searched for: the pipelines of one copy of it, with the time (in forwards of a micro-batch
    through the first stage of the first role) and the activation bytes of each forward and backward.

    A rank may hold what its device has left, and one micro-batch of each role at least.
    """
    placements = to_be_found(facts.plan)
    models = {model.role: model for model in facts.models}
    seconds = {
        role: costs.stage_seconds(p.call, p.layout, num_micro_batches(facts, role, p)) for role, p in placements.items()
    }
    unit_s = next(iter(seconds.values()))[0][0]
    pipelines = [
        _pipeline(
            facts, models[role], copy, placements[role], rows, [(f / unit_s, b / unit_s) for f, b in seconds[role]]
        )
        for (role, copy), rows in shared_rows(placements).items()
    ]
    num_rows = max(len(p.ranks) for p in pipelines)
    wide = next(placements[p.model].layout for p in pipelines if len(p.ranks) == num_rows)
    caps = [
        min(_left(facts, rank) for rank in wide.mesh.ranks if wide.coordinates(rank).pp == row)
        for row in range(num_rows)
    ]
    for p in pipelines:
        for stage, row in enumerate(p.ranks):
            caps[row] = max(caps[row], p.activation[stage][0])
    return Workload(tuple(pipelines), num_rows, tuple(caps))


def num_micro_batches(facts: Facts, role: str, p: Placement) -> int:
    """Micro-batches of a copy of the role's pipeline in its largest optimizer step: as many of each loss as keep it
    busy, or as its share of the samples that this loss is of (groups, where these stay whole) lets be made. A run may
    have fewer, as `keep` and dynamic sampling leave samples out, and an order is followed with fewer, too."""
    most = MICRO_BATCHES_OF_A_STAGE * p.pp
    updates = facts.flow.updates(role)
    return max(sum(min(most, _units(facts, node, p.dp)) for node in calls) for calls in updates)


def _units(facts: Facts, node: Node, dp: int) -> int:
    """What a copy's share of an optimizer step of a training call may be cut into: samples, or groups."""
    recipe, rows = facts.recipe, facts.flow.nodes[node.rows]
    groups = recipe.prompts_per_step * prompts_each(facts.flow, rows, recipe.samples_per_prompt)
    units = groups if node.training.whole_groups else groups * samples_of_prompt(rows, recipe.samples_per_prompt)
    return share_of(units, node.training.mini_batches, dp)


def _pipeline(
    facts: Facts,
    model: RoleModel,
    copy: int,
    p: Placement,
    rows: tuple[int, ...],
    stages: Sequence[tuple[float, float]],
) -> Pipeline:
    """
    Args:
        stages: what a forward and a backward of each takes.
    """
    shape, count = facts.shapes[model.name], num_micro_batches(facts, model.role, p)
    kinds = micro_batch_bytes(facts, model, "train", p.layout, fused=is_fused(facts.recipe))
    counts_of_stages = stage_counts(shape, p.layout.parallelism)
    working_bytes = [
        stage_activations(kinds, counts, shape.layers, 1) + of_head
        for counts, of_head in zip(counts_of_stages, logits_of_stages(facts, model, p.layout), strict=True)
    ]
    table = lambda values: tuple((value,) * count for value in values)
    return Pipeline(
        model.role,
        copy,
        rows,
        table([forward for forward, _ in stages]),
        table([backward for _, backward in stages]),
        table(working_bytes),
    )


def _left(facts: Facts, rank: int) -> float:
    """Bytes of a device that nothing but activations is expected to take while it trains."""
    memory = next(device for device in memory_by_device(facts) if rank in device.ranks)
    activation_bytes = sum(count for what, count in memory.rows if what == ACTIVATIONS)
    training = {p.call for p in facts.plan.placements if p.mode == "train"}
    other_bytes = max(count for what, count in memory.during if what in training) - activation_bytes
    return device_bytes(facts.recipe, facts.plan.num_ranks) - other_bytes - sum(count for _, count in memory.slack)
