"""What foretells a run: its recipe on this machine and others like it, for prompts of known lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from plait.cost.calibration import Calibration
from plait.cost.placement import num_devices
from plait.cost.workload import Lengths
from plait.dataflow import Dataflow
from plait.errors import ConfigError
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.runtime.lengths import lengths_of
from plait.runtime.machine import machine_of, measured_machine
from plait.runtime.network import THIS_ONE, Machines
from plait.runtime.planning import Planning, auto_plan
from plait.schedule.plan import Plan


def found_for_run(found: Foretellable, prompts: Lengths, machines: Machines = THIS_ONE) -> tuple[Plan, Calibration]:
    """The plan of a run with `plan` auto on several devices, and where its seconds come from: for prompts of these
    lengths, responses as long as they may be.

    Raises:
        ConfigError: none fits in memory.
    """
    planning = planning_for_run(found, prompts, machines)
    return auto_plan(planning), planning.calibration


def planning_for_run(found: Foretellable, prompts: Lengths, machines: Machines = THIS_ONE) -> Planning:
    """What foretells a run; its arguments are those of `found_for_run`.

    Raises:
        ConfigError: nodes cannot share the devices evenly.
    """
    recipe, shape = found.recipe, found.shapes[found.recipe.model]
    count, nodes = num_devices(recipe), machines.count
    if count % nodes:
        raise ConfigError(f"`devices`: expected a multiple of the {nodes} nodes of this run, found {count}")
    machine = measured_machine if machines.measures else machine_of
    cluster, calibration = machine(recipe, shape, count // nodes)
    if nodes > 1:
        cluster = machines.network.joins(cluster, nodes, recipe.device)
        calibration = replace(calibration, source=f"{calibration.source}; {machines.network.label}")
    lengths = lengths_of(None, recipe, lambda: prompts)
    return Planning(recipe, found.flow, found.models, found.shapes, cluster, lengths, calibration)


class Foretellable(Protocol):
    """A run whose recipe has been read (`prepared.Outline`, `prepared.Prepared`), as predictions ask for it."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def flow(self) -> Dataflow: ...

    @property
    def models(self) -> Sequence[RoleModel]: ...

    @property
    def shapes(self) -> Mapping[str, ModelShape]: ...
