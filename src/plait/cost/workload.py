"""What a step of a recipe is made of, in numbers: prompts, samples, lengths, and how they are cut. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.cost.call_lengths import lengths_by_call
from plait.cost.drafts import NO_DRAFTS, Drafts
from plait.cost.generation_memory import EngineBytes
from plait.cost.lengths import SampleLengths
from plait.cost.shared_root import held_root, shared_root
from plait.cost.working_memory import is_fused, is_packed
from plait.dataflow import CallKind, Dataflow, Node
from plait.dataflow.made_rows import prompts_each, samples_of_prompt
from plait.errors import ConfigError
from plait.generation.settings import SamplingSettings
from plait.models.lora_settings import NO_LORA, LoraSettings
from plait.models.shape import ModelShape
from plait.recipes.engine_checks import drafts_whole, max_draft_tokens
from plait.recipes.evaluation_sets import draws_filtered
from plait.recipes.generated_ahead import scores_ahead
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import frozen_adapters, is_balanced, optimizer_of, role_models


@dataclass(frozen=True)
class Samples:
    """The rows that one call reads: so many prompts with so many samples each."""

    prompts: int
    per_prompt: int

    @property
    def count(self) -> int:
        return self.prompts * self.per_prompt


@dataclass(frozen=True)
class Workload:
    """A step, whatever models it is done with.

    max_running: samples that an instance decodes at a time at most; kv_tokens: tokens whose keys and values it holds at
                 most, None where only the device's memory bounds them; shared_root: tokens that all prompts begin
                 with which it computes once; held_root: which it holds once
    lora:        of the adapters of trained roles; of rank 0: whole models are trained
    frozen:      role that is not trained → its adapter, where it has one
    sharded:     roles whose gradients are divided over dp (`optimizer.shard_gradients`); balanced: whose routers have
                 a loss (`optimizer.router_aux_loss_coef`)
    follows:     whether the reference follows the actor
    fused, packed: as of `working_memory.is_fused` and `is_packed`
    device:      cpu or cuda
    stated_groups: of samples that go round the stages of an instance; None: as many as plait's own rule says
    rebalances:  whether instances give each other samples; gathers: whether the last samples may be gathered on few
    drafts:      tokens that are drafted; draft_model: the shape of the model that drafts, None: none does;
                 drafts_whole: whether only instances of one device draft; most_new_tokens: of a sample in a step, with
                 what is drafted
    sampling:    what chooses tokens, and whether samples keep which experts their tokens went to; filters: whether
                 top-k, top-p or min-p chooses tokens, in an evaluation at least
    batches:     of samples that are there at a time
    engine_bytes: by the role, of its engine on each rank where it generates: known texts, a draft model, and what may
                 come to it where its weights are widened; all that another engine takes
    elsewhere:   whether keys and values are another engine's, and among these
    pools_stay:  whether pools and graphs of GPUs are those of the rollout before
    scores_ahead: ids of the calls that score samples in the step that draws them; None: all do
    function_s:  seconds in which the reward functions score one sample, in one process; workers: processes of them
    """

    prompts_per_step: int
    samples_per_prompt: int
    lengths: SampleLengths
    dtype: str = "bfloat16"
    micro_batch_tokens: int = 4096
    max_running: int = 64
    max_prefill_tokens: int = 4096
    kv_tokens: int | None = None
    shared_root: int = 0
    held_root: int = 0
    checkpoint_activations: bool = False
    sequence_parallel: bool = False
    lora: LoraSettings = NO_LORA
    frozen: Mapping[str, LoraSettings] = field(default_factory=dict)
    sharded: frozenset[str] = frozenset()
    balanced: frozenset[str] = frozenset()
    follows: bool = False
    fused: bool = False
    packed: bool = False
    device: str = "cpu"
    stated_groups: int | None = None
    rebalances: bool = False
    gathers: bool = False
    drafts: Drafts = NO_DRAFTS
    draft_model: ModelShape | None = None
    drafts_whole: bool = False
    most_new_tokens: int = 1
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    filters: bool = False
    batches: int = 1
    engine_bytes: Mapping[str, EngineBytes] = field(default_factory=dict)
    elsewhere: bool = False
    pools_stay: bool = False
    scores_ahead: frozenset[int] | None = None
    function_s: float = 0.0
    workers: int = 1

    @classmethod
    def of(cls, recipe: Recipe, flow: Dataflow, lengths: SampleLengths) -> Workload:
        """
        Args:
            lengths: what a run would draw, and of what it reads beside; of a flow that reads its samples, what they
                are.

        Raises:
            ConfigError: a response is longer than the recipe lets it be.
        """
        most = recipe.sampling.max_response_tokens
        if flow.of_kind(CallKind.GENERATE) and lengths.responses.longest > most:
            raise ConfigError(
                f"lengths: a response of {lengths.responses.longest} tokens is longer than "
                f"`sampling.max_response_tokens`, {most}"
            )
        return cls(
            prompts_per_step=recipe.prompts_per_step,
            samples_per_prompt=recipe.samples_per_prompt,
            lengths=lengths,
            dtype=recipe.dtype.value,
            micro_batch_tokens=recipe.micro_batch_tokens,
            max_running=recipe.sampling.max_running,
            max_prefill_tokens=recipe.sampling.max_prefill_tokens,
            kv_tokens=recipe.sampling.kv_tokens,
            shared_root=shared_root(recipe, lengths.prompts),
            held_root=held_root(recipe, lengths.prompts),
            checkpoint_activations=recipe.checkpoint_activations,
            sequence_parallel=recipe.sequence_parallel,
            lora=recipe.lora,
            frozen=frozen_adapters(role_models(flow, recipe), recipe),
            sharded=frozenset(role for role in flow.roles if optimizer_of(role, recipe).shards_gradients),
            balanced=frozenset(role for role in flow.roles if is_balanced(role, recipe)),
            follows=recipe.reference.sync_every > 0,
            fused=is_fused(recipe),
            packed=is_packed(recipe),
            device=recipe.device,
            stated_groups=recipe.sampling.stated_groups,
            rebalances=recipe.rebalance == "auto",
            drafts_whole=drafts_whole(recipe),
            most_new_tokens=1 + max_draft_tokens(recipe),
            sampling=recipe.sampling,
            filters=draws_filtered(recipe),
            batches=1 + recipe.max_staleness,
            gathers=recipe.fusion_rule.may_fuse,
            scores_ahead=scores_ahead(flow, recipe),
            workers=recipe.reward.workers,
        )

    def samples_of(self, flow: Dataflow, node: Node) -> Samples:
        """The samples that a call makes or reads."""
        rows, count = flow.nodes[node.rows], self.samples_per_prompt
        prompts = self.prompts_per_step * prompts_each(flow, rows, count)
        return Samples(prompts, samples_of_prompt(rows, count))

    def tokens_of_step(self, flow: Dataflow) -> float:
        """Prompt and response tokens of a step."""
        rows = [node for node in flow.nodes if node.kind in (CallKind.GENERATE, CallKind.READ)]
        lengths_of = lengths_by_call(flow, self.lengths, self.samples_per_prompt)
        read = [(self.samples_of(flow, node), lengths_of[node.id]) for node in rows]
        return math.fsum(
            samples.prompts * lengths.prompts.mean + samples.count * lengths.responses.mean for samples, lengths in read
        )
