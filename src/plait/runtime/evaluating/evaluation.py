"""What a model answered to held-out prompts, and what that measures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from plait.data.records import FinishReason, Prompt, Sample, packed_replies
from plait.metric_names import OF_DATA, with_logged
from plait.rewards import evaluation as verdicts
from plait.rewards import statistics
from plait.rewards.answers import Verdict
from plait.rewards.scores import GroupScores
from plait.rewards.statistics import Estimate, item_means, paired_difference
from plait.runtime.evaluating.parts import OF_REWARDS, parts_of

MAX_CHARACTERS = 10_000
"""How long a value of the data may be, as JSON, to stand in a record of a sample: about what the tokens of a short
sample take. Tests of a program, which may be a megabyte, would be in every sample of every step."""
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Evaluation:
    """What a model answered to a set, item by item, in the order of the held-out prompts."""

    samples: tuple[Sample, ...]
    """`per_item` of each, in a row."""
    rewards: tuple[float, ...]
    """NaN where no function applies, or one failed; empty where nothing rewards."""
    task: verdicts.Evaluation | None
    """The verdicts of a task's scorer, which the reward is or one of `evaluation.functions`; None where neither is."""
    extras: tuple[Mapping[str, Any], ...] = ()
    """Per item the score of each function and each model of the reward, and of the cost, before weights; and the
    columns that functions, those of `evaluation.functions` too, logged."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """Means of the metrics that functions logged; of held-out examples or pairs, all that is measured."""
    further: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Scores of `evaluation.functions`, and of the role `cost` where the flow has one, item
    by item; NaN where one gave none."""
    num_given: int = 0
    """Held-out examples or pairs, where these were measured."""
    per_item: int = 1
    """Answers to each item."""
    pass_at: tuple[int, ...] = ()
    """Numbers k for which pass@k is among the metrics."""

    def __repr__(self) -> str:
        """Without the answers: a notebook shows what its last line returns."""
        return f"Evaluation(num_items={self.num_items}, metrics={self.metrics()})"

    @property
    def num_items(self) -> int:
        return len(self.samples) // self.per_item or self.num_given

    @property
    def is_scored(self) -> bool:
        """Whether anything says how good the answers are: a task, a reward or another function."""
        return self.task is not None or bool(self.rewards or self.further)

    @property
    def tells_right(self) -> bool:
        """Whether anything says which answers are right: a task or a reward."""
        return self.task is not None or bool(self.rewards)

    def is_accuracy(self, scores: Sequence[float]) -> bool:
        """Whether scores are a task's verdicts once more: 1 where an answer is exact, else 0."""
        verdicts = () if self.task is None else self.task.verdicts
        exact = [math.nan if verdict is None else float(verdict is Verdict.EXACT) for verdict in verdicts]
        return np.array_equal(exact, scores, equal_nan=True)

    def reward_gain(self, before: Evaluation) -> Estimate | None:
        """Gain in reward over an earlier evaluation on the same items, with its paired 95 % interval."""
        return paired_difference(item_means(before.rewards, before.per_item), item_means(self.rewards, self.per_item))

    def further_gain(self, before: Evaluation, name: str) -> Estimate | None:
        """The same of what a further function says."""
        was, now = before.further[name], self.further[name]
        return paired_difference(item_means(was, before.per_item), item_means(now, self.per_item))

    def pass_at_k(self, k: int) -> Estimate | None:
        """Chance that one of k answers is right, the mean over items: exact, for a task; else of a reward of 1 or more.
        None where no item has k answers that can be told."""
        return statistics.pass_at(self._right(), self.per_item, k)

    def _right(self) -> list[bool | None]:
        if self.task is not None:
            return [None if verdict is None else verdict is Verdict.EXACT for verdict in self.task.verdicts]
        return [None if math.isnan(reward) else reward >= 1 for reward in self.rewards]

    def metrics(self) -> dict[str, float]:
        """`eval/reward` and `eval/dropped` (answers without one) where there is a reward, and the mean of each of its
        parts, such as `eval/rewards/NAME/mean`; for a task `eval/accuracy` (exact), its 95 % Wilson interval,
        `eval/well_formed` and `eval/accuracy_well_formed`; `eval/pass@K` with its own interval where asked for; NaN
        where no item is left to tell. Where the data have several sources, the same of each as `eval/SOURCE/…`."""
        metrics = {f"eval/{name}": value for name, value in self.logged.items()}
        if not self.samples:
            return metrics
        metrics |= {f"eval/{name}": value for name, value in self._measured().items()}
        for source, of_source in self.by_source().items():
            metrics |= {f"eval/{source}/{name}": value for name, value in of_source._measured().items()}
        return metrics

    def by_source(self) -> dict[str, Evaluation]:
        """What was answered of each source, by its label; empty where the data have but one."""
        places: dict[str, list[int]] = {}
        for place, sample in enumerate(self.samples):
            if sample.prompt.source:
                places.setdefault(sample.prompt.source, []).append(place)
        return {source: self._part(its) for source, its in places.items()} if len(places) > 1 else {}

    def _part(self, places: Sequence[int]) -> Evaluation:
        """These items alone, without means that were logged of all."""

        def chosen(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[place] for place in places) if values else ()

        task = None if self.task is None else verdicts.Evaluation(chosen(self.task.verdicts), self.per_item)
        return Evaluation(
            chosen(self.samples),
            chosen(self.rewards),
            task if task is not None and task.scored else None,
            chosen(self.extras),
            further={name: chosen(scores) for name, scores in self.further.items()},
            per_item=self.per_item,
            pass_at=self.pass_at,
        )

    def _measured(self) -> dict[str, float]:
        metrics = {name: _mean(scores) for name, scores in self.further.items()}
        metrics["response_length"] = float(np.mean([len(sample.token_ids) for sample in self.samples]))
        metrics |= {f"{name}/mean": _mean(scores) for name, scores in parts_of(self.extras).items()}
        if self.rewards:
            metrics["reward"] = _mean(self.rewards)
            metrics["dropped"] = sum(math.isnan(reward) for reward in self.rewards)
        for k in self.pass_at if self.tells_right else ():
            chance = self.pass_at_k(k)
            low, high = (chance.low, chance.high) if chance else (math.nan, math.nan)
            metrics |= {f"pass@{k}": chance.value if chance else math.nan, f"pass@{k}_low": low, f"pass@{k}_high": high}
        if self.task is not None:
            exact, formed, among = self.task.exact, self.task.well_formed, self.task.exact_among_well_formed
            metrics |= {
                "accuracy": exact.value if exact else math.nan,
                "accuracy_low": exact.low if exact else math.nan,
                "accuracy_high": exact.high if exact else math.nan,
                "well_formed": formed.value if formed else math.nan,
                "accuracy_well_formed": among.value if among else 0.0 if exact else math.nan,
            }
        return metrics

    def in_short(self) -> Evaluation:
        """The same figures in an eighth of the bytes, for a process that shows them: of the tokens their number alone,
        of each prompt its source. The whole of 16 million tokens is more than a message may take."""
        short = (
            Sample(
                Prompt(sample.prompt.uid, "", (), source=sample.prompt.source),
                sample.index,
                (0,) * len(sample.token_ids),
                (),
                "",
                sample.finish_reason,
            )
            for sample in self.samples
        )
        return replace(self, samples=tuple(short))

    def rows(self) -> list[dict[str, Any]]:
        """One record per answer, for a samples file; a task's `verdict` and `answer` are among what was logged."""
        extras = self.extras or ({},) * len(self.samples)
        rewards = self.rewards or (None,) * len(self.samples)
        told = data_columns(self.samples)
        return [
            with_logged(
                {
                    "uid": sample.uid,
                    "prompt": sample.prompt.text,
                    "response": sample.text,
                    **told[sample.prompt.uid],
                    "reward": reward,
                    "finish_reason": sample.finish_reason.value,
                    "policy_version": sample.policy_version,
                    "token_ids": list(sample.token_ids),
                    "sampling_logprobs": list(sample.logprobs),
                    **told_of_turns(sample),
                    "judged": {name: scores[place] for name, scores in self.further.items()},
                },
                logged,
                is_metric=False,
            )
            for place, (sample, reward, logged) in enumerate(zip(self.samples, rewards, extras, strict=True))
        ]

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        prompts: Sequence[Prompt],
        logged: Mapping[str, float],
        per_item: int,
        pass_at: tuple[int, ...],
    ) -> Evaluation:
        """What `rows()` wrote, read back, but for what functions logged beside a verdict; `prompts` are the items, the
        rest as in the class."""
        answered = [(prompt, index) for prompt in prompts for index in range(per_item)]
        samples = tuple(
            Sample(
                prompt,
                index,
                tuple(row["token_ids"]),
                tuple(row["sampling_logprobs"]),
                row["response"],
                FinishReason(row["finish_reason"]),
                row["policy_version"],
            )
            for row, (prompt, index) in zip(rows, answered, strict=True)
        )
        return cls(
            samples,
            tuple(float(row["reward"]) for row in rows if row["reward"] is not None),
            task_of([row.get("verdict") for row in rows], per_item),
            extras=tuple(
                {name: value for name, value in row.items() if name == "verdict" or name.startswith(OF_REWARDS)}
                for row in rows
            ),
            logged=logged,
            further={
                name: tuple(float(row["judged"][name]) for row in rows) for name in (rows[0]["judged"] if rows else ())
            },
            per_item=per_item,
            pass_at=pass_at,
        )


