"""What a SCORE call asks of a model, and the numbers of its rows as micro-batches bring them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from plait.data.host_device import read
from plait.data.rows import FloatArray, Rows
from plait.dataflow import Asked, Level, Score, Top
from plait.errors import RunError
from plait.models.model import Model
from plait.models.outputs import Outputs, Said
from plait.policy.packing import MicroBatch


@dataclass(frozen=True)
class ScoredOutput:
    """One of the outputs of a model, as scores of rows."""

    name: Said
    level: Level
    """What there is a number for: a response token, or a sample."""
    pick: Callable[[Outputs], Tensor | None]
    top: Top | None = None
    """The likeliest tokens that are asked for; None: one number of each token or sample is."""

    def require(self, model: Model, role: str, call: str) -> None:
        """Raises RunError where a model of this kind has no such output."""
        if self.name not in model.says:
            raise RunError(f"{call}: role `{role}` is {model.kind}, which has {' and '.join(model.says)}")


_OUTPUTS = {
    Score.LOGPROBS: ScoredOutput(Said.LOGPROBS, Level.TOKEN, lambda outputs: outputs.logprobs_R),
    Score.ENTROPIES: ScoredOutput(Said.ENTROPIES, Level.TOKEN, lambda outputs: outputs.entropies_R),
    Score.VALUES: ScoredOutput(Said.VALUES, Level.TOKEN, lambda outputs: outputs.values_R),
    Score.SCORE: ScoredOutput(Said.SCORES, Level.SAMPLE, lambda outputs: outputs.scores_N),
}


def output_of(what: Asked) -> ScoredOutput:
    """The output that a SCORE call asks for."""
    if isinstance(what, Top):
        return ScoredOutput(Said.TOP_LOGPROBS, Level.TOKEN, lambda outputs: outputs.top, what)
    return _OUTPUTS[what]


class ScoredRows:
    """The scores of rows in their own order, whatever the order in which micro-batches compute them.

    Args:
        num_micros: micro-batches that are to come.
    """

    def __init__(self, rows: Rows, output: ScoredOutput, num_micros: int) -> None:
        self._rows = rows
        self._taken: list[tuple[MicroBatch, Tensor]] = []
        self._left = num_micros
        self._output = output
        self._order = rows.order
        width = None if output.top is None else output.top.width
        self.values: FloatArray = np.zeros(rows.shape_of(output.level, width))
        """[rows.num_tokens], [rows.num_tokens, width] or [len(rows)] float64, on the host; 0 until the last micro-batch
        has come, and for rows that none of them had."""

    def take(self, micro: MicroBatch, outputs: Outputs) -> None:
        """Keep what the model said of a micro-batch, whose samples are counted in the order of `Rows.ordered`. It stays
        on the device: the host goes on to the next one while this one is computed. With the last one all are read, so
        that its action has the wait for the device; of many numbers per token the ones before with each, as they would
        fill the device."""
        scores = self._output.pick(outputs)
        assert scores is not None, f"the model has no {self._output.name}"
        self._left -= 1
        if self._output.top is not None:
            self._read()
        self._taken.append((micro, scores))
        if not self._left:
            self._read()

    def _read(self) -> None:
        taken, self._taken = self._taken, []
        for (micro, _), numbers in zip(taken, read([scores for _, scores in taken]), strict=True):
            positions = [self._order[i] for i in micro.samples]
            places = positions if self._output.level is Level.SAMPLE else self._rows.token_places(positions)
            self.values[places] = numbers
