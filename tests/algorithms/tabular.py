"""A whole training run without a model: the flow of an algorithm over a table of logits, one row per state and place.

The graph is the real one, COMPUTE nodes run through `data.rows.evaluate`, losses through `MicroBatchLoss`. What is
simple here is the policy: token t of a response to state s has the logits table[s, t], whatever came before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows, evaluate, spread_to
from plait.dataflow import CallKind, Level, Node, trace
from plait.policy.packing import draw_mini_batches
from plait.training.loss_batch import MicroBatchLoss, MiniBatchTotals, TokenMeans

Reward = Callable[[int, tuple[int, ...]], float]
"""(state, response) → reward."""


class TabularRun:
    """Trains a table [states, places, tokens] by plain gradient descent whose rate falls to 0."""

    def __init__(
        self, flow: Any, options: Any, table: np.ndarray, reward: Reward, *, samples_per_prompt: int, seed: int = 0
    ) -> None:
        self.flow = trace(flow, roles=("actor", "ref", "reward"), options=options)
        self.table = torch.tensor(table, dtype=torch.float64, requires_grad=True)
        self.ref = torch.tensor(table, dtype=torch.float64)
        self.reward = reward
        self.samples_per_prompt = samples_per_prompt
        self.rng = np.random.default_rng(seed)

    @property
    def probabilities(self) -> np.ndarray:
        return self.table.detach().softmax(-1).numpy()

    def train(self, steps: int, rate: float) -> np.ndarray:
        """The probabilities after it."""
        for step in range(steps):
            tables: dict[int, Rows] = {}
            for node in self.flow.nodes:
                self._run(node, tables, step, rate * (1 - step / steps))
        return self.probabilities

    def _run(self, node: Node, tables: dict[int, Rows], step: int, rate: float) -> None:
        rows = tables.get(node.rows, Rows(()))
        match node.kind:
            case CallKind.GENERATE:
                tables[node.id] = self._generate(node)
                return
            case CallKind.TRAIN:
                self._update(node, tables, step, rate)
                return
            case CallKind.SCORE if node.role == "reward":
                values = [self.reward(s.prompt.uid, s.token_ids) for s in rows.samples]
            case CallKind.SCORE:
                values = self._logprobs(self.table.detach() if node.role == "actor" else self.ref, rows).numpy()
            case CallKind.COMPUTE:
                values = evaluate(node, tables)
        tables[node.rows] = rows.with_column(node.outputs[0], values)

    def _generate(self, node: Node) -> Rows:
        probabilities = self.probabilities
        count = node.options["samples_per_prompt"] or self.samples_per_prompt
        samples = []
        for state, places in enumerate(probabilities):
            prompt = Prompt(state, "", (state,))
            for index in range(count):
                if node.options["greedy"]:
                    tokens = tuple(int(place.argmax()) for place in places)
                else:
                    tokens = tuple(int((self.rng.random() > place.cumsum()).sum()) for place in places)
                logprobs = tuple(float(np.log(place[t])) for place, t in zip(places, tokens, strict=True))
                samples.append(Sample(prompt, index, tokens, logprobs, "", FinishReason.STOP))
        rows = Rows(tuple(samples))
        return rows.with_column(node.outputs[0], rows.sampling_logprobs)

    def _update(self, node: Node, tables: dict[int, Rows], step: int, rate: float) -> None:
        rows = tables[node.rows]
        for column in node.inputs.values():
            if column.rows != node.rows:
                rows = rows.with_column(column, spread_to(column, tables[column.rows], rows, node.call))
        ids = [(s.prompt.uid, s.index) for s in rows.samples]
        for epoch in range(node.options["epochs"]):
            for members in draw_mini_batches(ids, node.options["mini_batches"], seed=0, step=step, epoch=epoch):
                self._descend(node, rows.select(members), rate)

    def _descend(self, node: Node, rows: Rows, rate: float) -> None:
        lengths = np.diff(rows.offsets).tolist()
        columns = {
            name: torch.tensor(
                rows.columns[column] if column.level is Level.TOKEN else np.repeat(rows.columns[column], lengths)
            )
            for name, column in node.inputs.items()
        }
        logprobs_R = self._logprobs(self.table, rows)
        totals = MiniBatchTotals.of(rows, self.table.shape[1])
        batch = MicroBatchLoss(logprobs_R, logprobs_R, logprobs_R, lengths, totals, TokenMeans(totals.tokens))
        assert node.fn is not None
        (gradient,) = torch.autograd.grad(node.fn(batch, **columns), self.table)
        with torch.no_grad():
            self.table -= rate * gradient

    def _logprobs(self, table: torch.Tensor, rows: Rows) -> torch.Tensor:
        states = [s.prompt.uid for s in rows.samples for _ in s.token_ids]
        places = [t for s in rows.samples for t in range(len(s.token_ids))]
        tokens = [token for s in rows.samples for token in s.token_ids]
        return table.log_softmax(-1)[states, places, tokens]