def told_of_turns(sample: Sample) -> dict[str, Any]:
    """What a record says of a sample of several turns: `turns`, the messages behind the prompt, and `replies`, each the
    number of tokens drawn before it and its tokens. Nothing of one turn. `reply_error` where nobody could reply."""
    told: dict[str, Any] = {"reply_error": sample.reply_error} if sample.reply_error else {}
    if sample.replies:
        told |= {"turns": [dict(message) for message in sample.turns], "replies": packed_replies(sample.replies)}
    return told


def _mean(values: Sequence[float]) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def task_of(logged: Sequence[Any], per_item: int) -> verdicts.Evaluation | None:
    """The verdicts of a task; None where there is none, or a user's function logs something of its own so."""
    if not any(logged) or any(value is not None and value not in list(Verdict) for value in logged):
        return None
    return verdicts.Evaluation(tuple(None if value is None else Verdict(value) for value in logged), per_item)


def data_columns(samples: Sequence[Sample]) -> dict[int, dict[str, Any]]:
    """Uid of a prompt → what records of its samples say of its row of the data: each column as `data/NAME`. The prompt
    is not among them, since a record has it as the model reads it; nor is a value longer than MAX_CHARACTERS."""
    columns = {sample.prompt.uid: sample.prompt.columns for sample in samples}
    return {uid: dict(_told(of_prompt)) for uid, of_prompt in columns.items()}


def _told(columns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in columns.items():
        if name != "prompt" and (text := _short_json(value)) is not None:
            yield f"{OF_DATA}{name}", json.loads(text)


def _short_json(value: Any) -> str | None:
    """None where it is longer than MAX_CHARACTERS: no more than these are made of a megabyte. Tasks have values that
    JSON lacks, such as dates and sets: these as text."""
    parts, length = list[str](), 0
    try:
        for part in _JSON.iterencode(value):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARACTERS:
                return None
    except (TypeError, ValueError):  # a map with keys that are no texts, or one that holds itself
        parts = [_JSON.encode(str(value))]
    text = "".join(parts)
    return text if len(text) <= MAX_CHARACTERS else None


def logged_means(groups: Sequence[GroupScores]) -> dict[str, float]:
    """Mean of each metric that functions logged (`log_metric`), over all their calls for these groups."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, logged in group.metrics.items():
            values.setdefault(name, []).extend(logged)
    return {name: math.fsum(logged) / len(logged) for name, logged in sorted(values.items())}
