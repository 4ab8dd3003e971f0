"""How much of what its devices can compute each call of a step has used: floating point operations that its models
needed for the samples, over the devices' seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from plait.cost.machine import peak_of_gpus
from plait.cost.model_flops import CountedSamples, forward_flops, training_flops
from plait.cost.role_passes import work_of_roles
from plait.cost.wide_columns import head_forwards
from plait.data.computing import trained_rows
from plait.data.records import Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, Node, Score
from plait.recipes.role_models import frozen_adapters
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.machine import machine_of
from plait.runtime.steps.calls import Calls
from plait.runtime.steps.step import StepState
from plait.schedule.named_plans import MODE_OF
from plait.training.micro_batches import drawn_batches
from plait.training.mini_batch import mask_of

JOINED = "+"
"""Between the names of calls that train together, whose seconds cannot be told apart."""


class Utilisation:
    """What the calls of one run make of their devices, step by step."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, recipe = prepared, prepared.recipe
        shapes = {model.role: prepared.shapes[model.name] for model in prepared.models}
        frozen = frozen_adapters(prepared.models, recipe)
        self._works = work_of_roles(shapes, prepared.flow, recipe.dtype.value, recipe.lora, frozen)

    def metrics(self, state: StepState, busy: Mapping[str, Mapping[int, float]], calls: Calls) -> dict[str, float]:
        """`perf/tflops/CALL`, of a second and device, and `perf/mfu/CALL`, the share of the device's peak if that is
        known, of a step that has ended.

        Args:
            busy: call → rank → its busy seconds in the step.
        """
        found: dict[str, float] = {}
        for nodes in self._together(state, calls):
            flops = sum(self._flops(node, state) for node in nodes)
            ranks = {rank for node in nodes for rank in self._ranks(node)}
            by_rank = (sum(busy.get(node.call, {}).get(rank, 0.0) for node in nodes) for rank in ranks)
            seconds = max(by_rank, default=0.0)
            if flops > 0 and seconds > 0:
                name, rate = JOINED.join(node.call for node in nodes), flops / seconds / len(ranks)
                found[f"perf/tflops/{name}"] = rate / 1e12
                if self._peak is not None:
                    found[f"perf/mfu/{name}"] = rate / self._peak
        return found

    @cached_property
    def _peak(self) -> float | None:
        """Floating point operations per second of a device; None: it is not known, or devices may differ.

        On a CPU what a process alone was measured to do in products of a layer's largest matrix, by a kept profile of
        this dtype, these threads and layers of this shape.
        """
        recipe, plan = self._prepared.recipe, self._prepared.plan
        if recipe.device == "cuda":
            is_seen = self._prepared.devices_alike and recipe.launcher != "ray"
            return peak_of_gpus(recipe.dtype.value) if is_seen else None
        calibration = machine_of(recipe, self._prepared.shape, plan.num_ranks)[1]
        if calibration.profile is None or not calibration.exact or plan.nodes > 1:
            return None
        return max(rate for _, rate in calibration.profile.products)

    def _ranks(self, node: Node) -> Iterable[int]:
        modes = ("prefill", "decode") if node.kind is CallKind.GENERATE else (MODE_OF[node.kind],)
        plan = self._prepared.plan
        return (rank for mode in modes for placed in plan.placements_of(node.call, mode) for rank in placed.ranks)

    def _together(self, state: StepState, calls: Calls) -> Iterator[tuple[Node, ...]]:
        """The calls of models that have computed this batch in this step, and nothing else under their name: each
        alone, or those that train together."""
        for node in self._prepared.flow.nodes:
            if node.role not in self._works:
                continue
            match node.kind:
                case CallKind.GENERATE if calls.ahead is None:
                    yield (node,)
                case CallKind.SCORE if self._scores_now(node, state, calls.ahead):
                    yield (node,)
                case CallKind.TRAIN if state.step >= node.training.after:
                    partners = calls.partners(node, state.step)
                    if partners[0].id == node.id:
                        yield partners
                case _:
                    pass

    def _scores_now(self, node: Node, state: StepState, ahead: frozenset[int] | None) -> bool:
        """Whether a SCORE call is a model's alone, and scores samples in the step that trains on them: not as they are
        drawn for a later one."""
        if self._prepared.functions.get(str(node.role)):
            return False
        rows = self._prepared.flow.nodes[node.rows]
        is_asked = rows.kind is CallKind.GENERATE and rows.generation.resample is not None
        return ahead is None or not (node.id in ahead or (is_asked and node.id in state.model_scores))

    def _flops(self, node: Node, state: StepState) -> float:
        work = self._works[str(node.role)]
        match node.kind:
            case CallKind.GENERATE:
                rows = state.generated[node.id].with_root()
                drawn = counted(rows.samples, root=rows.root_tokens, is_drawn=True)
                return forward_flops(work, drawn.micro(work.shape))
            case CallKind.SCORE:
                rows = scored_rows(node, state)
                scored = counted(rows.samples, root=rows.root_tokens, each=node.scoring is not Score.SCORE)
                return forward_flops(work, scored.micro(work.shape))
            case _:
                samples, batches = trained(node, state, self._prepared.recipe.seed)
                return training_flops(work, samples.micro(work.shape, batches, head_forwards(node)))


def counted(samples: Sequence[Sample], *, root: int = 0, is_drawn: bool = False, each: bool = True) -> CountedSamples:
    """What these samples have.

    Args:
        root: tokens that all prompts begin with.
        is_drawn: they are drawn, so that nothing is computed behind the last token of each; else they are read.
        each: every token of the response needs what the head gives, replies apart; False: the last one alone.
    """
    array = lambda numbers: np.fromiter(numbers, dtype=np.int64, count=len(samples))
    last = 1 if is_drawn else 0
    return CountedSamples(
        group=array(sample.prompt.uid for sample in samples),
        prompt=array(len(sample.prompt.token_ids) for sample in samples),
        said=array(max(0, sample.num_tokens - last) for sample in samples),
        headed=array(len(sample.token_ids) if each else 1 for sample in samples),
        root=root,
    )


def scored_rows(node: Node, state: StepState) -> Rows:
    """What a SCORE call's model has read: all samples that were drawn, also those that were left out since."""
    rows = state.born[node.rows]
    if node.prompts is not None:
        written = state.written[node.prompts]
        rows = written.behind(written.rows)
    elif node.id in state.model_scores and node.rows in state.generated:
        told = state.model_scores[node.id]
        rows = Rows(tuple(s for s in state.generated[node.rows].samples if s.uid in told))
    return rows.with_root()


def trained(node: Node, state: StepState, seed: int) -> tuple[CountedSamples, list[tuple[int, ...]]]:
    """The samples of a TRAIN call, and the mini-batches of all epochs, as the trainer draws them, without those of
    which no token is trained: they are not computed."""
    options, rows = node.training, trained_rows(node, state.tables).with_root()
    samples = counted(rows.samples, root=rows.root_tokens)
    mask_R = mask_of(rows, node.mask, str(node.role))
    ends = rows.offsets if mask_R is None else np.concatenate([[0.0], np.cumsum(mask_R)])[rows.offsets]
    tokens = np.diff(ends)
    drawing = {"epochs": options.epochs, "seed": seed, "step": state.step, "whole_groups": options.whole_groups}
    batches = drawn_batches(rows, options.mini_batches, **drawing)
    return samples, [members for members in batches if tokens[list(members)].any()]
