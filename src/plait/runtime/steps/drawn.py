"""The samples of a batch that no step has trained on yet, as a checkpoint keeps them.

A checkpoint is written between two steps, where rollouts have ended or halted: so it holds batches with all their
samples, finished or not, and what follows from these (columns, groups) is made again. Scores of reward functions are
asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.store import Checkpoint
from plait.data.experts import Experts
from plait.data.records import FinishReason, Prompt, Sample, packed_replies, unpacked_replies
from plait.data.supports import WHOLE
from plait.errors import RunError
from plait.runtime.steps.step import StepState


@dataclass(frozen=True)
class DrawnBatch:
    """A batch that has been drawn, as it was then: what later calls add to it is not in it."""

    step: int
    """That trains on it."""
    drawn: int
    """Prompts of the run that were drawn with this batch."""
    prompts: tuple[int, ...]
    """Uids of the prompts that it began with."""
    samples: Mapping[int, tuple[Sample, ...]]
    """Id of each GENERATE node → all that it drew; unfinished ones are FinishReason.OPEN. Their noise is a function of
    their place."""
    kept: Mapping[int, tuple[int, ...] | None]
    """The same → uids of the prompts whose groups are trained on; None: not all of its samples are finished."""
    said: tuple[tuple[str, float, int], ...]
    """Metrics: name, number, id of the node that said it."""
    model_scores: Mapping[int, Mapping[str, float]]
    """Id of each SCORE node that a rollout asked → sample uid → its score."""
    further: Mapping[int, tuple[tuple[Prompt, ...], ...]] = field(default_factory=dict)
    """Id of each GENERATE node that has drawn again → the prompts of each of its further rounds."""

    @classmethod
    def of(cls, state: StepState) -> DrawnBatch:
        """What a batch is now, when nothing but its rollouts has run."""
        samples = {node: rows.samples for node, rows in state.generated.items()}
        kept: dict[int, tuple[int, ...] | None] = {node: tuple(state.born[node].groups) for node in state.generated}
        for node in sorted(state.growing.keys() - samples.keys()):
            finished = (sample for group in state.growing[node].groups.values() for sample in group)
            samples[node], kept[node] = (*finished, *state.begun.get(node, {}).values()), None
        return cls(
            state.step,
            state.drawn,
            tuple(prompt.uid for prompt in state.prompts),
            samples,
            kept,
            tuple((name, value, state.said_by.get(name, -1)) for name, value in state.metrics.items()),
            {node: dict(scores) for node, scores in state.model_scores.items()},
            {node: tuple(more) for node, rows in state.growing.items() if (more := rows.rounds[1:])},
        )

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON values) of a checkpoint: of each rollout [tokens of its responses] or [samples]."""
        tensors: dict[str, Tensor] = {}
        rollouts: dict[str, Any] = {}
        for node, samples in self.samples.items():
            name = f"batch-{self.step}.{node}"
            versions = [version for sample in samples for version in sample.versions]
            tensors[f"{name}.token_ids"] = torch.tensor([t for s in samples for t in s.token_ids], dtype=torch.int64)
            tensors[f"{name}.logprobs"] = torch.tensor([p for s in samples for p in s.logprobs], dtype=torch.float64)
            tensors[f"{name}.versions"] = torch.tensor(versions, dtype=torch.int64)
            further = _stored_supports(samples) | _stored_experts(samples)
            tensors |= {f"{name}.{what}": stored for what, stored in further.items()}
            rollouts[str(node)] = {
                "kept": None if (kept := self.kept[node]) is None else list(kept),
                "samples": [
                    [
                        s.prompt.uid,
                        len(s.prompt.token_ids),
                        s.index,
                        len(s.token_ids),
                        s.finish_reason.value,
                        s.policy_version,
                        s.token_versions is not None,
                        s.text,
                    ]
                    for s in samples
                ],
                "turns": {
                    str(place): [packed_replies(s.replies), list(s.turns)] for place, s in enumerate(samples) if s.turns
                },
                "reply_errors": {str(place): s.reply_error for place, s in enumerate(samples) if s.reply_error},
            }
            if node in self.further:
                rounds = [[prompt.uid for prompt in prompts] for prompts in self.further[node]]
                rollouts[str(node)]["further"] = rounds
        scores = {str(node): dict(scores_by_sample) for node, scores_by_sample in self.model_scores.items()}
        return tensors, {
            "step": self.step,
            "drawn": self.drawn,
            "prompts": list(self.prompts),
            "rollouts": rollouts,
            "said": [list(metric) for metric in self.said],
            "model_scores": scores,
        }

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], stated: Mapping[str, Any], prompt_of: Callable[[int], Prompt]
    ) -> DrawnBatch:
        """What `stored` gave, in its shapes.

        Args:
            prompt_of: the prompt of the run with this uid.

        Raises:
            RunError: a prompt has other tokens than when its samples were drawn.
        """
        samples: dict[int, tuple[Sample, ...]] = {}
        further: dict[int, tuple[tuple[Prompt, ...], ...]] = {}
        for node, rollout in stated["rollouts"].items():
            name = f"batch-{stated['step']}.{node}"
            flat = [tensors[f"{name}.{what}"].tolist() for what in ("token_ids", "logprobs", "versions")]
            told = _with_supports(_samples(flat, rollout, prompt_of), tensors, name)
            samples[int(node)] = _with_experts(told, tensors, name)
            drawn_again = dict.fromkeys(
                s.prompt.uid for s in samples[int(node)] if s.prompt.uid not in stated["prompts"]
            )
            rounds = _rounds(rollout.get("further", drawn_again), len(stated["prompts"]))
            if rounds:  # older checkpoints have batches that are whole alone
                further[int(node)] = tuple(tuple(map(prompt_of, uids)) for uids in rounds)
        return cls(
            stated["step"],
            stated["drawn"],
            tuple(stated["prompts"]),
            samples,
            {
                int(node): None if rollout["kept"] is None else tuple(rollout["kept"])
                for node, rollout in stated["rollouts"].items()
            },
            tuple((name, value, node) for name, value, node in stated["said"]),
            {int(node): dict(scores) for node, scores in stated["model_scores"].items()},
            further,
        )


