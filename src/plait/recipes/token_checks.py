"""Whether a flow asks models for as many of their likeliest tokens as they have. Loads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.dataflow import CallKind, Dataflow, Node, Top
from plait.dataflow.options import ScoreOptions
from plait.errors import ConfigError, FlowError
from plait.models.files.known_shapes import is_shape
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel, ToCome


def check_teacher(flow: Dataflow, recipe: Recipe, to_come: Mapping[str, ToCome]) -> None:
    """Two models may be of one shape, which is all that is known of them before there are weights.

    Args:
        to_come: as of `prepare`. Until then a model of its shape stands there, which may be the policy's.

    Raises:
        ConfigError: a flow would learn from the policy that it begins with. FlowError: the role that it learns from
            has no model of its own.
    """
    if others := sorted(flow.teachers - {"ref"}):
        raise FlowError(f"flow `{flow.name}`: role `{others[0]}` cannot teach; `ref` can, as `reference.model`")
    keys = (("model", recipe.model), ("reference.model", recipe.reference.model))
    own, teacher = (to_come[key].name if key in to_come else name for key, name in keys)
    if flow.teachers and (teacher is None or (teacher == own and not is_shape(teacher))):
        raise ConfigError(
            f"the flow `{flow.name}` learns from a teacher, but `reference.model` is "
            f"{'not set' if teacher is None else 'the same'}, so that it would be `{own}` itself, from which "
            "there is nothing to learn; give the teacher's model"
        )


def among_known(
    flow: Dataflow, recipe: Recipe, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]
) -> Dataflow:
    """The flow, of which each call for likeliest tokens chooses among those that the run's model has: a teacher may
    have rows for more, of which no tokenizer tells.

    Args:
        shapes: by the model's name.

    Raises:
        ConfigError: a call asks for more tokens than its model, or the run's, has.
    """
    of_roles = {model.role: model for model in models}

    def known(node: Node) -> Node:
        if node.kind is not CallKind.SCORE or not isinstance(node.scoring, Top):
            return node
        most = shapes[recipe.model].vocabulary
        for key, name in (("model", recipe.model), (of_roles[str(node.role)].key, of_roles[str(node.role)].name)):
            if node.scoring.count > (has := shapes[name].vocabulary):
                raise ConfigError(
                    f"{node.call} of the flow `{flow.name}` asks for the {node.scoring.count} likeliest tokens "
                    f"(`options.top_k` of distill), but `{name}` (key `{key}`) has {has}; ask for no more"
                )
        return replace(node, options=ScoreOptions(replace(node.scoring, among=most), node.prompts))

    return replace(flow, nodes=tuple(map(known, flow.nodes)))
