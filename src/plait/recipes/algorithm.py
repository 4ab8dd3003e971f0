"""Find an algorithm by name or file, and trace it with its options. Torch-free."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from plait.data.formats import RowKind
from plait.dataflow import CallKind, Dataflow, trace
from plait.dataflow.unfit import nearest
from plait.errors import ConfigError, FlowError
from plait.recipes.other_names import answer_value
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import option_names, recipe_of, unknown_keys, unknown_options, validate_options
from plait.recipes.role_models import filled_roles
from plait.rewards.loading import load_function
from plait.user_code import UserCode, is_users, title_of

BUILT_IN = {
    "grpo": "plait.algorithms.grpo:grpo",
    "rloo": "plait.algorithms.rloo:rloo",
    "reinforce_pp": "plait.algorithms.reinforce_pp:reinforce_pp",
    "remax": "plait.algorithms.remax:remax",
    "ppo": "plait.algorithms.ppo:ppo",
    "safe_rlhf": "plait.algorithms.safe_rlhf:safe_rlhf",
    "sft": "plait.algorithms.sft:sft",
    "reward_model": "plait.algorithms.reward_model:reward_model",
    "dpo": "plait.algorithms.dpo:dpo",
    "kto": "plait.algorithms.kto:kto",
    "distill": "plait.algorithms.distill:distill",
}

_OF_GRPO = "it is `grpo` with other options (docs/algorithms.md, GRPO's relatives)"
_OF_DPO = "it is `dpo` with other options (docs/algorithms.md, DPO and its relatives)"
_LOSS = "it is `grpo` with `options.loss_type: {}` (docs/algorithms.md)"
_NEWER = "it is `examples/newer_losses.py:newer` with `options.loss: {}` (docs/own-algorithm.md)"
_DEMONSTRATED = "it is `examples/demonstrated.py:demonstrated` with `options.mix: {}` (docs/own-algorithm.md)"
_ADVANTAGES = "it is `examples/newer_advantages.py:newer` with `options.{}` (docs/own-algorithm.md)"
_TOLD = "it is `examples/self_distillation.py:{}` (docs/samples-from-samples.md)"
RELATIVES = {
    **dict.fromkeys(("dapo", "drgrpo", "gspo", "liteppo", "luspo"), _OF_GRPO),
    **dict.fromkeys(("rpo", "simpo", "cpo", "orpo", "ipo", "slic", "exo", "nca", "bco", "sppo", "apo"), _OF_DPO),
    **{name: _LOSS.format(name) for name in ("cispo", "gmpo", "sapo", "vespo")},
    **{name: _NEWER.format(name) for name in ("topr", "gpg")},
    "maxrl": _ADVANTAGES.format("advantage: maxrl"),
    **dict.fromkeys(("passatk", "passk"), _ADVANTAGES.format("advantage: pass_at_k")),
    **dict.fromkeys(("raft", "rft"), _ADVANTAGES.format("advantage: best")),
    "spo": _ADVANTAGES.format("advantage: tracked"),
    "klcov": _ADVANTAGES.format("covariant"),
    **{name: _DEMONSTRATED.format(name) for name in ("chord", "luffy")},
    "ppoptx": "it is `ppo` with `options.ptx_coef` and `pretraining.source` (docs/algorithms.md)",
    **{name: _TOLD.format(name) for name in ("sdft", "sdpo")},
    **dict.fromkeys(("opsd", "selfdistillation", "contextdistillation"), _TOLD.format("sdft")),
    **dict.fromkeys(("selfrewarding", "genrm"), "it is `examples/judged.py:judged` (docs/samples-from-samples.md)"),
    "onlinedpo": "it is `examples/online_dpo.py:online_dpo` (docs/own-algorithm.md)",
    **dict.fromkeys(("gkd", "distillation"), "it is `distill` (docs/algorithms.md, From a teacher)"),
    **dict.fromkeys(("rm", "reward", "rewardmodeling"), "it is `reward_model`"),
    **{name.replace("_", ""): f"it is `{name}`" for name in BUILT_IN},
}
"""What others have as an algorithm, in small letters without signs → what to say of it."""


def load_flow(name: str) -> Callable[..., Any]:
    """A built-in flow by name, or the function of `FILE.py:FUNCTION` or `package.module:function`.

    Raises:
        ConfigError: no such algorithm, file or function.
    """
    if name in BUILT_IN:
        return load_function(BUILT_IN[name], key="algorithm")
    if not re.search(r"[:/.\\]", name):
        meant = RELATIVES.get(re.sub("[^a-z]", "", name.lower().replace("+", "p")).removesuffix("trainer"))
        near = f"; {meant}" if meant else answer_value("algorithm", name) or nearest(name, list(BUILT_IN))
        raise ConfigError(
            f"key `algorithm`: no algorithm `{name}`{near}; give one of {', '.join(BUILT_IN)}, or FILE.py:FUNCTION"
        )
    return load_function(name, key="algorithm")


def traced_flow(recipe: Recipe) -> Dataflow:
    """The graph of the recipe's algorithm with its options.

    Raises:
        ConfigError: there is no such algorithm, or its options do not fit. FlowError: see `trace_algorithm`.
    """
    return trace_algorithm(
        load_flow(recipe.algorithm),
        recipe.options,
        filled_roles(recipe),
        max_staleness=recipe.max_staleness,
        lets_be=recipe.lets_be("options"),
    )


def trace_algorithm(
    flow: Callable[..., Any],
    options: Mapping[str, Any],
    roles: Collection[str] | Mapping[str, Mapping[str, str]],
    *,
    max_staleness: int = 0,
    lets_be: bool = False,
) -> Dataflow:
    """Check `options` against the class that the flow's `options` parameter is annotated with, and trace the flow.

    Args:
        roles: as of `dataflow.trace`.
        max_staleness: of the recipe; above 0 options that may correct for it do, unless they say otherwise.
        lets_be: options may be without effect (`Recipe.lets_be`).

    Raises:
        ConfigError: an option is unknown or does not fit. FlowError: see `options_class`, `dataflow.trace`.
    """
    cls = options_class(flow)
    if cls is None and options:
        raise ConfigError(f"key `options`: the flow takes no `options`, found {sorted(options)}")
    if max_staleness > 0 and cls is not None and hasattr(cls, "of_older_samples"):
        options = cls.of_older_samples(options)
    with UserCode(f"key `options`: the class of the options of `{title_of(flow)}`", ConfigError, users=is_users(flow)):
        said = partial(_said_of_others, title_of(flow))
        checked = None if cls is None else validate_options(cls, options, said, lets_be=lets_be)
    return trace(flow, roles=roles, options=checked)


def unknown_with_options(tree: Mapping[str, Any]) -> list[str]:
    """What to say of each key of a tree that there is not, of the options of a built-in algorithm, too. (A flow of the
    user's is a file, which is imported when the run begins.)"""
    algorithm = tree.get("algorithm", Recipe.model_fields["algorithm"].default)
    options = tree.get("options")
    own = []
    if isinstance(algorithm, str) and algorithm in BUILT_IN and isinstance(options, Mapping):
        cls = options_class(load_flow(algorithm))
        own = [] if cls is None else unknown_options(cls, options, partial(_said_of_others, algorithm))
    return [*unknown_keys(tree), *own]


def checked_recipe(tree: Mapping[str, Any]) -> Recipe:
    """`recipe_of`, which tells of unknown options at once with unknown keys.

    Raises:
        ConfigError: as there, or an option of a built-in algorithm is unknown.
    """
    if unknown := unknown_with_options(tree):
        raise ConfigError(*unknown)
    return recipe_of(tree)


def _said_of_others(flow: str, option: str) -> str:
    """What to say of an option that the flow lacks: which built-in algorithms have it."""
    having = [name for name in BUILT_IN if option in option_names(options_class(load_flow(name)) or object)]
    return f": it is one of {', '.join(having)}, and the flow `{flow}` has none of that name" if having else ""


def rows_of(flow: Dataflow) -> RowKind:
    """What rows of a run's data are: prompts where it generates, else what it is trained on."""
    return RowKind.PROMPTS if flow.of_kind(CallKind.GENERATE) else RowKind(flow.main_rows.call)


def options_class(flow: Callable[..., Any]) -> type[Any] | None:
    """The class that the flow's parameter `options` is annotated with; None for a flow without that parameter.

    No other annotation is resolved: the rest may name what is imported for type checkers only.

    Raises:
        FlowError: the parameter has no annotation, or one that is no class, or that cannot be resolved.
    """
    with UserCode(f"the flow `{title_of(flow)}`", FlowError, users=is_users(flow)):
        parameter = inspect.signature(flow).parameters.get("options")
    if parameter is None:
        return None
    name = title_of(flow)
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        raise FlowError(f"flow `{name}`: annotate its parameter `options` with the class of its options")
    alone = SimpleNamespace(__annotations__={"options": annotation})
    try:
        cls = typing.get_type_hints(alone, globalns=getattr(inspect.unwrap(flow), "__globals__", {}))["options"]
    except (NameError, SyntaxError, AttributeError, TypeError) as error:
        raise FlowError(
            f"flow `{name}`: the annotation `{annotation}` of its parameter `options` cannot be resolved ({error}); "
            "import or define that class at the top of the file, not under `if TYPE_CHECKING`"
        ) from None
    if not isinstance(cls, type):
        raise FlowError(
            f"flow `{name}`: its parameter `options` needs the annotation of one class, found `{annotation}`"
        )
    return cls
