"""What calls that train or score take on a device of each pipeline stage, beside weights and optimizer state.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from plait.cost.costs import CallCost
from plait.cost.flow_calls import FlowCalls
from plait.cost.kept_sets import NO_SETS, KeptSets
from plait.cost.layer_kinds import stage_counts
from plait.cost.micro_batch import Cut, LargestBatch, share_of
from plait.cost.micro_batch_split import MicroBatchSplit
from plait.cost.sample_sets import SampleSets
from plait.cost.wide_columns import wide_numbers
from plait.cost.working_memory import (
    Blocks,
    activations_by_kind,
    fused_at_worst,
    head_gradient_bytes,
    kept_logits,
    logits_bytes,
    sets_at_head,
    stage_activations,
    wide_bytes,
)
from plait.cost.workload import Workload
from plait.dataflow import Node, TrainOptions
from plait.layout.mesh import Parallelism
from plait.models.lora_settings import NO_LORA
from plait.models.shape import ModelShape
from plait.recipes.role_models import is_scalar
from plait.schedule.training_order import rule_named
from plait.training.memory import BYTES


@dataclass(frozen=True)
class ForwardMemory:
    """Bytes by stage. working: all of it; activations: of it; plain: of a family whose layers are not fused, these"""

    working: tuple[int, ...]
    activations: tuple[int, ...]
    plain: tuple[int, ...]

    def beside(self, more: Sequence[int]) -> ForwardMemory:
        """With so many bytes more, by stage."""
        return replace(self, working=tuple(map(sum, zip(self.working, more, strict=True))))

    def cost(self, terms: Mapping[str, float], num_bytes: int, in_parts_s: float = 0.0) -> CallCost:
        """That of a call which takes this memory.

        Args:
            terms: seconds, by what they are spent on.
            num_bytes: that its devices exchange.
            in_parts_s: see `CallCost`.
        """
        return CallCost(
            sum(terms.values()),
            terms,
            num_bytes,
            self.working,
            in_parts_s=in_parts_s,
            activation_bytes=self.activations,
            plain_bytes=self.plain,
        )


class ForwardMemories:
    """What the calls of a flow take that train or score. Kept: a search asks for one parallelism on many meshes."""

    def __init__(self, calls: FlowCalls, split: MicroBatchSplit, sets: SampleSets) -> None:
        self._calls, self._split, self._sets = calls, split, sets
        self._of = cache(self._of_call)

    def of(self, node: Node, sizes: Parallelism, budget: int, schedule: str | None) -> ForwardMemory:
        """What the largest micro-batch takes.

        Args:
            budget: tokens of a micro-batch.
            schedule: of a training's pipeline; None: of a score.
        """
        return self._of(node.id, sizes, budget, schedule)

    def _of_call(self, number: int, sizes: Parallelism, budget: int, schedule: str | None) -> ForwardMemory:
        node, workload, shapes = self._calls.flow.nodes[number], self._calls.workload, self._calls.shapes
        role, batch = str(node.role), self._largest(node, sizes, budget, trains=schedule is not None)
        if schedule is not None:  # those of calls whose gradients meet are one behind the other
            calls = next(calls for calls in self._calls.flow.updates(role) if node.id in {call.id for call in calls})
            counts = (self._largest(call, sizes, budget, trains=True).count for call in calls)
            batch = replace(batch, count=sum(counts))
        beside = Beside(is_scalar(role), role in workload.balanced, self._sets.read(node))
        return forward_memory(workload, shapes[role], sizes, batch, schedule, beside)

    def _largest(self, node: Node, sizes: Parallelism, budget: int, *, trains: bool) -> LargestBatch:
        samples, options = self._calls.samples[node.id], node.training if trains else TrainOptions()
        share = self._split.share(node, sizes.dp) if trains else share_of(samples.count, 1, sizes.dp)
        cut = Cut(budget, self._split.least(sizes), options.whole_groups, wide_numbers(node))
        return LargestBatch.of_share(share, samples.per_prompt, self._calls.lengths[node.id], cut)


@dataclass(frozen=True)
class Beside:
    """What a call takes beside its blocks.

    scalar:   has no head of a language model
    balanced: of a training, as of `Blocks`
    sets:     of the tokens, where their log-probs are computed
    """

    scalar: bool
    balanced: bool = False
    sets: KeptSets = NO_SETS


def forward_memory(
    workload: Workload,
    shape: ModelShape,
    sizes: Parallelism,
    batch: LargestBatch,
    schedule: str | None,
    beside: Beside,
) -> ForwardMemory:
    """
    Args:
        batch: the largest micro-batch.
        schedule: of a training's pipeline, by name (`training_order.rule_named`); None: of a score, which keeps one
            layer's activations at a time.
    """
    train, width = schedule is not None, BYTES[workload.dtype]
    in_flight: list[int | None] = [None] * sizes.pp
    if schedule is not None:
        order = rule_named(schedule)
        in_flight = [order.in_flight(stage, sizes.pp, batch.count) for stage in range(sizes.pp)]

    logits = 0
    if not (beside.scalar or workload.checkpoint_activations):
        logits = kept_logits(shape, width, workload.device, batch.tokens, sizes.tp)
    stages = list(zip(stage_counts(shape, sizes), in_flight, strict=True))

    def by_stage(fused: bool) -> tuple[int, ...]:
        kinds = activations_by_kind(
            shape,
            batch,
            Blocks(
                width,
                fused,
                checkpointed=train and workload.checkpoint_activations,
                tp=sizes.tp,
                splits_tokens=train and workload.sequence_parallel,
                by_kernel=workload.device == "cuda",
                by_masks=workload.device == "cuda" and not train,
                balanced=train and beside.balanced,
            ),
            workload.lora if train else NO_LORA,
        )
        bytes_of = {
            stage: stage_activations(kinds, stage[0], shape.layers, stage[1]) for stage in dict.fromkeys(stages)
        }
        return (*(bytes_of[stage] for stage in stages[:-1]), bytes_of[stages[-1]] + (in_flight[-1] or 0) * logits)

    activations = by_stage(workload.fused)
    plain = by_stage(fused_at_worst(workload.device, fused=workload.fused))
    head = 0 if beside.scalar else _head_bytes(workload, shape, sizes.tp, batch, beside.sets, train=train)
    on_host = [0] * sizes.pp
    if workload.device == "cpu":
        on_host = [(1 if count is None else count) * beside.sets.read_bytes(batch.tokens) for count in in_flight]
    else:
        on_host = [beside.sets.routed_bytes(batch.tokens)] * sizes.pp
    working = [count + read for count, read in zip(activations, on_host, strict=True)]
    return ForwardMemory((*working[:-1], working[-1] + head), activations, plain)


def _head_bytes(
    workload: Workload, shape: ModelShape, tp: int, batch: LargestBatch, sets: KeptSets, *, train: bool
) -> int:
    """What the last stage takes at the head of a language model."""
    width = BYTES[workload.dtype]
    head = logits_bytes(shape, width, workload.device, tp) + wide_bytes(batch)
    head += head_gradient_bytes(shape, width, tp) if train and workload.lora.rank == 0 else 0
    return head + (0 if workload.device == "cpu" else sets_at_head(shape, width, tp, sets))
