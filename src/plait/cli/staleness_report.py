"""What a dry run says of batches that are generated ahead: what they are drawn beside, what that takes and gains."""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.offload_policy import OffloadPolicy
from plait.dataflow import CallKind, Dataflow
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.placements import placements_of
from plait.schedule.plan import Plan

_PARTIAL_ROLLOUT = {
    "off": "Samples end with the weights that they began with",
    "keep": "Samples that are running when new weights come go on with the keys and values that they have; until they "
    "do, a copy of these is held in host memory",
    "recompute": "Samples that are running when new weights come go on, and their keys and values are computed again",
}


def staleness_text(
    recipe: Recipe,
    flow: Dataflow,
    models: Sequence[RoleModel],
    plan: Plan,
    predicted: tuple[float, float] | None,
) -> str:
    """In sentences; empty where nothing is generated ahead.

    Args:
        predicted: seconds of a step as the recipe has it, and with nothing generated ahead; None: nobody can say.
    """
    most = recipe.max_staleness
    if most == 0:
        return ""
    ahead = f"batch b + {most} is" if most == 1 else f"batches up to b + {most} are"
    text = f"max_staleness {most}: while batch b is scored and trained, {ahead} generated; at most {most + 1} are open"
    text += f". {_PARTIAL_ROLLOUT[recipe.partial_rollout]}"
    if (tokens := recipe.tokens_per_version) > 0:
        text += f". A sample draws {tokens} tokens in a step that does not train on it, at most, and the rest of up to "
        text += f"{recipe.sampling.max_response_tokens} in the step that does: nothing depends on the clock"
    policy = OffloadPolicy(models, plan, adapted=recipe.lora.rank > 0)
    apart = True
    for role in dict.fromkeys(str(node.role) for node in flow.of_kind(CallKind.GENERATE)):
        if role in flow.trained_roles:
            apart &= bool(policy.held_copies(role))
            text += f". {_of_role(role, policy, plan, recipe)}"
    if not apart and not recipe.update_rule.waits:
        return f"{text}. What that gains depends on how unequal the lengths of samples are, and is not predicted"
    return text if predicted is None else f"{text}. {_gain(*predicted)}"


def _of_role(role: str, policy: OffloadPolicy, plan: Plan, recipe: Recipe) -> str:
    place = placements_of(plan, role)
    generating = sorted({rank for instance in place.generate for rank in instance.mesh.ranks})
    training = sorted(place.train.mesh.ranks) if place.train is not None else []
    if policy.held_copies(role):
        return (
            f"What generates on {_ranks(generating)} keeps the {role}'s weights of the step's beginning during "
            f"training on {_ranks(training)}: its copy, which the plan has in any case; no further version is held"
        )
    overlaps = "when the rollouts of the step have ended, and what overlaps is the rest"
    if recipe.update_rule.by_clock:
        overlaps = "when its own samples are there, and what overlaps is their end: places that become free go to the "
        overlaps += "next batch"
    return (
        f"The weights that generate on {_ranks(generating)} are those trained on {_ranks(training)}, or leave the "
        f"device, or score as well: the {role} is trained {overlaps}; no further version is held"
    )


def _gain(ahead_s: float, alone_s: float) -> str:
    return (
        f"Predicted: {ahead_s:.3g} s a step, in place of {alone_s:.3g} s with nothing ahead "
        f"({alone_s / ahead_s:.2f} times as fast)"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
