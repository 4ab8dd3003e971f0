"""The run that a doctor inspects: its flow, its recipe, its roles and their models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from plait.data.rows import Rows
from plait.dataflow import CallKind, Dataflow, Node
from plait.models.backbone_model import BackboneModel
from plait.recipes.recipe import Recipe
from plait.runtime.steps.between_steps import BetweenSteps
from plait.runtime.steps.roles import Roles
from plait.runtime.steps.step import StepState
from plait.runtime.workers import Workers


@dataclass(frozen=True)
class InspectedRun:
    """A run, as the doctor sees it."""

    flow: Dataflow
    roles: Roles
    recipe: Recipe
    workers: Workers
    """They know where weights are."""
    between_steps: BetweenSteps
    """Drives what models are asked beside the steps."""

    @cached_property
    def models(self) -> dict[str, BackboneModel]:
        """Role → its model, reward models included; of a run on several ranks, what parts the leader has."""
        return {name: role.model for name, role in self.roles.items() if role.model is not None}

    def rollouts(self, state: StepState) -> list[tuple[Node, Rows]]:
        """What roles that are trained have sampled in a step that has ended, to be trained on. Without what a frozen
        role has sampled, whose log-probs and versions are no other role's."""
        nodes = [node for node in self.flow.trained_on if node.kind is CallKind.GENERATE]
        return [(node, state.generated[node.id]) for node in nodes if node.role in self.flow.trained_roles]
