"""Bytes that a generation takes on a device of each pipeline stage. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from plait.cost.cluster import ClusterSpec
from plait.cost.costs import CallCost
from plait.cost.generation_memory import (
    asked_tokens,
    kv_bytes_per_token,
    packed_stages,
    pool_tokens,
    routed_bytes_per_token,
    state_bytes,
    widened_bytes,
)
from plait.cost.graph_memory import first_context, graph_bytes, prompt_graph_bytes
from plait.cost.step_room import LargestStep, step_bytes
from plait.cost.workload import Workload
from plait.generation.settings import DRAFT_MODEL_TOKENS
from plait.layout.mesh import Layout
from plait.layout.params import Heads
from plait.layout.shards import stage_bounds
from plait.models.shape import ModelShape
from plait.training.memory import BYTES


@dataclass(frozen=True)
class GenerationMemory:
    """Bytes by stage. working: all of it; passing: of it, what no pool that stays keeps; widened: more than that, where
    packed weights are widened"""

    working: tuple[int, ...]
    passing: tuple[int, ...]
    widened: tuple[int, ...]

    def told(self, cost: CallCost) -> CallCost:
        """The cost of a generation that takes this memory."""
        return replace(cost, working_bytes=self.working, passing_bytes=self.passing, widened_bytes=self.widened)


class GenerationBytes:
    """What the calls of a workload that generate take.

    Args:
        shapes: role → the shape of its model.
    """

    def __init__(self, workload: Workload, cluster: ClusterSpec, shapes: Mapping[str, ModelShape]) -> None:
        self._workload, self._cluster, self._shapes = workload, cluster, shapes

    def of(
        self, role: str, layout: Layout, running: int, most_running: int, *, sent: int = 0, draws: bool = True
    ) -> GenerationMemory:
        """
        Args:
            running: samples whose keys and values an instance holds at a time; most_running: of which graphs are made.
            sent: tokens whose keys and values are on their way to another instance, or from there.
            draws: whether it draws samples; else `running` are prompts that it computes for others.
        """
        workload, shape = self._workload, self._shapes[role]
        # Where a pool takes a share of what nothing else does, the rest has room for all that is beside it.
        beside = not self._cluster.software.pool_share
        nothing = (0,) * layout.parallelism.pp
        graphs = (
            held_by_graphs(workload, shape, most_running, layout.parallelism.pp, draws=draws) if beside else nothing
        )
        passing = self._step_bytes(shape, layout, most_running if draws else 0) if beside else nothing
        cached = self.of_cache(role, layout, running, draws=draws)
        on_way = tuple(sent * token_bytes for token_bytes in self.of_token(role, layout))
        working = tuple(map(sum, zip(cached, graphs, passing, on_way, strict=True)))
        widened = tuple(widened_bytes(packed, workload.dtype) for packed in self._packed(role, layout))
        return GenerationMemory(working, passing, widened)

    def of_prompt(self, role: str, num_tokens: float) -> float:
        """Keys and values of so many tokens in all layers."""
        return num_tokens * kv_bytes_per_token(self._shapes[role], self._workload.dtype)

    def of_cache(self, role: str, layout: Layout, running: int, *, draws: bool) -> tuple[int, ...]:
        """What a device of each stage holds: keys and values, states, a draft model's, and weights that are packed;
        `draws` as of `of`."""
        workload, sizes = self._workload, layout.parallelism
        if workload.elsewhere:
            return (0,) * sizes.pp
        context = workload.lengths.prompts.longest + (workload.lengths.responses.longest if draws else 0)
        shape = self._shapes[role]
        tokens = asked_tokens(running, context, 0 if shape.recurrent else workload.held_root)
        if workload.kv_tokens is not None and not self._cluster.software.pool_share:
            tokens = pool_tokens(tokens, workload.kv_tokens, workload.device)
        drafts = 0
        if draws and workload.draft_model is not None:
            drafts = tokens * kv_bytes_per_token(workload.draft_model, workload.dtype)
        states = state_bytes(shape, workload.dtype, running, sizes)
        stages = zip(self.of_token(role, layout), self._packed(role, layout), states, strict=True)
        return tuple(tokens * token_bytes + packed + kept + drafts for token_bytes, packed, kept in stages)

    def _packed(self, role: str, layout: Layout) -> tuple[int, ...]:
        workload, sizes = self._workload, layout.parallelism
        if workload.elsewhere or not workload.packed:
            return (0,) * sizes.pp
        return packed_stages(self._shapes[role], workload.dtype, workload.lora, sizes)

    def of_token(self, role: str, layout: Layout) -> tuple[int, ...]:
        """Keys and values of a token on a device of each stage, and its experts where they are kept."""
        shape, sizes = self._shapes[role], layout.parallelism
        routed = partial(routed_bytes_per_token, shape) if self._workload.sampling.router_replay else lambda *_: 0
        heads = Heads(shape.heads, shape.kv_heads, shared=True)
        most = max(stop - first for first, stop in (heads.part_range(i, sizes.tp) for i in range(sizes.tp)))
        bounds = stage_bounds(shape.layers, sizes)
        per_layer = 2 * most * shape.head_dim * BYTES[self._workload.dtype]
        return tuple(
            shape.attending_in(start, stop) * per_layer + routed(start, stop)
            for start, stop in itertools.pairwise(bounds)
        )

    def _step_bytes(self, shape: ModelShape, layout: Layout, running: int) -> tuple[int, ...]:
        """What a step takes for a moment, on a GPU; `running` samples draw."""
        workload = self._workload
        if workload.device == "cpu" or workload.elsewhere:
            return (0,) * layout.parallelism.pp
        new_tokens, filters = workload.most_new_tokens, workload.filters or workload.sampling.filters
        step = LargestStep.of(workload.max_prefill_tokens, running, new_tokens, filters=filters)
        return step_bytes(shape, workload.dtype, step, layout.parallelism)


def held_by_graphs(
    workload: Workload, shape: ModelShape, share: int, stages: int = 1, *, draws: bool = True
) -> tuple[int, ...]:
    """`graph_bytes` on a device of each stage of an instance of a workload, with those of a draft model, which is whole
    on one of its devices.

    Args:
        share: samples that it generates.
        draws: as of `GenerationBytes.of`.
    """
    if workload.device != "cuda" or workload.elsewhere:
        return (0,) * stages
    of_prompts = partial(prompt_graph_bytes, shape, workload.dtype)
    if not draws:
        return tuple(of_prompts(is_first=stage == 0) for stage in range(stages))
    prompts, responses = workload.lengths.prompts, workload.lengths.responses
    contexts = first_context(prompts), prompts.longest + responses.longest
    running, draft, of_draft = min(share, workload.max_running), workload.draft_model, 0
    if draft is not None:
        of_draft = graph_bytes(draft, workload.dtype, running, contexts, DRAFT_MODEL_TOKENS)
    of_stage = partial(graph_bytes, shape, workload.dtype, running, contexts, workload.most_new_tokens)
    return tuple(
        of_draft + of_stage(is_last=stage == stages - 1) + of_prompts(is_first=stage == 0) for stage in range(stages)
    )