def stored_drawn(batches: Sequence[DrawnBatch]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, values for the state) of a checkpoint, as `DrawnBatch.stored` shapes them; nothing where no batch is
    open."""
    tensors: dict[str, Tensor] = {}
    stated: list[dict[str, Any]] = []
    for batch in batches:
        of_batch, values = batch.stored()
        tensors |= of_batch
        stated.append(values)
    return tensors, {"open": stated} if stated else {}


def read_drawn(
    checkpoint: Checkpoint, prompt_of: Callable[[int], Prompt]
) -> list[tuple[DrawnBatch, tuple[Prompt, ...]]]:
    """The batches that a checkpoint keeps, each with the prompts that it began with.

    Args:
        prompt_of: the prompt of the run with this uid.

    Raises:
        RunError: a prompt has other tokens than when its samples were drawn.
    """
    prompt_of = cache(prompt_of)
    tensors = checkpoint.tensors()
    batches = [DrawnBatch.read(tensors, stated, prompt_of) for stated in checkpoint.stated("open", list)]
    return [(batch, tuple(map(prompt_of, batch.prompts))) for batch in batches]


def _stored_supports(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """What tokens were drawn from: bytes of each set [tokens], and all sets [bytes]; nothing where none says it."""
    if all(sample.supports is None for sample in samples):
        return {}
    sets = [kept for s in samples for kept in s.supports or (WHOLE,) * len(s.token_ids)]
    joined = torch.frombuffer(bytearray(b"".join(sets) or b"\0"), dtype=torch.uint8)
    return {"support_sizes": torch.tensor([len(kept) for kept in sets], dtype=torch.int64), "supports": joined}


def _with_supports(samples: Sequence[Sample], tensors: Mapping[str, Tensor], name: str) -> tuple[Sample, ...]:
    """Samples with what `_stored_supports` stored, in its shapes, under a name."""
    if f"{name}.supports" not in tensors:
        return tuple(samples)
    joined, stops = tensors[f"{name}.supports"].numpy().tobytes(), tensors[f"{name}.support_sizes"].cumsum(0).tolist()
    sets = [joined[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    given, at = list[Sample](), 0
    for sample in samples:
        own = sets[at : at + len(sample.token_ids)]
        at += len(own)
        given.append(replace(sample, supports=tuple(own)))
    return tuple(given)


def _stored_experts(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Where tokens went: of each sample which of the parts are its prompt's and its response's [samples, 2], −1 where
    it does not say it; bytes of each part [parts], and all parts [bytes]. Nothing where no sample says it."""
    if all(sample.experts is None for sample in samples):
        return {}
    parts: dict[bytes, int] = {}
    places = [
        (-1, -1)
        if (kept := sample.experts) is None
        else tuple(parts.setdefault(part, len(parts)) for part in (kept.prompt, kept.response))
        for sample in samples
    ]
    joined = torch.frombuffer(bytearray(b"".join(parts) or b"\0"), dtype=torch.uint8)
    return {
        "expert_parts": torch.tensor(places, dtype=torch.int64),
        "expert_sizes": torch.tensor(list(map(len, parts)), dtype=torch.int64),
        "experts": joined,
    }


