"""Which model each role of a flow begins as. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.dataflow import CallKind, Dataflow
from plait.models.files.adapter_folder import adapter_of
from plait.models.lora_settings import LoraSettings
from plait.recipes.recipe import Recipe
from plait.training.settings import OptimizerSettings

MODEL_ROLES = ("actor", "ref", "critic", "cost_critic")
REWARD_ROLES = ("reward", "cost")
SCALAR_ROLES = frozenset({"critic", "cost_critic", "reward", "cost"})


@dataclass(frozen=True)
class RoleModel:
    """Which model a role begins as, and whether it changes."""

    role: str
    name: str
    """As in the recipe."""
    scalar: bool
    trained: bool
    key: str
    """The recipe's key, for messages."""
    follows: str = ""
    """The trained role that its weights are brought towards from time to time; empty: none."""

    @property
    def changes(self) -> bool:
        """Whether its weights become others, so that no role can share them."""
        return self.trained or bool(self.follows)

    @property
    def has_head(self) -> bool:
        """Whether a scalar role brings its head along: one that begins as a reward model does, one that begins as the
        run's own model gets a new one."""
        return self.scalar and self.key != "model"


@dataclass(frozen=True)
class ToCome:
    """A model that an earlier stage of the recipe is still to make."""

    name: str
    """As in the recipe: `@NAME`."""
    scalar: bool


def role_models(flow: Dataflow, recipe: Recipe) -> tuple[RoleModel, ...]:
    """The models that a flow needs, in order of first use. Loads nothing."""
    models = []
    for role in flow.roles:
        trained = any(node.kind is CallKind.TRAIN for node in flow.calls(role))
        if role in REWARD_ROLES and not trained:
            settings = recipe.reward if role == "reward" else recipe.cost
            if settings.model is None:
                continue
        models.append(role_model(role, recipe, trained=trained))
    return tuple(models)


def role_model(role: str, recipe: Recipe, *, trained: bool) -> RoleModel:
    """Which model a role begins as, whatever the flow."""
    name, key = _begins_as(role, recipe)
    follows = "actor" if role == "ref" and recipe.reference.sync_every > 0 else ""
    return RoleModel(role, name, role in SCALAR_ROLES, trained, key, follows)


def frozen_adapters(models: Sequence[RoleModel], recipe: Recipe) -> dict[str, LoraSettings]:
    """Role that is not trained → the adapter that it begins as, beside its weights; without `lora` none is."""
    adapters = {m.role: adapter_of(m.name) for m in models if recipe.lora.rank > 0 and not m.trained}
    return {role: adapter.settings for role, adapter in adapters.items() if adapter is not None}


def unchanging(flow: Dataflow, models: Sequence[RoleModel]) -> tuple[str, ...]:
    """Roles whose weights are the same in every step; without rewards, which functions may give a part of."""
    return tuple(model.role for model in models if not (model.changes or is_reward(model, flow)))


def draft_model(name: str, key: str) -> RoleModel:
    """A draft model as what the checks of models take.

    Args:
        key: of the recipe, or an option, for messages.
    """
    return RoleModel("draft model", name, scalar=False, trained=False, key=key)


def main_role(models: Sequence[RoleModel]) -> RoleModel:
    """What a run is for: the actor where it is trained, else the first role that is."""
    trained = [model for model in models if model.trained]
    return next((model for model in trained if model.role == "actor"), trained[0])


def trained_roles(models: Sequence[RoleModel]) -> list[str]:
    """Those that are trained, the main one first."""
    main = main_role(models).role
    return [main, *(model.role for model in models if model.trained and model.role != main)]


def _begins_as(role: str, recipe: Recipe) -> tuple[str, str]:
    """(model, key of the recipe that says so). A critic begins as the model that scores the same, if there is one."""
    reward, cost = (recipe.reward.model, "reward.model"), (recipe.cost.model, "cost.model")
    sources: dict[str, tuple[tuple[str | None, str], ...]] = {
        "ref": ((recipe.reference.model, "reference.model"),),
        "critic": ((recipe.critic.model, "critic.model"), reward),
        "cost_critic": ((recipe.cost_critic.model, "cost_critic.model"), cost),
        "reward": (reward,),
        "cost": (cost,),
    }
    for name, key in sources.get(role, ()):
        if name is not None:
            return name, key
    return recipe.model, "model"


def optimizer_of(role: str, recipe: Recipe) -> OptimizerSettings:
    match role:
        case "critic":
            return recipe.critic.optimizer
        case "cost_critic":
            return recipe.cost_critic.optimizer
    return recipe.optimizer


def is_balanced(role: str, recipe: Recipe) -> bool:
    """Whether its training adds a loss that balances the experts of a mixture."""
    return optimizer_of(role, recipe).router_aux_loss_coef > 0


def is_reward(model: RoleModel, flow: Dataflow) -> bool:
    """Whether a model's role is to score samples, without being trained."""
    return model.role in REWARD_ROLES and "train" not in flow.call_kinds(model.role)


def function_names(recipe: Recipe, role: str) -> str:
    """The functions that score for a reward role, as profiles name them; empty: there are none."""
    settings = recipe.reward if role == "reward" else recipe.cost
    return " ".join(settings.functions) or (recipe.data.task or "" if role == "reward" else "")
