"""What a dry run says of batches that are drawn ahead: what they are drawn beside, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.offload_policy import OffloadPolicy
from plait.dataflow import CallKind, Dataflow
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.placements import placements_of
from plait.schedule.plan import Plan


def staleness_text(recipe: Recipe, flow: Dataflow, models: Sequence[RoleModel], plan: Plan) -> str:
    """In sentences; empty where nothing is drawn ahead."""
    most = recipe.max_staleness
    if most == 0:
        return ""
    ahead = f"batch b + {most} is" if most == 1 else f"batches up to b + {most} are"
    text = f"max_staleness {most}: while batch b is scored and trained, {ahead} generated; at most {most + 1} are open"
    trained = {node.role for node in flow.of_kind(CallKind.TRAIN)}
    for role in dict.fromkeys(str(node.role) for node in flow.of_kind(CallKind.GENERATE)):
        if role in trained:
            text += f". {_of_role(role, OffloadPolicy(models, plan, adapted=recipe.lora.rank > 0), plan)}"
    return text


def _of_role(role: str, policy: OffloadPolicy, plan: Plan) -> str:
    place = placements_of(plan, role)
    generating = sorted({rank for one in place.generate for rank in one.mesh.ranks})
    training = sorted(place.train.mesh.ranks) if place.train is not None else []
    if policy.held_copies(role):
        return (
            f"What generates on {_ranks(generating)} keeps the {role}'s weights of the step's beginning during "
            f"training on {_ranks(training)}: its copy, which the plan has in any case; no further version is held"
        )
    return (
        f"The weights that generate on {_ranks(generating)} are those trained on {_ranks(training)}, or leave the "
        f"device, or score as well: the {role} is trained when the rollouts of the step have ended, and what overlaps "
        "is the rest"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
