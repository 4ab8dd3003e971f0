"""From rows to what a loss sees: the model's outputs of one micro-batch, beside the columns of its mini-batch.

Shapes: R response tokens of a micro-batch, N its samples, in row order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.data.packed import PackedBatch
from plait.data.rows import FloatArray, Rows
from plait.dataflow import Column, Level
from plait.errors import RunError
from plait.models.language_model import LanguageModel
from plait.models.scalar_model import ScalarModel
from plait.policy.packing import MicroBatch
from plait.training.loss_batch import MicroBatchLoss, MiniBatchTotals, TokenMeans, loss_share


@dataclass(frozen=True)
class Outputs:
    """What a model computed for one micro-batch: a language model the first three, a scalar model the last two."""

    logprobs_R: Tensor | None = None
    entropies_R: Tensor | None = None
    likeliest_R: Tensor | None = None
    """bool: whether no token is likelier than the one that stands there."""
    values_R: Tensor | None = None
    scores_N: Tensor | None = None

    @classmethod
    def of(
        cls, model: LanguageModel | ScalarModel, batch: PackedBatch, temperature: float, *, checkpoint: bool = False
    ) -> Outputs:
        """One forward. The temperature applies to log-probs alone."""
        if isinstance(model, LanguageModel):
            likeliest_R = torch.empty_like(batch.targets_R, dtype=torch.bool)
            return cls(*model.logprobs(batch, temperature, checkpoint=checkpoint, likeliest_R=likeliest_R), likeliest_R)
        values_R, scores_N = model.values_and_scores(batch, checkpoint=checkpoint)
        return cls(values_R=values_R, scores_N=scores_N)

    @classmethod
    def of_hidden(
        cls, model: LanguageModel | ScalarModel, batch: PackedBatch, hidden_TH: Tensor, temperature: float
    ) -> Outputs:
        """From what the last stage of a pipeline made of the batch."""
        if isinstance(model, LanguageModel):
            likeliest_R = torch.empty_like(batch.targets_R, dtype=torch.bool)
            return cls(*model.logprobs_of(hidden_TH, batch, temperature, likeliest_R=likeliest_R), likeliest_R)
        values_R, scores_N = model.values_and_scores_of(hidden_TH, batch)
        return cls(values_R=values_R, scores_N=scores_N)

    @property
    def per_token(self) -> Tensor:
        """[R]: log-probs or values."""
        found = self.values_R if self.logprobs_R is None else self.logprobs_R
        assert found is not None, "a forward gives log-probs or values"
        return found

    @property
    def num_nonfinite(self) -> int:
        """Numbers among log-probs, or values and scores, that are infinite or NaN."""
        parts = (self.logprobs_R, self.values_R, self.scores_N)
        return sum(int((~part.detach().isfinite()).sum()) for part in parts if part is not None)


@dataclass(frozen=True)
class LossCall:
    """What a call that trains or evaluates asks of each of its mini-batches."""

    role: str
    loss: Callable[..., Tensor]
    columns: Mapping[str, Column]
    """Argument of the loss → column of the rows, or of `batch_values`."""
    batch_values: Mapping[Column, FloatArray]
    """Values for the whole batch, which belong to no rows."""
    mask: Column | None
    """TOKEN column of the rows, 1.0 where a token is trained, 0.0 where not; None: all are."""
    whole_groups: bool
    temperature: float
    max_response_tokens: int


class MiniBatch:
    """The rows of one optimizer step, or of one evaluation, with the denominators of their loss.

    Raises:
        RunError: the mask holds something other than 0 and 1.
    """

    def __init__(self, rows: Rows, call: LossCall) -> None:
        self.rows = rows
        self.call = call
        self.mask_R = mask_of(rows, call.mask, call.role)
        self.totals = MiniBatchTotals.of(rows, call.max_response_tokens, self.mask_R)
        self.means = TokenMeans(self.totals.tokens)

    def share(self, micro: MicroBatch, outputs: Outputs, *, needs_gradient: bool) -> Tensor:
        """The loss of one micro-batch, a scalar that is its share of the mini-batch's; logs what is logged of it.

        Args:
            outputs: of the model, for the samples of `micro`.

        Raises:
            RunError: the loss returns what is not a loss, or asks for what there is not.
        """
        like_R, rows = outputs.per_token, self.rows
        members = list(micro.samples)
        lengths = np.diff(rows.offsets)[members]
        places = rows.token_places(members)

        def tensor(values: FloatArray) -> Tensor:
            return torch.as_tensor(values, dtype=like_R.dtype, device=like_R.device)

        def column_R(column: Column) -> Tensor:
            match column.level:
                case Level.TOKEN:
                    return tensor(rows.columns[column][places])
                case Level.SAMPLE:
                    return tensor(np.repeat(rows.columns[column][members], lengths))
                case Level.BATCH:
                    return tensor(self.call.batch_values[column])

        batch = MicroBatchLoss(
            outputs.logprobs_R,
            outputs.entropies_R,
            tensor(rows.sampling_logprobs[places]),
            lengths.tolist(),
            self.totals,
            self.means,
            values_R=outputs.values_R,
            scores_N=outputs.scores_N,
            likeliest_R=outputs.likeliest_R,
            mask_R=None if self.mask_R is None else tensor(self.mask_R[places]),
            samples=[(rows.samples[i].prompt.uid, rows.samples[i].index) for i in members],
            role=self.call.role,
        )
        if outputs.entropies_R is not None:
            batch.log(f"{self.call.role}/entropy", outputs.entropies_R)
        arguments = {name: column_R(column) for name, column in self.call.columns.items()}
        return loss_share(self.call.loss, batch, arguments, needs_gradient=needs_gradient)


def mask_of(rows: Rows, mask: Column | None, role: str) -> FloatArray | None:
    """[rows.num_tokens] of 1.0 and 0.0; None: every token is trained.

    Raises:
        RunError: the column holds something else.
    """
    if mask is None:
        return None
    assert mask.level is Level.TOKEN, f"a mask has one number per token, not {mask}"
    values_R = rows.columns[mask]
    if other := values_R[(values_R != 0) & (values_R != 1)][:1].tolist():
        raise RunError(
            f"{role}.train(mask=…): expected 1 where a token is trained and 0 where it is not, found {other[0]} in "
            f"{mask}; weigh tokens in the loss instead"
        )
    return values_R
