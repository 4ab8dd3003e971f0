"""What does not go with samples that are older than the weights that train on them (`max_staleness`, `partial_rollout`,
`tokens_per_version`)."""

from __future__ import annotations

from collections.abc import Sequence

from plait.dataflow import CallKind, Dataflow, Node
from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import role_models
from plait.schedule.needs import needs_of


def check_staleness(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where samples may be older than the weights that train on them, but the flow draws none, or
    draws them with what it computes in the same step; or where they are to go on with new weights, and cannot."""
    if recipe.tokens_per_version and recipe.update_rule.waits:
        raise ConfigError(
            f"`tokens_per_version` is {recipe.tokens_per_version}, but with `partial_rollout` off samples end with the "
            "weights that they began with; set `partial_rollout` to keep or recompute, or leave `tokens_per_version` "
            "out"
        )
    if (most := recipe.max_staleness) == 0:
        if not recipe.update_rule.waits:
            raise ConfigError(
                f"`partial_rollout` is {recipe.partial_rollout}, but with `max_staleness` 0 no sample is running when "
                "new weights come; raise `max_staleness`, or leave `partial_rollout` out"
            )
        return
    rollouts = flow.of_kind(CallKind.GENERATE)
    if not rollouts:
        raise ConfigError(
            f"`max_staleness` is {most}, but the flow `{flow.name}` generates no samples: those that it reads have no "
            "version; set `max_staleness` to 0"
        )
    before = needs_of(flow, ())
    for node in flow.of_step_prompts:
        waits = [other.call for number in sorted(before[node.id]) if (other := flow.nodes[number]) not in rollouts]
        if waits:
            raise ConfigError(
                f"`max_staleness` is {most}, but {node.call} of the flow `{flow.name}` waits for {', '.join(waits)} of "
                "the same step, so its samples cannot be drawn before that step; set `max_staleness` to 0"
            )
    if not recipe.update_rule.waits:
        _check_going_on(rollouts, flow, recipe)


def _check_going_on(rollouts: Sequence[Node], flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where samples cannot go on with new weights."""
    wait, is_moved = "set `partial_rollout` to off", recipe.fusion_rule.is_stated
    if len(rollouts) > 1:
        raise ConfigError(
            f"`partial_rollout` is {recipe.partial_rollout}, but the flow `{flow.name}` generates more than once, and "
            f"unfinished samples can go on only where a step has one rollout; {wait}"
        )
    resample = rollouts[0].generation.resample
    if resample is not None and recipe.tokens_per_version:
        raise ConfigError(
            f"`tokens_per_version` is {recipe.tokens_per_version}, but the flow `{flow.name}` draws again by what "
            "rewards say, and which prompts a batch gets depends on when they come; set `tokens_per_version` to 0, or "
            "leave dynamic sampling out"
        )
    asked = next((model for model in role_models(flow, recipe) if resample and model.role == resample.reward), None)
    if asked is not None:
        raise ConfigError(
            f"`partial_rollout` is {recipe.partial_rollout}, but the flow `{flow.name}` draws again by what "
            f"`{asked.key}` says, and other calls keep the ranks of a model busy while samples of later batches end; "
            f"let functions alone decide (remove `{asked.key}`), or {wait}"
        )
    for key, value, is_set in (
        ("fusion", recipe.fusion, is_moved),
        ("rebalance", recipe.rebalance, recipe.rebalance != "off"),
    ):
        if is_set:
            raise ConfigError(
                f"`partial_rollout` is {recipe.partial_rollout} and `{key}` is {value}: instances whose samples end "
                f"early get those of the next batches, so none has to move; set `{key}` to off, or `partial_rollout` "
                "to off"
            )
