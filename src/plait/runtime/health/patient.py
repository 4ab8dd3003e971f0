"""What the doctor of a run looks at: its flow, its recipe, its roles and their models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from plait.data.rows import Rows
from plait.dataflow import CallKind, Dataflow, Node
from plait.models.backbone_model import BackboneModel
from plait.recipes.recipe import Recipe
from plait.runtime.steps.aside import Aside
from plait.runtime.steps.roles import RoleRuntime
from plait.runtime.steps.step import StepState
from plait.runtime.workers import Workers


@dataclass(frozen=True)
class Patient:
    """A run, as the doctor sees it."""

    flow: Dataflow
    roles: Mapping[str, RoleRuntime]
    recipe: Recipe
    workers: Workers
    """They know where weights are."""
    aside: Aside
    """Drives what models are asked beside the steps."""

    @cached_property
    def models(self) -> dict[str, BackboneModel]:
        """Role → its model, reward models included; of a run on several ranks, the leader's parts."""
        return {name: role.model for name, role in self.roles.items() if isinstance(role.model, BackboneModel)}

    @cached_property
    def trained(self) -> frozenset[str]:
        """The roles that are trained."""
        return frozenset(str(node.role) for node in self.flow.of_kind(CallKind.TRAIN))

    def rollouts(self, state: StepState) -> list[tuple[Node, Rows]]:
        """What was sampled in a step to be trained on, at the temperature of the run."""
        nodes = [node for node in self.flow.trained_on if not node.is_greedy]
        return [(node, state.generated[node.id]) for node in nodes if node.id in state.generated]
