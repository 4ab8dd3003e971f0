"""What fills the roles of a flow on one device: models with their engines, reward functions in worker processes.

A language model fills `actor` and `ref`; a scalar model `critic` and `cost_critic`, and `reward` or `cost` where the
flow trains them; a reward that is not trained is made of functions, of a frozen scalar model, or of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.dataflow import CallKind, Dataflow
from plait.generation.engine import Engine
from plait.models.backbone import copy_of
from plait.models.language_model import LanguageModel
from plait.models.loading import load_model
from plait.models.part_loading import PartLoader
from plait.models.scalar_model import ScalarModel, load_scalar, scalar_of
from plait.rewards.pool import RewardPool
from plait.runtime.recipes.recipe import Recipe
from plait.runtime.recipes.role_models import REWARD_ROLES, RoleModel, optimizer_of
from plait.runtime.scorer import ModelScorer, translator_for
from plait.training.trainer import Trainer

if TYPE_CHECKING:
    from plait.runtime.ranks.crew_calls import CrewTrainer
    from plait.runtime.ranks.crew_engine import CrewEngine

NEW_HEAD_STD = 0.0
"""A new head scores everything 0: a critic then begins by expecting nothing, and the loss of a reward model at ln 2."""


@dataclass
class ModelRole:
    """A model; `engine` is there for a role that generates, the trainer has an optimizer if it is trained.

    Of a run on several ranks, trainer and engine are those of a crew, and the model is this rank's part, None where it
    has none.
    """

    model: LanguageModel | ScalarModel | None
    trainer: Trainer | CrewTrainer
    engine: Engine | CrewEngine | None = None


@dataclass
class RewardRole:
    """What scores samples: functions in worker processes, a frozen model, or both."""

    pool: RewardPool | None
    scorer: ModelScorer | None = None


RoleRuntime = ModelRole | RewardRole


def build_models(wanted: Iterable[RoleModel], recipe: Recipe) -> dict[str, LanguageModel | ScalarModel]:
    """Read each checkpoint once and give each role its weights.

    Roles that are not trained share one copy of what they begin as. With adapters (`lora`), roles that begin as the
    same checkpoint share its weights, trained or not, and the reference is those weights without an adapter.

    Raises:
        ModelError: a model cannot be found, read, or is refused.
    """
    return _Shelf(recipe).build(wanted)


def part_loader(recipe: Recipe) -> PartLoader:
    """Reads parts of the models that `build_models` reads whole, without adapters."""
    return PartLoader(dtype=recipe.dtype, device=recipe.device, seed=recipe.seed, head_std=NEW_HEAD_STD)


class _Shelf:
    """Models by where they come from, so that none is read or held twice without need."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._language: dict[str, LanguageModel] = {}
        self._frozen: dict[tuple[str, bool], LanguageModel | ScalarModel] = {}

    def build(self, wanted: Iterable[RoleModel]) -> dict[str, LanguageModel | ScalarModel]:
        adapted = self._recipe.lora.rank > 0
        return {one.role: self._adapted(one) if adapted else self._whole(one) for one in wanted}

    def _whole(self, one: RoleModel) -> LanguageModel | ScalarModel:
        if one.trained:
            return self._fresh(one)
        place = (one.name, one.scalar)
        if place not in self._frozen:
            self._frozen[place] = self._fresh(one)
        return self._frozen[place]

    def _fresh(self, one: RoleModel) -> LanguageModel | ScalarModel:
        """Weights of its own. The first language model of a checkpoint takes what was read, later ones a copy."""
        recipe = self._recipe
        if one.scalar:
            read = self._language.get(one.name)
            if read is not None and not one.has_head:
                return scalar_of(read, seed=recipe.seed, head_std=NEW_HEAD_STD)
            return self._load_scalar(one)
        if one.name not in self._language:
            self._language[one.name] = load_model(one.name, dtype=recipe.dtype, device=recipe.device)
            return self._language[one.name]
        return copy_of(self._language[one.name])

    def _load_scalar(self, one: RoleModel) -> ScalarModel:
        recipe = self._recipe
        return load_scalar(one.name, dtype=recipe.dtype, device=recipe.device, seed=recipe.seed, head_std=NEW_HEAD_STD)

    def _adapted(self, one: RoleModel) -> LanguageModel | ScalarModel:
        from plait.models.lora import add_lora, scalar_view

        recipe = self._recipe
        if one.has_head:
            base: LanguageModel | ScalarModel = self._load_scalar(one)
        else:
            if one.name not in self._language:
                self._language[one.name] = load_model(one.name, dtype=recipe.dtype, device=recipe.device)
            base = self._language[one.name]
            base = scalar_view(base, seed=recipe.seed, head_std=NEW_HEAD_STD) if one.scalar else base
        if not one.trained:
            return base
        return add_lora(base, recipe.lora, name=one.role, seed=recipe.seed)


def build_roles(
    wanted: Sequence[RoleModel], flow: Dataflow, recipe: Recipe, pools: Mapping[str, RewardPool], *, evaluates: bool
) -> dict[str, RoleRuntime]:
    """Everything that the flow's roles need.

    Args:
        wanted: which model each role begins as.
        pools: reward role → its functions, already started.
        evaluates: the actor answers held-out prompts, so it has an engine even where the flow does not let it generate.
    """
    models = build_models(wanted, recipe)
    actor = models.get("actor")
    roles: dict[str, RoleRuntime] = {}
    for one in wanted:
        model = models[one.role]
        trainer = make_trainer(one, model, flow, recipe)
        asked = flow.call_kinds(one.role)
        if one.role in REWARD_ROLES and "train" not in asked:
            settings = recipe.reward if one.role == "reward" else recipe.cost
            translator = None if actor is None else translator_for(actor.tokenizer, model.tokenizer)
            roles[one.role] = RewardRole(
                pools.get(one.role), ModelScorer(trainer, translator, settings.model_weight, one.key, settings.on_error)
            )
            continue
        generates = "generate" in asked or (one.role == "actor" and evaluates)
        engine = None
        if generates:
            assert isinstance(model, LanguageModel), f"role {one.role} generates with a scalar model"
            engine = Engine(model, recipe.sampling, keep_memory=not any(other.trained for other in wanted))
        roles[one.role] = ModelRole(model, trainer, engine)
    for role, pool in pools.items():
        roles.setdefault(role, RewardRole(pool))
    return roles


def make_trainer(
    one: RoleModel,
    model: LanguageModel | ScalarModel,
    flow: Dataflow,
    recipe: Recipe,
    *,
    trained: bool | None = None,
    micro_batch_tokens: int | None = None,
    **several: Any,
) -> Trainer:
    """The trainer of a role.

    Args:
        trained: whether with an optimizer; None: as the role is.
        micro_batch_tokens: None: the recipe's.
        several: of a rank among several: `team` and `pipeline`.
    """
    trained = one.trained if trained is None else trained
    # Flows that generate take all log-probs at the sampling temperature; those over given samples at 1.
    generates = bool(flow.of_kind(CallKind.GENERATE))
    return Trainer(
        model,
        optimizer_of(one.role, recipe) if trained else None,
        role=one.role,
        micro_batch_tokens=micro_batch_tokens or recipe.micro_batch_tokens,
        temperature=recipe.sampling.temperature if generates else 1.0,
        total_optimizer_steps=flow.optimizer_steps(one.role, recipe.steps) if trained else 0,
        max_response_tokens=recipe.sampling.max_response_tokens,
        stop_token_ids=recipe.sampling.stop_token_ids,
        checkpoint_activations=recipe.checkpoint_activations,
        seed=recipe.seed,
        **several,
    )
