"""Facts of a step that its samples, its columns and its masks tell: what the doctor's rules read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plait.data.computing import trained_rows
from plait.data.records import FinishReason, Sample
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Dataflow, Score, Top
from plait.models.loading import read_tokens
from plait.runtime.health.compared import comparison_facts
from plait.runtime.health.inspected_run import InspectedRun
from plait.runtime.steps.step import StepState
from plait.training.loss_split import split_gap
from plait.training.mini_batch import LossCall
from plait.training.trainer_settings import SampleSettings
from plait.user_code import is_users, title_of

END_TOKENS = (
    "</s>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
)
"""Tokens that end a turn in the families that are admitted."""
MESSAGE_END, ANSWER_END = "<|end|>", "<|return|>"
"""A model that has both (gpt-oss) ends each message of an answer, its reasoning included, with the one, and the answer
with the other."""


class StepFacts:
    """See the top of the file."""

    def __init__(self, inspected: InspectedRun) -> None:
        self._inspected = inspected
        self._stops, self._ends, self._answer_ends = self._end_ids()

    def of_step(self, state: StepState, metrics: Mapping[str, float]) -> dict[str, float]:
        """What the rules read; a fact that does not apply is absent."""
        facts = {"drawn_by_another": float(self._is_drawn_by_another(state)), "is_taught": float(self._is_taught())}
        rollouts = [rows for node, rows in self._inspected.rollouts(state)]
        samples = [sample for rows in rollouts for sample in rows.samples]
        if samples:
            facts |= self._of_samples(samples, metrics)
            facts["groups_broken"] = float(self._groups_are_broken(state))
            facts |= comparison_facts(self._inspected.flow, state)
        if self._inspected.flow.calls("ref"):
            facts["has_reference"] = 1.0
            recipe = self._inspected.recipe
            facts["reference_is_another"] = float(recipe.reference.model not in (None, recipe.model))
        facts |= self._of_reference(state) | training_facts(self._inspected.flow, state, self._ends)
        gaps = split_gaps(self._inspected.flow, state, self._inspected.recipe.sampling.max_response_tokens)
        return facts | {f"loss_split/{name}": gap for name, gap in gaps.items()}

    def _of_samples(self, samples: Sequence[Sample], metrics: Mapping[str, float]) -> dict[str, float]:
        sampling = self._inspected.recipe.sampling
        facts = {"samples": float(len(samples))}
        version = metrics.get("training/policy_version")
        if version is not None:
            facts["version_lag"] = lag = version - 1 - min(sample.oldest_version for sample in samples)
            facts["off_policy"] = float(0 < lag <= self._inspected.recipe.max_staleness)
        if sampling.stop:
            return facts | {"stop_strings": 1.0}
        stops = self._stops
        if stops:
            finished = [sample for sample in samples if sample.finish_reason is FinishReason.STOP]
            if finished:
                facts["eos_share"] = float(np.mean([not stops.isdisjoint(s.token_ids[-1:]) for s in finished]))
            facts["passed_end"] = float(np.mean([not self._answer_ends.isdisjoint(before_ends(s)) for s in samples]))
        elif sampling.stop_token_ids is None:
            facts["no_end_token"] = 1.0
        return facts

    def _groups_are_broken(self, state: StepState) -> bool:
        for node, rows in self._inspected.rollouts(state):
            drawn = node.generation.num_samples(self._inspected.recipe.samples_per_prompt)
            if any(len(members) != drawn for members in rows.groups.values()):
                return True
        return False

    def _is_drawn_by_another(self, state: StepState) -> bool:
        """Whether the samples whose log-probs are compared with the engine's, those of the actor's first training on a
        rollout, are none of its own (a teacher's), so that other probabilities are to be expected."""
        flow, own = self._inspected.flow, {node.id for node, _ in self._inspected.rollouts(state)}
        trainings = (node for node in flow.calls("actor") if node.kind is CallKind.TRAIN)
        compared = (node.rows for node in trainings if flow.nodes[node.rows].kind is CallKind.GENERATE)
        return next(compared, None) not in (None, *own)

    def _is_taught(self) -> bool:
        """Whether the actor learns from a teacher, one that reads other prompts perhaps, or from given samples in its
        first training, whose entropy is that of the step: it becomes as certain as these are."""
        flow = self._inspected.flow
        first = next((node for node in flow.calls("actor") if node.kind is CallKind.TRAIN), None)
        reads_more = any(node.prompts is not None for node in flow.of_kind(CallKind.SCORE))
        return reads_more or bool(flow.teachers) or (first is not None and flow.nodes[first.rows].kind is CallKind.READ)

    def _of_reference(self, state: StepState) -> dict[str, float]:
        """KL(sampling ‖ reference) of the step's samples, k3, from the columns that the flow asked for."""
        sampled = {node.id for node, _ in self._inspected.rollouts(state)}
        for node in self._inspected.flow.calls("ref"):
            rows = state.tables.get(node.rows)
            is_logprobs = node.kind is CallKind.SCORE and node.scoring is Score.LOGPROBS
            if is_logprobs and node.prompts is None and rows is not None and node.rows in sampled:
                log_ratio_R = rows.columns[node.outputs[0]] - rows.sampling_logprobs
                clipped_R = np.clip(log_ratio_R[np.isfinite(log_ratio_R)], -20.0, 20.0)
                if len(clipped_R):
                    return {"ref_kl": float((np.exp(clipped_R) - 1 - clipped_R).mean())}
        return {}

    def _end_ids(self) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """Tokens that end a response here; those that end a turn, here or in the families of models; and of these those
        that nothing of an answer follows."""
        recipe, actor = self._inspected.recipe, self._inspected.models.get("actor")
        tokenizer: Any = None
        own_ids: tuple[int, ...] = ()
        if actor is not None:
            tokenizer, own_ids = actor.tokenizer, actor.eos_token_ids
        elif "actor" in self._inspected.roles:  # it is with other ranks alone
            tokenizer, own_ids = read_tokens(recipe.model)
        stated_ids = recipe.sampling.stop_token_ids
        stops = frozenset(own_ids if stated_ids is None else stated_ids)
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        known = stops.union(own_ids)
        return stops, known | turn_ends(vocabulary), known | answer_ends(vocabulary)


def before_ends(sample: Sample) -> list[int]:
    """The tokens that were drawn, but the last one of each turn."""
    ends = {len(sample.token_ids), *(reply.at for reply in sample.replies)}
    return [token for number, token in enumerate(sample.token_ids, 1) if number not in ends]


def turn_ends(vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Ids of the tokens that end a turn, or a message in one."""
    return frozenset(vocabulary[token] for token in END_TOKENS if token in vocabulary)


def answer_ends(vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Ids of the tokens that end a whole answer, and not just one message of it."""
    several = {MESSAGE_END, ANSWER_END} <= vocabulary.keys()
    return turn_ends(vocabulary) - ({vocabulary[MESSAGE_END]} if several else set())


def training_facts(flow: Dataflow, state: StepState, ends: frozenset[int]) -> dict[str, float]:
    """What the columns say that training calls read, of the samples that `keep` lets them have: `zero_advantages`, the
    share of advantages that are 0, and `mask_edges`, or `mask_chooses` where the mask is made of entropies;
    `all_left_out` where it lets them have none, `left_out_beside` where another loss has some in the same optimizer
    steps; `learns_beside` where a loss without advantages is in the same optimizer steps as one with them."""
    facts: dict[str, float] = {}
    read: list[FloatArray] = []
    for node in flow.of_kind(CallKind.TRAIN):
        if node.rows not in state.tables or state.step < node.training.after:
            continue
        rows = trained_rows(node, state.tables)
        (update,) = (calls for calls in flow.updates(str(node.role)) if node in calls)
        if node.keep is not None and not len(rows):
            others = (trained_rows(call, state.tables) for call in update if call is not node)
            facts["left_out_beside" if any(map(len, others)) else "all_left_out"] = 1.0
            continue
        advantages = node.loss_columns.get("advantages")
        if advantages is not None and advantages in rows.columns:
            read.append(rows.columns[advantages])
            if any("advantages" not in call.loss_columns for call in update):
                facts["learns_beside"] = 1.0
        if node.mask is not None and node.mask in rows.columns:
            is_choice = node.mask.producer in _of_entropies(flow)
            facts |= {"mask_chooses": 1.0} if is_choice else mask_edges(rows, rows.columns[node.mask], ends)
    return facts if not read else {**facts, "zero_advantages": float(np.mean(np.concatenate(read) == 0))}


def split_gaps(flow: Dataflow, state: StepState, max_response_tokens: int) -> dict[str, float]:
    """`CALL LOSS` → `split_gap` of each loss of the user's that trained for the first time in this step; plait's own
    losses have tests."""
    gaps: dict[str, float] = {}
    for node in flow.of_kind(CallKind.TRAIN):
        loss = node.fn
        if loss is None or not is_users(loss) or state.step != node.training.after or node.rows not in state.tables:
            continue
        rows = trained_rows(node, state.tables)
        call = LossCall.of(node, batch_values=state.batch, temperature=1.0)
        samples = SampleSettings(1.0, max_response_tokens)
        gap = split_gap(rows, call, str(node.role), samples)
        if gap is not None:
            gaps[f"{node.call} {title_of(loss)}"] = gap
    return gaps


def _of_entropies(flow: Dataflow) -> set[int]:
    """Ids of the calls that give entropies or likeliest tokens, or what is made of them. A mask of that chooses tokens
    by how certain a model is of them, wherever turns begin and end."""
    found: set[int] = set()
    for node in flow.nodes:
        gives = node.kind is CallKind.SCORE and (node.scoring is Score.ENTROPIES or isinstance(node.scoring, Top))
        if gives or any(column.producer in found for column in node.inputs.values()):
            found.add(node.id)
    return found


def mask_edges(rows: Rows, mask_R: FloatArray, ends: frozenset[int]) -> dict[str, float]:
    """Where the trained turns end: `mask_early`, the share that ends one token before an end token, `mask_late` one
    token after it. Empty without a trained turn that ends near one."""
    early = late = right = 0
    for sample, start, stop in zip(rows.samples, rows.offsets, rows.offsets[1:], strict=False):
        kept, ids = mask_R[start:stop] > 0, sample.token_ids
        for place in np.flatnonzero(kept & ~np.append(kept[1:], False)):
            right += ids[place] in ends
            early += ids[place] not in ends and place + 1 < len(ids) and ids[place + 1] in ends
            late += ids[place] not in ends and place > 0 and ids[place - 1] in ends
    total = early + late + right
    return {"mask_early": early / total, "mask_late": late / total} if total else {}
