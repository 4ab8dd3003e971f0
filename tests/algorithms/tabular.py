"""A whole training run without a model: the flow of an algorithm over tables.

The graph is the real one, COMPUTE nodes run through `data.computing.evaluate`, losses through `MicroBatchLoss`. What is
simple here are the models. A policy is a table of logits [states, places, tokens]: token t of a response to state s has
the logits table[s, t], whatever came before. A scalar model (critic, trained reward) is a table of values [states,
prefixes]: one number for each beginning of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plait.data.computing import evaluate, spread_to
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, Column, Level, Node, Score, trace
from plait.models.outputs import Outputs
from plait.policy.packing import draw_mini_batches
from plait.training.loss_batch import MicroBatchLoss, Responses
from plait.training.token_means import MiniBatchTotals, TokenMeans
from tests.algorithms.flows import ROLES

Reward = Callable[[int, tuple[int, ...]], float]
"""(state, response) → reward."""
Example = tuple[int, int, int, tuple[int, ...], tuple[float, ...]]
"""A given sample: state, prompt uid, index, response, which of its tokens are trained."""


class TabularRun:
    """Trains the tables by plain gradient descent whose rate falls to 0.

    Args:
        scores: role that is a function → reward. Other scalar roles are tables that begin at 0.
        given: the data set, all of it in every step.
        scalar_rates: role that is a scalar table → its rate, which does not fall.
    """

    def __init__(
        self,
        flow: Any,
        options: Any,
        table: np.ndarray,
        scores: Mapping[str, Reward] | None = None,
        *,
        samples_per_prompt: int = 1,
        given: Sequence[Example] = (),
        scalar_rates: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.flow = trace(flow, roles=ROLES, options=options)
        self.table = torch.tensor(table, dtype=torch.float64, requires_grad=True)
        self.ref = torch.tensor(table, dtype=torch.float64)
        states, places, tokens = table.shape
        self.prefixes = sum(tokens**length for length in range(places + 1))
        self.scalars = {
            role: torch.zeros(states, self.prefixes, dtype=torch.float64, requires_grad=True)
            for role in ("critic", "cost_critic", "reward")
        }
        self.scores = scores or {}
        self.given = given
        self.scalar_rates = scalar_rates or {}
        self.samples_per_prompt = samples_per_prompt
        self.rng = np.random.default_rng(seed)
        self.carried: dict[int, np.ndarray] = {}
        self.batch: dict[Column, np.ndarray] = {}
        self.history: list[dict[str, float]] = []
        """Numbers for the whole batch of each step, and what losses logged in its last mini-batch."""

    @property
    def probabilities(self) -> np.ndarray:
        return self.table.detach().softmax(-1).numpy()

    def train(self, steps: int, rate: float) -> np.ndarray:
        """The probabilities after it."""
        for step in range(steps):
            tables: dict[int, Rows] = {}
            self.batch, following = {}, {}
            self.history.append({})
            for node in self.flow.nodes:
                if node.kind is CallKind.BECOMES:
                    following[node.carried] = self.batch[node.next_value]
                else:
                    self._run(node, tables, step, rate * (1 - step / steps))
            self.carried |= following
            self.history[-1] |= {c.name: float(v) for c, v in self.batch.items() if v.ndim == 0}
        return self.probabilities

    def _run(self, node: Node, tables: dict[int, Rows], step: int, rate: float) -> None:
        rows = tables.get(node.rows, Rows(()))
        match node.kind:
            case CallKind.GENERATE:
                tables[node.id] = self._generate(node)
                return
            case CallKind.READ:
                tables[node.id] = self._read(node)
                return
            case CallKind.CARRIED:
                start = np.asarray(node.start, dtype=np.float64)
                self.batch[node.outputs[0]] = self.carried.get(node.id, start)
                return
            case CallKind.TRAIN:
                if step >= node.training.after:
                    self._update(node, tables, step, rate)
                return
            case CallKind.SCORE:
                values = self._score(node, rows)
            case CallKind.COMPUTE:
                values = evaluate(node, tables, self.batch)
        column = node.outputs[0]
        if column.level is Level.BATCH:
            self.batch[column] = values
        else:
            tables[node.rows] = rows.with_column(column, values)

    def _score(self, node: Node, rows: Rows) -> Any:
        assert node.role is not None
        if node.scoring is Score.LOGPROBS:
            return self._logprobs(self.table.detach() if node.role == "actor" else self.ref, rows).numpy()
        if node.scoring is Score.SCORE and node.role in self.scores:
            return [self.scores[node.role](state_of(s), s.token_ids) for s in rows.samples]
        values_R, scores_N = self._values_and_scores(self.scalars[node.role].detach(), rows)
        return (values_R if node.scoring is Score.VALUES else scores_N).numpy()

    def _generate(self, node: Node) -> Rows:
        probabilities = self.probabilities
        count = node.generation.num_samples(self.samples_per_prompt)
        samples = []
        for state, places in enumerate(probabilities):
            prompt = Prompt(state, "", (state,))
            for index in range(count):
                if node.generation.greedy:
                    tokens = tuple(int(place.argmax()) for place in places)
                else:
                    tokens = tuple(int((self.rng.random() > place.cumsum()).sum()) for place in places)
                logprobs = tuple(float(np.log(place[t])) for place, t in zip(places, tokens, strict=True))
                samples.append(Sample(prompt, index, tokens, logprobs, "", FinishReason.STOP))
        rows = Rows(tuple(samples))
        columns = (rows.sampling_logprobs, np.ones(len(rows)), np.zeros(len(rows)))
        for column, values in zip(node.outputs, columns, strict=True):
            rows = rows.with_column(column, values)
        return rows

    def _read(self, node: Node) -> Rows:
        samples = tuple(
            Sample(Prompt(uid, "", (state,)), index, tokens, (), "", FinishReason.STOP)
            for state, uid, index, tokens, _ in self.given
        )
        rows = Rows(samples).with_column(node.outputs[0], np.concatenate([trained for *_, trained in self.given]))
        return rows.with_column(node.outputs[1], np.zeros(len(samples)))

    def _update(self, node: Node, tables: dict[int, Rows], step: int, rate: float) -> None:
        rows = tables[node.rows]
        for column in node.inputs.values():
            if column.rows != node.rows and column.level is not Level.BATCH:
                rows = rows.with_column(column, spread_to(column, tables[column.rows], rows, node))
        ids = [(s.prompt.uid, s.index) for s in rows.samples]
        how = node.training
        for epoch in range(how.epochs):
            for members in draw_mini_batches(
                ids, how.mini_batches, seed=0, step=step, epoch=epoch, whole_groups=how.whole_groups
            ):
                self._descend(node, rows.select(members), rate)

    def _descend(self, node: Node, rows: Rows, rate: float) -> None:
        lengths = np.diff(rows.offsets).tolist()
        columns = {name: self._tensor(column, rows, lengths) for name, column in node.inputs.items()}
        mask_R = columns.pop("mask", None)
        scalar = node.role in self.scalars
        table = self.scalars[node.role] if scalar and node.role is not None else self.table
        values_R, scores_N = self._values_and_scores(table, rows) if scalar else (None, None)
        logprobs_R = None if scalar else self._logprobs(table, rows)
        mask = None if mask_R is None else mask_R.numpy()
        totals = MiniBatchTotals.of(rows, self.table.shape[1], mask)
        means = TokenMeans(totals.tokens)
        batch = MicroBatchLoss(
            Outputs(logprobs_R, logprobs_R, None if scalar else self._likeliest(table, rows), values_R, scores_N),
            Responses(
                lengths,
                torch.zeros(rows.num_tokens, dtype=torch.float64),
                mask_R,
                [(s.prompt.uid, s.index) for s in rows.samples],
            ),
            totals,
            means,
        )
        assert node.fn is not None
        (gradient,) = torch.autograd.grad(node.fn(batch, **columns), table)
        with torch.no_grad():
            table -= (self.scalar_rates.get(node.role or "", rate) if scalar else rate) * gradient
        self.history[-1] |= means.result()

    def _tensor(self, column: Column, rows: Rows, lengths: list[int]) -> torch.Tensor:
        if column.level is Level.BATCH:
            return torch.tensor(self.batch[column])
        values = rows.columns[column]
        return torch.tensor(values if column.level is Level.TOKEN else np.repeat(values, lengths))

    def _logprobs(self, table: torch.Tensor, rows: Rows) -> torch.Tensor:
        return table.log_softmax(-1)[_said(rows)]

    def _likeliest(self, table: torch.Tensor, rows: Rows) -> torch.Tensor:
        said = _said(rows)
        return table[said] == table.amax(-1)[said[:2]]

    def _values_and_scores(self, table: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        before = [(state_of(s), self.prefix(s.token_ids[:t])) for s in rows.samples for t in range(len(s.token_ids))]
        ends = [(state_of(s), self.prefix(s.token_ids)) for s in rows.samples]
        values_R, scores_N = (table[tuple(zip(*places, strict=True))] for places in (before, ends))
        return values_R, scores_N

    def prefix(self, tokens: tuple[int, ...]) -> int:
        """Column of a scalar table: shorter beginnings first."""
        base = self.table.shape[2]
        place = 0
        for token in tokens:
            place = place * base + token
        return sum(base**length for length in range(len(tokens))) + place


def state_of(sample: Sample) -> int:
    return sample.prompt.token_ids[0]


def _said(rows: Rows) -> tuple[list[int], list[int], list[int]]:
    """State, place and token of each response token."""
    states = [state_of(s) for s in rows.samples for _ in s.token_ids]
    places = [t for s in rows.samples for t in range(len(s.token_ids))]
    return states, places, [token for s in rows.samples for token in s.token_ids]
