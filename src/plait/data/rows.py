"""Rows: samples and the columns over them, on the controller's side (NumPy float64).

Shapes: N samples, R response tokens of all of them together, in sample order. A SAMPLE column is [N]; a TOKEN column
is flat, [R] or [R, its width], and `offsets` say where each sample's part begins. No padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.data.lineage import Key, Meeting
from plait.data.records import Sample
from plait.dataflow.graph import Column, Level
from plait.policy.packing import LEAST_ROOT, SampleSize, common_length, root_of

FloatArray = NDArray[np.float64]

NO_VALUES: Mapping[Column, FloatArray] = MappingProxyType({})
"""No columns for the batch."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples with the columns computed so far, each under the graph's own `Column`. Immutable."""

    samples: tuple[Sample, ...]
    columns: Mapping[Column, FloatArray] = field(default_factory=dict)
    root_tokens: int = 0
    """First tokens of the prompts that are the same in all, and were read alike, as far as it was looked at
    (`with_root`)."""

    def __post_init__(self) -> None:
        ids = {(sample.prompt.uid, sample.index) for sample in self.samples}
        assert len(ids) == len(self.samples), "two rows hold the same sample"
        for column, values in self.columns.items():
            expected = self.shape_of(column.level, column.width)
            assert values.shape == expected, f"column {column}: expected shape {expected}, found {values.shape}"
            assert values.dtype == np.float64, f"column {column}: expected float64, found {values.dtype}"

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[N + 1]: sample i's tokens are offsets[i] … offsets[i + 1] of a TOKEN column."""
        lengths = np.array([len(sample.token_ids) for sample in self.samples], dtype=np.int64)
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])

    @property
    def num_tokens(self) -> int:
        """R, response tokens."""
        return int(self.offsets[-1])

    @cached_property
    def groups(self) -> Mapping[int, tuple[int, ...]]:
        """Prompt uid → positions of its samples, in sample-index order; uids in order of first appearance."""
        groups: dict[int, list[int]] = {}
        for position, sample in enumerate(self.samples):
            groups.setdefault(sample.prompt.uid, []).append(position)
        return {uid: tuple(sorted(rows, key=lambda i: self.samples[i].index)) for uid, rows in groups.items()}

    def places(self, meeting: Meeting) -> Mapping[Key, tuple[int, ...]]:
        """See `Meeting.places`."""
        if meeting not in self._places:
            self._places[meeting] = meeting.places(self.samples)
        return self._places[meeting]

    @cached_property
    def _places(self) -> dict[Meeting, Mapping[Key, tuple[int, ...]]]:
        return {}

    @cached_property
    def sampling_logprobs(self) -> FloatArray:
        """[R]: what the sampling engine recorded; NaN for given samples, which were not sampled."""
        parts = [sample.logprobs or (np.nan,) * len(sample.token_ids) for sample in self.samples]
        flat = [logprob for part in parts for logprob in part]
        assert len(flat) == self.num_tokens, "a sample has not one log-prob per response token"
        return np.array(flat, dtype=np.float64)

    def shape_of(self, level: Level, width: int | None = None) -> tuple[int, ...]:
        assert level is not Level.BATCH, "a value for the whole batch is no column of rows"
        places = len(self) if level is Level.SAMPLE else self.num_tokens
        return (places,) if width is None else (places, width)

    def with_column(self, column: Column, values: ArrayLike) -> Rows:
        """The same rows with one column more, cast to float64."""
        return replace(self, columns={**self.columns, column: np.asarray(values, dtype=np.float64)})

    def with_root(self) -> Rows:
        """The same rows with the root of their prompts: the tokens that all prompts begin with, which each forward then
        computes once (`packed`).

        If samples record the experts of their tokens, the root ends before the first token for which their records
        differ (weights or roundings have changed between them). So the result of a group does not depend on the other
        groups."""
        prompts = {sample.prompt.uid: sample.prompt.token_ids for sample in self.samples}
        root = root_of(prompts.values())
        if root and any(sample.experts is not None for sample in self.samples):
            root = min(root, _read_alike(self.samples))
        return replace(self, root_tokens=root if root >= LEAST_ROOT else 0)

    def token_places(self, positions: Sequence[int]) -> NDArray[np.int64]:
        """Places in a TOKEN column of the tokens of these samples, sample after sample: [their tokens]."""
        parts = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in positions]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def select(self, positions: Sequence[int]) -> Rows:
        """The rows at these positions, in this order, with all their columns."""
        rows = np.asarray(positions, dtype=np.int64)
        tokens = self.token_places(positions)
        columns = {c: v[rows] if c.level is Level.SAMPLE else v[tokens] for c, v in self.columns.items()}
        return Rows(tuple(self.samples[i] for i in positions), columns, self.root_tokens)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Positions by prompt (uids ascending) and sample index: the order that no scheduling can change."""
        key = [(sample.prompt.uid, sample.index) for sample in self.samples]
        return tuple(sorted(range(len(self)), key=key.__getitem__))

    def ordered(self) -> Rows:
        """Rows in the order of `order`."""
        return self.select(self.order)


def _read_alike(samples: Sequence[Sample]) -> int:
    """First tokens of prompts that went to the same experts, as all samples say; 0 where one of them says none."""
    told = {None if sample.experts is None else sample.experts.prompt for sample in samples}
    prompts = [prompt for prompt in told if prompt is not None]
    if len(prompts) < len(told):
        return 0
    width = max(map(len, prompts)) // max(len(sample.prompt.token_ids) for sample in samples)
    return common_length(prompts) // width


def sizes_of(rows: Rows) -> list[SampleSize]:
    """The size of each sample, as packing sees it."""
    root = rows.root_tokens
    return [SampleSize(s.prompt.uid, len(s.prompt.token_ids) - root, s.num_tokens, root) for s in rows.samples]
