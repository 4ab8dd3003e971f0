"""What does not go with samples of several turns (`turns.reply`, `turns.tools`): refused by name before any work, or
not predicted, as further draws of a step, and samples that outlive it, are not either."""

from __future__ import annotations

from collections.abc import Collection

from plait.dataflow import CallKind, Dataflow
from plait.dataflow.graph import texts_of
from plait.errors import ConfigError
from plait.recipes.engine_checks import abilities
from plait.recipes.recipe import Recipe, check_read
from plait.rewards.settings import WaitFor
from plait.schedule.fusion_rule import FusionRule


def check_turns(flow: Dataflow, recipe: Recipe) -> None:
    """Raises ConfigError where a key of `turns` has no effect, or what the recipe asks beside it cannot be done."""
    check_read("turns", recipe.turns)
    if (replier := recipe.turns.replier) is None:
        return
    generates, can = bool(flow.of_kind(CallKind.GENERATE)), abilities(recipe)
    refused = (
        (not generates, f"the flow `{flow.name}` generates nothing that could be replied to; remove it"),
        (
            recipe.rebalance != "off",
            f"`rebalance` is {recipe.rebalance}, but samples that wait for a reply are in no instance to move from; "
            "set `rebalance` to off",
        ),
        (
            FusionRule.of(recipe.fusion).is_stated,
            f"`fusion` is {recipe.fusion}, but samples that wait for a reply are in no instance to be gathered from; "
            "set `fusion` to auto or off",
        ),
        (
            recipe.turns.wait_for is WaitFor.STEP and not recipe.update_rule.waits,
            f"`turns.wait_for` is step, but with `partial_rollout` {recipe.partial_rollout} samples outlive their "
            "step; set `turns.wait_for` to auto or prompt, or `partial_rollout` to off",
        ),
        (
            recipe.turns.wait_for is WaitFor.PROMPT and can.program is not None,
            f"`turns.wait_for` is prompt, but {can.program} is asked for the turns of a step at once; set "
            "`turns.wait_for` to auto or step, or `sampling.engine` to plait",
        ),
    )
    for is_refused, why in refused:
        if is_refused:
            raise ConfigError(f"`{replier}` is set, and {why}")


def rounds_by_prompt(recipe: Recipe) -> bool:
    """Whether next turns wait for those of their own prompt alone, by themselves where samples outlive their step."""
    if recipe.turns.wait_for is WaitFor.AUTO:
        return not recipe.update_rule.waits
    return recipe.turns.wait_for is WaitFor.PROMPT


def said_of_made(flow: Dataflow, known: Collection[str] = ()) -> str | None:
    """By which rule predictions count prompts that nobody knows before, in words for a person; None: there are none.

    Args:
        known: calls whose prompts are as long as those of a run.
    """
    made = [node for node in flow.of_kind(CallKind.GENERATE) if node.prompts is not None and node.call not in known]
    if not made:
        return None
    reads = any(texts_of(flow.nodes[node.prompts]) for node in made if node.prompts is not None)
    beside = " and the texts that their functions are given" if reads else ""
    return (
        f"prompts of {', '.join(node.call for node in made)} count as long as the samples that they are made of, with "
        f"their own prompts{beside}; what is written around these is not known before"
    )


def said_of_rounds(flow: Dataflow, recipe: Recipe) -> str | None:
    """What predictions leave out, in words for a person; None: samples are drawn once, in one step, and have one
    turn."""
    said = [
        f"one round of draws counts: further ones of {node.call}, {resample.max_rounds - 1} at most, are not predicted"
        for node in flow.of_kind(CallKind.GENERATE)
        if (resample := node.generation.resample) is not None and resample.max_rounds > 1
    ]
    if recipe.turns.replier is not None:
        said.append(
            "responses count as drawn at once: neither rounds of turns nor the seconds of "
            f"`{recipe.turns.replier}` are predicted"
        )
    if not recipe.update_rule.waits:
        said.append(
            "samples count as with `partial_rollout` off: what is gained where they outlive their step "
            f"(`partial_rollout` {recipe.partial_rollout}) is not predicted"
        )
    return "; ".join(said) or None
