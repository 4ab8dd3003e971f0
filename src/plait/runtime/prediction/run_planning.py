"""What predicts a run: its recipe on this machine and others like it, for prompts of known lengths."""

from __future__ import annotations

import sys
from dataclasses import replace

from plait.cost.corrections import with_carried
from plait.cost.fusion_times import with_fusion_times
from plait.cost.lengths import SampleLengths
from plait.cost.model_costs import ModelCosts
from plait.cost.offload_policy import OffloadPolicy
from plait.cost.placement import num_devices
from plait.dataflow import CallKind
from plait.errors import ConfigError, cause_of
from plait.observe.loading import loading
from plait.observe.screen import say
from plait.recipes.recipe import Recipe
from plait.recipes.turn_checks import said_of_made, said_of_rounds
from plait.runtime.folder.stored_recipe import with_sampling
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.machine import machine_of, measured_machine
from plait.runtime.prediction.network import THIS_ONE, Machines
from plait.runtime.prediction.planning import Planning
from plait.runtime.prediction.predictable import Predictable
from plait.schedule.placements import placements_of
from plait.schedule.plan import FUSION, Plan


def planning_for_run(
    run: Predictable, lengths: SampleLengths, machines: Machines = THIS_ONE, devices: int | None = None
) -> Planning:
    """What predicts a run, for texts of these lengths.

    Args:
        devices: None: as many as the recipe says.

    Raises:
        ConfigError: nodes cannot share the devices evenly.
    """
    recipe, shape = run.recipe, run.shapes[run.recipe.model]
    count, nodes = devices or num_devices(recipe), machines.count
    if count % nodes:
        raise ConfigError(f"`devices`: expected a multiple of the {nodes} nodes of this run, found {count}")
    machine = measured_machine if machines.measures else machine_of
    cluster, calibration = machine(recipe, shape, count // nodes)
    if nodes > 1:
        cluster = machines.network.joins(cluster, nodes, recipe.device)
        calibration = replace(calibration, source=f"{calibration.source}; {machines.network.label}")
    return Planning(recipe, run.flow, run.models, run.shapes, cluster, lengths, calibration)


def with_prediction(prepared: Prepared, machines: Machines = THIS_ONE, earlier: Plan | None = None) -> Plan:
    """The plan of a run with a predicted timeline: its own; that of an earlier stay; else one by what is kept of this
    machine, for the texts of the data and responses as long as they may be. Where nothing can be predicted, the plan as
    it is, and why is said.

    Args:
        earlier: the plan of the stay before, whatever it was.
    """
    plan = prepared.plan
    if plan.predicted is None and earlier is not None and replace(earlier, predicted=None) == plan:
        plan = earlier
    if plan.predicted is not None:
        return plan
    try:
        by_what_is_kept = replace(machines, measures=False)
        planning = planning_for_run(prepared, prepared.lengths, by_what_is_kept, plan.num_ranks)
        prediction = planning.predict(plan)
    except Exception as error:  # the boundary of the prediction: what is wrong with it keeps no run from its work
        say(f"nothing is predicted of this run: {type(error).__name__}: {cause_of(error)}", file=sys.stderr)
        return plan
    carried = planning.costs.corrections.carried(plan.placements, planning.costs.shapes)
    source = with_carried(planning.calibration.source, carried)
    rounds, made = said_of_rounds(prepared.flow, prepared.recipe), said_of_made(prepared.flow)
    told = "; ".join(filter(None, (source, rounds, made)))
    loading(f"prediction of a step: {prediction.seconds_per_step:.3g} s, by {told}")
    return replace(plan, predicted=prediction.timeline)


def settled_by_costs(run: Predictable, plan: Plan, lengths: SampleLengths, machines: Machines) -> tuple[Plan, Recipe]:
    """Plan and recipe with what follows from what things take on this machine, as far as that was measured, where they
    leave it open: settings of the policy `fusion`, and the number of groups of samples that go round the stages which
    generate.

    Args:
        plan: completed.
    """
    recipe = run.recipe
    calls = {node.call: placements_of(plan, str(node.role)).drawing for node in run.flow.of_kind(CallKind.GENERATE)}
    rings = [
        (call, instance, len(instances))
        for call, instances in calls.items()
        for instance in instances
        if instance.parallelism.pp > 1
    ]
    has_groups = recipe.sampling.stated_groups is None and bool(rings)
    is_told = recipe.fusion_rule.is_open and any(p.name == FUSION and not p.settings for p in plan.policies)
    if not has_groups and not is_told:
        return plan, recipe
    costs = costs_of_run(run, lengths, machines, plan.num_ranks)
    if has_groups:
        groups = max(costs.decode_groups(*ring) for ring in rings)
        recipe = with_sampling(recipe, recipe.sampling.model_copy(update={"decode_groups": groups}))
    if is_told:
        copied = OffloadPolicy(run.models, plan, adapted=recipe.lora.rank > 0).scores_with_copies
        plan = with_fusion_times(plan, costs, copied)
    return plan, recipe


def costs_of_run(
    run: Predictable, lengths: SampleLengths, machines: Machines = THIS_ONE, devices: int | None = None
) -> ModelCosts:
    """What things take in a run, by what was measured of this machine before, else by what its kind does; its
    arguments are those of `planning_for_run`.

    Raises:
        ConfigError: nodes cannot share the devices evenly.
    """
    return planning_for_run(run, lengths, replace(machines, measures=False), devices).costs
