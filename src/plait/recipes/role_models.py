"""Which model each role of a flow begins as. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.dataflow import CallKind, Dataflow
from plait.models.files.adapter_folder import adapter_of
from plait.models.lora_settings import LoraSettings
from plait.recipes.recipe import Recipe
from plait.rewards.scores import MODEL, nth
from plait.rewards.settings import RewardSettings
from plait.training.settings import OptimizerSettings

MODEL_ROLES = ("actor", "ref", "judge", "critic", "cost_critic")
REWARD_ROLES = ("reward", "cost")
LEARNT = {"critic": "reward", "cost_critic": "cost"}
"""Role of a critic → the reward role whose sums it learns."""


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
    reward: str = ""
    """The reward role that it scores for, as it is; empty: for none, or it is trained to."""

    @property
    def is_reward(self) -> bool:
        """Whether its role is the reward itself, whose call adds up what all of its models give: it leaves out samples
        without a reward."""
        return bool(self.reward) and self.role == self.reward

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
        if role in REWARD_ROLES and not trained and not reward_settings(role, recipe).models:
            continue
        models.append(role_model(role, recipe, trained=trained))
    return tuple(models)


def role_model(role: str, recipe: Recipe, *, trained: bool) -> RoleModel:
    """Which model a role begins as, whatever the flow."""
    name, key = _begins_as(role, recipe)
    follows = "actor" if role == "ref" and recipe.reference.sync_every > 0 else ""
    return RoleModel(role, name, is_scalar(role), trained, key, follows, "" if trained else reward_of(role))


def frozen_adapters(models: Sequence[RoleModel], recipe: Recipe) -> dict[str, LoraSettings]:
    """Role that is not trained → the adapter that it begins as, beside its weights; without `lora` none is."""
    adapters = {m.role: adapter_of(m.name) for m in models if recipe.lora.rank > 0 and not m.trained}
    return {role: adapter.settings for role, adapter in adapters.items() if adapter is not None}


def unchanging(models: Sequence[RoleModel]) -> tuple[str, ...]:
    """Roles whose weights are the same in every step."""
    return tuple(model.role for model in models if not model.changes)


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
    scoring = {each.role: (each.name, each.key) for each in scoring_models(recipe)}
    own: dict[str, tuple[str, str | None]] = {
        "ref": ("reference.model", recipe.reference.model),
        "judge": ("judge.model", recipe.judge.model),
        "critic": ("critic.model", recipe.critic.model),
        "cost_critic": ("cost_critic.model", recipe.cost_critic.model),
    }
    key, name = own.get(role, ("", None))
    if name is not None:
        return name, key
    return scoring.get(LEARNT.get(role, role), (recipe.model, "model"))


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


def reward_settings(role: str, recipe: Recipe) -> RewardSettings:
    """The section of a reward role."""
    return recipe.reward if role == "reward" else recipe.cost


@dataclass(frozen=True)
class ScoringModel:
    """One of the models that a section of rewards names.

    reward: the role that the section is of; role: its own, `reward`, `reward_2`, …; scores: what its scores are called,
    `model`, `model_2`, …; name: as in the recipe; key: of the recipe, for messages; weight: in the sum
    """

    reward: str
    role: str
    scores: str
    name: str
    key: str
    weight: float


def scoring_models(recipe: Recipe) -> tuple[ScoringModel, ...]:
    """All of a recipe, of each section in its order."""
    return tuple(
        ScoringModel(reward, nth(reward, place), nth(MODEL, place), name, key, settings.model_weights[place])
        for reward in REWARD_ROLES
        for settings in (reward_settings(reward, recipe),)
        for place, (key, name) in enumerate(settings.keyed_models(reward).items())
    )


def filled_roles(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Role that a flow may have → of each model after the first that scores for it what its scores are called, and its
    own role."""
    filled: dict[str, dict[str, str]] = {role: {} for role in (*MODEL_ROLES, *REWARD_ROLES)}
    for each in scoring_models(recipe):
        if each.role != each.reward:
            filled[each.reward][each.scores] = each.role
    return filled


def reward_of(role: str) -> str:
    """The reward role that a role's model scores for: `reward` of `reward` and of `reward_2`; empty: none."""
    name, _, number = role.rpartition("_")
    own = name if number.isdecimal() else role
    return own if own in REWARD_ROLES else ""


def is_scalar(role: str) -> bool:
    """Whether the model of a role gives numbers in place of tokens."""
    return role in LEARNT or bool(reward_of(role))


def function_names(recipe: Recipe, role: str) -> str:
    """The functions that score for a reward role, as profiles name them; empty: there are none."""
    settings = reward_settings(role, recipe)
    return " ".join(settings.functions) or (recipe.data.task or "" if role == "reward" else "")
