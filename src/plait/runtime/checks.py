"""What a recipe asks of its flow, sampling, lengths and device, checked before any work. Loads no weights."""

from __future__ import annotations

from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError, FlowError
from plait.models.shape import ModelShape
from plait.runtime.recipe import Recipe

_CALLS = {
    "actor": {"generate", "logprobs", "train"},
    "ref": {"logprobs", "generate"},
    "critic": {"values", "train"},
    "cost_critic": {"values", "train"},
    "reward": {"score", "train"},
    "cost": {"score", "train"},
}
"""What each role can be asked."""


def prompt_limit(recipe: Recipe, shape: ModelShape) -> int:
    """Most tokens that a prompt may have: `data.max_prompt_tokens`, within what the model's positions leave.

    Raises:
        ConfigError: prompt and response together do not fit the model.
    """
    room = shape.max_positions - recipe.sampling.max_response_tokens
    asked = recipe.data.max_prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        raise ConfigError(
            f"`data.max_prompt_tokens` ({asked or 1}) + `sampling.max_response_tokens` "
            f"({recipe.sampling.max_response_tokens}) exceed the {shape.max_positions} positions of `{recipe.model}`; "
            "lower one of them"
        )
    return asked or room


def check_sampling(recipe: Recipe) -> None:
    """Training needs log-probs over the support that was sampled from, so truncated sampling is refused.

    Raises:
        ConfigError: temperature 0, top_p or top_k in a training recipe.
    """
    sampling = recipe.sampling
    if sampling.temperature == 0:
        raise ConfigError(
            "`sampling.temperature` is 0: every sample of a group would be the same; give a value above 0"
        )
    for key, value, off in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != off:
            raise ConfigError(
                f"`sampling.{key}` is {value}: training on a truncated distribution biases the probability ratio "
                f"(log-probs are those of the whole vocabulary); set it to {off:g}, or use it in `plait generate` only"
            )


def check_device(recipe: Recipe) -> None:
    """Raises ConfigError where `device` is not to be had."""
    if recipe.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("`device` is cuda, but torch finds no CUDA device; set it to cpu")


def check_calls(flow: Dataflow) -> None:
    """Raises FlowError where a role is asked for what it cannot do, or nothing is trained."""
    for node in flow.nodes:
        if node.kind is CallKind.COMPUTE or node.role is None:
            continue
        call = node.call.split("#")[0].removeprefix(f"{node.role}.")
        if call not in _CALLS[node.role]:
            can = ", ".join(sorted(_CALLS[node.role]))
            raise FlowError(f"flow `{flow.name}`: role `{node.role}` cannot `{call}`; it can {can}")
        if call in ("score", "train") and {"score", "train"} <= flow.call_kinds(node.role):
            raise FlowError(f"flow `{flow.name}`: role `{node.role}` scores and is trained; take two flows for that")


def check_unused(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where a section says something that this flow has no use for."""
    generates = bool(flow.of_kind(CallKind.GENERATE))
    sections = (
        ("reward", "reward" in flow.roles),
        ("cost", "cost" in flow.roles),
        ("critic", "critic" in flow.roles),
        ("cost_critic", "cost_critic" in flow.roles),
        ("sampling", generates),
        ("pretraining", generates and bool(flow.of_kind(CallKind.READ))),
    )
    default = Recipe(model=recipe.model, data=recipe.data)
    for name, used in sections:
        if not used and getattr(recipe, name) != getattr(default, name):
            what = f"has no role `{name}`" if name in _CALLS else "generates nothing"
            if name == "pretraining":
                what = "reads no examples beside its prompts (safe_rlhf does with `options.ptx_coef` above 0)"
            raise ConfigError(f"`{name}` is set, but the flow `{flow.name}` {what}; remove the section `{name}`")


def check_rewards(flow: Dataflow, recipe: Recipe, *, has_task: bool) -> None:
    """Raises ConfigError where a reward that the flow scores by is made of nothing."""
    for role, settings in (("reward", recipe.reward), ("cost", recipe.cost)):
        if "score" not in flow.call_kinds(role) or settings.model is not None or settings.functions:
            continue
        if role == "cost" or not has_task:
            raise ConfigError(
                f"the flow `{flow.name}` scores by the role `{role}`, which nothing fills: set `{role}.functions` "
                f"(FILE.py:FUNCTION or package.module:function) or `{role}.model` (a reward model)"
            )