def _with_experts(samples: Sequence[Sample], tensors: Mapping[str, Tensor], name: str) -> tuple[Sample, ...]:
    """Samples with what `_stored_experts` stored, in its shapes, under a name."""
    if f"{name}.experts" not in tensors:
        return tuple(samples)
    joined, stops = tensors[f"{name}.experts"].numpy().tobytes(), tensors[f"{name}.expert_sizes"].cumsum(0).tolist()
    parts = [joined[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    places = tensors[f"{name}.expert_parts"].tolist()
    return tuple(
        sample if prompt < 0 else replace(sample, experts=Experts(parts[prompt], parts[response]))
        for sample, (prompt, response) in zip(samples, places, strict=True)
    )


def _rounds(further: Iterable[Any], per_round: int) -> list[tuple[int, ...]]:
    """Uids of the prompts of each round; older checkpoints have them in one list, and as many in each round."""
    stated = list(further)
    if stated and isinstance(stated[0], list):
        return [tuple(uids) for uids in stated]
    return [tuple(stated[place : place + per_round]) for place in range(0, len(stated), per_round)]


def _samples(flat: Sequence[list[Any]], rollout: Mapping[str, Any], prompt_of: Callable[[int], Prompt]) -> list[Sample]:
    conversed, errors = rollout.get("turns", {}), rollout.get("reply_errors", {})  # older checkpoints have none
    samples: list[Sample] = []
    at = 0
    for uid, prompt_tokens, index, length, reason, version, is_mixed, text in rollout["samples"]:
        token_ids, logprobs, versions = (tuple(values[at : at + length]) for values in flat)
        at += length
        prompt = prompt_of(uid)
        if len(prompt.token_ids) != prompt_tokens:
            raise RunError(
                f"the checkpoint holds samples of prompt {uid}, which had {prompt_tokens} tokens then and has "
                f"{len(prompt.token_ids)} now: `data` or the tokenizer has changed; put them back, or begin a new run"
            )
        mixed = versions if is_mixed else None
        place = str(len(samples))
        replies, turns = conversed.get(place, ((), ()))
        samples.append(
            Sample(
                prompt,
                index,
                token_ids,
                logprobs,
                text,
                FinishReason(reason),
                version,
                mixed,
                unpacked_replies(replies),
                tuple(turns),
                errors.get(place, ""),
            )
        )
    return samples
