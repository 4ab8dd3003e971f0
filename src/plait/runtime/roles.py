"""What fills the roles of a flow on one device: a model with its engines, or reward functions in worker processes."""

from __future__ import annotations

from dataclasses import dataclass

from plait.dataflow import CallKind, Dataflow
from plait.generation.engine import Engine
from plait.models.language_model import LanguageModel, copy_of, load_model
from plait.rewards.pool import RewardPool
from plait.runtime.recipe import Recipe
from plait.training.trainer import Trainer


@dataclass
class ModelRole:
    """A language model; `engine` is there for a role that generates, the trainer has an optimizer if it is trained."""

    model: LanguageModel
    trainer: Trainer
    engine: Engine | None = None


@dataclass
class FunctionRole:
    pool: RewardPool


RoleRuntime = ModelRole | FunctionRole


def model_roles(flow: Dataflow, recipe: Recipe, functions: frozenset[str], *, evaluates: bool) -> dict[str, ModelRole]:
    """Load the recipe's model once and give each role its own weights; roles that are not trained share one copy.

    Args:
        functions: roles filled by functions, left out here.
        evaluates: trained roles answer held-out items, so they have an engine even where the flow does not let them
            generate.

    Raises:
        ModelError: the model cannot be found, read, or is refused.
    """
    names = [name for name in flow.roles if name not in functions]
    kinds = {name: {node.kind for node in flow.calls(name)} for name in names}
    trained = [name for name in names if CallKind.TRAIN in kinds[name]]
    first = load_model(recipe.model, dtype=recipe.dtype, device=recipe.device)
    frozen = copy_of(first) if trained and len(trained) < len(names) else first
    roles = {}
    for name in names:
        is_trained = name in trained
        model = frozen if not is_trained else first if name == trained[0] else copy_of(first)
        trainer = Trainer(
            model,
            recipe.optimizer if is_trained else None,
            role=name,
            micro_batch_tokens=recipe.micro_batch_tokens,
            temperature=recipe.sampling.temperature,
            total_optimizer_steps=recipe.steps * flow.optimizer_steps(name),
            max_response_tokens=recipe.sampling.max_response_tokens,
            checkpoint_activations=recipe.checkpoint_activations,
            seed=recipe.seed,
        )
        generates = CallKind.GENERATE in kinds[name] or (is_trained and evaluates)
        engine = Engine(model, recipe.sampling) if generates else None
        roles[name] = ModelRole(model, trainer, engine)
    return roles
