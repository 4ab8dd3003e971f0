"""The order of roles that train together, where the plan says `fused` and states none: searched for once, by durations
from shapes and with the memory that devices have left. Equal plans and recipes find the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from plait.cost.call_memory import ACTIVATIONS, micro_batch_bytes
from plait.cost.device_memory import memory_by_device
from plait.cost.placed import Facts
from plait.cost.placement import device_bytes, planned_models
from plait.cost.working_memory import is_fused
from plait.dataflow import CallKind
from plait.errors import ConfigError
from plait.layout.shards import stage_bounds
from plait.planner.search import search
from plait.recipes.role_models import RoleModel
from plait.schedule.completion import complete
from plait.schedule.fused import FUSED, shared_rows
from plait.schedule.pipeline import Pipeline, Workload
from plait.schedule.placements import to_be_found
from plait.schedule.plan import Placement, Plan
from plait.schedule.schedule import Schedule
from plait.training.trainer_settings import MICRO_BATCHES_OF_A_STAGE

MOST_MOVES = 100_000
"""Schedules that are tried. A number, not seconds, so that every machine finds the same."""
MOST_S = 86_400.0


def with_order(facts: Facts, schedules: Sequence[Schedule] = ()) -> Plan:
    """The completed plan of `facts`, with the order that it leaves open; as it is where it leaves none.

    Args:
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
    best = search(workload_of(facts), MOST_S, max_moves=MOST_MOVES)
    if best.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return _completed(replace(best.schedule, name=FUSED), facts)


def _completed(schedule: Schedule, facts: Facts) -> Plan:
    plan = replace(facts.plan, schedules=(*facts.plan.schedules, schedule))
    return complete(plan, facts.flow, planned_models(facts.models, facts.shapes), f"plan `{plan.name}`")


def workload_of(facts: Facts) -> Workload:
    """What the order is searched for: the pipelines of one copy of it, with the time (of a layer of the first role, for
    all tokens) and the activation bytes of each forward and backward.

    A rank may hold what its device has left, and one micro-batch of each role at least.
    """
    placements = to_be_found(facts.plan)
    models = {model.role: model for model in facts.models}
    unit = _layer_weights(facts, models[next(iter(placements))])
    pipelines = [
        _pipeline(facts, models[role], copy, placements[role], rows, unit)
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
    """Micro-batches of a copy of the role's pipeline: as many as keep it busy, or as its share of a mini-batch has
    samples.
    """
    calls = [node for node in facts.flow.calls(role) if node.kind is CallKind.TRAIN]
    rollouts = facts.flow.of_kind(CallKind.GENERATE)
    per_prompt = max((node.generation.num_samples(facts.recipe.samples_per_prompt) for node in rollouts), default=1)
    groups = -(-facts.recipe.prompts_per_step // calls[0].training.mini_batches)
    units = (
        groups
        if calls[0].training.whole_groups
        else -(-facts.recipe.prompts_per_step * per_prompt // calls[0].training.mini_batches)
    )
    return max(1, min(MICRO_BATCHES_OF_A_STAGE * p.pp, -(-units // p.dp)))


def _pipeline(facts: Facts, model: RoleModel, copy: int, p: Placement, rows: tuple[int, ...], unit: float) -> Pipeline:
    shape, count = facts.shapes[model.name], num_micro_batches(facts, model.role, p)
    bounds = stage_bounds(shape.layers, p.layout.parallelism)
    layers = [float(stop - start) for start, stop in pairwise(bounds)]
    head = [0.0] * (p.pp - 1) + [shape.head_in_layers(1 if model.scalar else shape.vocabulary)]
    again = layers if facts.recipe.checkpoint_activations else [0.0] * p.pp
    of_layer = _layer_weights(facts, model) / unit / (count * p.dp)
    held = micro_batch_bytes(facts, model, "train", p.layout, fused=is_fused(facts.recipe))
    table = lambda values: tuple((value,) * count for value in values)  # noqa: E731
    return Pipeline(
        model.role,
        copy,
        rows,
        table([of_layer * (a + b) for a, b in zip(layers, head, strict=True)]),
        table([of_layer * (2 * (a + b) + c) for a, b, c in zip(layers, head, again, strict=True)]),
        table([held * number for number in layers]),
    )


def _layer_weights(facts: Facts, model: RoleModel) -> float:
    """That a token passes in a layer: its floating point operations go with them."""
    shape = facts.shapes[model.name]
    return shape.hidden / shape.head_in_layers(1)


def _left(facts: Facts, rank: int) -> float:
    """Bytes of a device that nothing else is expected to take."""
    memory = next(device for device in memory_by_device(facts) if rank in device.ranks)
    counted = sum(count for what, count in memory.rows if what == ACTIVATIONS)
    return device_bytes(facts.recipe, facts.plan.num_ranks) - (memory.most_bytes - counted)
