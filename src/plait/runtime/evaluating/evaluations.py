"""What a model answered to all sets of held-out items, and what that measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.data.records import Sample
from plait.runtime.evaluating.evaluation import Evaluation
from plait.runtime.inputs.held_out import HeldOut

SET = "evaluation_set"
"""The column of a record of a sample that names its set, where sets have names."""
_PREFIX = "eval/"


@dataclass(frozen=True)
class Evaluations:
    """An evaluation of the same weights on each set."""

    sets: Mapping[str, Evaluation]
    """By the label of the set, in the order of the recipe; where there is but one, its label may be empty."""

    def __repr__(self) -> str:
        """Without the answers: a notebook shows what its last line returns."""
        return f"Evaluations(num_items={self.num_items}, metrics={self.metrics()})"

    def __getitem__(self, label: str) -> Evaluation:
        return self.sets[label]

    @property
    def num_items(self) -> int:
        return sum(one.num_items for one in self.sets.values())

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The answers of all sets."""
        return tuple(sample for one in self.sets.values() for sample in one.samples)

    def metrics(self) -> dict[str, float]:
        """Those of each set, see `Evaluation.metrics`: `eval/NAME`, of a set with a label `eval/LABEL/NAME`."""
        return {in_set(label, name): value for label, one in self.sets.items() for name, value in one.metrics().items()}

    def in_short(self) -> Evaluations:
        """See `Evaluation.in_short`."""
        return Evaluations({label: one.in_short() for label, one in self.sets.items()})

    def rows(self) -> list[dict[str, Any]]:
        """One record per answer, for a samples file; see `Evaluation.rows`."""
        return [{SET: label, **row} if label else row for label, one in self.sets.items() for row in one.rows()]

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, Any]], held_out: Sequence[HeldOut], metrics: Mapping[str, float]
    ) -> Evaluations | None:
        """What `rows()` wrote, read back; None where it is of other items.

        Args:
            metrics: what `metrics()` gave; of examples or pairs all that there is.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: a row is not as it was written.
        """
        counts = [len(one.prompts) * one.answering.samples_per_prompt for one in held_out]
        if len(rows) != sum(counts):
            return None
        left = iter(rows)
        of_sets = [[next(left) for _ in range(count)] for count in counts]
        sets: dict[str, Evaluation] = {}
        for one, its in zip(held_out, of_sets, strict=True):
            written = dict(_of_set(one.label, metrics))
            answers = one.answering.samples_per_prompt, one.answering.pass_at
            if one.prompts:
                own = Evaluation.from_rows(its, one.prompts, {}, *answers).metrics()
                logged = {name: value for name, value in written.items() if f"{_PREFIX}{name}" not in own}
                sets[one.label] = Evaluation.from_rows(its, one.prompts, logged, *answers)
            else:
                sets[one.label] = Evaluation((), (), None, logged=written, num_given=one.num_items)
        return cls(sets)


def in_set(label: str, metric: str) -> str:
    """The name of a metric `eval/…` of a set of this label."""
    return f"{_PREFIX}{label}/{metric.removeprefix(_PREFIX)}" if label else metric


def _of_set(label: str, metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """(name behind `eval/`, or behind `eval/LABEL/`, value) of the metrics of a set among those of all."""
    begin = in_set(label, _PREFIX)
    for name, value in metrics.items():
        if name.startswith(begin):
            yield name.removeprefix(begin), value
