"""The models of a run's roles, read from their checkpoints, and the settings of their trainers.

A language model fills `actor`, `ref` and `judge`; a scalar model `critic` and `cost_critic`, and `reward` or `cost`
where the flow trains them or has a frozen model score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from plait.dataflow import CallKind, Dataflow
from plait.models.backbone_model import copy_of
from plait.models.files.adapter_folder import adapter_of
from plait.models.files.hub import classes_of, is_classifier
from plait.models.language_model import LanguageModel
from plait.models.loading import Adapt, beside, load_model, load_scalar, merged, without
from plait.models.model import Model
from plait.models.parallel.part_loading import PartLoader
from plait.models.parallel.team import Team
from plait.models.scalar_loading import scalar_of
from plait.models.scalar_model import ScalarModel
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, optimizer_of
from plait.recipes.router_checks import replays_experts
from plait.schedule.placements import PartKey, part_key
from plait.training.trainer_settings import SampleSettings, UpdateSettings

NEW_HEAD_STD = 0.0
"""A new head scores everything 0: a critic then begins by expecting nothing, and the loss of a reward model at ln 2."""


def build_models(wanted: Iterable[RoleModel], recipe: Recipe, *, trains: bool = True) -> dict[str, Model]:
    """Read each checkpoint once and give each role its weights.

    Roles that do not change share one copy of what they begin as. With adapters (`lora`), roles that begin as the
    same checkpoint share its weights, trained or not, and the reference is those weights without an adapter. A role
    that begins as an adapter alone has that one, beside the weights: trained further, or frozen. Without `lora` it is
    merged into the weights.

    Args:
        trains: whether the run trains any role; where it only measures, adapters stay beside the weights.

    Raises:
        ModelError: a model cannot be found, read, or is refused.
    """
    return _Shelf(recipe, merges=trains and recipe.lora.rank == 0).build(wanted)


def part_loader(recipe: Recipe) -> PartLoader:
    """Reads parts of the models that `build_models` reads whole, without adapters."""
    return PartLoader(dtype=recipe.dtype, device=recipe.device, seed=recipe.seed, head_std=NEW_HEAD_STD)


def room_for(role_model: RoleModel, recipe: Recipe) -> Model:
    """A whole model of a role in host memory, for what is trained of it to be brought there. Of one with an adapter
    nothing else is there: the weights under it are not read.

    Raises:
        ModelError: as `build_models`.
    """
    host = recipe.model_copy(update={"device": "cpu"})
    if recipe.lora.rank == 0:
        return build_models([role_model], host)[role_model.role]
    loader = part_loader(host)
    scalar = lambda role_model: loader.without_weights(role_model.name, scalar=True)
    return _adapted(role_model, host, loader.without_weights, scalar, device="cpu")


class _Shelf:
    """Models by where they come from, so that none is read or held twice without need."""

    def __init__(self, recipe: Recipe, *, merges: bool) -> None:
        self._recipe = recipe
        self._adapt = merged if merges else None
        self._language: dict[str, LanguageModel] = {}
        self._frozen: dict[tuple[str, bool], Model] = {}

    def build(self, wanted: Iterable[RoleModel]) -> dict[str, Model]:
        adapted = self._recipe.lora.rank > 0
        return {model.role: self._adapted(model) if adapted else self._whole(model) for model in wanted}

    def _whole(self, role_model: RoleModel) -> Model:
        if role_model.changes:
            return self._fresh(role_model)
        place = (role_model.name, role_model.scalar)
        if place not in self._frozen:
            self._frozen[place] = self._fresh(role_model)
        return self._frozen[place]

    def _fresh(self, role_model: RoleModel) -> Model:
        """Weights of its own. The first language model of a checkpoint takes what was read, later ones a copy."""
        recipe = self._recipe
        if role_model.scalar:
            read = self._language.get(role_model.name)
            if read is not None and not role_model.has_head:
                return scalar_of(read, seed=recipe.seed, head_std=NEW_HEAD_STD)
            return self._load_scalar(role_model, self._adapt)
        if role_model.name not in self._language:
            return self._read(role_model.name, self._adapt)
        return copy_of(self._language[role_model.name])

    def _read(self, name: str, adapt: Adapt | None) -> LanguageModel:
        """The language model of a checkpoint, which is read once."""
        if name not in self._language:
            self._language[name] = load_model(name, dtype=self._recipe.dtype, device=self._recipe.device, adapt=adapt)
        return self._language[name]

    def _load_scalar(self, role_model: RoleModel, adapt: Adapt | None) -> ScalarModel:
        recipe = self._recipe
        return load_scalar(
            role_model.name,
            dtype=recipe.dtype,
            device=recipe.device,
            seed=recipe.seed,
            head_std=NEW_HEAD_STD,
            adapt=adapt,
        )

    def _adapted(self, role_model: RoleModel) -> Model:
        read, read_scalar = partial(self._read, adapt=without), partial(self._load_scalar, adapt=without)
        return _adapted(role_model, self._recipe, read, read_scalar)


class AdaptedParts:
    """Parts of models with adapters: what roles begin as is read once, as of whole models.

    Args:
        loader: made by `part_loader`.
    """

    def __init__(self, recipe: Recipe, loader: PartLoader) -> None:
        self._recipe, self._loader = recipe, loader
        self._bases: dict[tuple[str, bool, PartKey], Any] = {}

    def part(self, role_model: RoleModel, team: Team, *, is_trained: bool) -> Model:
        """This rank's part of the model of a role. All ranks of a team ask for the same in the same order.

        Args:
            is_trained: whether some role trains with these weights under its adapter.

        Raises:
            ModelError: see `PartLoader.part`, and `lora.add_lora`.
        """
        key = part_key(team.layout, team.rank)
        splitting = replace(team, splits_tokens=self._recipe.sequence_parallel and is_trained)

        def read(name: str, *, scalar: bool = False) -> Any:
            if (name, scalar, key) not in self._bases:
                self._bases[name, scalar, key] = self._loader.part(name, splitting, scalar=scalar, merges=False)
            return self._bases[name, scalar, key]

        return _adapted(role_model, self._recipe, read, lambda role_model: read(role_model.name, scalar=True))


def _adapted(
    role_model: RoleModel,
    recipe: Recipe,
    read: Callable[[str], LanguageModel],
    read_scalar: Callable[[RoleModel], ScalarModel],
    device: str | None = None,
) -> Model:
    """The model of a role over base weights that other roles may share: with the adapter that the role begins with, or
    with a fresh one if it trains and begins with none.

    Args:
        read, read_scalar: give a model without the adapter that it may begin as.
        device: of the role's own parameters; None: that of the base weights.
    """
    from plait.models.lora import add_lora
    from plait.models.scalar_loading import scalar_view

    base: Any
    if not role_model.scalar:
        base = read(role_model.name)
    elif role_model.has_head or is_classifier(classes_of(role_model.name)):
        base = read_scalar(role_model)
    else:
        base = scalar_view(read(role_model.name), seed=recipe.seed, head_std=NEW_HEAD_STD, device=device)
    role = role_model.role
    if (adapter := adapter_of(role_model.name)) is not None:
        return beside(role, device)(base, adapter)
    if not role_model.trained:
        return base
    return add_lora(base, recipe.lora, name=role, seed=recipe.seed, device=device)


def sample_settings(role: str, flow: Dataflow, recipe: Recipe) -> SampleSettings:
    """How the samples come about that a role scores or trains on: those that the flow generates are drawn at the
    sampling temperature, and all log-probs are taken at it; those of flows over given samples are taken at 1."""
    sampling = recipe.sampling
    return SampleSettings(
        temperature=sampling.temperature if flow.of_kind(CallKind.GENERATE) else 1.0,
        max_response_tokens=sampling.max_response_tokens,
        stop_token_ids=sampling.stop_token_ids,
        replays_experts=replays_experts(role, flow, recipe),
    )


def update_settings(role: str, flow: Dataflow, recipe: Recipe) -> UpdateSettings:
    """How a role is trained that the flow trains."""
    return UpdateSettings(
        optimizer=optimizer_of(role, recipe),
        total_optimizer_steps=flow.optimizer_steps(role, recipe.steps),
        seed=recipe.seed,
        is_followed=role == "actor" and "ref" in flow.roles and recipe.reference.sync_every > 0,
    )
