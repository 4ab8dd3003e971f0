"""From rows to what a loss sees, the model's outputs of one micro-batch beside the columns of its mini-batch, and the
call of the loss, which may be the user's.

Shapes: R response tokens of a micro-batch, N its samples, in row order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.rows import NO_VALUES, FloatArray, Rows
from plait.dataflow import Column, Level, Node
from plait.errors import RunError
from plait.models.outputs import Outputs
from plait.policy.packing import MicroBatch
from plait.training.loss_batch import MicroBatchLoss, Responses
from plait.training.token_means import MiniBatchTotals, TokenMeans
from plait.training.trainer_settings import SampleSettings
from plait.user_code import CALL_LIMIT_S, UserCode, is_users, saying_where, title_of
from plait.user_draws import drawing


@dataclass(frozen=True)
class LossCall:
    """What a call trains a role by, or evaluates it by: a loss, and what it reads of the rows."""

    loss: Callable[..., Tensor]
    """`loss(batch, **columns)`, see `plait.algorithms.losses.LossBatch`."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Argument of the loss → column of the rows, or of `batch_values`. SAMPLE columns are spread to tokens, a BATCH
    column is a scalar tensor, which lies on the host, or an array."""
    mask: Column | None = None
    """TOKEN column of the rows, 1.0 where a token is trained, 0.0 where not; None: all are."""
    whole_groups: bool = False
    """Never split the samples of one prompt over mini-batches or micro-batches."""
    batch_values: Mapping[Column, FloatArray] = field(default_factory=dict)
    """BATCH column → value for the whole batch, which belongs to no rows."""
    temperature: float | None = None
    """That log-probs are taken at, 1 for samples that were given; None: the trainer's."""
    name: str | None = None
    """The call's in the flow, prefix of the action ids; None: `{role}.train`, or `{role}.evaluate`."""

    @classmethod
    def of(
        cls, node: Node, *, batch_values: Mapping[Column, FloatArray] = NO_VALUES, temperature: float | None = None
    ) -> LossCall:
        """What a TRAIN node says, its rows being those that it keeps."""
        assert node.fn is not None, f"{node.call} has no loss"
        return cls(
            loss=node.fn,
            columns=node.loss_columns,
            mask=node.mask,
            whole_groups=node.training.whole_groups,
            batch_values=batch_values,
            temperature=temperature,
            name=node.call,
        )


@dataclass(frozen=True)
class LossTerm:
    """A loss that optimizer steps are by, alone or in a sum with others, and the rows that it is over: `epochs` passes
    over `mini_batches` mini-batches, one for each step."""

    rows: Rows
    call: LossCall
    mini_batches: int = 1
    epochs: int = 1


class MiniBatch:
    """The rows of one loss of an optimizer step, or of one evaluation, with the denominators of their loss.

    Args:
        role: whose model it is for; in messages and in front of metrics.
        noise: of what a loss of the user's own draws, with the samples that it is called for; None: it is left alone.

    Raises:
        RunError: the mask holds something other than 0 and 1.
    """

    def __init__(
        self, rows: Rows, call: LossCall, role: str, samples: SampleSettings, noise: str | None = None
    ) -> None:
        self.rows = rows
        self.call = call
        self.role = role
        self.temperature = call.temperature or samples.temperature
        self.mask_R = mask_of(rows, call.mask, role)
        self.totals = MiniBatchTotals.of(rows, samples.max_response_tokens, self.mask_R)
        self.means = TokenMeans(self.totals.tokens)
        self._noise = noise if is_users(call.loss) else None

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

        def tensor(values: FloatArray, device: torch.device | str = like_R.device) -> Tensor:
            return uploaded(values, like_R.dtype, device)

        def column_R(column: Column) -> Tensor:
            match column.level:
                case Level.TOKEN:
                    return tensor(rows.columns[column][places])
                case Level.SAMPLE:
                    return tensor(np.repeat(rows.columns[column][members], lengths))
                case Level.BATCH:
                    value = self.call.batch_values[column]
                    # One number stays on the host: a loss may ask whether it is 0, and products take it from there.
                    return tensor(value) if np.ndim(value) else tensor(value, "cpu")

        ids = [(rows.samples[i].prompt.uid, rows.samples[i].index) for i in members]
        responses = Responses(
            lengths.tolist(),
            tensor(rows.sampling_logprobs[places], "cpu"),
            None if self.mask_R is None else tensor(self.mask_R[places], "cpu"),
            ids,
            self.call.whole_groups,
        )
        batch = MicroBatchLoss(outputs, responses, self.totals, self.means, role=self.role)
        if outputs.entropies_R is not None:
            batch.log(f"{self.role}/entropy", outputs.entropies_R)
        arguments = {name: column_R(column) for name, column in self.call.columns.items()}
        with nullcontext() if self._noise is None else drawing(f"{self._noise} {ids[:1]}"):
            return loss_share(self.call.loss, batch, arguments, needs_gradient=needs_gradient)

    def backward(self, share: Tensor) -> None:
        """Add the gradient of a `share` of the loss, a scalar.

        Raises:
            RunError: a backward of the user's own raises, or the loss has written over what the backward reads.
        """
        loss = self.call.loss
        with UserCode(f"the backward of the loss `{title_of(loss)}`", RunError, users=is_users(loss)):
            share.backward()


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


def loss_share(
    loss: Callable[..., Tensor], batch: MicroBatchLoss, columns: Mapping[str, Tensor], *, needs_gradient: bool = True
) -> Tensor:
    """Call the loss and check what it returns, a scalar.

    Args:
        columns: TOKEN and SAMPLE columns [R], BATCH columns in the shape of their value; all in the loss's dtype.

    Raises:
        RunError: it raises; or what it returns is not a scalar tensor of real numbers that (where a gradient is needed)
            depends on what the model computed.
    """
    title = title_of(loss)
    with UserCode(f"the loss `{title}`", RunError, users=is_users(loss), limit_s=CALL_LIMIT_S):
        share = loss(batch, **columns)
    if wrong := _wrong(share, title, needs_gradient):
        raise saying_where(RunError(wrong), loss)
    return share


def _wrong(share: Any, title: str, needs_gradient: bool) -> str | None:
    expected = f"the loss `{title}` must return a scalar tensor of real numbers (see batch.aggregate)"
    if not isinstance(share, Tensor):
        return f"{expected}, found {type(share).__name__} {share!r:.80}"
    if share.shape != () or not share.dtype.is_floating_point:
        return f"{expected}, found one of shape {tuple(share.shape)} and dtype {share.dtype}"
    if needs_gradient and not share.requires_grad:
        return (
            f"the loss `{title}` has no gradient: it depends neither on batch.logprobs, batch.entropies or "
            "batch.logprobs_at (a language model) nor on batch.values or batch.scores (a scalar model)"
        )
    return None
