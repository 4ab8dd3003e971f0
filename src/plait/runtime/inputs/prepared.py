"""A run whose recipe has been read and checked, as everything of it begins from. Loads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from plait.cost.lengths import Lengths, SampleLengths
from plait.data.examples import ExampleSet
from plait.data.mixture import Mixed, Stream
from plait.data.prompts import PromptSet
from plait.dataflow import CallKind, Dataflow
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.rewards.functions import RewardFunction
from plait.rewards.tool_calls import Tools
from plait.runtime.inputs.feed import Feed
from plait.runtime.inputs.held_out import HeldOut
from plait.runtime.inputs.text_lengths import lengths_in, longest_given
from plait.schedule.plan import Plan
from plait.schedule.schedule import Schedule


@dataclass(frozen=True)
class Outline:
    """A recipe whose keys, flow and models fit together. Its fields are as those of `Prepared`."""

    recipe: Recipe
    flow: Dataflow
    models: tuple[RoleModel, ...]
    shapes: Mapping[str, ModelShape]
    functions: Mapping[str, tuple[RewardFunction, ...]]
    eval_functions: tuple[RewardFunction, ...]

    @cached_property
    def lengths(self) -> SampleLengths:
        """Tokens of prompts and responses, or of given samples: as many as the recipe and the model allow."""
        data, positions = self.recipe.data, self.shapes[self.recipe.model].max_positions
        generates, beside = bool(self.flow.of_kind(CallKind.GENERATE)), self.recipe.pretraining
        source = data if not generates or beside is None else beside
        given = {
            node.call: longest_given(source.max_example_tokens or positions, node.call)
            for node in self.flow.of_kind(CallKind.READ)
        }
        if not generates:
            return next(iter(given.values()))
        most = self.recipe.sampling.max_response_tokens
        prompts = Lengths.fixed(data.max_prompt_tokens or max(1, positions - most))
        return SampleLengths(prompts, Lengths.fixed(most), beside=given)


@dataclass(frozen=True)
class Kept:
    """What was found for a run when it began, and stays so.

    plan:    of a recipe that leaves it to be found; None: it is resolved, or found, anew
    earlier: the plan of the stay before, whose orders and settings of policies hold where a plan leaves these open
    """

    plan: Plan | None = None
    earlier: Plan | None = None

    @property
    def orders(self) -> Sequence[Schedule]:
        """Schedules; see `fusing.with_order`."""
        return () if self.earlier is None else self.earlier.schedules

    def settled(self, plan: Plan) -> Plan:
        """A plan with the settings of its policies that were found before."""
        settled = {} if self.earlier is None else {policy.name: policy for policy in self.earlier.policies}
        return replace(plan, policies=tuple(p if p.settings else settled.get(p.name, p) for p in plan.policies))


NOTHING_KEPT = Kept()


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    recipe: Recipe
    """Its length in `steps`, whichever way the user said it."""
    flow: Dataflow
    models: tuple[RoleModel, ...]
    """Which model each role begins as."""
    shapes: Mapping[str, ModelShape]
    """By the model's name in the recipe."""
    plan: Plan
    """Where every call of a model runs."""
    tokenizer: Any
    functions: Mapping[str, tuple[RewardFunction, ...]]
    """Reward role → its functions."""
    eval_functions: tuple[RewardFunction, ...]
    columns: tuple[str, ...]
    """Columns of the data, which reward functions may ask for."""
    train_set: Mixed[PromptSet] | None
    """None for a flow that does not generate."""
    given: Mapping[str, Mixed[ExampleSet]]
    """`examples` and `pairs`, where the flow reads them."""
    held_out: tuple[HeldOut, ...]
    """What evaluations are made on, set by set; empty where nothing is evaluated."""
    tools: Tools | None
    """What the model is told of `turns.tools`; None: there are none."""
    devices_alike: bool
    """Whether the GPUs of all machines are of one kind, as far as they say it."""

    @property
    def shape(self) -> ModelShape:
        """Shape of the run's own model."""
        return self.shapes[self.recipe.model]

    @property
    def num_held_out(self) -> int:
        """Items of an evaluation, of all sets: prompts, examples, or pairs."""
        return sum(held_out.num_items for held_out in self.held_out)

    @property
    def asks_for_more(self) -> bool:
        """Whether functions of the user's say what is drawn further: they reply, or decide what is drawn again."""
        rollouts = self.flow.of_kind(CallKind.GENERATE)
        return bool(self.recipe.turns.replier) or any(node.generation.resample is not None for node in rollouts)

    @cached_property
    def lengths(self) -> SampleLengths:
        """Tokens of the data, see `text_lengths.lengths_in`."""
        return lengths_in(self.train_set, self.given, self.recipe.sampling.max_response_tokens)

    def feed(self, drawn: int = 0) -> Feed:
        """The data of the run, from the `drawn`-th prompt on."""
        seed, prompts = self.recipe.seed, None
        if self.train_set is not None:
            prompts = Stream(self.train_set, lambda rows, index, uid: [rows.prompt(index, uid)], seed=seed)
        given = {name: Stream(examples, ExampleSet.given, seed=seed) for name, examples in self.given.items()}
        return Feed(prompts, given, self.recipe.prompts_per_step, drawn)
