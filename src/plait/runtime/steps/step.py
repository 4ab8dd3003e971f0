"""What the calls of one training step have made so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plait.data.examples import Given
from plait.data.records import Prompt, Sample
from plait.data.replaced_prompts import WrittenPrompts
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Column, Dataflow, Node
from plait.dataflow.graph import added_scores
from plait.policy.step import Key
from plait.rewards.scores import MODEL, GroupScores
from plait.runtime.steps.partial_rollout import PartialRollout


@dataclass
class StepState:
    """Tables of rows, values for the whole batch, what reward functions said, and metrics. Grows call by call."""

    step: int
    """Steps done before this one."""
    prompts: Sequence[Prompt] = ()
    drawn: int = 0
    """Prompts of the run that were drawn up to this batch, those included that a rollout asked for."""
    given: Mapping[str, Sequence[Given]] = field(default_factory=dict)
    """`examples` and `pairs` of the step, from the data set."""
    carried: Mapping[str, FloatArray] = field(default_factory=dict)
    """Values kept from the step before, by name; one that is absent starts."""
    next_carried: dict[str, FloatArray] = field(default_factory=dict)
    """What they are in the next step."""
    tables: dict[int, Rows] = field(default_factory=dict)
    """Id of each GENERATE or READ node → its rows."""
    born: dict[int, Rows] = field(default_factory=dict)
    """The same before any sample was left out, for want of a reply or a reward: what models score, whichever ended
    first."""
    growing: dict[int, PartialRollout] = field(default_factory=dict)
    """Id of each GENERATE node that has begun → its samples as far as they are finished, of further rounds as well."""
    begun: dict[int, dict[Key, Sample]] = field(default_factory=dict)
    """Id of each GENERATE node that was halted → its samples that are unfinished and have said something."""
    sent: dict[int, set[int]] = field(default_factory=dict)
    """Id of each such node → uids of the prompts whose groups are with the reward functions."""
    written: dict[int, WrittenPrompts] = field(default_factory=dict)
    """Id of each PROMPT node → what it has written."""
    made: dict[int, Sequence[Prompt]] = field(default_factory=dict)
    """Id of each GENERATE node that answers written prompts → these."""
    batch: dict[Column, FloatArray] = field(default_factory=dict)
    """Values for the whole batch."""
    generated: dict[int, Rows] = field(default_factory=dict)
    """Id of each GENERATE node → all that it generated, before samples without a reward, or groups, were left out."""
    scored: set[int] = field(default_factory=set)
    """Ids of the SCORE nodes of models whose column is there."""
    tickets: dict[tuple[str, int], int] = field(default_factory=dict)
    """(role, ticket of a group at its functions) → id of the SCORE node that sent it."""
    scores: dict[int, list[GroupScores]] = field(default_factory=dict)
    """Id of each SCORE node of reward functions → what its functions said, group by group."""
    model_scores: dict[int, dict[str, float]] = field(default_factory=dict)
    """Id of each SCORE node of a reward model → sample uid → its score."""
    metrics: dict[str, float] = field(default_factory=dict)
    said_by: dict[str, int] = field(default_factory=dict)
    """Metric → id of the node that said it (`graph_order`); -1: it was there before any."""

    def begin_table(self, node: int, rows: Rows) -> None:
        """The rows of a GENERATE or READ node are there."""
        self.tables[node] = self.born[node] = rows

    def add_scored(self, columns: Sequence[Column], scored: Rows, values: FloatArray) -> None:
        """Columns of rows of which some may have been left out since they were scored.

        Args:
            values: of all of them, side by side where they are several.
        """
        ends = np.cumsum([column.numbers for column in columns])[:-1]
        parts = np.split(values, ends, axis=1) if len(columns) > 1 else [values]
        of_scored = Rows(scored.samples, dict(zip(columns, parts, strict=True)))
        rows = self.tables[columns[0].rows]
        if rows.samples != scored.samples:
            places = {sample.uid: i for i, sample in enumerate(scored.samples)}
            of_scored = of_scored.select([places[sample.uid] for sample in rows.samples])
        for column, of_column in of_scored.columns.items():
            self.add(column, of_column)

    def add(self, column: Column, values: FloatArray) -> None:
        """A column of rows that are there."""
        self.tables[column.rows] = self.tables[column.rows].with_column(column, values)

    def count(self, name: str, number: float) -> None:
        self.metrics[name] = self.metrics.get(name, 0) + number


def model_calls(node: Node) -> dict[str, int]:
    """Name of each reward model's scores → id of the call that computes them: `node` itself (also if it has no model),
    and the calls that are added for further models."""
    return {MODEL: node.id, **added_scores(node)}


def by_model(node: Node, state: StepState) -> dict[str, Mapping[str, float]]:
    """Name of the scores of each model of a reward → sample uid → its score, before weights."""
    return {name: state.model_scores[call] for name, call in model_calls(node).items() if call in state.model_scores}


def reward_calls(flow: Dataflow, state: StepState) -> tuple[Node, ...]:
    """The calls of rewards that have scored samples in the step; not those of their further models."""
    nodes = flow.of_kind(CallKind.SCORE)
    further = {call for node in nodes for call in added_scores(node).values()}
    return tuple(node for node in nodes if node.id in {*state.scores, *state.model_scores} - further)
