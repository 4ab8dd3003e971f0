"""What goes together with gradients and weights that ranks of dp share. Torch-free."""

from __future__ import annotations

from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import optimizer_of
from plait.schedule.placements import orders_of, to_be_found
from plait.schedule.plan import Placement, Plan


def check_shares(recipe: Recipe, plan: Plan, label: str) -> None:
    """Raises ConfigError, which begins with `label`, where a completed plan does not go together with what its ranks
    are to share."""
    _check_training(recipe, plan, label)
    _check_scoring(recipe, plan, label)


def _check_training(recipe: Recipe, plan: Plan, label: str) -> None:
    """Raises ConfigError, which begins with `label`, where gradients of a role are to be divided whose copies are in
    one order with those of another role: they could wait for each other in a circle; or where its weights are to be
    shared, and it trains in one order with another at all."""
    waiting = to_be_found(plan)
    for placement in plan.placements:
        role = placement.role
        shares = _sharing(placement, recipe, plan)
        if placement.mode != "train" or not (optimizer_of(role, recipe).shard_gradients or shares):
            continue
        copies, together = 1, orders_of(plan, placement)[1]
        if shares and (together is not None or role in waiting):
            raise ConfigError(
                f"{label}: {placement.call} is in the schedule `{placement.schedule}` with other roles, but its "
                f"weights are shared (`shard_weights` of the optimizer of {shares}), for which a role trains by "
                "itself; leave `schedule` out, or set `shard_weights` to false (`shard_gradients` may be true)"
            )
        if together is not None:
            copies = together.num_copies(role)
        elif role in waiting:
            copies = max(p.pp for p in waiting.values()) // placement.pp
        if copies > 1:
            raise ConfigError(
                f"{label}: {placement.call} has {copies} copies in the schedule `{placement.schedule}`, but its "
                f"gradients are divided (`shard_gradients` of the optimizer of {role}), for which a schedule has one; "
                "leave `schedule` out, give all roles that follow it as many stages, or set `shard_gradients` to false"
            )


def _sharing(placement: Placement, recipe: Recipe, plan: Plan) -> str:
    """The role whose optimizer's key has the weights shared that a call trains, which under adapters may be another;
    empty: they are not shared."""
    roles = (placement.role, *[p.role for p in plan.placements if placement.shards_weights and p.mode == "train"])
    return next((role for role in roles if optimizer_of(role, recipe).shard_weights), "")


def _check_scoring(recipe: Recipe, plan: Plan, label: str) -> None:
    """Raises ConfigError, which begins with `label`, where samples are to be scored in parts by ranks that have a share
    of the weights alone."""
    shared = next((p for p in plan.placements if p.mode == "score" and p.shards_weights), None)
    if shared is not None and recipe.fusion_rule.is_stated:
        raise ConfigError(
            f"{label}: {shared.call} scores with weights that its ranks share (`optimizer.shard_weights`), as they "
            "train with them, and ranks that share weights score together, but `fusion` has each score by itself; set "
            "`fusion` to auto or off, give the call another layout, or set `shard_weights` to false"
        )
